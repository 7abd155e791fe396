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
    """Bytes per tensor, number of calls per turn, and number of tensors reduced concurrently."""

    bytes: int
    calls: int
    at_once: int = 1


SIZES = {
    "1 KB": Size(1 << 10, 100),
    "1 MB": Size(1 << 20, 30),
    "64 MB": Size(64 << 20, 3),
    "4 x 25 MB": Size(25 << 20, 3, at_once=4),
}


def take_turn(backend: Backend, way: str, size: str) -> float:
    """Return the seconds of an allreduce, or of concurrent allreduces, of `size` in one of WAYS. All ranks must call
    this function."""
    length, calls, at_once = SIZES[size]
    call: Callable[[], object]
    if at_once > 1:
        tensors = [torch.ones(length // 4) for _ in range(at_once)]
        call = partial(AT_ONCE[way], tensors)
    else:
        call = partial(WAYS[way], backend, torch.ones(length // 4))
    call()
    backend.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - started) / calls


def _interface(backend: Backend, tensor: Tensor) -> Tensor:
    return backend.allreduce(tensor, "sum")


def _torch(backend: Backend, tensor: Tensor) -> Tensor:
    result = tensor.clone()  # because the other ways also do not modify their argument
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


def _torch_at_once(tensors: list[Tensor]) -> None:
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()


def _horovod_at_once(tensors: list[Tensor]) -> None:
    import horovod.torch as hvd

    handles = [
        hvd.allreduce_async_(tensor, name=f"direct {number}", op=hvd.Sum) for number, tensor in enumerate(tensors)
    ]
    for handle in handles:
        hvd.synchronize(handle)


AT_ONCE: dict[str, Callable[[list[Tensor]], None]] = {
    "unitrain": _torch_at_once,
    "torch.distributed": _torch_at_once,
    "horovod.torch": _horovod_at_once,
}
