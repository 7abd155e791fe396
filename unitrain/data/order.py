"""Order of an epoch's samples and its division into micro-batches, as functions of seed, epoch and position."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.current_batches import CurrentBatch, LogicalRank
from unitrain.config import Uneven
from unitrain.data.stream_state import StreamState
from unitrain.randomness import seed_micro_batch

StrideUnit = Literal["samples", "batches"]


class MicroBatch(NamedTuple):
    """The samples of one rank in one micro-batch.

    `positions` are indices into the order of the epoch. `samples` is the number of samples, 0 for a dummy batch.
    `step_samples` is the number of samples of all ranks in the optimizer step of this micro-batch; the step ends before
    position `step_end`. `ends_step` is True for the last micro-batch of this process in the step.

    With logical ranks, `logical_rank` is the logical rank to which the micro-batch belongs, and `index_in_step` is the
    index of the micro-batch among those of this logical rank in the step.

    `data_state` of the last micro-batch of a step is the state of a stateful dataset after the step.
    """

    positions: slice
    samples: int
    step_samples: int
    step_end: int
    ends_step: bool
    logical_rank: int | None = None
    index_in_step: int = 0
    data_state: StreamState | None = None


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """Return the order of the samples of all ranks in one epoch, as indices, int64 [length].

    torch's DistributedSampler yields the same order with the same `seed` after `set_epoch(epoch)`, so a script that
    used a DistributedSampler trains on the same batches, except for the samples that DistributedSampler repeats or
    drops at the end of an epoch.
    """
    if not shuffle:
        return torch.arange(length, device="cpu")
    return torch.randperm(length, generator=torch.Generator().manual_seed((seed + epoch) % 2**64), device="cpu")


def micro_batches_of_samples(
    start: int,
    stop: int,
    *,
    batch_size: int,
    gradient_accumulation_steps: int,
    rank: int,
    size: int,
    global_batch_size: int | None = None,
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches over the positions from `start` to `stop` of an epoch's order.

    Each step takes the next size * batch_size * gradient_accumulation_steps positions, or the next `global_batch_size`
    positions if it is set. With the same number of positions per step, steps have the same samples for any number of
    ranks. A step has as few micro-batches as possible, and the same number on every rank. Within a micro-batch, each
    rank takes every size-th position, as with DistributedSampler, so the number of samples differs by at most 1 between
    ranks. If a micro-batch has fewer samples than ranks, the ranks without a sample use a dummy batch.
    """
    samples_per_micro_batch = size * batch_size
    global_batch_size = global_batch_size or samples_per_micro_batch * gradient_accumulation_steps
    for step_start in range(start, stop, global_batch_size):
        total = min(global_batch_size, stop - step_start)
        micro_steps = -(-total // samples_per_micro_batch)
        base, extra = divmod(total, micro_steps * size)
        first = step_start
        for micro_step in range(micro_steps):
            after = first + base * size + min(max(0, extra - micro_step * size), size)
            samples = len(range(first + rank, after, size))
            # A rank without samples must still run the forward and backward pass, because the other ranks wait for its
            # gradients. Its dummy batch is the first sample of the step. Rank 0 also trains on this sample, so the
            # dummy batch cannot introduce an additional NaN.
            positions = slice(first + rank, after, size) if samples else slice(step_start, step_start + 1)
            yield MicroBatch(positions, samples, total, step_start + total, micro_step == micro_steps - 1)
            first = after


def micro_batches_of_batch_sampler(
    bounds: Sequence[int], start: int, *, gradient_accumulation_steps: int, rank: int, size: int, uneven: Uneven
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-batches for the batches of a batch_sampler.

    Batch i contains the positions bounds[i] to bounds[i + 1] - 1. Batches are assigned to ranks round-robin, starting
    at position `start`. `uneven` determines how a last step with fewer than size * gradient_accumulation_steps batches
    is handled, as in TrainConfig.
    """
    count = len(bounds) - 1
    batches_per_step = size * gradient_accumulation_steps
    for first in range(bisect_left(bounds, start), count, batches_per_step):
        after = min(first + batches_per_step, count)
        if uneven == "drop" and after < first + batches_per_step:
            return
        micro_steps = -(-(after - first) // size)
        padding = range(count, first + micro_steps * size) if uneven == "pad" else range(0)
        padding_samples = sum(_batch_length(bounds, batch_index % count) for batch_index in padding)
        total = bounds[after] - bounds[first] + padding_samples
        for micro_step in range(micro_steps):
            batch_index = first + micro_step * size + rank
            if batch_index < count or uneven == "pad":
                positions = slice(bounds[batch_index % count], bounds[batch_index % count + 1])
                samples = positions.stop - positions.start
            else:
                positions, samples = slice(bounds[first], bounds[first] + 1), 0
            yield MicroBatch(positions, samples, total, bounds[after], micro_step == micro_steps - 1)


@contextmanager
def current_micro_batch(
    communicator: Communicator, batch: Any, micro_batch: MicroBatch, *, seed: int, epoch: int, logical_ranks: int | None
) -> Iterator[None]:
    """Context manager for the forward and backward pass of `batch`, which is then one of the current batches.

    With logical ranks, also seed the random numbers of its logical rank. `seed` is the seed of the run.
    """
    logical_rank = None
    if logical_ranks is not None and micro_batch.logical_rank is not None:
        logical_rank = LogicalRank(micro_batch.logical_rank, logical_ranks)
        seed_micro_batch(seed, epoch, micro_batch.step_end, micro_batch.logical_rank, micro_batch.index_in_step)
    current = CurrentBatch(not micro_batch.samples, logical_rank, batch)
    with communicator.current_batches.enter(current):
        yield


def merge_logical_ranks(
    logical_ranks: Sequence[int], micro_batches: Sequence[Iterator[MicroBatch]]
) -> Iterator[MicroBatch]:
    """Yield the `micro_batches` of several logical ranks step by step, ordered by logical rank within each step."""
    while True:
        for logical_rank, own_micro_batches in zip(logical_ranks, micro_batches, strict=True):
            for index, micro_batch in enumerate(own_micro_batches):
                ends_step = micro_batch.ends_step and logical_rank == logical_ranks[-1]
                yield micro_batch._replace(ends_step=ends_step, logical_rank=logical_rank, index_in_step=index)
                if micro_batch.ends_step:
                    break
            else:
                return  # the epoch has ended


def interleave_logical_ranks(
    logical_ranks: Sequence[int], micro_batches: Sequence[Iterator[MicroBatch]]
) -> Iterator[MicroBatch]:
    """Yield the `micro_batches` of several logical ranks: the first one of each, then the second one of each, and so
    on."""
    index = 0
    for together in zip(*micro_batches, strict=True):
        for logical_rank, micro_batch in zip(logical_ranks, together, strict=True):
            ends_step = micro_batch.ends_step and logical_rank == logical_ranks[-1]
            yield micro_batch._replace(ends_step=ends_step, logical_rank=logical_rank, index_in_step=index)
        index = 0 if ends_step else index + 1


def _batch_length(bounds: Sequence[int], batch_index: int) -> int:
    return bounds[batch_index + 1] - bounds[batch_index]


def strided_order(lengths: Sequence[Tensor]) -> Tensor:
    """Return the indices that restore the data order of rows that were assigned to ranks round-robin, int64 [rows].

    `lengths` has one int64 tensor per rank: the numbers of rows that the rank received in each round. The indices refer
    to the rows in rank order: all rows of rank 0, then all rows of rank 1, and so on.
    """
    size = len(lengths)
    # The rows are sorted by round, and within a round by rank.
    keys = [
        (torch.arange(len(own), device="cpu") * size + rank).repeat_interleave(own) for rank, own in enumerate(lengths)
    ]
    return torch.cat(keys).argsort(stable=True)
