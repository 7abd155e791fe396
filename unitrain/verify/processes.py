"""One run: a command with a time limit, of which nothing is left when it is over."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TERM_SECONDS = 5.0
# From here on it is the launcher that tells what it made of a rank's end.
_LAUNCHERS_WORDS = (
    "torch/distributed/elastic/",
    "Process name: [",
    "mpirun noticed that",
    "mpirun detected that",
    "Primary job  terminated",
)
_OMITTED = ("*****", "Setting OMP_NUM_THREADS")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (None where its time was over), and how long it took."""

    code: int | None
    seconds: float


def run(command: Sequence[str], environment: Mapping[str, str], mark: str, output: Path, limit_seconds: float) -> Ended:
    """Run `command` with this environment and write what it prints to `output`.

    It is ended after `limit_seconds`, and with it, always, whatever it has started: its process group, and every
    process that has the variable `mark` with the same value, because launchers give their ranks groups of their own.
    """
    started = time.monotonic()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # which launchers pass on to their ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_SECONDS)
        finally:
            _end_all(process, f"{mark}={environment[mark]}".encode())
    return Ended(code, time.monotonic() - started)


def last_words(output: str, most: int = 15) -> list[str]:
    """Return the last lines of what a command printed before its launcher told that a rank had ended."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith(_OMITTED)]
    end = next((number for number, line in enumerate(lines) if any(word in line for word in _LAUNCHERS_WORDS)), None)
    return (lines[:end] or lines)[-most:]


def _end_all(process: subprocess.Popen[bytes], mark: bytes) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _TERM_SECONDS
    while (living := list(_marked(mark))) and time.monotonic() < deadline:  # again: they may have started others
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _marked(mark: bytes) -> Iterator[int]:
    """Yield the processes with `mark` in their environment; none where there is no /proc to read it from."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)
