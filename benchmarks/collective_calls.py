"""Collectives through unitrain's interface and through the underlying libraries, called by the ranks of
collectives.py."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.base import Backend

# Bytes per tensor, and calls per turn.
SIZES = {"1 MB": (1 << 20, 20), "10 MB": (10 << 20, 4), "100 MB": (100 << 20, 1)}
ALLREDUCE = "allreduce"


def take_turn(backend: Backend, collective: str, size: str) -> float:
    """Return the seconds per call of `collective`, a key of COLLECTIVES. All ranks must call this function."""
    length, calls = SIZES[size]
    tensor = torch.ones(length // 4 // backend.size * backend.size)
    function = COLLECTIVES[collective]
    function(backend, tensor)
    backend.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        function(backend, tensor)
    return (time.perf_counter() - started) / calls


def _slice(backend: Backend, tensor: Tensor) -> Tensor:
    return tensor[: len(tensor) // backend.size]


def _plain_reduce_scatter(backend: Backend, tensor: Tensor) -> Tensor:
    result = torch.empty_like(_slice(backend, tensor))
    dist.reduce_scatter_single(result, tensor)
    return result


def _plain_all_gather(backend: Backend, tensor: Tensor) -> Tensor:
    result = torch.empty_like(tensor)
    dist.all_gather_single(result, _slice(backend, tensor))
    return result


COLLECTIVES: dict[str, Callable[[Backend, Tensor], Tensor]] = {
    ALLREDUCE: lambda backend, tensor: backend.allreduce(tensor, "sum"),
    "reducescatter": lambda backend, tensor: backend.reducescatter(tensor, "sum"),
    "allgather": lambda backend, tensor: backend.allgather(_slice(backend, tensor)),
    "the library's reduce_scatter": _plain_reduce_scatter,
    "the library's all_gather": _plain_all_gather,
}
