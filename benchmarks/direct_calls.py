"""Allreduces through unitrain's interface and through the underlying libraries, run in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.base import Backend


class Size(NamedTuple):
    """Bytes per tensor, number of calls per turn, and number of tensors that a call reduces concurrently."""

    bytes: int
    calls: int
    num_concurrent: int = 1


SIZES = {
    "1 KB": Size(1 << 10, 100),
    "1 MB": Size(1 << 20, 30),
    "64 MB": Size(64 << 20, 3),
    "4 x 25 MB": Size(25 << 20, 3, num_concurrent=4),
}


def take_turn(backend: Backend, library: str, size: str) -> float:
    """Return the seconds per call with `library`, a key of ALLREDUCES. A call reduces one tensor, or several tensors
    concurrently. All ranks must call this function."""
    length, calls, num_concurrent = SIZES[size]
    call: Callable[[], object]
    if num_concurrent > 1:
        tensors = [torch.ones(length // 4) for _ in range(num_concurrent)]
        call = partial(CONCURRENT_ALLREDUCES[library], tensors)
    else:
        call = partial(ALLREDUCES[library], backend, torch.ones(length // 4))
    call()
    backend.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


def _interface(backend: Backend, tensor: Tensor) -> Tensor:
    return backend.allreduce(tensor, "sum")


def _torch(backend: Backend, tensor: Tensor) -> Tensor:
    result = tensor.clone()  # because the other calls do not modify their argument either
    dist.all_reduce(result)
    return result


def _horovod(backend: Backend, tensor: Tensor) -> Tensor:
    import horovod.torch as hvd

    result: Tensor = hvd.allreduce(tensor, op=hvd.Sum, name="direct")
    return result


ALLREDUCES: dict[str, Callable[[Backend, Tensor], Tensor]] = {
    "unitrain": _interface,
    "torch.distributed": _torch,
    "horovod.torch": _horovod,
}


def _torch_concurrent(tensors: list[Tensor]) -> None:
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def _horovod_concurrent(tensors: list[Tensor]) -> None:
    import horovod.torch as hvd

    handles = [hvd.allreduce_async_(tensor, name=f"direct {index}", op=hvd.Sum) for index, tensor in enumerate(tensors)]
    for handle in handles:
        hvd.synchronize(handle)


CONCURRENT_ALLREDUCES: dict[str, Callable[[list[Tensor]], None]] = {
    "unitrain": _torch_concurrent,
    "torch.distributed": _torch_concurrent,
    "horovod.torch": _horovod_concurrent,
}
