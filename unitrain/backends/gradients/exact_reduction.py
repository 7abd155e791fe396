"""Exact sums of gradients: the result does not depend on the number of processes, on the transport, or on the order.

For each parameter, the ranks agree on a quantum, a power of two, from the largest absolute value of all gradients. Each
gradient is rounded to an integer multiple of the quantum, and the integers are added as int64. Integer addition is
exact, so neither the grouping of the gradients nor the algorithm of the allreduce affects the sum. Because the quantum
is chosen from the gradients of the same step, every value fits, even if gradients grow by any factor.

The quantum is at most 2^(ceil(log2 V) - 49) times the largest absolute value, for V logical ranks. Float32 values have
24 significant bits, so most values are not rounded at all.

Rounding and conversion to integers take one addition: C + x, in float64, has the mantissa of C plus the multiple of the
quantum that is nearest to x, if C is 1.5 * 2^52 quanta and x is less than 2^51 quanta. (Demmel and Nguyen, Fast
reproducible floating-point summation, 2013, use the same addition.)
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unitrain.backends.base import ReduceOp
from unitrain.errors import ModelError

# Starts to reduce an int64 tensor over processes in place, and returns a function that waits.
StartAllreduce = Callable[[Tensor, ReduceOp], Callable[[], None]]

_SUM_BITS = 50  # sums are less than 2^50 quanta
_CHUNK_ELEMENTS = 1 << 15  # elements that are processed together in the CPU's cache
_MAX_IN_FLIGHT = 2
# Exponents of the largest value for which the constant C and the quantum are normal float64 numbers.
_MIN_EXPONENT, _MAX_EXPONENT = -900, 900
_ABSENT = -1
_MAX_SHOWN = 5

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of a parameter, at `offset` in the buffer of a bucket."""

    parameter: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class _InFlight:
    pieces: Sequence[_Piece]
    buffer: Tensor
    total: Tensor  # the used part of the buffer
    wait: Callable[[], None]


