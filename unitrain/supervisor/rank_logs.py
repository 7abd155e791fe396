"""Log file of each rank, for `unitrain launch --log-dir`.

A launcher runs `python rank_logs.py FOLDER SCRIPT ARGS...` for each rank. This program replaces itself with the script,
and copies the output of the script to FOLDER/rank-N.log. The output is also printed, with the rank's number before each
line.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

if __name__ == "__main__":
    # Python puts the folder of a script first on the path; this one has modules with common names.
    sys.path[0] = str(Path(__file__).parents[2])

from unitrain.bootstrap import environment

_FAILED_FIRST = re.compile(r"unitrain: rank (\d+) failed first")
_MAX_LINES = 20
# The process that copies the output ignores the signals that end a job: it ends when the rank closes its output.
_IGNORED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def wrapper(folder: Path) -> tuple[str, ...]:
    """Return the words of the command line that come before the script."""
    return str(Path(__file__)), str(folder.absolute())


def log_sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each log file in `folder`, before a job appends to them."""
    return {path.name: path.stat().st_size for path in folder.glob("rank-*.log")}


def last_lines_of_failed_rank(folder: Path, killed_rank: int | None, sizes_before: Mapping[str, int]) -> list[str]:
    """Return the last lines of the rank that failed first, with a headline; nothing if that rank is unknown.

    It is `killed_rank`, or else the rank that the logs name, or else the only one with a traceback. Content from
    before the job (`log_sizes`) is ignored.
    """
    logs: dict[int, str] = {}
    # The folder may have files of the user, such as a copy of a log under another name.
    for path in sorted(folder.glob("rank-*.log")):
        number = path.stem.removeprefix("rank-")
        if number.isdecimal() and path.is_file() and (new := path.read_bytes()[sizes_before.get(path.name, 0) :]):
            logs[int(number)] = new.decode(errors="replace")
    named = [int(number) for text in logs.values() for number in _FAILED_FIRST.findall(text)[-1:]]
    with_traceback = [rank for rank, text in logs.items() if "Traceback (most recent call last)" in text]
    rank = killed_rank
    if rank is None and named:
        rank = named[0]
    elif rank is None and len(with_traceback) == 1:
        rank = with_traceback[0]
    if rank not in logs:
        return []
    lines = logs[rank].splitlines()[-_MAX_LINES:]
    return [f"unitrain: last lines of rank {rank}, from {folder / f'rank-{rank}.log'}:", *(f"  {one}" for one in lines)]


def main(folder: Path, program: list[str]) -> None:
    """Replace this process with `program`, so that the program receives all signals. A child process copies its
    output."""
    rank_info = environment.detect()
    folder.mkdir(parents=True, exist_ok=True)
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.close(writer)
        for number in _IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        # horovodrun itself prints a number before each line.
        prefix = "" if rank_info.launcher == "horovodrun" else f"[{rank_info.rank}] "
        _copy_output(reader, folder / f"rank-{rank_info.rank}.log", prefix.encode())
        os._exit(0)
    os.close(reader)
    for stream in (1, 2):
        os.dup2(writer, stream)
    os.close(writer)
    os.execv(sys.executable, [sys.executable, "-u", *program])


def _copy_output(reader: int, file: Path, prefix: bytes) -> None:
    # Unbuffered, because closing a buffered file would repeat a write that has failed.
    with os.fdopen(reader, "rb") as lines, file.open("ab", buffering=0) as log:
        is_writable = True
        for line in lines:
            if is_writable:
                try:
                    log.write(line)
                except OSError as error:  # a full disk must not end the rank, which would write to a broken pipe
                    is_writable = False
                    message = (
                        f"unitrain: cannot write more to '{file}': {error.strerror}. The output of the rank is still "
                        "printed.\n"
                    )
                    os.write(2, message.encode())
            os.write(1, prefix + line)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
