"""What a run has left in its folder, read back; also of one that is still going."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from unitrain.errors import ReportError, did_you_mean
from unitrain.progress.history import EPOCHS, STARTS, STEPS

Row = dict[str, Any]


@dataclass(frozen=True)
class Record:
    """The rows of `unitrain.progress.history`, in order. `name` is what to call the run, `written` its last change."""

    name: str
    starts: list[Row]
    epochs: list[Row]
    steps: list[Row]
    written: datetime

    @property
    def start(self) -> Row:
        """The latest start, empty for a run that has not described itself."""
        return self.starts[-1] if self.starts else {}


def read_records(folders: list[Path]) -> list[Record]:
    """Return the record of the run in each folder, named so that they differ.

    Raises ReportError where there is no such folder, no run in it, or a line that is not a row.
    """
    folders = [Path(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [_read_record(folder, name) for folder, name in zip(folders, names, strict=True)]


def _read_record(folder: Path, name: str) -> Record:
    if not folder.is_dir():
        siblings = [path.name for path in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        found = "is a file" if folder.exists() else "does not exist"
        raise ReportError(
            f"Folder '{folder}' {found}. {did_you_mean(folder.name, siblings)}Name the output_dir of a run."
        )
    paths = [folder / file for file in (STARTS, EPOCHS, STEPS)]
    present = [path for path in paths if path.is_file()]
    if not present:
        runs = sorted({path.parent for file in (STARTS, EPOCHS) for path in folder.glob(f"*/{file}")})
        near = f"There is one in '{runs[0]}'. " if runs else ""
        raise ReportError(
            f"Folder '{folder}' holds no run: there is no {STARTS} or {EPOCHS} in it. {near}Name the folder that was "
            "TrainConfig's output_dir."
        )
    written = max(path.stat().st_mtime for path in present)
    starts, epochs, steps = (_read_rows(path) if path in present else [] for path in paths)
    # A start that left nothing is followed by another one from the same step.
    starts = [start for start, after in pairwise(starts) if after["step"] > start["step"]] + starts[-1:]
    return Record(name, starts, epochs, steps, datetime.fromtimestamp(written, UTC))


def _read_rows(path: Path) -> list[Row]:
    rows = []
    *lines, _unfinished = path.read_text(errors="replace").split("\n")
    # What follows the last end of a line is being written at this moment, or was when the run was killed.
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
            shown = line if len(line) <= 60 else f"{line[:57]}..."
            raise ReportError(
                f"Line {number} of '{path}' is not a row of a run's record: {shown!r}. Remove it: "
                f"sed -i {number}d '{path}'"
            )
        rows.append(row)
    return rows
