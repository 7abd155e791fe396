"""Values of `compression=` and their formulas, which are the same for every number of ranks.

With N ranks, each gradient g is replaced at the end of the backward pass by:

    "none"              mean(g)
    "fp16", "bf16"      round(sum(round(g / N))), where `round` converts to the nearest value in this format. On every
                        transport, values are transferred in this format, and summed in float32 in rank order. Values
                        outside the range of fp16 become infinite, as in an fp16 forward pass.
    PowerSGD            the low-rank product P Q^T for each compressed matrix, and mean(g) for other gradients.
                        "powersgd" stands for PowerSGD() with its default settings.

Gradients that are accumulated with `no_sync` are compressed once, after summation. The results are the same on every
rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from unitrain.errors import ConfigError, did_you_mean
from unitrain.validation import describe_value, is_finite_number

CompressionName = Literal["none", "fp16", "bf16", "powersgd"]


@dataclass(frozen=True, kw_only=True)
class PowerSGD:
    """Low-rank gradient compression with error feedback (Vogels et al., arXiv 1905.13727, algorithms 1 and 2).

    Each gradient is viewed as a matrix g of shape [first dim, product of the other dims]. Let e be the error, the part
    of earlier gradients that this rank has not communicated yet, and Q a matrix with `rank` columns that is equal on
    all ranks. A reduction computes M = g + e, P = orthonormal(mean(M orthonormal(Q))), Q = mean(M^T P), where `mean`
    averages over ranks and `orthonormal` orthonormalizes the columns of a matrix. The gradient becomes P Q^T on every
    rank, and e becomes M - P Q^T. The result depends only on the mean of e, so N ranks compute the same result as one
    rank with the global batch.

    The first `start_step` reductions compute mean(g). Afterwards, a gradient is compressed only if it has more than
    `min_compression_rate` times as many elements as P and Q together. Without `warm_start`, each reduction starts from
    a new random Q instead of the previous one. Without `error_feedback`, e is 0. A column of Q that is only rounding
    noise, for example because M has a lower rank, is replaced by a random column. All random numbers depend on `seed`,
    the index of the parameter in the model and, without `warm_start`, the number of the reduction. The computation uses
    the gradient's dtype, or float32 for half precision, and keeps up to two values of that dtype per element of a
    compressed gradient, in addition to the gradients.

    A compressed gradient that contains inf or nan becomes nan. If any gradient of a backward pass contains inf or nan,
    all e and Q remain unchanged; loss scaling then skips the step. A gradient that is zero on all ranks, for example
    because the parameter is unused, remains zero, and its e and Q do not change. Raises ConfigError for an invalid
    value.
    """

    rank: int = 2
    start_step: int = 1000
    min_compression_rate: float = 2.0
    warm_start: bool = True
    error_feedback: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("rank", 1), ("start_step", 0), ("seed", 0)):
            value: Any = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ConfigError(
                    f"PowerSGD.{name} must be an integer of at least {minimum}, got {describe_value(value)}. "
                    f"Use PowerSGD({name}={getattr(PowerSGD, name)})."
                )
        rate: Any = self.min_compression_rate
        if not is_finite_number(rate) or rate <= 0:
            raise ConfigError(
                f"PowerSGD.min_compression_rate must be a number above 0, got {describe_value(rate)}. "
                "Use PowerSGD(min_compression_rate=2)."
            )
        for name in ("warm_start", "error_feedback"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"PowerSGD.{name} must be True or False, got {describe_value(getattr(self, name))}. "
                    f"Use PowerSGD({name}=True)."
                )


Compression = CompressionName | PowerSGD


def resolve_compression(
    compression: Compression, setting: str = "compression"
) -> Literal["none", "fp16", "bf16"] | PowerSGD:
    """Return `compression`, with "powersgd" replaced by PowerSGD(). Raises ConfigError for an invalid value."""
    if isinstance(compression, PowerSGD):
        return compression
    choices = get_args(CompressionName)
    if not isinstance(compression, str) or compression not in choices:
        suggestion = did_you_mean(compression, choices) if isinstance(compression, str) else ""
        raise ConfigError(
            f"Unknown {setting} {describe_value(compression)}. {suggestion}Available: "
            f"{', '.join(choices)}, unitrain.PowerSGD(...)."
        )
    return PowerSGD() if compression == "powersgd" else compression
