"""Runs the tests of a suite on ranks that stay alive between tests.

This process imports torch and the tests once, and forks the ranks of both backends. Under mpirun, which starts the
ranks itself, each rank imports them. If a test fails or times out, new ranks run the next test.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from unitrain.bootstrap.network import reserve_port

from . import rank, suites

TEST_SECONDS = 180.0
# Time for the other ranks to finish a test after one rank has failed.
_OTHER_RANKS_SECONDS = 15.0
_START_SECONDS = 600.0  # ranks of mpirun import torch, which is slow on a busy machine
Outcome = tuple[str, str, float]


class Job:
    """The ranks of one backend, as forked processes or as processes of mpirun."""

    def __init__(self, suite: suites.Suite, size: int, backend: str, folder: Path, source: Path | None) -> None:
        self._suite, self._size, self._backend, self._source = suite, size, backend, source
        self._folder = folder
        self._processes: list[int] = []
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._mpirun_log = folder / "mpirun.log"
        self._connections: list[Connection] = []
        self._reserved_port: socket.socket | None = None  # MASTER_PORT of the ranks

    def run(self, module: ModuleType, classes: list[Any], test: tuple[str, str]) -> Outcome:
        """Run one test on all ranks and return its outcome."""
        if not self._connections:
            self._start(module, classes)
        with tempfile.TemporaryDirectory(dir=self._folder, ignore_cleanup_errors=True) as folder:
            for name in ("barrier", "test_dir", "init_dir"):
                (Path(folder) / name).mkdir()
            started = time.monotonic()
            try:
                for connection in self._connections:
                    connection.send((*test, folder))
                outcomes = self._receive()
            except OSError:
                outcomes = [None] * self._size
            seconds = time.monotonic() - started
        outcome = _merge_outcomes(outcomes, seconds)
        if outcome[0] == rank.FAILED:
            self.stop()
        return outcome

    def _receive(self) -> list[Outcome | None]:
        outcomes: list[Outcome | None] = [None] * self._size
        waiting = list(self._connections)
        deadline = time.monotonic() + TEST_SECONDS
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(waiting, timeout=left):
                assert isinstance(ready, Connection)
                waiting.remove(ready)
                index = self._connections.index(ready)
                try:
                    outcomes[index] = ready.recv()
                except (EOFError, OSError):
                    outcomes[index] = (rank.FAILED, "the process ended", 0.0)
                if outcomes[index][0] == rank.FAILED:  # type: ignore[index]
                    deadline = min(deadline, time.monotonic() + _OTHER_RANKS_SECONDS)
        return outcomes

    def _start(self, module: ModuleType, classes: list[Any]) -> None:
        address = str(self._folder / f"{self._backend}.{time.monotonic_ns()}")
        with Listener(address, backlog=self._size) as listener:
            if self._backend == "horovod-mpi":
                self._start_mpirun(address)
            else:
                self._fork(module, classes, address)
            try:
                self._connections = _accept(listener, self._size)
            except TimeoutError:
                if self._mpirun is not None:
                    print(self._mpirun_log.read_text(errors="replace"), file=sys.stderr)
                raise

    def _fork(self, module: ModuleType, classes: list[Any], address: str) -> None:
        self._reserved_port = reserve_port()
        port = self._reserved_port.getsockname()[1]
        for number in range(self._size):
            process = os.fork()
            if process == 0:
                os.setpgid(0, 0)
                log = os.open(self._folder / f"{self._backend}.{number}.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
                os.dup2(log, 1)
                os.dup2(log, 2)
                os.environ.update(
                    RANK=str(number), WORLD_SIZE=str(self._size), LOCAL_RANK=str(number),
                    LOCAL_WORLD_SIZE=str(self._size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                )  # fmt: skip
                try:
                    connection = Client(address)
                    connection.send(number)
                    rank.main(module, classes, self._backend, connection)
                finally:
                    os._exit(1)
            self._processes.append(process)

    def _start_mpirun(self, address: str) -> None:
        variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"  # there may be more ranks than cores
        arguments = [*self._suite_arguments(), "--connect", address]
        self._mpirun = subprocess.Popen(
            ["mpirun", "-np", str(self._size), "--oversubscribe", "--bind-to", "none",
             sys.executable, "-m", "tests.torch_suites.coordinator", *arguments],
            env={**os.environ, **variables}, start_new_session=True,
            stdout=self._mpirun_log.open("ab"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _suite_arguments(self) -> list[str]:
        source = [] if self._source is None else ["--folder", str(self._source)]
        return ["--suite", self._suite.name, *source]

    def stop(self) -> None:
        """End the ranks."""
        for connection in self._connections:
            connection.close()
        self._connections = []
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
        self._processes = []
        if self._reserved_port is not None:
            self._reserved_port.close()
            self._reserved_port = None
        if self._mpirun is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._mpirun.pid, signal.SIGTERM)
            try:
                self._mpirun.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self._mpirun.pid, signal.SIGKILL)
                self._mpirun.wait()
            self._mpirun = None


def _accept(listener: Listener, size: int) -> list[Connection]:
    """Return the connections of all ranks in rank order."""
    listener._listener._socket.settimeout(_START_SECONDS)  # type: ignore[attr-defined]
    connections = {}
    for _ in range(size):
        connection = listener.accept()
        connections[connection.recv()] = connection
    return [connections[number] for number in range(size)]


def _merge_outcomes(outcomes: list[Outcome | None], seconds: float) -> Outcome:
    """Combine the outcomes of all ranks into the outcome of the test. A test has passed if every rank has passed."""
    failures = [
        f"rank {number}: {'did not finish' if outcome is None else outcome[1]}"
        for number, outcome in enumerate(outcomes)
        if outcome is None or outcome[0] == rank.FAILED
    ]
    if failures:
        return rank.FAILED, "\n".join(failures), seconds
    kinds = {outcome[0] for outcome in outcomes if outcome is not None}
    return (rank.PASSED if kinds == {rank.PASSED} else rank.SKIPPED), "", seconds


@contextlib.contextmanager
def _job(*arguments: Any) -> Iterator[Job]:
    job = Job(*arguments)
    try:
        yield job
    finally:
        job.stop()


def run(
    suite: suites.Suite,
    backends: list[str],
    source: Path | None,
    selected: Callable[[str], bool],
    logs: Path | None,
) -> dict[str, dict[str, Outcome]]:
    """Run the tests of a suite with each backend, and return {backend: {test: outcome}}.

    Backends other than the first run only the tests that pass with the first.
    """
    module = suites.load_module(suite, source)
    classes = suites.find_test_classes(suite, module)
    tests = [
        (test_class, name)
        for test_class, name in suites.select_tests(suite, classes)
        if selected(f"{test_class.__name__}.{name}")
    ]
    found: dict[str, dict[str, Outcome]] = {}
    with tempfile.TemporaryDirectory(prefix="unitrain-suites-", ignore_cleanup_errors=True) as text:
        folder = Path(text)
        for backend in backends:
            found[backend] = {}
            by_size: dict[int, list[tuple[str, str]]] = {}
            for test_class, name in tests:
                size = suite.size or _size_of(test_class, name)
                by_size.setdefault(size, []).append((test_class.__name__, name))
            for size, members in by_size.items():
                os.environ["WORLD_SIZE"] = str(size)
                with _job(suite, size, backend, folder, source) as job:
                    for class_name, name in members:
                        test = f"{class_name}.{name}"
                        if backend == backends[0] or found[backends[0]][test][0] == rank.PASSED:
                            outcome = job.run(module, classes, (class_name, name))
                            if outcome[0] == rank.FAILED:  # repeat once, because many tests have short timeouts
                                outcome = job.run(module, classes, (class_name, name))
                            found[backend][test] = outcome
                            print(f"{backend} {test}: {outcome[0]}, {outcome[2]:.1f} s", file=sys.stderr, flush=True)
                            if outcome[0] == rank.FAILED and backend != backends[0]:
                                print(outcome[1], file=sys.stderr, flush=True)
        if logs is not None:
            for log in folder.glob("*.log"):
                shutil.copy(log, logs / f"{suite.name}.{log.name}")
    return found


def _size_of(test_class: Any, name: str) -> int:
    size = getattr(test_class, "world_size", 1)  # classes without world_size run on one rank
    return int(size if isinstance(size, int) else test_class(name).world_size)


def main() -> None:
    """Run a suite and print its outcomes as JSON, or become one rank of mpirun."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suites.coordinator")
    parser.add_argument("--suite", required=True, choices=list(suites.BY_NAME))
    parser.add_argument("--backends", nargs="+", default=["gloo", "horovod"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tests", nargs="*", default=[])
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--connect", help="address of the coordinator; set only for ranks that mpirun starts")
    arguments = parser.parse_args()
    suite = suites.BY_NAME[arguments.suite]
    if arguments.connect:
        number, size = os.environ["OMPI_COMM_WORLD_RANK"], os.environ["OMPI_COMM_WORLD_SIZE"]
        module = suites.load_module(suite, arguments.folder)
        os.environ.update(RANK=number, WORLD_SIZE=size)
        connection = Client(arguments.connect)
        connection.send(int(number))
        rank.main(module, suites.find_test_classes(suite, module), "horovod", connection)
    words = arguments.tests
    found = run(
        suite,
        arguments.backends,
        arguments.folder,
        lambda test: not words or any(word in test for word in words),
        arguments.logs,
    )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
