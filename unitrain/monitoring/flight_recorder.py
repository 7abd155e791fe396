"""History of this rank's recent collectives and backward passes, with the user's lines that started them."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from unitrain.monitoring.stack_inspection import describe_line, user_frame
from unitrain.torch_compat import current_backward

_MAX_KEPT = 256
_MAX_SENT = 16  # entries that are sent to other ranks
_MAX_SHOWN = 4


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without "torch."."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's arguments of collective number `number`.

    `operation` is the name of the collective, `op` the reduction ("" if there is none), and `root` the root rank (-1 if
    there is none). `shape` is [bytes] for objects. `is_rejected` is True if this rank's arguments are invalid. `caller`
    is the model that calls the collective, or "".
    """

    number: int
    operation: str
    op: str = ""
    root: int = -1
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    is_rejected: bool = False
    caller: str = ""

    @property
    def sequence(self) -> str:
        """Identifier of the sequence in which `number` counts this collective."""
        return "collective"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Empty, because all ranks take part in a collective of the backend."""
        return ()

    @property
    def key(self) -> str:
        """Identifier of this collective, equal on all ranks that take part in it."""
        return f"collective {self.number}"

    @property
    def fingerprint(self) -> int:
        """Hash below 2**63 that is equal on two ranks if their calls match, and different otherwise.

        Calls of allgather may differ in dim 0, and calls for objects in the number of bytes.
        """
        if self.operation in ("broadcast_object", "allgather_object"):
            arguments: tuple[object, ...] = ()
        else:
            first_fixed_dim = 1 if self.operation == "allgather" else 0
            arguments = (self.dtype, len(self.shape), self.shape[first_fixed_dim:])
        content = repr((self.number, self.operation, self.op, self.root, self.is_rejected, self.caller, arguments))
        return int.from_bytes(blake2b(content.encode(), digest_size=8).digest(), "little") >> 1

    @property
    def count(self) -> int:
        """Length of dim 0 (1 for a scalar), or the size of an object in bytes. It may differ between ranks."""
        return self.shape[0] if self.shape else 1

    def __str__(self) -> str:
        if self.is_rejected:
            return f"{self.operation} with invalid arguments (collective #{self.number})"
        arguments = []
        if self.dtype is not None:
            arguments.append(f"{dtype_name(self.dtype)} {list(self.shape)}")
        if self.op:
            arguments.append(self.op)
        if self.root > 0:
            arguments.append(f"root={self.root}")
        if self.caller:
            arguments.append(f"of {self.caller}")
        return f"{self.operation}({', '.join(arguments)}) (collective #{self.number})"


class GradientPhase(NamedTuple):
    """A phase of a step. `kind` is "backward", "bucket rebuild", "parameter broadcast", "parameter allgather",
    "gradient reducescatter", "outer gradient", "pipeline step", "pipeline forward" or "benchmark".

    Phases are numbered separately for each owner, the number of a model or pipeline; -1 stands for all others. `ranks`
    contains the ranks that take part; it is empty for all ranks.
    """

    kind: str
    number: int
    owner: int = -1
    ranks: tuple[int, ...] = ()

    @property
    def sequence(self) -> str:
        """Identifier of the sequence in which `number` counts this phase."""
        return self.kind if self.owner < 0 else f"{self.kind} of {self.owner}"

    @property
    def key(self) -> str:
        """Identifier of this phase, equal on all ranks that take part in it."""
        return f"{self.sequence} {self.number}"

    def __str__(self) -> str:
        return f"{self.kind} #{self.number}"


Operation = CollectiveCall | GradientPhase


class FlightEntry(NamedTuple):
    """An operation, the user's line that called it, and its start as a Unix timestamp in nanoseconds."""

    position: int
    operation: Operation
    file: str
    line: int
    time_ns: int


class FlightRecord(NamedTuple):
    """An entry of a flight recorder, in the form that is sent to other ranks.

    `key` must be equal on all ranks for entries with the same `position`.
    """

    position: int
    key: str
    text: str


class _UserFramePosition(NamedTuple):
    """Stack depth of the frame that the user's frame called, and the code objects of both frames."""

    depth: int
    called_code: CodeType
    user_code: CodeType


