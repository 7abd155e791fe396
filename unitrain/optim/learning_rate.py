"""Scaling of learning rates with the global batch size.

"linear" and the warm-up: Goyal et al., Accurate, Large Minibatch SGD (arXiv 1706.02677), sections 2.1 and 2.2;
"sqrt": Krizhevsky, One weird trick (arXiv 1404.5997), section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch.optim import Optimizer
from typing_extensions import Self

from unitrain.config import LrScaling, TrainConfig
from unitrain.errors import ConfigError

_RELATIVE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class LearningRateFactor:
    """Factor by which learning rates are multiplied during the optimizer step only.

    The optimizer, its schedulers and checkpoints keep the user's learning rates, which apply to `reference_batch_size`.
    The factor is therefore never applied twice, even if a run resumes with a different number of ranks.
    """

    policy: LrScaling
    reference_batch_size: int | None
    global_batch_size: int
    warmup_steps: int

    @classmethod
    def from_config(cls, config: TrainConfig, global_batch_size: int | None) -> Self | None:
        """Return the factor for `config`; None if `lr_scaling` is "none". Raises ConfigError if the global batch size
        is unknown."""
        if config.lr_scaling == "none":
            return None
        if global_batch_size is None:
            raise ConfigError(
                f"TrainConfig.lr_scaling {config.lr_scaling!r} needs the number of samples per step, which is unknown "
                "if the dataset or a batch_sampler creates the batches. "
                "Use lr_scaling='none', and scale the learning rate of the optimizer yourself."
            )
        return cls(config.lr_scaling, config.reference_batch_size, global_batch_size, config.warmup_steps)

    @property
    def full_factor(self) -> float:
        """The factor after the warm-up."""
        if self.policy == "none" or self.reference_batch_size is None:
            return 1.0
        ratio = self.global_batch_size / self.reference_batch_size
        return ratio if self.policy == "linear" else math.sqrt(ratio)

    def factor_at(self, step: int) -> float:
        """Return the factor after `step` completed steps. It increases linearly from 1 to `full_factor` during the
        warm-up.
        """
        return (
            1.0 + (self.full_factor - 1.0) * min(1.0, step / self.warmup_steps)
            if self.warmup_steps
            else self.full_factor
        )

    @contextmanager
    def scaled_rates(self, optimizer: Optimizer, step: int) -> Iterator[None]:
        """Context manager in which the learning rates of `optimizer` are multiplied by `factor_at(step)`."""
        factor = self.factor_at(step)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def __str__(self) -> str:
        warmup = f", reached after {self.warmup_steps} steps" if self.warmup_steps else ""
        return (
            f"learning rates x {self.full_factor:g} ({self.policy} scaling from batch size "
            f"{self.reference_batch_size} to {self.global_batch_size}){warmup}"
        )


def next_learning_rate(optimizer: Optimizer, factor: LearningRateFactor | None, step: int) -> dict[str, float]:
    """Return {"learning_rate": the rate of the first parameter group in the step after `step` completed steps}, or an
    empty dictionary if the optimizer computes its learning rates itself."""
    rate = optimizer.param_groups[0]["lr"]
    return {} if rate is None else {"learning_rate": float(rate) * (1.0 if factor is None else factor.factor_at(step))}


def learning_rate_checksum(optimizer: Optimizer) -> float:
    """Return a number for the comparison of learning rates between ranks: the sum of the learning rates, each
    multiplied by the number of its parameter group (from 1). A learning rate of None counts as 0."""
    rates = (0.0 if group["lr"] is None else float(group["lr"]) for group in optimizer.param_groups)
    return sum(group_number * rate for group_number, rate in enumerate(rates, start=1))


def check_same_learning_rates(checksums: Sequence[float], step: int) -> None:
    """Raise ConfigError if the results of `learning_rate_checksum` differ between ranks, after `step` steps."""
    for rank, checksum in enumerate(checksums):
        # The mathematical functions of different hosts may round differently.
        if checksum != checksums[0] and not math.isclose(checksum, checksums[0], rel_tol=_RELATIVE_TOLERANCE):
            if math.isnan(checksum) and math.isnan(checksums[0]):
                continue
            raise ConfigError(
                f"The learning rates of rank 0 and rank {rank} differ after step {step}: their weighted sums over the "
                f"parameter groups are {checksums[0]:g} and {checksum:g}. Build the same scheduler on every rank, and "
                "let callbacks change the learning rate on every rank."
            )
