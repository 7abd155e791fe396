"""The order of an epoch and how it is cut up: pure functions of seed, epoch and position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from unitrain.randomness import Stream, derive_seed


@dataclass
class Cursor:
    """How far a run has come: whole epochs, optimizer steps, and samples (of all ranks) of the epoch it is in."""

    epoch: int = 0
    step: int = 0
    sample: int = 0


class Slice(NamedTuple):
    """What one rank takes in one micro-step: these `positions` of the epoch's order.

    `samples` is how many of them count: all, or 0 for a rank that has no share and only stands in. `step_samples`
    counts those of all ranks and micro-steps of the same optimizer step, which ends before position `step_end`.
    """

    positions: slice
    samples: int
    step_samples: int
    step_end: int
    closes_step: bool


def epoch_order(length: int, *, seed: int, epoch: int, shuffle: bool) -> Tensor:
    """Return the indices of one epoch over all ranks, int64 [length]: a pure function of its arguments."""
    if not shuffle:
        return torch.arange(length)
    return torch.randperm(length, generator=torch.Generator().manual_seed(derive_seed(seed, Stream.ORDER, epoch)))


def training_slices(start: int, end: int, *, batch_size: int, accumulate: int, rank: int, size: int) -> Iterator[Slice]:
    """Yield this rank's micro-steps over the positions from `start` to `end` of an epoch's order.

    Each step takes the next size * batch_size * accumulate positions, so the samples of a step depend on this product
    and not on the number of ranks. The last step takes what is left, in as few micro-steps as hold it, shared so that
    no rank has more than one sample more than another; a rank gets none in a micro-step only when there are too few for
    every rank to have one. All ranks have the same number of micro-steps.
    """
    per_micro_step = size * batch_size
    for block in range(start, end, per_micro_step * accumulate):
        total = min(per_micro_step * accumulate, end - block)
        micro_steps = -(-total // per_micro_step)
        base, extra = divmod(total, micro_steps * size)
        for share in range(rank, micro_steps * size, size):
            samples = base + (share < extra)
            first = block + share * base + min(share, extra)
            # A rank without samples must still run forward and backward, or the others would wait for its gradients.
            # It borrows the step's first sample, which rank 0 trains on anyway, so it brings in no nan of its own.
            positions = slice(first, first + samples) if samples else slice(block, block + 1)
            yield Slice(positions, samples, total, block + total, share + size >= micro_steps * size)
