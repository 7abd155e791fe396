"""The group that gradients travel in, as DDP's reducer sees it: a backward that waits for other ranks in vain says so.

DDP waits for its buckets in C++, where a timeout is a bare RuntimeError, and with NCCL the end of the process. So the
buckets are waited for here first, at the end of the backward and just before DDP does. It changes nothing else.
"""

# torch's stubs type each collective by several overloads of other argument names; it calls them by position.
# mypy: disable-error-code="override, call-arg, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from unitrain.monitoring.flight_recorder import GradientPhase
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.monitoring.watchdog import Deadline


class ReducerGroup(dist.ProcessGroup):
    """`group`, whose works a backward waits for, never longer than the timeout; then CollectiveTimeoutError tells why.

    `agree` is called with whatever is about to be sent, where that is asked for. `on_reduced` is called at the end of
    each backward that sends gradients. With `on_stream` nobody waits on the
    host, as under NCCL: then the watch sees whether the gradients ever come, and ends the process if not. With `at_end`
    the allreduces of a backward begin at its end: two NCCL communicators can deadlock when ranks use them in different
    orders, and collectives inside the backward run in another group than the gradients of unused parameters.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        monitor: FailureMonitor,
        agree: Callable[[Tensor], object] | None,
        *,
        on_stream: bool,
        at_end: bool = False,
    ) -> None:
        super().__init__(group.rank(), group.size())
        self._group, self._monitor, self._agree = group, monitor, agree
        self._on_stream, self.at_end = on_stream, at_end
        self._deferred: list[_DeferredWork] = []
        self._work = GradientPhase("backward", 0)
        self._works: list[dist.Work] = []
        self._backward = -1
        self._backwards = self._bucketings = self._counted = 0
        self._begins = False
        self.loop_counters = monitor.loop_counters
        self.on_reduced: Callable[[], None] = lambda: None

    def expect_backward(self) -> None:
        """The next gradients that are sent are those of a new backward."""
        self._begins = True

    def check_other_ranks(self) -> None:
        """Raise the ModelError with which another rank has failed, if this rank knows of one."""
        self._monitor.raise_model_error()

    def begin(self, bucket: Tensor) -> None:
        """Note that `bucket` is about to be sent, by whatever collective."""
        if self._begins:
            self._begins = False
            self._works.clear()  # of a backward that an exception has ended
            self._deferred.clear()
            self._work = GradientPhase("backward", self._backwards)
            self._monitor.record(self._work)
            self._backwards += 1
        backward = torch._C._current_graph_task_id()
        if backward not in (-1, self._backward):
            self._backward = backward
            Variable._execution_engine.queue_callback(self._finish)  # before what the group itself queues
        if self._agree is not None:
            self._agree(bucket)

    def add(self, work: dist.Work) -> None:
        """Take over a work that sends a bucket: the end of the backward waits for it."""
        self._works.append(work)

    def wait_for_ranks(self, work: dist.Work | None) -> None:
        """Wait for `work` of this backward; raises CollectiveTimeoutError naming who has not come."""
        self._monitor.wait_for_ranks(work)

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """What waits for the gradients inside of this is watched."""
        deadline = self._monitor.set_deadline(_not_yet, self._work)
        try:
            yield
        finally:
            self._finished(deadline)

    # --- what the reducer calls, in C++ and in the middle of what torch.compile compiles ---

    @torch.compiler.disable
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        self.begin(tensors[0])
        if self.at_end:
            self._deferred.append(_DeferredWork(tensors, opts))
            return self._deferred[-1]
        try:
            work = self._group.allreduce(tensors, opts)
        except RuntimeError as error:  # Horovod refuses operations after another rank has ended
            self._monitor.raise_cause_of(error)
            raise
        self.add(work)
        return work

    @torch.compiler.disable
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        bucketing = GradientPhase("bucket rebuild", self._bucketings)
        self._monitor.record(bucketing)
        self._bucketings += 1
        if self._agree is not None:
            self._agree(tensors[0])
        work = self._group.broadcast(tensors, opts)
        self._monitor.wait_for_ranks(work)
        if self._on_stream:
            self._monitor.set_deadline(work.is_completed, bucketing)
        return work

    @torch.compiler.disable
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._group.allgather(outputs, inputs, opts)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "unitrain"

    @torch.compiler.disable
    def _finish(self) -> None:
        if self._counted != self._backwards:  # a backward inside of this one may have been first
            self._counted = self._backwards
            self.loop_counters.count_backward()
        # As in `finishing`, without what a context manager costs in every step.
        deadline = self._monitor.set_deadline(_not_yet, self._work)
        try:
            for late in self._deferred:
                late.work = self._group.allreduce(late.tensors, late.opts)
                self.add(late.work)
            if not self._on_stream:
                for work in self._works:
                    self._monitor.wait_for_ranks(work)
            for late in self._deferred:
                late.complete()
        finally:
            self._deferred.clear()
            self._finished(deadline)
        self.on_reduced()

    def _finished(self, deadline: Deadline | None) -> None:
        """Expect the works from here on where a stream waits for them, also while the host waits for that stream."""
        works, self._works = self._works, []
        if deadline is None:
            return
        if self._on_stream:
            deadline.is_done = lambda: all(work.is_completed() for work in works)
        else:
            deadline.cancel()


class _DeferredWork(dist._Work):
    """An allreduce of a bucket that begins at the end of the backward; DDP waits for its future after that."""

    def __init__(self, tensors: list[Tensor], opts: Any) -> None:
        super().__init__()
        self.tensors, self.opts = tensors, opts
        self.work: dist.Work | None = None
        device = tensors[0].device
        self._future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else None)

    def complete(self) -> None:
        """Let the host or the current stream wait for the allreduce, and complete the future."""
        self.wait()
        self._future.set_result(self.tensors)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        assert self.work is not None, "the backward has not ended"
        self.work.wait()
        return True

    def is_completed(self) -> bool:
        return self.work is not None and self.work.is_completed()

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[Tensor]:
        return self.tensors


def _not_yet() -> bool:
    return False
