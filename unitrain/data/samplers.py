"""Samplers of the user's own: their order is drawn once per epoch, by rank 0, under a seed of the run and the epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate as running_sums
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.errors import DataError
from unitrain.randomness import IsolatedGenerators, Stream, derive_seed

# An order is drawn whole. No sampler that ends is longer, and one that never ends must not be waited for.
_MOST = 50_000_000


def custom_sampler(loader: DataLoader[Any]) -> Iterable[Any] | None:
    """Return what decides the order of `loader` beside shuffling, a sampler or a batch_sampler; None for nothing.

    Raises DataError for a sampler that shares the data out itself.
    """
    sampler: Iterable[Any] = loader.sampler if loader.batch_size is not None else loader.batch_sampler or loader.sampler
    for part in _parts(sampler):
        if isinstance(part, DistributedSampler) or hasattr(part, "num_replicas"):
            raise DataError(
                f"{type(part).__name__} shares the data out over ranks, which is not needed here: every DataLoader is "
                "shared out exactly. Leave it out, and write DataLoader(dataset, batch_size=32, shuffle=True)."
            )
    if loader.batch_size is None:
        return sampler
    return None if _is_default(sampler, loader.dataset) else sampler


def _is_default(sampler: Iterable[Any], dataset: Any) -> bool:
    """Return whether `sampler` yields each index of `dataset` once, as those that a DataLoader makes by itself do.

    The type alone does not tell: either sampler can be made over another data source, which may have fewer samples.
    """
    if type(sampler) not in (SequentialSampler, RandomSampler):
        return False
    source: Any = sampler.data_source  # type: ignore[attr-defined]
    # A DataLoader makes these samplers over its dataset, which for some kinds of data has no length.
    if source is not dataset and not (hasattr(dataset, "__len__") and len(source) == len(dataset)):
        return False
    if isinstance(sampler, RandomSampler):
        return not sampler.replacement and sampler.num_samples == len(source)
    return True


class DrawnOrder(NamedTuple):
    """An epoch's order: a tensor of indices, or a list where they are no integers; and the bounds of its batches.

    Batch i has the positions bounds[i] to bounds[i + 1]; None where it was samples that were drawn.
    """

    order: Tensor | list[Any]
    bounds: list[int] | None


def draw_order(sampler: Iterable[Any], communicator: Communicator, *, whole: bool, seed: int, epoch: int) -> DrawnOrder:
    """Return what `sampler` yields in `epoch`, `whole` batches or samples: rank 0's, on every rank. All ranks call it.

    A function of seed and epoch for samplers that draw from torch's, numpy's or Python's global generators or from a
    torch.Generator that they hold, and for those that go by `set_epoch`. Raises DataError on every rank when the
    sampler fails, does not end or yields nothing.
    """

    def on_rank_zero() -> DrawnOrder | None:
        return _draw(sampler, whole, seed, epoch) if communicator.rank == 0 else None

    drawn: DrawnOrder = communicator.broadcast_object(call_on_all_ranks(communicator, on_rank_zero))
    return drawn


def seed_epoch(items: Iterable[Any], *, seed: int, epoch: int) -> None:
    """Tell `items`, a dataset or sampler, and the samplers it is made of, the epoch; seed the generators they hold."""
    for part in _parts(items):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        for value in getattr(part, "__dict__", {}).values():
            if isinstance(value, torch.Generator):
                value.manual_seed(seed)


def _draw(sampler: Iterable[Any], whole: bool, seed: int, epoch: int) -> DrawnOrder:
    name, own_seed = type(sampler).__name__, derive_seed(seed, Stream.SAMPLER, epoch)
    bounds: list[int] | None = None
    try:
        with IsolatedGenerators(own_seed):
            seed_epoch(sampler, seed=own_seed, epoch=epoch)
            keys = list(islice(sampler, _MOST + 1))
        ended = len(keys) <= _MOST
        if whole:
            batches = [list(batch) for batch in keys]
            bounds = [0, *running_sums(len(batch) for batch in batches if batch)]
            keys = list(chain.from_iterable(batches))
    except Exception as error:
        raise DataError(
            f"{name} failed in epoch {epoch + 1}: {type(error).__name__}: {error}. Mend the DataLoader's sampler."
        ) from error
    if not ended:
        raise DataError(
            f"{name} has not ended after {_MOST:,} elements, and the order of an epoch is drawn whole. "
            "Let its __iter__ end: it is iterated again in each epoch."
        )
    if not keys:
        raise DataError(
            f"{name} yields nothing in epoch {epoch + 1}. Let it yield at least one sample each time it is iterated."
        )
    return DrawnOrder(_as_order(keys), bounds)


def _as_order(keys: list[Any]) -> Tensor | list[Any]:
    if all(isinstance(key, int | np.integer) for key in keys):
        return torch.tensor(keys, dtype=torch.int64)
    if all(isinstance(key, Tensor) and key.dim() == 0 and not key.is_floating_point() for key in keys):
        return torch.stack(keys).to(torch.int64)
    return keys


def _parts(sampler: Any) -> Iterator[Any]:
    """Yield `sampler` and the samplers that it holds, as a BatchSampler does."""
    waiting, seen = [sampler], set()
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += [value for value in getattr(part, "__dict__", {}).values() if isinstance(value, Sampler)]
