"""Where a thread is, in words for somebody who looks for the rank that keeps the others waiting.

What ranks tell of themselves when another one asks, and how that is shown.
"""

from __future__ import annotations

import json
import linecache
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType

from unitrain.monitoring.flight_recorder import FlightRecorder, Line, differences

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


NO_ANSWER = "gives no answer: its process is gone or stopped, or its host cannot be reached"


@dataclass(frozen=True)
class Failure:
    """The rank that failed first, and its error in one line."""

    rank: int
    error: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.error}"


@dataclass(frozen=True)
class Answer:
    """Status of a rank: `doing` completes "rank 3 ...", `stack` has its innermost frames."""

    doing: str = NO_ANSWER
    stack: list[str] = field(default_factory=list)
    flight_recorder: list[Line] = field(default_factory=list)

    @property
    def waits(self) -> bool:
        """Whether this rank waits for other ranks, as opposed to keeping them waiting."""
        return _waits(self.doing)

    @classmethod
    def of_main_thread(cls, flight_recorder: FlightRecorder) -> Answer:
        """Return where this process's main thread is now; any thread may ask."""
        doing, stack = whereabouts(lambda: flight_recorder.latest)
        return cls(doing if _waits(doing) else doing + flight_recorder.last, stack, flight_recorder.lines())

    @property
    def loads_data(self) -> bool:
        """Whether the rank waits for a worker of its DataLoader, and not for other ranks."""
        return self.doing.startswith(LOADS)

    @classmethod
    def read(cls, text: bytes) -> Answer:
        """Return the answer that another rank has written."""
        doing, stack, lines = json.loads(text)
        return cls(doing, stack, [Line(*line) for line in lines])

    def write(self) -> str:
        """Return it as text that `read` understands."""
        return json.dumps([self.doing, self.stack, self.flight_recorder])


def describe(answers: Mapping[int, Answer], ledgers: Mapping[int, Sequence[Line]]) -> list[str]:
    """Return lines that tell where ranks are, those that wait in the same place together, and how `ledgers` differ."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, answer in answers.items():
        alike.setdefault((answer.doing, *([] if _waits(answer.doing) else answer.stack)), []).append(rank)
    lines = []
    for (doing, *stack), ranks in alike.items():
        lines += [f"  {name_ranks(ranks)} {doing}", *(f"    {line}" for line in stack)]
    return lines + [f"  {line}" for line in differences(ledgers)]


def name_ranks(ranks: list[int]) -> str:
    """Return "rank 3", or "each of ranks 0-2, 5"."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    named = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in parts)
    return f"rank {named}" if len(ranks) == 1 else f"each of ranks {named}"


def _waits(doing: str) -> bool:
    return doing.startswith(("waits", "is in the backward"))
