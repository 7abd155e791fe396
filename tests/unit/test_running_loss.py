"""The running loss: means at sync points and over epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from unitrain.backends.base import ReduceOp
from unitrain.backends.local import LocalBackend
from unitrain.errors import ModelError, NonFiniteLossError
from unitrain.metrics.running_loss import RunningLoss

LOCAL = LocalBackend(torch.device("cpu"))


def pop_sync_mean(loss: RunningLoss, epoch: int, step: int) -> float:
    return loss.pop_mean_since_sync([loss.local_sums()], epoch, step)


def collect_means(sync_steps: list[int]) -> tuple[list[float], float]:
    """Run ten steps of 3 samples; return the means at the sync points after `sync_steps`, and the epoch mean."""
    loss = RunningLoss(LOCAL)
    seen = []
    for step in range(1, 11):
        loss.add(torch.tensor(step / 3), 3)
        loss.finish_step()
        if step in sync_steps:
            seen.append(pop_sync_mean(loss, 1, step))
    return seen, loss.reduce_epoch_mean(1, 10)


def test_mean_since_sync_includes_the_steps_since_the_last_sync_point() -> None:
    seen, epoch_mean = collect_means([2, 10])
    assert seen == pytest.approx([1.5 / 3, 6.5 / 3], rel=1e-6)
    assert epoch_mean == pytest.approx(5.5 / 3, rel=1e-6)


def test_epoch_mean_does_not_depend_on_sync_points() -> None:
    assert len({collect_means(sync_steps)[1] for sync_steps in ([], [1], [3, 4, 9], list(range(1, 11)))}) == 1


def test_start_epoch_resets_the_epoch_mean() -> None:
    loss = RunningLoss(LOCAL)
    loss.add(torch.tensor(5.0), 2)
    loss.finish_step()
    assert (loss.reduce_epoch_mean(1, 1), loss.steps) == (5.0, 1)
    assert pop_sync_mean(loss, 1, 1) == 5.0
    loss.start_epoch()
    assert loss.steps == 0
    loss.add(torch.tensor(7.0), 1)
    loss.finish_step()
    assert pop_sync_mean(loss, 2, 2) == 7.0
    assert loss.reduce_epoch_mean(2, 2) == 7.0


def test_mean_since_sync_includes_the_end_of_the_previous_epoch() -> None:
    loss = RunningLoss(LOCAL)
    for value in (1.0, 2.0):
        loss.add(torch.tensor(value), 1)
        loss.finish_step()
    assert pop_sync_mean(loss, 1, 2) == 1.5
    loss.add(torch.tensor(6.0), 1)
    loss.finish_step()
    assert loss.reduce_epoch_mean(1, 3) == 3.0
    loss.start_epoch()
    loss.add(torch.tensor(8.0), 1)
    loss.finish_step()
    assert pop_sync_mean(loss, 2, 4) == 7.0
    assert loss.reduce_epoch_mean(2, 4) == 8.0


@pytest.mark.parametrize("exact", [False, True])
def test_number_of_tokens_may_be_overwritten_before_the_end_of_the_step(exact: bool) -> None:
    loss, tokens = RunningLoss(LOCAL, exact=exact), torch.tensor(0)
    for count in (1, 3):
        tokens.fill_(count)
        loss.add(torch.tensor(2.0), 1, tokens)
    loss.finish_step()
    assert loss.reduce_epoch_mean(1, 1) == 1.0


def test_unfinished_step_is_not_included_in_the_mean() -> None:
    loss = RunningLoss(LOCAL)
    loss.add(torch.tensor(1.0), 1)
    loss.finish_step()
    loss.add(torch.tensor(9.0), 1)
    loss.discard_step()
    loss.add(torch.tensor(3.0), 1)
    loss.finish_step()
    assert (loss.reduce_epoch_mean(1, 2), loss.steps) == (2.0, 2)


@pytest.mark.parametrize("count", [None, 5])
@pytest.mark.parametrize("resume_step", [0, 1, 99, 100, 130])
def test_mean_of_a_resumed_run_is_bit_identical_to_that_of_an_uninterrupted_run(
    resume_step: int, count: int | None
) -> None:
    values = torch.randn(170, generator=torch.Generator().manual_seed(3))

    def collect(loss: RunningLoss, values: torch.Tensor) -> RunningLoss:
        for index, value in enumerate(values):
            loss.add(value, 3 + index % 2, count)
            loss.finish_step()
        return loss

    resumed = RunningLoss(LOCAL)
    resumed.load_state_dict(collect(RunningLoss(LOCAL), values[:resume_step]).state_dict())
    uninterrupted = collect(RunningLoss(LOCAL), values[:resume_step])
    assert collect(resumed, values[resume_step:]).reduce_epoch_mean(1, 1) == collect(
        uninterrupted, values[resume_step:]
    ).reduce_epoch_mean(1, 1)
    assert resumed.steps == 170


def test_non_finite_loss_raises_at_sync_points_and_at_the_end_of_the_epoch() -> None:
    loss = RunningLoss(LOCAL)
    loss.add(torch.tensor(float("inf")), 1)
    loss.finish_step()
    with pytest.raises(NonFiniteLossError, match=r"^The mean loss became inf in epoch 3, by step 7\. Lower the learn"):
        pop_sync_mean(loss, 3, 7)
    with pytest.raises(NonFiniteLossError, match=r"by step 8\."):
        loss.reduce_epoch_mean(3, 8)


def test_mean_since_sync_is_over_all_ranks() -> None:
    loss = RunningLoss(LOCAL)
    loss.add(torch.tensor(1.0), 3)
    loss.finish_step()
    assert loss.pop_mean_since_sync([loss.local_sums(), [5.0, 1.0]], 1, 1) == 8 / 4


class OneOfThreeRanks(LocalBackend):
    """One of three ranks. Its peers have the sums 0.2 and 0.3 and one token each. Additions are rounded."""

    PEERS = ([0.2, 1.0], [0.3, 1.0])

    def allreduce(self, tensor: torch.Tensor, op: ReduceOp = "mean") -> torch.Tensor:
        return tensor + torch.tensor(self.PEERS[0]).double() + torch.tensor(self.PEERS[1]).double()


def token_loss(communicator: LocalBackend, value: float) -> RunningLoss:
    """Return the running loss after one step with one token."""
    loss = RunningLoss(communicator)
    loss.add(torch.tensor(value, dtype=torch.float64), 1, 1.0)
    loss.finish_step()
    return loss


def test_mean_since_sync_is_zero_after_an_epoch_if_its_first_steps_have_no_tokens() -> None:
    ranks = OneOfThreeRanks(torch.device("cpu"))
    loss = token_loss(ranks, 0.1)
    rows = [loss.local_sums(), *ranks.PEERS]
    assert loss.pop_mean_since_sync(rows, 1, 1) == pytest.approx(0.2)
    assert loss.reduce_epoch_mean(1, 1) != sum_exactly(rows) / 3  # allreduce rounds the sum differently
    loss.start_epoch()
    loss.add(torch.tensor(0.0), 1, 0.0)
    loss.finish_step()
    assert loss.pop_mean_since_sync([loss.local_sums(), [0.0, 0.0], [0.0, 0.0]], 2, 2) == 0.0


def test_mean_since_sync_is_zero_after_a_resume_on_fewer_ranks_if_no_steps_have_run() -> None:
    states = [token_loss(LOCAL, value).state_dict()["ranks"][0] for value in (0.1, 0.2, 0.3)]
    loss = RunningLoss(LOCAL)
    loss.load_state_dict(
        {"steps": 1, "seen": [sum_exactly([[0.1, 1.0], *OneOfThreeRanks.PEERS]), 3.0], "ranks": states}
    )
    assert pop_sync_mean(loss, 1, 1) == 0.0


@pytest.mark.parametrize("saved_ranks", [1, 3])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("is_epoch_end", [False, True])
def test_tokens_before_a_resume_are_not_part_of_the_throughput(
    saved_ranks: int, exact: bool, is_epoch_end: bool
) -> None:
    saved = RunningLoss(LOCAL, exact=exact)

    def step(loss: RunningLoss, value: float, tokens: float) -> None:
        loss.add(torch.tensor(value), 1, tokens)
        loss.finish_step()

    step(saved, 2.0, 10.0)
    pop_sync_mean(saved, 1, 1)
    step(saved, 8.0, 40.0)  # after the last synchronization before the checkpoint
    if is_epoch_end:
        saved.reduce_epoch_mean(1, 2)
        saved.start_epoch()
    state = saved.state_dict()
    other_ranks = [RunningLoss(LOCAL, exact=exact).state_dict()["ranks"][0] for _ in range(saved_ranks - 1)]
    resumed = RunningLoss(LOCAL, exact=exact)
    resumed.load_state_dict({**state, "ranks": [*state["ranks"], *other_ranks]})
    step(resumed, 3.0, 15.0)
    assert pop_sync_mean(resumed, 1, 3) == pytest.approx((8 + 3) / (40 + 15))
    assert resumed.count_since_sync == 15
    step(resumed, 1.0, 4.0)
    pop_sync_mean(resumed, 1, 4)
    assert resumed.count_since_sync == 4


def sum_exactly(rows: Sequence[Sequence[float]]) -> float:
    return math.fsum(row[0] for row in rows)


@pytest.mark.parametrize("count", [0.0, -3.0])
def test_invalid_token_counts_are_rejected(count: float) -> None:
    """The counts are tensors, which the host reads only at sync points."""
    loss = RunningLoss(LOCAL)
    loss.add(torch.tensor(2.0), 1, torch.tensor(count))
    loss.finish_step()
    with pytest.raises(
        ModelError, match=f"The losses add up to 2, but the numbers of tokens .* add up to {count:g}\\."
    ):
        pop_sync_mean(loss, 1, 1)
    with pytest.raises(ModelError, match=r"Let loss_fn return the mean over the batch"):
        loss.reduce_epoch_mean(1, 1)
