"""Custom samplers of a DataLoader: rank 0 draws their order once per epoch, with a seed derived from the run's seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from itertools import accumulate as running_sums
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.data.batch import fingerprint
from unitrain.errors import DataError
from unitrain.randomness import IsolatedGenerators, SeedPurpose, derive_seed

# Maximum number of elements (keys or batches) that a sampler may yield in an epoch. All of them are drawn at once, so
# infinite samplers must be detected.
MAX_DRAWN_KEYS = 50_000_000
# Samplers and generators are found in lists, tuples and mappings of at most this number of items.
_MAX_ITEMS_WITH_SAMPLERS = 1000

ResultT = TypeVar("ResultT")


def find_custom_sampler(loader: DataLoader[Any]) -> Iterable[Any] | None:
    """Return the sampler or batch_sampler that determines the order of `loader`; None for a default sampler.

    If the batch size of `loader` is None, a default sampler is also returned. Raises DataError for a sampler that
    shards the data, such as a DistributedSampler.
    """
    has_batch_sampler = loader.batch_size is None and loader.batch_sampler is not None
    sampler: Iterable[Any] = loader.batch_sampler if has_batch_sampler else loader.sampler  # type: ignore[assignment]
    for part in _nested_samplers(sampler):
        if isinstance(part, DistributedSampler) or hasattr(part, "num_replicas"):
            raise DataError(
                f"{type(part).__name__} shards the data by rank, but unitrain shards every DataLoader itself. "
                "Leave the sampler out: DataLoader(dataset, batch_size=32, shuffle=True)."
            )
    if loader.batch_size is None:
        return sampler
    return None if _is_default(sampler, loader.dataset) else sampler


def _is_default(sampler: Iterable[Any], dataset: Any) -> bool:
    """Return whether `sampler` yields each index of `dataset` once, like the samplers that a DataLoader creates.

    Checking the type is not sufficient: a SequentialSampler or RandomSampler may have been created for a smaller
    dataset.
    """
    if type(sampler) is not SequentialSampler and not is_random_sampler(sampler):
        return False
    source: Any = sampler.data_source  # type: ignore[attr-defined]
    # A DataLoader creates these samplers with its dataset as the source, which may not have a length.
    if source is not dataset and not (hasattr(dataset, "__len__") and len(source) == len(dataset)):
        return False
    if is_random_sampler(sampler):
        return not sampler.replacement and sampler.num_samples == len(source)  # type: ignore[attr-defined]
    return True


def is_random_sampler(sampler: Any) -> bool:
    """Return whether `sampler` is a RandomSampler of torch or of torchdata. The latter has its own class, which its
    StatefulDataLoader creates for shuffle=True."""
    sampler_type = type(sampler)
    is_from_torchdata = (
        sampler_type.__module__.startswith("torchdata.stateful_dataloader.")
        and sampler_type.__name__ == "RandomSampler"
    )
    return sampler_type is RandomSampler or is_from_torchdata


class DrawnOrder(NamedTuple):
    """Order of an epoch (a tensor of indices, or a list of non-integer keys) and the bounds of its batches.

    Batch i contains the positions bounds[i] to bounds[i + 1] - 1. `bounds` is None if the sampler yields single keys
    instead of batches.
    """

    order: Tensor | list[Any]
    bounds: list[int] | None

    def digest(self) -> int:
        """Return a hash of the keys in their order, for any division into batches."""
        return fingerprint(self.order)


def draw_order(
    sampler: Iterable[Any],
    communicator: Communicator,
    select: Callable[[DrawnOrder], ResultT],
    *,
    yields_batches: bool,
    seed: int,
    epoch: int,
) -> ResultT:
    """Return, on every rank, the result of `select` for the order that `sampler` yields on rank 0 in `epoch`. All ranks
    must call this function.

    With `yields_batches`, `sampler` is a batch_sampler. The order depends only on seed and epoch if the sampler uses
    the global generators of torch, numpy or Python, generators in its attributes, or a `set_epoch` method. Raises
    DataError on every rank if the sampler fails, does not end or yields nothing.
    """

    def draw_on_rank_zero() -> ResultT | None:
        return select(_draw_keys(sampler, yields_batches, seed, epoch)) if communicator.rank == 0 else None

    selected: ResultT = communicator.broadcast_object(call_on_all_ranks(communicator, draw_on_rank_zero))
    return selected


def has_fixed_length(sampler: Any) -> bool:
    """Return whether `sampler` yields the same number of elements in every epoch: it and its nested samplers are of
    torch's classes, or it is a sequence."""
    is_sequence = isinstance(sampler, Sequence | Tensor | np.ndarray)
    return is_sequence or all(type(part).__module__ == "torch.utils.data.sampler" for part in _nested_samplers(sampler))