class ExactReduction:
    """Computes the mean over logical ranks of the gradients of `parameters`, exactly except for roundings that do not
    depend on the number of processes.

    Args:
        names: names of the parameters, for errors.
        parameters: the parameters.
        logical_ranks: number of logical ranks.
        is_first: whether this is process 0.
        bucket_bytes: maximum size of the messages.
        start_allreduce: see StartAllreduce; None in a single process.
        allows_unused: whether a logical rank may leave a parameter without a gradient.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        *,
        logical_ranks: int,
        is_first: bool,
        bucket_bytes: int,
        start_allreduce: StartAllreduce | None,
        allows_unused: bool,
    ) -> None:
        self._names, self._parameters, self._logical_ranks = list(names), list(parameters), logical_ranks
        self._is_first, self._start_allreduce, self._allows_unused = is_first, start_allreduce, allows_unused
        self._bucket_elements = max(1, bucket_bytes // 8)
        self._value_bits = _SUM_BITS - max(0, logical_ranks - 1).bit_length()
        self._device = self._parameters[0].device
        self._chunk = torch.empty(_CHUNK_ELEMENTS, dtype=torch.float64, device=self._device)
        self._buffers: list[Tensor] = []

    def mean(self, terms: Sequence[Gradients], *, is_complete: bool) -> list[Tensor | None]:
        """Return the mean gradient of each parameter; None for parameters without a gradient on any logical rank.

        `terms` are the gradients of this process's logical ranks; they are overwritten. All processes call it. If
        `is_complete` is False in any process, or if a gradient is missing, a ModelError is raised in all of them.
        """
        self._check_layouts(terms)
        largest = self._largest_values(terms, is_complete=is_complete)
        means = [None if bits == _ABSENT else self._create_mean(number, terms) for number, bits in enumerate(largest)]
        constants: list[float] = []
        for bits, mean in zip(largest, means, strict=True):
            constants.append(0.0 if mean is None else _rounding_constant(bits, self._value_bits))
            if mean is not None and constants[-1] == 0.0:
                mean.zero_()
            elif mean is not None and math.isnan(constants[-1]):
                mean.fill_(math.nan)
        flat_terms = [[None if one is None else _flat(one) for one in term] for term in terms]
        flat_means = [None if mean is None else _flat(mean) for mean in means]
        reduced = [number for number, constant in enumerate(constants) if constant > 0.0]
        in_flight: list[_InFlight] = []
        for pieces in self._divide(reduced):
            if len(in_flight) == _MAX_IN_FLIGHT:
                self._finish(in_flight.pop(0), constants, flat_means)
            in_flight.append(self._start(pieces, constants, flat_terms))
        for bucket in in_flight:
            self._finish(bucket, constants, flat_means)
        for mean, flat_mean in zip(means, flat_means, strict=True):
            if mean is not None and flat_mean is not None and flat_mean.data_ptr() != mean.data_ptr():
                _real(mean).copy_(flat_mean.view(_real(mean).shape))
        return means

    def _check_layouts(self, terms: Sequence[Gradients]) -> None:
        for name, *gradients in zip(self._names, *terms, strict=True):
            for gradient in gradients:
                if gradient is not None and gradient.layout != torch.strided:
                    raise ModelError(
                        f"The gradient of {name!r} has layout {gradient.layout}, which logical ranks do not support. "
                        "Use nn.Embedding(..., sparse=False)."
                    )

    def _largest_values(self, terms: Sequence[Gradients], *, is_complete: bool) -> list[int]:
        """Return the bits of the largest absolute value of each parameter's gradients over all processes, as float64;
        -1 for parameters without a gradient.

        The bits of positive numbers have the order of the numbers, and those of NaN are the largest.
        """
        count = len(self._parameters)
        own = torch.full((count,), _ABSENT, dtype=torch.int64)
        found, values = list[int](), list[Tensor]()
        for number, gradients in enumerate(zip(*terms, strict=True)):
            present = [_real(gradient) for gradient in gradients if gradient is not None]
            if present:
                found.append(number)
                values.append(_largest_absolute_value(present))
        if found:
            own[found] = torch.stack(values).cpu().view(torch.int64)
        missing = [
            int(parameter.requires_grad and any(term[number] is None for term in terms))
            for number, parameter in enumerate(self._parameters)
        ]
        exchanged = torch.cat([own, torch.tensor([*missing, not is_complete], dtype=torch.int64)]).to(self._device)
        if self._start_allreduce is not None:
            self._start_allreduce(exchanged, "max")()
        result: list[int] = exchanged.tolist()
        if result[-1]:
            raise ModelError(
                "The gradients were reduced before every logical rank had run its backward passes. Iterate over a "
                "ShardedLoader with the same logical_ranks, and use backend.no_sync(model) unless loader.ends_step."
            )
        unused = [name for name, is_missing in zip(self._names, result[count:-1], strict=True) if is_missing]
        if unused and not self._allows_unused:
            more = f" and {len(unused) - _MAX_SHOWN} more" if len(unused) > _MAX_SHOWN else ""
            raise ModelError(
                f"{len(unused)} parameters got no gradient on some logical rank: {', '.join(unused[:_MAX_SHOWN])}"
                f"{more}. Use all parameters in every loss, or allow unused parameters: "
                "backend.distributed_model(model, find_unused_parameters=True)."
            )
        return result[:count]

    def _create_mean(self, number: int, terms: Sequence[Gradients]) -> Tensor:
        """Return the tensor for the mean of a parameter: the memory of its first gradient if possible."""
        parameter = self._parameters[number]
        for term in terms:
            gradient = term[number]
            if gradient is not None and gradient.is_contiguous() and parameter.is_contiguous():
                return gradient
        return torch.empty_like(parameter, requires_grad=False)

    def _divide(self, parameters: Sequence[int]) -> list[list[_Piece]]:
        """Return the pieces of each bucket. Large parameters are divided."""
        buckets, free = list[list[_Piece]](), 0
        for number in parameters:
            parameter = self._parameters[number]
            count, start = parameter.numel() * (2 if parameter.is_complex() else 1), 0
            while start < count:
                if not free:
                    buckets.append([])
                    free = self._bucket_elements
                stop = min(count, start + free)
                buckets[-1].append(_Piece(number, start, stop, self._bucket_elements - free))
                free, start = free - (stop - start), stop
        return buckets

    def _start(
        self, pieces: Sequence[_Piece], constants: Sequence[float], terms: Sequence[Sequence[Tensor | None]]
    ) -> _InFlight:
        """Add up the gradients of this process, and start to reduce the sums."""
        used = pieces[-1].offset + pieces[-1].stop - pieces[-1].start
        buffer = self._buffers.pop() if self._buffers else None
        if buffer is None or buffer.numel() < used:
            buffer = torch.empty(used, dtype=torch.int64, device=self._device)
        total = buffer[:used]
        for piece in pieces:
            gradients = [one for term in terms if (one := term[piece.parameter]) is not None]
            for start in range(piece.start, piece.stop, _CHUNK_ELEMENTS):
                stop = min(piece.stop, start + _CHUNK_ELEMENTS)
                first = piece.offset + start - piece.start
                self._add_up(
                    total[first : first + stop - start],
                    [gradient[start:stop] for gradient in gradients],
                    constants[piece.parameter],
                )
        wait = _do_not_wait if self._start_allreduce is None else self._start_allreduce(total, "sum")
        return _InFlight(pieces, buffer, total, wait)

    def _add_up(self, total: Tensor, gradients: Sequence[Tensor], constant: float) -> None:
        """Set `total` to the sum of `gradients` in quanta; in process 0, plus the bits of `constant`."""
        bits = _float_bits(constant)
        as_float = total.view(torch.float64)
        if not gradients:
            total.fill_(bits if self._is_first else 0)
            return
        as_float.copy_(gradients[0]).add_(constant)
        if not self._is_first:
            total.sub_(bits)
        for gradient in gradients[1:]:
            chunk = self._chunk[: len(total)]
            chunk.copy_(gradient).add_(constant)
            total.add_(chunk.view(torch.int64).sub_(bits))

    def _finish(self, bucket: _InFlight, constants: Sequence[float], means: Sequence[Tensor | None]) -> None:
        """Wait for the sums of a bucket, and write the means."""
        bucket.wait()
        total = bucket.total.view(torch.float64)
        for piece in bucket.pieces:
            mean, constant = means[piece.parameter], constants[piece.parameter]
            assert mean is not None
            for start in range(piece.start, piece.stop, _CHUNK_ELEMENTS):
                stop = min(piece.stop, start + _CHUNK_ELEMENTS)
                first = piece.offset + start - piece.start
                mean[start:stop].copy_(total[first : first + stop - start].sub_(constant).div_(self._logical_ranks))
        self._buffers.append(bucket.buffer)


def _rounding_constant(largest_bits: int, value_bits: int) -> float:
    """Return the constant C for gradients up to the value with these bits; 0.0 for 0, and NaN if it is not finite."""
    (largest,) = struct.unpack("<d", struct.pack("<q", largest_bits))
    if largest == 0.0:
        return 0.0
    if not math.isfinite(largest):
        return math.nan
    exponent = math.frexp(largest)[1]  # largest < 2^exponent
    if exponent > _MAX_EXPONENT:
        return math.nan
    return math.ldexp(1.5, 52 + max(exponent, _MIN_EXPONENT) - value_bits)


def _float_bits(number: float) -> int:
    bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return bits


def _largest_absolute_value(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value as float64; NaN if there is a NaN."""
    largest = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        if tensor.numel():
            low, high = torch.aminmax(tensor)
            largest = torch.maximum(largest, torch.maximum(low.neg(), high).double())
    return largest.abs()  # clears the sign of a NaN


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements, [n], in the order of the indices, as a view if `tensor` is contiguous."""
    return _real(tensor).reshape(-1)


def _do_not_wait() -> None:
    """Do nothing: there is a single process."""
