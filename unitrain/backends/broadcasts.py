"""Concurrent in-place broadcasts from different roots, which distribute the parameters updated by a sharded optimizer.

For large parameters, several broadcasts take less time than an allgather, and they need no second copy of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.monitoring.flight_recorder import GradientPhase
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.torch_compat import foreach_copy_

# Pieces of up to MAX_PACKED_BYTES with the same root are packed into buffers of up to BUFFER_BYTES, because starting a
# broadcast takes longer than copying.
MAX_PACKED_BYTES = 2**16
BUFFER_BYTES = 2**20


class Broadcasts:
    """Starts broadcasts in the default process group.

    Args:
        waits_on_stream: whether a GPU stream, rather than the host, waits for the broadcasts, as with NCCL. The
            watchdog then terminates the process if the broadcasts do not complete in time.
    """

    def __init__(self, monitor: FailureMonitor, rank: int, *, waits_on_stream: bool) -> None:
        self._monitor, self._rank, self._waits_on_stream = monitor, rank, waits_on_stream
        self._counter = count()

    def start(self, pieces: Iterable[tuple[Tensor, int]]) -> Callable[[], None]:
        """Start to broadcast each piece in place from its root, and return a function that waits for all broadcasts.

        Each piece consists of a contiguous tensor, [elements], and the rank of its root. All ranks must pass the same
        sizes and roots in the same order, and start other collectives in the same order relative to this call. There is
        no consistency check. Pieces must not be read or written before the returned function returns. With
        `waits_on_stream`, that function makes the current stream wait for the broadcasts. Otherwise, it blocks until
        they complete, and after a timeout raises CollectiveTimeoutError, which names the missing ranks.
        """
        phase = GradientPhase("parameter broadcast", next(self._counter))
        self._monitor.record(phase)
        works: list[dist.Work | None] = []
        buffers: list[tuple[Tensor, list[Tensor]]] = []
        small: dict[int, list[Tensor]] = {}
        small_bytes: dict[int, int] = {}

        def start_broadcast(tensor: Tensor, root: int) -> None:
            try:
                works.append(dist.broadcast(tensor, root, async_op=True))
            except RuntimeError as error:  # Horovod rejects operations after another rank has terminated
                self._monitor.raise_cause_of(error)
                raise

        def start_packed_broadcast(root: int) -> None:
            parts = small.pop(root)
            if len(parts) == 1:
                start_broadcast(parts[0], root)
                return
            # All ranks allocate a buffer of the same size, but only the root fills it before the broadcast.
            is_root = root == self._rank
            buffer = torch.cat(parts) if is_root else parts[0].new_empty(small_bytes[root])
            start_broadcast(buffer, root)
            if not is_root:
                buffers.append((buffer, parts))

        for piece, root in pieces:
            content = _bytes_in_place(piece)
            if not content.numel():
                continue
            if content.numel() > MAX_PACKED_BYTES:
                start_broadcast(content, root)
                continue
            if root in small and small_bytes[root] + content.numel() > BUFFER_BYTES:
                start_packed_broadcast(root)
            if root not in small:
                small[root], small_bytes[root] = [], 0
            small[root].append(content)
            small_bytes[root] += content.numel()
        for root in list(small):
            start_packed_broadcast(root)
        if self._waits_on_stream and works:
            started_works = list(works)
            self._monitor.set_deadline(
                lambda: all(work is None or work.is_completed() for work in started_works), phase
            )

        def wait() -> None:
            for work in works:
                self._monitor.wait_for_ranks(work, phase=phase)
            for buffer, parts in buffers:
                if buffer.is_cuda:
                    # The current stream may differ from the stream that allocated the buffer.
                    buffer.record_stream(torch.cuda.current_stream(buffer.device))
                foreach_copy_(parts, buffer.split([part.numel() for part in parts]))
            works.clear()
            buffers.clear()

        return wait


def _bytes_in_place(piece: Tensor) -> Tensor:
    """Return a contiguous `piece`, [elements], viewed as uint8 [bytes], a dtype that all transports support."""
    assert piece.dim() == 1, piece.shape
    assert piece.is_contiguous(), piece.stride()
    # torch regards a single element as contiguous at any stride, but can view it as bytes only at stride 1.
    return piece.detach().as_strided(piece.shape, (1,)).view(torch.uint8)
