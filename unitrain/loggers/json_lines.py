"""A logger for programs: one JSON object per line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unitrain.loggers.logger import Logger, Start, chosen_folder
from unitrain.loggers.rows import append_row, drop_rows_after


class JSONLinesLogger(Logger):
    """Writes `metrics.jsonl` in `folder`, by default the output folder: an object whenever something is logged.

    Each has a "step"; nan and infinity are null. A resumed run drops those of the steps that it does again. Images are
    left out.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._path: Path

    def prepare(self, output_dir: Path | None) -> None:
        """Choose the folder."""
        self._path = chosen_folder(self, self.folder, output_dir) / "metrics.jsonl"

    def start(self, start: Start) -> None:
        """Drop the rows after `start.step`."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        drop_rows_after(start.step or -1, self._path)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a row."""
        append_row({"step": step, **values}, self._path)
