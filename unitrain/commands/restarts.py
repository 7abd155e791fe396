"""Starting a job again when it fails, whatever its launcher."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType

import click

from unitrain.errors import Preempted

# What asks a job to end is passed on to it, and it is not started again.
_PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PREEMPTED = Preempted(None).code
# A host or a file system that has just failed the job may need a moment, and a port may.
_PAUSE_SECONDS = 2.0


class Restarts:
    """Runs a job until it succeeds, is asked to end, or has been started again `most` times."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: signal.Signals | None = None

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> int:
        """Run `command`, as often as it fails, and return its last exit code. The main thread calls it."""
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        # A Ctrl-C reaches the launcher by itself: the terminal sends it to all in the foreground.
        signal.signal(signal.SIGINT, self._note)
        for attempt in range(self._most + 1):
            self._process = subprocess.Popen(command, env=environ)
            code = self._process.wait()
            if code == 0 or code == _PREEMPTED or self._asked is not None:
                break
            if attempt < self._most:
                click.echo(
                    f"unitrain: the job ended with exit code {code}; it is started again, {attempt + 1} of "
                    f"{self._most}, and goes on from its newest checkpoint",
                    err=True,
                )
                time.sleep(_PAUSE_SECONDS)
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._note(number, frame)
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = signal.Signals(number)
