"""`unitrain submit --follow` with a real Slurm on two hosts: state, log and exit code of jobs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosts import hosts
from requirements import needs_hosts, needs_slurm
from slurm import slurm

SECONDS = 120
UNITRAIN = [sys.executable, "-m", "unitrain"]
SCRIPT = """
import os, pathlib, sys, time

attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
case, go = sys.argv[1:]
print(case, "attempt", attempt, "rank", os.environ["SLURM_PROCID"], flush=True)
if case == "fails":
    sys.exit(3)
if case == "requeued" and attempt == "0":
    sys.exit(75)
if case == "waits":
    while not pathlib.Path(go).exists():
        time.sleep(0.2)
    print("waits no longer", flush=True)
if case == "cancelled":
    time.sleep(300)
"""


class FollowProcess:
    """A `unitrain submit --follow` or `unitrain follow` process, whose output is written to a file."""

    def __init__(self, process: subprocess.Popen[str], path: Path) -> None:
        self.process, self.path = process, path

    def output(self) -> str:
        return self.path.read_text()

    def wait_for_job_id(self) -> str:
        match = wait_for("the job ID", lambda: re.search(r"^Submitted batch job (\d+)$", self.output(), re.M))
        return str(match[1])

    def printed_states(self) -> list[str]:
        return re.findall(r"^unitrain: (.*)$", self.output(), re.MULTILINE)


def find_only_child(process: subprocess.Popen[str]) -> int:
    """Return the process ID of the command that a process of `Host.start` runs."""
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(child)


def wait_for(what: str, find: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + SECONDS
    while not (found := find()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not seen within {SECONDS} s")
        time.sleep(0.2)
    return found


@needs_hosts
@needs_slurm
@pytest.mark.ci
@pytest.mark.timeout(600)
def test_follow_shows_state_and_log_and_returns_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    daemons = tmp_path / "slurm"
    daemons.mkdir()
    with hosts(2, tmp_path) as found, slurm(found, daemons) as variables:
        variables |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
        first = found[0]

        def start(name: str, *words: str) -> FollowProcess:
            path = tmp_path / f"{name}.output"
            with path.open("w") as output:
                return FollowProcess(first.start([*UNITRAIN, *words], variables, stdout=output.fileno()), path)

        def submit(case: str, *options: str) -> FollowProcess:
            arguments = ["submit", "--to", "slurm", "--follow", "--time", "30", "--output", f"{case}.log", *options]
            return start(case, *arguments, "train.py", case, "go")

        def control(*words: str) -> str:
            done = first.run(words, variables, seconds=60)
            assert done.returncode == 0, done.stdout
            return done.stdout

        fails = submit("fails", "--nodes", "2")
        requeued = submit("requeued", "--open-mode=truncate")
        waits, cancelled = submit("waits"), submit("cancelled")

        assert fails.process.wait(SECONDS) == 3, fails.output()
        assert sorted(re.findall("^fails attempt 0 rank .$", fails.output(), re.M)) == [
            f"fails attempt 0 rank {rank}" for rank in (0, 1)
        ]
        assert fails.printed_states()[-1] == f"job {fails.wait_for_job_id()} has failed, with exit code 3"

        wait_for("the log of a running job", lambda: "cancelled attempt 0 rank 0" in cancelled.output())
        running = re.compile(rf"^unitrain: job {cancelled.wait_for_job_id()} is running on h[12]$", re.M)
        # The state may be printed before or after the log.
        wait_for("the state of a running job", lambda: running.search(cancelled.output()))
        control("scancel", cancelled.wait_for_job_id())
        assert cancelled.process.wait(SECONDS) not in (0, 130), cancelled.output()
        assert f"job {cancelled.wait_for_job_id()} was cancelled, with exit code" in cancelled.printed_states()[-1]

        # Ctrl-C terminates the command but not the job.
        wait_for("the log of a running job", lambda: "waits attempt 0 rank 0" in waits.output())
        os.kill(find_only_child(waits.process), signal.SIGINT)
        assert waits.process.wait(SECONDS) == 130, waits.output()
        job = waits.wait_for_job_id()
        assert waits.printed_states()[-2:] == [
            f"job {job} continues. Follow it with: unitrain follow --to slurm {job}",
            f"Cancel it with: scancel {job}",
        ]
        assert control("squeue", "-h", "-o", "%T", "-j", job).strip() == "RUNNING"

        # The controller is killed and restarted.
        again = start("again", "follow", "--to", "slurm", job)
        wait_for("the log of a running job", lambda: "waits attempt 0 rank 0" in again.output())
        for pid, command in first.find_processes().items():
            if "slurmctld" in command:
                with contextlib.suppress(ProcessLookupError):  # killing one process may end another
                    os.kill(pid, signal.SIGKILL)
        wait_for("the failure", lambda: "the scheduler does not respond, retrying" in again.output())
        controller = first.start(["/usr/sbin/slurmctld", "-D"], variables, stdout=subprocess.DEVNULL)
        wait_for("the response", lambda: "the scheduler responds again" in again.output())
        (tmp_path / "go").touch()
        assert again.process.wait(SECONDS) == 0, again.output()
        assert again.output().count("waits no longer") == 1
        assert again.printed_states()[-1] == f"job {job} has completed"

        # Slurm delays a requeued job for two minutes, which the test skips, and truncates the log of the job.
        job = requeued.wait_for_job_id()
        wait_for("the requeue", lambda: re.search(r"is pending \(\w+\), requeued once", requeued.output()))
        wait_for("free nodes", lambda: set(control("sinfo", "-hN", "--format=%T").split()) == {"idle"})
        time.sleep(3)

        def has_ended() -> bool:
            if control("squeue", "-h", "--states=all", "-o", "%T", "-j", job).strip() == "PENDING":
                # Errors are ignored, because the job may have started in the meantime.
                first.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], variables)
            return requeued.process.poll() is not None

        wait_for("the end of the requeued job", has_ended)
        assert requeued.process.returncode == 0, requeued.output()
        attempts = [f"requeued attempt {attempt} rank 0" for attempt in (0, 1)]
        assert [requeued.output().count(attempt) for attempt in attempts] == [1, 1], requeued.output()
        assert requeued.printed_states()[-1] == f"job {job} has completed"

        done = first.run([*UNITRAIN, "follow", "--to", "slurm", "999999"], variables)
        assert done.returncode == 1
        assert "Slurm has no record of job 999999" in done.stdout
    controller.wait(SECONDS)
