"""Signals that terminate a command whose ranks run in other sessions."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_signal_raises_system_exit(number: signal.Signals) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.communicate(timeout=30)[0] == "cleaned up\n"
    assert process.returncode == 128 + number


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "nohup"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
