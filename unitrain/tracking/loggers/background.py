"""One logger at work in a thread of its own, so that nobody has to wait for a disk or a network."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import Any

from unitrain.tracking.loggers.logger import Logger, Status

# How many calls may wait for a logger that is slow, and how long the end of a run waits for it.
_MOST_WAITING = 10_000
_PATIENCE_SECONDS = 30.0

_log = logging.getLogger(__name__)


class Background:
    """Passes calls on to a logger that was started, in their order; after the first that fails, no more.

    A logger that fails, or cannot keep up, is named in a warning. The run goes on without it.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...]] | None] = queue.SimpleQueue()
        self._left_out = False
        # A daemon: where a service never answers, the process ends all the same.
        self._thread = threading.Thread(target=self._work, name=type(logger).__name__, daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: Any) -> None:
        """Let the logger do this when it comes to it."""
        if self._left_out:
            return
        if self._calls.qsize() >= _MOST_WAITING:
            self._leave_out(f"has {_MOST_WAITING} calls to catch up with")
        else:
            self._calls.put((method, arguments))

    def finish(self, status: Status) -> None:
        """Wait until everything is logged, but not for ever."""
        self.call("finish", status)
        self._calls.put(None)
        self._thread.join(_PATIENCE_SECONDS)
        if self._thread.is_alive() and not self._left_out:
            self._leave_out(f"was not done {_PATIENCE_SECONDS:g} s after the end of the run")

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            method, arguments = call
            if self._left_out:
                continue
            try:
                getattr(self._logger, method)(*arguments)
            except Exception as error:
                self._leave_out(f"failed: {type(error).__name__}: {error}")
                if method != "finish":
                    with contextlib.suppress(Exception):
                        self._logger.finish("failed")

    def _leave_out(self, why: str) -> None:
        self._left_out = True
        _log.warning("%s %s. The run goes on without it.", type(self._logger).__name__, why)
