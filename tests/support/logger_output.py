"""Reads the output of loggers with the official packages of the formats: metrics as (name, step, value), and
descriptions of runs."""

from __future__ import annotations

import csv
import functools
import json
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unitrain.loggers.logger import RunInfo
from unitrain.loggers.mlflow import MLflowLogger

Points = list[tuple[str, int, float]]


def from_csv(folder: Path) -> Points:
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        (name, int(row["step"]), float(value))
        for row in rows
        for name, value in row.items()
        if name != "step" and value
    ]


def from_json_lines(folder: Path) -> Points:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (name, row["step"], float("nan") if value is None else value)
        for row in rows
        for name, value in row.items()
        if name != "step"
    ]


def events(folder: Path) -> Any:
    """Return the content of the event files in `folder`, read by TensorBoard."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    accumulator.Reload()
    return accumulator


def from_tensorboard(folder: Path) -> Points:
    found = events(folder)
    return [(name, event.step, event.value) for name in found.Tags()["scalars"] for event in found.Scalars(name)]


def wandb_records(file: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file, which has blocks of 32 KiB like a LevelDB log."""
    from wandb.proto import wandb_internal_pb2

    content, offset, collected = file.read_bytes(), 7, b""
    assert b":W&B".startswith(content[:4])
    while offset + 7 <= len(content):
        if 32768 - offset % 32768 < 7:
            offset += 32768 - offset % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[offset : offset + 7])
        if offset + 7 + length > len(content):
            return  # the record is still being written
        collected += content[offset + 7 : offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # a complete record or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(collected)
            collected = b""
            yield record


def wandb_starts(folder: Path) -> list[tuple[str, list[Any]]]:
    """Return the file name and the records of each start of the logger, in order. Wait for the last record of a start,
    which is written after `finish` returns."""
    starts = []
    for start in sorted(folder.glob("wandb/offline-run-*")):
        deadline = time.monotonic() + 60
        while True:
            files = list(start.glob("*.wandb"))
            records = list(wandb_records(files[0])) if files else []
            if any(record.WhichOneof("record_type") == "exit" for record in records):
                break
            assert time.monotonic() < deadline, start
            time.sleep(0.05)
        starts.append((files[0].name, records))
    return starts


def from_wandb(folder: Path) -> Points:
    points = []
    for _, records in wandb_starts(folder):
        for record in records:
            if record.WhichOneof("record_type") == "history":
                items = [(list(item.nested_key) or [item.key], item.value_json) for item in record.history.item]
                values = {keys[0]: json.loads(value) for keys, value in items if len(keys) == 1}  # without images
                step = values["_step"]
                points += [(name, step, float(value)) for name, value in values.items() if name[0] != "_"]
    return points


@functools.cache
def _empty_mlflow_database() -> bytes:
    """Return the database that MLflow creates at the first use. Creating the database takes many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        logger = MLflowLogger("another experiment")
        logger.prepare(Path(folder))
        logger.start(RunInfo(0, Path(folder), {}))
        logger.finish("finished")
        return (Path(folder) / "mlflow.db").read_bytes()


def put_mlflow_database(folder: Path) -> None:
    """Write an initialized MLflow database to `folder`, so that MLflow does not create one."""
    (folder / "mlflow.db").write_bytes(_empty_mlflow_database())


def mlflow_runs(folder: Path) -> tuple[Any, list[Any]]:
    """Return a client and the runs in the database of a folder."""
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("unitrain")
    return client, list(client.search_runs([experiment.experiment_id], order_by=["attributes.start_time"]))


def from_mlflow(folder: Path) -> Points:
    client, runs = mlflow_runs(folder)
    return [
        (name, metric.step, metric.value)
        for run in runs
        for name in run.data.metrics
        for metric in client.get_metric_history(run.info.run_id, name)
    ]
