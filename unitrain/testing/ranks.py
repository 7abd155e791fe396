"""Groups of processes on this host that are the ranks of a backend. Ranks are reused, because starting them is slow."""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import SkipTest

from typing_extensions import Self

from unitrain.bootstrap import environment
from unitrain.errors import MissingFeatureError
from unitrain.testing.fork_server import Child, ForkServer

_START_SECONDS = 120.0
_STACK_SECONDS = 10.0
_STACK_POLL_SECONDS = 0.2
_STOP_SECONDS = 20.0
_AFTER_FAILURE_SECONDS = 15.0
_MISSING = MissingFeatureError.__name__
_shared_fork_server: ForkServer | None = None


def import_before_fork(*names: str) -> None:
    """Import modules in the process from which ranks are forked, so that ranks of later groups need not import them.

    Use it for modules that take seconds to import. A module that is not installed is skipped.
    """
    _get_fork_server().import_modules(names)


def _get_fork_server() -> ForkServer:
    global _shared_fork_server
    if _shared_fork_server is None or not _shared_fork_server.is_running:
        _shared_fork_server = ForkServer()
    return _shared_fork_server


class RankError(AssertionError):
    """A function failed or timed out on at least one rank, or the ranks did not start.

    The message contains the traceback of the first failed rank, the errors of the other failed ranks, and the stacks of
    busy ranks. `kind` is the name of the exception class on the first failed rank, or "ProcessDied", "Timeout" or
    "NotStarted"; `errors` maps each failed rank to its message.
    """

    def __init__(self, text: str, kind: str = "", errors: dict[int, str] | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.errors = errors or {}


@dataclass
class _Rank:
    connection: Connection
    pid: int
    stacks_file: Path


@dataclass
class _Failure:
    """An exception of a rank. `time` is in seconds since the epoch."""

    kind: str
    message: str
    traceback: str
    time: float

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class RankGroup:
    """`size` ranks of `backend` on this host; a context manager.

    `command` is a launcher's command line without the program, such as ["horovodrun", "-np", "2"]. Without it, the
    ranks are started directly, with variables such as RANK and WORLD_SIZE. `variables` are added to the environment of
    the ranks. The ranks compute on `device`, which defaults to UNITRAIN_TEST_DEVICE, or else to the CPU. On Linux,
    ranks on the CPU without `command` and `variables` are forked from a process that has already imported torch. With
    `spawn=True`, new processes are started instead; use it to measure times. Every wait has a timeout. All processes
    are terminated at the end of the context.
    """

    def __init__(
        self,
        backend: str,
        size: int,
        *,
        command: Sequence[str] = (),
        spawn: bool = False,
        variables: Mapping[str, str] | None = None,
        device: str | None = None,
        backend_timeout_seconds: float = 60.0,
    ) -> None:
        self.backend = backend
        self.size = size
        self._command = list(command)
        self._device = device or environment.get_variable("UNITRAIN_TEST_DEVICE") or "cpu"
        # Imported modules may read variables at import, and CUDA cannot be used after a fork.
        self._forks = not (spawn or command or variables) and self._device == "cpu" and sys.platform.startswith("linux")
        self._variables = dict(variables or {})
        self._backend_timeout_seconds = backend_timeout_seconds
        self._processes: list[subprocess.Popen[bytes] | Child] = []
        self._ranks: dict[int, _Rank] = {}
        self._reserved_port: socket.socket | None = None  # MASTER_PORT of the ranks

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 60.0) -> list[Any]:
        """Call `function(backend, *args)` on every rank and return the results in rank order, with tensors on the CPU.

        The function must be importable by name. Raises RankError if a rank fails or is still busy after
        `timeout_seconds`, or 15 s after another rank has failed; the error contains the stacks of busy ranks. Raises
        unittest.SkipTest, with which pytest skips the test, if every rank raises MissingFeatureError. After an error,
        all processes are killed, and the next call starts new ones.
        """
        message = pickle.dumps((function, args))
        try:
            if not self._ranks:
                self._start()
            self._send_to_all(message)
            return self._collect(timeout_seconds)
        except BaseException:
            self._kill_processes()
            raise

    def stop(self) -> None:
        """Shut down the backend on every rank, and kill processes that do not exit in time."""
        self._send_to_all(None)
        deadline = time.monotonic() + _STOP_SECONDS
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired, OSError):
                process.wait(max(0.0, deadline - time.monotonic()))
        self._kill_processes()

    def _start(self) -> None:
        key = secrets.token_bytes(16)
        with Listener(("127.0.0.1", 0), backlog=self.size, authkey=key) as listener:
            host, port = listener.address
            arguments = [str(host), str(port), self.backend, self._device, str(self._backend_timeout_seconds)]
            for variables in self._prepare_environments(key):
                self._processes.append(self._start_process(arguments, variables))
            listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
            deadline = time.monotonic() + _START_SECONDS
            while len(self._ranks) < self.size:
                try:
                    connection = listener.accept()
                    rank_number, pid, stacks = connection.recv()
                except (EOFError, OSError):  # a timeout, or the connected process has ended
                    self._check_start(deadline)
                    continue
                self._ranks[rank_number] = _Rank(connection, pid, Path(stacks))
        self._send_to_all([path for path in sys.path if path])

    def _send_to_all(self, message: object) -> None:
        for rank in self._ranks.values():
            with contextlib.suppress(OSError):  # the process has ended, which `_collect` reports
                rank.connection.send(message)

    def _start_process(self, arguments: list[str], variables: dict[str, str]) -> subprocess.Popen[bytes] | Child:
        if self._forks:
            return _get_fork_server().fork(arguments, variables)
        program = [*self._command, sys.executable, "-m", "unitrain.testing.worker", *arguments]
        return subprocess.Popen(program, env=variables, start_new_session=True)

    def _check_start(self, deadline: float) -> None:
        """Raise RankError if a process has exited before all ranks connected, or if the time limit is exceeded."""
        ended = [process.returncode for process in self._processes if process.poll() is not None]
        if ended or time.monotonic() > deadline:
            reason = f"a process ended with exit code {ended[0]}" if ended else f"timed out after {_START_SECONDS:g} s"
            missing_ranks = ", ".join(str(rank) for rank in range(self.size) if rank not in self._ranks)
            raise RankError(
                f"Ranks {missing_ranks} of {self.size} on {self.backend} did not start: {reason}.", "NotStarted"
            )

    def _prepare_environments(self, key: bytes) -> list[dict[str, str]]:
        """Return the environment of each process to start: one per rank, or one for the launcher. Without a launcher,
        reserve the port of rank 0."""
        # If this process is itself a rank of a job, the new ranks must not inherit its variables.
        base = environment.without_launcher_variables() | {"OMP_NUM_THREADS": "1", **self._variables}
        base["UNITRAIN_TEST_KEY"] = key.hex()
        if self._command:
            return [base]
        from unitrain.bootstrap.network import reserve_port

        self._reserved_port = reserve_port()
        port = str(self._reserved_port.getsockname()[1])
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
        waiting = {rank.connection: rank_number for rank_number, rank in self._ranks.items()}
        results: dict[int, Any] = {}
        failures: dict[int, _Failure] = {}
        while waiting and (remaining_seconds := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=remaining_seconds):
                rank_number = waiting.pop(ready)  # type: ignore[call-overload]
                try:
                    succeeded, *content = pickle.loads(ready.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    succeeded, content = False, ["ProcessDied", "the process has ended", "", time.time()]
                if succeeded:
                    (results[rank_number],) = content
                else:
                    failures[rank_number] = _Failure(*content)
            failure_deadline = time.monotonic() + _AFTER_FAILURE_SECONDS
            if failures and failure_deadline < deadline:
                # Other ranks may also fail: wait a few seconds, so that the error contains their messages.
                deadline = failure_deadline
                limit = f"{_AFTER_FAILURE_SECONDS:g} s after that failure"
        if len(failures) == self.size and all(failure.kind == _MISSING for failure in failures.values()):
            raise SkipTest(next(iter(failures.values())).message)
        if waiting or failures:
            raise self._create_error(failures, sorted(waiting.values()), limit)
        return [results[rank_number] for rank_number in range(self.size)]

    def _create_error(self, failures: dict[int, _Failure], busy: list[int], limit: str) -> RankError:
        parts = []
        kind = "Timeout"
        if failures:
            first = min(failures, key=lambda rank_number: failures[rank_number].time)
            kind = failures[first].kind
            text = failures[first].traceback or str(failures[first])
            parts.append(f"Rank {first} of {self.size} on {self.backend} failed first:\n{text}")
            parts += [
                f"rank {rank_number}: {failure}"
                for rank_number, failure in sorted(failures.items())
                if rank_number != first
            ]
        for rank_number in busy:
            parts.append(f"Rank {rank_number} was still busy {limit}:\n{self._dump_stacks(rank_number)}")
        return RankError(
            "\n".join(parts), kind, {rank_number: failure.message for rank_number, failure in failures.items()}
        )

    def _dump_stacks(self, rank_number: int) -> str:
        """Send SIGUSR2 to a busy rank, whose handler writes the stacks to a file, and return the stacks."""
        rank = self._ranks[rank_number]
        deadline = time.monotonic() + _STACK_SECONDS
        text, previous = "", ""
        with contextlib.suppress(OSError):
            os.kill(rank.pid, signal.SIGUSR2)
            while time.monotonic() < deadline and (not text or text != previous):  # until the file stops growing
                time.sleep(_STACK_POLL_SECONDS)
                text, previous = rank.stacks_file.read_text(), text
            return text or f"(no stack: the process did not respond to a signal within {_STACK_SECONDS:g} s)"
        return "(no stack: the process has ended)"

    def _kill_processes(self) -> None:
        for rank in self._ranks.values():
            rank.connection.close()
            with contextlib.suppress(OSError):
                os.kill(rank.pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            with contextlib.suppress(OSError):  # the fork server, which must wait for the process, has exited
                process.wait()
        for rank in self._ranks.values():
            rank.stacks_file.unlink(missing_ok=True)
        if self._reserved_port is not None:
            self._reserved_port.close()
        self._ranks, self._processes, self._reserved_port = {}, [], None


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
