"""A logger that writes JSON lines, and functions for JSON lines files that resumed runs append to."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from unitrain.loggers.logger import Logger, RunInfo, select_folder
from unitrain.output import get_logger

_log = get_logger(__name__)


class JSONLinesLogger(Logger):
    """Writes `metrics.jsonl` in `folder`, by default the output folder: one JSON object per call to `log`.

    Each object has a "step". nan and infinity are written as null. A resumed run removes the objects of the steps that
    it repeats. A histogram is an object with "histogram" (its name), "counts" and "edges", and a table is an object
    with "table", "columns" and "rows". Images are ignored.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._path: Path

    def prepare(self, output_dir: Path | None) -> None:
        """Select the folder."""
        self._path = select_folder(self, self.folder, output_dir) / "metrics.jsonl"

    def start(self, run_info: RunInfo) -> None:
        """Remove the rows after `run_info.step`, or all rows if `run_info.step` is 0."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        drop_rows_after(run_info.step or -1, self._path)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a row."""
        append_row({"step": step, **values}, self._path)

    def histogram(self, name: str, counts: NDArray[Any], edges: NDArray[Any], step: int) -> None:
        """Append the histogram as a row."""
        row = {"step": step, "histogram": name, "counts": counts.tolist(), "edges": edges.tolist()}
        append_row(row, self._path)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Append the table as a row."""
        cells = [[cell if _is_json_value(cell) else None for cell in row] for row in rows]
        append_row({"step": step, "table": name, "columns": list(columns), "rows": cells}, self._path)


def append_row(row: dict[str, Any], path: Path) -> None:
    """Append `row` to the file. Values that are nan or infinite, which JSON does not support, become null.

    Values in nested lists and dictionaries must be finite. Raises OSError for a FIFO or device.
    """
    check_is_regular(path)
    finite = {key: value if _is_json_value(value) else None for key, value in row.items()}
    with path.open("a") as file:
        file.write(json.dumps(finite, default=str) + "\n")


def last_row(path: Path) -> dict[str, Any] | None:
    """Return the last complete row of the file, or None if there is none."""
    rows = _complete_rows(path) if path.exists() else []
    return rows[-1] if rows else None


def drop_rows_after(step: int, path: Path) -> None:
    """Remove the rows after `step` and the corrupt lines from the file. Do nothing if it does not exist.

    After a power loss, a file may end with zeros or an incomplete row.
    """
    if not path.exists():
        return
    rows = _complete_rows(path)
    kept_lines = "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step)
    rewritten = path.with_name(f"{path.name}.unfinished")
    rewritten.unlink(missing_ok=True)  # left by a killed run, or a link to another file
    with rewritten.open("x") as file:
        file.write(kept_lines)
    rewritten.rename(path)


def _complete_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the file. Corrupt lines are skipped with a warning. An incomplete last line is skipped without
    a warning."""
    check_is_regular(path)
    *lines, _ = path.read_text(errors="replace").split("\n")
    rows, damaged = [], 0
    for line in lines:
        try:
            row = json.loads(line.strip("\0"))
            rows.append({**row, "step": int(row["step"])})
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            damaged += 1
    warn_of_damaged_lines(path, damaged)
    return rows


def warn_of_damaged_lines(path: Path, num_lines: int) -> None:
    """Log a warning that `num_lines` lines of the file are damaged, if `num_lines` is not 0."""
    if num_lines:
        _log.warning(
            "'%s' has %d damaged %s, which can happen after a power loss. The damaged lines are skipped.",
            path,
            num_lines,
            "line" if num_lines == 1 else "lines",
        )


def check_is_regular(path: Path) -> None:
    """Raise OSError for a FIFO or device, which could block. A missing file is valid."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, f"'{path}' is not a regular file")


def _is_json_value(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
