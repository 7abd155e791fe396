"""Where a thread is, in words for somebody who looks for the rank that keeps the others waiting."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parent.parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_MOST_FRAMES = 14
# What a function is called that waits for other ranks.
_WAITS = "wait_for_ranks"
# How the description of a rank begins that waits for a worker of its DataLoader.
LOADS = "waits for a batch"


def whereabouts(waits: Callable[[], str]) -> tuple[str, list[str]]:
    """Return where the main thread is, as the rest of "rank 3 ...", and its innermost frames as traceback lines.

    `waits` says what it waits for in a collective, if it is in one.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "has ended its main thread", []
    stack = _outermost_first(frame)
    lines = traceback.StackSummary.extract(((one, one.f_lineno) for one in stack), limit=-_MOST_FRAMES).format()
    return _describe(stack, waits), [line for entry in lines for line in entry.rstrip().splitlines()]


def call_site(frame: FrameType) -> str:
    """Return the line outside of unitrain and of libraries that is being executed, as "train.py:41: code"."""
    user = user_frame(frame)
    return place(user.f_code.co_filename, user.f_lineno)


def user_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame outside of unitrain and of libraries, from `frame` on, or the outermost of all."""
    while (before := frame.f_back) is not None and not _is_users(frame.f_code.co_filename):
        frame = before
    return frame


def place(file: str, line: int) -> str:
    """Return "train.py:41: code"."""
    code = linecache.getline(file, line).strip()
    return f"{Path(file).name}:{line}" + (f": {code}" if code else "")


def _describe(stack: list[FrameType], waits: Callable[[], str]) -> str:
    user = next((at for at in reversed(range(len(stack))) if not _is_library(stack[at]) and not _is_ours(stack[at])), 0)
    told = f"at {place(stack[user].f_code.co_filename, stack[user].f_lineno)}"
    for frame in reversed(stack):  # a batch may be fetched, and a collective called, inside a backward
        if _is_ours(frame) and frame.f_code.co_name == _WAITS:
            return f"waits in {waits()}, {told}"
        if (worker := _awaited_worker(frame)) is not None:
            return f"{LOADS} from {worker}, {told}"
        if frame.f_code.co_name == "_engine_run_backward":
            return f"is in the backward pass, which reduces the gradients, {told}"
    ours = max((at for at, frame in enumerate(stack) if _is_ours(frame)), default=user)
    inner = max(ours, user)
    if inner + 1 < len(stack):
        told = f"in {_qualified(stack[inner + 1])}, {told}"
    if ours > user:
        told += f" ({_qualified(stack[ours])})"
    return f"is {told}"


def _awaited_worker(frame: FrameType) -> str | None:
    """Return the DataLoader worker that `frame` waits for, and what it is doing where that is known."""
    if frame.f_code.co_name != "_next_data" or not frame.f_code.co_filename.endswith("torch/utils/data/dataloader.py"):
        return None
    try:
        iteration = frame.f_locals["self"]
        number = iteration._task_info[iteration._rcvd_idx][0]
        named = f"worker {number} (process {iteration._workers[number].pid}) of its DataLoader"
    except (AttributeError, KeyError, IndexError):  # another version of torch, or a loader without workers
        return None
    # Workers of the Trainer report it.
    report = getattr(iteration._worker_init_fn, "doing", None)
    doing = report(number) if callable(report) else ""
    return f"{named}, which {doing}" if doing else named


def _outermost_first(frame: FrameType) -> list[FrameType]:
    stack = []
    current: FrameType | None = frame
    while current is not None:
        stack.append(current)
        current = current.f_back
    return stack[::-1]


@cache  # every backward asks, and a program has few files
def _is_users(file: str) -> bool:
    return not file.startswith((_OURS, *_LIBRARIES, "<frozen"))


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith(_LIBRARIES) or name.startswith("<frozen")


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _qualified(frame: FrameType) -> str:
    return getattr(frame.f_code, "co_qualname", frame.f_code.co_name)
