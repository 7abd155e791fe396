"""Assignment of logical ranks to processes, and the logical rank whose micro-batch this process computes.

A run with `logical_ranks=V` is divided into V logical ranks, which 1 to V processes compute. Each process computes the
micro-batches of a contiguous range of logical ranks, one logical rank after the other or, with synchronized BatchNorm,
in turns: each logical rank then runs until its next synchronized layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.errors import ConfigError, ModelError


def local_logical_ranks(logical_ranks: int, rank: int, size: int) -> range:
    """Return the logical ranks of process `rank` of `size` processes. The numbers of logical ranks per process differ
    by at most 1."""
    return range(rank * logical_ranks // size, (rank + 1) * logical_ranks // size)


def check_logical_ranks(argument: str, logical_ranks: Any, communicator: Communicator) -> None:
    """Raise ConfigError unless `logical_ranks` is None or an integer not smaller than the number of processes."""
    validation.check_integer(argument, logical_ranks, 1, "Use logical_ranks=8, or leave it out", optional=True)
    if logical_ranks is not None and logical_ranks < communicator.size:
        raise ConfigError(
            f"{argument} is {logical_ranks}, but {communicator.size} processes were started, and each needs a logical "
            f"rank. Start at most {logical_ranks} processes, or use logical_ranks={communicator.size}."
        )


@dataclass(frozen=True)
class LogicalRank:
    """Logical rank `index` of `count`, and whether its current batch is a dummy batch."""

    index: int
    count: int
    is_dummy: bool = False


class _CurrentLogicalRank:
    """The current logical rank of this process, and the function that sums over all logical ranks."""

    logical_rank: LogicalRank | None = None
    sum_over_logical_ranks: Callable[[Tensor], Tensor] | None = None


def set_current_logical_rank(logical_rank: LogicalRank | None) -> None:
    """Set the logical rank of the next forward and backward passes in this process; None outside of an epoch.

    ShardedLoader and the Trainer set it for each batch. If logical ranks run in turns, it is also set at the start of
    each turn.
    """
    _CurrentLogicalRank.logical_rank = logical_rank


def current_logical_rank() -> LogicalRank | None:
    """Return the logical rank of the current batch of this process, or None outside of an epoch and without logical
    ranks."""
    return _CurrentLogicalRank.logical_rank


@contextmanager
def summing_over_logical_ranks(compute_sum: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context manager in which `sum_over_logical_ranks` calls `compute_sum`."""
    _CurrentLogicalRank.sum_over_logical_ranks = compute_sum
    try:
        yield
    finally:
        _CurrentLogicalRank.sum_over_logical_ranks = None


def sum_over_logical_ranks(tensor: Tensor) -> Tensor:
    """Return the sum of `tensor` over all logical ranks, which must all call it.

    Raises ModelError if the logical ranks of this process do not run in turns.
    """
    if _CurrentLogicalRank.sum_over_logical_ranks is None:
        raise ModelError(
            "A layer that sync_batch_norm has synchronized was called with logical_ranks outside of the Trainer. "
            f"{TRAINER_REQUIRED_MESSAGE}"
        )
    return _CurrentLogicalRank.sum_over_logical_ranks(tensor)


TRAINER_REQUIRED_MESSAGE = (
    "Only the Trainer supports sync_batch_norm with logical_ranks, because in your own loop, a process runs its "
    "logical ranks one after the other. Use unitrain.Trainer(..., config=TrainConfig(logical_ranks=..., "
    "sync_batch_norm=True)), or leave sync_batch_norm out: BatchNorm then normalizes over the samples of one logical "
    "rank."
)


def check_no_logical_rank() -> None:
    """Raise ModelError if the current batch belongs to a logical rank.

    This function is called before the optimizer step of a model without logical ranks.
    """
    if (current := _CurrentLogicalRank.logical_rank) is not None:
        raise ModelError(
            f"The batches come from a ShardedLoader with logical_ranks={current.count}, but the model was distributed "
            "without them, so its gradients are not the mean over logical ranks. Use "
            f"backend.distributed_model(model, logical_ranks={current.count})."
        )
