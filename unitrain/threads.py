"""Background threads whose unexpected exceptions are reported, and whose loops continue after them.

Every thread of unitrain is started here, except threads that pass their exceptions to the thread that waits for them,
and one in `unitrain.processes`.
Python ends a thread at an exception that nothing catches. A thread that detects failures, receives signals or forwards
output would then be missing for the rest of the job.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unitrain.output import print_to_stderr

_RESTART_SECONDS = 1.0
_MAX_REPORTED = 100  # different errors per process

_reported: set[str] = set()


def start_thread(
    function: Callable[..., object], *arguments: Any, name: str, restarts: bool = False, daemon: bool = True
) -> threading.Thread:
    """Call `function(*arguments)` in a new thread, and return the thread.

    An exception of `function` is reported on standard error. With `restarts`, which is for functions that run a loop,
    `function` is called again a second later. Raises RuntimeError if the process has too many threads.
    """

    def run() -> None:
        is_complete = False
        while not is_complete:
            with surviving_errors():
                function(*arguments)
                is_complete = True
            if not restarts:
                return
            if not is_complete:
                time.sleep(_RESTART_SECONDS)

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


@contextmanager
def surviving_errors() -> Iterator[None]:
    """Context manager that reports an exception of its block on standard error, and continues after the block.

    Use it for each iteration of a background thread's loop. An exception that repeats is reported once.
    """
    try:
        yield
    except BaseException as error:  # including SystemExit, which would end the thread without a message
        _report(error)


def _report(error: BaseException) -> None:
    if sys.is_finalizing():  # modules that the thread uses are already deleted
        return
    name = threading.current_thread().name
    try:
        lines = traceback.format_exception(error)
    except Exception:  # the exception cannot be converted to text
        lines = [type(error).__name__]
    key = f"{name}: {type(error).__name__} at {error.__traceback__ and _innermost_line(error)}"
    if key not in _reported and len(_reported) < _MAX_REPORTED:
        _reported.add(key)
        print_to_stderr([f"unitrain: unexpected error in the thread '{name}':", "".join(lines).rstrip()])


def _innermost_line(error: BaseException) -> str:
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f"{frame.f_code.co_filename}:{line}"
