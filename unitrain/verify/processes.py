"""One run: a command with a time limit, of which nothing is left when it is over."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unitrain.bootstrap.authentication import new_key
from unitrain.bootstrap.environment import JOB_KEY
from unitrain.processes import end_all, marked

_TERM_SECONDS = 5.0
_STACK_SECONDS = 1.0
_BETWEEN_SECONDS = 0.05  # ranks that tell at once tell in the same lines
# With it, Python prints the stacks of its threads when it is aborted, and when it crashes.
_TELLS_STACKS = {"PYTHONFAULTHANDLER": "1"}
# How a line begins from which on it is the launcher that tells what it made of a rank's end.
_LAUNCHER_TELLS = re.compile(
    r"[EWI]\d{4} .* torch/distributed/elastic/"  # torchrun
    r"|Process \d+ exit with status code"  # horovodrun
    r"|-{50,}$"  # mpirun
)
_PREFIX = re.compile(r"\[[\d,]+\]<std(err|out)>:")  # of a rank under horovodrun
_OMITTED = ("Extension modules: ", "Fatal Python error: Aborted")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (None where its time was over), how long it took, and what it printed until
    then."""

    code: int | None
    seconds: float
    output: str


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    mark: str,
    script: str,
    output: Path,
    limit_seconds: float,
) -> Ended:
    """Run `command`, which runs `script`, with this environment, and keep what it prints in the file `output`.

    It is ended after `limit_seconds`, its ranks telling where they are. And with it, always, ends whatever it has
    started: its process group, and every process that has the variable `mark` with the same value, because launchers
    give their ranks groups of their own.
    """
    started = time.monotonic()
    tag = f"{mark}={environment[mark]}".encode()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**environment, **_TELLS_STACKS, JOB_KEY: new_key()},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code, told = None, None
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            _ask_for_stacks(tag, script)
            told = output.read_text(errors="replace")
            process.terminate()  # which launchers pass on to their ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TERM_SECONDS)
        finally:
            end_all(process, tag)
    return Ended(code, time.monotonic() - started, output.read_text(errors="replace") if told is None else told)


def last_words(output: str, most: int = 16) -> list[str]:
    """Return the last lines of what a command printed before its launcher told that a rank had ended."""
    lines = [line for line in output.splitlines() if _PREFIX.sub("", line).strip()]
    lines = [line for line in lines if not any(text in line for text in _OMITTED)]
    end = next((number for number, line in enumerate(lines) if _LAUNCHER_TELLS.match(line)), None)
    return (lines[:end] or lines)[-most:]


def _ask_for_stacks(tag: bytes, script: str) -> None:
    """Let the ranks, which are of no more use, print their stacks."""
    for pid in marked(tag):
        with contextlib.suppress(OSError):
            program, *arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            if "python" in program and next((one for one in arguments if not one.startswith("-")), None) == script:
                resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                os.kill(pid, signal.SIGABRT)
                time.sleep(_BETWEEN_SECONDS)
    time.sleep(_STACK_SECONDS)
