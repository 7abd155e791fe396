"""The files in which `unitrain launch --log-dir` keeps what each rank prints, and what they say of a failure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_LOGGED = Path(__file__).with_name("logged.py")
_FAILED_FIRST = re.compile(r"unitrain: rank (\d+) failed first")
_LINES = 20


def wrapper(folder: Path) -> tuple[str, ...]:
    """Return what stands before a script, so that every rank's output is in `folder`/rank-N.log too."""
    return str(_LOGGED), str(folder.absolute())


def sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each file in `folder`, before a run appends to them."""
    return {path.name: path.stat().st_size for path in folder.glob("rank-*.log")}


def last_words(folder: Path, killed: int | None, before: Mapping[str, int]) -> list[str]:
    """Return the last lines of the rank that failed first, with a line that says so; none where no file tells.

    That is the one that was `killed`, or the one that the ranks themselves name, or the only one with a traceback. Only
    what was written after `sizes` returned `before` is read: the rest is of earlier runs.
    """
    logs: dict[int, str] = {}
    # Other files in the folder, such as a copy under another name, are the user's.
    for path in sorted(folder.glob("rank-*.log")):
        number = path.stem[5:]
        if number.isdecimal() and path.is_file() and (written := path.read_bytes()[before.get(path.name, 0) :]):
            logs[int(number)] = written.decode(errors="replace")
    named = [int(number) for text in logs.values() for number in _FAILED_FIRST.findall(text)[-1:]]
    with_trace = [rank for rank, text in logs.items() if "Traceback (most recent call last)" in text]
    rank = killed if killed is not None else named[0] if named else with_trace[0] if len(with_trace) == 1 else None
    if rank not in logs:
        return []
    lines = logs[rank].splitlines()[-_LINES:]
    return [
        f"unitrain: the last lines of rank {rank}, of {folder / f'rank-{rank}.log'}:",
        *(f"  {line}" for line in lines),
    ]
