"""The batches that a process is computing with, and the properties of a batch on which layers and models depend."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from unitrain.errors import ModelError


@dataclass(frozen=True)
class LogicalRank:
    """Logical rank `index` of `count`, whose micro-batch this process computes."""

    index: int
    count: int


@dataclass(frozen=True, eq=False)
class CurrentBatch:
    """A batch that a loader has yielded and not replaced yet, or the micro-batch that the Trainer computes.

    `is_dummy` states whether this rank has no samples, so that the batch only lets the rank take part in the step.
    """

    is_dummy: bool = False
    logical_rank: LogicalRank | None = None
    batch: Any = None


class CurrentBatches:
    """The current batches of all loaders that are iterated over with one communicator.

    Several loaders can be iterated over at the same time, so a layer asks for the batch of the inputs of its model.
    """

    def __init__(self) -> None:
        # Not thread-local: with activation checkpointing on a GPU, autograd's threads compute forward passes.
        self.entered: tuple[CurrentBatch, ...] = ()

    @contextmanager
    def enter(self, batch: CurrentBatch) -> Iterator[None]:
        """Context manager in which `batch` is a current batch."""
        self.entered += (batch,)
        try:
            yield
        finally:
            self.entered = tuple(other for other in self.entered if other is not batch)

    def find(self, inputs: Any = None) -> CurrentBatch | None:
        """Return the current batch to which the inputs of a model belong, or None if no batch is current.

        If the current batches have different properties, the inputs belong to the batch with which they share memory.
        Raises ModelError if there is no such batch, or several with different properties.
        """
        first, *others = self.entered or (None,)
        if first is None or all(_have_equal_properties(first, other) for other in others):
            return first
        storages = _storages(inputs)
        owners = [batch for batch in self.entered if storages & _storages(batch.batch)]
        if owners and all(_have_equal_properties(owners[0], other) for other in owners):
            return owners[0]
        found = f"several batches, {_describe(owners)}" if owners else "none of them"
        raise ModelError(
            f"Several loaders are iterated over at the same time. Their current batches are {_describe(self.entered)}, "
            f"and the inputs of the model share memory with {found}, so it is unknown which samples count. Call the "
            "whole model with the tensors of one batch, without changing them before: transform the samples in the "
            "dataset or in the model. Or use ShardedLoader(..., drop_last=True), so that no rank has a dummy batch."
        )


def _have_equal_properties(one: CurrentBatch | None, other: CurrentBatch | None) -> bool:
    assert one is not None
    assert other is not None
    return one.is_dummy == other.is_dummy and one.logical_rank == other.logical_rank


def _storages(value: Any) -> set[int]:
    """Return the addresses of the memory of the tensors in `value`: a tensor, or a container or other object."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()} - {0}  # empty tensors have no memory
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, list | tuple | set):
        parts = list(value)
    else:
        parts = [] if isinstance(value, nn.Module | type) else list(getattr(value, "__dict__", {}).values())
    return set().union(*map(_storages, parts))


def _describe(batches: Iterable[CurrentBatch]) -> str:
    return ", ".join(
        ("a dummy batch" if batch.is_dummy else "samples")
        + ("" if batch.logical_rank is None else f" of logical rank {batch.logical_rank.index}")
        for batch in batches
    )
