"""History of a run: one row per start, epoch and sync point. A resumed run appends rows."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from unitrain import __version__
from unitrain.backends.local import LocalBackend
from unitrain.callbacks.callback import Callback
from unitrain.checkpoint import output_folder
from unitrain.config import TrainConfig
from unitrain.loggers.json_lines import drop_rows_after
from unitrain.report.record import read_records
from unitrain.report.run_statistics import has_epoch_axis
from unitrain.trainer import Trainer

LOCAL = LocalBackend(torch.device("cpu"))


def create_data(samples: int) -> TensorDataset:
    return TensorDataset(torch.ones(samples, 3), torch.ones(samples, 1))


def train(
    folder: Path, dataset: Dataset[Any] | None = None, callbacks: Sequence[Callback] = (), **given: Any
) -> Trainer:
    """Train on 22 samples in steps of 4, and return the Trainer."""
    model = nn.Linear(3, 1)
    config = TrainConfig(**{"batch_size": 4, "log_every_n_steps": 2, "progress": "off", "output_dir": folder, **given})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.MSELoss(), backend=LOCAL, config=config, callbacks=callbacks)
    trainer.fit(create_data(22) if dataset is None else dataset)
    return trainer


def read_rows(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_sync_points_are_recorded_if_epochs_are_shorter_than_the_sync_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unitrain.progress.stopping._INTERVAL_SECONDS", 0.1)

    class Slow(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            time.sleep(0.01)

    train(tmp_path, create_data(16), [Slow()], max_epochs=40, log_every_n_steps=None, checkpoint_every_epochs=100)
    sync_point_rows = [row["step"] for row in read_rows(tmp_path, "steps.jsonl")]
    assert len(sync_point_rows) >= 5
    assert sync_point_rows[-1] > 100  # the run has 160 steps


def test_every_history_row_has_the_progress_of_the_run(tmp_path: Path) -> None:
    train(tmp_path, max_epochs=2)
    assert [(row["step"], row["epochs"]) for row in read_rows(tmp_path, "run.jsonl")] == [(0, 0)]
    assert [(row["step"], row["epochs"]) for row in read_rows(tmp_path, "history.jsonl")] == [(6, 1), (12, 2)]
    sync_point_rows = read_rows(tmp_path, "steps.jsonl")
    assert [row["step"] for row in sync_point_rows] == [2, 4, 6, 8, 10, 12]
    assert [row["epochs"] for row in sync_point_rows] == pytest.approx([8 / 22, 16 / 22, 1, 1 + 8 / 22, 1 + 16 / 22, 2])
    # The loss of an epoch of 22 samples is the weighted mean of the losses at its sync points.
    first = [row["loss"] for row in sync_point_rows[:3]]
    mean = (8 * first[0] + 8 * first[1] + 6 * first[2]) / 22
    assert read_rows(tmp_path, "history.jsonl")[0]["train_loss"] == pytest.approx(mean, rel=1e-5)
    assert all(row["learning_rate"] == 0.1 and row["samples_per_second"] > 0 for row in sync_point_rows)


def test_start_row_describes_the_run(tmp_path: Path) -> None:
    train(tmp_path, max_epochs=1, max_grad_norm=0.5)
    (start,) = read_rows(tmp_path, "run.jsonl")
    expected = {
        "backend": "local",
        "transport": "none",
        "size": 1,
        "device": "cpu",
        "model": "Linear",
        "parameters": 4,
    }
    expected |= {"optimizer": "SGD", "scheduler": None, "global_batch_size": 4, "steps_per_epoch": 6}
    assert {name: start[name] for name in expected} == expected
    assert start["versions"]["unitrain"] == __version__
    assert start["versions"]["torch"] == torch.__version__
    assert start["config"]["max_grad_norm"] == 0.5
    assert start["config"]["output_dir"] == str(tmp_path)
    assert "max_steps" not in start["config"]  # fields with the value None are omitted


def test_resumed_run_rewinds_the_history_to_its_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, max_epochs=1)
    train(tmp_path, max_epochs=2, resume=True)
    # Simulate a run that crashed in its third epoch, with an incomplete last line.
    for name in ("history.jsonl", "steps.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 14, "epochs": 2.5}\n{"step": 16, "ep')
    train(tmp_path, max_epochs=3, resume=True)
    assert [row["step"] for row in read_rows(tmp_path, "run.jsonl")] == [0, 6, 12]
    assert [row["step"] for row in read_rows(tmp_path, "history.jsonl")] == [6, 12, 18]
    assert [row["step"] for row in read_rows(tmp_path, "steps.jsonl")] == list(range(2, 19, 2))
    train(tmp_path, max_epochs=3, resume=True)  # the run is already finished
    assert [row["step"] for row in read_rows(tmp_path, "run.jsonl")] == [0, 6, 12]


class Items(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((torch.ones(3), torch.ones(1)) for _ in range(22))


def test_history_of_a_stream_has_no_fraction_of_an_epoch(tmp_path: Path) -> None:
    train(tmp_path, Items(), max_epochs=2)
    (start,) = read_rows(tmp_path, "run.jsonl")
    assert (start["samples_per_epoch"], start["steps_per_epoch"]) == (None, None)
    assert [row["epochs"] for row in read_rows(tmp_path, "history.jsonl")] == [1, 2]
    assert [row["epochs"] for row in read_rows(tmp_path, "steps.jsonl")] == [None] * 6
    assert not has_epoch_axis(read_records([tmp_path]))  # a report uses steps as its x axis


def test_history_is_continued_after_a_stop_within_an_epoch(tmp_path: Path) -> None:
    class Enough(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 8:
                trainer.stop("enough")

    trainer = train(tmp_path, max_epochs=3, callbacks=[Enough()])
    assert trainer.progress.step == 8
    stopped = read_rows(tmp_path, "history.jsonl")
    assert [(row["epoch"], row["step"], row["epochs"]) for row in stopped] == [(1, 6, 1), (2, 8, 1 + 8 / 22)]
    trainer.fit(create_data(22))  # the same Trainer uses a new StopCoordinator
    assert [row["step"] for row in read_rows(tmp_path, "run.jsonl")] == [0, 8]
    train(tmp_path, max_epochs=4, resume=True)
    assert [row["step"] for row in read_rows(tmp_path, "run.jsonl")] == [0, 8, 18]
    history = [(row["epoch"], row["step"]) for row in read_rows(tmp_path, "history.jsonl")]
    assert history == [(1, 6), (2, 8), (2, 12), (3, 18), (4, 24)]
    assert [row["step"] for row in read_rows(tmp_path, "steps.jsonl")] == list(range(2, 25, 2))


def test_missing_epoch_row_of_a_killed_run_is_restored_from_the_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, max_epochs=2)
    first, second = (tmp_path / "history.jsonl").read_text().splitlines()
    (tmp_path / "history.jsonl").write_text(f"{first}\n{second[:-9]}")
    train(tmp_path, max_epochs=3, resume=True)
    history = read_rows(tmp_path, "history.jsonl")
    assert [(row["epoch"], row["step"], row["epochs"]) for row in history] == [(1, 6, 1), (2, 12, 2), (3, 18, 3)]
    interrupted = json.loads(second)
    assert history[1] == {name: value for name, value in interrupted.items() if not name.endswith("_seconds")}
    train(tmp_path / "other", max_epochs=4, resume=tmp_path)  # the rows are not copied to another folder
    assert [row["epoch"] for row in read_rows(tmp_path / "other", "history.jsonl")] == [4]


def test_epoch_that_ends_twice_has_one_history_row(tmp_path: Path) -> None:
    train(tmp_path, max_epochs=3, checkpoint_every_epochs=3, checkpoint_every_steps=6)
    (tmp_path / "step-000000018").rename(tmp_path / "gone")
    before = read_rows(tmp_path, "history.jsonl")[:2]
    trainer = train(tmp_path, max_epochs=3, checkpoint_every_epochs=3, checkpoint_every_steps=6, resume=True)
    assert trainer.progress.step == 18
    after = read_rows(tmp_path, "history.jsonl")
    assert after[:2] == before  # the rows keep their train_loss, which the second fit does not know
    assert [row["epoch"] for row in after] == [1, 2, 3]


def test_rows_of_a_run_without_checkpoints_are_removed(tmp_path: Path) -> None:
    train(tmp_path, max_epochs=1, checkpoint_every_epochs=2, max_seconds=None)
    for path in tmp_path.glob("step-*"):
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    train(tmp_path, max_epochs=1)
    assert [row["step"] for row in read_rows(tmp_path, "run.jsonl")] == [0]
    assert [row["step"] for row in read_rows(tmp_path, "steps.jsonl")] == [2, 4, 6]


def test_history_is_not_rewritten_through_a_symbolic_link(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "history.jsonl"
    other.write_text("not of this run")
    path.write_text('{"step": 1}\n{"step": 2}\n')
    (tmp_path / "history.jsonl.unfinished").symlink_to(other)
    drop_rows_after(1, path)
    assert other.read_text() == "not of this run"
    assert path.read_text() == '{"step": 1}\n'


@pytest.mark.parametrize("line", ['{"step": Infinity}', '{"step": 1e999}', "[" * 100_000], ids=["inf", "1e999", "deep"])
def test_invalid_history_lines_are_skipped(line: str, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    drop_rows_after(5, path)
    assert path.read_text() == '{"step": 1}\n'


def test_job_file_is_not_written_through_a_symbolic_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNITRAIN_JOB", "mine")
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.write_text("not of this run")
    (folder / ".job.new").symlink_to(other)
    output_folder.record_job(folder)
    assert other.read_text() == "not of this run"
    assert json.loads((folder / ".job").read_text())["job"] == "mine"


def test_run_of_this_process_does_not_belong_to_an_earlier_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNITRAIN_JOB", "mine")
    path = tmp_path / ".job"
    assert not output_folder.belongs_to_earlier_attempt(tmp_path)
    for process, belongs in ({"process": "h 1 2"}, True), ({}, True), (None, False):
        if process is None:
            output_folder.record_job(tmp_path)
        else:
            path.write_text(json.dumps({"job": "mine", "batches": [[4, 8]], **process}))
        assert output_folder.belongs_to_earlier_attempt(tmp_path) is belongs
    assert output_folder.stored_batch_sizes(tmp_path) == [(4, 8)]
    monkeypatch.setenv("UNITRAIN_JOB", "other")
    assert not output_folder.belongs_to_earlier_attempt(tmp_path)
    assert output_folder.stored_batch_sizes(tmp_path) == []


@pytest.mark.parametrize("name", ["steps.jsonl", "history.jsonl"])
def test_history_that_cannot_be_written_is_reported_once_and_does_not_end_training(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(Callback):
        """Replaces the file by a folder in the second epoch."""

        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 7:
                (tmp_path / name).unlink(missing_ok=True)
                (tmp_path / name).mkdir()

    trainer = train(tmp_path, callbacks=[Breaks()], max_epochs=4)
    assert trainer.progress.epoch == 4
    messages = [record.message for record in caplog.records]
    assert [name in message and "cannot be written" in message for message in messages] == [True]
    assert output_folder.files.list_checkpoints(tmp_path)
