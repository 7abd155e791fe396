"""Forward passes of models with sharded parameters, which all ranks must run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks


class _BatchInfo(Protocol):
    @property
    def samples(self) -> int: ...


InfoT = TypeVar("InfoT", bound=_BatchInfo)
# References to the functions are weak, because they hold the models.
_functions: WeakKeyDictionary[nn.Module, WeakMethod[Callable[[], None]]] = WeakKeyDictionary()


def register_forward_without_batch(model: nn.Module, method: Callable[[], None]) -> None:
    """Register a bound method that takes part in a forward pass of `model` that other ranks run with a batch."""
    _functions[model] = WeakMethod(method)


def forward_without_batch(model: nn.Module) -> Callable[[], None] | None:
    """Return a function that takes part in a forward pass without gradients that other ranks run with a batch, or None
    if the parameters of `model` are not sharded.
    """
    reference = _functions.get(model)
    return None if reference is None else reference()


def align_forward_passes(
    model: nn.Module, batches: Iterable[tuple[Any, InfoT]], communicator: Communicator
) -> Iterable[tuple[Any, InfoT]]:
    """Return an iterable over the (batch, info) pairs in `batches`, whose number may differ between ranks.
    `info.samples` is the number of samples in the batch.

    If the parameters of `model` are sharded, all ranks call this function, and run one forward pass without gradients
    for each batch with samples. If a rank has no such batch when others have one, the iterable makes it take part in
    their forward pass. A UnitrainError from `batches` is raised on all ranks.
    """
    take_part = forward_without_batch(model)
    return batches if take_part is None else _aligned(take_part, batches, communicator)


def _aligned(
    take_part: Callable[[], None], batches: Iterable[tuple[Any, InfoT]], communicator: Communicator
) -> Iterator[tuple[Any, InfoT]]:
    iterator = iter(batches)
    while True:
        fetched = call_on_all_ranks(communicator, lambda: next(iterator, None))
        computes = fetched is not None and fetched[1].samples > 0
        flags = communicator.allreduce(torch.tensor([fetched is not None, computes], dtype=torch.uint8), "max")
        some_rank_has_batch, some_rank_computes = flags.tolist()
        if not some_rank_has_batch:
            return
        if some_rank_computes and not computes:
            take_part()
        if fetched is not None:
            yield fetched
