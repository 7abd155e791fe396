"""Sets of ranks that run alternately, one at a time, so that system noise affects all of them equally."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unitrain
from unitrain.backends.base import Backend
from unitrain.processes import parent_death_signal_setter, usable_cores
from unitrain.testing import RankError, RankGroup

__all__ = ["LaunchedRanks", "RankError", "RankSet", "RankSetInfo", "RankSetSpec", "SuspendableRanks", "start_rank_sets"]
# A turn that takes longer fails.
TURN_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class RankSetInfo:
    """The backend, size and device of a set of ranks."""

    backend: str
    transport: str
    max_in_flight: int
    ranks: int
    num_nodes: int
    device: str

    def __str__(self) -> str:
        return self.backend if self.transport == "none" else f"{self.backend} {self.transport}"


class RankSet(ABC):
    """A set of ranks of one backend. It is active during its own turns and idle during turns of other sets."""

    info: RankSetInfo

    @abstractmethod
    def activate(self) -> AbstractContextManager[None]:
        """Return a context manager that activates the ranks. Idle ranks use no CPU time."""

    @abstractmethod
    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(backend, *args)` on every rank of an active set. Return the results in rank order."""


class SuspendableRanks(RankSet):
    """Ranks that this process starts on this host. SIGSTOP suspends idle ranks, because Horovod would otherwise use CPU
    time for polling."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._pids: list[int] = []
        try:
            results = group.run(_prepare_rank, timeout_seconds=TURN_TIMEOUT_SECONDS)
            self.info = results[0][1]
            self._pids = [pid for pid, _ in results]
        finally:
            self._send_signal(signal.SIGSTOP)

    @contextmanager
    def activate(self) -> Iterator[None]:
        self._send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._send_signal(signal.SIGSTOP)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._group.run(function, *args, timeout_seconds=TURN_TIMEOUT_SECONDS)

    def resume(self) -> None:
        """Resume the ranks permanently, so that they can be terminated."""
        self._send_signal(signal.SIGCONT)

    def _send_signal(self, signum: signal.Signals) -> None:
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)


class LaunchedRanks(RankSet):
    """Ranks that a launcher has started, on any number of hosts. This process is one of them.

    The backend is shut down while the set is idle, because a process supports only one active backend. Nested calls of
    `activate` use the same backend.
    """

    def __init__(self, name: str, device: str | None) -> None:
        self._name, self._device = name, device
        self._backend: Backend | None = None
        with self.activate():
            self.info = _describe_rank_set(self._active_backend)

    @property
    def _active_backend(self) -> Backend:
        assert self._backend is not None, "the rank set is not active"
        return self._backend

    @contextmanager
    def activate(self) -> Iterator[None]:
        if self._backend is not None:
            yield
            return
        try:
            with unitrain.init(self._name, device=self._device) as self._backend:
                yield
        finally:
            self._backend = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._active_backend.allgather_object(function(self._active_backend, *args))


@dataclass(frozen=True)
class RankSetSpec:
    """The arguments of the `RankGroup` for a set of ranks on this host."""

    backend: str
    ranks: int
    command: Sequence[str] = ()
    variables: Mapping[str, str] | None = None


@contextmanager
def start_rank_sets(specs: Sequence[RankSetSpec], device: str) -> Iterator[list[RankSet]]:
    """Start one set of ranks per spec. The ranks are terminated on exit from the context, even after SIGTERM and
    SIGHUP.
    """
    with ExitStack() as stack:
        # Raise SystemExit, so that the ranks are terminated. Otherwise, suspended ranks would outlive this process.
        for signum in (signal.SIGTERM, signal.SIGHUP):
            if (previous_handler := signal.getsignal(signum)) != signal.SIG_IGN:  # nohup ignores SIGHUP
                signal.signal(signum, lambda signum, _: sys.exit(128 + signum))
                stack.callback(signal.signal, signum, previous_handler)
        rank_sets: list[RankSet] = []
        for spec in specs:
            group = stack.enter_context(
                RankGroup(
                    spec.backend,
                    spec.ranks,
                    spawn=True,
                    command=spec.command,
                    variables=spec.variables,
                    device=device,
                    backend_timeout_seconds=TURN_TIMEOUT_SECONDS,
                )
            )
            suspendable_ranks = SuspendableRanks(group)
            stack.callback(suspendable_ranks.resume)
            rank_sets.append(suspendable_ranks)
        yield rank_sets


def _prepare_rank(backend: Backend) -> tuple[int, RankSetInfo]:
    """Pin this rank to a core if there is one per rank. Return its process ID and the description of its set.

    Without pinning, migrations between cores cause variation between rounds that is larger than the measured effects.
    """
    if sys.platform.startswith("linux"):
        cores = usable_cores()
        if backend.size <= len(cores):
            for thread in Path("/proc/self/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cores[backend.rank]})
        # A suspended rank cannot detect the death of its parent.
        parent_death_signal_setter(signal.SIGKILL)()
    return os.getpid(), _describe_rank_set(backend)


def _describe_rank_set(backend: Backend) -> RankSetInfo:
    return RankSetInfo(
        backend=backend.name,
        transport=backend.transport,
        max_in_flight=backend.max_in_flight,
        ranks=backend.size,
        num_nodes=backend.num_nodes,
        device=backend.device.type,
    )
