"""This rank's exact share of a dataset: every sample once, in an order that depends on nothing but seed and epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice, tee
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import DataLoader

from unitrain.backends.base import Communicator, together
from unitrain.data.batching import derive_batching
from unitrain.data.loading import Data, Source
from unitrain.data.order import Slice, epoch_order, training_slices
from unitrain.errors import DataError
from unitrain.randomness import Stream, derive_seed

# How many micro-steps are planned at a time.
_PLANNED = 256


class TrainingShare:
    """This rank's part of the training data, epoch after epoch. All ranks make it together.

    Raises, on all ranks, DataError for data that is empty, too small to give every rank a sample, not the same size
    everywhere, or without indices to share out, and where the ranks would not cut it up alike; ConfigError for a
    missing or contradicting batch size.
    """

    def __init__(
        self,
        data: Data,
        communicator: Communicator,
        *,
        batch_size: int | None = None,
        accumulate: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
    ) -> None:
        self._rank, self._size = communicator.rank, communicator.size
        loader_size = data.batch_size if isinstance(data, DataLoader) else None
        batching = together(
            communicator,
            lambda: derive_batching(
                communicator.size, batch_size=loader_size or batch_size, accumulate=accumulate, whole=global_batch_size
            ),
        )
        self._seed, self._accumulate = seed, batching.accumulate
        size = batch_size if isinstance(data, DataLoader) else batching.batch_size
        self._source = source = _open(data, communicator, size, shuffle, num_workers, "batch_size")
        self.batch_size = source.batch_size
        # What decides which samples a rank takes: where it differs, ranks would take the same ones, or wait for ever.
        alike = {"batch_size": source.batch_size, "shuffle": source.shuffle, "drop_last": source.drop_last}
        alike |= {"accumulate": self._accumulate, "seed": seed}
        _check_alike("The training data", communicator, source.length, alike)
        self.global_batch_size = self._size * self._source.batch_size * self._accumulate
        length = self._source.length
        if length < self._size:
            raise DataError(
                f"The training data has {length} samples, fewer than the {self._size} ranks that share them. "
                f"Start at most {length} ranks, or give more data."
            )
        # drop_last is the user's wish to train on whole batches only, which are the global ones here.
        self.samples_per_epoch = length - length % self.global_batch_size if self._source.drop_last else length
        if self.samples_per_epoch == 0:
            raise DataError(
                f"The training data has {length} samples, fewer than one global batch of {self.global_batch_size} "
                f"({self._size} ranks x batch_size {self._source.batch_size} x accumulate {self._accumulate}), and "
                "the DataLoader drops the rest. Use drop_last=False, or a smaller batch_size."
            )

    @property
    def order(self) -> dict[str, Any]:
        """What decides, beside the seed, which sample is at a position of an epoch."""
        return {"length": self._source.length, "shuffle": self._source.shuffle}

    @property
    def fetches_apart(self) -> bool:
        """Whether a batch may be fetched before it is asked for: nothing else would change."""
        return self._source.fetches_apart

    def steps_in_epoch(self, start: int = 0) -> int:
        """Return the number of optimizer steps from position `start` to the end of an epoch, 0 past it."""
        return max(0, -(-(self.samples_per_epoch - start) // self.global_batch_size))

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Slice]]:
        """Yield (batch, its slice) for each of this rank's micro-steps in one epoch, from position `start` on."""
        order = epoch_order(self._source.length, seed=self._seed, epoch=epoch, shuffle=self._source.shuffle)
        worker_seed = derive_seed(self._seed, Stream.WORKERS, epoch, self._rank)
        planned = training_slices(
            start,
            self.samples_per_epoch,
            batch_size=self._source.batch_size,
            accumulate=self._accumulate,
            rank=self._rank,
            size=self._size,
        )
        # A few hundred are planned at a time: one by one, each would take several times as long, because the steps in
        # between fill the caches. Workers fetch batches ahead of the loop, so positions and slices are read apart.
        slices, ahead = tee(chain.from_iterable(iter(lambda: list(islice(planned, _PLANNED)), [])))
        batches = self._source.batches(order, map(itemgetter(0), ahead), worker_seed)
        return zip(batches, slices, strict=True)


class EvaluationShare:
    """This rank's part of data that is evaluated, in its own order; empty on some ranks when there are few samples.

    All ranks make it together; iterating communicates nothing. `drop_last` of a DataLoader is not applied: every sample
    counts. Raises DataError, on all ranks, for data that is empty, not the same size everywhere, or without indices.
    """

    def __init__(
        self, data: Data, communicator: Communicator, *, batch_size: int | None = None, num_workers: int = 0
    ) -> None:
        self._source = _open(data, communicator, batch_size, False, num_workers, "eval_batch_size")
        _check_alike("The evaluation data", communicator, self._source.length, {})
        length, rank, size = self._source.length, communicator.rank, communicator.size
        self._first, self._last = rank * length // size, (rank + 1) * length // size

    @property
    def fetches_apart(self) -> bool:
        """Whether a batch may be fetched before it is asked for: nothing else would change."""
        return self._source.fetches_apart

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        """Yield (batch, number of samples in it)."""
        step = self._source.batch_size
        parts = [slice(first, min(first + step, self._last)) for first in range(self._first, self._last, step)]
        batches = self._source.batches(torch.arange(self._source.length), iter(parts), worker_seed=0)
        for part, batch in zip(parts, batches, strict=True):
            yield batch, part.stop - part.start


def _open(
    data: Data, communicator: Communicator, batch_size: int | None, shuffle: bool, num_workers: int, setting: str
) -> Source:
    return together(
        communicator,
        lambda: Source(
            data,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=num_workers,
            pin_memory=communicator.device.type == "cuda",
            setting=setting,
        ),
    )


def _check_alike(what: str, communicator: Communicator, length: int, settings: dict[str, Any]) -> None:
    everywhere: list[tuple[int, dict[str, Any]]] = communicator.allgather_object((length, settings))
    lengths = [length for length, _ in everywhere]
    if len(set(lengths)) > 1:
        raise DataError(
            f"{what} has not the same number of samples on every rank: {lengths}. "
            "Give every rank the whole dataset; it is shared out here."
        )
    for name, value in everywhere[0][1].items():
        values = [found[name] for _, found in everywhere]
        if any(other != value for other in values):
            raise DataError(
                f"{what} differs between ranks in {name}: {values}. Use {name}={value} on every rank, in the "
                "DataLoader if there is one."
            )
    if length == 0:
        raise DataError(f"{what} is empty. Give a dataset with at least one sample.")
