"""Status that a rank reports when another rank asks for it, and its formatting."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from unitrain.monitoring.flight_recorder import FlightRecorder, Line, differences
from unitrain.monitoring.stack_inspection import LOADS, whereabouts

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
