"""An allreduce on unitrain's interface and on the libraries under it, for ranks that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.base import Backend

# Bytes, and the calls of one turn.
SIZES = {"1 KB": (1 << 10, 100), "1 MB": (1 << 20, 30), "64 MB": (64 << 20, 3)}


def take_turn(backend: Backend, way: str, size: str) -> float:
    """Return the seconds of an allreduce of `size` in one of WAYS. All ranks call it."""
    length, calls = SIZES[size]
    tensor = torch.ones(length // 4)
    call = WAYS[way]
    call(backend, tensor)
    backend.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call(backend, tensor)
    return (time.perf_counter() - started) / calls


def _interface(backend: Backend, tensor: Tensor) -> Tensor:
    return backend.allreduce(tensor, "sum")


def _torch(backend: Backend, tensor: Tensor) -> Tensor:
    result = tensor.clone()  # which the others leave as it is too
    dist.all_reduce(result)
    return result


def _horovod(backend: Backend, tensor: Tensor) -> Tensor:
    import horovod.torch as hvd

    result: Tensor = hvd.allreduce(tensor, op=hvd.Sum, name="direct")
    return result


WAYS: dict[str, Callable[[Backend, Tensor], Tensor]] = {
    "unitrain": _interface,
    "torch.distributed": _torch,
    "horovod.torch": _horovod,
}
