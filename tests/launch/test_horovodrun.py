"""The program that replaces horovodrun."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import psutil
import pytest

from unitrain.backends.horovod.horovodrun import terminate_rank


def shell(rank: str) -> subprocess.Popen[bytes]:
    """Start `rank` as horovodrun does: as the child of a shell. Wait until it runs."""
    process = subprocess.Popen(f"trap : USR1 USR2; env NAME=value {rank}", shell=True)
    while not psutil.Process(process.pid).children():
        time.sleep(0.001)
    return process


@pytest.mark.parametrize(
    ("rank", "code"),
    [("sleep 100", 128 + 15), ("sh -c 'trap \"exit 75\" TERM; touch {}; while :; do sleep 0.1; done'", 75)],
)
def test_terminating_a_rank_keeps_its_exit_code(
    rank: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, the rank may take a while to exit. After this time it would be killed.
    monkeypatch.setattr("horovod.runner.common.util.safe_shell_exec.GRACEFUL_TERMINATION_TIME_S", 60)
    for number in range(10):
        trapped = tmp_path / str(number)
        process = shell(rank.format(trapped))
        while code == 75 and not trapped.exists():
            time.sleep(0.01)
        thread = threading.Thread(target=terminate_rank, args=(process.pid,))
        thread.start()
        try:
            assert process.wait(50) == code
        finally:
            process.kill()
            thread.join()


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horovod.runner.common.util.safe_shell_exec.GRACEFUL_TERMINATION_TIME_S", 0.3)
    process = shell("sh -c 'trap \"\" TERM; sleep 100'")
    while len(descendants := psutil.Process(process.pid).children(recursive=True)) < 2:  # until the trap is set
        time.sleep(0.01)
    terminate_rank(process.pid)
    assert process.wait(30) == 128 + 9
    psutil.wait_procs(descendants, timeout=30)
    assert not any(one.is_running() for one in descendants)
