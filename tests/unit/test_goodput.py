"""Goodput: its categories add up to the wall-clock time of all attempts, and its files survive killed processes."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import random
import signal
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from unitrain.backends.local import LocalBackend
from unitrain.callbacks.callback import Callback
from unitrain.config import TrainConfig
from unitrain.errors import Preempted
from unitrain.progress import goodput
from unitrain.progress.events import EventLog
from unitrain.progress.goodput import (
    CATEGORIES,
    AttemptRecord,
    AttemptStart,
    Category,
    GoodputFile,
    GoodputMeter,
    GoodputSummary,
    read_attempts,
    unrecorded_attempt,
)
from unitrain.report.goodput import describe_goodput
from unitrain.report.record import RunRecord
from unitrain.trainer import Trainer

LOCAL = LocalBackend(torch.device("cpu"))


class Clock:
    """Replacement for the module `time`. `time()` is 1,000,000 s ahead of `perf_counter()`."""

    now = 50.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e6 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(goodput, "time", clock)
    return clock


def create_attempt(started: float, ended: float, last_step: int, **given: Any) -> AttemptRecord:
    seconds = {"training": ended - started}
    return AttemptRecord(
        started=started, ended=ended, first_step=0, last_step=last_step, ranks=2, seconds=seconds, **given
    )


def test_categories_equal_the_values_of_the_type() -> None:
    assert get_args(Category) == tuple(CATEGORIES)


def test_categories_of_an_attempt_add_up_to_its_time(clock: Clock) -> None:
    meter = GoodputMeter(AttemptStart(age_seconds=4.0, waiting_seconds=1.5))
    meter.continue_run([], 0)
    clock.now += 2
    meter.begin_category("training")
    clock.now += 10
    meter.count_steps(5, data_seconds=3.0)
    with meter.measure("checkpoint"):
        clock.now += 1
    clock.now += 4
    with suppress(KeyError), meter.measure("validation"):
        clock.now += 0.5
        raise KeyError  # the validation fails
    meter.begin_category("other")
    clock.now += 0.25
    meter.count_steps(7, data_seconds=100.0)  # limited to the training time
    seconds = {"startup": 6, "hosts": 1.5, "training": 7, "data": 7, "checkpoint": 1, "validation": 0.5, "other": 0.25}
    assert meter.seconds() == pytest.approx(dict.fromkeys(CATEGORIES, 0.0) | seconds)
    record = meter.attempt_record(0, 2, "finished")
    assert sum(record.seconds.values()) == pytest.approx(record.ended - record.started + 1.5)
    assert (record.started, record.ended, record.last_step) == (1e6 + 46, 1e6 + 67.75, 7)


def test_steps_of_an_earlier_attempt_are_replayed(clock: Clock) -> None:
    """The earlier attempt reaches step 12, and the current attempt resumes at step 10.

    The earlier attempt ends 20 s before the current one starts. 8 of the 20 s are spent waiting for hosts.
    """
    earlier = create_attempt(1e6 - 100, 1e6 + 50 - 3 - 20, 12)
    meter = GoodputMeter(AttemptStart(age_seconds=3.0, waiting_seconds=8.0))
    meter.continue_run([earlier], 10)
    meter.begin_category("training")
    clock.now += 9
    meter.count_steps(13, data_seconds=0.0)
    clock.now += 6
    meter.count_steps(16, data_seconds=0.0)
    assert meter.replayed_steps == 2
    seconds = {"startup": 3, "hosts": 8, "restart": 12, "replayed": 6, "training": 9}
    assert meter.seconds() == pytest.approx(dict.fromkeys(CATEGORIES, 0.0) | seconds)
    record = meter.attempt_record(10, 2, "running")
    summary = GoodputSummary.of([earlier, record])
    assert summary.total_seconds == pytest.approx(record.ended - earlier.started)
    assert summary.goodput == pytest.approx((127 + 9) / summary.total_seconds)
    assert (summary.attempts, summary.steps, summary.replayed_steps) == (2, 16, 2)


def test_time_after_the_end_of_a_finished_run_is_excluded(clock: Clock) -> None:
    meter = GoodputMeter(AttemptStart())
    meter.continue_run([create_attempt(1e6 - 5000, 1e6 - 4000, 12, status="finished")], 12)
    clock.now += 1
    assert sum(meter.seconds().values()) == pytest.approx(1)


def test_recorded_times_without_pending_time_never_decrease(clock: Clock) -> None:
    """This also holds if the attempt is killed after any record and the next attempt continues from this record."""
    earlier = create_attempt(1e6 - 100, 1e6 - 50, 4)
    meter = GoodputMeter(AttemptStart())
    meter.continue_run([earlier], 0)
    meter.begin_category("training")
    generator = random.Random(0)
    exported, in_file = [earlier.seconds], [earlier.seconds]
    for step in range(1, 200):
        clock.now += generator.random()
        if step % 3:
            meter.count_steps(step // 3, data_seconds=generator.choice([0.0, generator.random(), 100.0]))
        if step % 10 == 0:
            with meter.measure("validation"):
                clock.now += generator.random()
        record = meter.attempt_record(0, 2, "running")
        in_file.append(GoodputSummary.of([earlier, record]).seconds)
        exported.append(GoodputSummary.of([earlier, meter.without_pending_time(record)]).seconds)
    for category in CATEGORIES:
        values = [seconds.get(category, 0.0) for seconds in exported]
        assert values == sorted(values)
        # The next attempt continues from the record in the file.
        assert all(value <= seconds.get(category, 0.0) for value, seconds in zip(values, in_file, strict=True))
    assert exported[-1]["replayed"] > 0


def test_attempts_without_a_record_are_added(clock: Clock) -> None:
    """The job has waited 2 s for hosts before its first attempt and 3 s before its second one."""
    first = unrecorded_attempt(None, 100.0, 110.0, 2.0, 4)
    assert first is not None
    assert (first.status, first.first_step, first.last_step, first.ranks) == ("failed", 0, 0, 4)
    assert first.seconds == {"hosts": 2, "startup": 10}
    trained = create_attempt(115.0, 140.0, 7)
    assert unrecorded_attempt(trained, 114.9, 150.0, 0.0, 4) is None  # killed 10 s after its last record
    second = unrecorded_attempt(trained, 155.0, 161.0, 3.0, 4)
    assert second is not None
    assert (second.first_step, second.last_step, second.ranks) == (7, 7, 2)
    assert second.seconds == {"hosts": 3, "restart": 12, "startup": 6}
    finished = create_attempt(115.0, 140.0, 7, status="finished")
    later = unrecorded_attempt(finished, 1000.0, 1001.0, 0.0, 4)
    assert later is not None
    assert later.seconds == {"startup": 1}


@pytest.mark.parametrize(
    ("attempts", "expected"), [(1, "12 steps, 0 restarts,"), (2, "12 steps, 1 restart,"), (3, "12 steps, 2 restarts,")]
)
def test_description_contains_the_number_of_restarts(attempts: int, expected: str) -> None:
    records = [create_attempt(100.0 * number, 100.0 * number + 90, 12) for number in range(attempts)]
    assert expected in describe_goodput([RunRecord("run", [], [], [], datetime.now(), records)])


def test_written_attempts_are_read_back(tmp_path: Path) -> None:
    file = GoodputFile(tmp_path)
    file.load()
    assert file.earlier_attempts == []
    first, second = create_attempt(1.0, 2.5, 3), create_attempt(4.0, 5.0, 6, status="stopped", replayed_steps=2)
    file.write(first)
    assert not file.is_due
    again = GoodputFile(tmp_path)
    again.load()
    again.write(second)
    assert read_attempts(tmp_path) == [first, second]


SECONDS_AS_LIST = json.dumps({"attempts": [{**dataclasses.asdict(create_attempt(1.0, 2.0, 3)), "seconds": [1.0]}]})


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"attempts": [{}]}', '{"attempts": 3}', "\0\0", SECONDS_AS_LIST])
def test_corrupt_file_is_ignored_with_a_warning(text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "goodput.json").write_text(text)
    file = GoodputFile(tmp_path)
    file.load()
    assert file.earlier_attempts == []
    assert "is ignored" in caplog.text


def test_file_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, events = GoodputFile(tmp_path / "missing"), EventLog(tmp_path / "missing")
    for _ in range(2):
        file.write(create_attempt(1.0, 2.0, 3))
        events.append("end", 3)
    assert len(caplog.records) == 2


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def test_events_are_appended_on_a_new_line_after_an_incomplete_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"event": "start", "step": 0}\n{"event": "che')
    log = EventLog(tmp_path)
    log.open(is_new_run=False)
    log.append("restart", 5, reason=None, value=float("nan"))
    *_, damaged, restart = (tmp_path / "events.jsonl").read_text().splitlines()
    assert damaged == '{"event": "che'
    assert json.loads(restart).items() >= {"event": "restart", "attempt": 1, "step": 5, "value": None}.items()


def train(folder: Path | None, callbacks: list[Callback] | None = None, **given: Any) -> Trainer:
    """Train on 24 samples in steps of 4 for two epochs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 1))
    config = TrainConfig(
        **{"max_epochs": 2, "batch_size": 4, "log_every_n_steps": 2, "progress": "off", "output_dir": folder, **given}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, nn.MSELoss(), backend=LOCAL, config=config, callbacks=callbacks or [])
    data = TensorDataset(torch.arange(72.0).reshape(24, 3) / 72, torch.ones(24, 1))
    trainer.fit(data, TensorDataset(*data[:8]))
    return trainer


