"""Status of a rank, as data and as text in failure reports."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import NamedTuple

from unitrain.monitoring.flight_recorder import FlightRecord, FlightRecorder, describe_differences
from unitrain.monitoring.stack_inspection import (
    awaited_worker,
    describe_functions,
    describe_line,
    format_stack,
    is_in_backward,
    main_thread_stack,
    user_position,
)


class Activity(Enum):
    """Activity of a rank's main thread, or the reason why its activity is unknown."""

    RUNNING = "running"
    WAITING_FOR_RANKS = "waiting for ranks"
    IN_BACKWARD = "in backward"
    WAITING_FOR_DATA = "waiting for data"
    MAIN_THREAD_ENDED = "main thread ended"
    FAILED = "failed"
    SHUT_DOWN = "shut down"
    NO_RESPONSE = "no response"


class Failure(NamedTuple):
    """The rank that failed first, and its error as one line."""

    rank: int
    error: str

    @classmethod
    def from_error(cls, error: BaseException, rank: int, text: str) -> Failure:
        """Return the failure for `error`, which `rank` raised; `text` is the error as one line.

        If the error names another rank as its cause, the failure is attributed to that rank.
        """
        failed_rank = getattr(error, "failed_rank", None)  # any exception may be raised on all ranks
        return cls(rank if failed_rank is None else failed_rank, text)

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.error}"


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank; fields that do not apply to its activity are empty.

    `location` is the user's line ("train.py:41: code"). `operation` is the collective or gradient phase in which the
    rank waits, and `worker` the DataLoader worker that it waits for. `library_function` and `unitrain_function` are the
    functions that it executes. `detail` is the error of a failed rank, or the reason for a shutdown.
    `latest_entry_text` is the latest operation and its line. `stack` contains the innermost frames as text, and
    `records` the latest operations.
    """

    activity: Activity = Activity.NO_RESPONSE
    location: str = ""
    operation: str = ""
    worker: str = ""
    library_function: str = ""
    unitrain_function: str = ""
    detail: str = ""
    latest_entry_text: str = ""
    stack: list[str] = field(default_factory=list)
    records: list[FlightRecord] = field(default_factory=list)

    @classmethod
    def from_main_thread(cls, flight_recorder: FlightRecorder) -> RankStatus:
        """Return the status of this process's main thread. Any thread may call it."""
        wait = flight_recorder.wait
        stack = main_thread_stack()
        records, latest_entry_text = flight_recorder.records(), flight_recorder.latest_entry_text
        if not stack:
            return cls(Activity.MAIN_THREAD_ENDED, latest_entry_text=latest_entry_text, records=records)
        user = stack[user_position(stack)]
        location = describe_line(user.f_code.co_filename, user.f_lineno)
        lines = format_stack(stack)
        if wait is not None:
            operation = str(wait[1] or flight_recorder.latest_operation)
            return cls(Activity.WAITING_FOR_RANKS, location, operation, stack=lines, records=records)
        for frame in reversed(stack):  # innermost first, because a batch may be loaded inside a backward pass
            if (worker := awaited_worker(frame)) is not None:
                return cls(Activity.WAITING_FOR_DATA, location, worker=worker, stack=lines, records=records)
            if is_in_backward(frame):
                return cls(Activity.IN_BACKWARD, location, stack=lines, records=records)
        library_function, unitrain_function = describe_functions(stack)
        return cls(
            Activity.RUNNING,
            location,
            library_function=library_function,
            unitrain_function=unitrain_function,
            latest_entry_text=latest_entry_text,
            stack=lines,
            records=records,
        )

    @property
    def may_wait_for_ranks(self) -> bool:
        """Whether this rank may be waiting for other ranks: it waits in a collective or is in a backward pass."""
        return self.activity in (Activity.WAITING_FOR_RANKS, Activity.IN_BACKWARD)

    @property
    def shows_stack(self) -> bool:
        """Whether `stack` adds information to the description. The stack of a waiting rank only shows frames of torch
        and unitrain.
        """
        return not self.may_wait_for_ranks and self.activity is not Activity.WAITING_FOR_DATA

    def to_json(self) -> str:
        """Return this status as JSON."""
        return json.dumps({**asdict(self), "activity": self.activity.value})

    @classmethod
    def from_json(cls, text: str | bytes) -> RankStatus:
        """Return the status from the output of `to_json`."""
        fields = json.loads(text)
        fields["activity"] = Activity(fields["activity"])
        fields["records"] = [FlightRecord(*record) for record in fields["records"]]
        return cls(**fields)

    def __str__(self) -> str:
        location = f"at {self.location}"
        match self.activity:
            case Activity.WAITING_FOR_RANKS:
                text = f"waiting for other ranks in {self.operation}, {location}"
            case Activity.IN_BACKWARD:
                text = f"in a backward pass, {location}"
            case Activity.WAITING_FOR_DATA:
                text = f"waiting for a batch from {self.worker}, {location}"
            case Activity.MAIN_THREAD_ENDED:
                text = "its main thread has ended"
            case Activity.FAILED:
                text = f"also failed: {self.detail}"
            case Activity.SHUT_DOWN:
                text = f"has shut down: {self.detail}"
            case Activity.NO_RESPONSE:
                text = "does not respond: its process has exited or is stopped, or its host is unreachable"
            case Activity.RUNNING:
                text = f"in {self.library_function}, {location}" if self.library_function else location
                text += f" ({self.unitrain_function})" if self.unitrain_function else ""
        return text + (f"; last operation: {self.latest_entry_text}" if self.latest_entry_text else "")


def format_statuses(
    statuses: Mapping[int, RankStatus], records_by_rank: Mapping[int, Sequence[FlightRecord]]
) -> list[str]:
    """Return the statuses as lines of text, with equal statuses grouped, and the records of all ranks if the records
    differ."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, status in statuses.items():
        stack = status.stack if status.shows_stack else []
        groups.setdefault((str(status), *stack), []).append(rank)
    lines = []
    for (text, *stack), ranks in groups.items():
        lines += [f"  {format_ranks(ranks)}: {text}", *(f"    {line}" for line in stack)]
    return lines + [f"  {line}" for line in describe_differences(records_by_rank)]


def format_ranks(ranks: Sequence[int]) -> str:
    """Return text such as "rank 3" or "ranks 0-2, 5" for `ranks` in ascending order."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    numbers = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ranges)
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
