"""The mark in a run's folder of the job that writes there, where that is one that is started again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unitrain import environment

_MARK = ".job"


def is_own(folder: Path) -> bool:
    """Return whether an earlier attempt of this process's job has begun a run in `folder`."""
    return environment.job() is not None and _read(folder).get("job") == environment.job()


def mark(folder: Path, size: int) -> int | None:
    """Mark the run in `folder` as this job's, if it is one that is started again.

    Return the number of ranks that an elastic job began with, which is `size` where this is its beginning; None for
    any other.
    """
    if environment.job() is not None and not is_own(folder):
        new = folder / f"{_MARK}.unfinished"
        new.write_text(json.dumps({"job": environment.job(), "size": size}), encoding="utf-8")
        new.replace(folder / _MARK)
    return int(_read(folder).get("size", size)) if environment.elastic() else None


def _read(folder: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = json.loads((folder / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return read
