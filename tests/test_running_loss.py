"""The running loss: looked at when it should be, and no other for having been looked at."""

from __future__ import annotations

import pytest
import torch

from unitrain.backends.local import LocalBackend
from unitrain.errors import NonFiniteLossError
from unitrain.metrics.running_loss import RunningLoss
from unitrain.testing import run_ranks

LOCAL = LocalBackend(torch.device("cpu"))


def collected(every: int | None, looks: list[int]) -> tuple[list[float], float]:
    """Return what is seen at steps `looks`, and in the end, of ten steps over 3 samples each."""
    loss = RunningLoss(LOCAL, every)
    seen = []
    for step in range(1, 11):
        loss.add(torch.tensor(step / 3), 3)
        if step in looks:
            seen.append(loss.look(1, step))
    return seen, loss.finish(1, 10)


def test_a_look_is_the_mean_since_the_last_one() -> None:
    seen, whole = collected(None, [2, 10])
    assert seen == pytest.approx([1.5 / 3, 6.5 / 3], rel=1e-6)
    assert whole == pytest.approx(5.5 / 3, rel=1e-6)


def test_the_mean_of_an_epoch_does_not_depend_on_when_it_was_looked_at() -> None:
    assert len({collected(None, looks)[1] for looks in ([], [1], [3, 4, 9], list(range(1, 11)))}) == 1


def test_finishing_starts_again() -> None:
    loss = RunningLoss(LOCAL, None)
    loss.add(torch.tensor(5.0), 2)
    assert loss.finish(1, 1) == 5.0
    loss.add(torch.tensor(7.0), 1)
    assert loss.look(2, 2) == 7.0
    assert loss.finish(2, 2) == 7.0


def test_a_number_of_steps_is_kept_to() -> None:
    loss = RunningLoss(LOCAL, 3)
    due = []
    for step in range(1, 11):
        loss.add(torch.tensor(1.0), 1)
        if loss.due(step):
            due.append(step)
            loss.look(1, step)
    assert due == [3, 6, 9]


def test_otherwise_it_is_about_every_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("unitrain.metrics.running_loss.time.perf_counter", lambda: now)
    loss = RunningLoss(LOCAL, None)
    due = []
    for step in range(1, 61):
        now += 5.0 if step == 1 else 0.1  # the first step compiles, allocates and connects
        loss.add(torch.tensor(1.0), 1)
        if loss.due(step):
            due.append(step)
            loss.look(1, step)
    assert due == [1, 2, 22, 42]
    loss.finish(1, 60)
    now += 1000.0  # a validation is not training
    loss.start(60)
    assert next(step for step in range(61, 100) if loss.due(step)) == 80


def test_a_loss_that_is_not_finite_is_told_when_looked_at_and_at_the_end() -> None:
    loss = RunningLoss(LOCAL, None)
    loss.add(torch.tensor(float("inf")), 1)
    with pytest.raises(NonFiniteLossError, match=r"^The mean loss became inf in epoch 3, by step 7\. Lower the learn"):
        loss.look(3, 7)
    with pytest.raises(NonFiniteLossError, match=r"by step 8\."):
        loss.finish(3, 8)


def uneven_ranks(backend) -> tuple[list[int], float]:
    import time

    loss = RunningLoss(backend, None)
    due = []
    for step in range(1, 41):
        time.sleep(0.05 * backend.rank)
        loss.add(torch.tensor(float(backend.rank)), 1 + backend.rank)
        if loss.due(step):
            due.append(step)
            loss.look(1, step)
    return due, loss.finish(1, 40)


def test_ranks_look_at_the_same_steps_however_their_clocks_go() -> None:
    first, second = run_ranks(uneven_ranks, size=2, backend="ddp")
    assert first == second
    due, mean = first
    assert mean == 2 / 3
    assert due[0] == 1
    assert 2 <= len(due) <= 6  # rank 0 alone would think of millions of steps
