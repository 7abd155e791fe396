"""What a rank has lately done together with the others, for whoever asks what it waits for, or what it did last."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import NamedTuple

from unitrain.monitoring.collective_call import CollectiveCall
from unitrain.monitoring.stack_inspection import place, user_frame

_KEPT = 16
_SHOWN = 4


class GradientWork(NamedTuple):
    """What ranks do together for their gradients, numbered by `kind`: "backward", or "bucketing", DDP's plan for it."""

    kind: str
    number: int

    @property
    def key(self) -> str:
        """What every rank that takes part in it calls it."""
        return f"{self.kind} {self.number}"

    def __str__(self) -> str:
        return f"began {self.kind} #{self.number}"


class _Found(NamedTuple):
    """How deep the frame that the user's frame called was, and the code of both."""

    depth: int
    called: CodeType
    user: CodeType


class Line(NamedTuple):
    """A line of a ledger, as other ranks read it: `key` is what must be the same on all of them at this `position`."""

    position: int
    key: str
    text: str


class FlightRecorder:
    """The latest collectives and backwards of this rank, and the user's lines that they were called from.

    The training enters them, in any thread; any other thread may read. Entering takes about a microsecond.
    """

    def __init__(self) -> None:
        self._entries: deque[tuple[int, CollectiveCall | GradientWork, str, int]] = deque(maxlen=_KEPT)
        self._entered = 0
        # Where the user's frame was in the stack, by the type of the entry: in a loop it is there again.
        self._found: dict[type, _Found] = {}

    def enter(self, what: CollectiveCall | GradientWork) -> None:
        """Note that this rank begins `what` now."""
        frame = self._user_frame(type(what))
        self._entries.append((self._entered, what, frame.f_code.co_filename, frame.f_lineno))
        self._entered += 1

    def _user_frame(self, kind: type) -> FrameType:
        """Return the frame of the user that calls `enter`.

        Each frame that Python code looks at is allocated first. In a loop the user's frame is usually as deep in the
        stack as in the step before, so only that frame and the one that it called are compared with those found then.
        """
        if (found := self._found.get(kind)) is not None:
            try:
                called = sys._getframe(found.depth)
            except ValueError:  # the stack is not that deep
                pass
            else:
                if called.f_code is found.called and (user := called.f_back) and user.f_code is found.user:
                    return user
        called, depth = sys._getframe(1), 1  # `enter`
        user = user_frame(called.f_back or called)
        while called.f_back is not None and called.f_back is not user:
            called, depth = called.f_back, depth + 1
        self._found[kind] = _Found(depth, called.f_code, user.f_code)
        return user

    @property
    def entered(self) -> int:
        """How many entries there have been; the same number on ranks that have done the same."""
        return self._entered

    @property
    def sentence(self) -> str:
        """What was entered last, as the rest of "rank 3 ..."; and without its verb, it is `latest`."""
        return str(self._entries[-1][1]) if self._entries else "is with the others"

    @property
    def latest(self) -> str:
        return _name(self._entries[-1][1]) if self._entries else "nothing yet"

    @property
    def meeting_point(self) -> str:
        """What every rank that takes part in the latest entry calls it."""
        return _key(self._entries[-1][1]) if self._entries else ""

    @property
    def last(self) -> str:
        """The latest entry and where it was called, as part of a sentence; empty where there is none."""
        if not self._entries:
            return ""
        _, what, file, line = self._entries[-1]
        return f"; its last was {_name(what)}, at {place(file, line)}"

    def lines(self) -> list[Line]:
        """Return all that is kept, oldest first."""
        return [
            Line(position, f"{getattr(what, 'operation', '')} {_key(what)}", f"{_name(what)}, at {place(file, line)}")
            for position, what, file, line in list(self._entries)
        ]


def differences(ledgers: Mapping[int, Sequence[Line]]) -> list[str]:
    """Return the last lines of each rank's ledger where any two of them differ, and nothing where none do."""
    seen: dict[int, str] = {}
    if all(seen.setdefault(line.position, line.key) == line.key for lines in ledgers.values() for line in lines):
        return []
    told = ["What the ranks did together last differs; with UNITRAIN_DEBUG=1 that is an error at once:"]
    for rank, lines in sorted(ledgers.items()):
        told += [f"  rank {rank}: {line.text}" for line in lines[-_SHOWN:]]
    return told


def not_begun(work: GradientWork | None, ranks: Sequence[int], ledgers: Mapping[int, Sequence[Line]]) -> list[int]:
    """Return those of `ranks` whose ledger does not have `work`: a rank that has gone on since has begun it too."""
    if work is None:
        return list(ranks)
    return [rank for rank in ranks if all(line.key.strip() != work.key for line in ledgers.get(rank, ()))]


def _key(what: CollectiveCall | GradientWork) -> str:
    return what.key if isinstance(what, GradientWork) else f"collective {what.number}"


def _name(what: CollectiveCall | GradientWork) -> str:
    return str(what).removeprefix("called ").removeprefix("began ")
