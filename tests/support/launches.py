"""Starts real launchers from a test, and terminates all their processes at the end of the test."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preload import preloaded

from unitrain.bootstrap import environment
from unitrain.bootstrap.network import reserve_port

SECONDS = 100


@dataclass(frozen=True)
class Launch:
    """A running launcher. Its process and all descendants have `mark` in their environment."""

    process: subprocess.Popen[str]
    mark: bytes

    def find_processes(self) -> list[int]:
        """Return the process IDs of the launcher and its descendants, including torchrun's ranks, which are in other
        process groups."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def output(self) -> str:
        """Wait until the launcher exits, and return its output."""
        return self.process.communicate(timeout=SECONDS)[0]

    def wait_until_all_exited(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while processes := self.find_processes():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running after {seconds} s: {processes}")
            time.sleep(0.1)


def kill_until_none_is_left(find_processes: Callable[[], Iterable[int]], seconds: float) -> None:
    """Kill the processes that `find_processes` returns. Repeat this for at most `seconds`, because these processes may
    start others before they exit."""
    deadline = time.monotonic() + seconds
    while (processes := list(find_processes())) and time.monotonic() < deadline:
        for pid in processes:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@contextlib.contextmanager
def running_launcher(
    command: list[str], variables: dict[str, str] | None = None, *, fresh: bool = False
) -> Iterator[Launch]:
    """Run `command` in a new session with `variables` added to its environment, and kill all its processes at the end.

    Unless `fresh` is true, Python processes of the command are forked from a preloaded interpreter (`preload.py`).
    """
    name, value = "UNITRAIN_TEST_LAUNCH", secrets.token_hex(8)
    added = {name: value, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    kept = {key: text for key, text in os.environ.items() if key not in ("OMP_NUM_THREADS", "UNITRAIN_BACKEND")}
    environ = kept | added | (variables or {})
    process = subprocess.Popen(
        command,
        env=environ if fresh else preloaded(environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    launch = Launch(process, f"{name}={value}".encode())
    try:
        yield launch
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        kill_until_none_is_left(launch.find_processes, SECONDS)
        process.communicate(timeout=SECONDS)


@contextlib.contextmanager
def running_ranks(script: Path, backend: str, size: int, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks directly, without a launcher that would terminate the other ranks after a failure."""
    reservation = reserve_port()
    processes = []
    for rank in range(size):
        position = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        variables = {
            **environment.without_launcher_variables(),
            **{name: str(value) for name, value in position.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(reservation.getsockname()[1]),
            "UNITRAIN_BACKEND": backend,
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=preloaded(variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        reservation.close()


def read_rank_reports(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of the JSON files in `folder`, one per rank, in the order of their names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
