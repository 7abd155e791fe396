"""reducescatter and allgather of CPU tensors, composed of faster operations. benchmarks/collectives.py measures them.

Tensors of up to 12 MiB (with MPI, 4 MiB for an allgather) are transferred over direct TCP connections between all pairs
of ranks (message_exchange.py), if there are at most `message_exchange.MAX_RANKS` ranks. This avoids the cost of
starting an operation of the transport. For larger tensors, and without direct connections, an allgather consists of
broadcasts, and a reducescatter of allreduces or, with the backend ddp, of all-to-alls. Without direct connections, the
native allgather gathers small tensors and, with more than MAX_BROADCASTING_RANKS ranks, all tensors.

The native reducescatter and allgather of Gloo and Horovod take 2 to 14 times as long as an allreduce of the same
tensor. The slowest is Horovod's reducescatter over Gloo (`gloo::ReduceScatterHalvingDoubling`). In every call, it
allocates three buffers, each as large as the entire tensor (a copy of the input and two zero-filled receive buffers),
and the operating system must map all their pages. It then exchanges half of the tensor in one message, adds the
received half only after it has arrived completely, and finally sends each slice to its rank. Horovod's allreduce works
in place: it divides the tensor into segments, and adds one segment while it receives the next.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.base import ReduceOp
from unitrain.backends.message_exchange import MessageExchange
from unitrain.backends.tensors import as_bytes, flatten, from_ordered_keys, needs_ordered_keys, ordered_keys

# Maximum size in bytes of an allgather's result and of a reducescatter's input for a transfer over direct connections.
# With MPI, the limit for an allgather is lower, because its broadcasts use shared memory between the ranks of a host.
MAX_DIRECT_BYTES = 12 * 2**20
MAX_DIRECT_GATHER_BYTES_WITH_MPI = 4 * 2**20
# With more ranks, the transport's allgather is used, because each broadcast adds Python overhead on every rank.
MAX_BROADCASTING_RANKS = 64
# Smaller results are gathered by the transport's allgather, because starting a broadcast takes longer than the
# transfer.
MIN_BROADCAST_BYTES = 2**16
# Maximum size in bytes of the buffers of one piece of a reducescatter (with an all-to-all, of its send and receive
# buffer together). Two pieces alternate: the buffer of one is filled while the other is reduced.
MAX_PIECE_BUFFER_BYTES = 12 * 2**20
_MAX_PIECES_IN_FLIGHT = 2

WaitForWork = Callable[["dist.Work | None"], None]
_BINARY_FUNCTIONS = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}


def gather_directly(tensor: Tensor, row_counts: Sequence[int], rank: int, exchange: MessageExchange) -> Tensor:
    """Concatenate every rank's `tensor` along dim 0, over direct connections. `row_counts` is the number of rows per
    rank."""
    gathered = tensor.new_empty((sum(row_counts), *tensor.shape[1:]))
    parts = gathered.split(list(row_counts))
    parts[rank].copy_(tensor)
    memory = [_memory(part) for part in parts]
    exchange.exchange([memory[rank]] * len(row_counts), memory)
    return gathered


def reduce_scatter_directly(
    tensor: Tensor, op: ReduceOp, dtype: torch.dtype, rank: int, size: int, exchange: MessageExchange
) -> Tensor:
    """Return this rank's slice of `tensor`, reduced in `dtype` and in rank order. For the mean, return the sum.

    Over direct connections, each rank sends to every other rank the slice that the receiver reduces.
    """
    slices = flatten(tensor).view(size, -1)
    received = [part if index == rank else torch.empty_like(part) for index, part in enumerate(slices)]
    exchange.exchange([_memory(part) for part in slices], [_memory(part) for part in received])
    total = reduce_in_rank_order([part.to(dtype) for part in received], op)
    return total.view(tensor.shape[0] // size, *tensor.shape[1:])


def reduce_in_rank_order(tensors: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """Return the reduction of `tensors`, one per rank, as a new tensor. For the mean, return the sum."""
    first, *others = tensors
    return functools.reduce(_BINARY_FUNCTIONS.get(op, torch.add), others, first) if others else first.clone()


def is_broadcast_gather_faster(tensor: Tensor, row_counts: Sequence[int]) -> bool:
    """Return whether `gather_by_broadcasts` is faster than the transport's allgather. The result is the same on every
    rank.
    """
    row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
    return (
        tensor.device.type == "cpu"
        and len(row_counts) <= MAX_BROADCASTING_RANKS
        and sum(row_counts) * row_bytes >= MIN_BROADCAST_BYTES
    )


def gather_by_broadcasts(tensor: Tensor, row_counts: Sequence[int], rank: int, wait: WaitForWork) -> Tensor:
    """Concatenate every rank's `tensor` along dim 0, by one broadcast per rank. `row_counts` is the number of rows per
    rank.

    Rows are received in place, so ranks with fewer rows need no padding.
    """
    gathered = tensor.new_empty((sum(row_counts), *tensor.shape[1:]))
    parts = gathered.split(list(row_counts))
    parts[rank].copy_(tensor)
    is_bool = tensor.dtype == torch.bool  # a dtype that transports do not support
    works = [
        dist.broadcast(part.view(torch.uint8) if is_bool else part, root, async_op=True)
        for root, part in enumerate(parts)
        if part.numel()
    ]
    for work in works:
        wait(work)
    return gathered


class _PieceInFlight(NamedTuple):
    """The columns of a PiecewiseReduceScatter that are reduced by `work`."""

    work: Any
    buffer: Tensor  # sent by an all-to-all, or reduced in place
    received: Tensor | None  # with an all-to-all: the slices of all ranks
    columns: slice


class PiecewiseReduceScatter:
    """A reducescatter of a CPU `tensor` piece by piece. A piece contains the same columns of all `size` slices.

    Each piece is allreduced by `torch_op` in `dtype`. With `uses_all_to_all`, each rank instead sends to every other
    rank the slice of the piece that the receiver reduces, and then reduces the received slices in `dtype` and in rank
    order. This transfers half as many bytes. If `tensor` is contiguous, only the result and the buffers of the
    pieces are allocated.
    """

    def __init__(
        self,
        tensor: Tensor,
        op: ReduceOp,
        torch_op: dist.ReduceOp.RedOpType,
        dtype: torch.dtype,
        rank: int,
        size: int,
        *,
        uses_all_to_all: bool,
    ) -> None:
        self._op, self._torch_op, self._dtype, self._rank, self._size = op, torch_op, dtype, rank, size
        self._uses_all_to_all = uses_all_to_all
        self._slices = flatten(tensor).view(size, -1)
        self._result = self._slices.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
        self._uses_ordered_keys = needs_ordered_keys(tensor.dtype, op) and not uses_all_to_all
        self._num_started_columns = 0
        self._in_flight: deque[_PieceInFlight] = deque()
        self._free_buffers: list[Tensor] = []

    def start(self) -> None:
        """Start to reduce the next pieces, until the maximum number of pieces is in flight."""
        bytes_per_column = self._size * (2 * self._slices.itemsize if self._uses_all_to_all else self._dtype.itemsize)
        max_columns = max(1, MAX_PIECE_BUFFER_BYTES // bytes_per_column)
        num_columns = self._slices.shape[1]
        while self._num_started_columns < num_columns and len(self._in_flight) < _MAX_PIECES_IN_FLIGHT:
            begin = self._num_started_columns
            columns = slice(begin, min(begin + max_columns, num_columns))
            buffer = self._fill_buffer(self._slices[:, columns])
            received: Tensor | None = None
            if self._uses_all_to_all:
                received = self._take_buffer(buffer.shape, buffer.dtype)
                work = dist.all_to_all_single(as_bytes(received), as_bytes(buffer), async_op=True)
            else:
                work = dist.all_reduce(buffer, self._torch_op, async_op=True)
            self._in_flight.append(_PieceInFlight(work, buffer, received, columns))
            self._num_started_columns = columns.stop

    def finish(self, wait: WaitForWork) -> Tensor:
        """Reduce the remaining pieces, and return this rank's slice of the result. `wait` waits for a Work."""
        elements = self._result.view(-1)
        self.start()
        while self._in_flight:
            work, buffer, received, columns = self._in_flight.popleft()
            wait(work)
            if received is not None:
                reduced = reduce_in_rank_order([part.to(self._dtype) for part in received], self._op)
            else:
                reduced = buffer[self._rank]
            if self._uses_ordered_keys:
                reduced = from_ordered_keys(reduced, self._result.dtype)
            elif self._op == "mean":
                reduced /= self._size
            elements[columns] = reduced
            if not self._uses_ordered_keys:  # `ordered_keys` returns a new tensor for each piece
                self._free_buffers += [buffer] if received is None else [buffer, received]
            self.start()
        return self._result

    def discard(self) -> None:
        """Stop waiting for the pieces of a Horovod reducescatter that some ranks did not start."""
        for piece in self._in_flight:
            piece.work.discard()
        self._in_flight.clear()

    def _fill_buffer(self, source: Tensor) -> Tensor:
        """Return a contiguous copy of `source`, [ranks, columns], which a collective may overwrite."""
        if self._uses_ordered_keys:
            return ordered_keys(source, self._op)  # type: ignore[arg-type]
        return self._take_buffer(source.shape, source.dtype if self._uses_all_to_all else self._dtype).copy_(source)

    def _take_buffer(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return a buffer that is no longer in use, or a new one."""
        for index, buffer in enumerate(self._free_buffers):
            if buffer.shape == shape and buffer.dtype == dtype:
                return self._free_buffers.pop(index)
        return torch.empty(shape, dtype=dtype, device="cpu")


def _memory(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    return as_bytes(tensor).numpy().data
