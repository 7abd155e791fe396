"""Values of `local_sgd=`, the setting of low-communication training, and their formulas.

In each step, every rank updates its own copy w of the weights with the gradient of its own samples, or with the mean
gradient of the ranks in its group. After every `steps` steps, the ranks synchronize. Let x be the weights after the
previous synchronization, which are equal on all ranks. The outer gradient is g = mean(x - w), and the outer optimizer
is SGD with Nesterov momentum, as in torch.optim.SGD:

    v = outer_momentum * v + g,    x = x - outer_lr * (g + outer_momentum * v),    w = x

With the defaults, x becomes mean(w).

`compression` is the format in which outer gradients are communicated. Let e be the error of a rank, the part of its
earlier outer gradients that it has not communicated yet, and c the error of the mean. `round` converts to the format:

    "none"      g = mean(x - w), in the dtype of the weights, or float32 for half precision
    "bf16"      q = round(x - w + e),  e = x - w + e - q,  m = sum(q) / N + c,  g = round(m),  c = m - g. The sum is
                computed in float32, in rank order.
    "int8"      like "bf16", with the format int8: each block of BLOCK consecutive elements is divided by its scale, the
                largest absolute value of the block / 127, and rounded to the nearest integer. Scales are in float32.

A rank sends 2 (N - 1) / N times the size of the weights in the format per synchronization. The results are the same on
every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from unitrain import validation
from unitrain.errors import ConfigError

OuterCompression = Literal["none", "bf16", "int8"]
BLOCK = 1024


@dataclass(frozen=True, kw_only=True)
class LocalSGDConfig:
    """Low-communication training: every rank trains independently, and the ranks synchronize after every `steps` steps.

    With the defaults, a synchronization averages the weights over ranks (local SGD; Stich, arXiv 1805.09767). With an
    outer optimizer, SGD with learning rate `outer_lr` and Nesterov momentum `outer_momentum`, the method is DiLoCo
    (Douillard et al., arXiv 2311.08105), which uses `outer_lr=0.7, outer_momentum=0.9` and AdamW for the local steps.

    `compression` is the format in which outer gradients are communicated: "none", "bf16" or "int8", the latter two with
    error feedback. In the first `warmup_steps` steps, the ranks instead average their gradients in every step, as in
    synchronous training (post-local SGD; Lin et al., arXiv 1808.07217).

    With `synchronous_ranks`, groups of this number of consecutive ranks average their gradients in every step, so their
    weights are equal; "host" groups the ranks of each host. Backends without subgroups raise UnsupportedError. Raises
    ConfigError for an invalid value.
    """

    steps: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    compression: OuterCompression = "none"
    warmup_steps: int = 0
    synchronous_ranks: int | Literal["host"] = 1

    def __post_init__(self) -> None:
        validation.check_integer("LocalSGDConfig.steps", self.steps, 1, "Use LocalSGDConfig(steps=25)")
        validation.check_integer("LocalSGDConfig.warmup_steps", self.warmup_steps, 0, "Use 0 to start with local steps")
        validation.check_positive("LocalSGDConfig.outer_lr", self.outer_lr, "Use outer_lr=0.7 with outer_momentum=0.9")
        momentum: Any = self.outer_momentum
        if not validation.is_finite_number(momentum) or not 0 <= momentum < 1:
            raise ConfigError(
                f"LocalSGDConfig.outer_momentum must be a number from 0 to below 1, got "
                f"{validation.describe_value(momentum)}. Use outer_momentum=0.9, or 0 to average the weights."
            )
        validation.check_choice("LocalSGDConfig.compression", self.compression, get_args(OuterCompression))
        if not (isinstance(self.synchronous_ranks, str) and self.synchronous_ranks == "host"):
            fix = "Use synchronous_ranks='host', or 1 to train every rank independently"
            validation.check_integer("LocalSGDConfig.synchronous_ranks", self.synchronous_ranks, 1, fix)

    @property
    def averages_weights(self) -> bool:
        """Whether a synchronization sets the weights to their mean over ranks, without compression."""
        return self.outer_lr == 1 and self.outer_momentum == 0 and self.compression == "none"


def read_local_sgd(local_sgd: int | LocalSGDConfig, setting: str) -> LocalSGDConfig:
    """Return `local_sgd`, with a number replaced by LocalSGDConfig(steps=number). Raises ConfigError for an invalid
    value."""
    if isinstance(local_sgd, LocalSGDConfig):
        return local_sgd
    fix = "Use a number of steps, or unitrain.LocalSGDConfig(steps=25, outer_lr=0.7, outer_momentum=0.9)"
    return LocalSGDConfig(steps=validation.check_integer(setting, local_sgd, 1, fix))
