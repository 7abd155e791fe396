"""Pending Horovod operations as torch.distributed `Work` objects, and their completion.

Horovod has no completion callbacks, so its handles must be polled. The waiting thread polls, because a notification
from another thread would take 10% of a small model's step time. A background thread also polls, less often, for futures
that C++ code waits for.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist

from unitrain.backends.gradients.end_of_backward import BackwardStage, end_of_backward
from unitrain.backends.horovod.mismatches import MismatchDetector, Operation
from unitrain.bootstrap import environment
from unitrain.errors import CollectiveTimeoutError, UnsupportedError
from unitrain.monitoring.rank_status import format_ranks
from unitrain.threads import start_thread
from unitrain.torch_compat import Work, current_backward

# If a wait no longer polls without sleeping, it sleeps between polls for 1% of the time waited so far, so that long
# waits free the core for other processes.
_POLL_INTERVAL_FRACTION = 0.01
_MAX_POLL_INTERVAL_SECONDS = 0.002
_BACKGROUND_POLL_SECONDS = 0.001
# After this time, a pending operation is compared with the operations of rank 0, and then again at growing intervals.
_MISMATCH_CHECK_SECONDS = 2.0
# The number of completed works that a group keeps, and the size limits of their results. See `CompletionQueue`.
_NUM_KEPT_WORKS, _MAX_KEPT_ELEMENTS, _MAX_KEPT_BYTES = 1024, 64, 4096
# Number of backward passes after which a work is no longer kept. Small objects that exist for a long time prevent the
# allocator from using the memory of large tensors, which was freed between them, again.
_MAX_KEPT_BACKWARDS = 8
_MAX_IDLE_POLLS = 20  # limit for the background thread, after which it blocks until an operation is added


class GroupTimeoutError(CollectiveTimeoutError, dist.DistBackendError):
    """An operation timed out. Like the timeout errors of torch's process groups, this is a DistBackendError."""


