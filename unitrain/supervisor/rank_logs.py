"""One log file per rank, for `unitrain launch --log-dir`.

The launcher runs `python rank_logs.py FOLDER SCRIPT ARGS...` on each rank. This program forks a child process and
replaces itself with the script. The child process copies the output of the script to FOLDER/rank-N.log and prints it,
with the rank as a prefix unless the launcher adds one. It exits when the output is closed, or 10 s after the rank has
exited: a process that the rank has left behind may keep the output open.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

if __name__ == "__main__":
    # Python prepends the folder of a script to sys.path; this folder contains modules with common names.
    sys.path[0] = str(Path(__file__).parents[2])

from unitrain.bootstrap import environment
from unitrain.threads import start_thread

_FAILED_FIRST_PATTERN = re.compile(r"unitrain: rank (\d+) failed first")
_MAX_LINES = 20
# Maximum number of bytes that are read from the end of a log after a failure. A log may be larger than the memory.
_MAX_BYTES = 2**24
# After a rank has exited, the time for the copying process to copy the remaining output, including the output of
# processes that the rank has left behind.
_REMAINING_OUTPUT_SECONDS, _RANK_POLL_SECONDS = 10.0, 0.5
# After the launcher has exited, the time for the copying processes to write the last lines.
_COMPLETE_SECONDS, _POLL_SECONDS = 2.0, 0.02
# The copying process ignores signals that terminate a job.
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def wrapper_arguments(folder: Path) -> tuple[str, ...]:
    """Return the command-line arguments to insert before the script."""
    return str(Path(__file__)), str(folder.absolute())


def log_sizes(folder: Path) -> dict[str, int]:
    """Return the current size in bytes of each log file in `folder`. Call it before an attempt appends to the files."""
    return {path.name: path.stat().st_size for path in folder.glob("rank-*.log")}


def last_lines_of_failed_rank(folder: Path, crashed_rank: int | None, sizes_before: Mapping[str, int]) -> list[str]:
    """Return a headline and the last log lines of the rank that failed first, or an empty list if it is unknown.

    The rank is `crashed_rank`, else the rank that a log names as failed first, else the only rank with a traceback.
    `sizes_before`, from `log_sizes`, excludes content from before the last attempt. Call the function after the
    launcher has exited; it waits at most 2 s until the logs are complete.
    """
    deadline = time.monotonic() + _COMPLETE_SECONDS
    logs: dict[int, str] = {}
    # The folder may contain other files, such as a renamed copy of a log.
    for path in sorted(folder.glob("rank-*.log")):
        rank_text = path.stem.removeprefix("rank-")
        if rank_text.isdecimal() and path.is_file():
            text = _read_end(path, sizes_before.get(path.name, 0), deadline)
            if text:
                logs[int(rank_text)] = text
    first_failed_ranks = [
        int(rank_text) for text in logs.values() for rank_text in _FAILED_FIRST_PATTERN.findall(text)[-1:]
    ]
    with_traceback = [rank for rank, text in logs.items() if "Traceback (most recent call last)" in text]
    rank = crashed_rank
    if rank is None and first_failed_ranks:
        rank = first_failed_ranks[0]
    elif rank is None and len(with_traceback) == 1:
        rank = with_traceback[0]
    if rank not in logs:
        return []
    lines = logs[rank].splitlines()[-_MAX_LINES:]
    return [
        f"unitrain: last lines of rank {rank}, from {folder / f'rank-{rank}.log'}:",
        *(f"  {line}" for line in lines),
    ]


def _read_end(path: Path, start: int, deadline: float) -> str:
    """Return the content from position `start`, but at most the last 16 MiB. Wait until the log is complete, but not
    after `deadline`."""
    with path.open("rb") as file:
        _wait_until_complete(file, deadline)
        file.seek(max(start, file.seek(0, os.SEEK_END) - _MAX_BYTES))
        return file.read(_MAX_BYTES).decode(errors="replace")


def _wait_until_complete(file: BinaryIO, deadline: float) -> None:
    """Wait until no copying process has a lock on the log, but not after `deadline`."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)
        except OSError:  # the file system does not support locks
            return
        else:
            return


def main(folder: Path, program: list[str]) -> None:
    """Replace this process with `program`, so that signals are delivered to the program. A child process copies the
    output."""
    rank_info = environment.detect()
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank-{rank_info.rank}.log"
    log = file.open("ab", buffering=0)  # unbuffered: closing a buffered file would retry a failed write
    with suppress(OSError):
        fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)  # until the copying process exits
    reader, writer = os.pipe()
    rank_pid = os.getpid()
    if os.fork() == 0:
        os.close(writer)
        start_thread(_exit_after_rank, rank_pid, name="unitrain rank log", restarts=True)
        for signum in _IGNORED_SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        # horovodrun already prefixes each line with the rank.
        prefix = "" if rank_info.launcher == "horovodrun" else f"[{rank_info.rank}] "
        _copy_output(reader, file, log, prefix.encode())
        os._exit(0)
    os.close(reader)
    log.close()
    for stream in (1, 2):
        os.dup2(writer, stream)
    os.close(writer)
    os.execv(sys.executable, [sys.executable, "-u", *program])


def _exit_after_rank(rank_pid: int) -> None:
    """End this process 10 s after the rank, which is its parent process, has exited."""
    while os.getppid() == rank_pid:
        time.sleep(_RANK_POLL_SECONDS)
    time.sleep(_REMAINING_OUTPUT_SECONDS)
    os._exit(0)


def _copy_output(reader: int, file: Path, log: BinaryIO, prefix: bytes) -> None:
    """Copy the output of the rank to `log`, which is open at the path `file`, and to standard output.

    After a failed write, it continues to read, because a broken pipe would terminate the rank.
    """
    with os.fdopen(reader, "rb") as lines, log:
        can_write_log = can_print = True
        for line in lines:
            if can_write_log:
                try:
                    log.write(line)
                except OSError as error:
                    can_write_log = False
                    message = (
                        f"unitrain: cannot write more to '{file}': {error.strerror}. The output of the rank is still "
                        "printed.\n"
                    )
                    with suppress(OSError):
                        os.write(2, message.encode())
            if can_print:
                try:
                    os.write(1, prefix + line)
                except OSError:  # the launcher, which reads the output, has exited
                    can_print = False


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
