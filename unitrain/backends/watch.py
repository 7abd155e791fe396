"""A thread beside the training that tells the ranks of each other's failures, and where each of them is.

It asks the meeting place once in a while whether anybody has called for help, and costs the training nothing: the
training itself writes nothing down, and where a rank is shows from its stack when somebody asks. It works while the
backend is stuck, and while the main thread waits in C++.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from unitrain.backends.rendezvous import Meeting
from unitrain.backends.whereabouts import whereabouts
from unitrain.errors import CollectiveTimeoutError

_PERIOD_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
_GRACE_SECONDS = 5.0
_ASKED, _FAILED = "asked", "failed"
# Launchers that, when they are killed, leave their ranks running.
_LEAVES_ORPHANS = ("torchrun",)
_LAST_CHECKPOINT_SECONDS = 60.0
_NO_ANSWER = "gives no answer: its process is gone, or its host cannot be reached"
# How the loss of a peer looks, by transport: such an error is what a failure elsewhere leads to.
_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Horovod has been shut down",
              "imed out", "Connection refused", "Read error", "Write error")  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """What the rank that failed first has said of it, before its process ended."""

    rank: int
    error: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.error}"


class Watch:
    """Watches over this rank's main thread until `stop`. All ranks have one.

    `waits` says which collective the main thread waits in. A rank that fails calls `fail`; the others then end by
    themselves, or are ended after a few seconds, wherever they are.
    """

    def __init__(self, meeting: Meeting, waits: Callable[[], str]) -> None:
        self._rank, self._size = meeting.placement.rank, meeting.placement.size
        # A connection of its own: one that waits for an answer makes every other user of it wait too.
        self._store: dist.Store = dist.PrefixStore("watch", meeting.store).clone()
        self._own = dist.PrefixStore("watch", meeting.store).clone()
        self._waits = waits
        self._launcher, self._parent, self._process = meeting.placement.launcher, os.getppid(), os.getpid()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._report: list[str] = []
        self._first: Failure | None = None
        self._hook, sys.excepthook = sys.excepthook, self._excepthook
        self._thread = threading.Thread(target=self._watch, name="unitrain watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer; the ranks need not stop together."""
        self._ended.set()
        if sys.excepthook == self._excepthook:
            sys.excepthook = self._hook
        self._thread.join(2 * _PERIOD_SECONDS)  # it may hang on a host that is gone

    def ask(self, ranks: list[int]) -> dict[int, str]:
        """Return where each of `ranks` is, as the rest of "rank 3 ...", for as many as answer within two seconds."""
        try:
            self._own.set(_ASKED, "1")
            return {rank: told["doing"] for rank, told in self._answers("where", ranks).items()}
        except dist.DistError:  # rank 0's process went, and the store with it
            return {}

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends with `error`, and learn where they are. The main thread calls it."""
        if self._error is not None or self._ended.is_set() or os.getpid() != self._process:
            return  # a process that was forked from this one, such as a DataLoader's worker, is no rank
        self._error = error
        self._ended.set()
        own = Failure(self._rank, _one_line(error))
        try:
            told = self._own.compare_set(_FAILED, "", json.dumps([own.rank, own.error]))
            self._first = Failure(*json.loads(told))
            if self._first == own:
                self._report = self._describe_others()
            else:
                self._own.set(f"heard/{self._rank}", json.dumps({"doing": f"failed too: {own.error}", "stack": []}))
        except dist.DistError:
            self._first = None
        if isinstance(error, SystemExit):  # for which there is no excepthook
            _say(self._report)

    def _describe_others(self) -> list[str]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        # Also for the sake of those who have not looked yet: the store may end with this process.
        answers = self._answers("heard", others)
        lines = [f"unitrain: {self._first} (of {self._size} ranks)"]
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank in others:
            told = answers.get(rank, {"doing": _NO_ANSWER, "stack": []})
            waits = told["doing"].startswith(("waits", "is in the backward"))
            alike.setdefault((told["doing"], *([] if waits else told["stack"])), []).append(rank)
        for (doing, *stack), ranks in alike.items():
            lines += [f"  {name_ranks(ranks)} {doing}", *(f"    {line}" for line in stack)]
        return lines

    def _answers(self, key: str, ranks: list[int]) -> dict[int, Any]:
        deadline = time.monotonic() + _ANSWER_SECONDS
        answers: dict[int, Any] = {}
        while len(answers) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                if rank not in answers and self._own.check([f"{key}/{rank}"]):
                    answers[rank] = json.loads(self._own.get(f"{key}/{rank}"))
            time.sleep(0.02)
        return answers

    def _watch(self) -> None:
        reachable, answered = True, False
        while not self._ended.wait(_PERIOD_SECONDS):
            if os.getppid() != self._parent and self._launcher in _LEAVES_ORPHANS:
                self._follow_launcher()
                return
            try:
                if reachable and not answered and self._store.check([_ASKED]):
                    self._answer("where")
                    answered = True
                if reachable and self._store.check([_FAILED]):
                    first = Failure(*json.loads(self._store.get(_FAILED)))
                    self._answer("heard")
                    self._end(first)
                    return
            except dist.DistError:
                reachable = False  # rank 0's process is gone: what needs it fails by itself, and what does not goes on

    def _follow_launcher(self) -> None:
        """End as the launcher should have asked for: in time for a checkpoint."""
        _say([f"unitrain: rank {self._rank} of {self._size} ends, because {self._launcher} is gone"])
        os.kill(self._process, signal.SIGTERM)
        if not self._ended.wait(_LAST_CHECKPOINT_SECONDS):
            os._exit(1)

    def _answer(self, key: str) -> None:
        doing, stack = whereabouts(self._waits)
        self._store.set(f"{key}/{self._rank}", json.dumps({"doing": doing, "stack": stack}))

    def _end(self, first: Failure) -> None:
        """Give the main thread a moment to fail by itself, then end the process."""
        self._first = first
        if not self._ended.wait(_GRACE_SECONDS):
            doing, _ = whereabouts(self._waits)
            _say([f"unitrain: rank {self._rank} of {self._size} {doing}, and is ended, because {first}"])
            os._exit(1)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, Exception) and os.getpid() == self._process:
            self.fail(error)
            _record(error)
        first, own = self._first, _one_line(error)
        if first is None or first.rank == self._rank or not (own == first.error or _lost_a_peer(error)):
            self._hook(kind, error, trace)
        else:
            # Its traceback would be one of many, and show what followed from the failure, not the failure.
            place = f", at {_last_line(trace)}" if trace is not None else ""
            _say([f"unitrain: rank {self._rank} of {self._size} ended with {own}{place}; {first}"])
        _say(self._report)


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


def _say(lines: list[str]) -> None:
    if lines:
        sys.stderr.write("\n".join(lines) + "\n")
        sys.stderr.flush()


def _record(error: Exception) -> None:
    """Leave the error to torchrun, which shows it in its summary; it takes it from where it is being handled."""
    trace = error.__traceback__
    try:
        raise error
    except Exception:
        get_error_handler().record_exception(error.with_traceback(trace))


def _one_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _lost_a_peer(error: BaseException) -> bool:
    if isinstance(error, CollectiveTimeoutError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER_LOST)


def _last_line(trace: TracebackType) -> str:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
