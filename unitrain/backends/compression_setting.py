"""What gradients may be compressed by, as the user says it; rule 7 in `base.py` is what each of these computes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from unitrain.errors import ConfigError, did_you_mean

CompressionName = Literal["none", "fp16", "bf16", "powersgd"]


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Gradients as matrices of low rank, with error feedback (Vogels et al., arXiv 1905.13727, algorithms 1 and 2).

    Each gradient is a matrix g of shape [first dim, all others]. With e, what this rank has not sent yet, and Q, of
    `rank` columns and equal on all ranks: M = g + e, P = orthonormal(mean(M orthonormal(Q))), Q = mean(M^T P). The
    gradient of all ranks becomes P Q^T, and e becomes M - P Q^T. Only the means of e count, never how it is spread, so
    N ranks do what one with the whole batch would.

    The first `start_step` reductions send gradients whole, and so do always those with fewer than
    `min_compression_rate` times as many elements as P and Q have together. Without `warm_start` each reduction begins
    with a new random Q instead of the last one; without `error_feedback` e is 0. A column of Q that is rounding only,
    as after an M of a lower rank, is replaced by a random one. All random numbers follow from `seed`, the parameter's
    place in the model and, without `warm_start`, the number of the reduction. It is computed in the gradient's dtype,
    in float32 for those of half precision, and takes twice the memory of the compressed gradients.

    A reduction with an inf or nan in any gradient sends nan in its matrix, and leaves every e and Q as they were: such
    a step is not taken (loss scaling skips it). A gradient that is zero on all ranks stays zero and leaves its e and Q:
    so does a parameter that none has used. Raises ConfigError for a value that cannot be meant.
    """

    rank: int = 2
    start_step: int = 1000
    min_compression_rate: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 0), ("seed", 0)):
            value: Any = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(
                    f"PowerSGD.{name} must be a whole number of at least {least}, got {value!r}. "
                    f"Use PowerSGD({name}={getattr(PowerSGD, name)})."
                )
        rate: Any = self.min_compression_rate
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not (number and math.isfinite(rate) and rate > 0):
            raise ConfigError(
                f"PowerSGD.min_compression_rate must be a number above 0, got {rate!r}. "
                "Use PowerSGD(min_compression_rate=2)."
            )
        for name in ("warm_start", "error_feedback"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"PowerSGD.{name} must be True or False, got {getattr(self, name)!r}. Use PowerSGD({name}=True)."
                )


Compression = CompressionName | PowerSGD


def read_compression(
    compression: Compression, setting: str = "compression"
) -> Literal["none", "fp16", "bf16"] | PowerSGD:
    """Return what `compression` means, with "powersgd" as PowerSGD(). Raises ConfigError for what is none."""
    if isinstance(compression, PowerSGD):
        return compression
    choices = get_args(CompressionName)
    if compression not in choices:
        near = did_you_mean(str(compression), choices)
        raise ConfigError(
            f"Unknown {setting} {compression!r}. {near}Available: {', '.join(choices)}, unitrain.PowerSGD(...)."
        )
    return PowerSGD() if compression == "powersgd" else compression
