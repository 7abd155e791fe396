"""Mean training loss over ranks, since the last periodic synchronization (for the display and NaN checks) and over an
epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.errors import ModelError, NonFiniteLossError
from unitrain.metrics.exact_sums import sum_exactly
from unitrain.metrics.means import create_means, detached_copy

# Maximum relative difference between sums of the same losses in different orders.
_MAX_ROUNDING_ERROR = 1e-9


class RunningLoss:
    """Accumulates the micro-batch losses of an epoch. All ranks must make the same calls, which return the same means
    on every rank.

    The mean over an epoch depends neither on calls of `pop_mean_since_sync` nor on interruptions, because checkpoints
    contain the sums. `steps` is the number of steps since `start_epoch`, including those before an interruption.

    With `exact`, sums are exact, so that with logical ranks, the means are bit-identical for any number of processes.
    """

    def __init__(self, communicator: Communicator, *, exact: bool = False) -> None:
        self._communicator, self._exact = communicator, exact
        self._means = create_means(("loss",), communicator.device, exact=exact)
        # Losses of the current step; discarded if an exception interrupts the step.
        self._step_losses: list[tuple[Tensor, int, Tensor | float | None]] = []
        self._synced_totals: tuple[float, float] = (0.0, 0.0)
        self._totals: tuple[float, float] = (0.0, 0.0)
        self.steps = 0
        # The number of samples or tokens in the next mean that were added before the run was resumed.
        self._restored_count = 0.0
        self.count_since_sync = 0.0
        """The number of samples or tokens of all ranks in the mean that `pop_mean_since_sync` returned last, excluding
        those that were added before the run was resumed from a checkpoint."""

    def add(self, loss: Tensor, samples: int, tokens: Tensor | float | None = None) -> None:
        """Record the loss of one micro-batch: the mean over `samples` or, with `tokens`, the sum over `tokens` tokens.

        `finish_step` includes the loss in the means. This method does not synchronize with the device.
        """
        tokens = detached_copy(tokens) if isinstance(tokens, Tensor) else tokens
        self._step_losses.append((detached_copy(loss), samples, tokens))

    def finish_step(self) -> None:
        """Include the micro-batches of the completed step in the means."""
        for loss, samples, tokens in self._step_losses:
            self._means.add_loss(loss, samples, tokens, is_owned=True)
        self._step_losses.clear()
        self.steps += 1

    def discard_step(self) -> None:
        """Discard the micro-batches of an interrupted step."""
        self._step_losses.clear()

    def local_sums(self) -> list[float]:
        """Return this rank's sum (as one or several addends) followed by its number of samples or tokens, for
        `pop_mean_since_sync`. Synchronizes with the device."""
        return self._means.local_sums().tolist()

    def pop_mean_since_sync(self, sums_by_rank: Sequence[Sequence[float]], epoch: int, step: int) -> float:
        """Return the mean since the previous call, given the `local_sums` of every rank. The mean over no tokens is 0.

        Raises, on every rank, NonFiniteLossError if the mean is not finite, and ModelError if the number of tokens is
        negative, or is 0 although the sum is not.
        """
        total, count = _sum_over_ranks(sums_by_rank)
        total_since_sync, count_since_sync = total - self._synced_totals[0], count - self._synced_totals[1]
        self.count_since_sync, self._restored_count = count_since_sync - self._restored_count, 0.0
        if not count_since_sync and abs(total_since_sync) <= _MAX_ROUNDING_ERROR * abs(total):
            total_since_sync = 0.0  # a resumed run may add up the same losses in another order
        mean = _compute_mean(total_since_sync, count_since_sync)
        if not math.isfinite(mean):
            raise _non_finite_error(mean, epoch, step, sums_by_rank)
        self._synced_totals = (total, count)
        return mean

    def reduce_epoch_mean(self, epoch: int, step: int) -> float:
        """Return the mean over the epoch so far. All ranks must call this method. Raises the same errors as
        `pop_mean_since_sync`."""
        local_sums = self.local_sums()
        (total,), count = self._means.reduce_totals(self._communicator)
        self._totals = (total, count)
        mean = _compute_mean(total, count)
        if not math.isfinite(mean):
            raise _non_finite_error(mean, epoch, step, self._communicator.allgather_object(local_sums))
        return mean

    def start_epoch(self) -> None:
        """Start an epoch. Call it after `reduce_epoch_mean` of the preceding epoch."""
        total, count = (synced - of_epoch for synced, of_epoch in zip(self._synced_totals, self._totals, strict=True))
        # The next `pop_mean_since_sync` also includes the last epoch's steps after its last synchronization. Without
        # such steps, the difference of the totals, which are rounded differently, is not exactly 0.
        self._synced_totals, self._totals = (total if count else 0.0, count), (0.0, 0.0)
        self._means.clear()
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the sums of every rank. All ranks must call this method."""
        ranks = self._communicator.allgather_object(self._means.state())
        return {"steps": self.steps, "seen": list(self._synced_totals), "ranks": ranks}

    def check_finite(self, state: dict[str, Any], epoch: int, step: int) -> None:
        """Raise NonFiniteLossError if `state`, a result of `state_dict`, contains a sum that is not finite. Does not
        communicate, and has the same result on every rank."""
        if _is_finite(state["ranks"]):
            return
        sums_by_rank = []
        for rank_state in state["ranks"]:
            means = create_means(("loss",), torch.device("cpu"), exact=self._exact)
            means.load_state(rank_state)
            sums_by_rank.append(means.local_sums().tolist())
        mean = _compute_mean(*_sum_over_ranks(sums_by_rank))
        if not math.isfinite(mean):
            raise _non_finite_error(mean, epoch, step, sums_by_rank)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint. With the same number of ranks, each rank restores its sums; otherwise rank 0 restores
        the total. All ranks must call this method."""
        if not state:  # the checkpoint is converted, or from an earlier version of unitrain
            return
        total, count = state["seen"]
        self.steps, self._synced_totals = state["steps"], (total, count)
        ranks, rank = state["ranks"], self._communicator.rank
        if len(ranks) == self._communicator.size:
            self._means.load_state(ranks[rank])
        elif rank == 0:
            self._means.load_sum(ranks)
        _, restored_count = _sum_over_ranks(self._communicator.allgather_object(self.local_sums()))
        self._restored_count = restored_count - count


def _is_finite(value: Any) -> bool:
    """Return whether all floating-point numbers in a state are finite."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    if isinstance(value, Tensor):
        return bool(value.isfinite().all())
    return not isinstance(value, float) or math.isfinite(value)


