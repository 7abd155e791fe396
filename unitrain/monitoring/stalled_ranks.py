"""Detection of ranks that all wait for each other in different operations. Such a wait would last until the timeout."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from unitrain.bootstrap.messages import MessageStore
from unitrain.errors import CollectiveMismatchError
from unitrain.monitoring.flight_recorder import FlightRecord, FlightRecorder
from unitrain.monitoring.rank_status import Failure, RankStatus, format_ranks

# A rank that has waited this long in one operation publishes its latest operations.
_STALL_SECONDS = 2.0
_FIRST_INTERVAL_SECONDS = 0.5
_KEY = "stalled"


class StallDetector:
    """Compares the latest operations of all ranks while every rank waits for others.

    The watchdog thread of each rank calls `publish_and_compare`. A rank that has waited in the same operation for two
    seconds writes its flight records to the store. Rank 0 reads and compares the records only while it waits, too, so
    ranks that make progress exchange nothing. Equal positions in the flight records must have equal keys on all ranks.
    If they differ while every rank waits, the wait cannot end.
    """

    def __init__(
        self, recorder: FlightRecorder, rank: int, size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._recorder, self._rank, self._size, self._clock = recorder, rank, size, clock
        self._operation_count, self._start_time = -1, 0.0
        self._is_published = False
        self._next_comparison, self._interval_seconds = 0.0, _FIRST_INTERVAL_SECONDS

    def publish_and_compare(self, store: MessageStore) -> Failure | None:
        """Publish this rank's latest operations if it is stalled, and, on rank 0, compare those of all ranks. Return a
        failure that describes the difference and names a rank that differs, or None. Ranks other than 0 return None."""
        now, operation_count = self._clock(), self._recorder.operation_count
        if operation_count != self._operation_count:
            self._operation_count, self._start_time = operation_count, now
            self._next_comparison, self._interval_seconds = 0.0, _FIRST_INTERVAL_SECONDS
        is_stalled = (
            operation_count > 0
            and now - self._start_time >= _STALL_SECONDS
            and RankStatus.from_main_thread(self._recorder).may_wait_for_ranks
        )
        if is_stalled != self._is_published:
            self._is_published = is_stalled
            store.set(f"{_KEY}/{self._rank}", json.dumps(self._recorder.records() if is_stalled else []))
        if self._rank or not is_stalled or now < self._next_comparison:
            return None
        self._next_comparison = now + self._interval_seconds
        self._interval_seconds *= 2
        keys = [f"{_KEY}/{rank}" for rank in range(1, self._size)]
        if not store.check(keys):
            return None
        records = {0: self._recorder.records()}
        for rank, key in enumerate(keys, start=1):
            records[rank] = [FlightRecord(*record) for record in json.loads(store.get(key))]
            if not records[rank]:  # that rank does not wait any more
                return None
        return find_stall(records)


def find_stall(records_by_rank: Mapping[int, Sequence[FlightRecord]]) -> Failure | None:
    """Return a failure for the first position at which the records differ, or None if there is none."""
    records_by_position: dict[int, dict[int, FlightRecord]] = {}
    for rank, records in records_by_rank.items():
        for record in records:
            records_by_position.setdefault(record.position, {})[rank] = record
    for _, ranks_at_position in sorted(records_by_position.items()):
        counts = Counter(record.key for record in ranks_at_position.values())
        if len(counts) == 1:
            continue
        ranks_by_text: dict[str, list[int]] = {}
        for rank, record in ranks_at_position.items():
            ranks_by_text.setdefault(record.text, []).append(rank)
        operations = "; ".join(f"{format_ranks(ranks)} in {text}" for text, ranks in ranks_by_text.items())
        most_common_key = max(counts, key=counts.__getitem__)
        rank = next(rank for rank, record in ranks_at_position.items() if record.key != most_common_key)
        return Failure(
            rank,
            f"{CollectiveMismatchError.__name__}: The ranks wait for each other in different operations: {operations}. "
            "Call the same collectives on every rank, and use the model in the same mode and with the same branches.",
        )
    return None
