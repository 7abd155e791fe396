"""Concurrent in-place broadcasts from different roots, which distribute the parameters updated by a sharded optimizer.

For large parameters, several broadcasts take less time than an allgather, and they need no second copy of the result.
With more than MAX_BROADCASTING_RANKS ranks, the pieces are instead gathered in flat buffers, so that the number of
operations does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, count
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.composed_collectives import MAX_BROADCASTING_RANKS
from unitrain.monitoring.flight_recorder import GradientPhase
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.torch_compat import all_gather_single, foreach_copy_

# Pieces of up to MAX_PACKED_BYTES with the same root are packed into buffers of up to BUFFER_BYTES, because starting a
# broadcast takes longer than copying.
MAX_PACKED_BYTES = 2**16
BUFFER_BYTES = 2**20
# Maximum size of a flat buffer of pieces with different roots. Pieces above MAX_GATHERED_PIECE_BYTES are broadcast.
MAX_GATHERED_BYTES = 2**30
MAX_GATHERED_PIECE_BYTES = 2**26
# With a larger ratio of padding, an allgather would transfer more bytes than an allreduce.
_MAX_PADDED_RATIO = 2
_ALIGNMENT_BYTES = 8


class Broadcasts:
    """Starts broadcasts in the process groups of models, or in the default process group.

    Args:
        waits_on_stream: whether a GPU stream, rather than the host, waits for the broadcasts, as with NCCL. The
            watchdog then terminates the process if the broadcasts do not complete in time.
    """

    def __init__(self, monitor: FailureMonitor, rank: int, *, waits_on_stream: bool) -> None:
        self._monitor, self._rank, self._waits_on_stream = monitor, rank, waits_on_stream
        self._counter = count()

    def start(self, pieces: Iterable[tuple[Tensor, int]], group: dist.ProcessGroup | None = None) -> Callable[[], None]:
        """Start to broadcast each piece in place from its root, and return a function that waits for all broadcasts.

        Each piece consists of a contiguous tensor, [elements], and the rank of its root. All ranks must pass the same
        sizes and roots in the same order, and start other collectives of `group`, by default the default group, in the
        same order relative to this call. There is no consistency check.

        Pieces must not be read or written before the returned function returns. With
        `waits_on_stream`, that function makes the current stream wait for the broadcasts. Otherwise, it blocks until
        they complete, and after a timeout raises CollectiveTimeoutError, which names the missing ranks.
        """
        phase = GradientPhase("parameter broadcast", next(self._counter))
        self._monitor.record(phase)
        contents = [(content, root) for piece, root in pieces if (content := _bytes_in_place(piece)).numel()]
        has_many_ranks = dist.get_world_size() > MAX_BROADCASTING_RANKS
        try:
            transfers = list((self._start_gathers if has_many_ranks else self._start_broadcasts)(contents, group))
        except RuntimeError as error:  # Horovod rejects operations after another rank has terminated
            self._monitor.raise_cause_of(error)
            raise
        works = [transfer.work for transfer in transfers]
        if self._waits_on_stream and works:
            started_works = list(works)
            self._monitor.set_deadline(
                lambda: all(work is None or work.is_completed() for work in started_works), phase
            )

        def wait() -> None:
            for work in works:
                self._monitor.wait_for_ranks(work, phase=phase)
            for transfer in transfers:
                if transfer.received:
                    received, parts = map(list, zip(*transfer.received, strict=True))
                    if received[0].is_cuda:
                        # The current stream may differ from the stream that allocated the buffer.
                        received[0].record_stream(torch.cuda.current_stream(received[0].device))
                    foreach_copy_(parts, received)
            works.clear()
            transfers.clear()

        return wait

    def _start_broadcasts(
        self, contents: Iterable[tuple[Tensor, int]], group: dist.ProcessGroup | None
    ) -> Iterator[_Transfer]:
        """Start one broadcast for each large piece, and for each buffer of small pieces with the same root."""
        small: dict[int, list[Tensor]] = {}
        small_bytes: dict[int, int] = {}

        def start_packed_broadcast(root: int) -> _Transfer:
            parts = small.pop(root)
            if len(parts) == 1:
                return _broadcast(parts[0], root, group)
            # All ranks allocate a buffer of the same size, but only the root fills it before the broadcast.
            is_root = root == self._rank
            buffer = torch.cat(parts) if is_root else parts[0].new_empty(small_bytes[root])
            received = [] if is_root else zip(buffer.split([part.numel() for part in parts]), parts, strict=True)
            return _Transfer(dist.broadcast(buffer, root, group=group, async_op=True), list(received))

        for content, root in contents:
            if content.numel() > MAX_PACKED_BYTES:
                yield _broadcast(content, root, group)
                continue
            if root in small and small_bytes[root] + content.numel() > BUFFER_BYTES:
                yield start_packed_broadcast(root)
            if root not in small:
                small[root], small_bytes[root] = [], 0
            small[root].append(content)
            small_bytes[root] += content.numel()
        for root in list(small):
            yield start_packed_broadcast(root)

    def _start_gathers(
        self, contents: Iterable[tuple[Tensor, int]], group: dist.ProcessGroup | None
    ) -> Iterator[_Transfer]:
        """Start one operation for each buffer of pieces with any roots, and for each large piece."""
        packed: list[tuple[Tensor, int]] = []
        num_bytes = 0
        for content, root in contents:
            if content.numel() > MAX_GATHERED_PIECE_BYTES:
                yield _broadcast(content, root, group)
                continue
            if num_bytes + content.numel() > MAX_GATHERED_BYTES:
                yield self._start_gather(packed, group)
                packed, num_bytes = [], 0
            packed.append((content, root))
            num_bytes += content.numel()
        if packed:
            yield self._start_gather(packed, group)

    def _start_gather(self, contents: list[tuple[Tensor, int]], group: dist.ProcessGroup | None) -> _Transfer:
        """Start an allgather of each rank's pieces, padded to the same size. If the sizes differ too much, sum the
        pieces, at different offsets in buffers that otherwise contain zeros, as integers, which is exact."""
        size = dist.get_world_size()
        bytes_by_root = [0] * size
        for content, root in contents:
            bytes_by_root[root] += content.numel()
        width = -(-max(bytes_by_root) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        is_padded = width * size <= _MAX_PADDED_RATIO * sum(bytes_by_root) + size * _ALIGNMENT_BYTES
        if is_padded:
            starts = list(range(0, width * size, width))
            total = width * size
        else:
            starts = [0, *accumulate(bytes_by_root)][:-1]
            total = -(-sum(bytes_by_root) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        buffer = contents[0][0].new_empty(total)
        if not is_padded:
            buffer.zero_()
        received = []
        for content, root in contents:
            part = buffer[starts[root] : starts[root] + content.numel()]
            starts[root] += content.numel()
            if root == self._rank:
                part.copy_(content)
            else:
                received.append((part, content))
        if is_padded:
            own = buffer[self._rank * width : (self._rank + 1) * width]
            return _Transfer(all_gather_single(buffer, own, group=group, async_op=True), received)
        return _Transfer(dist.all_reduce(buffer.view(torch.int64), group=group, async_op=True), received)


class _Transfer(NamedTuple):
    """An operation, and pairs of a received part of its buffer and the piece to which the part is copied."""

    work: dist.Work | None
    received: list[tuple[Tensor, Tensor]]


def _broadcast(content: Tensor, root: int, group: dist.ProcessGroup | None) -> _Transfer:
    return _Transfer(dist.broadcast(content, root, group=group, async_op=True), [])


def _bytes_in_place(piece: Tensor) -> Tensor:
    """Return a contiguous `piece`, [elements], viewed as uint8 [bytes], a dtype that all transports support."""
    assert piece.dim() == 1, piece.shape
    assert piece.is_contiguous(), piece.stride()
    # torch regards a single element as contiguous at any stride, but can view it as bytes only at stride 1.
    return piece.detach().as_strided(piece.shape, (1,)).view(torch.uint8)
