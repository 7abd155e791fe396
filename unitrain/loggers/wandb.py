"""A logger for Weights & Biases, online or offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from unitrain.loggers.kept_run import KeptRun
from unitrain.loggers.logger import Logger, Start, Status, chosen_folder, imported


class WandbLogger(Logger):
    """Logs to a run of `project`, whose files are in `folder`, by default `wandb` in the output folder.

    `mode="offline"` needs no network: `wandb sync` uploads what is in the folder. A resumed run has the id that it had;
    offline every start has a folder of its own, with that id. What was logged for the steps that are done again stays,
    and is not logged twice. `config` is added to the description of the run. Further `options` are those of wandb.init.
    Needs pip install ".[wandb]".
    """

    def __init__(
        self,
        project: str = "unitrain",
        *,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        folder: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.project, self.name, self.mode, self.folder, self.options = project, name, mode, folder, options
        self.config = dict(config or {})
        self._folder: Path
        self._package: Any = None
        self._run: Any = None
        self._kept: KeptRun

    def prepare(self, output_dir: Path | None) -> None:
        """Choose the folder, and import the package."""
        self._folder = chosen_folder(self, self.folder, output_dir)
        self._package = imported("wandb", self, "wandb")

    def start(self, start: Start) -> None:
        """Begin a run, or go on with it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._kept = KeptRun("wandb", self._folder, start.step)
        going_on = {} if self._kept.id is None else {"id": self._kept.id}
        if going_on and self.mode != "offline":
            going_on["resume"] = "allow"
        self._run = self._package.init(
            project=self.project,
            name=self.name,
            mode=self.mode,
            dir=str(self._folder),
            config={**json.loads(json.dumps(start.description, default=str)), **self.config},
            **going_on,
            **self.options,
        )
        self._kept.begin(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log what is not there yet."""
        self._log(dict(values), step)

    def image(self, name: str, image: NDArray[Any], step: int, caption: str | None) -> None:
        """Log an image."""
        self._log({name: self._package.Image(image, caption=caption)}, step)

    def histogram(self, name: str, counts: NDArray[Any], edges: NDArray[Any], step: int) -> None:
        """Log a histogram."""
        self._log({name: self._package.Histogram(np_histogram=(counts, edges))}, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log a wandb.Table."""
        data = [list(row) for row in rows]
        self._log({name: self._package.Table(columns=list(columns), data=data, allow_mixed_types=True)}, step)

    def finish(self, status: Status) -> None:
        """End the run, as failed after an exception; what is left to upload is uploaded first."""
        self._run.finish(exit_code=1 if status == "failed" else 0)

    def _log(self, values: dict[str, Any], step: int) -> None:
        new = self._kept.not_there(values, step)
        if new:
            self._run.log({name: values[name] for name in new}, step=step)
            self._kept.logged(new, step)
