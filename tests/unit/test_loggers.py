"""Loggers: values of a new run and of a resumed run, read back with the package of each logger."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import logger_output
import mlflow
import numpy as np
import pytest
import torch

from unitrain.loggers.background import BackgroundLogger
from unitrain.loggers.csv import CSVLogger
from unitrain.loggers.images import to_histogram
from unitrain.loggers.json_lines import JSONLinesLogger
from unitrain.loggers.logger import Logger, RunInfo, ServiceRun
from unitrain.loggers.mlflow import MLflowLogger
from unitrain.loggers.tensorboard import TensorBoardLogger
from unitrain.loggers.wandb import WandbLogger

LOGGERS: dict[str, tuple[Callable[[], Logger], Callable[[Path], logger_output.Points]]] = {
    "csv": (CSVLogger, logger_output.from_csv),
    "json lines": (JSONLinesLogger, logger_output.from_json_lines),
    "tensorboard": (TensorBoardLogger, lambda folder: logger_output.from_tensorboard(folder / "tensorboard")),
    "wandb": (lambda: WandbLogger(mode="offline"), logger_output.from_wandb),
    "mlflow": (MLflowLogger, logger_output.from_mlflow),
}
# When a run resumes, these loggers remove the values after its checkpoint. The other loggers keep those values.
REWOUND = ("csv", "json lines", "tensorboard")
DESCRIPTION = {"size": 2, "config": {"batch_size": 8, "output_dir": Path("somewhere")}}


@pytest.fixture(autouse=True)
def _mlflow_database(tmp_path: Path) -> None:
    logger_output.put_mlflow_database(tmp_path)


def log_run(logger: Logger, folder: Path, first: int, last: int, *, offset: float) -> None:
    """Log "loss" in every step after `first`, "even" and "rate" in every second step, and an image after `last`."""
    logger.prepare(folder)
    background = BackgroundLogger(logger, RunInfo(first, folder, DESCRIPTION))
    for step in range(first + 1, last + 1):
        background.call("log", {"loss": step + offset}, step)
        if step % 2 == 0:
            background.call("log", {"even": step + offset, "rate": 0.1}, step)
    background.call("image", "picture", np.full((5, 4, 3), 200, dtype=np.uint8), last, "grey")
    background.wait(background.finish("finished"))
    assert not background.is_disabled


def expected_points(steps: dict[int, float]) -> logger_output.Points:
    points = []
    for step, offset in steps.items():
        points.append(("loss", step, step + offset))
        points += [("even", step, step + offset), ("rate", step, 0.1)] if step % 2 == 0 else []
    return sorted(points)


def round_points(points: logger_output.Points) -> logger_output.Points:
    return sorted((name, step, round(value, 6)) for name, step, value in points)  # TensorBoard stores float32


@pytest.mark.parametrize("logger_name", LOGGERS)
def test_resumed_run_logs_every_step_once(logger_name: str, tmp_path: Path) -> None:
    create_logger, read = LOGGERS[logger_name]
    log_run(create_logger(), tmp_path, 0, 6, offset=0.25)
    assert round_points(read(tmp_path)) == expected_points(dict.fromkeys(range(1, 7), 0.25))
    log_run(create_logger(), tmp_path, 4, 8, offset=0.75)
    again = 0.75 if logger_name in REWOUND else 0.25
    steps = {**dict.fromkeys(range(1, 5), 0.25), 5: again, 6: again, 7: 0.75, 8: 0.75}
    assert round_points(read(tmp_path)) == expected_points(steps)


@pytest.mark.parametrize("logger_name", LOGGERS)
def test_run_that_is_not_resumed_creates_a_new_run(logger_name: str, tmp_path: Path) -> None:
    create_logger, read = LOGGERS[logger_name]
    log_run(create_logger(), tmp_path, 0, 3, offset=0.25)
    log_run(create_logger(), tmp_path, 0, 2, offset=0.75)
    second = expected_points(dict.fromkeys(range(1, 3), 0.75))
    found = round_points(read(tmp_path))
    assert found == (
        second if logger_name in REWOUND else sorted(expected_points(dict.fromkeys(range(1, 4), 0.25)) + second)
    )
    if logger_name == "wandb":
        assert len({name for name, _ in logger_output.wandb_starts(tmp_path)}) == 2
    if logger_name == "mlflow":
        assert len(logger_output.mlflow_runs(tmp_path)[1]) == 2


@pytest.mark.parametrize("logger_name", LOGGERS)
def test_nan_infinity_and_unusual_names_are_logged(logger_name: str, tmp_path: Path) -> None:
    create_logger, read = LOGGERS[logger_name]
    logger = create_logger()
    logger.prepare(tmp_path)
    logger.start(RunInfo(0, tmp_path, DESCRIPTION))
    logger.log({"loss": math.nan, "rate": math.inf}, 1)
    logger.log({"loss": 0.5, "strange # name": 1.0}, 2)
    logger.finish("failed")
    found = read(tmp_path)
    assert [value for name, step, value in found if (name, step) == ("loss", 2)] == [0.5]
    assert any(math.isnan(value) for name, step, value in found if (name, step) == ("loss", 1))
    assert [value for name, _, value in found if name.startswith("strange")] == [1.0]


def test_tensorboard_logger_writes_images_and_the_description(tmp_path: Path) -> None:
    log_run(TensorBoardLogger(tmp_path), tmp_path, 0, 2, offset=0.0)
    found = logger_output.events(tmp_path)
    (image,) = found.Images("picture")
    assert (image.step, image.width, image.height) == (2, 4, 5)
    texts = [found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in found.Tags()["tensors"]]
    assert sorted(found.Tags()["tensors"]) == ["picture/text_summary", "run/text_summary"]
    assert any('"batch_size": 8' in text for text in texts)
    assert "grey" in texts


def test_wandb_logger_writes_images_and_the_description_and_keeps_the_run_id(tmp_path: Path) -> None:
    log_run(WandbLogger("things", name="mine", mode="offline"), tmp_path, 0, 3, offset=0.0)
    log_run(WandbLogger("things", name="mine", mode="offline"), tmp_path, 2, 4, offset=0.0)
    (name, records), (again, _) = logger_output.wandb_starts(tmp_path)
    assert name == again
    (started,) = [one.run for one in records if one.WhichOneof("record_type") == "run"]
    assert (started.project, started.display_name) == ("things", "mine")
    config = {item.key: item.value_json for item in started.config.update}
    assert config["size"] == "2"
    assert '"batch_size": 8' in config["config"].replace('":8', '": 8')
    (ended,) = [one.exit for one in records if one.WhichOneof("record_type") == "exit"]
    assert ended.exit_code == 0
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/images/picture_*.png"))) == 2


def test_wandb_and_tensorboard_loggers_write_tables_and_histograms(tmp_path: Path) -> None:
    counts, edges = np.array([1, 0, 3]), np.array([0.0, 1.0, 2.0, 3.0])
    for logger in (WandbLogger("things", mode="offline"), TensorBoardLogger()):
        logger.prepare(tmp_path)
        logger.start(RunInfo(0, tmp_path, DESCRIPTION))
        logger.histogram("weights", counts, edges, 4)
        logger.table("worst", ["label", "a|b"], [[7, "x"], [None, 1.5]], 4)
        logger.finish("finished")
    ((_, records),) = logger_output.wandb_starts(tmp_path)
    items = {
        ".".join(item.nested_key or [item.key]): json.loads(item.value_json)
        for record in records
        if record.WhichOneof("record_type") == "history"
        for item in record.history.item
    }
    nested = {key.partition(".")[2]: value for key, value in items.items() if key.startswith("weights.")}
    histogram = items.get("weights") or nested
    assert (histogram["values"], histogram["bins"]) == (counts.tolist(), edges.tolist())
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/worst_*.table.json")
    table = json.loads(file.read_text())
    assert (table["columns"], table["data"]) == (["label", "a|b"], [[7, "x"], [None, 1.5]])
    found = logger_output.events(tmp_path / "tensorboard")
    (shown,) = found.Histograms("weights")
    assert (shown.step, shown.histogram_value.num, list(shown.histogram_value.bucket)) == (4, 4, [1, 0, 3])
    text = found.Tensors("worst/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.splitlines() == ["| label | a\\|b |", "|---|---|", "| 7 | x |", "| None | 1.5 |"]


@pytest.mark.parametrize("values", [[1.0, math.nextafter(1.0, 2.0)], [1e17, 1e17], [-1e300, -1e300]])
def test_histogram_of_almost_equal_values_has_increasing_edges(values: list[float]) -> None:
    """64 different edges between these values cannot be represented in float64."""
    counts, edges = to_histogram(torch.tensor(values, dtype=torch.float64))
    assert counts.sum() == 2
    assert (np.diff(edges) > 0).all()
    assert edges[0] <= min(values) <= max(values) <= edges[-1]


def test_json_lines_and_mlflow_loggers_write_tables_and_histograms(tmp_path: Path) -> None:
    counts, edges = np.array([1, 0, 3]), np.array([0.0, 1.0, 2.0, 3.0])
    for logger in (JSONLinesLogger(), MLflowLogger(), CSVLogger()):
        logger.prepare(tmp_path)
        for start in (0, 4):  # the second start resumes the run
            logger.start(RunInfo(start, tmp_path, DESCRIPTION))
            if start == 0 or not isinstance(logger, JSONLinesLogger):
                logger.histogram("weights", counts, edges, 4)
                logger.table("worst: a", ["label", "b"], [[7, "x"], [None, 1.5]], 4)
        logger.finish("finished")
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [
        {"step": 4, "histogram": "weights", "counts": [1, 0, 3], "edges": [0.0, 1.0, 2.0, 3.0]},
        {"step": 4, "table": "worst: a", "columns": ["label", "b"], "rows": [[7, "x"], [None, 1.5]]},
    ]
    (histogram,) = tmp_path.glob("mlflow/*/artifacts/histograms/weights/4.json")
    assert json.loads(histogram.read_text()) == {"counts": [1, 0, 3], "edges": [0.0, 1.0, 2.0, 3.0]}
    (table,) = tmp_path.glob("mlflow/*/artifacts/tables/*/4.json")
    assert json.loads(table.read_text()) == {"columns": ["label", "b"], "data": [[7, "x"], [None, 1.5]]}
    assert (tmp_path / "metrics.csv").read_text() == "step\n"  # the CSV logger ignores tables and histograms


def test_mlflow_logger_writes_images_and_parameters_to_one_run(tmp_path: Path) -> None:
    log_run(MLflowLogger(run_name="mine"), tmp_path, 0, 3, offset=0.0)
    log_run(MLflowLogger(run_name="mine"), tmp_path, 2, 4, offset=0.0)
    client, (found,) = logger_output.mlflow_runs(tmp_path)
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params == {"size": "2", "config.batch_size": "8", "config.output_dir": "somewhere"}
    images = [file.path for file in client.list_artifacts(found.info.run_id, "images") if file.path.endswith(".png")]
    assert len(images) == 2
    assert list(tmp_path.glob("mlflow/*/artifacts/images/*.png"))


def test_mlflow_uses_an_experiment_that_another_process_creates_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    find, results = mlflow.MlflowClient.get_experiment_by_name, list[object]()

    def create_after_lookup(self: mlflow.MlflowClient, name: str) -> object:
        results.append(find(self, name))
        if len(results) == 1:
            client.create_experiment(name, (tmp_path / "mlflow").as_uri())
        return results[-1]

    monkeypatch.setattr(mlflow.MlflowClient, "get_experiment_by_name", create_after_lookup)
    log_run(MLflowLogger(), tmp_path, 0, 3, offset=0.0)
    assert (results[0], len(results)) == (None, 2)
    assert len(logger_output.mlflow_runs(tmp_path)[1]) == 1


def test_csv_and_json_lines_loggers_remove_an_incomplete_line(tmp_path: Path) -> None:
    for logger_name, name in (("csv", "metrics.csv"), ("json lines", "metrics.jsonl")):
        create_logger, read = LOGGERS[logger_name]
        log_run(create_logger(), tmp_path, 0, 12, offset=0.5)
        uninterrupted = (tmp_path / name).read_text()
        (tmp_path / name).write_text(
            uninterrupted[:-1] if logger_name == "json lines" else uninterrupted[: uninterrupted.rindex("12") + 1]
        )
        log_run(create_logger(), tmp_path, 11, 12, offset=0.5)
        assert round_points(read(tmp_path)) == expected_points(dict.fromkeys(range(1, 13), 0.5))


@pytest.mark.parametrize(
    "damage",
    [
        "4,0.2\n",  # incomplete
        "2,0.25,0.1,0.3,4\n",  # two rows on one line
        "\0\0\0\n",
        f"{chr(0) * 200_000}\n",  # exceeds the cell size limit of the csv module
        "4\0,0.25,4.25,0.1\n",
        "\udcff,,,\n",
    ],
)
def test_csv_logger_skips_damaged_rows(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log_run(CSVLogger(), tmp_path, 0, 4, offset=0.25)
    path = tmp_path / "metrics.csv"
    header, *rows = path.read_text().splitlines(keepends=True)
    assert header == "step,loss,even,rate\n"
    text = "".join([header, *rows[:3], damage, *rows[3:]])
    path.write_bytes(text.encode(errors="surrogateescape"))
    log_run(CSVLogger(), tmp_path, 4, 5, offset=0.25)
    assert round_points(logger_output.from_csv(tmp_path)) == expected_points(dict.fromkeys(range(1, 6), 0.25))
    (record,) = caplog.records
    assert record.getMessage() == (
        f"'{path}' has 1 damaged line, which can happen after a power loss. The damaged lines are skipped."
    )


@pytest.mark.parametrize("header", ["\0\0\0\n", "loss\n", f"{chr(0) * 200_000}\n", ""])
def test_csv_logger_starts_a_new_file_if_the_header_is_damaged(header: str, tmp_path: Path) -> None:
    log_run(CSVLogger(), tmp_path, 0, 3, offset=0.25)
    path = tmp_path / "metrics.csv"
    path.write_text(header + path.read_text().partition("\n")[2])
    log_run(CSVLogger(), tmp_path, 3, 5, offset=0.25)
    assert round_points(logger_output.from_csv(tmp_path)) == expected_points({4: 0.25, 5: 0.25})


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\0\0\0", b'{"id": "a", "ste', b"[]", b'{"id": "a"}', b'{"id": "a", "steps": {"loss": "x"}}', b"\xff"],
)
def test_damaged_state_file_of_a_tracking_service_starts_a_new_run(
    damaged: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_at_service = ServiceRun("mlflow", tmp_path, 0)
    run_at_service.set_id("a")
    run_at_service.mark_logged(["loss"], 3)
    resumed = ServiceRun("mlflow", tmp_path, 2)
    assert (resumed.id, resumed.filter_unlogged(["loss", "rate"], 3)) == ("a", ["rate"])
    (tmp_path / ".mlflow.json").write_bytes(damaged)
    assert not caplog.records
    again = ServiceRun("mlflow", tmp_path, 2)
    assert (again.id, again.filter_unlogged(["loss", "rate"], 3)) == (None, ["loss", "rate"])
    (record,) = caplog.records
    assert record.getMessage().startswith(f"'{tmp_path / '.mlflow.json'}', ")
    again.set_id("b")
    assert ServiceRun("mlflow", tmp_path, 2).id == "b"
