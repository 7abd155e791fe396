"""The variant of horovodrun that unitrain starts."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from launches import running_launcher

from unitrain.backends.horovod.horovodrun import terminate_rank


def start_in_shell(rank_command: str) -> subprocess.Popen[bytes]:
    """Start `rank_command` as the child process of a shell, like horovodrun, and wait until it runs."""
    process = subprocess.Popen(f"trap : USR1 USR2; env NAME=value {rank_command}", shell=True)
    while not psutil.Process(process.pid).children():
        time.sleep(0.001)
    return process


@pytest.mark.parametrize(
    ("rank_command", "code"),
    [("sleep 100", 128 + 15), ("sh -c 'trap \"exit 75\" TERM; touch {}; while :; do sleep 0.1; done'", 75)],
)
def test_terminated_rank_keeps_its_exit_code(
    rank_command: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank that has not exited after this time is killed. On a busy machine, the exit may be slow.
    monkeypatch.setattr("horovod.runner.common.util.safe_shell_exec.GRACEFUL_TERMINATION_TIME_S", 60)
    for number in range(10):
        trapped = tmp_path / str(number)
        process = start_in_shell(rank_command.format(trapped))
        while code == 75 and not trapped.exists():
            time.sleep(0.01)
        thread = threading.Thread(target=terminate_rank, args=(process.pid,))
        thread.start()
        try:
            assert process.wait(50) == code
        finally:
            process.kill()
            thread.join()


def test_process_that_outlives_its_rank_does_not_delay_the_exit() -> None:
    """The process holds the pipes from which horovodrun reads the output of the rank."""
    rank = ["sh", "-c", "sleep 100 & echo text of the rank; exit 3"]
    command = [sys.executable, "-m", "unitrain.backends.horovod.horovodrun", "--gloo", "-np", "1", *rank]
    with running_launcher(command, fresh=True) as launch:
        output, _ = launch.process.communicate(timeout=60)
        assert launch.find_processes()  # only the process that outlives the rank
    assert launch.process.returncode == 1, output
    assert "text of the rank" in output


def test_rank_that_ignores_sigterm_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.runner.common.util.safe_shell_exec.GRACEFUL_TERMINATION_TIME_S", 0.3)
    process = start_in_shell("sh -c 'trap \"\" TERM; sleep 100'")
    while (
        len(descendants := psutil.Process(process.pid).children(recursive=True)) < 2
    ):  # `sleep` starts after the trap is set
        time.sleep(0.01)
    terminate_rank(process.pid)
    assert process.wait(30) == 128 + 9
    psutil.wait_procs(descendants, timeout=30)
    assert not any(one.is_running() for one in descendants)