def seed_epoch(source: Iterable[Any], *, seed: int, epoch: int) -> None:
    """Call the `set_epoch` methods of `source` (a dataset or sampler) and of its nested samplers, and seed the random
    number generators in their attributes: those of torch and numpy, and random.Random.

    The first generator, in the order of the attributes and torch's generators first, receives `seed`. Each other one
    receives a seed derived from it, so that the numbers of several generators are independent.
    """
    generators: dict[int, Any] = {}
    for part in _nested_samplers(source):
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)
        generators |= {id(value): value for value in _attributes(part) if isinstance(value, _GENERATOR_TYPES)}
    ordered = sorted(generators.values(), key=lambda generator: not isinstance(generator, torch.Generator))
    for index, generator in enumerate(ordered):
        _seed_generator(generator, derive_seed(seed, SeedPurpose.SAMPLER, index) if index else seed)


_GENERATOR_TYPES = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _seed_generator(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bit_generator: Any = generator.bit_generator
        bit_generator.state = type(bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)  # random.Random accepts any integer, RandomState only 32 bits


def _draw_keys(sampler: Iterable[Any], yields_batches: bool, seed: int, epoch: int) -> DrawnOrder:
    name, epoch_seed = type(sampler).__name__, derive_seed(seed, SeedPurpose.SAMPLER, epoch)
    bounds: list[int] | None = None
    try:
        with IsolatedGenerators(epoch_seed):
            seed_epoch(sampler, seed=epoch_seed, epoch=epoch)
            keys = list(islice(sampler, MAX_DRAWN_KEYS + 1))
        has_ended = len(keys) <= MAX_DRAWN_KEYS
        if yields_batches:
            batches = [list(batch) for batch in keys]
            bounds = [0, *running_sums(len(batch) for batch in batches if batch)]
            keys = list(chain.from_iterable(batches))
    except Exception as error:
        raise DataError(
            f"{name} failed in epoch {epoch + 1}: {type(error).__name__}: {error}. Fix the DataLoader's sampler."
        ) from error
    if not has_ended:
        raise DataError(
            f"{name} has not ended after {MAX_DRAWN_KEYS:,} elements, but all elements of an epoch are drawn at once. "
            "Its __iter__ must end: it is called again in each epoch."
        )
    if not keys:
        raise DataError(
            f"{name} yields nothing in epoch {epoch + 1}. It must yield at least one sample each time it is iterated."
        )
    return DrawnOrder(_to_order(keys), bounds)


def _to_order(keys: list[Any]) -> Tensor | list[Any]:
    if all(isinstance(key, int | np.integer) and -(2**63) <= key < 2**63 for key in keys):
        return torch.tensor(keys, dtype=torch.int64, device="cpu")
    if all(isinstance(key, Tensor) and key.dim() == 0 and not key.is_floating_point() for key in keys):
        return torch.stack(keys).to("cpu", torch.int64)
    return keys


def _nested_samplers(sampler: Any) -> Iterator[Any]:
    """Yield `sampler` and the samplers in its attributes, at any depth, such as `BatchSampler.sampler`. Attributes are
    read after the object that has them was yielded."""
    waiting, seen = [sampler], set()
    while waiting:
        part = waiting.pop(0)
        if id(part) not in seen:
            seen.add(id(part))
            yield part
            waiting += [value for value in _attributes(part) if isinstance(value, Sampler)]


def _attributes(part: Any) -> Iterator[Any]:
    """Yield the values of the attributes of `part`. The items of lists, tuples and mappings are yielded instead of
    them."""
    for value in list(getattr(part, "__dict__", {}).values()):
        items = value.values() if isinstance(value, Mapping) else value
        # A long list contains the data of the sampler.
        if isinstance(items, list | tuple | ValuesView) and len(items) <= _MAX_ITEMS_WITH_SAMPLERS:
            yield from items
        else:
            yield value
