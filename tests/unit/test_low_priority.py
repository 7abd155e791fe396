"""The priority of a process is restored after a function has run at low priority."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from unitrain import processes
from unitrain.processes import run_at_low_priority

# Prints the niceness of the process and of its session before, during and after the call.
PROGRAM = """
import json, os, pathlib
from unitrain.processes import run_at_low_priority

def state():
    session = pathlib.Path("/proc/self/autogroup")
    words = session.read_text().split() if session.exists() else []  # some sessions have no autogroup
    return os.getpriority(os.PRIO_PROCESS, 0), words[-1] if words else None

states = [state()]
run_at_low_priority(lambda: states.append(state()))
states.append(state())
print(json.dumps(states))
"""


@pytest.mark.parametrize("is_leader", [True, False])
def test_priority_is_low_during_the_call_only(is_leader: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        start_new_session=is_leader,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    before, during, after = json.loads(done.stdout)
    assert before == after
    assert during[0] == 19
    if before[1] is not None and is_leader:
        assert (before[1], during[1]) == ("0", "19")
    else:
        assert during[1] == before[1], "the priority of a session with other processes must not change"


def test_restoring_the_priority_is_retried_until_the_kernel_accepts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    class AutogroupFile:
        refusals = 30

        def write_text(self, text: str) -> None:
            if self.refusals:
                self.refusals -= 1
                raise BlockingIOError
            written.append(text)

    monkeypatch.setattr(processes.time, "sleep", lambda _: None)
    processes._restore_session_priority(AutogroupFile())  # type: ignore[arg-type]
    assert written == ["0"]


def test_exceptions_of_the_function_are_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run_at_low_priority(lambda: 1 // 0)
