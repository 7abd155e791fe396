"""Several ranks of a backend as processes of this host, kept alive between functions because starting them is slow."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from unitrain.bootstrap import environment
from unitrain.testing.fork_server import Child, ForkServer

_START_SECONDS = 120.0
_STACK_SECONDS = 1.0
_STOP_SECONDS = 20.0
_LAST_WORDS_SECONDS = 15.0
_nursery: ForkServer | None = None


class RankError(AssertionError):
    """A function failed on some rank; the text is the traceback of the rank that failed first, and what the others did.

    `kind` is the name of the exception's class, `errors` the texts of every rank's exception by rank.
    """

    def __init__(self, text: str, kind: str = "", errors: dict[int, str] | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.errors = errors or {}


@dataclass
class _Rank:
    connection: Connection
    pid: int
    stacks: Path


class RankGroup:
    """`size` ranks of `backend` on this host; a context manager.

    Where they can be, ranks are forked from a process that has imported torch, unless they are to be started `anew`, as
    what is measured should be. `command` is what starts them and ends where the program begins, such as ["horovodrun",
    "-np", "2"]; without it they are started directly, as any scheduler that sets RANK and WORLD_SIZE would. `variables`
    are added to their environment, and `device` is where they compute. No wait is longer than its stated time, and no
    process outlives the group.
    """

    def __init__(
        self,
        backend: str,
        size: int,
        *,
        command: Sequence[str] = (),
        anew: bool = False,
        variables: Mapping[str, str] | None = None,
        device: str = "cpu",
        backend_timeout_seconds: float = 60.0,
    ) -> None:
        self.backend = backend
        self.size = size
        self._command = list(command)
        # Variables may be read by what is imported, and a GPU is no matter for forks.
        self._forks = not (anew or command or variables) and device == "cpu" and sys.platform.startswith("linux")
        self._variables = dict(variables or {})
        self._device = device
        self._backend_timeout_seconds = backend_timeout_seconds
        self._processes: list[subprocess.Popen[bytes] | Child] = []
        self._ranks: dict[int, _Rank] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """Call `function(backend, *args)` on every rank and return the results in rank order.

        The function must be importable by name. Raises RankError when any rank fails, or is still busy after
        `timeout_seconds` or a while after another has failed, with the stacks of the busy ones; the processes are then
        ended, and the next call starts new ones.
        """
        message = pickle.dumps((function, args))
        try:
            if not self._ranks:
                self._start()
            for rank in self._ranks.values():
                rank.connection.send(message)
            return self._collect(timeout_seconds)
        except BaseException:
            self._end_processes()
            raise

    def stop(self) -> None:
        """Let every rank shut its backend down, and end what does not come to an end."""
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):
                rank.connection.send(None)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._end_processes()

    def _start(self) -> None:
        key = secrets.token_bytes(16)
        with Listener(("127.0.0.1", 0), backlog=self.size, authkey=key) as listener:
            host, port = listener.address
            arguments = [str(host), str(port), self.backend, self._device, str(self._backend_timeout_seconds)]
            for variables in self._environments(key):
                self._processes.append(self._start_process(arguments, variables))
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            deadline = time.monotonic() + _START_SECONDS
            while len(self._ranks) < self.size:
                try:
                    connection = listener.accept()
                except TimeoutError:
                    self._check_start(deadline)
                    continue
                number, pid, stacks = connection.recv()
                self._ranks[number] = _Rank(connection, pid, Path(stacks))
        for rank in self._ranks.values():
            rank.connection.send([path for path in sys.path if path])

    def _start_process(self, arguments: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes] | Child:
        global _nursery
        if self._forks:
            if _nursery is None or not _nursery.lives:
                _nursery = ForkServer()
            return _nursery.fork(arguments, variables)
        program = [*self._command, sys.executable, "-m", "unitrain.testing.worker", *arguments]
        return subprocess.Popen(program, env=variables, start_new_session=True)

    def _check_start(self, deadline: float) -> None:
        """Raise RankError when a process ended before all ranks were there, or the time is over."""
        ended = [process.returncode for process in self._processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            told = f"a process ended with exit code {ended[0]}" if ended else f"{_START_SECONDS:g} s are over"
            absent = ", ".join(str(rank) for rank in range(self.size) if rank not in self._ranks)
            raise RankError(f"Ranks {absent} of {self.size} on {self.backend} did not start: {told}.", "NotStarted")

    def _environments(self, key: bytes) -> list[dict[str, str]]:
        """Return the environment of every process that is started here: one per rank, or one for the launcher."""
        # Not this process's own place, which it has when it runs inside a job.
        base = environment.without_launcher_variables() | {"OMP_NUM_THREADS": "1", **self._variables}
        base["UNITRAIN_TEST_KEY"] = key.hex()
        if self._command:
            return [base]
        from unitrain.bootstrap.network import free_port

        port = str(free_port())
        return [
            base
            | {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            for rank in range(self.size)
        ]

    def _collect(self, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        patience = f"after {timeout_seconds:g} s"
        waiting = {rank.connection: number for number, rank in self._ranks.items()}
        answers: dict[int, tuple[Any, ...]] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                number = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    answers[number] = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    answers[number] = (False, "ProcessDied", "the process died", "", time.time())
            last_words = time.monotonic() + _LAST_WORDS_SECONDS
            if last_words < deadline and any(not answer[0] for answer in answers.values()):
                # The others have a moment to fail by themselves, so that each rank's own words are known.
                deadline = last_words
                patience = f"{_LAST_WORDS_SECONDS:g} s after that failure"
        failures = {number: answer for number, answer in answers.items() if not answer[0]}
        if waiting or failures:
            raise self._error(failures, sorted(waiting.values()), patience)
        return [answers[number][1] for number in range(self.size)]

    def _error(self, failures: dict[int, tuple[Any, ...]], silent: list[int], patience: str) -> RankError:
        parts = []
        kind = "Timeout"
        if failures:
            first = min(failures, key=lambda number: failures[number][4])
            kind = failures[first][1]
            parts.append(f"Rank {first} of {self.size} on {self.backend} failed first:\n{failures[first][3]}")
            parts += [f"rank {n}: {f[1]}: {f[2]}" for n, f in sorted(failures.items()) if n != first]
        for number in silent:
            parts.append(f"Rank {number} was still busy {patience}:\n{self._stack(number)}")
        return RankError("\n".join(parts), kind, {number: failure[2] for number, failure in failures.items()})

    def _stack(self, number: int) -> str:
        rank = self._ranks[number]
        with contextlib.suppress(OSError):
            os.kill(rank.pid, signal.SIGUSR2)
            time.sleep(_STACK_SECONDS)
            return rank.stacks.read_text()
        return "(no stack: the process is gone)"

    def _end_processes(self) -> None:
        for rank in self._ranks.values():
            rank.connection.close()
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._ranks, self._processes = {}, []


def run_ranks(
    function: Callable[..., Any],
    size: int,
    *,
    backend: str = "ddp",
    args: Sequence[Any] = (),
    command: Sequence[str] = (),
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """Call `function(backend, *args)` once on each of `size` new ranks and return the results; see `RankGroup.run`."""
    with RankGroup(backend, size, command=command) as group:
        return group.run(function, *args, timeout_seconds=timeout_seconds)
