"""The history of a run: files of JSON lines, to which rows are appended during training. A resumed run appends to the
same files.

    run.jsonl       a row per start: configuration, backend, number of ranks, versions
    history.jsonl   a row per epoch: results, learning rate, and the time of each part
    steps.jsonl     a row per sync point: the mean loss since the last one, and in `slow` the slow ranks, if any

Every row has the `step` at which it was written, and `epochs`, the number of epochs trained so far, which is a fraction
within an epoch. A list `*_seconds` has a number for each rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unitrain.loggers.json_lines import append_row, drop_rows_after, last_row

STARTS, EPOCHS, STEPS = "run.jsonl", "history.jsonl", "steps.jsonl"


class History:
    """Appends rows to the files in `folder`. Rank 0 only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rewind(self, step: int) -> None:
        """Remove the rows after `step` and the starts at `step`: the run that starts at `step` writes them again."""
        for name, last in ((STARTS, step - 1), (EPOCHS, step), (STEPS, step)):
            drop_rows_after(last, self.folder / name)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append a row with a "step" to the file `name`.

        The row of an epoch is skipped if it exists, because a run that resumes at the last step of an epoch reports the
        end of that epoch again.
        """
        last = last_row(self.folder / name) if name == EPOCHS else None
        if last is None or any(last.get(place) != row.get(place) for place in ("epoch", "step", "epochs")):
            append_row(row, self.folder / name)