class FailsAtStep(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.progress.step == self.step:
            raise OSError("the disk is gone")


def test_run_that_failed_and_resumed_has_events_and_goodput_of_both_attempts(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="the disk is gone"):
        train(tmp_path, [FailsAtStep(5)], checkpoint_every_steps=3)
    train(tmp_path, resume=True)
    (failed, resumed) = read_attempts(tmp_path)
    assert (failed.status, failed.first_step, failed.last_step) == ("failed", 0, 5)
    assert (resumed.status, resumed.first_step, resumed.last_step, resumed.replayed_steps) == ("finished", 3, 12, 2)
    total = GoodputSummary.of([failed, resumed]).total_seconds
    assert total == pytest.approx(resumed.ended - failed.started, abs=0.02)
    found = [(event["attempt"], event["event"], event["step"]) for event in read_events(tmp_path)]
    assert [event for event in found if event[1] != "checkpoint"] == [
        (1, "start", 0), (1, "failure", 5), (2, "restart", 3), (2, "validation", 6), (2, "validation", 12),
        (2, "end", 12),
    ]  # fmt: skip
    # A trained epoch is saved before the validation, and again with its results.
    assert sorted(event for event in found if event[1] == "checkpoint") == [
        (1, "checkpoint", 3), *[(2, "checkpoint", 6)] * 2, *[(2, "checkpoint", 12)] * 2,
    ]  # fmt: skip
    failure = next(event for event in read_events(tmp_path) if event["event"] == "failure")
    assert "the disk is gone" in failure["reason"]


def test_end_of_a_preempted_run_states_the_signal(tmp_path: Path) -> None:
    class Preempts(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.progress.step == 4:
                os.kill(os.getpid(), signal.SIGUSR1)
                while trainer._stopping._preemption.received_signal is None:  # a Python thread handles the signal
                    time.sleep(0.01)

    with pytest.raises(Preempted):
        train(tmp_path, [Preempts()])
    end = read_events(tmp_path)[-1]
    assert (end["event"], end["status"], end["reason"]) == ("end", "stopped", "SIGUSR1 was received by rank 0")


def test_new_run_in_a_folder_without_checkpoints_starts_new_records(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(Exception, match="the disk is gone"):
            train(tmp_path, [FailsAtStep(2)])
    assert len(read_attempts(tmp_path)) == 1
    assert [event["event"] for event in read_events(tmp_path)] == ["start", "failure"]


def test_metrics_are_logged_at_sync_points(tmp_path: Path) -> None:
    """The FLOPs of a sample are those of its matrix products. Without peak_flops, the MFU on a CPU is unknown."""
    train(tmp_path / "first", peak_flops=1e6)
    train(tmp_path / "second")
    rows, without = (
        [json.loads(line) for line in (tmp_path / name / "steps.jsonl").read_text().splitlines()]
        for name in ("first", "second")
    )
    forward, backward = 2 * (3 * 5 + 5 * 1), 2 * (3 * 5 + 5 * 1) + 2 * 5 * 1
    for row in rows:
        assert row["mfu"] == pytest.approx((forward + backward) * row["samples_per_second"] / 1e6)
        assert 0 < row["goodput"] < 1
        assert row["max_memory_bytes"] > 1e7
    assert rows[0]["memory_bytes"] == [rows[0]["max_memory_bytes"]]
    assert not any("mfu" in row for row in without)
    assert not any("tokens_per_second" in row for row in rows)


class TimedModel(nn.Linear):
    """Its training takes 10 ms per sample, a validation batch 1 s, and a copy of its state 2 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(3, 1)
        self.clock = clock

    def forward(self, inputs: Tensor) -> Tensor:
        self.clock.now += 0.01 * len(inputs) if self.training else 1.0
        return super().forward(inputs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.now += 2.0
        return super().state_dict(*args, **kwargs)


@pytest.mark.parametrize("counts_tokens", [False, True])
def test_throughput_and_mfu_exclude_validation_and_checkpoints(
    clock: Clock, counts_tokens: bool, tmp_path: Path
) -> None:
    """Each epoch has five steps with 5, 5, 5, 5 and 4 samples. The second and fourth loss cover two epochs."""

    def loss_fn(output: Tensor, target: Tensor) -> Any:
        losses = (output - target) ** 2
        return (losses.sum(), 2 * len(losses)) if counts_tokens else losses.mean()

    class Sleeps(Callback):
        def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
            clock.now += 5.0

    model = TimedModel(clock)
    config = TrainConfig(
        max_epochs=3, batch_size=5, log_every_n_steps=3, validate_every_steps=2, checkpoint_every_steps=4,
        progress="off", peak_flops=1e6, output_dir=tmp_path,
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, loss_fn, backend=LOCAL, config=config, callbacks=[Sleeps()], loggers=["jsonl"])
    data = TensorDataset(torch.arange(72.0).reshape(24, 3) / 72, torch.ones(24, 1))
    trainer.fit(data, data)
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 15]
    flops = 2 * 3 + 2 * 3  # forward, and backward for the weights
    names = {"samples_per_second": 100.0, "mfu": flops * 100 / 1e6}
    names |= {"tokens_per_second": 200.0} if counts_tokens else {}
    assert {"samples_per_second", "tokens_per_second", "mfu"} & rows[0].keys() == names.keys()
    logged = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for name, value in names.items():
        assert [row[name] for row in rows] == pytest.approx([value] * 5)
        assert [row[name] for row in logged if name in row] == pytest.approx([value] * 5)
        assert trainer._run_metrics._run_values.gauges[name] == pytest.approx(value)
    epochs = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["samples_per_second"] * row["seconds"] for row in epochs] == pytest.approx([24.0] * 3)


def test_counting_flops_does_not_change_the_results(tmp_path: Path) -> None:
    first, second = train(None, peak_flops=1e6), train(None)
    for counted, plain in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(counted, plain)


def test_goodput_is_displayed_at_the_end(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    logging.getLogger().handlers.clear()
    train(tmp_path, progress="lines")
    assert "goodput" in capfd.readouterr().err.splitlines()[-1]
