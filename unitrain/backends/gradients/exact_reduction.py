"""Exact sums of gradients, which do not depend on the number of processes, the transport, or the order of additions.

Gradients are divided into blocks. All processes compute the same quantum for a block, a power of two, from the largest
absolute value that the block has on any logical rank. Each element is rounded to an integer multiple of the quantum,
and the integers are added. Integer addition is exact, so neither the grouping of the gradients nor the algorithm of the
allreduce affects the sum. Because the quantum is computed from the gradients of the same step, the sums fit into the
integers, no matter how much the gradients have grown.

Gradients of float64 and complex128 are added as int64, all others as int32. The int32 messages have the size of float32
gradients, which is twice that of half-precision gradients. With V logical ranks and int32, the quantum of a block is at
least 2^(29 - ceil(log2 V)) times smaller than the largest value of the block, unless that value is below 2^-97 (about
6e-30).

A bucket is reduced by two allreduces: one of the maxima of its blocks, then one of the sums. Both usually start during
the backward pass: the maxima as soon as the gradients of the bucket are complete, and the sums as soon as the gradients
of the next bucket are complete. In the first step, all operations start at the end of the backward pass. With
`allows_unused`, or if the first reduced backward pass accumulated a gradient more than once, this also applies to later
steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unitrain.backends.base import ReduceOp
from unitrain.backends.gradients.end_of_backward import do_not_wait
from unitrain.backends.gradients.exact_buckets import BLOCK_ELEMENTS, Bucket, NumberFormat, Piece, divide_into_buckets
from unitrain.backends.tensors import as_real
from unitrain.errors import ModelError

# Starts an in-place allreduce of an integer tensor over processes, and returns its wait function.
StartAllreduce = Callable[[Tensor, ReduceOp], Callable[[], None]]

_CPU_TILE_BLOCKS = 16  # blocks that are processed together in the CPU's cache
_DEVICE_TILE_BLOCKS = 1024
_MAX_SUMS_IN_FLIGHT = 2
# Sentinels that replace the exponent of a block if all of its elements are zero, or if an element is inf or NaN.
_ALL_ZERO, _NOT_FINITE = -(2**20), 2**20
_MAX_SHOWN = 5

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class _SumInFlight:
    """The allreduce of a bucket's sums. `factors` contains, for each block, the factor that converts sums to means."""

    bucket: Bucket
    pieces: Sequence[Piece]
    buffer: Tensor
    total: Tensor  # the used part of the buffer
    factors: Tensor
    wait: Callable[[], None]


class _ParameterFlags(NamedTuple):
    """Whether a parameter has a gradient on any logical rank, whether it lacks one on any logical rank, whether it is
    trainable in any process, and whether it is frozen in any process."""

    is_present: bool
    is_missing: bool
    is_trainable: bool
    is_frozen: bool


class _StepFlags(NamedTuple):
    """Whether a logical rank has not run its backward passes, and whether a gradient was accumulated more than once."""

    is_incomplete: bool
    is_repeated: bool


class _Step:
    """The gradients and operations of one reduction. `other_gradients` contains the gradients of each logical rank of
    this process except the last one. `all_ranks_have_run` states whether all logical ranks of this process have run
    their backward passes."""

    def __init__(
        self,
        other_gradients: Sequence[Gradients],
        buckets: Sequence[Bucket],
        parameters: Sequence[Tensor],
        *,
        all_ranks_have_run: bool,
    ) -> None:
        count = len(parameters)
        self.other_gradients, self.all_ranks_have_run = other_gradients, all_ranks_have_run
        self.last_gradients: list[Tensor | None] = [None] * count  # of the last logical rank of this process
        # Frozen parameters get no gradients.
        self.num_pending_gradients = [  # by bucket
            len({piece.parameter_index for piece in bucket.pieces if parameters[piece.parameter_index].requires_grad})
            for bucket in buckets
        ]
        self.next_bucket = 0
        self.flat_gradients: dict[int, list[Tensor]] = {}
        self.maxima: dict[int, tuple[Tensor, Callable[[], None]]] = {}
        self.sums: list[_SumInFlight] = []
        self.means: list[Tensor | None] = [None] * count
        self.flat_means: dict[int, Tensor] = {}
        # Over all processes:
        self.parameter_flags = [_ParameterFlags(False, False, False, False)] * count
        self.step_flags = _StepFlags(False, False)

    def gradients(self, parameter_index: int) -> list[Tensor | None]:
        """Return the gradients of a parameter of all logical ranks of this process."""
        return [
            *(gradients_of_rank[parameter_index] for gradients_of_rank in self.other_gradients),
            self.last_gradients[parameter_index],
        ]


