"""The configuration of low-communication training (`local_sgd=`), and the formulas that it selects.

In each step, every rank updates its own copy w of the weights with the gradient of its own samples, or with the mean
gradient of the ranks in its group. After every `steps` steps, the ranks synchronize. Let x be the weights after the
previous synchronization, which are equal on all ranks. The outer gradient of a rank is x - w. The outer optimizer is
SGD with Nesterov momentum, as in torch.optim.SGD, and uses the mean of the outer gradients, g = mean(x - w):

    v = outer_momentum * v + g,    x = x - outer_lr * (g + outer_momentum * v),    w = x

With the defaults, x becomes mean(w).

`compression` is the format in which outer gradients are communicated. Let e be the error of a rank, the part of its
earlier outer gradients that it has not communicated yet, and c the error of the mean. `round` converts to the format:

    "none"      g = mean(x - w), in the dtype of the weights, or float32 for half precision
    "bf16"      q = round(x - w + e),  e = x - w + e - q,  m = sum(q) / N + c,  g = round(m),  c = m - g. The sum is
                computed in rank order, in float64 for weights in float64, otherwise in float32.
    "int8"      like "bf16", with the format int8: each block of BLOCK_ELEMENTS elements is divided by its scale, the
                largest absolute value of the block / 127, and rounded to the nearest integer. Scales are in float32.

The ranks of a synchronous group have equal weights, so N is the number of groups. The first rank of each group
communicates with the other groups, and broadcasts the result in its group. If groups have different numbers of ranks,
x - w is multiplied by the number of ranks in the group divided by the mean number of ranks per group. The result is
then the mean over all ranks, so every sample has the same weight.

With `fragments` = P > 1, the parameters are divided into P fragments in the order of the model, with about the same
number of bytes. Fragment p = 1, ..., P is synchronized after step n if n mod `steps` = (p * `steps` // P) mod `steps`.
With `overlap_steps` = t > 0, x - w is computed after step n, and the ranks train while it is transferred. After step
n + t, they wait for g, update v and x with it, and merge x into their weights:

    w = mixing * w + (1 - mixing) * x

In `steps` steps, each rank that communicates outer gradients sends 2 (N - 1) / N times the size of the weights in the
format that `compression` selects. x is the same on every rank; with `overlap_steps`, w may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from unitrain import validation
from unitrain.errors import ConfigError

OuterCompression = Literal["none", "bf16", "int8"]
BLOCK_ELEMENTS = 1024


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
    weights are equal. "host" groups the ranks of each host, and a sequence such as (4, 2) contains the number of ranks
    of each group. Backends without subgroups raise UnsupportedError.

    With `fragments`, the parameters are divided into this number of fragments, which are synchronized in different
    steps. With `overlap_steps`, a transfer of outer gradients is overlapped with this number of steps. After the
    transfer, each rank replaces its weights w with `mixing * w + (1 - mixing) * x`, where x are the synchronized
    weights (Streaming DiLoCo; Douillard et al., arXiv 2501.18512). Raises ConfigError for an invalid value.
    """

    steps: int
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    compression: OuterCompression = "none"
    warmup_steps: int = 0
    synchronous_ranks: int | Literal["host"] | Sequence[int] = 1
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.5

    def __post_init__(self) -> None:
        validation.check_integer("LocalSGDConfig.steps", self.steps, 1, "Use LocalSGDConfig(steps=25)")
        validation.check_integer("LocalSGDConfig.warmup_steps", self.warmup_steps, 0, "Use 0 to start with local steps")
        validation.check_positive("LocalSGDConfig.outer_lr", self.outer_lr, "Use outer_lr=0.7 with outer_momentum=0.9")
        momentum: Any = self.outer_momentum
        if not validation.is_finite_number(momentum) or not 0 <= momentum < 1:
            raise ConfigError(
                f"LocalSGDConfig.outer_momentum must be at least 0 and less than 1, got "
                f"{validation.describe_value(momentum)}. Use outer_momentum=0.9, or 0 to average the weights."
            )
        validation.check_choice("LocalSGDConfig.compression", self.compression, get_args(OuterCompression))
        self._check_synchronous_ranks()
        fix = f"Use fragments=1 to synchronize all parameters in the same step, or at most {self.steps}"
        validation.check_integer("LocalSGDConfig.fragments", self.fragments, 1, fix)
        fix = f"Use overlap_steps=0 to wait for each transfer, or at most {self.steps - 1}"
        validation.check_integer("LocalSGDConfig.overlap_steps", self.overlap_steps, 0, fix)
        for name, value, limit in (
            ("fragments", self.fragments, self.steps),
            ("overlap_steps", self.overlap_steps, self.steps - 1),
        ):
            if value > limit:
                raise ConfigError(
                    f"LocalSGDConfig.{name} must be at most {limit} with steps={self.steps}, got {value}. Use "
                    f"{name}={limit}, or more steps."
                )
        mixing: Any = self.mixing
        if not validation.is_finite_number(mixing) or not 0 <= mixing < 1:
            raise ConfigError(
                f"LocalSGDConfig.mixing must be at least 0 and less than 1, got {validation.describe_value(mixing)}. "
                "Use mixing=0.5, or 0 to replace the weights with the synchronized weights."
            )

    def _check_synchronous_ranks(self) -> None:
        given: Any = self.synchronous_ranks
        if isinstance(given, str) and given == "host":
            return
        name = "LocalSGDConfig.synchronous_ranks"
        fix = "Use synchronous_ranks='host', sizes of groups such as (4, 2), or 1 to train every rank independently"
        if isinstance(given, list | tuple) and given:
            for size in given:
                validation.check_integer(name, size, 1, fix)
            # Convert to a tuple, which is hashable, so that a list (from a file) and a tuple give equal configurations.
            object.__setattr__(self, "synchronous_ranks", tuple(given))
            return
        validation.check_integer(name, given, 1, fix)

    @property
    def averages_weights(self) -> bool:
        """Whether a synchronization sets all weights to their mean over ranks, without compression."""
        is_mean = self.outer_lr == 1 and self.outer_momentum == 0 and self.compression == "none"
        return is_mean and not self.is_streaming

    @property
    def is_streaming(self) -> bool:
        """Whether the parameters are synchronized in fragments or with overlapped transfers, so that a synchronization
        does not necessarily make all weights equal."""
        return self.fragments > 1 or self.overlap_steps > 0


def parse_local_sgd(local_sgd: int | LocalSGDConfig, argument_name: str) -> LocalSGDConfig:
    """Return `local_sgd`, with a number replaced by LocalSGDConfig(steps=number). Raises ConfigError for an invalid
    value. `argument_name` is the name of the argument in messages."""
    if isinstance(local_sgd, LocalSGDConfig):
        return local_sgd
    fix = "Use a number of steps, or unitrain.LocalSGDConfig(steps=25, outer_lr=0.7, outer_momentum=0.9)"
    return LocalSGDConfig(steps=validation.check_integer(argument_name, local_sgd, 1, fix))
