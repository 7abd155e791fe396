"""A logger for MLflow: a file of the output folder, or a tracking server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from unitrain.errors import ConfigError
from unitrain.loggers.kept_run import KeptRun
from unitrain.loggers.logger import Logger, Start, Status, imported

# What MLflow takes in a name, and of parameters in one request.
_NOT_IN_NAMES = re.compile(r"[^\w./ :-]")
_MOST_PARAMETERS, _LONGEST_PARAMETER = 100, 6000


class MLflowLogger(Logger):
    """Logs to a run of `experiment`, at `tracking_uri`.

    Without a `tracking_uri` that is the one that MLflow has been told (MLFLOW_TRACKING_URI), else the database
    `mlflow.db` in the output folder, to be seen with `mlflow ui --backend-store-uri sqlite:///...`. A resumed run has
    the id that it had; what was logged for the steps that are done again stays, and is not logged twice. Needs
    pip install ".[mlflow]".
    """

    def __init__(
        self, experiment: str = "unitrain", *, tracking_uri: str | None = None, run_name: str | None = None
    ) -> None:
        self.experiment, self.tracking_uri, self.run_name = experiment, tracking_uri, run_name
        self._package: Any = None
        self._client: Any = None
        self._kept: KeptRun

    def prepare(self, output_dir: Path | None) -> None:
        """Import the package, and see whether there is a place for the numbers."""
        self._package = imported("mlflow", self, "mlflow")
        if output_dir is None and self.tracking_uri is None and not self._package.tracking.is_tracking_uri_set():
            raise ConfigError(
                "MLflowLogger has no place to log to, and TrainConfig.output_dir is not set. "
                'Use MLflowLogger(tracking_uri="sqlite:////tmp/mlflow.db") or TrainConfig(output_dir="runs/first").'
            )

    def start(self, start: Start) -> None:
        """Create a run, or go on with it."""
        uri, artifacts = self.tracking_uri, None
        if uri is None and not self._package.tracking.is_tracking_uri_set():
            assert start.output_dir is not None
            folder = start.output_dir.resolve()
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow").as_uri()
        self._client = self._package.MlflowClient(tracking_uri=uri)
        self._kept = KeptRun("mlflow", start.output_dir, start.step)
        if self._kept.id is None:
            found = self._client.get_experiment_by_name(self.experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(self.experiment, artifacts)
            self._kept.begin(self._client.create_run(experiment, run_name=self.run_name).info.run_id)
            self._log_parameters(start.description)
        else:
            self._client.update_run(self._kept.id, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log what is not there yet."""
        new = self._kept.not_there(values, step)
        if new:
            now = int(time.time() * 1000)
            metrics = [self._package.entities.Metric(_name(name), values[name], now, step) for name in new]
            self._client.log_batch(self._kept.id, metrics=metrics)
            self._kept.logged(new, step)

    def image(self, name: str, image: NDArray[Any], step: int, caption: str | None) -> None:
        """Log an image; MLflow has no captions."""
        if self._kept.not_there([name], step):
            self._client.log_image(self._kept.id, image, key=_name(name), step=step)
            self._kept.logged([name], step)

    def finish(self, status: Status) -> None:
        """Mark the run as finished, or as failed after an exception."""
        self._client.set_terminated(self._kept.id, "FAILED" if status == "failed" else "FINISHED")

    def _log_parameters(self, description: Mapping[str, Any]) -> None:
        parameters = [
            self._package.entities.Param(_name(name), str(value)[:_LONGEST_PARAMETER])
            for name, value in _flat(description)
        ]
        for first in range(0, len(parameters), _MOST_PARAMETERS):
            self._client.log_batch(self._kept.id, params=parameters[first : first + _MOST_PARAMETERS])


def _name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield "config.batch_size" and so on."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
