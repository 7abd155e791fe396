"""Run a logger in a background thread, so that training does not wait for a disk or a network."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
from typing import Any

from unitrain.loggers.logger import Logger, RunInfo, Status
from unitrain.output import get_logger
from unitrain.threads import start_thread

_MAX_QUEUED_CALLS = 10_000
_CALL_LIMIT_SECONDS = 120.0
# Time limit for the calls that are still queued at the end of a run.
_FINISH_LIMIT_SECONDS: dict[Status, float] = {"finished": 120.0, "stopped": 30.0, "failed": 30.0}

_log = get_logger(__name__)


class BackgroundLogger:
    """Runs a logger in a thread: starts it, and executes its queued calls in order until one fails.

    A logger that fails, hangs or is too slow is disabled with a warning, and the run continues without it. A logger
    that hangs is detected at the next `call` or `wait`. If `finish` is not called, the logger is finished at
    interpreter exit.
    """

    def __init__(self, logger: Logger, run_info: RunInfo) -> None:
        self.logger, self.is_disabled, self._is_finishing = logger, False, False
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._calls.put(("start", (run_info,)))
        self._current_call: tuple[str, float] | None = None
        self._started_event = threading.Event()
        # The thread is a daemon, so that the process can exit if a service does not respond.
        self._thread = start_thread(self._run_calls, name=type(logger).__name__)

    def wait_until_started(self) -> None:
        """Wait until `start` has returned or failed, or the time limit has expired."""
        self._started_event.wait(_FINISH_LIMIT_SECONDS["finished"])

    def call(self, method: str, *arguments: Any) -> None:
        """Queue a call of the logger's `method`. If the logger hangs or is too slow, disable it instead."""
        if self.is_disabled:
            return
        current, since = self._current_call or ("", float("inf"))
        if time.monotonic() - since > _CALL_LIMIT_SECONDS:
            self._disable(f"has been busy with {current!r} for more than {_CALL_LIMIT_SECONDS:g} s")
        elif self._calls.qsize() >= _MAX_QUEUED_CALLS:
            self._disable(f"is too slow: {_MAX_QUEUED_CALLS} calls are queued")
        else:
            self._calls.put((method, arguments))

    def finish(self, status: Status) -> float:
        """Queue the logger's `finish`, and return the deadline for `wait`, in seconds of time.monotonic()."""
        self._is_finishing = True
        atexit.unregister(self._finish_at_exit)
        self.call("finish", status)
        self._calls.put(None)
        return time.monotonic() + _FINISH_LIMIT_SECONDS[status]

    def wait(self, deadline: float) -> None:
        """Wait until all queued calls are executed, at most until `deadline`. Remaining calls may still be executed
        later."""
        if not self.is_disabled:
            self._thread.join(max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._disable("did not finish in time at the end of the run")

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            method, arguments = call
            self._current_call = method, time.monotonic()
            try:
                getattr(self.logger, method)(*arguments)
            except BaseException as error:  # including SystemExit, which must not terminate the run
                self._disable(f"failed in {method!r}: {type(error).__name__}: {error}")
                if method != "finish":
                    with contextlib.suppress(BaseException):
                        self.logger.finish("failed")
                break
            finally:
                self._current_call = None
                if method == "start":
                    # Registered after the logger's package is imported, so that it runs before that package's exit
                    # handlers.
                    atexit.register(self._finish_at_exit)
                    self._started_event.set()

    def _finish_at_exit(self) -> None:
        if not self._is_finishing:
            self.wait(self.finish("finished"))

    def _disable(self, reason: str) -> None:
        if not self.is_disabled:  # a logger that hangs may also fail later
            self.is_disabled = True
            _log.warning("%s %s. The run continues without this logger.", type(self.logger).__name__, reason)
        self._calls.put(None)
