"""Where the time goes: a rank or data made slow shows in the right place, on the right rank, by the right amount."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.config import TrainConfig
from unitrain.testing import RankGroup
from unitrain.tracking.times import PARTS, Times
from unitrain.trainer import Trainer

STEPS, MICRO_STEPS, BATCH = 25, 2, 2
DELAY = 0.03
DELAYED = STEPS * MICRO_STEPS * DELAY
Row = dict[str, Any]
CASES = ("even", "slow forward", "slow data", "slow update", "slow validation")


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Its first sample of every batch is late by `delay`."""

    def __init__(self, length: int, delay: float) -> None:
        self.length, self.delay, self.fetched = length, delay, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= self.length:
            raise IndexError(index)
        if self.fetched % BATCH == 0:
            time.sleep(self.delay)
        self.fetched += 1
        return torch.ones(4), torch.ones(1)


class Late(nn.Linear):
    delay = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.delay)
        return super().forward(inputs)


class LateSGD(torch.optim.SGD):
    delay = 0.0

    def step(self, closure: Any = None) -> None:
        time.sleep(self.delay)
        super().step(closure)


def late_metric(output: Tensor, target: Tensor) -> float:
    time.sleep(DELAY)
    return 0.0


def train(backend: Backend, case: str, folder: Path) -> Row:
    """Train an epoch, in which the last rank is late where `case` says so, and return its row of the history."""

    def delay(where: str) -> float:
        return DELAY if case == where and backend.rank == backend.size - 1 else 0.0

    model = Late(4, 1)
    model.delay = delay("slow forward")
    optimizer = LateSGD(model.parameters(), lr=1e-4)
    optimizer.delay = delay("slow update") * MICRO_STEPS
    config = TrainConfig(epochs=1, batch_size=BATCH, accumulate=MICRO_STEPS, progress="off", output_dir=folder / case)
    metrics = {"late": late_metric} if case == "slow validation" else {}
    trainer = Trainer(model, optimizer, mse_loss, backend=backend, config=config, metrics=metrics)
    length = STEPS * MICRO_STEPS * BATCH * backend.size
    validation = Samples(10 * BATCH * backend.size, 0.0)
    trainer.fit(Samples(length, delay("slow data")), validation)
    row: Row = json.loads((folder / case / "history.jsonl").read_text())
    return row


def train_all(backend: Backend, folder: Path) -> dict[str, Row]:
    return {case: train(backend, case, folder) for case in CASES}


@pytest.fixture(scope="module", params=[("local", 1), ("ddp", 2), ("horovod", 2)], ids=lambda group: group[0])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Row]]:
    """What each case leaves."""
    with RankGroup(*request.param) as group:
        yield group.run(train_all, tmp_path_factory.mktemp("runs"), timeout_seconds=120)[0]


def test_the_parts_of_training_add_up_to_what_it_took(rows: dict[str, Row]) -> None:
    for row in rows.values():
        for rank in range(len(row["data_seconds"])):
            whole = sum(row[f"{part}_seconds"][rank] for part in PARTS[:4])
            assert whole == pytest.approx(row["seconds"], rel=0.1, abs=0.05)
        assert all(seconds >= 0 for part in PARTS for seconds in row[f"{part}_seconds"])
        assert min(row["checkpoint_seconds"]) > 0


def late_rank_is_seen(row: Row, part: str) -> None:
    """`part` of the last rank took as long as it was late, and the others waited for it."""
    # A busy machine makes everything later than it was asked to be, and nothing earlier.
    *others, late = row[f"{part}_seconds"]
    assert 0.9 * DELAYED < late < 2 * DELAYED
    assert max(others, default=0.0) < 0.5 * late
    *waits, own_wait = row["wait_seconds"]
    assert all(seconds > 0.7 * DELAYED for seconds in waits)
    assert own_wait < 0.5 * min(waits, default=late)


def test_a_slow_rank_computes_longer_and_the_others_wait_for_it(rows: dict[str, Row]) -> None:
    late_rank_is_seen(rows["slow forward"], "compute")


def test_slow_data_is_seen_where_it_is_slow(rows: dict[str, Row]) -> None:
    late_rank_is_seen(rows["slow data"], "data")


def test_a_slow_update_is_one(rows: dict[str, Row]) -> None:
    late_rank_is_seen(rows["slow update"], "update")


def test_validation_is_not_training(rows: dict[str, Row]) -> None:
    even, row = rows["even"], rows["slow validation"]
    assert all(seconds >= 10 * DELAY for seconds in row["validation_seconds"])
    assert max(even["validation_seconds"]) < 10 * DELAY
    assert row["seconds"] < DELAYED


class Stream:
    """A GPU's queue of work, of which `left` seconds are to be done; the host does nothing else."""

    def __init__(self) -> None:
        self.now, self.left = 0.0, 0.0

    def synchronize(self) -> None:
        self.pass_time(self.left)

    def pass_time(self, seconds: float) -> None:
        self.now, self.left = self.now + seconds, max(0.0, self.left - seconds)

    def launch(self, seconds: float) -> None:
        self.left += seconds


@pytest.mark.parametrize(("fetching", "waited"), [(0.0, 0.0), (0.4, 0.0), (1.0, 0.4)])
def test_data_that_comes_while_a_gpu_is_busy_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, fetching: float, waited: float
) -> None:
    """Each step, the GPU has 0.3 s of forward and backward to do, 0.2 s of communication and 0.1 s of update."""
    stream = Stream()
    monkeypatch.setattr("unitrain.tracking.times.time.perf_counter", lambda: stream.now)
    times = Times(LocalBackend(torch.device("cpu")))
    times._stream = stream  # type: ignore[assignment]

    def communicate(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: stream.launch(0.2))

    def data() -> Iterator[None]:
        for _ in range(100):
            stream.pass_time(fetching)
            yield

    for _ in times.batches(data()):
        loss = times.watched(torch.ones((), requires_grad=True) * 1.0)
        loss.register_hook(communicate)
        stream.launch(0.3)
        loss.backward()
        stream.launch(0.1)
        times.step(1)
    stream.synchronize()
    seconds = times.stop()
    found = times.gather()
    # In the few steps that are measured, the GPU is empty when the next batch is asked for.
    assert seconds == pytest.approx(100 * max(0.6, fetching), rel=0.06)
    assert found["data_seconds"] == [pytest.approx(100 * waited, rel=0.1, abs=0.05 * seconds)]
    rest = seconds - found["data_seconds"][0]
    for part, share in (("compute", 3 / 6), ("wait", 2 / 6), ("update", 1 / 6)):
        assert found[f"{part}_seconds"] == [pytest.approx(share * rest, rel=1e-6)]
