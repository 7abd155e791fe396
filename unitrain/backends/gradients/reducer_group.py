"""The process group of DDP's reducer. If a backward pass times out, its error names the missing ranks.

DDP waits for its buckets in C++, where a timeout raises a plain RuntimeError or, with NCCL, aborts the process. This
group therefore waits for the buckets before DDP does, at the end of the backward pass.
"""

# torch's stubs declare each collective by several overloads with different argument names; torch passes arguments by
# position.
# mypy: disable-error-code="override, call-arg, untyped-decorator"

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.gradients.end_of_backward import BackwardStage, end_of_backward
from unitrain.monitoring.deadlines import Deadline
from unitrain.monitoring.flight_recorder import GradientPhase
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.torch_compat import Work, current_backward


class ReducerGroup(dist.ProcessGroup):
    """Runs each bucket's collectives in `group`, and waits for them at the end of each backward pass.

    If the host waits, a timeout raises CollectiveTimeoutError.

    Args:
        group: the group in which the model communicates.
        model_number: the number of the model in the backend, which is the same on all ranks.
        check_bucket: called with every bucket before its collective, or None.
        waits_on_stream: whether a GPU stream, rather than the host, waits for the collectives, as with NCCL. The
            watchdog then terminates the process if the collectives do not complete in time.
        defers_allreduces: whether the allreduces of a backward pass start at its end, in the order of the models'
            numbers. Set it if ranks may start them in different orders relative to collectives in another NCCL
            communicator, because two communicators can then deadlock.

    The attribute `on_reduced` is called at the end of each backward pass that reduces gradients.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        model_number: int,
        monitor: FailureMonitor,
        check_bucket: Callable[[Tensor], object] | None,
        *,
        waits_on_stream: bool,
        defers_allreduces: bool = False,
    ) -> None:
        super().__init__(group.rank(), group.size())
        self._group, self._monitor, self._check_bucket = group, monitor, check_bucket
        self.model_number = model_number
        self.waits_on_stream, self.defers_allreduces = waits_on_stream, defers_allreduces
        self._deferred_works: list[_DeferredWork] = []
        sequences = [GradientPhase(kind, 0, model_number).sequence for kind in ("backward", "bucket rebuild")]
        weakref.finalize(self, monitor.forget_sequences, sequences).atexit = False
        self._phase = GradientPhase("backward", 0, model_number)
        self._works: list[dist.Work] = []
        self._last_backward = -1
        self._backward_count = self._last_reported_backward_count = self._broadcast_count = 0
        self._is_new_backward = False
        self.loop_counters = monitor.loop_counters
        self.on_reduced: Callable[[], None] = lambda: None

    def expect_backward(self) -> None:
        """Treat the next bucket as the first bucket of a new backward pass."""
        self._is_new_backward = True

    def raise_reported_model_error(self) -> None:
        """Re-raise another rank's ModelError if this rank has received the corresponding failure report."""
        self._monitor.raise_reported_model_error()

    def begin_bucket(self, bucket: Tensor) -> None:
        """Prepare for the collectives of `bucket`. Call this method before the first of these collectives.

        The first call of a backward pass records the pass for the watchdog, and schedules the wait for the buckets at
        the end of the pass. Every call passes `bucket` to `check_bucket`.
        """
        if self._is_new_backward:
            self._is_new_backward = False
            self._works.clear()  # left by an earlier backward pass that raised an exception
            self._deferred_works.clear()
            self._phase = GradientPhase("backward", self._backward_count, self.model_number)
            self._monitor.record(self._phase)
            self._backward_count += 1
        backward = current_backward()
        if backward not in (-1, self._last_backward):
            self._last_backward = backward
            end_of_backward.add(BackwardStage.REDUCE_BUCKETS, self._wait_for_buckets, self.model_number)
            end_of_backward.add(BackwardStage.MARK_REDUCED, self._mark_reduced)
        if self._check_bucket is not None:
            self._check_bucket(bucket)

    def start_allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Start an allreduce of a bucket, by default a sum, for which the caller waits or which it passes to
        `add_work`. If it cannot start because of another rank's ModelError, re-raise that error."""
        try:
            return self._group.allreduce(tensors, dist.AllreduceOptions() if opts is None else opts)
        except RuntimeError as error:  # Horovod rejects operations after another rank has terminated
            self._monitor.raise_cause_of(error)
            raise

    def add_work(self, work: dist.Work) -> None:
        """Add `work`, the collective of a bucket, to the collectives that are waited for at the end of the backward
        pass. If a CUDA stream waits, the watchdog monitors them; otherwise, the host waits."""
        self._works.append(work)

    def raise_cause_of(self, error: BaseException) -> None:
        """Re-raise another rank's ModelError if it caused `error`."""
        self._monitor.raise_cause_of(error)

    def wait_for_ranks(self, work: dist.Work | None) -> None:
        """Wait for `work` of this backward pass. Raises CollectiveTimeoutError, which names the missing ranks, after a
        timeout, or re-raises another rank's ModelError."""
        self._monitor.wait_for_ranks(work, current_phase=self._phase)

    @contextmanager
    def monitored_wait(self) -> Iterator[None]:
        """Context manager in which the watchdog monitors the waits for gradients."""
        deadline = self._monitor.set_deadline(_is_never_done, self._phase)
        try:
            yield
        finally:
            self._end_deadline(deadline)

    # --- called by the C++ reducer, outside compiled code ---

    @torch.compiler.disable
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        self.begin_bucket(tensors[0])
        if self.defers_allreduces:
            self._deferred_works.append(_DeferredWork(tensors, opts))
            return self._deferred_works[-1]
        self.add_work(work := self.start_allreduce(tensors, opts))
        return work

    @torch.compiler.disable
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        phase = GradientPhase("bucket rebuild", self._broadcast_count, self.model_number)
        self._monitor.record(phase)
        self._broadcast_count += 1
        if self._check_bucket is not None:
            self._check_bucket(tensors[0])
        work = self._group.broadcast(tensors, opts)
        self._monitor.wait_for_ranks(work)
        if self.waits_on_stream:
            self._monitor.set_deadline(work.is_completed, phase)
        return work

    @torch.compiler.disable
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._group.allgather(outputs, inputs, opts)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "unitrain"

    # --- stages at the end of a backward pass ---

    @torch.compiler.disable
    def _wait_for_buckets(self) -> None:
        if self._last_reported_backward_count != self._backward_count:  # unless a nested backward pass has counted it
            self._last_reported_backward_count = self._backward_count
            self.loop_counters.count_backward()
        # Like `monitored_wait`, without the cost of a context manager in every step.
        deadline = self._monitor.set_deadline(_is_never_done, self._phase)
        try:
            for deferred in self._deferred_works:
                self.add_work(work := self.start_allreduce(deferred.tensors, deferred.opts))
                deferred.work = work
            if not self.waits_on_stream:
                for work in self._works:
                    self.wait_for_ranks(work)
            for deferred in self._deferred_works:
                deferred.complete()
        finally:
            self._deferred_works.clear()
            self._end_deadline(deadline)

    def _mark_reduced(self) -> None:
        self.on_reduced()

    def _end_deadline(self, deadline: Deadline | None) -> None:
        """Cancel `deadline`. If a stream waits for the collectives, keep it instead until they are complete."""
        works, self._works = self._works, []
        if deadline is None:
            return
        if self.waits_on_stream:
            deadline.is_done = lambda: all(work.is_completed() for work in works)
        else:
            deadline.cancel()


class _DeferredWork(Work):
    """A bucket's allreduce that starts at the end of the backward pass. DDP waits for its future afterwards."""

    def __init__(self, tensors: list[Tensor], opts: Any) -> None:
        super().__init__()
        self.tensors, self.opts = tensors, opts
        self.work: dist.Work | None = None
        device = tensors[0].device
        self._future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else None)

    def complete(self) -> None:
        """Wait for the allreduce, on the host or the current stream, and complete the future."""
        self.wait()
        self._future.set_result(self.tensors)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        assert self.work is not None, "the backward pass has not ended"
        self.work.wait()
        return True

    def is_completed(self) -> bool:
        return self.work is not None and self.work.is_completed()

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[Tensor]:
        return self.tensors


def _is_never_done() -> bool:
    return False
