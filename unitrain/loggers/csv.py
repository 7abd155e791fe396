"""A logger that writes one CSV file with one column per metric."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from unitrain.loggers.json_lines import check_is_regular, warn_of_damaged_lines
from unitrain.loggers.logger import Logger, RunInfo, select_folder


class CSVLogger(Logger):
    """Writes `metrics.csv` in `folder`, by default the output folder: one row per call to `log`.

    A new metric adds a column to the file. A resumed run removes the rows of the steps that it repeats. Images,
    histograms and tables are ignored.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._path: Path
        self._columns: list[str] = []

    def prepare(self, output_dir: Path | None) -> None:
        """Select the folder."""
        self._path = select_folder(self, self.folder, output_dir) / "metrics.csv"

    def start(self, run_info: RunInfo) -> None:
        """Remove the rows after `run_info.step`, or all rows if `run_info.step` is 0."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._columns, rows = self._read()
        self._write(row for row in rows if run_info.step and int(row["step"]) <= run_info.step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Append a row."""
        new_columns = [name for name in values if name not in self._columns]
        if new_columns:
            _, rows = self._read()
            self._columns += new_columns
            self._write(rows)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow({"step": step, **values})

    def _read(self) -> tuple[list[str], list[dict[str, Any]]]:
        """Return the columns and the complete rows. Damaged rows are skipped with a warning. An incomplete last row is
        skipped without a warning."""
        check_is_regular(self._path)
        text = self._path.read_text(errors="replace") if self._path.exists() else ""
        reader = csv.reader(io.StringIO(text[: text.rfind("\n") + 1], newline=""))
        columns: list[str] = []
        rows, damaged = [], 0
        while True:
            try:
                cells = next(reader)
                if "step" in columns:
                    row = dict(zip(columns, cells, strict=True))
                    int(row["step"])
                    rows.append(row)
                elif "step" in cells:
                    columns = cells
                else:
                    damaged += 1
            except StopIteration:
                break
            except (csv.Error, ValueError):
                damaged += 1
        warn_of_damaged_lines(self._path, damaged)
        return columns or ["step"], rows

    def _write(self, rows: Iterable[dict[str, Any]]) -> None:
        rewritten = self._path.with_name("metrics.csv.unfinished")
        rewritten.unlink(missing_ok=True)  # left by a killed run, or a link to another file
        with rewritten.open("x", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        rewritten.rename(self._path)
