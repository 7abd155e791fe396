"""Signals to commands whose ranks run in other sessions, and searches for processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unitrain import processes
from unitrain.bootstrap import signal_forwarding
from unitrain.launchers import host_agent

PROGRAM = """
import signal, sys, time
from unitrain.processes import exit_on_termination_signals
if "nohup" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
exit_on_termination_signals()
try:
    print("ready", flush=True)
    time.sleep(60)
finally:
    print("cleaned up", flush=True)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_signal_raises_system_exit(signal_number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal_number)
    assert process.communicate(timeout=30)[0] == "cleaned up\n"
    assert process.returncode == 128 + signal_number


def test_sighup_is_ignored_under_nohup() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "nohup"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


def test_ranks_are_found_if_their_parent_belongs_to_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = f"RANK_OF_{os.getpid()}"
    program = f"{variable}=0 sleep 60 & echo $!; wait"
    with subprocess.Popen(["sh", "-c", program], stdout=subprocess.PIPE, text=True) as wrapper:
        assert wrapper.stdout is not None
        rank = int(wrapper.stdout.readline())
        try:
            deadline = time.monotonic() + 30
            while f"{variable}=0".encode() not in Path(f"/proc/{rank}/environ").read_bytes():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            read_bytes = Path.read_bytes

            def read_own(path: Path) -> bytes:
                if path == Path(f"/proc/{wrapper.pid}/environ"):
                    raise PermissionError(13, "Permission denied", str(path))
                return read_bytes(path)

            monkeypatch.setattr(Path, "read_bytes", read_own)
            found = signal_forwarding._find_descendants_with_variable(os.getpid(), f"{variable}=".encode())
            assert list(found) == [rank]
        finally:
            os.kill(rank, signal.SIGKILL)


def test_children_are_found_if_the_name_of_a_process_is_not_valid_utf_8() -> None:
    """The kernel truncates a name to 15 bytes, which may split a multi-byte character."""
    program = "import sys; open('/proc/self/comm', 'wb').write(b'x\\xff'); print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as child:  # type: ignore[call-overload]
        child.stdout.readline()
        assert b"x\xff" in Path(f"/proc/{child.pid}/stat").read_bytes()
        assert child.pid in signal_forwarding._children_by_parent()[os.getpid()]
        assert child.pid in host_agent._find_job_processes("")
        child.stdin.close()


def test_kill_processes_returns_if_a_process_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL has no effect on a process in an uninterruptible system call."""
    monkeypatch.setattr(processes, "_KILL_TIMEOUT_SECONDS", 0.2)
    with subprocess.Popen(["sleep", "20"]) as process:
        monkeypatch.setattr(processes.os, "killpg", lambda *_: None)
        began = time.monotonic()
        processes.kill_processes(process, f"NO_PROCESS_OF_{os.getpid()}=1".encode())
        assert process.poll() is None
        assert time.monotonic() - began < 10
        process.kill()
