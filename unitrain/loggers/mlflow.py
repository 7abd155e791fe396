"""A logger for MLflow: a database in the output folder, or a tracking server."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from unitrain.errors import ConfigError
from unitrain.loggers.logger import Logger, RunInfo, ServiceRun, Status, import_package

# Limits of MLflow: characters that names cannot contain, parameters per request, and characters per parameter.
_INVALID_NAME_CHARACTERS = re.compile(r"[^\w./ :-]")
_MAX_PARAMETERS_PER_REQUEST, _MAX_PARAMETER_LENGTH = 100, 6000


class MLflowLogger(Logger):
    """Logs to a run of `experiment`, at `tracking_uri`.

    The default `tracking_uri` is MLflow's setting (MLFLOW_TRACKING_URI), or else the database `mlflow.db` in the output
    folder; view it with `mlflow ui --backend-store-uri sqlite:///...`. A resumed run keeps its ID; without an output
    folder, only a later `fit` of the same Trainer resumes the run. Values of repeated steps are not logged again.
    Requires pip install ".[mlflow]".
    """

    def __init__(
        self, experiment: str = "unitrain", *, tracking_uri: str | None = None, run_name: str | None = None
    ) -> None:
        self.experiment, self.tracking_uri, self.run_name = experiment, tracking_uri, run_name
        self._package: Any = None
        self._client: Any = None
        self._service_run: ServiceRun
        self._service_runs: dict[str, ServiceRun] = {}  # by the ID of the Trainer

    def prepare(self, output_dir: Path | None) -> None:
        """Import the package, and check that there is a tracking URI or an output folder."""
        self._package = import_package("mlflow", self, "mlflow")
        if output_dir is None and self.tracking_uri is None and not self._package.tracking.is_tracking_uri_set():
            raise ConfigError(
                "MLflowLogger has no tracking URI, and TrainConfig.output_dir is not set. "
                'Use MLflowLogger(tracking_uri="sqlite:////tmp/mlflow.db") or TrainConfig(output_dir="runs/first").'
            )

    def start(self, run_info: RunInfo) -> None:
        """Create a run, or resume it."""
        uri, artifacts = self.tracking_uri, None
        if uri is None and not self._package.tracking.is_tracking_uri_set():
            assert run_info.output_dir is not None
            folder = run_info.output_dir.resolve()
            uri, artifacts = f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlflow").as_uri()
        self._client = self._package.MlflowClient(tracking_uri=uri)
        previous = self._service_runs.get(run_info.trainer_id)
        self._service_run = ServiceRun("mlflow", run_info.output_dir, run_info.step, previous)
        self._service_runs[run_info.trainer_id] = self._service_run
        if self._service_run.id is None:
            experiment = self._find_or_create_experiment(artifacts)
            self._service_run.set_id(self._client.create_run(experiment, run_name=self.run_name).info.run_id)
            self._log_parameters(run_info.description)
        else:
            self._client.update_run(self._service_run.id, status="RUNNING")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log the values that were not logged before the run was resumed."""
        new = self._service_run.filter_unlogged(values, step)
        if new:
            now = int(time.time() * 1000)
            metrics = [self._package.entities.Metric(_valid_name(name), values[name], now, step) for name in new]
            self._client.log_batch(self._service_run.id, metrics=metrics)
            self._service_run.mark_logged(new, step)

    def image(self, name: str, image: NDArray[Any], step: int, caption: str | None) -> None:
        """Log an image. MLflow does not support captions."""
        if self._service_run.filter_unlogged([name], step):
            self._client.log_image(self._service_run.id, image, key=_valid_name(name), step=step)
            self._service_run.mark_logged([name], step)

    def histogram(self, name: str, counts: NDArray[Any], edges: NDArray[Any], step: int) -> None:
        """Log the histogram as the artifact histograms/NAME/STEP.json, because MLflow has no histograms."""
        self._log_json("histograms", name, {"counts": counts.tolist(), "edges": edges.tolist()}, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Log the table as the artifact tables/NAME/STEP.json, in the format that MLflow displays as a table."""
        self._log_json("tables", name, {"columns": list(columns), "data": [list(row) for row in rows]}, step)

    def _log_json(self, folder: str, name: str, content: dict[str, Any], step: int) -> None:
        if self._service_run.filter_unlogged([name], step):
            self._client.log_dict(self._service_run.id, content, f"{folder}/{_valid_name(name)}/{step}.json")
            self._service_run.mark_logged([name], step)

    def finish(self, status: Status) -> None:
        """Mark the run as finished, or as failed after an exception."""
        self._client.set_terminated(self._service_run.id, "FAILED" if status == "failed" else "FINISHED")

    def _find_or_create_experiment(self, artifacts: str | None) -> Any:
        """Return the ID of the experiment."""
        if (found := self._client.get_experiment_by_name(self.experiment)) is None:
            try:
                return self._client.create_experiment(self.experiment, artifacts)
            except self._package.exceptions.MlflowException:
                # Another process may have created it in the meantime.
                if (found := self._client.get_experiment_by_name(self.experiment)) is None:
                    raise
        return found.experiment_id

    def _log_parameters(self, description: Mapping[str, Any]) -> None:
        parameters = [
            self._package.entities.Param(_valid_name(name), str(value)[:_MAX_PARAMETER_LENGTH])
            for name, value in _flatten(description)
        ]
        for first in range(0, len(parameters), _MAX_PARAMETERS_PER_REQUEST):
            self._client.log_batch(self._service_run.id, params=parameters[first : first + _MAX_PARAMETERS_PER_REQUEST])


def _valid_name(name: str) -> str:
    return _INVALID_NAME_CHARACTERS.sub("_", name)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested values with dotted names such as "config.batch_size"."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
