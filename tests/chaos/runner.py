"""Runs trials: starts the job until it succeeds, injects faults, and checks the outcome."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hosts as namespaces
from hosts import Host

from .job import TRIAL_SECONDS, Job
from .oracle import check_files, check_result, check_samples
from .trials import Start, Trial, to_json

_MAX_STARTS = 8
_DISK_BYTES = 4 << 20
_PAUSE_SECONDS = 0.2
# A job may report this text if processes of a killed job are still exiting.
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
    """The results of undisturbed runs. A run is started when its result is first requested."""

    def __init__(self) -> None:
        self._found: dict[Any, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def get(self, trial: Trial) -> dict[str, Any]:
        """Return the result of the undisturbed run of `trial`. With logical ranks, this run has one process. Raises
        RuntimeError if the run fails."""
        first = trial.starts[0]
        start = Start("ddp", "torchrun", (1,)) if trial.is_logical else replace(first, ranks=(sum(first.ranks),))
        key = (start.backend, start.ranks, trial.shard, trial.is_logical)
        with self._lock:
            if key not in self._found:
                plain = Trial((start,), (), is_logical=trial.is_logical, shard=trial.shard, max_restarts=0)
                with _trial_folder(plain) as folder:
                    job = Job(plain, folder, [])
                    try:
                        if (code := job.run(start, time.monotonic() + TRIAL_SECONDS)) != 0:
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
        hosts: list[Host] = []
        if trial.num_hosts == 2:
            (folder / "hosts").mkdir()
            hosts = cleanup.enter_context(namespaces.hosts(2, folder / "hosts"))
        job = Job(trial, folder, hosts)
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


def _run_job(job: Job, trial: Trial, outcome: Outcome) -> list[str]:
    """Start the job until it succeeds. Return the unexpected exit codes."""
    deadline, num_locked = time.monotonic() + TRIAL_SECONDS, 0
    while outcome.num_starts < _MAX_STARTS:
        start = trial.starts[min(outcome.num_starts, len(trial.starts) - 1)]
        num_injected, is_clean = len(job.faults.injected), job.faults.pending == 0
        outcome.num_starts += 1
        try:
            code = job.run(start, deadline)
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


@contextlib.contextmanager
def _trial_folder(trial: Trial) -> Iterator[Path]:
    """Yield a folder for a trial. If this process may mount file systems, `disk` is a small file system.

    Raises RuntimeError if this process may not mount file systems and the trial would fill the file system of this
    machine.
    """
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
        if trial.fills_disk and not is_mounted:
            raise RuntimeError(f"A file system for the trial cannot be mounted at {disk}. Run the trial as root.")
        yield folder
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", disk], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)
