"""Forward passes of models with sharded parameters, which all ranks must run together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import ErrorOnAllRanks, call_on_all_ranks


class _BatchInfo(Protocol):
    @property
    def samples(self) -> int: ...


class ForwardParticipant(Protocol):
    """A model with sharded parameters. `has_gather_order` states whether the order in which a forward pass gathers the
    parameters is known."""

    @property
    def has_gather_order(self) -> bool: ...

    def announce_next_forward(self) -> None:
        """Announce the order of the next forward pass, which this rank runs without gradients, to all other ranks."""

    def take_part_in_forward(self, *, is_announced: bool) -> None:
        """Take part in a forward pass without gradients that other ranks run with a batch. `is_announced` states
        whether these ranks announce its order."""


InfoT = TypeVar("InfoT", bound=_BatchInfo)
# References to the participants are weak, because they hold the models.
_participants: WeakKeyDictionary[nn.Module, ref[ForwardParticipant]] = WeakKeyDictionary()


def register_participant(model: nn.Module, participant: ForwardParticipant) -> None:
    """Register the object that takes part in forward passes of `model`, whose parameters are sharded."""
    _participants[model] = ref(participant)


def has_aligned_forward_passes(model: nn.Module) -> bool:
    """Return whether the parameters of `model` are sharded, so that all ranks run its forward passes together."""
    return _participants.get(model) is not None


def align_forward_passes(
    model: nn.Module,
    batches: Iterable[tuple[Any, InfoT]],
    communicator: Communicator,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Iterable[tuple[Any, InfoT]]:
    """Return an iterable over the (batch, info) pairs in `batches`, whose number may differ between ranks.
    `info.samples` is the number of samples in the batch.

    If the parameters of `model` are sharded, all ranks call this function, and run one forward pass without gradients
    for each batch with samples. If a rank has no such batch when others have one, the iterable makes this rank take
    part in their forward pass, and ends on all ranks when `is_interrupted` returns True on any rank. An exception from
    `batches` is raised on all ranks, as an ErrorOnAllRanks, so iterate inside `call_on_all_ranks`.
    """
    reference = _participants.get(model)
    participant = None if reference is None else reference()
    return batches if participant is None else _iterate_aligned(participant, batches, communicator, is_interrupted)


def _iterate_aligned(
    participant: ForwardParticipant,
    batches: Iterable[tuple[Any, InfoT]],
    communicator: Communicator,
    is_interrupted: Callable[[], bool],
) -> Iterator[tuple[Any, InfoT]]:
    iterator = iter(batches)
    while True:
        try:
            fetched = call_on_all_ranks(communicator, lambda: next(iterator, None))
        except Exception as error:  # of the data, or of a rank that has failed after its last batch
            raise ErrorOnAllRanks(error) from error
        computes = fetched is not None and fetched[1].samples > 0
        # Before the first forward pass, a rank without a batch does not know the order of the blocks.
        needs_order = not computes and not participant.has_gather_order
        flags = [fetched is not None, computes, needs_order, is_interrupted()]
        own = torch.tensor(flags, dtype=torch.uint8, device="cpu")
        some_rank_has_batch, some_rank_computes, is_announced, ends = map(
            bool, communicator.allreduce(own, "max").tolist()
        )
        if ends or not some_rank_has_batch:
            return
        if some_rank_computes and not computes:
            participant.take_part_in_forward(is_announced=is_announced)
        elif is_announced and computes:
            participant.announce_next_forward()
        if fetched is not None:
            yield fetched
