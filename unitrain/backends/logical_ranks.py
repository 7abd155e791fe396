"""Assignment of logical ranks to processes.

A run with `logical_ranks=V` is divided into V logical ranks, which 1 to V processes compute. Each process computes the
micro-batches of a contiguous range of logical ranks, one logical rank after the other or, with synchronized BatchNorm,
in turns: each logical rank then runs until its next synchronized layer.
"""

from __future__ import annotations

from typing import Any

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


TRAINER_REQUIRED_MESSAGE = (
    "Only the Trainer supports sync_batch_norm with logical_ranks, because in your own loop, a process runs its "
    "logical ranks one after the other. Use unitrain.Trainer(..., config=TrainConfig(logical_ranks=..., "
    "sync_batch_norm=True)), or leave sync_batch_norm out: BatchNorm then normalizes over the samples of one logical "
    "rank."
)


def check_no_logical_rank(communicator: Communicator) -> None:
    """Raise ModelError if the current batches of `communicator` belong to logical ranks.

    This function is called before the optimizer step of a model without logical ranks.
    """
    ranks = [batch.logical_rank for batch in communicator.current_batches.entered]
    if ranks and (first := ranks[0]) is not None and None not in ranks:
        raise ModelError(
            f"The batches come from a ShardedLoader with logical_ranks={first.count}, but the model was distributed "
            "without them, so its gradients are not the mean over logical ranks. Use "
            f"backend.distributed_model(model, logical_ranks={first.count})."
        )
