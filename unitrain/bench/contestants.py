"""Sets of ranks that take turns, so that what disturbs the machine disturbs all alike."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unitrain
from unitrain.backends.base import Backend
from unitrain.testing import RankError, RankGroup

__all__ = ["Contestant", "HeldRanks", "LaunchedRanks", "Place", "RankError", "Start", "held"]
# Longer than any turn should take; what takes longer is stuck.
TURN_SECONDS = 300.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a set of ranks runs."""

    backend: str
    transport: str
    ranks: int
    num_nodes: int
    device: str

    def __str__(self) -> str:
        return self.backend if self.transport == "none" else f"{self.backend} {self.transport}"


class Contestant(ABC):
    """A set of ranks of one backend. What it is asked to do, it does while the others rest."""

    place: Place

    @abstractmethod
    def awake(self) -> AbstractContextManager[None]:
        """Let the ranks run inside it; outside of it they use nothing of the machine."""

    @abstractmethod
    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(backend, *args)` on every rank and return the results in rank order; while awake."""


class HeldRanks(Contestant):
    """Ranks on this host, started here, which are stopped while they rest: idle ranks of Horovod use the processor."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._pids: list[int] = []
        try:
            told = group.run(_settle, timeout_seconds=TURN_SECONDS)
            self.place = told[0][1]
            self._pids = [pid for pid, _ in told]
        finally:
            self._signal(signal.SIGSTOP)

    @contextmanager
    def awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._group.run(function, *args, timeout_seconds=TURN_SECONDS)

    def release(self) -> None:
        """Let the ranks run again, so that they can come to their end."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class LaunchedRanks(Contestant):
    """This process as one of the ranks that a launcher started, on any number of hosts; all of them do the same.

    The backend is shut down while it rests, because two cannot be up at once.
    """

    def __init__(self, name: str, device: str | None) -> None:
        self._name, self._device = name, device
        self._backend: Backend | None = None
        with self.awake():
            self.place = _place(self._up)

    @property
    def _up(self) -> Backend:
        assert self._backend is not None, "only while awake"
        return self._backend

    @contextmanager
    def awake(self) -> Iterator[None]:
        with unitrain.init(self._name, device=self._device) as self._backend:
            yield
        self._backend = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._up.allgather_object(function(self._up, *args))


@dataclass(frozen=True)
class Start:
    """How `ranks` on this host are started: see `RankGroup`."""

    backend: str
    ranks: int
    command: Sequence[str] = ()
    variables: Mapping[str, str] | None = None


@contextmanager
def held(starts: Sequence[Start], device: str) -> Iterator[list[Contestant]]:
    """Start each set of ranks; nothing of them is left afterwards, also after SIGTERM."""
    # As after Ctrl-C: ranks that are stopped would not notice that nobody is left to wake them.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, before)
        contestants: list[Contestant] = []
        for start in starts:
            group = stack.enter_context(
                RankGroup(
                    start.backend,
                    start.ranks,
                    spawn=True,
                    command=start.command,
                    variables=start.variables,
                    device=device,
                    backend_timeout_seconds=TURN_SECONDS,
                )
            )
            one = HeldRanks(group)
            stack.callback(one.release)
            contestants.append(one)
        yield contestants


def _settle(backend: Backend) -> tuple[int, Place]:
    """Keep this rank to a core of its own, as launchers bind ranks, and return its process id and place.

    Where the scheduler moves ranks about, rounds differ by more than what is compared.
    """
    if sys.platform.startswith("linux"):
        cores = sorted(os.sched_getaffinity(0))
        if backend.size <= len(cores):
            for thread in Path("/proc/self/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cores[backend.rank]})
        # A rank that is stopped cannot notice that who started it was killed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getpid(), _place(backend)


def _place(backend: Backend) -> Place:
    return Place(
        backend=backend.name,
        transport=backend.transport,
        ranks=backend.size,
        num_nodes=backend.num_nodes,
        device=backend.device.type,
    )


class Budget:
    """Seconds to spend, counted by what ranks say that their turns took: alike on all of them."""

    def __init__(self, seconds: float, rounds: int) -> None:
        self._left, self._least, self._done = seconds, rounds, 0
        self.began = time.monotonic()

    def spend(self, seconds: float) -> None:
        """Count a turn."""
        self._left -= seconds

    def next_round(self) -> bool:
        """Whether there is to be one more round; the first one warms up, and does not count."""
        self._done += 1
        return self._done <= self._least + 1 or self._left > 0
