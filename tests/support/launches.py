"""A real launcher started from a test, with all that comes of it ended when the test does."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unitrain.bootstrap import environment
from unitrain.bootstrap.network import free_port

SECONDS = 100


@dataclass(frozen=True)
class Launch:
    """A launcher at work. Its process and all that come of it carry `mark` in their environment."""

    process: subprocess.Popen[str]
    mark: bytes

    def living(self) -> list[int]:
        """Return the launcher and ranks that live, also those that left its process group, as torchrun's ranks do."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def output(self) -> str:
        """Wait for the end, and return what was printed."""
        return self.process.communicate(timeout=SECONDS)[0]

    def wait_until_none_lives(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while living := self.living():
            if time.monotonic() > deadline:
                raise TimeoutError(f"still there after {seconds} s: {living}")
            time.sleep(0.1)


@contextlib.contextmanager
def started(command: list[str], variables: dict[str, str] | None = None) -> Iterator[Launch]:
    """Run `command` in a session of its own, with these variables added; nothing of it outlives the test."""
    name, value = "UNITRAIN_TEST_LAUNCH", secrets.token_hex(8)
    added = {name: value, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    kept = {key: text for key, text in os.environ.items() if key not in ("OMP_NUM_THREADS", "UNITRAIN_BACKEND")}
    process = subprocess.Popen(
        command,
        env=kept | added | (variables or {}),
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
        for pid in launch.living():
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS)


@contextlib.contextmanager
def started_ranks(script: Path, backend: str, size: int, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks directly, without a launcher that ends the others when one fails."""
    port = str(free_port())
    processes = []
    for rank in range(size):
        position = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "UNITRAIN_BACKEND": backend,
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env=environment.without_launcher_variables()
                | {name: str(value) for name, value in position.items()}
                | variables,
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
