"""Timing of the training loop: an artificial delay is attributed to the correct phase and rank."""

from __future__ import annotations

import contextlib
import io
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import nightly
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.functional import mse_loss
from torch.utils.data import Dataset

from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.config import TrainConfig
from unitrain.data.prefetch import Prefetcher
from unitrain.optim.step import backward
from unitrain.progress import stragglers
from unitrain.progress.stragglers import StragglerDetector, find_stragglers
from unitrain.progress.timing import PHASES, LoopTimer
from unitrain.testing import RankGroup
from unitrain.trainer import Trainer

STEPS, MICRO_STEPS, BATCH = 25, 2, 2
DELAY = 0.03
DELAYED = STEPS * MICRO_STEPS * DELAY
VALIDATION_DELAY = 0.15
Row = dict[str, Any]
CASES = ("even", "slow forward", "slow data", "slow update", "slow validation")


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that delays the first sample of every batch by `delay` seconds."""

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


class SlowModel(nn.Linear):
    delay = 0.0

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.delay)
        return super().forward(inputs)


class SlowSGD(torch.optim.SGD):
    delay = 0.0

    def step(self, closure: Any = None) -> None:
        time.sleep(self.delay)
        super().step(closure)


def slow_metric(output: Tensor, target: Tensor) -> float:
    time.sleep(VALIDATION_DELAY)
    return 0.0


def train(backend: Backend, case: str, folder: Path) -> Row:
    """Train an epoch. In some cases, the last rank has a slow forward pass, slow data or a slow update. Return the
    epoch's row of the history.

    The row also contains "sync_points", the displayed text as "shown", and the duration of `fit` as "fit_seconds".
    """

    def delay(slow_case: str) -> float:
        return DELAY if case == slow_case and backend.rank == backend.size - 1 else 0.0

    model = SlowModel(4, 1)
    model.delay = delay("slow forward")
    optimizer = SlowSGD(model.parameters(), lr=1e-4)
    optimizer.delay = delay("slow update") * MICRO_STEPS
    config = TrainConfig(
        max_epochs=1,
        batch_size=BATCH,
        gradient_accumulation_steps=MICRO_STEPS,
        log_every_n_steps=5,
        progress="lines",
        output_dir=folder / case,
    )
    metrics = {"late": slow_metric} if case == "slow validation" else {}
    trainer = Trainer(model, optimizer, mse_loss, backend=backend, config=config, metrics=metrics)
    length = STEPS * MICRO_STEPS * BATCH * backend.size
    validation = Samples(10 * BATCH * backend.size, 0.0)
    began = time.perf_counter()
    with contextlib.redirect_stderr(io.StringIO()) as shown:
        trainer.fit(Samples(length, delay("slow data")), validation)
    fit_seconds = time.perf_counter() - began
    row: Row = json.loads((folder / case / "history.jsonl").read_text())
    sync_point_rows = [json.loads(line) for line in (folder / case / "steps.jsonl").read_text().splitlines()]
    return {**row, "sync_points": sync_point_rows, "shown": shown.getvalue(), "fit_seconds": fit_seconds}


def train_all(backend: Backend, folder: Path) -> dict[str, Row]:
    stragglers._OBSERVATION_SECONDS = 0.4  # short observation periods, because the runs are short
    return {case: train(backend, case, folder) for case in CASES}


@pytest.fixture(scope="module", params=[("local", 1), ("ddp", 3), *nightly(("horovod", 2))], ids=lambda group: group[0])
def rows(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Row]]:
    """Return the row of the history of each case."""
    with RankGroup(*request.param) as group:
        yield group.run(train_all, tmp_path_factory.mktemp("runs"), timeout_seconds=120)[0]


def test_timed_parts_add_up_to_the_training_time(rows: dict[str, Row]) -> None:
    for row in rows.values():
        for rank in range(len(row["data_seconds"])):
            # The phases are extrapolated from one or two measured steps.
            uninterrupted = sum(row[f"{phase}_seconds"][rank] for phase in PHASES[:4])
            assert uninterrupted == pytest.approx(row["seconds"], rel=0.25, abs=0.1)
        assert all(seconds >= 0 for phase in PHASES for seconds in row[f"{phase}_seconds"])
        assert min(row["checkpoint_seconds"]) > 0


def assert_delay_is_measured(row: Row, phase: str) -> None:
    """Assert that the delay was measured in `phase` on the last rank, and as waiting time on the other ranks."""
    # The phases are extrapolated from one or two measured steps. A busy machine also prolongs other phases.
    *others, late = row[f"{phase}_seconds"]
    assert 0.6 * DELAYED < late < 3 * DELAYED
    assert max(others, default=0.0) < 0.5 * late
    *waits, own_wait = row["wait_seconds"]
    assert all(seconds > 0.7 * DELAYED for seconds in waits)
    assert own_wait < 0.5 * min(waits, default=late)


def test_slow_rank_has_more_compute_and_other_ranks_more_wait(rows: dict[str, Row]) -> None:
    assert_delay_is_measured(rows["slow forward"], "compute")


def test_slow_data_is_timed_on_the_rank_that_loads_it(rows: dict[str, Row]) -> None:
    assert_delay_is_measured(rows["slow data"], "data")


def test_slow_update_is_timed_as_update(rows: dict[str, Row]) -> None:
    assert_delay_is_measured(rows["slow update"], "update")


@pytest.mark.parametrize(
    ("case", "phase"), [("slow forward", "compute"), ("slow data", "data"), ("slow update", "update")]
)
def test_slow_rank_is_reported(rows: dict[str, Row], case: str, phase: str) -> None:
    row = rows[case]
    last = len(row["data_seconds"]) - 1
    if last == 0:  # a single rank is not compared
        assert not any("slow" in sync_mean for sync_mean in row["sync_points"])
        assert "slow" not in row["shown"]
        return
    first, *_ = (sync_mean for sync_mean in row["sync_points"] if "slow" in sync_mean)
    assert first["step"] in (10, 15, 20)  # second period of 0.4 s; longer on a busy machine
    for sync_mean in row["sync_points"][row["sync_points"].index(first) :]:
        (named,) = (
            slow for slow in sync_mean["slow"] if slow["rank"] == last
        )  # on a busy machine, another rank may be slow
        assert named["phase"] == phase
        assert 0.95 * MICRO_STEPS * DELAY < named["seconds"] < 3 * MICRO_STEPS * DELAY
        assert named["others"] < 0.5 * named["seconds"]
    epoch = row["shown"][row["shown"].index("epoch 1/1  train_loss") :]
    assert re.search(rf"rank {last} is slow: {phase} \d+ ms a step, others [\d.]+ ms", epoch), epoch


# Seconds of data, compute, wait and update in two steps.
FAST, SLOW_DATA = [0.2, 1.0, 0.6, 0.2], [0.8, 1.0, 0.0, 0.2]
BUSY = [0.2, 1.4, 0.2, 0.2]


@pytest.mark.parametrize(
    ("seconds", "named"),
    [
        ([FAST], []),
        ([FAST, FAST, FAST], []),
        ([FAST, FAST, SLOW_DATA], ["rank 2 is slow: data 400 ms a step, others 100 ms"]),
        ([SLOW_DATA, FAST], ["rank 0 is slow: data 400 ms a step, others 100 ms"]),
        ([FAST, BUSY, [0.2, 1.5, 0.1, 0.2]], ["rank 2 is slow: compute 750 ms a step, others 500 ms"]),
        # At most half of the ranks are reported, the slowest first.
        (
            [FAST, SLOW_DATA, FAST, [0.2, 1.7, 0.0, 0.2]],
            [
                "rank 3 is slow: compute 850 ms a step, others 500 ms",
                "rank 1 is slow: data 400 ms a step, others 100 ms",
            ],
        ),
        # One rank loads data slowly but computes faster, so no rank waits.
        ([FAST, [0.8, 0.4, 0.6, 0.2]], []),
        # An excess of less than a fifth of a step is not reported.
        ([FAST, [0.5, 1.0, 0.3, 0.2]], []),
        (
            [[0.0002, 0.001, 0.02, 0.0], [0.0132, 0.008, 0.0, 0.0]],
            ["rank 1 is slow: data 6.6 ms a step, others 0.1 ms"],
        ),
    ],
)
def test_find_stragglers_returns_ranks_that_delay_others(seconds: list[list[float]], named: list[str]) -> None:
    assert [str(straggler) for straggler in find_stragglers(seconds, steps=2)] == named


def test_straggler_detector_forgets_a_rank_that_recovers() -> None:
    """An observation lasts at least one second. A rank is reported after two consecutive observations in which it is
    slow."""
    slow, even, half = (
        [[phase / n for phase in rank] for rank in (FAST, one)]
        for n, one in ((1, SLOW_DATA), (1, FAST), (2.5, SLOW_DATA))
    )
    nothing_measured = [[0.1, 0.0, 0.0, 0.0], [0.1, 1.0, 0.0, 0.0]]
    detector, named = StragglerDetector(), []
    for seconds in (slow, even, slow, slow, nothing_measured, even, slow, half, half):
        detector.add(seconds, steps=4 if seconds is half else 10)
        named.append(str(detector))
    slow_rank_text = "rank 1 is slow: data 80 ms a step, others 20 ms"
    assert named == ["", "", "", slow_rank_text, slow_rank_text, "", "", "", slow_rank_text]


def test_slowest_of_many_slow_ranks_are_reported() -> None:
    detector = StragglerDetector()
    slow = [[0.8 + rank / 10, 1.0, 0.0, 0.2] for rank in range(4)]
    for _ in range(2):
        detector.add([FAST] * 5 + slow, steps=10)
    assert str(detector) == (
        "rank 8 is slow: data 110 ms a step, others 20 ms; rank 7 is slow: data 100 ms a step, others 20 ms; "
        "2 more slow ranks"
    )


def test_validation_is_not_part_of_the_training_time(rows: dict[str, Row]) -> None:
    even, row = rows["even"], rows["slow validation"]
    assert all(seconds >= 10 * VALIDATION_DELAY for seconds in row["validation_seconds"])
    assert max(even["validation_seconds"]) < 10 * VALIDATION_DELAY
    assert row["seconds"] + row["validation_seconds"][0] <= row["fit_seconds"]


def test_validation_within_an_epoch_is_not_part_of_the_training_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimulatedClock()
    monkeypatch.setattr("unitrain.progress.timing.time.perf_counter", lambda: clock.now)
    times = LoopTimer(LocalBackend(torch.device("cpu")))
    for step in times.iterate(range(10)):
        clock.pass_time(0.3)
        times.end_step(1)
        if step == 4:
            with times.measure("validation"):
                clock.pass_time(5.0)
    assert times.stop() == pytest.approx(8.0)
    found = times.gather()
    assert found["validation_seconds"] == [pytest.approx(5.0)]
    assert sum(found[f"{phase}_seconds"][0] for phase in PHASES[:4]) == pytest.approx(3.0)


class SimulatedClock:
    """A simulated time `now`, and a GPU stream with `left` seconds of queued work."""

    def __init__(self) -> None:
        self.now, self.left = 0.0, 0.0

    def synchronize(self) -> None:
        self.pass_time(self.left)

    def pass_time(self, seconds: float) -> None:
        self.now, self.left = self.now + seconds, max(0.0, self.left - seconds)

    def launch(self, seconds: float) -> None:
        self.left += seconds


@pytest.mark.parametrize(("fetching", "waited"), [(0.0, 0.0), (0.4, 0.0), (1.0, 0.4)])
def test_data_loaded_while_a_gpu_computes_is_not_data_time(
    monkeypatch: pytest.MonkeyPatch, fetching: float, waited: float
) -> None:
    """In each step, the GPU takes 0.3 s for forward and backward, 0.2 s for communication and 0.1 s for the update."""
    clock = SimulatedClock()
    monkeypatch.setattr("unitrain.progress.timing.time.perf_counter", lambda: clock.now)
    times = LoopTimer(LocalBackend(torch.device("cpu")))
    times._stream = clock  # type: ignore[assignment]

    def communicate(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: clock.launch(0.2))

    def data() -> Iterator[None]:
        for _ in range(100):
            clock.pass_time(fetching)
            yield

    for _ in times.iterate(data()):
        loss = times.measure_backward(torch.ones((), requires_grad=True) * 1.0)
        loss.register_hook(communicate)
        clock.launch(0.3)
        loss.backward()
        clock.launch(0.1)
        times.end_step(1)
    clock.synchronize()
    seconds = times.stop()
    lately, steps = times.take_recent_seconds()
    assert (steps, sum(lately)) == (100, pytest.approx(seconds, rel=0.06))
    assert lately[0] == pytest.approx(100 * waited, rel=0.1, abs=0.05 * seconds)
    assert lately[1:] == [pytest.approx(30), pytest.approx(20), pytest.approx(10)]
    assert times.take_recent_seconds() == ([0.0, 0.0, 0.0, 0.0], 0)
    found = times.gather()
    # In measured steps, the GPU is idle when the next batch is requested.
    assert seconds == pytest.approx(100 * max(0.6, fetching), rel=0.06)
    assert found["data_seconds"] == [pytest.approx(100 * waited, rel=0.1, abs=0.05 * seconds)]
    rest = seconds - found["data_seconds"][0]
    for phase, share in (("compute", 3 / 6), ("wait", 2 / 6), ("update", 1 / 6)):
        assert found[f"{phase}_seconds"] == [pytest.approx(share * rest, rel=1e-6)]


@pytest.mark.parametrize("overlapping", [False, True])
def test_overlapped_fetch_is_timed_as_data(monkeypatch: pytest.MonkeyPatch, overlapping: bool) -> None:
    """Each step takes 0.3 s for forward and backward, 0.4 s for data, 0.2 s for communication and 0.1 s for the
    update."""
    clock = SimulatedClock()
    monkeypatch.setattr("unitrain.progress.timing.time.perf_counter", lambda: clock.now)
    times = LoopTimer(LocalBackend(torch.device("cpu")))
    prefetch = Prefetcher(torch.device("cpu"), times.measure_fetching)

    def data() -> Iterator[tuple[None, None]]:
        for _ in range(100):
            clock.pass_time(0.4)
            yield None, None

    def communicate(_: Tensor) -> None:
        Variable._execution_engine.queue_callback(lambda: clock.pass_time(0.2))

    for _ in times.iterate(prefetch(data(), ahead=True, overlapped=overlapping)):
        clock.pass_time(0.3)
        weight = torch.ones((), requires_grad=True)
        weight.register_hook(communicate)
        backward(times.measure_backward(weight * 1.0), *prefetch.overlapped_work())
        clock.pass_time(0.1)
        times.end_step(1)
    seconds = times.stop()
    found = times.gather()
    assert seconds == pytest.approx(100)
    assert [found[f"{phase}_seconds"] for phase in PHASES[:4]] == [[pytest.approx(one)] for one in (40, 30, 20, 10)]
