"""Watchdog thread that propagates failures between ranks and terminates a blocked process.

It polls the rendezvous store every 0.5 s for a failure report. If another rank has failed, it publishes this rank's
status (stack and recent operations), waits a few seconds for the main thread to fail, and then terminates the process.
It does not depend on the backend, so it also works while a collective is stuck or the main thread is blocked in C++.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from unitrain.bootstrap import environment
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.bootstrap.responsive_store import StoreNotRespondingError
from unitrain.errors import CollectiveTimeoutError, DataError, ModelError
from unitrain.monitoring.deadlines import DataDeadline, Deadline, Deadlines, ShutdownWaitDetector
from unitrain.monitoring.failure_store import FailureStore, RankProcess, Shutdown
from unitrain.monitoring.flight_record_file import write_flight_record
from unitrain.monitoring.flight_recorder import FlightRecorder
from unitrain.monitoring.liveness import LivenessCheck
from unitrain.monitoring.loop_counters import LoopCounters
from unitrain.monitoring.rank_status import Activity, Failure, RankStatus, format_statuses
from unitrain.monitoring.stack_inspection import awaited_batch
from unitrain.monitoring.stalled_ranks import StallDetector
from unitrain.monitoring.supervisor_client import LAST_CHECKPOINT_SECONDS
from unitrain.output import print_to_stderr
from unitrain.processes import replace_parent_death_signal
from unitrain.threads import start_thread, surviving_errors

# Time between two polls, which is longer in large jobs: all ranks together send at most 1,000 polls per second.
_PERIOD_SECONDS, _PERIOD_SECONDS_PER_RANK = 0.5, 0.001
# Number of ranks for which each poll also compares the training loops, with up to three requests. Larger jobs compare
# them less often.
_RANKS_COMPARED_PER_POLL = 64
# Time within which the main thread must raise an error after another rank has failed.
_GRACE_SECONDS = 5.0
# Maximum time for which a failing rank waits until another thread of its process has printed the report.
_REPORT_SECONDS = 3.5
# Launchers whose ranks continue to run when the launcher is killed.
_LAUNCHERS_WITHOUT_CLEANUP = ("torchrun",)
# Number of polls for which a rank that has lost a peer waits for the report of the peer's failure.
_FAILURE_REPORT_POLLS = 4
# A deadline expires this long after the timeout of the main thread's own wait.
_DEADLINE_MARGIN_SECONDS = 5.0
# Timeouts of requests to the store. While the watchdog thread waits for a response, it does not check deadlines.
_POLL_TIMEOUT_SECONDS, _STORE_TIMEOUT_SECONDS = 2.0, 10.0
_PROCESS_ENDED = "its process was killed or crashed"
_SHUTDOWN_TOO_EARLY = "it shut down while other ranks still waited for it"
# Transport errors after the loss of a peer, which are consequences of another rank's failure.
_PEER_LOST_MESSAGES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe",
                       "Horovod has been shut down", "Connection refused", "Read error", "Write error")  # fmt: skip


class Watchdog:
    """Watchdog of this rank's main thread, active until `stop`. All ranks create it at the same time.

    A rank that fails calls `report_failure`. The liveness check detects killed ranks: rank 0 detects and reports killed
    processes of other ranks, and every other rank detects a killed process of rank 0.
    """

    def __init__(self, rendezvous: Rendezvous, flight_recorder: FlightRecorder, loop_counters: LoopCounters) -> None:
        self._rank, self._size = rendezvous.rank_info.rank, rendezvous.rank_info.size
        self._flight_recorder, self._loop_counters = flight_recorder, loop_counters
        self._period_seconds = max(_PERIOD_SECONDS, self._size * _PERIOD_SECONDS_PER_RANK)
        self._polls_per_comparison, self._num_polls = -(-self._size // _RANKS_COMPARED_PER_POLL), 0
        # Only the watchdog thread uses `_thread_store`. All other threads use `_store`.
        self._thread_store = FailureStore(rendezvous.store, self._rank, _POLL_TIMEOUT_SECONDS)
        self._store = FailureStore(rendezvous.store, self._rank, _STORE_TIMEOUT_SECONDS)
        self._deadlines = Deadlines(rendezvous.timeout.total_seconds() + _DEADLINE_MARGIN_SECONDS)
        self._timeout_seconds = rendezvous.timeout.total_seconds()
        self._data_deadline = DataDeadline(self._timeout_seconds + _DEADLINE_MARGIN_SECONDS)
        self._launcher, self._parent_pid, self._pid = rendezvous.rank_info.launcher, os.getppid(), os.getpid()
        # For launchers in _LAUNCHERS_WITHOUT_CLEANUP, the parent-death signal is disabled. The watchdog thread detects
        # the launcher's exit instead, and leaves time for a checkpoint.
        has_no_cleanup = self._launcher in _LAUNCHERS_WITHOUT_CLEANUP
        self._parent_death_signal = replace_parent_death_signal(0) if has_no_cleanup else 0
        self._stop_event, self._failure_known_event = threading.Event(), threading.Event()
        self._error: BaseException | None = None  # the error that makes this rank fail
        self._first_failure: Failure | None = None
        self._has_reported = False  # whether this rank reported the first failure
        self._report: list[str] = []
        self._stall_detector = StallDetector(flight_recorder, self._rank, self._size)
        self._shutdown_wait_detector = ShutdownWaitDetector(self._period_seconds)
        self._collected_statuses: dict[int, RankStatus] = {}
        self._reporter: threading.Thread | None = None
        self._original_excepthook, sys.excepthook = sys.excepthook, self._excepthook
        atexit.register(self._report_exit)
        with contextlib.suppress(dist.DistError):  # the process ID is only needed to resume a stopped process
            self._store.publish_process(RankProcess(_process_namespace(), self._pid))
        self._is_store_reachable = True
        self._has_ended = False  # whether the watchdog thread has begun to end this process
        self._liveness = LivenessCheck(rendezvous, self._on_process_ended)
        self._thread = start_thread(self._run, name="unitrain watchdog", restarts=True)
        self._liveness.start()

    def stop(self) -> None:
        """Stop the watchdog; ranks need not stop at the same time.

        The shutdown is reported first, so that a rank that still waits for this rank can name the cause in its failure
        report.
        """
        self._report_shutdown("it called shutdown() or left its `with unitrain.init()` block")
        self._stop_event.set()
        atexit.unregister(self._report_exit)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._original_excepthook
        self._thread.join(2 * self._period_seconds)  # the wait is limited, because the store's host may be unreachable
        self._liveness.close()
        if self._parent_death_signal:
            replace_parent_death_signal(self._parent_death_signal)

    def set_deadline(self, is_done: Callable[[], bool], describe: Callable[[], str]) -> Deadline:
        """Set a deadline at which the watchdog prints `describe()` and ends the process, unless `is_done` returns true.

        Use it for waits that cannot be interrupted. The call takes about 1 µs. The time limit is a few seconds longer
        than the timeout. The time is counted from this call or, if earlier work is unfinished, from its completion.
        """
        return self._deadlines.add(is_done, describe)

    def request_statuses(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return the current status of each of `ranks`."""
        statuses = self._store.request_statuses(ranks, self._status_responder())
        self._collected_statuses = self._complete_statuses(statuses, ranks)
        return self._collected_statuses

    def model_error(self) -> ModelError | None:
        """Return the first failure if it is a ModelError. Return None for another error, or while the failure is
        unknown."""
        if self._first_failure is None:
            return None
        error_class, _, text = self._first_failure.error.partition(": ")
        return ModelError(text) if error_class == ModelError.__name__ else None

    def wait_for_cause_of(self, error: BaseException) -> ModelError | None:
        """Return another rank's ModelError if it caused `error`, or None. Waits up to two seconds for the report of
        that failure.
        """
        if not _is_peer_lost(error):
            return None
        self._failure_known_event.wait(_FAILURE_REPORT_POLLS * self._period_seconds)
        return self.model_error()

    def report_failure(self, error: BaseException) -> None:
        """Report to the other ranks that this rank fails with `error`, and collect their statuses.

        The main thread or the watchdog thread calls it. Only the first call has an effect.
        """
        if self._error is not None or self._stop_event.is_set() or os.getpid() != self._pid:
            return  # a process that was forked from this one, such as a DataLoader worker, is not a rank
        self._error = error
        failure = Failure.from_error(error, self._rank, _first_line(error))
        if _is_peer_lost(error):
            self._failure_known_event.wait(_FAILURE_REPORT_POLLS * self._period_seconds)  # a peer has failed first
        if _is_consequence(error):
            failure = (
                self._find_shutdown_failure()
                or self._find_missing_rank_failure()
                or self._find_unresponsive_store_failure()
                or failure
            )
        self._stop_event.set()
        is_first = self._publish_failure(failure)
        self._write_flight_record()
        if is_first:
            self._has_reported = True
            other_ranks = [rank for rank in range(self._size) if rank != self._rank]
            # The launcher terminates this rank soon after other ranks exit, so wait only for ranks that can respond.
            running = [rank for rank in other_ranks if not self._has_shut_down(rank)]
            statuses = self._complete_statuses(self._collect_statuses(running), other_ranks)
            self._report = self._format_report(statuses)
            unresponsive = [rank for rank, status in statuses.items() if status.activity is Activity.NO_RESPONSE]
            resumed = self._resume_stopped(unresponsive)
            if self._rank == 0:
                # The store terminates with this process, so the resumed ranks must first read the failure.
                self._collect_statuses(resumed)
        elif self._first_failure != Failure(0, _PROCESS_ENDED):
            self._publish_status(self._store)
            if self._rank == 0:
                # The store terminates with this process, so the other ranks must first read the failure.
                ended = [rank for rank in range(self._size) if self._first_failure == Failure(rank, _PROCESS_ENDED)]
                self._collect_statuses([rank for rank in range(1, self._size) if rank not in ended])
            if self._reporter is not None:  # another thread of this process that prints the report
                self._reporter.join(_REPORT_SECONDS)
        if isinstance(error, SystemExit):  # Python does not call the excepthook for this exception
            print_to_stderr(self._report)

    # --- shutdowns without an error ---

    def _report_shutdown(self, reason: str) -> None:
        if self._stop_event.is_set() or os.getpid() != self._pid:
            return
        if latest := self._flight_recorder.latest_entry_text:
            reason += f"; last operation: {latest}"
        with contextlib.suppress(dist.DistError):  # rank 0's process has exited, and the store with it
            self._store.report_shutdown(reason, self._flight_recorder.latest_numbers)

    def _report_exit(self) -> None:
        self._report_shutdown("its process exited")

    def _first_shutdown(self) -> Shutdown | None:
        """Return the first shutdown of another rank."""
        store = self._thread_store if threading.current_thread() is self._thread else self._store
        try:
            shutdown = store.first_shutdown()
        except dist.DistError:  # rank 0's process has exited, and the store with it
            shutdown = Shutdown(0, "its process exited") if 0 in self._liveness.exited_ranks else None
        return shutdown if shutdown is not None and shutdown.rank != self._rank else None

    def _find_shutdown_failure(self) -> Failure | None:
        """Return the first shutdown of another rank as the cause of a subsequent failure."""
        shutdown = self._first_shutdown()
        return None if shutdown is None else Failure(shutdown.rank, f"{_SHUTDOWN_TOO_EARLY}: {shutdown.reason}")

    def _find_shutdown_failure_of_awaited_rank(self) -> Failure | None:
        """Return, as a failure, the shutdown of a rank that this rank waits for and that never started the operation.
        Such a wait never ends, and not every transport detects it.
        """
        shutdown = self._first_shutdown()
        if not self._shutdown_wait_detector.is_endless(shutdown, self._flight_recorder.wait):
            return None
        assert shutdown is not None
        return Failure(shutdown.rank, f"{_SHUTDOWN_TOO_EARLY}: {shutdown.reason}")

    # --- failures ---

    def _find_missing_rank_failure(self) -> Failure | None:
        """After a timeout of this rank, return the failure of the missing rank, the first one that is not waiting for
        other ranks. Return None if all ranks are waiting.
        """
        for rank, status in sorted(self._collected_statuses.items()):
            if not status.may_wait_for_ranks:
                error = f"it did not join {self._flight_recorder.latest_operation} of rank {self._rank} in time"
                return Failure(rank, error + (f", and {status}" if status.activity is Activity.NO_RESPONSE else ""))
        return None

    def _find_unresponsive_store_failure(self) -> Failure | None:
        """Return the failure of rank 0 if its process, which serves the store, does not respond."""
        if (self._store.is_responding and self._thread_store.is_responding) or self._rank == 0:
            return None
        return Failure(0, "it does not respond: its process is stopped, or its host is unreachable")

    def _publish_failure(self, failure: Failure) -> bool:
        """Report `failure` to all ranks unless an earlier one is known. Return whether this call reported it.

        Several ranks may detect the same failure at once. Only the thread that receives True prints the report.
        """
        if self._first_failure is not None:
            return False
        reporter_name = f"{self._rank}/{threading.get_ident()}"
        try:
            self._first_failure, reporter = self._store.report_failure(failure, reporter_name)
        except dist.DistError:  # rank 0's process has exited, and the store with it
            self._first_failure = self._first_failure or failure
            reporter = reporter_name if self._first_failure == failure else ""
        self._failure_known_event.set()
        return reporter == reporter_name

    def _format_report(self, statuses: Mapping[int, RankStatus]) -> list[str]:
        records = {rank: status.records for rank, status in statuses.items()}
        records[self._rank] = self._flight_recorder.records()
        return [f"unitrain: {self._first_failure} (of {self._size} ranks)", *format_statuses(statuses, records)]

    def _collect_statuses(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return the statuses that `ranks` publish after a failure."""
        return self._store.collect_statuses_after_failure(ranks, self._status_responder())

    def _status_responder(self) -> Callable[[], None] | None:
        """Return a function that answers status requests of other ranks while the watchdog thread waits for these
        ranks. Return None in other threads, because the watchdog thread then answers.
        """
        if threading.current_thread() is not self._thread:
            return None
        return partial(self._thread_store.answer_requests, self._write_record_and_get_status)

    def _has_shut_down(self, rank: int) -> bool:
        with contextlib.suppress(dist.DistError):
            return self._store.get_shutdown(rank) is not None
        return False

    def _complete_statuses(self, statuses: Mapping[int, RankStatus], ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return `statuses`, with statuses added for the `ranks` that have shut down or do not respond."""
        complete = {rank: statuses.get(rank, RankStatus()) for rank in ranks}
        with contextlib.suppress(dist.DistError):
            for rank, status in complete.items():
                if status.activity is Activity.NO_RESPONSE and (shutdown := self._store.get_shutdown(rank)) is not None:
                    complete[rank] = RankStatus(Activity.SHUT_DOWN, detail=shutdown.reason)
        return complete

    def _resume_stopped(self, ranks: Sequence[int]) -> list[int]:
        """Send SIGCONT to the processes of `ranks` on this host, because SIGSTOP may have stopped them. Return the
        ranks whose processes received the signal.

        A stopped process does not react to the launcher's SIGTERM, so the launcher would wait for its timeout before it
        sends SIGKILL. A stopped process also keeps its GPU memory.
        """
        resumed = []
        for rank in ranks:
            with contextlib.suppress(dist.DistError, ProcessLookupError, PermissionError):
                process = self._store.get_process(rank)
                if process is not None and process.namespace == _process_namespace():
                    os.kill(process.pid, signal.SIGCONT)
                    resumed.append(rank)
        return resumed

    def _status(self) -> RankStatus:
        if self._error is not None:
            return RankStatus(Activity.FAILED, detail=_first_line(self._error))
        return RankStatus.from_main_thread(self._flight_recorder)

    def _write_record_and_get_status(self) -> RankStatus:
        """Write the flight record if flight records are enabled, and return the status for another rank that has timed
        out."""
        self._write_flight_record()
        return self._status()

    def _publish_status(self, store: FailureStore) -> None:
        with contextlib.suppress(dist.DistError):
            store.report_status(self._status())

    def _write_flight_record(self) -> None:
        write_flight_record(self._flight_recorder, self._rank, self._size)

    # --- the watchdog thread ---

    def _run(self) -> None:
        checks = (self._check_launcher, self._check_store, self._check_shutdowns, self._check_deadlines)
        while not self._stop_event.wait(self._period_seconds):
            for check in checks:
                with surviving_errors():  # an unexpected error of one check must not disable the others
                    check()
            if self._has_ended:
                return

    def _check_launcher(self) -> None:
        if os.getppid() != self._parent_pid and self._launcher in _LAUNCHERS_WITHOUT_CLEANUP:
            self._has_ended = True
            self._exit_with_launcher()

    def _check_store(self) -> None:
        if not self._is_store_reachable or self._has_ended:
            return
        try:
            if self._poll_store():
                self._has_ended = True
                try:
                    self._publish_status(self._thread_store)
                finally:
                    self._terminate_process()
        except StoreNotRespondingError:
            pass  # rank 0 may respond again; until then, check the deadlines only
        except dist.DistError:
            # Rank 0's process has exited. Operations that require this process raise an error; others continue.
            self._is_store_reachable = False

    def _check_shutdowns(self) -> None:
        if self._liveness.exited_ranks and self._error is None and not self._has_ended:
            failure = self._find_shutdown_failure_of_awaited_rank()
            if failure is not None:
                self._has_ended = True
                self._report_failed_peer(failure)

    def _check_deadlines(self) -> None:
        if self._has_ended:
            return
        if (deadline := self._deadlines.find_expired()) is not None:
            self._handle_expired(deadline)
        if self._data_deadline.has_expired(awaited_batch(), self._flight_recorder.operation_count):
            self._terminate_if_waiting_for_data()

    def _poll_store(self) -> bool:
        """Answer status requests, and return whether a rank has failed."""
        if self._thread_store.has_news():
            self._thread_store.answer_requests(self._write_record_and_get_status)
            failure = self._thread_store.first_failure()
            if failure is not None:
                self._first_failure = failure
                return True
        failure = self._stall_detector.publish_and_compare(self._thread_store.messages)
        if failure is None and self._num_polls % self._polls_per_comparison == 0:
            failure = self._compare_loops()
        self._num_polls += 1
        if failure is not None:
            self._publish_failure(failure)
        return failure is not None

    def _compare_loops(self) -> Failure | None:
        """Return a failure if this rank's training loop is not in the same step as rank 0's."""
        if self._rank:
            problem = self._loop_counters.compare(self._thread_store.messages, self._rank)
            return None if problem is None else Failure(self._rank, f"{ModelError.__name__}: {problem}")
        self._loop_counters.publish(self._thread_store.messages)
        return None

    def _on_process_ended(self, rank: int) -> None:
        """Report that the process of `rank` has terminated unexpectedly. The thread of the liveness check calls it."""
        if not self._stop_event.is_set():
            self._report_failed_peer(Failure(rank, _PROCESS_ENDED))

    def _report_failed_peer(self, failure: Failure) -> None:
        """Report `failure` of another rank, which cannot report it itself, and terminate this process.

        A failure of rank 0 is not reported, because every rank detects it and rank 0 serves the store.
        """
        self._reporter = threading.current_thread()
        try:
            if failure.rank == 0:  # the store may have terminated with that rank, or may never respond
                self._first_failure = self._first_failure or failure
            elif self._publish_failure(failure):
                ranks = [rank for rank in range(self._size) if rank != failure.rank]
                statuses = self._collect_statuses([rank for rank in ranks if rank != self._rank])
                print_to_stderr(
                    self._format_report(self._complete_statuses({**statuses, self._rank: self._status()}, ranks))
                )
        finally:
            self._terminate_process()

    def _handle_expired(self, deadline: Deadline) -> None:
        """Terminate the process if the work is still not done, because the main thread's wait cannot be interrupted."""
        error = CollectiveTimeoutError(deadline.describe())
        if deadline.is_surely_done():  # completed in the meantime, or the main thread has detected the timeout
            return
        stack = RankStatus.from_main_thread(self._flight_recorder).stack
        self.report_failure(error)
        print_to_stderr([f"unitrain: {error}", *stack, *self._report])
        os._exit(1)

    def _terminate_if_waiting_for_data(self) -> None:
        """Terminate the process if its main thread still waits for a DataLoader worker, because this wait cannot be
        interrupted."""
        status = self._status()
        if status.activity is not Activity.WAITING_FOR_DATA:  # the batch has arrived in the meantime
            return
        error = DataError(
            f"Rank {self._rank} has waited {self._timeout_seconds:g} s for a batch from {status.worker}, at "
            f"{status.location}. Check the data loading of that worker, or raise the limit with "
            "unitrain.init(timeout_seconds=...)."
        )
        self.report_failure(error)
        print_to_stderr([f"unitrain: {error}", *status.stack, *self._report])
        os._exit(1)

    def _exit_with_launcher(self) -> None:
        """Send SIGTERM to this process in place of the launcher, which has exited, and leave time for a checkpoint."""
        print_to_stderr([f"unitrain: stopping rank {self._rank} of {self._size} because {self._launcher} has ended"])
        os.kill(self._pid, signal.SIGTERM)
        if not self._stop_event.wait(LAST_CHECKPOINT_SECONDS):
            os._exit(1)

    def _terminate_process(self) -> None:
        """Wait a few seconds for the main thread to raise an error, then terminate the process. Write the flight
        record if flight records are enabled.
        """
        self._failure_known_event.set()
        self._write_flight_record()
        if not self._stop_event.wait(_GRACE_SECONDS):
            reason = f"{self._first_failure}; status: {self._status()}"
            print_to_stderr([f"unitrain: ending rank {self._rank} of {self._size} because {reason}"])
            os._exit(1)

    # --- the main thread's error ---

    def _excepthook(
        self, error_class: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception | KeyboardInterrupt) and os.getpid() == self._pid:
            self.report_failure(error)
        first, error_line = self._first_failure, _first_line(error)
        location = f", at {_location_of_raise(traceback)}" if traceback is not None else ""
        is_consequence = first is not None and first.rank != self._rank
        text = f"rank {self._rank} of {self._size} ended with {error_line}{location}"
        if (
            is_consequence
            and not self._has_reported
            and (error_line == getattr(first, "error", "") or _is_consequence(error))
        ):
            # The error's traceback would show a consequence of the failure instead of the cause, on every rank.
            print_to_stderr([f"unitrain: {text}; {first}"])
        else:
            self._original_excepthook(error_class, error, traceback)
        if os.getpid() == self._pid:
            _write_torchrun_error(f"{first}; {text}" if is_consequence else text, is_consequence=is_consequence)
        print_to_stderr(self._report)


def _write_torchrun_error(text: str, *, is_consequence: bool) -> None:
    """Write the error for torchrun's summary, without the traceback, which this rank prints itself.

    torchrun reports the rank with the earliest timestamp, in whole seconds, as the root cause. An error that was caused
    by another rank's failure must therefore have a later timestamp.
    """
    file = environment.get_variable("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        details = {"py_callstack": text, "timestamp": str(int(time.time()) + is_consequence)}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")


def _process_namespace() -> str:
    """Return a name for the scope in which process IDs are valid: this host, or this container."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _error_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # a user's class may not be convertible to text
        return ""


def _first_line(error: BaseException) -> str:
    lines = _error_text(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _is_peer_lost(error: BaseException) -> bool:
    """Return whether `error` is a transport error due to a lost connection to another rank."""
    if isinstance(error, CollectiveTimeoutError):
        return False
    text = _error_text(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(message in text for message in _PEER_LOST_MESSAGES)
    )


def _is_consequence(error: BaseException) -> bool:
    """Return whether `error` can be a consequence of another rank's failure."""
    return _is_peer_lost(error) or _is_timeout(error)


def _is_timeout(error: BaseException) -> bool:
    return isinstance(error, CollectiveTimeoutError) or (
        isinstance(error, RuntimeError) and "imed out" in _error_text(error)
    )


def _location_of_raise(traceback: TracebackType) -> str:
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return f"{traceback.tb_frame.f_code.co_filename}:{traceback.tb_lineno}"
