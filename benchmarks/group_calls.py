"""Calls that the ranks of groups.py measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unitrain.backends.base import Backend

MEMBERS = [0, 1]
CALLS = 20
_groups: list[Any] = []


def create_group(backend: Backend) -> float:
    """Create a group, and return the seconds on this rank. The group is kept for later calls."""
    dist.barrier()
    started = time.perf_counter()
    group = dist.new_group(MEMBERS)
    seconds = time.perf_counter() - started
    if backend.rank in MEMBERS:
        _groups.append(group)
    dist.barrier()
    return seconds


def destroy_group(backend: Backend) -> None:
    """Destroy the group, and wait until the process set is removed."""
    from horovod.torch.mpi_ops import _basics

    if _groups:
        dist.destroy_process_group(_groups.pop())
    while _basics.MPI_LIB_CTYPES.horovod_number_of_process_sets() > 1:
        time.sleep(0.001)
    dist.barrier()


def reduce_in_default_group(backend: Backend, count: int) -> tuple[float, float]:
    """Return the seconds per call, and the CPU seconds of all threads of this rank per call."""
    values = torch.ones(count)
    dist.barrier()
    started = time.process_time()
    seconds = _seconds_per_call(lambda: dist.all_reduce(values))
    return seconds, (time.process_time() - started) / CALLS


def reduce_in_group(backend: Backend, count: int) -> float:
    values = torch.ones(count)
    return _seconds_per_call(lambda: dist.all_reduce(values, group=_groups[0]) if _groups else None)


def broadcast_with_horovod(backend: Backend, count: int) -> float:
    import horovod.torch as hvd

    if not _groups:
        dist.barrier()
        return 0.0
    values, process_set = torch.ones(count), _groups[0]._process_set
    return _seconds_per_call(lambda: hvd.broadcast_(values, root_rank=0, process_set=process_set, name=f"bare.{count}"))


def send_message(backend: Backend, count: int) -> float:
    values = torch.ones(count)

    def round_trip() -> None:
        if backend.rank == 0:
            dist.send(values, 1)
            dist.recv(values, 1)
        elif backend.rank == 1:
            dist.recv(values, 0)
            dist.send(values, 0)

    return _seconds_per_call(round_trip) / 2


def _seconds_per_call(call: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - started) / CALLS
