"""Files of JSON lines, each with a "step", that grow while a run trains and that it takes up again."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)


def append_row(row: dict[str, Any], path: Path) -> None:
    """Add `row` to the file; numbers that JSON cannot hold (nan, infinity) become null."""
    finite = {key: value if _fits(value) else None for key, value in row.items()}
    with path.open("a") as file:
        file.write(json.dumps(finite, default=str) + "\n")


def last_row(path: Path) -> dict[str, Any] | None:
    """Return the last row of a file whose rows are whole, None where there is none."""
    rows = _whole_rows(path) if path.exists() else []
    return rows[-1] if rows else None


def drop_rows_after(step: int, path: Path) -> None:
    """Forget the rows of later steps, and lines that are no rows. There may be no such file.

    After a power loss a file system may leave zeros, or a part of a row, where rows were being written.
    """
    if not path.exists():
        return
    rows = _whole_rows(path)
    kept = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
    rewritten = path.with_name(f"{path.name}.unfinished")
    rewritten.unlink(missing_ok=True)  # of a run that was killed, or a link to another file
    with rewritten.open("x") as file:
        file.write(kept)
    rewritten.rename(path)


def _whole_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file. Lines that are no rows are left out, with a warning unless the last was unfinished."""
    *lines, _ = path.read_text(errors="replace").split("\n")
    rows, damaged = [], 0
    for line in lines:
        try:
            row = json.loads(line.strip("\0"))
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            damaged += 1
    if damaged:
        _log.warning(
            "'%s' has %d damaged %s, as after a power loss. They are left out.",
            path,
            damaged,
            "line" if damaged == 1 else "lines",
        )
    return rows


def _fits(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
