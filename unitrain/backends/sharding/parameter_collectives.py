"""The collectives of `fully_shard`, which gather the parameters of a block and reduce its gradients.

On CPUs, these collectives are composed of broadcasts and allreduces, which are faster than the native collectives; see
`composed_collectives`. The native allgather gathers small tensors and, with more than MAX_BROADCASTING_RANKS ranks, all
tensors. The monitor records the collectives, so that timeout errors name the missing ranks.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.composed_collectives import MAX_BROADCASTING_RANKS, MIN_BROADCAST_BYTES
from unitrain.monitoring.flight_recorder import GradientPhase
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.torch_compat import Work, all_gather_single, reduce_scatter_single

GATHER, REDUCE = "parameter allgather", "gradient reducescatter"


class ParameterCollectives:
    """The collectives of all blocks of one model.

    Args:
        process_group: the process group of the model.
        model_number: the number of the model in the backend, which is the same on all ranks.
        waits_on_stream: whether a GPU stream, rather than the host, waits for the collectives, as with NCCL. The
            watchdog then terminates the process if the collectives do not complete in time.
        check: called with every tensor before its collective, or None.

    `gathered_blocks` lists the blocks whose parameters were gathered since the last `start_recording`. `on_gather` is
    called with each of these blocks before its parameters are gathered.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        model_number: int,
        monitor: FailureMonitor,
        *,
        waits_on_stream: bool,
        check: Callable[[Tensor], object] | None = None,
    ) -> None:
        sequences = [GradientPhase(name, 0, model_number).sequence for name in (GATHER, REDUCE)]
        weakref.finalize(self, monitor.forget_sequences, sequences).atexit = False
        self.process_group, self._monitor = process_group, monitor
        self._waits_on_stream, self.check = waits_on_stream, check
        self._model_number, self._counts_by_name = model_number, Counter[str]()
        self.gathered_blocks: list[int] = []
        self.on_gather: Callable[[int], object] | None = None

    def start_recording(self, on_gather: Callable[[int], object] | None = None) -> None:
        """Clear `gathered_blocks`, and set `on_gather`."""
        self.gathered_blocks, self.on_gather = [], on_gather

    def begin_gather(self, block: int) -> None:
        """Record that the parameters of the block with index `block` are gathered next, and call `on_gather`."""
        self.gathered_blocks.append(block)
        if self.on_gather is not None:
            self.on_gather(block)

    def gather(self, output: Tensor, local_tensor: Tensor) -> dist.Work | None:
        """Start to gather every rank's `local_tensor`, [elements], into `output`, [ranks * elements]. `local_tensor`
        must be the view of this rank's elements of `output`. Return None if the current stream waits for the result.
        """
        phase, group = self._begin_collective(GATHER, local_tensor), self.process_group
        size = group.size()
        if output.device.type == "cpu" and size <= MAX_BROADCASTING_RANKS and output.nbytes >= MIN_BROADCAST_BYTES:
            parts = output.view(torch.uint8).view(size, -1)
            return self._start_monitored(
                phase,
                lambda: [dist.broadcast(part, root, group=group, async_op=True) for root, part in enumerate(parts)],
            )
        return self._start_monitored(
            phase, lambda: [all_gather_single(output, local_tensor, group=group, async_op=True)]
        )

    def reduce(self, output: Tensor, complete: Tensor) -> None:
        """Sum `complete`, [ranks * elements], over ranks, and write this rank's shard to `output`, [elements].

        `complete` may be overwritten. On GPUs, the current stream waits for the result.
        """
        phase, group = self._begin_collective(REDUCE, complete), self.process_group
        if complete.device.type == "cpu":
            work = self._start_monitored(phase, lambda: [dist.all_reduce(complete, group=group, async_op=True)])
        else:
            work = self._start_monitored(
                phase, lambda: [reduce_scatter_single(output, complete, group=group, async_op=True)]
            )
        if work is not None:
            work.wait()
        if complete.device.type == "cpu":
            output.copy_(complete.view(group.size(), -1)[group.rank()])

    def _begin_collective(self, name: str, tensor: Tensor) -> GradientPhase:
        phase = GradientPhase(name, self._counts_by_name[name], self._model_number)
        self._counts_by_name[name] += 1
        self._monitor.record(phase)
        if self.check is not None:
            self.check(tensor)
        return phase

    def _start_monitored(
        self, phase: GradientPhase, start: Callable[[], Sequence[dist.Work | None]]
    ) -> dist.Work | None:
        try:
            works = [work for work in start() if work is not None]
        except RuntimeError as error:  # Horovod rejects operations after another rank has terminated
            self._monitor.raise_cause_of(error)
            raise
        if not self._waits_on_stream:
            return _MonitoredWork(works, phase, self._monitor)
        for work in works:
            work.wait()  # the current stream waits
        self._monitor.set_deadline(lambda: all(work.is_completed() for work in works), phase)
        return None


class _MonitoredWork(Work):
    """Collectives on CPU tensors. A timeout in `wait` raises CollectiveTimeoutError, which names the missing ranks."""

    def __init__(self, works: list[dist.Work], phase: GradientPhase, monitor: FailureMonitor) -> None:
        super().__init__()
        self._works, self._phase, self._monitor = works, phase, monitor

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        works, self._works = self._works, []
        for work in works:
            self._monitor.wait_for_ranks(work, phase=self._phase)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class GatherParameters:
    """Argument of `set_custom_all_gather`: gathers the parameters of the block with index `block`."""

    def __init__(self, collectives: ParameterCollectives, block: int) -> None:
        self._collectives, self._block = collectives, block

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self._collectives.begin_gather(self._block)
        return self._collectives.gather(output_tensor, input_tensor)


class ReduceGradients:
    """Argument of `set_custom_reduce_scatter`: sums gradients over ranks. `fully_shard` divides them by the number of
    ranks."""

    def __init__(self, collectives: ParameterCollectives) -> None:
        self._collectives = collectives

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self._collectives.reduce(output_tensor, input_tensor)
