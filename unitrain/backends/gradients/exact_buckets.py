"""Division of gradients into the buckets and blocks of an exact reduction (see `exact_reduction`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

BLOCK_ELEMENTS = 4096  # number of elements that are rounded to multiples of the same quantum


@dataclass(frozen=True)
class NumberFormat:
    """The floating-point and integer dtypes of a reduction, and the IEEE 754 parameters of the floating-point dtype.

    The absolute values of integer sums are at most 2^sum_bits.
    """

    value_dtype: torch.dtype
    integer_dtype: torch.dtype
    sum_bits: int
    mantissa_bits: int
    exponent_bias: int

    def powers_of_two(self, exponents: Tensor) -> Tensor:
        """Return 2^e for each of the int32 `exponents`. `torch.pow` is not used, because it may be inexact."""
        return ((exponents.to(self.integer_dtype) + self.exponent_bias) << self.mantissa_bits).view(self.value_dtype)


SINGLE = NumberFormat(torch.float32, torch.int32, 30, 23, 127)
DOUBLE = NumberFormat(torch.float64, torch.int64, 62, 52, 1023)


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of a flattened parameter. `first_block` is the index of their first block within the
    bucket."""

    parameter_index: int
    start: int
    stop: int
    first_block: int

    @property
    def num_blocks(self) -> int:
        """Number of blocks; the last one may have fewer elements."""
        return -(-(self.stop - self.start) // BLOCK_ELEMENTS)


@dataclass
class Bucket:
    """Pieces that are exchanged together. `parameters_starting_here` are the indices of the parameters whose first
    piece is in this bucket."""

    number_format: NumberFormat
    pieces: list[Piece] = field(default_factory=list)
    parameters_starting_here: list[int] = field(default_factory=list)
    num_blocks: int = 0


def divide_into_buckets(parameters: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Return the buckets in the order in which a backward pass usually completes them: the last parameters first. Large
    parameters are divided among several buckets."""
    buckets, unfilled = list[Bucket](), dict[NumberFormat, Bucket]()
    for parameter_index, parameter in reversed(list(enumerate(parameters))):
        number_format = DOUBLE if parameter.dtype in (torch.float64, torch.complex128) else SINGLE
        max_blocks = max(1, bucket_bytes // number_format.integer_dtype.itemsize // BLOCK_ELEMENTS)
        count, start = parameter.numel() * (2 if parameter.is_complex() else 1), 0
        while True:
            bucket = unfilled.get(number_format)
            if bucket is None or bucket.num_blocks >= max_blocks:
                bucket = unfilled[number_format] = Bucket(number_format)
                buckets.append(bucket)
            stop = min(count, start + (max_blocks - bucket.num_blocks) * BLOCK_ELEMENTS)
            piece = Piece(parameter_index, start, stop, bucket.num_blocks)
            bucket.pieces.append(piece)
            bucket.num_blocks += piece.num_blocks
            if start == 0:
                bucket.parameters_starting_here.append(parameter_index)
            if stop == count:
                break
            start = stop
    return buckets
