"""reducescatter and allgather of CPU tensors, composed of faster collectives. Measured in benchmarks/collectives.py.

The native collectives of Gloo and Horovod take 2 to 14 times as long as an allreduce of the same tensor. The slowest is
Horovod's reducescatter over Gloo (`gloo::ReduceScatterHalvingDoubling`). In every call, it allocates three buffers,
each as large as the entire tensor (a copy of the input and two zero-filled receive buffers), and the kernel must map
all their pages. It then exchanges half of the tensor in one message, adds the received half only after it has arrived
completely, and finally sends each slice to its rank. Horovod's allreduce works in place: it divides the tensor into
segments, and adds one segment while it receives the next.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.base import ReduceOp
from unitrain.backends.tensors import flatten, from_ordered_keys, needs_keys, ordered_keys

# With more ranks, the transport's allgather is used, because each broadcast takes Python time on every rank.
MAX_BROADCASTING_RANKS = 64
# Smaller results are gathered by the transport's allgather: starting a broadcast takes longer than transferring it.
MIN_BROADCAST_BYTES = 2**16
# Size of a reducescatter buffer in bytes. Two buffers alternate: one is filled while the other is reduced.
PIECE_BYTES = 12 * 2**20
_NUM_BUFFERS = 2

Wait = Callable[["dist.Work | None"], None]


def is_broadcast_gather_faster(own: Tensor, rows: Sequence[int]) -> bool:
    """Return whether `gather_by_broadcasts` is faster than the transport's allgather. The result is the same on every
    rank.
    """
    row_bytes = math.prod(own.shape[1:]) * own.element_size()
    return (
        own.device.type == "cpu"
        and len(rows) <= MAX_BROADCASTING_RANKS
        and sum(rows) * row_bytes >= MIN_BROADCAST_BYTES
    )


def gather_by_broadcasts(own: Tensor, rows: Sequence[int], rank: int, wait: Wait) -> Tensor:
    """Concatenate every rank's `own` along dim 0, by one broadcast per rank. `rows` is the number of rows per rank.

    Rows are received in place, so ranks with fewer rows need no padding.
    """
    gathered = own.new_empty((sum(rows), *own.shape[1:]))
    parts = gathered.split(list(rows))
    parts[rank].copy_(own)
    is_bool = own.dtype == torch.bool  # a dtype that transports do not support
    works = [
        dist.broadcast(part.view(torch.uint8) if is_bool else part, root, async_op=True)
        for root, part in enumerate(parts)
        if part.numel()
    ]
    for work in works:
        wait(work)
    return gathered


class PiecewiseReduceScatter:
    """A reducescatter that allreduces `tensor` piece by piece. A piece contains the same columns of all `size` slices.

    Each piece is reduced by `torch_op` in `dtype`. Only the result and the buffers of the pieces are allocated.
    """

    def __init__(
        self,
        tensor: Tensor,
        op: ReduceOp,
        torch_op: dist.ReduceOp.RedOpType,
        dtype: torch.dtype,
        rank: int,
        size: int,
    ) -> None:
        self._op, self._torch_op, self._dtype, self._rank, self._size = op, torch_op, dtype, rank, size
        self._slices = flatten(tensor).view(size, -1)
        self._result = self._slices.new_empty(tensor.shape[0] // size, *tensor.shape[1:])
        self._uses_ordered_keys = needs_keys(tensor.dtype, op)
        self._started = 0  # columns of the slices
        self._in_flight: deque[tuple[Any, Tensor, slice]] = deque()
        self._free_buffers: Tensor | None = None

    def start(self) -> None:
        """Start to reduce the first pieces."""
        while self._started < self._slices.shape[1] and len(self._in_flight) < _NUM_BUFFERS:
            max_columns = max(1, PIECE_BYTES // (self._dtype.itemsize * self._size))
            place = slice(self._started, min(self._started + max_columns, self._slices.shape[1]))
            buffer = self._fill_buffer(self._slices[:, place])
            work = dist.all_reduce(buffer, self._torch_op, async_op=True)
            self._in_flight.append((work, buffer, place))
            self._started = place.stop

    def finish(self, wait: Wait) -> Tensor:
        """Reduce the remaining pieces, and return this rank's slice of the result. `wait` waits for a Work."""
        elements = self._result.view(-1)
        self.start()
        while self._in_flight:
            work, buffer, place = self._in_flight.popleft()
            wait(work)
            own = buffer[self._rank]
            if self._uses_ordered_keys:
                own = from_ordered_keys(own, self._result.dtype)
            elif self._op == "mean":
                own /= self._size
            elements[place] = own
            self._free_buffers = None if self._uses_ordered_keys else buffer
            self.start()
        return self._result

    def discard(self) -> None:
        """Stop waiting for the pieces of a Horovod reducescatter that some ranks did not start."""
        for work, _, _ in self._in_flight:
            work.discard()
        self._in_flight.clear()

    def _fill_buffer(self, source: Tensor) -> Tensor:
        """Return a contiguous copy of `source`, [ranks, columns], which a collective may overwrite."""
        if self._uses_ordered_keys:
            return ordered_keys(source, self._op)  # type: ignore[arg-type]
        buffer, self._free_buffers = self._free_buffers, None
        if buffer is None or buffer.shape != source.shape:
            return source.to(self._dtype, copy=True, memory_format=torch.contiguous_format)
        return buffer.copy_(source)
