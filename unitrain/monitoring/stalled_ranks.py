"""Detection of ranks that wait for each other in different operations. Such a wait would last until the timeout."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from unitrain.bootstrap.messages import MessageStore
from unitrain.errors import CollectiveMismatchError
from unitrain.monitoring.flight_recorder import FlightRecorder
from unitrain.monitoring.rank_status import Failure, format_ranks

# A rank that has waited this long in one operation publishes its wait.
_STALL_SECONDS = 2.0
_FIRST_INTERVAL_SECONDS = 0.5
_KEY = "stalled"


class RankWait(NamedTuple):
    """The wait of a rank's main thread for other ranks.

    `wait` is the number of the wait and `operation_count` the number of operations that the rank has started, so a rank
    with equal values has not continued in the meantime. The rank waits in operation `number` of `sequence`, in which
    `ranks` take part (all ranks if empty). `text` describes the operation and its line. `latest_numbers` contains the
    number of the latest operation in each sequence. `publication` counts the publications of the rank.
    """

    publication: int
    wait: int
    operation_count: int
    sequence: str
    number: int
    ranks: list[int]
    text: str
    latest_numbers: dict[str, int]

    def has_started(self, other: RankWait) -> bool:
        """Return whether this rank has started the operation in which `other` waits."""
        return self.latest_numbers.get(other.sequence, -1) >= other.number


class StallDetector:
    """Detects that ranks wait for each other in different operations, which proves that they cannot continue.

    The watchdog thread of each rank calls `publish_and_compare`. While the main thread has waited for two seconds in
    one operation, the rank writes its wait to the store. Rank 0 reads the waits only while it waits, too, so ranks that
    make progress exchange nothing.

    A rank that waits starts no operation. If it waits in an operation that another waiting rank has not started, the
    wait lasts at least until that rank continues. A set of ranks, each of which waits for another one of the set in
    this way, therefore never continues. The operations of each sequence, for example the collectives of the backend or
    the backward passes of one model, are compared separately, because their order relative to each other may differ
    between ranks. The waits are read several times, and must be unchanged.
    """

    def __init__(
        self, recorder: FlightRecorder, rank: int, size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recorder, self._rank, self._size, self._clock = recorder, rank, size, clock
        self._wait, self._start_time = -1, 0.0
        self._publication, self._is_published = 0, False
        self._next_comparison, self._interval_seconds = 0.0, _FIRST_INTERVAL_SECONDS
        # Earlier readings with the same deadlock, at most two. Each wait has a later publication in the next reading.
        self._earlier_readings: list[dict[int, RankWait]] = []

    def publish_and_compare(self, store: MessageStore) -> Failure | None:
        """Publish this rank's wait if it is stalled, and, on rank 0, compare the waits of all ranks. Return a failure
        that describes the difference and names a rank that differs, or None. Ranks other than 0 return None."""
        now, own = self._clock(), self._current_wait()
        if own is None or own.wait != self._wait:
            self._wait, self._start_time = -1 if own is None else own.wait, now
            self._next_comparison, self._interval_seconds = 0.0, _FIRST_INTERVAL_SECONDS
        if own is not None and now - self._start_time < _STALL_SECONDS:
            own = None
        if own is not None or self._is_published:
            self._is_published = own is not None
            store.set(f"{_KEY}/{self._rank}", json.dumps(own))
        if own is None or self._rank or now < self._next_comparison:
            return None
        deadlocked = find_deadlock(self._read_waits(store, own))
        self._interval_seconds = _FIRST_INTERVAL_SECONDS if deadlocked else 2 * self._interval_seconds
        self._next_comparison = now + self._interval_seconds
        return _failure(deadlocked) if self._is_confirmed(deadlocked) else None

    def _current_wait(self) -> RankWait | None:
        """Return the wait of this rank's main thread, or None if it does not wait, or if another thread may start the
        operations for which other ranks wait."""
        latest_numbers, operation_count = dict(self._recorder.latest_numbers), self._recorder.operation_count
        number, operation = self._recorder.wait or (0, None)
        if operation is None or self._recorder.has_other_threads:
            return None
        self._publication += 1
        return RankWait(
            self._publication,
            number,
            operation_count,
            operation.sequence,
            operation.number,
            list(operation.ranks),
            self._recorder.describe(operation),
            latest_numbers,
        )

    def _read_waits(self, store: MessageStore, own: RankWait) -> dict[int, RankWait]:
        """Return the waits of all ranks, or an empty dict unless all ranks wait."""
        keys = [f"{_KEY}/{rank}" for rank in range(1, self._size)]
        if not store.check(keys):
            return {}
        waits = {0: own}
        for rank, key in enumerate(keys, start=1):
            if (fields := json.loads(store.get(key))) is None:  # that rank does not wait any more
                return {}
            waits[rank] = RankWait(*fields)
        return waits

    def _is_confirmed(self, deadlocked: Mapping[int, RankWait]) -> bool:
        """Return whether two earlier readings contain the same waits.

        A rank writes a wait before a reading, and again after the next reading. The waits of all ranks therefore exist
        at the same time, between two readings.
        """
        earlier = self._earlier_readings
        if not deadlocked or (earlier and not _are_unchanged(earlier[0], deadlocked)):
            earlier.clear()
        if not deadlocked:
            return False
        if len(earlier) < 2:
            earlier.append(dict(deadlocked))
            return False
        return all(wait.publication > earlier[1][rank].publication for rank, wait in deadlocked.items())


def find_deadlock(waits: Mapping[int, RankWait]) -> dict[int, RankWait]:
    """Return the waits of the ranks that wait for each other and can never continue; empty if there are none."""
    # Ranks with the same wait and the same history are compared once, because there may be thousands of ranks.
    groups: dict[str, list[int]] = {}
    for rank, wait in waits.items():
        key = json.dumps([wait.sequence, wait.number, wait.ranks, sorted(wait.latest_numbers.items())])
        groups.setdefault(key, []).append(rank)
    blocked = list(groups.values())

    def awaits(ranks: list[int], others: list[int]) -> bool:
        wait = waits[ranks[0]]
        takes_part = not wait.ranks or not set(wait.ranks).isdisjoint(others)
        return takes_part and not waits[others[0]].has_started(wait)

    while True:
        remaining = [ranks for ranks in blocked if any(awaits(ranks, others) for others in blocked)]
        if len(remaining) == len(blocked):
            return {rank: waits[rank] for ranks in remaining for rank in ranks}
        blocked = remaining


def _are_unchanged(earlier: Mapping[int, RankWait], now: Mapping[int, RankWait]) -> bool:
    return earlier.keys() == now.keys() and all(
        wait._replace(publication=0) == now[rank]._replace(publication=0) for rank, wait in earlier.items()
    )


def _failure(deadlocked: Mapping[int, RankWait]) -> Failure:
    ranks_by_text: dict[str, list[int]] = {}
    for rank, wait in sorted(deadlocked.items()):
        ranks_by_text.setdefault(wait.text, []).append(rank)
    operations = "; ".join(f"{format_ranks(ranks)} in {text}" for text, ranks in ranks_by_text.items())
    most_common = max(ranks_by_text.values(), key=len)
    rank = next((rank for rank in sorted(deadlocked) if rank not in most_common), most_common[0])
    return Failure(
        rank,
        f"{CollectiveMismatchError.__name__}: The ranks wait for each other in different operations: {operations}. "
        "Call the same collectives on every rank, and use the model in the same mode and with the same branches.",
    )