class ExactReduction:
    """Computes the mean over logical ranks of the gradients of `parameters`, exactly except for roundings that do not
    depend on the number of processes.

    Args:
        names: names of the parameters, for errors.
        parameters: the parameters.
        logical_ranks: number of logical ranks.
        bucket_bytes: maximum size of an allreduce in bytes, unless one block is larger.
        start_allreduce: starts an allreduce (see StartAllreduce); None in a single process.
        allows_unused: whether a logical rank may leave a parameter without a gradient.

    For each step, call `begin`, then `add` with the final gradients of the last logical rank, then `finish`. All
    processes use the same buckets in the same order, so it does not matter in which order they call `add`.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Tensor],
        *,
        logical_ranks: int,
        bucket_bytes: int,
        start_allreduce: StartAllreduce | None,
        allows_unused: bool,
    ) -> None:
        self._names, self._parameters, self._logical_ranks = list(names), list(parameters), logical_ranks
        self._start_allreduce, self._allows_unused = start_allreduce, allows_unused
        self._device = self._parameters[0].device
        self._tile_blocks = _CPU_TILE_BLOCKS if self._device.type == "cpu" else _DEVICE_TILE_BLOCKS
        self._buckets = divide_into_buckets(self._parameters, bucket_bytes)
        self._bucket_indices_by_parameter: list[list[int]] = [[] for _ in self._parameters]
        for index, bucket in enumerate(self._buckets):
            for piece in bucket.pieces:
                self._bucket_indices_by_parameter[piece.parameter_index].append(index)
        self._scratch: dict[torch.dtype, Tensor] = {}
        self._free_buffers: list[Tensor] = []
        # Whether gradients are final when they are added, so that `add` can start operations. None until the first step
        # has determined it; until then, `add` starts no operations.
        self._is_overlapped: bool | None = False if allows_unused else None
        self._times_added = [0] * len(self._parameters)
        self._step: _Step | None = None

    @property
    def is_active(self) -> bool:
        """Whether a step has begun and is not finished."""
        return self._step is not None

    def discard(self) -> None:
        """Discard the current step, if there is one."""
        self._step = None

    def begin(self, other_gradients: Sequence[Gradients], *, all_ranks_have_run: bool) -> None:
        """Begin a step. `other_gradients` contains the gradients of each logical rank of this process except the last
        one.

        `all_ranks_have_run` states whether all logical ranks of this process have run their backward passes. If it is
        False in any process, `finish` raises ModelError in all processes. The gradients may be overwritten by the
        result.
        """
        self._times_added = [0] * len(self._parameters)
        self._step = _Step(other_gradients, self._buckets, self._parameters, all_ranks_have_run=all_ranks_have_run)

    @torch.no_grad()
    def add(self, parameter_index: int, gradient: Tensor) -> None:
        """Add the final gradient of a parameter on the last logical rank of this process, and start the operations
        whose gradients are complete. Raises ModelError, in this process only, if the gradient is added twice in a step
        whose reduction overlaps with the backward pass."""
        step = self._step
        assert step is not None
        if self._is_overlapped is None:
            self._times_added[parameter_index] += 1
        if not self._is_overlapped:
            return
        if step.last_gradients[parameter_index] is not None:
            raise ModelError(
                f"The gradient of {self._names[parameter_index]!r} was accumulated twice in one backward pass, "
                "but only once in the first backward pass. With logical ranks, use torch.utils.checkpoint with "
                "use_reentrant=False, or "
                "backend.distributed_model(model, find_unused_parameters=True)."
            )
        step.last_gradients[parameter_index] = gradient
        for bucket_index in self._bucket_indices_by_parameter[parameter_index]:
            step.num_pending_gradients[bucket_index] -= 1
        while step.next_bucket < len(self._buckets) and not step.num_pending_gradients[step.next_bucket]:
            self._advance(step)

    @torch.no_grad()
    def finish(self, last_gradients: Gradients) -> list[Tensor | None]:
        """Return the mean gradient of each parameter, or None if no logical rank has a gradient of the parameter.

        `last_gradients` contains the gradients of the last logical rank of this process, including those that were
        added. All processes must call this method. If a logical rank has not run its backward passes, if a gradient is
        missing on any logical rank and `allows_unused` is False, or if processes have frozen different parameters,
        ModelError is raised in all processes. A sparse gradient raises ModelError in this process only.
        """
        step, self._step = self._step, None
        assert step is not None
        step.last_gradients = [
            added if added is not None else gradient
            for added, gradient in zip(step.last_gradients, last_gradients, strict=True)
        ]
        self._check_layouts(step)
        while step.next_bucket < len(self._buckets):
            self._advance(step)
        self._start_sum(step, len(self._buckets) - 1)
        while step.sums:
            self._finish_sum(step)
        self._raise_errors(step)
        if self._is_overlapped is None:
            self._is_overlapped = not step.step_flags.is_repeated
        for parameter_index, flat_mean in step.flat_means.items():
            mean = step.means[parameter_index]
            assert mean is not None
            if flat_mean.data_ptr() != mean.data_ptr():
                as_real(mean).copy_(flat_mean.view(as_real(mean).shape))
        return step.means

    def compute_mean(self, gradients: Sequence[Gradients], *, all_ranks_have_run: bool) -> list[Tensor | None]:
        """Return the mean gradient of each parameter over all logical ranks, without overlap with a backward pass.
        `gradients` contains the gradients of each logical rank of this process. See `begin` and `finish`."""
        self.begin(gradients[:-1], all_ranks_have_run=all_ranks_have_run)
        return self.finish(gradients[-1])

    def _check_layouts(self, step: _Step) -> None:
        for parameter_index, name in enumerate(self._names):
            for gradient in step.gradients(parameter_index):
                if gradient is not None and gradient.layout != torch.strided:
                    raise ModelError(
                        f"The gradient of {name!r} has layout {gradient.layout}, which logical ranks do not support. "
                        "Use nn.Embedding(..., sparse=False)."
                    )

    def _raise_errors(self, step: _Step) -> None:
        if step.step_flags.is_incomplete:
            raise ModelError(
                "The gradients were reduced before every logical rank had run its backward passes. Iterate over a "
                "ShardedLoader with the same logical_ranks, and use backend.no_sync(model) unless loader.ends_step."
            )
        for name, flags in zip(self._names, step.parameter_flags, strict=True):
            if flags.is_trainable and flags.is_frozen:
                raise ModelError(
                    f"Parameter {name!r} is trained by some processes and frozen by others. Freeze and unfreeze the "
                    "same parameters in every process: parameter.requires_grad_(...)."
                )
        unused = [name for name, flags in zip(self._names, step.parameter_flags, strict=True) if flags.is_missing]
        if unused and not self._allows_unused:
            count = "1 parameter" if len(unused) == 1 else f"{len(unused)} parameters"
            more = f" and {len(unused) - _MAX_SHOWN} more" if len(unused) > _MAX_SHOWN else ""
            raise ModelError(
                f"{count} received no gradient on some logical rank: {', '.join(unused[:_MAX_SHOWN])}{more}. Use all "
                "parameters in every loss, or allow unused parameters: "
                "backend.distributed_model(model, find_unused_parameters=True)."
            )

    # --- the operations of a bucket ---

    def _advance(self, step: _Step) -> None:
        """Start to reduce the maxima of the next bucket, and the sums of the previous one."""
        index = step.next_bucket
        step.next_bucket += 1
        self._start_maxima(step, index)
        if index:
            self._start_sum(step, index - 1)

    def _start_maxima(self, step: _Step, index: int) -> None:
        """Start to reduce the exponent of the largest value in each block, and the flags of parameters and of the
        step."""
        bucket = self._buckets[index]
        maxima = torch.zeros(bucket.num_blocks, dtype=bucket.number_format.value_dtype, device=self._device)
        for piece in bucket.pieces:
            if gradients := self._gradient_pieces(step, piece):
                self._write_maxima(maxima[piece.first_block : piece.first_block + piece.num_blocks], gradients)
        flags = [self._parameter_flags(step, parameter_index) for parameter_index in bucket.parameters_starting_here]
        step_flags = _StepFlags(not step.all_ranks_have_run, max(self._times_added) > 1)
        message = _encode_maxima(_exponents(maxima), flags, step_flags)
        step.maxima[index] = message, self._start(message, "max")

    def _parameter_flags(self, step: _Step, parameter_index: int) -> _ParameterFlags:
        """Return the flags of a parameter in this process. A frozen parameter is not missing."""
        is_present = [gradient is not None for gradient in step.gradients(parameter_index)]
        is_trainable = self._parameters[parameter_index].requires_grad
        return _ParameterFlags(any(is_present), is_trainable and not all(is_present), is_trainable, not is_trainable)

    def _start_sum(self, step: _Step, index: int) -> None:
        """Wait for the maxima of a bucket, add up the gradients of this process, and start to reduce the sums."""
        bucket = self._buckets[index]
        message, wait = step.maxima.pop(index)
        wait()
        exponents, flags, step_flags = _decode_maxima(message, bucket.num_blocks)
        step.step_flags = _StepFlags(*map(max, step.step_flags, step_flags))
        for parameter_index, parameter_flags in zip(bucket.parameters_starting_here, flags, strict=True):
            step.parameter_flags[parameter_index] = parameter_flags
            if parameter_flags.is_present:
                mean = self._tensor_for_mean(parameter_index, step)
                step.means[parameter_index], step.flat_means[parameter_index] = mean, _flat(mean)
        scales, factors = self._scales_and_factors(exponents, bucket.number_format)
        pieces = [piece for piece in bucket.pieces if step.parameter_flags[piece.parameter_index].is_present]
        if len(step.sums) == _MAX_SUMS_IN_FLIGHT:
            self._finish_sum(step)
        buffer = self._take_buffer(
            sum(piece.stop - piece.start for piece in pieces), bucket.number_format.integer_dtype
        )
        stop = 0
        for piece in pieces:
            start, stop = stop, stop + piece.stop - piece.start
            blocks = slice(piece.first_block, piece.first_block + piece.num_blocks)
            self._add_up(buffer[start:stop], self._gradient_pieces(step, piece), scales[blocks], bucket.number_format)
        total = buffer[:stop]
        wait = self._start(total, "sum") if stop else do_not_wait
        step.sums.append(_SumInFlight(bucket, pieces, buffer, total, factors, wait))

    def _finish_sum(self, step: _Step) -> None:
        """Wait for the sums of a bucket, and write the means."""
        reduced = step.sums.pop(0)
        reduced.wait()
        stop = 0
        for piece in reduced.pieces:
            start, stop = stop, stop + piece.stop - piece.start
            self._write_means(
                step.flat_means[piece.parameter_index][piece.start : piece.stop],
                reduced.total[start:stop],
                reduced.factors[piece.first_block : piece.first_block + piece.num_blocks],
            )
        self._free_buffers.append(reduced.buffer)

    def _start(self, tensor: Tensor, op: ReduceOp) -> Callable[[], None]:
        return do_not_wait if self._start_allreduce is None else self._start_allreduce(tensor, op)

    def _take_buffer(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        for index, buffer in enumerate(self._free_buffers):
            if buffer.dtype == dtype and buffer.numel() >= num_elements:
                return self._free_buffers.pop(index)
        self._free_buffers = [buffer for buffer in self._free_buffers if buffer.dtype != dtype]
        return torch.empty(num_elements, dtype=dtype, device=self._device)

    # --- arithmetic, on flat tensors ---

    def _scales_and_factors(self, exponents: Tensor, number_format: NumberFormat) -> tuple[Tensor, Tensor]:
        """For each block, return 1 / quantum, and quantum / (number of logical ranks). The latter is NaN if a value in
        the block is not finite."""
        bits = number_format.sum_bits - max(0, self._logical_ranks - 1).bit_length()
        # Within these limits, both results are normal numbers. Smaller gradients lose bits, as subnormal numbers do.
        lowest = number_format.sum_bits - number_format.exponent_bias + 1
        limited = exponents.clamp(lowest, number_format.exponent_bias + 1)
        quanta = number_format.powers_of_two(limited - bits)
        quanta.masked_fill_(exponents == _NOT_FINITE, math.nan)
        return number_format.powers_of_two(bits - limited), quanta.div_(self._logical_ranks)

    def _write_maxima(self, maxima: Tensor, gradients: Sequence[Tensor]) -> None:
        """Set `maxima` to the largest absolute value in each block, or NaN for a block with a NaN."""
        for elements, blocks in self._tiles(len(gradients[0])):
            rows = blocks.stop - blocks.start
            for index, gradient in enumerate(gradients):
                absolute = self._scratch_for(maxima.dtype, elements)
                if gradient.dtype == maxima.dtype:
                    torch.abs(gradient[elements], out=absolute)
                else:
                    absolute.copy_(gradient[elements]).abs_()
                if index == 0:
                    torch.amax(absolute.view(rows, -1), 1, out=maxima[blocks])
                else:
                    block_maxima = torch.amax(absolute.view(rows, -1), 1)
                    torch.maximum(maxima[blocks], block_maxima, out=maxima[blocks])

    def _add_up(self, total: Tensor, gradients: Sequence[Tensor], scales: Tensor, number_format: NumberFormat) -> None:
        """Set `total` to the sum of `gradients`, each rounded to a multiple of the quantum, in units of the quantum."""
        if not gradients:
            total.zero_()
            return
        for elements, blocks in self._tiles(len(total)):
            rows = blocks.stop - blocks.start
            scale = scales[blocks].unsqueeze(1)
            for index, gradient in enumerate(gradients):
                quanta = self._scratch_for(number_format.value_dtype, elements)
                torch.mul(gradient[elements].view(rows, -1), scale, out=quanta.view(rows, -1))
                quanta.round_()
                if index == 0:
                    total[elements].copy_(quanta)
                else:
                    integers = self._scratch_for(number_format.integer_dtype, elements)
                    total[elements].add_(integers.copy_(quanta))

    def _write_means(self, mean: Tensor, total: Tensor, factors: Tensor) -> None:
        """Set `mean` to the product of `total` and the factor of each block."""
        for elements, blocks in self._tiles(len(total)):
            rows = blocks.stop - blocks.start
            values = self._scratch_for(factors.dtype, elements).copy_(total[elements])
            torch.mul(values.view(rows, -1), factors[blocks].unsqueeze(1), out=mean[elements].view(rows, -1))

    def _tiles(self, num_elements: int) -> Iterator[tuple[slice, slice]]:
        """Yield the elements and the blocks of each tile. A last block with fewer elements is a separate tile."""
        num_whole_blocks = num_elements // BLOCK_ELEMENTS
        for start in range(0, num_whole_blocks, self._tile_blocks):
            stop = min(num_whole_blocks, start + self._tile_blocks)
            yield slice(start * BLOCK_ELEMENTS, stop * BLOCK_ELEMENTS), slice(start, stop)
        if num_elements > num_whole_blocks * BLOCK_ELEMENTS:
            yield slice(num_whole_blocks * BLOCK_ELEMENTS, num_elements), slice(num_whole_blocks, num_whole_blocks + 1)

    def _scratch_for(self, dtype: torch.dtype, elements: slice) -> Tensor:
        """Return memory for the results of a tile. The next call with the same dtype returns the same memory."""
        if dtype not in self._scratch:
            count = self._tile_blocks * BLOCK_ELEMENTS
            self._scratch[dtype] = torch.empty(count, dtype=dtype, device=self._device)
        return self._scratch[dtype][: elements.stop - elements.start]

    def _gradient_pieces(self, step: _Step, piece: Piece) -> list[Tensor]:
        """Return the elements of `piece` in each gradient of this process that is not None."""
        flat = step.flat_gradients.get(piece.parameter_index)
        if flat is None:
            flat = [_flat(gradient) for gradient in step.gradients(piece.parameter_index) if gradient is not None]
            step.flat_gradients[piece.parameter_index] = flat
        return [gradient[piece.start : piece.stop] for gradient in flat]

    def _tensor_for_mean(self, parameter_index: int, step: _Step) -> Tensor:
        """Return the tensor to which the mean gradient of a parameter is written: one of its gradients if the parameter
        and that gradient are contiguous and the gradient is not lazily conjugated, otherwise a new tensor."""
        parameter = self._parameters[parameter_index]
        for gradient in step.gradients(parameter_index):
            if gradient is None or gradient.is_conj():  # torch.view_as_real does not accept it
                continue
            if gradient.is_contiguous() and parameter.is_contiguous():
                return gradient
        return torch.empty_like(parameter, requires_grad=False)


def _encode_maxima(exponents: Tensor, flags: Sequence[_ParameterFlags], step_flags: _StepFlags) -> Tensor:
    """Return the int32 message of a bucket: the exponents of its blocks, then the flags as 0 or 1. The elementwise
    maximum of the messages of all processes contains the maximum of the exponents, and whether a flag is set in any
    process."""
    values = [int(flag) for flags_tuple in (*flags, step_flags) for flag in flags_tuple]
    return torch.cat([exponents, torch.tensor(values, dtype=torch.int32, device=exponents.device)])


def _decode_maxima(message: Tensor, num_blocks: int) -> tuple[Tensor, list[_ParameterFlags], _StepFlags]:
    """Return the exponents, parameter flags and step flags in a message of `_encode_maxima`."""
    *flags, is_incomplete, is_repeated = map(bool, message[num_blocks:].tolist())
    count = len(_ParameterFlags._fields)
    parameter_flags = [_ParameterFlags(*flags[start : start + count]) for start in range(0, len(flags), count)]
    return message[:num_blocks], parameter_flags, _StepFlags(is_incomplete, is_repeated)


def _exponents(maxima: Tensor) -> Tensor:
    """Return, as int32, the smallest e with value < 2^e for each value; _ALL_ZERO for 0, and _NOT_FINITE for inf and
    NaN."""
    exponents = torch.frexp(maxima).exponent
    exponents = exponents.masked_fill(maxima == 0, _ALL_ZERO)
    return exponents.masked_fill(~maxima.isfinite(), _NOT_FINITE)


def _flat(tensor: Tensor) -> Tensor:
    """Return `tensor` flattened to one dimension in row-major order, as a view if it is contiguous and not lazily
    conjugated. A complex number becomes two real numbers."""
    return as_real(tensor.resolve_conj()).reshape(-1)
