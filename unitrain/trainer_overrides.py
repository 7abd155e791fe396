"""What takes part in a run that one of unitrain's commands has started, beside what the script has asked for."""

from __future__ import annotations

from unitrain.tune.timer import StepTimer
from unitrain.verify.recorder import Recorder

Guest = Recorder | StepTimer


def guest_of_this_run() -> Guest | None:
    """Return what `unitrain verify` or `unitrain tune` wants of this process, None where neither started it."""
    return Recorder.asked_for() or StepTimer.asked_for()
