"""What keeps one host's part of a launch: started there over ssh, it is told by its standard input what to run.

It stands alone: its text is sent to the host, and needs nothing but Python there. The first line is the job as JSON; it
comes this way so that no command line shows a value. After it each line is a sign of life, or the number of a signal to
pass on. When nobody speaks any more, or the job ends, every process that came of the job is ended, also those that left
its process group. A job without a command is one that a launcher brings to this host itself: its processes are known by
a mark in their environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

SILENCE_SECONDS = 30.0
GRACE_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36


def _of_the_job(mark: str) -> list[int]:
    """Return the living processes that came of this one, or have `mark` in their environment."""
    children: dict[int, list[int]] = {}
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
                if mark and mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    waiting = [os.getpid()]
    while waiting:
        own = children.get(waiting.pop(), [])
        found += own
        waiting += own
    return found


def _end_all(process: subprocess.Popen[bytes] | None, mark: str) -> None:
    if process is not None and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    while (living := _of_the_job(mark)) and time.monotonic() < deadline:
        for pid in living:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def main() -> int:
    """Run the job that standard input tells, and return its exit code."""
    job = json.loads(sys.stdin.buffer.readline())
    # Orphans become this process's children, so that they are found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    told: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: told.put(f"{number}\n".encode()))
    signal.signal(signal.SIGHUP, lambda *_: told.put(b""))
    process = None
    if job["argv"]:
        process = subprocess.Popen(
            job["argv"],
            cwd=job["folder"],
            env={**os.environ, **job["variables"], **dict([job["mark"].split("=", 1)] if job["mark"] else [])},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def listen() -> None:
        while line := sys.stdin.buffer.readline():
            told.put(line)
        told.put(b"")

    threading.Thread(target=listen, daemon=True).start()
    heard = time.monotonic()
    try:
        while (process is None or process.poll() is None) and time.monotonic() - heard < SILENCE_SECONDS:
            try:
                line = told.get(timeout=0.1)
            except queue.Empty:
                continue
            heard = time.monotonic()
            if not line:
                break  # whoever started this is gone
            if line.strip() and process is not None:
                process.send_signal(int(line))
    finally:
        _end_all(process, job["mark"])
    code = 0 if process is None else process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # the thread still listens, and is not waited for
