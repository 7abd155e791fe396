"""Ranks of a backend as processes on this host. They are reused between calls, because starting them is slow."""

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
_AFTER_FAILURE_SECONDS = 15.0
_shared_fork_server: ForkServer | None = None


class RankError(AssertionError):
    """A function failed on at least one rank. The message contains the traceback of the first failed rank and the state
    of the other ranks.

    `kind` is the name of the exception class; `errors` maps each failed rank to its message.
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

    If possible, ranks are forked from a process that has already imported torch. `spawn=True` starts new processes
    instead; timing measurements require new processes. `command` is a launcher's command line without the program, such
    as ["horovodrun", "-np", "2"]; without it, the ranks are started directly, with variables such as RANK and
    WORLD_SIZE. `variables` are added to the environment of the ranks, which compute on `device`. Every wait has a
    timeout. All processes are terminated at the end of the context.
    """

    def __init__(
        self,
        backend: str,
        size: int,
        *,
        command: Sequence[str] = (),
        spawn: bool = False,
        variables: Mapping[str, str] | None = None,
        device: str = "cpu",
        backend_timeout_seconds: float = 60.0,
    ) -> None:
        self.backend = backend
        self.size = size
        self._command = list(command)
        # Imported modules may read variables at import, and CUDA cannot be used after a fork.
        self._forks = not (spawn or command or variables) and device == "cpu" and sys.platform.startswith("linux")
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

        The function must be importable by name. Raises RankError if a rank fails or is still busy after
        `timeout_seconds`, or 15 s after another rank has failed; the error contains the stacks of busy ranks. All
        processes are then killed, and the next call starts new ones.
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
        """Shut down the backend on every rank, and kill processes that do not exit in time."""
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
        global _shared_fork_server
        if self._forks:
            if _shared_fork_server is None or not _shared_fork_server.is_running:
                _shared_fork_server = ForkServer()
            return _shared_fork_server.fork(arguments, variables)
        program = [*self._command, sys.executable, "-m", "unitrain.testing.worker", *arguments]
        return subprocess.Popen(program, env=variables, start_new_session=True)

    def _check_start(self, deadline: float) -> None:
        """Raise RankError if a process has exited before all ranks connected, or if the time limit is exceeded."""
        ended = [process.returncode for process in self._processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            reason = f"a process ended with exit code {ended[0]}" if ended else f"timed out after {_START_SECONDS:g} s"
            missing = ", ".join(str(rank) for rank in range(self.size) if rank not in self._ranks)
            raise RankError(f"Ranks {missing} of {self.size} on {self.backend} did not start: {reason}.", "NotStarted")

    def _environments(self, key: bytes) -> list[dict[str, str]]:
        """Return the environment of each process to start: one per rank, or one for the launcher."""
        # If this process is itself a rank of a job, the new ranks must not inherit its variables.
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
        limit = f"after {timeout_seconds:g} s"
        waiting = {rank.connection: number for number, rank in self._ranks.items()}
        answers: dict[int, tuple[Any, ...]] = {}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                number = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    answers[number] = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    answers[number] = (False, "ProcessDied", "the process has ended", "", time.time())
            failure_deadline = time.monotonic() + _AFTER_FAILURE_SECONDS
            if failure_deadline < deadline and any(not answer[0] for answer in answers.values()):
                # Other ranks may also fail: wait a few seconds, so that the error contains their messages.
                deadline = failure_deadline
                limit = f"{_AFTER_FAILURE_SECONDS:g} s after that failure"
        failures = {number: answer for number, answer in answers.items() if not answer[0]}
        if waiting or failures:
            raise self._error(failures, sorted(waiting.values()), limit)
        return [answers[number][1] for number in range(self.size)]

    def _error(self, failures: dict[int, tuple[Any, ...]], busy: list[int], limit: str) -> RankError:
        parts = []
        kind = "Timeout"
        if failures:
            first = min(failures, key=lambda number: failures[number][4])
            kind = failures[first][1]
            parts.append(f"Rank {first} of {self.size} on {self.backend} failed first:\n{failures[first][3]}")
            parts += [f"rank {n}: {f[1]}: {f[2]}" for n, f in sorted(failures.items()) if n != first]
        for number in busy:
            parts.append(f"Rank {number} was still busy {limit}:\n{self._stack(number)}")
        return RankError("\n".join(parts), kind, {number: failure[2] for number, failure in failures.items()})

    def _stack(self, number: int) -> str:
        rank = self._ranks[number]
        with contextlib.suppress(OSError):
            os.kill(rank.pid, signal.SIGUSR2)
            time.sleep(_STACK_SECONDS)
            return rank.stacks.read_text()
        return "(no stack: the process has ended)"

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
    """Call `function(backend, *args)` on `size` new ranks, and return the results in rank order. The ranks import
    `function` from its module, which must not be `__main__`, the running script. See `RankGroup.run`."""
    with RankGroup(backend, size, command=command) as group:
        return group.run(function, *args, timeout_seconds=timeout_seconds)