def _sum_over_ranks(sums_by_rank: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the sum and the number of samples or tokens over all ranks, given the `local_sums` of every rank."""
    return sum_exactly(part for row in sums_by_rank for part in row[:-1]), sum(row[-1] for row in sums_by_rank)


def _compute_mean(total: float, count: float) -> float:
    if count < 0 or (count == 0 and total != 0):
        # Counts on a GPU are not checked per batch, which would synchronize with the device.
        raise ModelError(
            f"The losses add up to {total:g}, but the numbers of tokens that loss_fn returned add up to {count:g}. "
            "Let loss_fn return the mean over the batch, loss.mean(), or a pair (loss.sum(), number of tokens)."
        )
    return total / count if count else 0.0  # there were no tokens


def _non_finite_error(
    mean: float, epoch: int, step: int, sums_by_rank: Sequence[Sequence[float]]
) -> NonFiniteLossError:
    """Return the error, which names the ranks with a non-finite sum, given the `local_sums` of every rank."""
    failed_ranks = [rank for rank, row in enumerate(sums_by_rank) if not all(map(math.isfinite, row[:-1]))]
    where = ""
    if failed_ranks and len(sums_by_rank) > 1:  # the sum of finite values can be infinite
        ranks_text = f"rank{'s' if len(failed_ranks) > 1 else ''} {', '.join(map(str, failed_ranks))}"
        where = " on every rank" if len(failed_ranks) == len(sums_by_rank) else f" on {ranks_text}"
    return NonFiniteLossError(
        f"The mean loss became {mean}{where} in epoch {epoch}, by step {step}. "
        "Lower the learning rate, or clip the gradients with TrainConfig(max_grad_norm=1.0)."
    )
