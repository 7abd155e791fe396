"""A logger for Weights & Biases, online or offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from numpy.typing import NDArray

from unitrain.loggers.logger import Logger, RunInfo, ServiceRun, Status, import_package, select_folder


class WandbLogger(Logger):
    """Logs to a run of `project`. Local files are written to `wandb` in `folder`, by default the output folder.

    `mode="offline"` does not use the network, and `wandb sync` uploads the folder later. A resumed run keeps its ID;
    offline, every start creates a separate folder with that ID. Values of repeated steps are not logged again. `config`
    is merged into the config of the W&B run. `options` are passed to wandb.init. Requires pip install ".[wandb]".
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
        self._service_run: ServiceRun

    def prepare(self, output_dir: Path | None) -> None:
        """Select the folder, and import the package."""
        self._folder = select_folder(self, self.folder, output_dir)
        self._package = import_package("wandb", self, "wandb")

    def start(self, run_info: RunInfo) -> None:
        """Start a run, or resume it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._service_run = ServiceRun("wandb", self._folder, run_info.step)
        resume_options = {} if self._service_run.id is None else {"id": self._service_run.id}
        if resume_options and self.mode != "offline":
            resume_options["resume"] = "allow"
        self._run = self._package.init(
            project=self.project,
            name=self.name,
            mode=self.mode,
            dir=str(self._folder),
            config={**json.loads(json.dumps(run_info.description, default=str)), **self.config},
            **resume_options,
            **self.options,
        )
        self._service_run.set_id(self._run.id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values that were not logged before the run was resumed."""
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
        """Upload the remaining data and finish the run. Mark it as failed if an exception ended it."""
        self._run.finish(exit_code=1 if status == "failed" else 0)

    def _log(self, values: dict[str, Any], step: int) -> None:
        new = self._service_run.filter_unlogged(values, step)
        if new:
            self._run.log({name: values[name] for name in new}, step=step)
            self._service_run.mark_logged(new, step)
