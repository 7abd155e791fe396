"""The order of an epoch and how it is cut up: pure functions of seed, epoch and position."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from unitrain.config import Uneven

StrideUnit = Literal["samples", "batches"]


class MicroBatch(NamedTuple):
    """What one rank takes in one micro-step: these `positions` of the epoch's order.

    `samples` is how many of them count: all, or 0 for a rank that has no share and only stands in. `step_samples`
    counts those of all ranks and micro-steps of the same optimizer step, which ends before position `step_end`.
    """

    positions: slice
    samples: int
    step_samples: int
    step_end: int
    ends_step: bool


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """Return the indices of one epoch over all ranks, int64 [length]: a pure function of its arguments.

    The order is that of torch's DistributedSampler with the same `seed`, after `set_epoch(epoch)`, so that a port of a
    script that uses it trains on the same batches.
    """
    if not shuffle:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed((seed + epoch) % 2**64))


def micro_batches_of_samples(
    start: int, end: int, *, batch_size: int, accumulate: int, rank: int, size: int, whole: int | None = None
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-steps over the positions from `start` to `end` of an epoch's order.

    Each step takes the next size * batch_size * accumulate positions, or `whole` of them where it is fewer, so the
    samples of a step depend on this and not on the number of ranks. They are taken in as few micro-steps as hold them,
    as those that are left to the last step are. The positions of a micro-step go to the ranks in turn, as with torch's
    DistributedSampler, so no rank has more than one sample more than another; a rank gets none in a micro-step only
    when there are too few for every rank to have one. All ranks have the same number of micro-steps.
    """
    per_micro_step = size * batch_size
    whole = whole or per_micro_step * accumulate
    for block in range(start, end, whole):
        total = min(whole, end - block)
        micro_steps = -(-total // per_micro_step)
        base, extra = divmod(total, micro_steps * size)
        first = block
        for micro_step in range(micro_steps):
            after = first + base * size + min(max(0, extra - micro_step * size), size)
            samples = len(range(first + rank, after, size))
            # A rank without samples must still run forward and backward, or the others would wait for its gradients.
            # It borrows the step's first sample, which rank 0 trains on anyway, so it brings in no nan of its own.
            positions = slice(first + rank, after, size) if samples else slice(block, block + 1)
            yield MicroBatch(positions, samples, total, block + total, micro_step == micro_steps - 1)
            first = after


def micro_batches_of_sampler(
    bounds: Sequence[int], start: int, *, accumulate: int, rank: int, size: int, uneven: Uneven
) -> Iterator[MicroBatch]:
    """Yield this rank's micro-steps over batches that are whole: batch i has the positions bounds[i] to bounds[i + 1].

    In each micro-step every rank takes the next batch, from position `start` on, where a batch begins. What becomes of
    the last step, where there are too few for all ranks, is said by `uneven` as in TrainConfig.
    """
    count = len(bounds) - 1
    per_step = size * accumulate
    for first in range(bisect_left(bounds, start), count, per_step):
        after = min(first + per_step, count)
        if uneven == "drop" and after < first + per_step:
            return
        micro_steps = -(-(after - first) // size)
        padding = range(count, first + micro_steps * size) if uneven == "pad" else range(0)
        total = bounds[after] - bounds[first] + sum(_length_of(bounds, batch % count) for batch in padding)
        for micro_step in range(micro_steps):
            batch = first + micro_step * size + rank
            if batch < count or uneven == "pad":
                positions = slice(bounds[batch % count], bounds[batch % count + 1])
                samples = positions.stop - positions.start
            else:
                positions, samples = slice(bounds[first], bounds[first] + 1), 0
            yield MicroBatch(positions, samples, total, bounds[after], micro_step == micro_steps - 1)


def _length_of(bounds: Sequence[int], batch: int) -> int:
    return bounds[batch + 1] - bounds[batch]


def strided_order(lengths: Sequence[Tensor]) -> Tensor:
    """Return where the rows of a dealt order are when those of each rank follow those of the one before, int64 [rows].

    `lengths` has, for each rank, the rows of what it was dealt, int64. Row i of the order is at result[i].
    """
    size = len(lengths)
    turns = [torch.arange(len(own)) * size + rank for rank, own in enumerate(lengths)]
    return torch.cat([turn.repeat_interleave(own) for turn, own in zip(turns, lengths, strict=True)]).argsort(
        stable=True
    )
