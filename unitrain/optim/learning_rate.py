"""The learning rate in relation to the global batch: one explicit policy, which cannot be applied twice.

"Linear" and the warm-up are Goyal et al., Accurate, Large Minibatch SGD (arXiv 1706.02677), sections 2.1 and 2.2;
"sqrt" is Krizhevsky, One weird trick (arXiv 1404.5997), section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from torch.optim import Optimizer

from unitrain.config import LrScaling, TrainConfig
from unitrain.errors import ConfigError


@dataclass(frozen=True)
class LearningRateFactor:
    """What learning rates are multiplied by while the optimizer steps, and only then.

    The optimizer, its schedulers and the checkpoint keep the user's own rates, those for batches of
    `reference_batch_size`. So nothing is multiplied twice, whoever resumes the run, and with however many ranks.
    """

    policy: LrScaling
    reference_batch_size: int | None
    global_batch_size: int
    warmup_steps: int

    @classmethod
    def asked_for(cls, config: TrainConfig, global_batch_size: int | None) -> Self | None:
        """Return what `config` asks for; None for "none". Raises ConfigError where nobody knows the global batch."""
        if config.lr_scaling == "none":
            return None
        if global_batch_size is None:
            raise ConfigError(
                f"TrainConfig.lr_scaling {config.lr_scaling!r} goes by the samples of a step, which nobody knows "
                "where the dataset or a batch_sampler makes whole batches. "
                "Use lr_scaling='none', and scale the rate that the optimizer is given."
            )
        return cls(config.lr_scaling, config.reference_batch_size, global_batch_size, config.warmup_steps)

    @property
    def full(self) -> float:
        """The factor after the warm-up."""
        if self.policy == "none" or self.reference_batch_size is None:
            return 1.0
        ratio = self.global_batch_size / self.reference_batch_size
        return ratio if self.policy == "linear" else math.sqrt(ratio)

    def at(self, step: int) -> float:
        """The factor of the step before which `step` steps are done: from 1, in equal parts, to the full one."""
        return 1.0 + (self.full - 1.0) * min(1.0, step / self.warmup_steps) if self.warmup_steps else self.full

    @contextmanager
    def applied(self, optimizer: Optimizer, step: int) -> Iterator[None]:
        """Inside it, `optimizer` has the multiplied rates."""
        factor = self.at(step)
        own = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate

    def __str__(self) -> str:
        warmup = f", reached after {self.warmup_steps} steps" if self.warmup_steps else ""
        return (
            f"learning rates x {self.full:g}: {self.policy} from batches of {self.reference_batch_size} to "
            f"{self.global_batch_size}{warmup}"
        )
