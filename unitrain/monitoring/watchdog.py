"""A thread beside the training that tells the ranks of each other's failures, and where each of them is.

It asks the meeting place once in a while whether anybody has called for help, and costs the training nothing: where a
rank is shows from its stack and its ledger when somebody asks. It works while the backend is stuck, and while the main
thread waits in C++.
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
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch.distributed as dist

from unitrain.bootstrap import environment
from unitrain.bootstrap.messages import MessageStore
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import CollectiveTimeoutError, ModelError
from unitrain.monitoring.flight_recorder import FlightRecorder
from unitrain.monitoring.liveness import LivenessCheck
from unitrain.monitoring.loop_counters import LoopCounters
from unitrain.monitoring.pending_work import Expectation, Expectations
from unitrain.monitoring.rank_status import NO_ANSWER, Answer, Failure, describe

_PERIOD_SECONDS = 0.5
_ANSWER_SECONDS = 3.0
_GRACE_SECONDS = 5.0
_MOST_QUESTIONS = 100  # that are answered at once: any program that reaches the store can raise their number
_ASKED, _FAILED, _LEFT, _PROCESS = "asked", "failed", "left", "process"
# Launchers that, when they are killed, leave their ranks running.
_LEAVES_ORPHANS = ("torchrun",)
_LAST_CHECKPOINT_SECONDS = 60.0
# How long a rank that lost a peer waits for whoever knows what became of that.
_NEWS_SECONDS = 4 * _PERIOD_SECONDS
# How much later than the main thread would do so by itself the watch ends a backward that waits in vain.
_MARGIN_SECONDS = 5.0
# How long ranks may still be busy with a collective after rank 0's process has exited, and the store with it: whether
# rank 0 took part in that collective is then unknown.
_LAST_SECONDS = 30.0
_GONE = "its process is gone: it was killed, or ended without a word"
_LEFT_EARLY = "it ended its part while other ranks still needed it"
# How the loss of a peer looks, by transport: such an error is what a failure elsewhere leads to.
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Horovod has been shut down",
              "Connection refused", "Read error", "Write error")  # fmt: skip


class _Departure(NamedTuple):
    """A rank that ended its part without an error, and how many entries its ledger had then, if that is known."""

    rank: int
    how: str
    entered: int | None = None


class Watchdog:
    """Watches over this rank's main thread until `stop`. All ranks make theirs at the same time.

    `flight_recorder` knows the collective that the main thread waits in. A rank that fails calls `fail`; for a
    killed one rank 0 does; the others then end by themselves, or are ended after a few seconds, wherever they are.
    """

    def __init__(self, rendezvous: Rendezvous, flight_recorder: FlightRecorder) -> None:
        self._rank, self._size = rendezvous.rank_info.rank, rendezvous.rank_info.size
        # A connection of its own: one that waits for an answer makes every other user of it wait too.
        stores = [dist.PrefixStore("watch", rendezvous.store).clone() for _ in range(2)]
        self._store, self._own = (MessageStore(store, "watch", counters=[_ASKED]) for store in stores)
        self._flight_recorder = flight_recorder
        self.counters = LoopCounters()
        self._expectations = Expectations(rendezvous.timeout.total_seconds() + _MARGIN_SECONDS)
        self._launcher, self._parent, self._process = rendezvous.rank_info.launcher, os.getppid(), os.getpid()
        self._ended, self._learned = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._report: list[str] = []
        self._first: Failure | None = None
        self._answered = 0
        self._announced = False
        self._waits_since = (0, time.monotonic())
        self._absent: dict[int, Answer] = {}
        self._reporter: threading.Thread | None = None
        self._hook, sys.excepthook = sys.excepthook, self._excepthook
        atexit.register(self._leave_at_exit)
        self._own.set(f"{_PROCESS}/{self._rank}", json.dumps([_processes_of(), self._process]))
        self._thread = threading.Thread(target=self._watchdog, name="unitrain watch", daemon=True)
        self._presence = LivenessCheck(rendezvous, self._tell_of)
        self._presence.start()
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer; the ranks need not stop together.

        Record that this rank has left: if another rank still needs it, that rank's failure names this one.
        """
        self._leave("it called shutdown(), or left its `with unitrain.init()` block")
        self._ended.set()
        atexit.unregister(self._leave_at_exit)
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        self._thread.join(2 * _PERIOD_SECONDS)  # it may hang on a host that is gone
        self._presence.close()

    def expect(self, is_done: Callable[[], bool], tell: Callable[[], str]) -> Expectation:
        """End the process, saying what `tell` returns, unless `is_done` by a few seconds after the timeout from now.

        It is for waits that cannot be ended otherwise, and costs about a microsecond. The time of work that was begun
        earlier does not count.
        """
        return self._expectations.add(is_done, tell)

    def ask(self, ranks: list[int]) -> dict[int, Answer]:
        """Return where each of `ranks` is; those that do not tell within three seconds give no answer."""
        answers = dict.fromkeys(ranks, Answer())
        with contextlib.suppress(dist.DistError):  # rank 0's process went, and the store with it
            answers |= self._answers(f"where/{self._own.add(_ASKED, 1)}", ranks)
        self._absent = self._with_departures(answers)
        return self._absent

    def model_error(self) -> ModelError | None:
        """Return the ModelError with which the first rank failed, if it did and this rank knows of it."""
        if self._first is None:
            return None
        kind, _, text = self._first.error.partition(": ")
        return ModelError(text) if kind == ModelError.__name__ else None

    def cause_of(self, error: BaseException) -> ModelError | None:
        """Return the ModelError with which another rank failed, if the loss of that rank led to `error`.

        It waits up to two seconds until this rank knows of it.
        """
        if not _lost_a_peer(error):
            return None
        self._learned.wait(_NEWS_SECONDS)
        return self.model_error()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends with `error`, and learn where they are. The main thread calls it."""
        if self._error is not None or self._ended.is_set() or os.getpid() != self._process:
            return  # a process that was forked from this one, such as a DataLoader's worker, is no rank
        self._error = error
        own = Failure(self._rank, _one_line(error))
        if _lost_a_peer(error):
            self._learned.wait(_NEWS_SECONDS)  # of what became of that peer, which is what failed first
        if _is_consequence(error):
            own = self._first_departure() or self._first_absence() or own
        self._ended.set()
        if self._announce(own):
            self._announced = True
            others = [rank for rank in range(self._size) if rank != self._rank]
            self._report = self._describe(self._answers("heard", others), others)
            self._continue_stopped(others)
        elif self._first != Failure(0, _GONE):
            self._tell(self._own, "heard", self._here())
            if self._reporter is not None:  # a thread of this process that is printing the report
                self._reporter.join(_ANSWER_SECONDS + _PERIOD_SECONDS)
        if isinstance(error, SystemExit):  # for which there is no excepthook
            _say(self._report)

    def _leave(self, how: str) -> None:
        """Record for the other ranks `how` this one ends its part without an error."""
        if self._ended.is_set() or os.getpid() != self._process:
            return
        told = json.dumps([self._rank, f"{how}{self._flight_recorder.last}", self._flight_recorder.entered])
        with contextlib.suppress(dist.DistError):  # rank 0's process went, and the store with it
            self._own.set(f"{_LEFT}/{self._rank}", told)
            self._own.compare_set(_LEFT, "", told)

    def _leave_at_exit(self) -> None:
        self._leave("its process exited")

    def _first_departure(self) -> Failure | None:
        """Return the first rank that ended its part without an error, as the cause of a failure that followed."""
        left = self._departure()
        if left is None or left.rank == self._rank:
            return None
        return Failure(left.rank, f"{_LEFT_EARLY}: {left.how}")

    def _departure(self) -> _Departure | None:
        store = self._store if threading.current_thread() is self._thread else self._own
        try:
            return _Departure(*json.loads(store.get(_LEFT))) if store.check([_LEFT]) else None
        except dist.DistError:  # rank 0's process went, and the store with it
            return _Departure(0, "its process exited") if 0 in self._presence.left else None

    def _needs_departed(self) -> Failure | None:
        """Return the departure of a rank that this one waits for in a later collective or backward than its last.

        Such a wait cannot end; not every transport notices it.
        """
        left, begun = self._departure(), self._flight_recorder.entered
        if left is None or left.rank == self._rank or not Answer.of_main_thread(self._flight_recorder).waits:
            self._waits_since = (begun, time.monotonic())
            return None
        if self._waits_since[0] != begun:
            self._waits_since = (begun, time.monotonic())
        if left.entered is not None and begun <= left.entered:
            return None  # both are, or were, in the same one
        patience = _LAST_SECONDS if left.entered is None else _PERIOD_SECONDS
        if time.monotonic() < self._waits_since[1] + patience:
            return None
        return Failure(left.rank, f"{_LEFT_EARLY}: {left.how}")

    def _first_absence(self) -> Failure | None:
        """Return the first rank that this one has waited for until the timeout, unless that rank waits too."""
        for rank, answer in sorted(self._absent.items()):
            if not answer.waits:
                why = f", and {NO_ANSWER}" if answer == Answer() else ""
                return Failure(
                    rank, f"it did not join {self._flight_recorder.latest} of rank {self._rank} in time{why}"
                )
        return None

    def _continue_stopped(self, ranks: Sequence[int]) -> None:
        """Continue the processes of `ranks` on this host that SIGSTOP has stopped.

        A stopped process does not end on the launcher's SIGTERM: the launcher would wait until it sends SIGKILL. It
        also keeps the memory of its GPU.
        """
        for rank in ranks:
            with contextlib.suppress(dist.DistError, ProcessLookupError, PermissionError):
                if self._own.check([key := f"{_PROCESS}/{rank}"]):
                    processes, number = json.loads(self._own.get(key))
                    if processes == _processes_of():
                        os.kill(number, signal.SIGCONT)

    def _with_departures(self, answers: Mapping[int, Answer]) -> dict[int, Answer]:
        """Return `answers`, in which the ranks that have left say so instead of giving no answer."""
        known = dict(answers)
        with contextlib.suppress(dist.DistError):
            for rank, answer in answers.items():
                if answer == Answer() and self._own.check([f"{_LEFT}/{rank}"]):
                    known[rank] = Answer(f"has left: {json.loads(self._own.get(f'{_LEFT}/{rank}'))[1]}")
        return known

    def _announce(self, failure: Failure) -> bool:
        """Report `failure` to all ranks unless they know of an earlier one; return whether this call did.

        Only the thread for which it is True prints the report: several ranks may find the same failure at once.
        """
        if self._first is not None:
            return False
        own = f"{self._rank}/{threading.get_ident()}"
        try:
            rank, error, reporter = json.loads(
                self._own.compare_set(_FAILED, "", json.dumps([failure.rank, failure.error, own]))
            )
            self._first = Failure(rank, error)
        except dist.DistError:  # rank 0's process went, and the store with it
            self._first = self._first or failure
            reporter = own if self._first == failure else ""
        self._learned.set()
        return bool(reporter == own)

    def _describe(self, answers: Mapping[int, Answer], ranks: Sequence[int]) -> list[str]:
        known = self._with_departures({rank: answers.get(rank, Answer()) for rank in ranks})
        ledgers = {rank: answer.flight_recorder for rank, answer in known.items()} | {
            self._rank: self._flight_recorder.lines()
        }
        return [f"unitrain: {self._first} (of {self._size} ranks)", *describe(known, ledgers)]

    def _answers(self, key: str, ranks: Sequence[int]) -> dict[int, Answer]:
        deadline = time.monotonic() + _ANSWER_SECONDS
        answers: dict[int, Answer] = {}
        with contextlib.suppress(dist.DistError):
            while len(answers) < len(ranks) and time.monotonic() < deadline:
                for rank in ranks:
                    if rank not in answers and self._own.check([f"{key}/{rank}"]):
                        answers[rank] = Answer.read(self._own.get(f"{key}/{rank}"))
                if threading.current_thread() is self._thread:
                    self._answer_questions()  # of ranks that ask at the same time
                time.sleep(0.02)
        return answers

    def _watchdog(self) -> None:
        reachable = True
        while not self._ended.wait(_PERIOD_SECONDS):
            if os.getppid() != self._parent and self._launcher in _LEAVES_ORPHANS:
                self._follow_launcher()
                return
            try:
                if reachable:
                    self._answer_questions()
                if reachable and self._store.check([_FAILED]):
                    self._first = Failure(*json.loads(self._store.get(_FAILED))[:2])
                    self._tell(self._store, "heard", self._here())
                    self._end()
                    return
                if reachable and (problem := self._compare_loops()) is not None:
                    self._announce(Failure(self._rank, f"ModelError: {problem}"))
                    self._tell(self._store, "heard", self._here())
                    self._end()
                    return
            except dist.DistError:
                reachable = False  # rank 0's process is gone: what needs it fails by itself, and what does not goes on
            if self._presence.left and self._error is None and (departed := self._needs_departed()) is not None:
                self._blame(departed)
                return
            if (overdue := self._expectations.overdue()) is not None:
                self._give_up(overdue)

    def _compare_loops(self) -> str | None:
        """Return what is wrong if this rank's training loop is not in the same step as that of rank 0."""
        if self._rank:
            return self.counters.compare(self._store, self._rank)
        self.counters.publish(self._store)
        return None

    def _answer_questions(self) -> None:
        asked = self._store.add(_ASKED, 0) if self._store.check([_ASKED]) else 0
        self._answered = max(self._answered, asked - _MOST_QUESTIONS)
        while self._answered < asked:
            self._answered += 1
            self._tell(self._store, f"where/{self._answered}", self._here())

    def _tell(self, store: MessageStore, key: str, answer: Answer) -> None:
        with contextlib.suppress(dist.DistError):
            store.set(f"{key}/{self._rank}", answer.write())

    def _here(self) -> Answer:
        if self._error is not None:
            return Answer(f"failed too: {_one_line(self._error)}")
        return Answer.of_main_thread(self._flight_recorder)

    def _tell_of(self, lost: int) -> None:
        """Say for a rank that is gone what it could not say itself. The thread that has noticed it calls this."""
        if self._ended.is_set():
            return
        self._blame(Failure(lost, _GONE))

    def _blame(self, failure: Failure) -> None:
        """Report `failure` of another rank, which cannot do so itself, and end this process."""
        self._reporter = threading.current_thread()
        if failure.rank == 0:  # what the ranks meet at may be gone with it, or still be there and never answer
            self._first = self._first or failure
        elif self._announce(failure):
            ranks = [rank for rank in range(self._size) if rank != failure.rank]
            answers = self._answers("heard", [rank for rank in ranks if rank != self._rank])
            _say(self._describe({**answers, self._rank: self._here()}, ranks))
        self._end()

    def _give_up(self, overdue: Expectation) -> None:
        """End the process if what it expects has not come; the main thread waits where no exception can reach it."""
        error = CollectiveTimeoutError(overdue.describe())
        if overdue.is_done():  # it came after all, or the main thread noticed itself
            return
        stack = Answer.of_main_thread(self._flight_recorder).stack
        self.fail(error)
        _say([f"unitrain: {error}", *stack, *self._report])
        os._exit(1)

    def _follow_launcher(self) -> None:
        """End as the launcher should have asked for: in time for a checkpoint."""
        _say([f"unitrain: rank {self._rank} of {self._size} ends, because {self._launcher} is gone"])
        os.kill(self._process, signal.SIGTERM)
        if not self._ended.wait(_LAST_CHECKPOINT_SECONDS):
            os._exit(1)

    def _end(self) -> None:
        """Give the main thread a moment to fail by itself, then end the process."""
        self._learned.set()
        if not self._ended.wait(_GRACE_SECONDS):
            doing = self._here().doing
            _say([f"unitrain: rank {self._rank} of {self._size} {doing}, and is ended, because {self._first}"])
            os._exit(1)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception | KeyboardInterrupt) and os.getpid() == self._process:
            self.fail(error)
        first, own = self._first, _one_line(error)
        place = f", at {_last_line(trace)}" if trace is not None else ""
        follows = first is not None and first.rank != self._rank
        told = f"rank {self._rank} of {self._size} ended with {own}{place}"
        if follows and not self._announced and (own == getattr(first, "error", "") or _is_consequence(error)):
            # Its traceback would be one of many, and show what followed from the failure, not the failure.
            _say([f"unitrain: {told}; {first}"])
        else:
            self._hook(kind, error, trace)
        if os.getpid() == self._process:
            _record(f"{first}; {told}" if follows else told, follows=follows)
        _say(self._report)


def _say(lines: list[str]) -> None:
    if lines:
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


def _record(text: str, *, follows: bool) -> None:
    """Write the error for torchrun's summary, which shows it, without a traceback, which this rank prints itself.

    torchrun names the rank with the earliest time, in whole seconds, as the root cause. An error that follows from
    another rank's must therefore have a later time.
    """
    file = environment.setting("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        details = {"py_callstack": text, "timestamp": str(int(time.time()) + follows)}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}), encoding="utf-8")


def _processes_of() -> str:
    """Return a name for the process numbers of this host, or of this container where it has its own."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _lost_a_peer(error: BaseException) -> bool:
    if isinstance(error, CollectiveTimeoutError):
        return False
    told = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(sign in told for sign in _PEER_LOST)
    )


def _is_consequence(error: BaseException) -> bool:
    """Return whether `error` can follow from the failure of another rank."""
    return _lost_a_peer(error) or _timed_out(error)


def _timed_out(error: BaseException) -> bool:
    return isinstance(error, CollectiveTimeoutError) or (isinstance(error, RuntimeError) and "imed out" in str(error))


def _last_line(trace: TracebackType) -> str:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
