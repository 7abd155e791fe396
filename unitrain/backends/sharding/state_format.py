"""The format of the state dicts of sharded models and optimizers: complete tensors, or shards.

This module does not import torch.distributed.tensor, because that import is slow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.checks import DTYPES
from unitrain.backends.tensors import as_bytes
from unitrain.torch_compat import local_shard

# Context variables, so that other threads, which may read a state dict at the same time, get complete tensors.
_keeps_shards = ContextVar("keeps_shards", default=False)
_root: ContextVar[int | None] = ContextVar("root", default=None)


@contextmanager
def state_dicts_on_rank(root: int) -> Iterator[None]:
    """Context manager in which state dicts of models and optimizers with sharded parameters are complete on `root`
    only.

    On `root`, they contain CPU tensors. On the other ranks, they contain None instead of tensors that are sharded. The
    ranks gather one tensor at a time, so only `root` needs memory for the complete state.
    """
    token = _root.set(root)
    try:
        yield
    finally:
        _root.reset(token)


@contextmanager
def state_dicts_of_shards() -> Iterator[None]:
    """Context manager in which state dicts of models and optimizers with sharded parameters contain DTensors, and do
    not communicate."""
    token = _keeps_shards.set(True)
    try:
        yield
    finally:
        _keeps_shards.reset(token)


def gather_rows(rows: Tensor, shape: torch.Size, communicator: Communicator) -> Tensor | None:
    """Return the complete tensor of `shape` from the rows of every rank. All ranks must call this function.

    Inside `state_dicts_on_rank`, the result is a CPU tensor on rank `root`, and None on the other ranks.
    """
    if rows.dtype in DTYPES:
        complete = communicator.allgather(rows.detach()).view(shape)
    else:
        gathered = communicator.allgather(as_bytes(rows))
        complete = gathered.clone().view(rows.dtype).view(shape)  # the clone is aligned
    root = _root.get()
    if root is None:
        return complete
    return complete.cpu() if communicator.rank == root else None


def gather_complete_tensor(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Return the complete tensor on every rank: if `tensor` is a DTensor, gather its shards, otherwise return `tensor`.
    All ranks must call this function."""
    rows = local_shard(tensor)
    if rows is tensor:
        return tensor
    complete = gather_rows(rows, tensor.shape, communicator)
    assert complete is not None
    return complete


def keeps_shards() -> bool:
    """Return whether the caller is inside `state_dicts_of_shards`."""
    return _keeps_shards.get()
