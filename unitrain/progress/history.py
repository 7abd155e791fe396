"""The record of a run: JSON lines that grow while it trains, and that it takes up again where it is resumed.

    run.jsonl       a row per start: what was asked for, on which backend, over how many ranks, with which versions
    history.jsonl   a row per epoch: its results, the learning rate, and where the time went
    steps.jsonl     a row per look at the running loss; in `slow`, if there are any, the ranks that the others wait for

Every row has the `step` that it was written at, and `epochs`, how many passes over the data were done by then. A list
of `*_seconds` has a number for each rank.
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
        """Forget the rows after `step`, and the starts from there, which a run that starts there writes again."""
        for name, last in ((STARTS, step - 1), (EPOCHS, step), (STEPS, step)):
            drop_rows_after(last, self.folder / name)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add one row, which has a "step", to the file of that name.

        That of an epoch is left out where it is there: a run that goes on from an epoch's last step ends it once more.
        """
        last = last_row(self.folder / name) if name == EPOCHS else None
        if last is None or any(last.get(place) != row.get(place) for place in ("epoch", "step", "epochs")):
            append_row(row, self.folder / name)
