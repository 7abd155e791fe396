"""Every process that came of a command, also those that left its process group, as launchers' ranks do."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

_SECONDS = 5.0


def marked(tag: bytes) -> Iterator[int]:
    """Yield the processes with `tag`, NAME=value, in their environment; none where no /proc tells."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if tag in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


def end_all(process: subprocess.Popen[bytes], tag: bytes) -> None:
    """Kill `process`, which leads a session of its own, its group, and every process that has `tag`; wait for it."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _SECONDS
    while (living := list(marked(tag))) and time.monotonic() < deadline:  # again: they may have started others
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    process.wait()