class FlightRecorder:
    """The latest collectives and gradient phases of this rank, and the user's lines that called them.

    Any thread may record and read. Recording takes about a microsecond. `wait` is the current wait of the main thread
    for other ranks, as a pair (number of the wait, operation), or None while it does not wait. `timed_out_position` is
    the position of the latest operation that timed out, or None. `has_other_threads` is true if another thread has
    recorded an operation outside of a backward pass. `latest_numbers` contains the number of the latest operation in
    each sequence.
    """

    def __init__(self) -> None:
        self.wait: tuple[int, Operation | None] | None = None
        self.timed_out_position: int | None = None
        self.has_other_threads = False
        self.latest_numbers: dict[str, int] = {}
        self._main_thread = threading.main_thread().ident
        self._wait_count = 0
        self._pipeline_numbers = count()
        self._entries: deque[FlightEntry] = deque(maxlen=_MAX_KEPT)
        self._operation_count = 0
        # Stack position of the user's frame per kind of operation. In a loop, it is the same in every step.
        self._positions: dict[str, _UserFramePosition] = {}

    def new_pipeline_number(self) -> int:
        """Return a number for a new pipeline. It is equal on all ranks, which create pipelines in the same order."""
        return next(self._pipeline_numbers)

    def forget(self, sequences: Iterable[str]) -> None:
        """Discard the latest numbers of `sequences` of a deleted model, which records no further phases."""
        for sequence in sequences:
            self.latest_numbers.pop(sequence, None)

    def begin_wait(self, operation: Operation | None = None) -> None:
        """Record that the main thread starts to wait in `operation`, by default the latest operation. Assign the
        previous value to `wait` when the wait ends."""
        self._wait_count += 1
        self.wait = (self._wait_count, operation or (self._entries[-1].operation if self._entries else None))

    def record(self, operation: Operation) -> None:
        """Record that this rank starts `operation`."""
        if threading.get_ident() != self._main_thread and current_backward() == -1:
            self.has_other_threads = True
        frame = self._user_frame(operation.kind if isinstance(operation, GradientPhase) else "collective")
        self._entries.append(
            FlightEntry(self._operation_count, operation, frame.f_code.co_filename, frame.f_lineno, time.time_ns())
        )
        self.latest_numbers[operation.sequence] = operation.number
        self._operation_count += 1

    def _user_frame(self, kind: str) -> FrameType:
        """Return the user's frame from which `record` was called, directly or indirectly.

        Python allocates a frame object when it is first accessed. In a loop, the user's frame is usually at the same
        depth as in the previous step, so only that frame and the frame that it called are accessed and compared.
        """
        if (position := self._positions.get(kind)) is not None:
            try:
                called = sys._getframe(position.depth)
            except ValueError:  # the stack has fewer frames
                pass
            else:
                user_code = position.user_code
                if called.f_code is position.called_code and (user := called.f_back) and user.f_code is user_code:
                    return user
        called, depth = sys._getframe(1), 1  # `record`
        user = user_frame(called.f_back or called)
        while called.f_back is not None and called.f_back is not user:
            called, depth = called.f_back, depth + 1
        self._positions[kind] = _UserFramePosition(depth, called.f_code, user.f_code)
        return user

    @property
    def operation_count(self) -> int:
        """Number of operations recorded so far. It is equal on ranks that have called the same operations."""
        return self._operation_count

    @property
    def latest_operation(self) -> str:
        """Name of the latest operation, or "the first operation" if none is recorded."""
        return str(self._entries[-1].operation) if self._entries else "the first operation"

    @property
    def is_main_thread_waiting(self) -> bool:
        """Whether the main thread waits for other ranks."""
        return self.wait is not None

    @property
    def latest_key(self) -> str:
        """Key of the latest operation, or an empty string if there is none."""
        return self._entries[-1].operation.key if self._entries else ""

    @property
    def latest_entry_text(self) -> str:
        """Name of the latest operation and the user's line that called it, or an empty string if there is none."""
        if not self._entries:
            return ""
        entry = self._entries[-1]
        return f"{entry.operation}, at {describe_line(entry.file, entry.line)}"

    def describe(self, operation: Operation) -> str:
        """Return the name of `operation` and, if it is a recent one, the user's line that called it."""
        entry = next((entry for entry in reversed(self.entries()) if entry.operation == operation), None)
        return str(operation) if entry is None else f"{operation}, at {describe_line(entry.file, entry.line)}"

    def entries(self) -> list[FlightEntry]:
        """Return all recorded entries, oldest first."""
        return list(self._entries)

    def records(self) -> list[FlightRecord]:
        """Return the latest entries in the form that is sent to other ranks, oldest first."""
        return [
            FlightRecord(
                entry.position,
                f"{getattr(entry.operation, 'operation', '')} {entry.operation.key}",
                f"{entry.operation}, at {describe_line(entry.file, entry.line)}",
            )
            for entry in self.entries()[-_MAX_SENT:]
        ]


def describe_mismatch(calls: Sequence[CollectiveCall]) -> str:
    """Return one sentence that lists the calls of all ranks, in rank order, with equal calls grouped."""
    ranks_by_call: dict[str, list[str]] = {}
    for rank, call in enumerate(calls):
        ranks_by_call.setdefault(str(call), []).append(str(rank))
    groups = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} called {call}"
        for call, ranks in ranks_by_call.items()
    ]
    return f"The ranks called different collectives: {'; '.join(groups)}."


def describe_differences(records_by_rank: Mapping[int, Sequence[FlightRecord]]) -> list[str]:
    """Return the latest records of each rank as lines of text if the records differ between ranks, otherwise []."""
    keys: dict[int, str] = {}
    if all(
        keys.setdefault(record.position, record.key) == record.key
        for records in records_by_rank.values()
        for record in records
    ):
        return []
    lines = ["The latest operations differ between ranks. Set UNITRAIN_DEBUG=1 to detect this immediately:"]
    for rank, records in sorted(records_by_rank.items()):
        lines += [f"  rank {rank}: {record.text}" for record in records[-_MAX_SHOWN:]]
    return lines


def ranks_without_phase(
    phase: GradientPhase | None,
    ranks: Sequence[int],
    records_by_rank: Mapping[int, Sequence[FlightRecord]],
) -> list[int]:
    """Return those of `ranks` whose latest records do not contain `phase`, or all `ranks` if `phase` is None.

    The records of a rank that has started `phase` and then a few later operations still contain `phase`.
    """
    if phase is None:
        return list(ranks)
    key = phase.key
    return [rank for rank in ranks if all(record.key.strip() != key for record in records_by_rank.get(rank, ()))]
