"""FailureMonitor: the interface through which backends detect and report failures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from unitrain.bootstrap import environment
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.bootstrap.responsive_store import StoreNotRespondingError, call_with_limit
from unitrain.errors import CollectiveTimeoutError
from unitrain.monitoring import supervisor_client
from unitrain.monitoring.deadlines import Deadline
from unitrain.monitoring.flight_record_file import write_flight_record
from unitrain.monitoring.flight_recorder import (
    FlightRecorder,
    GradientPhase,
    Operation,
    describe_differences,
    ranks_without_phase,
)
from unitrain.monitoring.loop_counters import LoopCounters
from unitrain.monitoring.rank_status import Activity, RankStatus, format_ranks
from unitrain.monitoring.watchdog import Watchdog

# Ranks reach the timeout at slightly different times, so each rank waits this long for the other ranks' reports.
_LATE_RANKS_TIMEOUT = timedelta(seconds=2)
# Additional time for the responses of the store.
_STORE_TIMEOUT_SECONDS = 10.0


class FailureMonitor:
    """Detects timeouts and failures of this rank and of the other ranks, and reports them.

    A backend records its collectives, waits for them with `wait_for_ranks`, and reports its own failures. Timeout
    errors name the missing ranks and the source lines that these ranks are executing. All ranks must create their
    monitor at the same time. With `polls`, which requires operations on CPU tensors, waits poll for a few milliseconds
    before they block. `use_watchdog=False` omits the thread that detects failures of other ranks.
    """

    def __init__(self, rendezvous: Rendezvous, *, polls: bool, use_watchdog: bool = True) -> None:
        self._rendezvous, self._polls = rendezvous, polls
        self._max_polling_seconds = environment.max_polling_seconds(
            rendezvous.node_positions[rendezvous.rank_info.rank].local_size
        )
        self._main_thread = threading.main_thread().ident
        self._recorder = FlightRecorder()
        self.record: Callable[[Operation], None] = self._recorder.record
        self.new_pipeline_number, self.forget_sequences = self._recorder.new_pipeline_number, self._recorder.forget
        self.loop_counters = LoopCounters()
        self._watchdog: Watchdog | None = None
        if use_watchdog and rendezvous.rank_info.size > 1:
            self._watchdog = Watchdog(rendezvous, self._recorder, self.loop_counters)

    def wait_for_ranks(
        self,
        work: dist.Work | None,
        *,
        polls: bool | None = None,
        phase: GradientPhase | None = None,
        current_phase: GradientPhase | None = None,
    ) -> None:
        """Wait for `work` of the latest recorded operation, or of an earlier `phase`. Under NCCL, only the current CUDA
        stream waits.

        `current_phase` is the phase to which `work` belongs if the phase may contain later operations. Do nothing if
        `work` is None. `polls` overrides the constructor argument. After a timeout, raises CollectiveTimeoutError,
        which names the missing ranks. If the wait fails for another reason, raises the ModelError of another rank if
        this error is the cause, and otherwise the RuntimeError of the transport.
        """
        if work is None:
            return
        is_main_thread, outer_wait = self._is_main_thread(), self._recorder.wait
        if is_main_thread:
            self._recorder.begin_wait(phase or current_phase)
        try:
            if self._polls if polls is None else polls:
                _poll(work, self._max_polling_seconds)
            work.wait()
        except (RuntimeError, CollectiveTimeoutError) as error:
            self._raise_cause_of_failed_wait(error, phase)
            raise
        finally:
            if is_main_thread:
                self._recorder.wait = outer_wait

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context manager in which this thread waits for other ranks in the latest recorded operation, except inside
        `computing`.

        Raises the same errors as `wait_for_ranks`. Use it for waits without a `Work`, or for a sequence of waits.
        """
        is_main_thread, outer_wait = self._is_main_thread(), self._recorder.wait
        if is_main_thread:
            self._recorder.begin_wait()
        try:
            yield
        except RuntimeError as error:
            # An error inside `computing` is not an error of the wait, so it is re-raised unchanged.
            if self._recorder.is_main_thread_waiting or not is_main_thread:
                self._raise_cause_of_failed_wait(error, None)
            raise
        finally:
            if is_main_thread:
                self._recorder.wait = outer_wait

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Context manager inside `waiting` in which the main thread computes instead of waiting. If the computation
        raises an exception, `waiting` re-raises it unchanged.
        """
        outer_wait, self._recorder.wait = self._recorder.wait, None
        yield
        if outer_wait is not None:
            self._recorder.begin_wait(outer_wait[1])

    def set_deadline(self, is_done: Callable[[], bool], phase: GradientPhase) -> Deadline | None:
        """Set a deadline for `phase`, a few seconds after the timeout. If `is_done` does not return true before the
        deadline, the watchdog reports the missing ranks and terminates the process.

        Use it for waits of the main thread that cannot be interrupted. The call takes about 1 µs. Without a watchdog,
        do nothing and return None.
        """
        if self._watchdog is None:
            return None
        return self._watchdog.set_deadline(is_done, partial(self._diagnose_timeout, phase))

    def raise_cause_of(self, error: BaseException) -> None:
        """Re-raise another rank's ModelError if it caused `error`. Waits up to two seconds for the report of that
        ModelError."""
        if self._watchdog is not None and (cause := self._watchdog.wait_for_cause_of(error)) is not None:
            raise cause from error

    def raise_reported_model_error(self) -> None:
        """Re-raise another rank's ModelError if its report has arrived."""
        if self._watchdog is not None and (error := self._watchdog.model_error()) is not None:
            raise error

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this rank fails with `error`. They terminate within seconds."""
        if self._watchdog is not None:
            self._watchdog.report_failure(error)

    def report_unless_shared(self, error: BaseException, key: str, ranks: Collection[int]) -> None:
        """Report `error` like `report_failure`, unless all of `ranks` call this method with the same `key` within two
        seconds.

        Use it for an error after which the other ranks wait forever, unless they raise the error too. `key` must be
        different for each error, and the same on all of `ranks`.
        """
        if self._watchdog is None:
            return
        try:
            missing_ranks = call_with_limit(
                partial(self._post_and_find_missing, f"error/{key}"),
                _LATE_RANKS_TIMEOUT.total_seconds() + _STORE_TIMEOUT_SECONDS,
            )
        except RuntimeError:  # rank 0's process, which serves the store, has exited or does not respond
            return
        if not set(ranks).isdisjoint(missing_ranks):
            self._watchdog.report_failure(error)

    def _is_main_thread(self) -> bool:
        return threading.get_ident() == self._main_thread

    def _raise_cause_of_failed_wait(self, error: BaseException, phase: GradientPhase | None) -> None:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            raise CollectiveTimeoutError(self._diagnose_timeout(phase)) from None  # the transport does not name ranks
        self.raise_cause_of(error)

    def stop(self) -> None:
        """Stop monitoring at a normal shutdown. Ranks need not stop at the same time."""
        if self._watchdog is not None:
            self._watchdog.stop()
        supervisor_client.report_shutdown()

    def _diagnose_timeout(self, phase: GradientPhase | None = None) -> str:
        """Find the missing ranks, and return the error text for the timeout of the latest operation, or of an earlier
        `phase`.

        The ranks exchange their statuses via the rendezvous store, which also works while the backend is stuck.
        """
        rank, seconds = self._rendezvous.rank_info.rank, self._rendezvous.timeout.total_seconds()
        if phase is None:
            self._recorder.timed_out_position = self._recorder.operation_count - 1
        write_flight_record(self._recorder, rank, self._rendezvous.rank_info.size)
        operation = self._recorder.latest_operation if phase is None else str(phase)
        key = f"stuck/{self._recorder.latest_key if phase is None else phase.key}"
        headline = f"{operation} timed out after {seconds:g} s on rank {rank}"
        try:
            missing_ranks = call_with_limit(
                partial(self._post_and_find_missing, key), _LATE_RANKS_TIMEOUT.total_seconds() + _STORE_TIMEOUT_SECONDS
            )
        except StoreNotRespondingError:
            return (
                f"{headline}. Missing ranks: 0, which does not respond: its process is stopped, or its host is "
                "unreachable. Check that host and its network connection, then restart the job."
            )
        except RuntimeError:  # rank 0's process, which serves the store, has exited
            return f"{headline}: the process of rank 0 has exited. See the first error that rank 0 logged."
        statuses: dict[int, RankStatus] = {}
        if self._watchdog is not None and missing_ranks:
            statuses = self._watchdog.request_statuses(missing_ranks)
        records = {other: status.records for other, status in statuses.items()}
        missing_ranks = ranks_without_phase(phase, missing_ranks, records)
        names = ", ".join(map(str, missing_ranks)) or "none (all ranks arrived after the timeout)"
        loading = [other for other, status in statuses.items() if status.activity is Activity.WAITING_FOR_DATA]
        if not missing_ranks:
            check = "Find the slow ranks"
        else:
            check = f"Check the data loading of {format_ranks(loading)}" if loading else "Check what those ranks do"
        lines = [
            f"{headline}. Missing ranks: {names}. {check}, or raise the limit with unitrain.init(timeout_seconds=...).",
            *(f"  rank {other}: {status}" for other, status in statuses.items()),
            *describe_differences({rank: self._recorder.records(), **records}),
        ]
        return "\n".join(lines)

    def _post_and_find_missing(self, key: str) -> list[int]:
        self._rendezvous.post(key)
        return self._rendezvous.wait_for_missing_ranks(key, _LATE_RANKS_TIMEOUT)


def _poll(work: dist.Work, max_seconds: float) -> None:
    """Poll until `work` is done, but for at most `max_seconds`."""
    # `Work` subclasses that are implemented in Python poll in their own `wait`.
    if type(work) is not dist.Work or work.is_completed():
        return
    deadline = time.monotonic() + max_seconds
    while not work.is_completed() and time.monotonic() < deadline:
        os.sched_yield()
