"""Run a command with a time limit, and terminate all processes it started."""

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
from unitrain.bootstrap.environment import JOB_KEY_VARIABLE
from unitrain.processes import find_process_ids, parent_death_signal_setter, terminate_processes

_STACK_SECONDS = 1.0
_BETWEEN_RANKS_SECONDS = 0.05  # delay between ranks, to avoid interleaved stacks
# Python prints the stacks of all threads on abort or crash.
_FAULT_HANDLER = {"PYTHONFAULTHANDLER": "1"}
# The first line that a launcher prints after a rank exits.
_LAUNCHER_REPORT = re.compile(
    r"[EWI]\d{4} .* torch/distributed/elastic/"  # torchrun
    r"|Process \d+ exit with status code"  # horovodrun
    r"|-{50,}$"  # mpirun
)
_RANK_PREFIX = re.compile(r"\[[\d,]+\]<std(err|out)>:")  # of horovodrun
_OMITTED = ("Extension modules: ", "Fatal Python error: Aborted")


@dataclass(frozen=True)
class CommandResult:
    """The exit code of a command (None if it timed out), its duration, and its output."""

    exit_code: int | None
    seconds: float
    output: str


def run_command(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    marker_variable: str,
    script: str,
    output: Path,
    timeout_seconds: float,
) -> CommandResult:
    """Run `command`, which executes `script`, and write its output to the file `output`.

    The command has the variables in `environment`, a new job key, and PYTHONFAULTHANDLER. After `timeout_seconds`, the
    ranks print their stacks and the command is terminated. All processes started by the command are always terminated:
    its process group, and every process with the same value of `marker_variable` in its environment, because launchers
    start ranks in separate process groups.
    """
    start_time = time.monotonic()
    tag = f"{marker_variable}={environment[marker_variable]}".encode()
    with output.open("wb") as file:
        process = subprocess.Popen(
            command,
            env={**environment, **_FAULT_HANDLER, JOB_KEY_VARIABLE: new_key()},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=parent_death_signal_setter(signal.SIGTERM),  # if this process is killed
        )
        exit_code, text = None, None
        try:
            exit_code = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            _abort_ranks(tag, script)
            text = output.read_text(errors="replace")
        finally:
            terminate_processes(process, tag)
    text = output.read_text(errors="replace") if text is None else text
    return CommandResult(exit_code, time.monotonic() - start_time, text)


def last_lines(output: str, max_lines: int = 16) -> list[str]:
    """Return at most `max_lines` lines before the launcher's report that a rank has exited.

    Without such a report, they are the last lines of the output.
    """
    lines = [line for line in output.splitlines() if _RANK_PREFIX.sub("", line).strip()]
    lines = [line for line in lines if not any(text in line for text in _OMITTED)]
    # Without a terminal, horovodrun prints its own traceback before its report of the exited ranks. Only the lines of
    # the ranks have a prefix.
    has_prefixes = any(_RANK_PREFIX.match(line) for line in lines)
    end = next(
        (
            index
            for index, line in enumerate(lines)
            if _LAUNCHER_REPORT.match(line) or (has_prefixes and line.startswith("Traceback (most recent call last)"))
        ),
        None,
    )
    return (lines[:end] or lines)[-max_lines:]


def _abort_ranks(tag: bytes, script: str) -> None:
    """Abort the ranks to print their stacks. The caller terminates all processes afterwards."""
    for pid in find_process_ids(tag):
        with contextlib.suppress(OSError):
            program, *arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            if (
                "python" in program
                and next((argument for argument in arguments if not argument.startswith("-")), None) == script
            ):
                resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
                os.kill(pid, signal.SIGABRT)
                time.sleep(_BETWEEN_RANKS_SECONDS)
    time.sleep(_STACK_SECONDS)
