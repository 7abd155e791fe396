"""Inspect the stack of a thread: the current line of user code, the called functions, and the awaited DataLoader
worker.
"""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import traceback
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import FrameType

from unitrain.torch_compat import awaited_loader_iterator, next_batch_index, worker_of_next_batch

_UNITRAIN_FOLDER = f"{Path(__file__).parent.parent}/"  # with a slash, so that "unitrain_experiments/" does not match
_LIBRARY_FOLDERS = tuple({f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
# Folders of packages in any environment. A virtual environment can also use the packages of the system.
_PACKAGE_FOLDERS = ("/site-packages/", "/dist-packages/")
_MAX_FRAMES = 14
_AUTOGRAD_FUNCTION = "_engine_run_backward"


def main_thread_stack() -> list[FrameType]:
    """Return the frames of the main thread, outermost first; empty if that thread has exited."""
    stack = []
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack[::-1]


def format_stack(stack: Sequence[FrameType]) -> list[str]:
    """Return the innermost frames of `stack` as lines of a traceback."""
    summary = traceback.StackSummary.extract(((frame, frame.f_lineno) for frame in stack), limit=-_MAX_FRAMES)
    return [line for entry in summary.format() for line in entry.rstrip().splitlines()]


def call_site(frame: FrameType) -> str:
    """Return the current line of the user's code, as "train.py:41: code"."""
    user = user_frame(frame)
    return describe_line(user.f_code.co_filename, user.f_lineno)


def user_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame of the user's code (neither unitrain nor a library), starting at `frame`, or the
    outermost frame if there is none.
    """
    while (caller := frame.f_back) is not None and not _is_user_file(frame.f_code.co_filename):
        frame = caller
    return frame


def user_position(stack: Sequence[FrameType]) -> int:
    """Return the index in `stack` of the innermost frame of the user's code, or 0 if there is none."""
    return next(
        (position for position in reversed(range(len(stack))) if _is_user_file(stack[position].f_code.co_filename)), 0
    )


def describe_line(file: str, line: int) -> str:
    """Return a line of code as "train.py:41: code"."""
    code = linecache.getline(file, line).strip()
    return f"{Path(file).name}:{line}" + (f": {code}" if code else "")


def describe_functions(stack: Sequence[FrameType]) -> tuple[str, str]:
    """Return the library function that the innermost frame of user code or unitrain calls, and the innermost unitrain
    function that user code calls.

    Each is empty if there is no such function.
    """
    user = user_position(stack)
    unitrain = max((position for position, frame in enumerate(stack) if is_unitrain_frame(frame)), default=user)
    caller = max(unitrain, user)
    library_function = _qualified_name(stack[caller + 1]) if caller + 1 < len(stack) else ""
    return library_function, _qualified_name(stack[unitrain]) if unitrain > user else ""


def is_in_backward(frame: FrameType) -> bool:
    """Return whether `frame` runs torch's autograd engine."""
    return frame.f_code.co_name == _AUTOGRAD_FUNCTION


def awaited_worker(frame: FrameType) -> str | None:
    """Return the DataLoader worker that `frame` waits for, with its activity if known, or None if it waits for none.

    The workers of a Trainer report their activity (`unitrain.data.workers`).
    """
    worker = worker_of_next_batch(awaited_loader_iterator(frame))
    if worker is None:
        return None
    number, process, worker_init_fn = worker
    name = f"DataLoader worker {number} (process {process})"
    report = getattr(worker_init_fn, "describe_activity", None)
    activity = report(number) if callable(report) else ""
    return f"{name}, which {activity}" if activity else name


def awaited_batch() -> tuple[int, int] | None:
    """Return an identifier of the batch that the main thread waits for in a DataLoader, or None if it does not wait.

    The identifier is different for each batch of an iterator.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if (batches := awaited_loader_iterator(frame)) is not None:
            batch_index = next_batch_index(batches)
            return None if batch_index is None else (id(batches), batch_index)
        frame = frame.f_back
    return None


def is_unitrain_frame(frame: FrameType) -> bool:
    """Return whether `frame` runs code of unitrain."""
    return frame.f_code.co_filename.startswith(_UNITRAIN_FOLDER)


@cache  # every backward pass calls this function, and a program has few source files
def _is_user_file(file: str) -> bool:
    is_library = file.startswith((_UNITRAIN_FOLDER, *_LIBRARY_FOLDERS, "<frozen"))
    return not is_library and not any(folder in file for folder in _PACKAGE_FOLDERS)


def _qualified_name(frame: FrameType) -> str:
    return getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
