"""An operation that Horovod is busy with, as a torch.distributed `Work`, and the thread that sees it done.

Horovod's own `synchronize` spins, taking the interpreter lock each time round; with the ranks of one host sharing its
cores that slows the very communication it waits for. Here one thread looks now and then, and everybody else sleeps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist

from unitrain.errors import CollectiveTimeoutError

_LOOK_SECONDS = 0.0001


class HorovodWork(dist._Work):
    """One operation in flight; `wait` and the future end with its result, its error, or a CollectiveTimeoutError."""

    def __init__(
        self,
        name: str,
        handle: int,
        result: Any,
        device: torch.device,
        finish: Callable[[Any], Any] | None,
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self._name = name
        self._handle = handle
        self._result = result
        self._finish = finish
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._done = threading.Event()
        self._error: Exception | None = None
        self._future: torch.futures.Future[Any] = torch.futures.Future(
            devices=[device] if device.type == "cuda" else None
        )

    @classmethod
    def completed(cls, result: Any, device: torch.device) -> HorovodWork:
        """Return a work that has nothing to do."""
        work = cls("", -1, result, device, None, timedelta())
        work._complete(None)
        return work

    def look(self) -> bool:
        """Tell whether the operation has ended, and if so hand its result on. Only the completion thread calls it."""
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
        except Exception as error:
            self._complete(error)
        else:
            self._complete(None)
        return True

    def fail(self, error: Exception) -> None:
        """End the work with `error`."""
        self._complete(error)

    def _complete(self, error: Exception | None) -> None:
        self._error = error
        self._finish = None
        self._done.set()
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._done.wait(timeout.total_seconds() or None)
        if self._error is not None:
            raise self._error
        return self._done.is_set()

    def is_completed(self) -> bool:
        return self._done.is_set()

    def is_success(self) -> bool:
        return self._done.is_set() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future

    def result(self) -> Any:
        return self._result


class CompletionThread:
    """Completes works in the order in which they were added."""

    def __init__(self) -> None:
        self._works: deque[HorovodWork] = deque()
        self._some = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name="unitrain-horovod", daemon=True)
        self._thread.start()

    def add(self, work: HorovodWork) -> None:
        self._works.append(work)
        self._some.release()

    def stop(self) -> None:
        """End the thread once all works added so far are complete."""
        self._works.append(_STOP)
        self._some.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._some.acquire()
            work = self._works.popleft()
            if work is _STOP:
                return
            while not work.look():
                time.sleep(_LOOK_SECONDS)


_STOP = HorovodWork.completed(None, torch.device("cpu"))
