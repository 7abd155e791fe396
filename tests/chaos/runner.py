"""Runs trials: starts the job until it succeeds, injects its faults, and checks the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hosts as namespaces
from hosts import Host
from preload import preloaded

from .faults import Faults
from .oracle import check_files, check_result, check_samples
from .trials import Start, Trial, to_json

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("training.py")
TRIAL_SECONDS, EXIT_SECONDS = 240.0, 20.0
_MAX_STARTS = 8
_DISK_BYTES = 4 << 20
_POLL_SECONDS = 0.01
_PAUSE_SECONDS = 0.2
# A job that is started while processes of a killed one are still exiting may report this.
_LOCKED = "is in use"


def can_mount() -> bool:
    """Return whether this process may mount file systems and create hosts."""
    return os.geteuid() == 0 and all(map(shutil.which, namespaces.PROGRAMS)) and namespaces.can_create_namespaces()


@dataclass
class Outcome:
    """The result of a trial. `wrong` is empty if it passed."""

    wrong: list[str] = field(default_factory=list)
    injected: list[tuple[str, str]] = field(default_factory=list)
    num_starts: int = 0
    num_restarts: int = 0
    seconds: float = 0.0
    output: str = ""


class References:
    """The results of undisturbed runs, which are computed when they are needed."""

    def __init__(self) -> None:
        self._found: dict[Any, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def get(self, trial: Trial) -> dict[str, Any]:
        """Return the result of the undisturbed run of `trial`. With logical ranks, it runs in one process. Raises
        RuntimeError if it fails."""
        first = trial.starts[0]
        start = Start("ddp", "torchrun", (1,)) if trial.is_logical else replace(first, ranks=(sum(first.ranks),))
        key = (start.backend, start.ranks, trial.shard, trial.is_logical)
        with self._lock:
            if key not in self._found:
                plain = Trial((start,), (), is_logical=trial.is_logical, shard=trial.shard, max_restarts=0)
                with _trial_folder(plain) as folder:
                    job = _Job(plain, folder, [])
                    try:
                        if (code := job.start(start, job.faults)) != 0:
                            raise RuntimeError(f"the undisturbed run ended with exit code {code}:\n{job.output()}")
                        self._found[key] = json.loads((folder / "result.json").read_text())[1]
                    finally:
                        job.kill_all()
            return self._found[key]


def run_trial(trial: Trial, references: References) -> Outcome:
    """Run a trial and return its outcome."""
    expected = references.get(trial)
    began, outcome = time.monotonic(), Outcome()
    with _trial_folder(trial) as folder, contextlib.ExitStack() as cleanup:
        both: list[Host] = []
        if trial.num_hosts == 2:
            (folder / "hosts").mkdir()
            both = cleanup.enter_context(namespaces.hosts(2, folder / "hosts"))
        job = _Job(trial, folder, both)
        try:
            outcome.wrong += _run_job(job, trial, outcome)
            job.faults.finish()
            outcome.wrong += job.check_exited()
            outcome.num_restarts = job.output().count("(restart ")
            outcome.injected = job.faults.injected
            if not outcome.wrong:
                outcome.wrong += check_result(folder, expected) + check_samples(folder) + check_files(folder)
                outcome.wrong += job.check_memory_folders()
        finally:
            job.faults.finish()
            job.kill_all()
        outcome.seconds = time.monotonic() - began
        outcome.output = "\n".join([*job.faults.log, job.output()])
    return outcome


def _run_job(job: _Job, trial: Trial, outcome: Outcome) -> list[str]:
    """Start the job until it succeeds. Return what is wrong with its exit codes."""
    deadline, num_locked = time.monotonic() + TRIAL_SECONDS, 0
    while outcome.num_starts < _MAX_STARTS:
        start = trial.starts[min(outcome.num_starts, len(trial.starts) - 1)]
        num_injected, is_clean = len(job.faults.injected), job.faults.pending == 0
        outcome.num_starts += 1
        try:
            code = job.start(start, job.faults, deadline)
        except TimeoutError as error:
            return [f"hang: {error}"]
        if code == 0:
            return [] if (job.folder / "result.json").exists() else ["exit code 0 without a result"]
        if is_clean and len(job.faults.injected) == num_injected:
            if _LOCKED not in job.last_output() or num_locked:
                return [f"start {outcome.num_starts} ended with exit code {code} without a fault"]
            num_locked += 1
        time.sleep(_PAUSE_SECONDS)
    return [f"no success in {_MAX_STARTS} starts"]


class _Job:
    """The processes of a trial, which have a mark in their environment."""

    def __init__(self, trial: Trial, folder: Path, both: list[Host]) -> None:
        self.folder, self._trial, self._hosts = folder, trial, both
        self._name, self._value = "UNITRAIN_TEST_LAUNCH", secrets.token_hex(8)
        self._log = folder / "output.txt"
        self._last_start = 0
        self.faults = Faults(trial, folder, both, self.find_processes)

    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def last_output(self) -> str:
        """Return the output of the latest start."""
        return self.output()[self._last_start :]

    def start(self, start: Start, faults: Faults, deadline: float | None = None) -> int:
        """Run `unitrain launch` until it exits, and return its exit code. Raises TimeoutError."""
        deadline = time.monotonic() + TRIAL_SECONDS if deadline is None else deadline
        (self.folder / "slots").write_text(f"{start.ranks[0]}\n")
        removed = ("OMP_NUM_THREADS", "UNITRAIN_BACKEND", "PYTHONDONTWRITEBYTECODE")
        variables = {name: text for name, text in os.environ.items() if name not in removed}
        variables |= {
            self._name: self._value, "OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "PYTHONPATH": str(ROOT),
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TMPDIR": str(self.folder / "tmp"),
        }  # fmt: skip
        command = self._command(start)
        self._last_start = len(self.output())
        with self._log.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            line = self._hosts[0].command(command) if self._hosts else command
            process = subprocess.Popen(
                line, env=preloaded(variables), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        while process.poll() is None:
            faults.update()
            if time.monotonic() > deadline:
                raise TimeoutError(f"start is still running after {TRIAL_SECONDS:g} s: {self._describe()}")
            time.sleep(_POLL_SECONDS)
        faults.update()
        return process.returncode

    def _command(self, start: Start) -> list[str]:
        trial = self._trial
        options = ["--backend", start.backend, "--launcher", start.launcher]
        if trial.max_restarts:
            options += ["--max-restarts", str(trial.max_restarts)]
        placed = ["-np", str(start.ranks[0])]
        if trial.num_hosts == 2:
            placed = ["-H", ",".join(f"h{number}:{count}" for number, count in enumerate(start.ranks, 1))]
        if trial.is_elastic:
            options += ["--elastic", "1:3", "--elastic-timeout", "60"]
            if trial.num_hosts == 1:
                placed = ["--host-discovery-script", str(self.folder / "discover")]
        if trial.standby and trial.max_restarts:
            options.append("--standby")
        return [sys.executable, "-m", "unitrain", "launch", *options, *placed, str(SCRIPT), str(self.folder)]

    def find_processes(self) -> list[int]:
        """Return the process IDs on this machine of the processes of this trial."""
        mark, found = f"{self._name}={self._value}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def check_exited(self) -> list[str]:
        """Wait until all processes of the trial have exited, and return those that have not."""
        deadline = time.monotonic() + EXIT_SECONDS
        while self.find_processes() or any(host.find_processes() for host in self._hosts):
            if time.monotonic() > deadline:
                return [f"orphans after {EXIT_SECONDS:g} s: {self._describe()}"]
            time.sleep(0.1)
        return []

    def check_memory_folders(self) -> list[str]:
        """Return the folders for checkpoints in memory that still exist."""
        root = Path(f"/proc/{self._hosts[0].first}/root") if self._hosts else Path("/")
        names = set(re.findall(r"UNITRAIN_MEMORY_FOLDER=(\S+)", self.output()))
        return [f"left behind: {name}" for name in names if (root / name.lstrip("/")).exists()]

    def kill_all(self) -> None:
        for host in self._hosts:
            host.kill_all()
        deadline = time.monotonic() + 10
        while (pids := self.find_processes()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def _describe(self) -> str:
        lines = []
        for pid in {*self.find_processes(), *(pid for host in self._hosts for pid in host.find_processes())}:
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                lines.append(f"{pid} {state} {line[:200]}")
        return "\n".join(lines)


@contextlib.contextmanager
def _trial_folder(trial: Trial) -> Iterator[Path]:
    """Yield a folder for a trial with a small file system in `disk`, if this process may mount one."""
    folder = Path(tempfile.mkdtemp(prefix="unitrain-chaos-"))
    for name in ("disk", "tmp", "samples", "ranks", "incidents", "starts"):
        (folder / name).mkdir()
    (folder / "trial.json").write_text(to_json(trial))
    script = folder / "discover"
    script.write_text(f'#!/bin/sh\necho "localhost:$(cat {folder}/slots)"\n')
    script.chmod(0o755)
    disk = str(folder / "disk")
    is_mounted = os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", disk], capture_output=True, check=False
    ).returncode  # fmt: skip
    try:
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", disk], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)
