"""The history of a run: JSON lines files, to which training (including a resumed run) appends rows.

    run.jsonl       one row per start: configuration, backend, number of ranks, versions
    history.jsonl   one row per epoch: results, learning rate, and time per phase of the training loop
    steps.jsonl     one row per logging interval (about two seconds, or `log_every_n_steps` steps): mean loss, learning
                    rate, throughput and other metrics of the interval, and slow ranks with causes (`slow`), if any

Every row contains the current `step`, and `epochs`, the number of epochs trained so far. Within an epoch, `epochs` is
fractional, or null if the length of the data is unknown. Lists named `*_seconds` have one value per rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unitrain.loggers.json_lines import append_row, drop_rows_after, last_row

STARTS, EPOCHS, STEPS = "run.jsonl", "history.jsonl", "steps.jsonl"


class History:
    """Appends rows to the files in `folder`. Used on rank 0 only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rewind(self, step: int) -> None:
        """Remove the rows after `step`, and in run.jsonl also the rows at `step`. The run that resumes at `step` writes
        them again.
        """
        for name, last_step in ((STARTS, step - 1), (EPOCHS, step), (STEPS, step)):
            drop_rows_after(last_step, self.folder / name)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append `row`, which must have the key "step", to the file `name`.

        An existing epoch row is not repeated: a run that resumes at the last step of an epoch reports that epoch again.
        """
        last_epoch_row = last_row(self.folder / name) if name == EPOCHS else None
        if last_epoch_row is None or any(
            last_epoch_row.get(key) != row.get(key) for key in ("epoch", "step", "epochs")
        ):
            append_row(row, self.folder / name)
