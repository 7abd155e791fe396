"""Mean of outer gradients over ranks, with compression. `local_sgd_config.py` specifies the formulas.

A compressed mean takes two collectives, which together transfer as many elements as an allreduce: an all-to-all, after
which each rank computes its slice of the mean, and an allgather of the slices. An allreduce would compute the sums in
the compressed format, and in an order that depends on the transport.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from unitrain.backends.local_sgd_config import BLOCK_ELEMENTS, OuterCompression
from unitrain.backends.tensors import as_bytes
from unitrain.monitoring.flight_recorder import GradientPhase
from unitrain.optim.outer_groups import OuterGroup, OuterGroups

_SCALE_BYTES = 4
_LARGEST_INT8 = 127


class PendingMean:
    """A mean over ranks whose transfer has started. All ranks call its methods in the same steps."""

    def __init__(self, transfer: Generator[None, None, Tensor] | None, mean: Tensor | None = None) -> None:
        """`transfer` yields twice, while collectives are in progress, and returns the mean. If it is None, `mean` is
        the result of an earlier transfer."""
        self._transfer, self._mean = transfer, mean
        self.advance()

    def advance(self) -> None:
        """Wait for the collective in progress, if any, and start the next one or compute the mean."""
        if self._transfer is None:
            return
        try:
            next(self._transfer)
        except StopIteration as end:
            self._transfer, self._mean = None, end.value

    def finish(self) -> Tensor:
        """Wait until the transfer is complete, and return the mean. Further calls return the same tensor."""
        while self._mean is None:
            self.advance()
        return self._mean


class OuterMean:
    """Computes the mean over ranks of one vector per rank, [elements], with error feedback.

    The vectors of the ranks in a synchronous group are equal. `error` is the compression error of this rank's group,
    [elements], and `slice_error` is that of this rank's slice of the mean, [slice]. Both are None without compression,
    before the first call, and on ranks that are not the first of their group.
    """

    def __init__(self, groups: OuterGroups, compression: OuterCompression, elements: int) -> None:
        self._groups, self._compression, self._elements = groups, compression, elements
        self.slice_elements = -(-elements // (len(groups.ranks_by_group) * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
        """Number of elements of a rank's slice. The last slices may contain padding, which is zero."""
        self.error: Tensor | None = None
        self.slice_error: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return the mean of `values`, float32 or float64 [elements], as a new tensor. All ranks must call this
        method."""
        return self.start(values).finish()

    def start(self, values: Tensor) -> PendingMean:
        """Start to compute the mean of `values`, float32 or float64 [elements]. All ranks must call this method."""
        return PendingMean(self._transfer(values))

    def gather_slice_error(self) -> Tensor | None:
        """Return the compression error of the mean, [elements], gathered from the slice of each rank. All ranks must
        call this method. Return None without compression, before the first call, and on ranks that are not the first of
        their group."""
        if self._compression == "none":
            return None
        phase = self._groups.record_phase()
        if self.slice_error is None or self._groups.outer is None:
            return None
        gathered = self._groups.outer.start_allgather(self.slice_error.unsqueeze(0), phase)()
        return gathered.view(-1)[: self._elements]

    def load_errors(self, error: Tensor | None, slice_errors: Tensor | None) -> None:
        """Load the compression errors of this rank's group and of the mean, both [elements]."""
        outer = self._groups.outer
        if outer is None or self._compression == "none":
            return
        self.error, self.slice_error = error, None
        if slice_errors is not None:
            padded = slice_errors.new_zeros(outer.size * self.slice_elements)
            padded[: self._elements] = slice_errors
            self.slice_error = padded.view(outer.size, -1)[outer.index].clone()

    def _transfer(self, values: Tensor) -> Generator[None, None, Tensor]:
        """Compute the mean in three parts. Between them, collectives are in progress: two with compression, otherwise
        one. Ranks that are not the first of their group only receive the mean at the end."""
        groups, phase = self._groups, self._groups.record_phase()
        if groups.outer is None:
            yield
            yield
            mean = torch.empty_like(values)
        else:
            weighted = values if groups.weight == 1 else values * groups.weight
            if self._compression == "none":
                wait = groups.outer.start_mean(weighted, phase)
                yield
                yield
                mean = wait()
            else:
                mean = yield from self._transfer_compressed(weighted, groups.outer, phase)
        if groups.synchronous is not None:
            groups.synchronous.broadcast(mean, 0)
        return mean

    def _transfer_compressed(
        self, values: Tensor, outer: OuterGroup, phase: GradientPhase
    ) -> Generator[None, None, Tensor]:
        padded = values.new_zeros(outer.size * self.slice_elements)
        padded[: self._elements] = values if self.error is None else values + self.error
        encoded = _encode(padded.view(outer.size, -1), self._compression)
        padded -= _decode(encoded, self._compression, values.dtype).view(-1)
        self.error = padded[: self._elements].clone()
        wait = outer.start_alltoall(encoded, phase)
        yield
        first, *others = wait()
        mean = _decode(first, self._compression, values.dtype)
        for row in others:  # in rank order
            mean += _decode(row, self._compression, values.dtype)
        mean /= outer.size
        if self.slice_error is not None:
            mean += self.slice_error
        own = _encode(mean.unsqueeze(0), self._compression)
        self.slice_error = mean - _decode(own[0], self._compression, values.dtype)
        wait = outer.start_allgather(own, phase)
        yield
        return _decode(wait(), self._compression, values.dtype).view(-1)[: self._elements].clone()


