"""Agent that runs the program of one host in a launch. The source code of this module is sent to the host, which needs
only Python.

The agent reads its job from standard input as one line of JSON, so that variable values do not appear in a command
line. Each further line is a heartbeat (empty) or the number of a signal to forward. When the job exits, the connection
closes, or heartbeats stop, the agent terminates the job and kills all its descendants, including descendants in other
process groups. If the job has a marker, "NAME=value", the agent also kills every process with this variable in its
environment. A job without a command has only a marker, because a launcher on another host starts the ranks on this
host.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

HEARTBEAT_TIMEOUT_SECONDS = 30.0
GRACE_SECONDS = 5.0
_PR_SET_CHILD_SUBREAPER = 36


def _find_job_processes(marker: str) -> list[int]:
    """Return the IDs of the descendants of this process, and of the processes with `marker` in their environment."""
    children: dict[int, list[int]] = {}
    process_ids: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
                if marker and marker.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    process_ids.append(int(folder.name))
    parents = [os.getpid()]
    while parents:
        descendants = children.get(parents.pop(), [])
        process_ids += descendants
        parents += descendants
    return process_ids


def _terminate_all(process: subprocess.Popen[bytes] | None, marker: str) -> None:
    if process is not None and process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    deadline = time.monotonic() + GRACE_SECONDS
    while (pids := _find_job_processes(marker)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _choose_folder(folder: str) -> str:
    """Return `folder` if it is accessible on this host. Otherwise, print a message and return the current folder,
    because a missing folder is not an error under other launchers either."""
    if os.access(f"{folder}/.", os.X_OK):
        return folder
    current = str(Path.cwd())
    print_message(f"{folder} is not available on {socket.gethostname()}. The ranks there run in {current}")
    return current


def print_message(text: str) -> None:
    """Print a message on standard error, if this is possible. A failed write does not end the job."""
    with contextlib.suppress(OSError):
        os.write(2, f"unitrain: {text}\n".encode())


def main() -> int:
    """Run the job read from standard input. Return its exit code, 128 + N if signal N killed it, or 0 if the job has no
    command."""
    job = json.loads(sys.stdin.buffer.readline())
    # Orphaned descendants are reparented to this process, so that it can find them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, lambda signum, _: messages.put(f"{signum}\n".encode()))
    signal.signal(signal.SIGHUP, lambda *_: messages.put(b""))
    process = None
    if job["argv"]:
        process = subprocess.Popen(
            job["argv"],
            cwd=_choose_folder(job["folder"]),
            env={**os.environ, **job["variables"], **dict([job["marker"].split("=", 1)] if job["marker"] else [])},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def receive() -> None:
        while line := sys.stdin.buffer.readline():
            messages.put(line)
        messages.put(b"")

    threading.Thread(target=receive, daemon=True).start()
    last_message_at = time.monotonic()
    try:
        while process is None or process.poll() is None:
            if time.monotonic() - last_message_at >= HEARTBEAT_TIMEOUT_SECONDS:
                break
            try:
                line = messages.get(timeout=0.1)
            except queue.Empty:
                continue
            last_message_at = time.monotonic()
            if not line:
                break  # the connection is closed
            if line.strip() and process is not None:
                process.send_signal(int(line))
    finally:
        _terminate_all(process, job["marker"])
    code = 0 if process is None else process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.stdout.flush()
    os._exit(main())  # this exit does not join the thread, which may be blocked in a read
