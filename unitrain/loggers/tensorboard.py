"""A logger that writes event files for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from unitrain.loggers.logger import Logger, RunInfo, Status, import_package, select_folder


class TensorBoardLogger(Logger):
    """Writes event files in `folder`, by default `tensorboard` in the output folder.

    A resumed run writes a new event file. TensorBoard then ignores the values that older files contain for the repeated
    steps. The text "run" contains the description of the run. Requires pip install ".[tensorboard]".
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._folder: Path
        self._package: Any = None
        self._writer: Any = None

    def prepare(self, output_dir: Path | None) -> None:
        """Select the folder, and import the package."""
        self._folder = select_folder(self, self.folder, output_dir, "tensorboard")
        self._package = import_package("torch.utils.tensorboard", self, "tensorboard")

    def start(self, run_info: RunInfo) -> None:
        """Open an event file."""
        purge_step = run_info.step + 1 if run_info.step else 0
        self._writer = self._package.SummaryWriter(str(self._folder), purge_step=purge_step)
        text = json.dumps(run_info.description, indent=2, default=str)
        self._writer.add_text("run", "\n".join(f"    {line}" for line in text.splitlines()), run_info.step)
        self._writer.flush()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Add a scalar for each name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def image(self, name: str, image: NDArray[Any], step: int, caption: str | None) -> None:
        """Add an image, and its caption as a text with the same name."""
        self._writer.add_image(name, image, step, dataformats="HWC")
        if caption is not None:
            self._writer.add_text(name, caption, step)

    def histogram(self, name: str, counts: NDArray[Any], edges: NDArray[Any], step: int) -> None:
        """Add a histogram."""
        centers = (edges[:-1] + edges[1:]) / 2
        self._writer.add_histogram_raw(
            name,
            min=float(edges[0]),
            max=float(edges[-1]),
            num=int(counts.sum()),
            sum=float(counts @ centers),
            sum_squares=float(counts @ centers**2),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Add the table as a text in Markdown."""
        cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (columns, *rows)]
        lines = [f"| {' | '.join(row)} |" for row in cells]
        self._writer.add_text(name, "\n".join([lines[0], "|---" * len(columns) + "|", *lines[1:]]), step)
        self._writer.flush()

    def finish(self, status: Status) -> None:
        """Close the file."""
        self._writer.close()