def bytes_per_synchronization(
    num_elements: int, size: int, compression: OuterCompression, element_bytes: int = 4
) -> int:
    """Return the number of bytes that a rank sends in a synchronization of `num_elements` elements between `size`
    ranks.

    `element_bytes` is the size of an element without compression.
    """
    slice_elements = -(-num_elements // (size * BLOCK_ELEMENTS)) * BLOCK_ELEMENTS
    if compression == "none":
        return 2 * (size - 1) * num_elements * element_bytes // size
    return 2 * (size - 1) * _row_bytes(slice_elements, compression)


def _row_bytes(num_elements: int, compression: OuterCompression) -> int:
    return 2 * num_elements if compression == "bf16" else num_elements + num_elements // BLOCK_ELEMENTS * _SCALE_BYTES


def _encode(rows: Tensor, compression: OuterCompression) -> Tensor:
    """Return `rows`, [rows, elements], in the compressed format, as uint8 [rows, bytes]. In int8, a row starts with its
    scales.

    Non-finite values remain non-finite; in int8, they make all values of their block non-finite.
    """
    if compression == "bf16":
        return as_bytes(rows.to(torch.bfloat16)).view(len(rows), -1)
    blocks = rows.view(len(rows), -1, BLOCK_ELEMENTS)
    scales = (blocks.abs().amax(dim=2) / _LARGEST_INT8).float()
    numbers = (blocks / scales.unsqueeze(2).to(rows.dtype)).round_()
    # A block of zeros has the scale 0. A non-finite value makes the scale of its block, and thus all decoded values of
    # the block, non-finite.
    numbers = numbers.nan_to_num_(nan=1.0).clamp_(-_LARGEST_INT8, _LARGEST_INT8).to(torch.int8)
    return torch.cat([as_bytes(scales).view(len(rows), -1), as_bytes(numbers).view(len(rows), -1)], dim=1)


def _decode(encoded: Tensor, compression: OuterCompression, dtype: torch.dtype) -> Tensor:
    """Return the values of `encoded`, uint8 [..., bytes], as [..., elements] of `dtype`."""
    if compression == "bf16":
        return encoded.contiguous().view(torch.bfloat16).to(dtype)
    scale_bytes = encoded.shape[-1] // (BLOCK_ELEMENTS + _SCALE_BYTES) * _SCALE_BYTES
    scales = encoded[..., :scale_bytes].contiguous().view(torch.float32).to(dtype)
    numbers = encoded[..., scale_bytes:].contiguous().view(torch.int8).to(dtype)
    blocks = numbers.view(*encoded.shape[:-1], -1, BLOCK_ELEMENTS) * scales.unsqueeze(-1)
    return blocks.view(*encoded.shape[:-1], -1)