class HorovodWork(Work):
    """A Horovod operation in flight. The future returns the result. `wait` and the future raise the operation's error,
    or GroupTimeoutError if the operation has timed out.

    `mismatch_error` replaces Horovod's error if ranks start the operation with different dtypes.
    """

    def __init__(
        self,
        name: str,
        handle: int,
        result: Any,
        device: torch.device,
        process_output: Callable[[Any], Any] | None,
        timeout: timedelta,
        completions: CompletionQueue | None,
        operation: Operation | None = None,
        mismatches: MismatchDetector | None = None,
        mismatch_error: UnsupportedError | None = None,
    ) -> None:
        super().__init__()
        self._name = name
        self.operation = operation
        self._mismatches = mismatches
        self._mismatch_error = mismatch_error
        self._handle = handle
        self._result = result
        self._process_output = process_output
        self._timeout = timeout
        self._start_time = time.monotonic()
        self._deadline = self._start_time + timeout.total_seconds()
        self._next_mismatch_check = self._start_time + min(_MISMATCH_CHECK_SECONDS, timeout.total_seconds() / 2)
        self._completions = completions
        self._is_done = False
        self._error: Exception | None = None
        self._device = device
        self._ready_event: torch.cuda.Event | None = None
        self._is_inference = torch.is_inference_mode_enabled()
        self.is_in_backward = False
        self._future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )
        self._typed_future: torch.futures.Future[Any] | None = None

    @classmethod
    def completed(cls, result: Any, device: torch.device) -> HorovodWork:
        """Return a completed Work."""
        work = cls("", -1, result, device, None, timedelta(), None)
        work._complete(None)
        return work

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout, counted from now."""
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()

    def poll(self) -> bool:
        """Return whether this Work is complete. Complete it if the operation has finished or timed out, if its group
        was aborted, or if another rank waits for a different operation. Only `CompletionQueue` calls this method."""
        if self._is_done:
            return True
        try:
            is_finished = hvd.poll(self._handle)
        except Exception as poll_error:  # otherwise, a C++ wait for the future would never end
            self._complete(poll_error)
            return True
        if not is_finished:
            if self._completions is not None and self._completions.is_aborted:
                message = f"Horovod's {self._name} was aborted, because this rank has aborted its process group."
                self._complete(dist.DistBackendError(message))
                return True
            now = time.monotonic()
            if now < self._deadline:
                if now < self._next_mismatch_check or self._mismatches is None:
                    return False
                interval = max(_MISMATCH_CHECK_SECONDS, min((now - self._start_time) / 2, 15 * _MISMATCH_CHECK_SECONDS))
                self._next_mismatch_check = now + interval
                if (error := self._mismatches.compare_with_rank_0()) is not None:
                    self._complete(error)
                return error is not None
            self._complete(self._timeout_error())
            return True
        try:
            with torch.inference_mode() if self._is_inference else torch.no_grad():
                output = hvd.synchronize(self._handle)
                self._wait_for_default_stream()
                if self._process_output is not None:
                    self._process_output(output)
                self._mark_ready(output)
        except Exception as error:
            self._complete(self._find_cause(error))
        else:
            self._complete(None)
        return True

    def _timeout_error(self) -> GroupTimeoutError:
        """Return an error that names the ranks that have not started the operation, if they are known."""
        missing = None
        if self._mismatches is not None and self.operation is not None:
            missing = self._mismatches.find_missing_ranks(self.operation)
        if missing == []:
            cause = "although all ranks have called it. Check the network between the hosts."
        else:
            subject = "some ranks" if missing is None else format_ranks(missing)
            cause = (
                f"because {subject} did not call it. "
                "Pass a longer timeout to init_process_group if more time is needed."
            )
        return GroupTimeoutError(f"Horovod's {self._name} timed out after {self._timeout.total_seconds():g} s, {cause}")

    def _find_cause(self, error: Exception) -> Exception:
        """Return the reason for Horovod's `error` if it is known, or `error`."""
        if self._mismatch_error is not None and "Mismatched data types" in str(error):
            return self._mismatch_error
        if self._mismatches is not None and "Horovod has been shut down" in str(error):
            # A rank that has found a mismatch may have exited before this rank has compared its operations.
            return self._mismatches.find_reported_mismatch() or error
        return error

    @property
    def is_small(self) -> bool:
        """Whether the result is one tensor with few elements."""
        result = self._result
        return isinstance(result, list) and len(result) == 1 and _is_small_tensor(result[0])

    def discard(self) -> None:
        """Stop waiting for the operation, because some ranks will not start it. It remains pending in Horovod."""
        self._process_output = None
        self._is_done = True

    def _wait_for_default_stream(self) -> None:
        """Make the current CUDA stream wait for the default stream. With HOROVOD_ENABLE_ASYNC_COMPLETION=1, Horovod
        reports an operation as finished when the default stream waits for it."""
        if self._device.type == "cuda" and environment.get_variable("HOROVOD_ENABLE_ASYNC_COMPLETION"):
            current, default = torch.cuda.current_stream(self._device), torch.cuda.default_stream(self._device)
            if current != default:
                current.wait_stream(default)

    def _mark_ready(self, output: Any) -> None:
        """Record an event in the current CUDA stream of this thread, which writes the result. Do nothing on a CPU."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)  # keeps its memory allocated until the stream has copied it
        self._ready_event = torch.cuda.Event()
        self._ready_event.record(stream)

    def _complete(self, error: Exception | None) -> None:
        self._error = error
        self._process_output = None
        self._is_done = True
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        seconds = timeout.total_seconds()
        if not self._is_done and self._completions is not None:
            self._completions.wait_for(self, seconds or None)
        if self._error is not None:
            raise self._error
        if not self._is_done:  # raise, like torch's Work, because callers ignore the returned value
            raise GroupTimeoutError(f"Horovod's {self._name} is not complete after {seconds:g} s.")
        if self._ready_event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready_event)
        return True

    def is_completed(self) -> bool:
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        if self._typed_future is None:
            self._typed_future = _as_tensor_list_future(self._future, self._result)
        return self._typed_future

    def result(self) -> Any:
        return self._result


class JoinedWork(Work):
    """Several operations of one collective. It is complete when all `works` are complete, and fails if any of them
    fails.
    """

    def __init__(self, works: list[HorovodWork], result: Any) -> None:
        super().__init__()
        self._works, self._result = works, result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        for work in self._works:
            remaining_seconds = 0.0 if deadline is None else max(deadline - time.monotonic(), 1e-6)  # 0 means unlimited
            work.wait(timedelta(seconds=remaining_seconds))
        return True

    def set_timeout(self, timeout: timedelta) -> None:
        for work in self._works:
            work.set_timeout(timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            every = torch.futures.collect_all([work.get_future() for work in self._works])
            joined: torch.futures.Future[Any] = every.then(self._result_or_error)
            self._future = _as_tensor_list_future(joined, self._result)
        return self._future

    def result(self) -> Any:
        return self._result

    def _result_or_error(self, _: Any) -> Any:
        if (error := self.exception()) is not None:
            raise error
        return self._result


def _is_small_tensor(value: Any) -> bool:
    # A small tensor may be a view of a large one, whose memory it would keep allocated.
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.numel() <= _MAX_KEPT_ELEMENTS
        and value.untyped_storage().nbytes() <= _MAX_KEPT_BYTES
    )


def _as_tensor_list_future(future: torch.futures.Future[Any], result: Any) -> torch.futures.Future[Any]:
    """Return a future of type List[Tensor] for float16 tensors on CPUs, and otherwise `future`, whose type is a Python
    object.

    DDP's built-in hook FP16_COMPRESS rejects futures of Python objects. The typed future completes 0.1 ms later.
    """
    first = result[0] if isinstance(result, list) and result else None
    if not isinstance(first, torch.Tensor) or first.dtype != torch.float16 or first.is_cuda:
        return future
    typed: torch.futures.Future[Any] = _compile_future_conversion().after(future, result)
    return typed


@functools.cache
def _compile_future_conversion() -> Any:
    return torch.jit.CompilationUnit(
        """
        def _after(done: Future[Tensor], tensors: List[Tensor]) -> List[Tensor]:
            torch.jit.wait(done)
            return tensors

        def after(done: Future[Tensor], tensors: List[Tensor]) -> Future[List[Tensor]]:
            return torch.jit.fork(_after, done, tensors)
        """
    )


def join_works(works: list[HorovodWork], result: Any, device: torch.device) -> dist.Work:
    """Return one Work for all `works`. Its future, like theirs, returns `result`."""
    if not works:  # empty tensors, on every rank
        return HorovodWork.completed(result, device)
    return works[0] if len(works) == 1 else JoinedWork(works, result)


class CompletionQueue:
    """Completes works in the order in which they were added, in the waiting thread or in the background.

    A work that the callback of another work adds or waits for is completed immediately.

    The queue keeps the small works of the latest backward passes after their completion. DDP's context manager `join`
    stores a small work in C++, which cannot call the methods of a Python object that Python has deleted.
    """

    def __init__(self) -> None:
        self._works: deque[HorovodWork] = deque()
        # Completed works, each with the value of `_num_backwards` at its completion.
        self._kept_works: deque[tuple[int, HorovodWork]] = deque(maxlen=_NUM_KEPT_WORKS)
        self._num_backwards = 0
        self._completion_lock = threading.Lock()
        self._completing_thread_id: int | None = None
        self._backward_error: Exception | None = None  # the first error of an operation of the last backward pass
        self._last_backward = -1
        self._added_event = threading.Event()
        self._is_stopping = False
        self.is_aborted = False
        """Whether `abort` was called, after which works whose operations have not finished raise an error."""
        self.is_main_thread_waiting = False
        """Whether the main thread waits for a work, and therefore for all older works, too."""
        self._thread = start_thread(self._run, name="unitrain-horovod", restarts=True)

    def add(self, work: HorovodWork) -> None:
        """Complete `work` when its operation finishes. If a backward pass is running, its end also waits for `work`."""
        if self._completing_thread_id == threading.get_ident():
            # A callback of a completed work has started this one, and may wait for its future, which only this thread
            # can complete.
            _poll_until(work.poll, None)
            return
        backward = current_backward()
        work.is_in_backward = backward != -1
        self._works.append(work)
        if not self._added_event.is_set():
            self._added_event.set()
        if backward not in (-1, self._last_backward):
            self._last_backward, self._backward_error = backward, None
            self._num_backwards += 1
            end_of_backward.add(BackwardStage.WAIT_FOR_WORK_OBJECTS, self._finish_backward)

    def wait_for(self, work: HorovodWork, seconds: float | None) -> None:
        """Block until `work` is complete, for at most `seconds` seconds, or without a limit if `seconds` is None."""
        is_in_callback = self._completing_thread_id == threading.get_ident()

        def is_done() -> bool:
            if is_in_callback:
                return work.poll()
            self._poll()
            return work.is_completed()

        self._wait_until(is_done, seconds)

    def _wait_until(self, is_done: Callable[[], bool], seconds: float | None) -> None:
        is_main_thread = threading.current_thread() is threading.main_thread()
        self.is_main_thread_waiting |= is_main_thread
        try:
            _poll_until(is_done, seconds)
        finally:
            self.is_main_thread_waiting &= not is_main_thread

    def pending_operations(self) -> list[Operation]:
        """Return the operations that are not complete, the oldest first."""
        return [work.operation for work in list(self._works) if work.operation is not None and not work.is_completed()]

    def stop(self) -> None:
        """Wait until all works added so far are complete, and stop the thread.

        In the callback of a work, return immediately: the thread stops later, because these works cannot be completed
        before the callback returns.
        """
        self._is_stopping = True
        self._added_event.set()
        if self._completing_thread_id != threading.get_ident():
            self._thread.join()

    def abort(self) -> None:
        """Stop the thread. Works whose operations have not finished raise DistBackendError. The operations remain
        pending in Horovod."""
        self.is_aborted = True
        self.stop()

    def _finish_backward(self) -> None:
        self._wait_until(lambda: self._poll() or not self._works, None)
        if self._backward_error is not None:
            # Raise before DDP reads the futures, because its C++ code reports a Python error as a result of an unknown
            # type. The caller of an operation outside the backward pass receives the error from `wait`.
            raise self._backward_error

    def _poll(self) -> bool:
        """Complete works in order, up to the first unfinished one. Return whether all works are complete."""
        if not self._completion_lock.acquire(blocking=False):
            return False  # another thread is polling
        try:
            self._completing_thread_id = threading.get_ident()
            while self._works:
                if not self._works[0].poll():
                    return False
                work = self._works.popleft()
                if work.is_small:
                    self._kept_works.append((self._num_backwards, work))
                    while self._kept_works[0][0] < self._num_backwards - _MAX_KEPT_BACKWARDS:
                        self._kept_works.popleft()
                error = work.exception()
                # An UnsupportedError concerns only one operation, whose caller receives the error from `wait`.
                if work.is_in_backward and not isinstance(error, UnsupportedError):
                    self._backward_error = self._backward_error or error
            return True
        finally:
            self._completing_thread_id = None
            self._completion_lock.release()

    def _run(self) -> None:
        idle_polls = 0
        while not (self._is_stopping and not self._works):
            if idle_polls > _MAX_IDLE_POLLS:
                self._added_event.clear()
                if not (self._works or self._is_stopping):
                    self._added_event.wait()
            idle_polls = 0 if self._works else idle_polls + 1
            self._poll()
            time.sleep(_BACKGROUND_POLL_SECONDS)


@functools.cache
def _max_polling_seconds(local_size: int) -> float:
    return environment.max_polling_seconds(local_size)


def _poll_until(is_done: Callable[[], bool], seconds: float | None) -> None:
    """Call `is_done` until it returns true, for at most `seconds` seconds, or without a limit if `seconds` is None.

    The function first polls without sleeping, because waking up a core takes longer than a small operation. With a
    limit of 1 ms instead of 5 ms, a small model's step time increases by a third if operations take 2 ms. Later, the
    function sleeps between calls for increasing intervals, so that other processes can use the core.
    """
    start_time = time.monotonic()
    max_polling_seconds = _max_polling_seconds(hvd.local_size() if hvd.is_initialized() else 1)
    while not is_done():
        waited = time.monotonic() - start_time
        if seconds is not None and waited >= seconds:
            return
        if waited < max_polling_seconds:
            os.sched_yield()
        else:
            time.sleep(min(waited * _POLL_INTERVAL_FRACTION, _MAX_POLL_INTERVAL_SECONDS))
