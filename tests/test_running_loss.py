"""The running loss: looked at when it should be, and no other for having been looked at."""

from __future__ import annotations

import pytest
import torch

from unitrain.backends.local import LocalBackend
from unitrain.errors import NonFiniteLossError
from unitrain.metrics.running_loss import RunningLoss

LOCAL = LocalBackend(torch.device("cpu"))


def look(loss: RunningLoss, epoch: int, step: int) -> float:
    return loss.look([loss.here()], epoch, step)


def collected(looks: list[int]) -> tuple[list[float], float]:
    """Return what is seen at steps `looks`, and in the end, of ten steps over 3 samples each."""
    loss = RunningLoss(LOCAL)
    seen = []
    for step in range(1, 11):
        loss.add(torch.tensor(step / 3), 3)
        if step in looks:
            seen.append(look(loss, 1, step))
    return seen, loss.finish(1, 10)


def test_a_look_is_the_mean_since_the_last_one() -> None:
    seen, whole = collected([2, 10])
    assert seen == pytest.approx([1.5 / 3, 6.5 / 3], rel=1e-6)
    assert whole == pytest.approx(5.5 / 3, rel=1e-6)


def test_the_mean_of_an_epoch_does_not_depend_on_when_it_was_looked_at() -> None:
    assert len({collected(looks)[1] for looks in ([], [1], [3, 4, 9], list(range(1, 11)))}) == 1


def test_finishing_starts_again() -> None:
    loss = RunningLoss(LOCAL)
    loss.add(torch.tensor(5.0), 2)
    assert loss.finish(1, 1) == 5.0
    loss.add(torch.tensor(7.0), 1)
    assert look(loss, 2, 2) == 7.0
    assert loss.finish(2, 2) == 7.0


def test_a_loss_that_is_not_finite_is_told_when_looked_at_and_at_the_end() -> None:
    loss = RunningLoss(LOCAL)
    loss.add(torch.tensor(float("inf")), 1)
    with pytest.raises(NonFiniteLossError, match=r"^The mean loss became inf in epoch 3, by step 7\. Lower the learn"):
        look(loss, 3, 7)
    with pytest.raises(NonFiniteLossError, match=r"by step 8\."):
        loss.finish(3, 8)


def test_a_look_is_over_all_ranks() -> None:
    loss = RunningLoss(LOCAL)
    loss.add(torch.tensor(1.0), 3)
    assert loss.look([loss.here(), [5.0, 1.0]], 1, 1) == 8 / 4
