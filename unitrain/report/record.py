"""Read the history of a finished or active run from its output folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from unitrain.errors import ReportError, did_you_mean
from unitrain.output import replace_unprintable
from unitrain.progress.goodput import GOODPUT_FILE, AttemptRecord, read_attempts
from unitrain.progress.history import EPOCHS, STARTS, STEPS
from unitrain.progress.stragglers import TRAINING

Row = dict[str, Any]
# Phases for which the history has the seconds of each rank, in columns named PHASE_seconds.
PHASES = (*TRAINING, "validation", "checkpoint")
# The columns of each file that a report requires, and their types.
_COLUMNS: dict[str, dict[str, type]] = {
    STARTS: {
        "started": str,
        "backend": str,
        "transport": str,
        "size": int,
        "num_nodes": int,
        "device": str,
        "versions": dict,
        "config": dict,
    },
    EPOCHS: {"epoch": int},
    STEPS: {},
}
# The columns of a start row that are settings, which may be None.
START_SETTINGS = (
    "model",
    "parameters",
    "optimizer",
    "scheduler",
    "samples_per_epoch",
    "steps_per_epoch",
    "batch_size",
    "global_batch_size",
)


@dataclass(frozen=True)
class RunRecord:
    """The rows of the files that `unitrain.progress.history` writes, the display name of the run, the time of the last
    change of these files, and the attempts of the run from `unitrain.progress.goodput`."""

    name: str
    starts: list[Row]
    epochs: list[Row]
    steps: list[Row]
    last_modified: datetime
    attempts: list[AttemptRecord] = field(default_factory=list)

    @property
    def start(self) -> Row:
        """The latest start row, or an empty row if none is recorded."""
        return self.starts[-1] if self.starts else {}


def read_records(folders: list[Path]) -> list[RunRecord]:
    """Read the record of the run in each folder. The names are distinct unless a folder is repeated.

    Raises ReportError if a folder does not exist or contains no run, or if its history or goodput file is invalid or
    unreadable.
    """
    folders = [Path(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    names = [replace_unprintable(name) for name in names]
    return [_read_record(folder, name) for folder, name in zip(folders, names, strict=True)]


def _read_record(folder: Path, name: str) -> RunRecord:
    if not folder.is_dir():
        siblings = [path.name for path in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        problem = "is a file" if folder.exists() else "does not exist"
        raise ReportError(
            f"Folder '{folder}' {problem}. {did_you_mean(folder.name, siblings)}Pass the output_dir of a run."
        )
    paths = [folder / file for file in (STARTS, EPOCHS, STEPS)]
    present = [path for path in paths if path.is_file()]
    if not present:
        runs = sorted({path.parent for file in (STARTS, EPOCHS) for path in folder.glob(f"*/{file}")})
        hint = f"There is a run in '{runs[0]}'. " if runs else ""
        raise ReportError(
            f"Folder '{folder}' has no run: it contains neither {STARTS} nor {EPOCHS}. {hint}Pass the folder given "
            "as TrainConfig.output_dir."
        )
    last_modified = max(path.stat().st_mtime for path in present)
    starts, epochs, steps = (_read_rows(path) if path in present else [] for path in paths)
    # Omit a start after which no step was completed, because the next start is at the same step.
    starts = [start for start, after in pairwise(starts) if after["step"] > start["step"]] + starts[-1:]
    try:
        attempts = read_attempts(folder)
    except OSError as error:
        raise _unreadable_error(folder / GOODPUT_FILE, error) from None
    except ValueError as error:
        path = folder / GOODPUT_FILE
        raise ReportError(f"'{path}' is corrupt: {error}. Remove it: rm '{path}'") from None
    return RunRecord(name, starts, epochs, steps, datetime.fromtimestamp(last_modified, timezone.utc), attempts)


def _unreadable_error(path: Path, error: OSError) -> ReportError:
    return ReportError(f"'{path}' cannot be read: {error.strerror or error}. Make it readable, or remove it.")


def _read_rows(path: Path) -> list[Row]:
    rows = []
    try:
        *lines, _unfinished = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise _unreadable_error(path, error) from None
    # Text after the last newline belongs to a line that is still being written, or that was incomplete when the run
    # was killed.
    for line_number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            if "\\ud" in line.lower():  # possibly half of a surrogate pair, which UTF-8 lacks
                row = json.loads(json.dumps(row, ensure_ascii=False).encode(errors="replace"))
        except (ValueError, RecursionError):
            row = None
        if not _is_row(row, path.name):
            line_start = line if len(line) <= 60 else f"{line[:57]}..."
            raise ReportError(
                f"Line {line_number} of '{path}' is not a row of a run's record: {line_start!r}. Remove it: "
                f"sed -i {line_number}d '{path}', or, if another program wrote the file, pass the output_dir of a run."
            )
        rows.append(row)
    return rows


def _is_row(row: Any, file: str) -> bool:
    """Return whether `row` has the columns of `file` and, unless it is a start row, only numbers, None and lists."""
    if not (isinstance(row, dict) and isinstance(row.get("step"), int)):
        return False
    if not all(isinstance(row.get(name), column_type) for name, column_type in _COLUMNS[file].items()):
        return False
    if file == STARTS:
        return all(name in row for name in START_SETTINGS)
    if not all(value is None or isinstance(value, int | float | list) for value in row.values()):
        return False
    seconds = [row.get(f"{phase}_seconds") for phase in PHASES]
    if not any(seconds):
        return True
    return (
        all(
            isinstance(ranks, list) and ranks and all(isinstance(value, int | float) for value in ranks)
            for ranks in seconds
        )
        and len({len(ranks or ()) for ranks in seconds}) == 1
    )
