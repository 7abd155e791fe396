"""Operations that Horovod is busy with, as torch.distributed `Work`s, and who sees them done.

Horovod has no callback: somebody has to ask. Whoever waits asks, in short intervals, because passing the news from
another thread costs a small model a tenth of its step. A thread that asks now and then is there for futures that are
waited for in C++.
"""

from __future__ import annotations

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

from unitrain.backends.gradients.end_of_backward import Step, end_of_backward
from unitrain.errors import CollectiveTimeoutError
from unitrain.torch_compat import Work, current_backward

_EAGER_SECONDS = 0.005  # with 0.001 a small model's step takes a third longer where operations take 2 ms
_PATIENT_SECONDS = 0.00005
_BACKGROUND_SECONDS = 0.001
_IDLE_LOOKS = 20


class HorovodWork(Work):
    """One operation in flight; `wait` and the future end with its result, its error, or a CollectiveTimeoutError."""

    def __init__(
        self,
        name: str,
        handle: int,
        result: Any,
        device: torch.device,
        finish: Callable[[Any], Any] | None,
        timeout: timedelta,
        completions: Completions | None,
    ) -> None:
        super().__init__()
        self._name = name
        self._handle = handle
        self._result = result
        self._finish = finish
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._completions = completions
        self._done = False
        self._error: Exception | None = None
        self._device = device
        self._ready: torch.cuda.Event | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )

    @classmethod
    def completed(cls, result: Any, device: torch.device) -> HorovodWork:
        """Return a work that has nothing to do."""
        work = cls("", -1, result, device, None, timedelta(), None)
        work._complete(None)
        return work

    def look(self) -> bool:
        """Tell whether the operation has ended, and if so hand its result on. Only `Completions` calls it."""
        if self._done:
            return True
        if not hvd.poll(self._handle):
            if time.monotonic() < self._deadline:
                return False
            seconds = self._timeout.total_seconds()
            self._complete(
                CollectiveTimeoutError(f"Horovod's {self._name} timed out after {seconds:g} s: some ranks never came.")
            )
            return True
        try:
            with torch.no_grad():
                output = hvd.synchronize(self._handle)
                if self._finish is not None:
                    self._finish(output)
                self._mark_ready(output)
        except Exception as error:
            self._complete(error)
        else:
            self._complete(None)
        return True

    def _mark_ready(self, output: Any) -> None:
        """Record when the stream of this thread, which any thread may be, has written the result on a GPU."""
        if self._device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self._device)
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)  # it may be freed before the stream has copied it
        self._ready = torch.cuda.Event()
        self._ready.record(stream)

    def _complete(self, error: Exception | None) -> None:
        self._error = error
        self._finish = None
        self._done = True
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        seconds = timeout.total_seconds()
        if not self._done and self._completions is not None:
            self._completions.wait_for(self, seconds or None)
        if self._error is not None:
            raise self._error
        if not self._done:  # torch's own works raise too, and who waits does not look at what is returned
            raise CollectiveTimeoutError(f"Horovod's {self._name} is not done after {seconds:g} s of waiting.")
        if self._ready is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready)
        return True

    def is_completed(self) -> bool:
        return self._done

    def is_success(self) -> bool:
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._result


class JoinedWork(Work):
    """Operations that torch started as one; it is complete when all of `works` are, and fails if any of them fails."""

    def __init__(self, works: list[HorovodWork], result: Any) -> None:
        super().__init__()
        self._works, self._result = works, result
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        deadline = time.monotonic() + timeout.total_seconds() if timeout else None
        for work in self._works:
            left = 0.0 if deadline is None else max(deadline - time.monotonic(), 1e-6)  # 0 is no limit
            work.wait(timedelta(seconds=left))
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Exception | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> torch.futures.Future[Any]:
        if self._future is None:
            every = torch.futures.collect_all([work.get_future() for work in self._works])
            self._future = every.then(self._outcome)
        return self._future

    def result(self) -> Any:
        return self._result

    def _outcome(self, _: Any) -> Any:
        if (error := self.exception()) is not None:
            raise error
        return self._result


def joined(works: list[HorovodWork], result: Any, device: torch.device) -> dist.Work:
    """Return the work that is complete when all of `works` are, whose future ends with `result`, as theirs do."""
    if not works:  # nothing to move, and every rank knows
        return HorovodWork.completed(result, device)
    return works[0] if len(works) == 1 else JoinedWork(works, result)


class Completions:
    """Completes works in the order in which they were added, in whichever thread waits for one."""

    def __init__(self) -> None:
        self._works: deque[HorovodWork] = deque()
        self._completing = threading.Lock()
        self._completer: int | None = None
        self._error: Exception | None = None  # the first that any work ended with: Horovod does not recover from one
        self._backward = -1
        self._added = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="unitrain-horovod", daemon=True)
        self._thread.start()

    def add(self, work: HorovodWork) -> None:
        """Take `work` over. During a backward it is also waited for at its end, where its gradients are needed."""
        if self._completer == threading.get_ident():
            # A callback on a completed work goes on with another, and may wait for its future, which only this thread
            # could complete.
            _ask(work.look, None)
            return
        self._works.append(work)
        if not self._added.is_set():
            self._added.set()
        backward = current_backward()
        if backward not in (-1, self._backward):
            self._backward = backward
            end_of_backward.add(Step.COMPLETE_TRANSPORT, self._finish_backward)

    def wait_for(self, work: HorovodWork, seconds: float | None) -> None:
        """Return when `work` is complete, or after `seconds`."""
        own_callback = self._completer == threading.get_ident()

        def is_done() -> bool:
            if own_callback:
                return work.look()
            self._look()
            return work.is_completed()

        _ask(is_done, seconds)

    def stop(self) -> None:
        """Complete all works added so far, and end the thread."""
        self._stopping = True
        self._added.set()
        self._thread.join()

    def _finish_backward(self) -> None:
        _ask(lambda: self._look() or not self._works, None)
        if self._error is not None:
            # Here, before DDP looks at its futures: to C++ one that has failed in Python is one with a strange result.
            raise self._error

    def _look(self) -> bool:
        """Complete the works that have ended, up to the first that has not; tell whether none is left."""
        if not self._completing.acquire(blocking=False):
            return False  # another thread is at it
        try:
            self._completer = threading.get_ident()
            while self._works:
                if not self._works[0].look():
                    return False
                self._error = self._error or self._works.popleft().exception()
            return True
        finally:
            self._completer = None
            self._completing.release()

    def _run(self) -> None:
        idle = 0
        while not (self._stopping and not self._works):
            if idle > _IDLE_LOOKS:
                self._added.clear()
                if not (self._works or self._stopping):
                    self._added.wait()
            idle = 0 if self._works else idle + 1
            self._look()
            time.sleep(_BACKGROUND_SECONDS)


def _ask(is_done: Callable[[], bool], seconds: float | None) -> None:
    """Call `is_done` until it is true, or for `seconds`.

    At first without sleeping: a core that falls asleep takes longer to wake than a small operation takes. Then with, so
    that a long wait leaves the cores to those who are waited for.
    """
    started = time.monotonic()
    while not is_done():
        waited = time.monotonic() - started
        if seconds is not None and waited >= seconds:
            return
        if waited < _EAGER_SECONDS:
            os.sched_yield()
        else:
            time.sleep(_PATIENT_SECONDS)
