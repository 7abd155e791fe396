"""The format of the state dicts of sharded models and optimizers: complete tensors, or shards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.torch_compat import local_part

_keeps_shards = False
_root: int | None = None


@contextmanager
def state_dicts_on_rank(root: int) -> Iterator[None]:
    """Context manager in which state dicts of sharded models and optimizers are complete on `root` only.

    They contain CPU tensors there, and None instead of sharded tensors on the other ranks. The ranks gather one tensor
    at a time, so only `root` needs memory for the complete state.
    """
    global _root
    before, _root = _root, root
    try:
        yield
    finally:
        _root = before


@contextmanager
def state_dicts_of_shards() -> Iterator[None]:
    """Context manager in which state dicts of sharded models and optimizers contain DTensors, without communication."""
    global _keeps_shards
    before, _keeps_shards = _keeps_shards, True
    try:
        yield
    finally:
        _keeps_shards = before


def complete_tensor(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Return the complete tensor on every rank: gathered, if `tensor` is a shard, otherwise `tensor`. All ranks call
    it."""
    rows = local_part(tensor)
    if rows is tensor:
        return tensor
    from unitrain.backends.sharding.shards import gather_rows  # imports torch.distributed.tensor, which is slow

    complete = gather_rows(rows, tensor.shape, communicator)
    assert complete is not None
    return complete


def keeps_shards() -> bool:
    """Return whether the caller is inside `state_dicts_of_shards`."""
    return _keeps_shards


def rank_of_complete_state() -> int | None:
    """Return the rank of `state_dicts_on_rank`; None if state dicts are complete on every rank."""
    return _root
