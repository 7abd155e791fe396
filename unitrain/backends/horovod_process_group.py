"""Horovod's collectives behind torch.distributed's `ProcessGroup`, registered as the backend "horovod".

Whatever is written for torch.distributed then runs on a Horovod or MPI cluster: DistributedDataParallel with its
buckets and hooks, ZeroRedundancyOptimizer, Join, object collectives. It needs nothing else of unitrain:

    unitrain.register_process_group()
    torch.distributed.init_process_group("horovod")

Point-to-point calls and groups of some of the ranks are not Horovod's to give; they raise UnsupportedError.
"""

# torch's stubs type each collective by several overloads of other argument names; it calls them by position.
# mypy: disable-error-code="override, assignment, call-arg"

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypeVar
from weakref import WeakValueDictionary

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from unitrain import environment
from unitrain.backends.horovod_runtime import start_horovod, tell_torch_where
from unitrain.backends.horovod_tensors import REDUCIBLE, as_bytes, copier, horovod_op, reducible, slices
from unitrain.backends.horovod_work import Completions, HorovodWork
from unitrain.backends.rendezvous import Meeting
from unitrain.errors import UnsupportedError

NAME = "horovod"
# Horovod negotiates a name it has seen with the same shape by one bit, any other by a message to rank 0 and back. So
# names are used again, in the same order on every rank, and only so many are in use that none is ever needed twice at a
# time.
_NAMES_PER_SHAPE = 16
GroupT = TypeVar("GroupT", bound=dist.ProcessGroup)
_groups = 0


def register_process_group() -> None:
    """Make `torch.distributed.init_process_group("horovod")` work, under any launcher. Every rank calls it, before
    that.

    Under horovodrun and mpirun it also starts Horovod and sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
    MASTER_PORT, which torch looks for. Calling it again does nothing.
    """
    register_backend()
    tell_torch_where(environment.detect())


def register_backend() -> None:
    """Tell torch.distributed the name and nothing more; every rank may call it any number of times."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> HorovodProcessGroup:
    placement = environment.detect()
    if size != placement.size:
        raise UnsupportedError(
            f"Horovod's process group is of all {placement.size} ranks, but a group of {size} was asked for. "
            "Use backend 'ddp' for groups of some of the ranks."
        )
    host = environment.setting("MASTER_ADDR") or "127.0.0.1"
    start_horovod(placement, Meeting(placement, store, host, timeout))
    return HorovodProcessGroup(rank, size, timeout)


def _untraced(group: type[GroupT]) -> type[GroupT]:
    """Keep torch.compile out of the collectives: torch calls them from C++ in the middle of what it compiles."""
    for name, method in list(vars(group).items()):
        if callable(method) and not name.startswith("__"):
            setattr(group, name, _disable_dynamo(method))
    return group


@_untraced
class HorovodProcessGroup(dist.ProcessGroup):
    """All of Horovod's ranks as one torch.distributed group. Operations are asynchronous and complete in order of
    issue."""

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        global _groups
        self._prefix = f"unitrain.{_groups}"
        _groups += 1
        self._timeout = timeout
        self._completions = Completions()
        self._issued: defaultdict[str, int] = defaultdict(int)
        self._latest: WeakValueDictionary[str, HorovodWork] = WeakValueDictionary()
        self._group_name = self._group_desc = ""

    # --- collectives, as torch.distributed calls them: lists of tensors, results written in place ---

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> HorovodWork:
        (tensor,) = tensors
        op = horovod_op(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        if tensor.dtype in REDUCIBLE and tensor.is_contiguous():
            return self._issue(
                "allreduce", tensor, lambda name: hvd.allreduce_async_(tensor, name=name, op=op), tensors
            )
        wide = reducible(tensor)
        return self._issue(
            "allreduce", wide, lambda name: hvd.allreduce_async_(wide, name=name, op=op), tensors, tensor.copy_
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        return _last([self.allreduce([tensor], opts) for tensor in tensors])

    def reduce(self, tensors: list[Tensor], opts: Any) -> HorovodWork:
        (tensor,) = tensors
        wide = reducible(tensor)
        op = horovod_op(opts.reduceOp)
        finish = tensor.copy_ if self.rank() == opts.rootRank else None
        return self._issue("reduce", wide, lambda name: hvd.allreduce_async_(wide, name=name, op=op), tensors, finish)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> HorovodWork:
        (tensor,) = tensors
        payload = as_bytes(tensor)
        finish = None if payload.data_ptr() == tensor.data_ptr() else copier([(tensor, slice(None))])
        return self._issue(
            "broadcast", payload, lambda name: hvd.broadcast_async_(payload, opts.rootRank, name=name), tensors, finish
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> HorovodWork:
        (own,), (parts,) = inputs, outputs
        return self._gather(own, slices(parts), outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> HorovodWork:
        return self._gather(own, [(output, slice(None))], [output])

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return _last([self._allgather_base(output, own) for output, own in zip(outputs, inputs, strict=True)])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> HorovodWork:
        (own,) = inputs
        return self._gather(own, slices(outputs[0]) if self.rank() == opts.rootRank else [], outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> HorovodWork:
        (own,) = outputs
        count = as_bytes(own).numel()
        whole = own.new_empty(self.size() * count, dtype=torch.uint8)
        if self.rank() == opts.rootRank:
            torch.cat([as_bytes(part) for part in inputs[0]], out=whole)
        finish = copier([(own, slice(self.rank() * count, (self.rank() + 1) * count))])
        return self._issue(
            "scatter", whole, lambda name: hvd.broadcast_async_(whole, opts.rootRank, name=name), outputs, finish
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> HorovodWork:
        return self._reduce_scatter_base(outputs[0], torch.cat([part.reshape(-1) for part in inputs[0]]), opts)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any) -> HorovodWork:
        wide = reducible(whole).view(-1)
        op = horovod_op(opts.reduceOp)
        if op not in (hvd.Sum, hvd.Average):  # which is all that Horovod scatters
            start = self.rank() * output.numel()
            return self._issue(
                "allreduce",
                wide,
                lambda name: hvd.allreduce_async_(wide, name=name, op=op),
                [output],
                lambda result: output.view(-1).copy_(result[start : start + output.numel()]),
            )
        return self._issue(
            "reducescatter",
            wide,
            lambda name: hvd.reducescatter_async(wide, name=name, op=op),
            [output],
            lambda result: output.view(-1).copy_(result),
        )

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        return _last([self._reduce_scatter_base(out, whole, opts) for out, whole in zip(outputs, inputs, strict=True)])

    def alltoall_base(
        self, output: Tensor, own: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> HorovodWork:
        rows = own.shape[0]
        splits = torch.tensor(input_splits or [rows // self.size()] * self.size(), dtype=torch.int32)
        row_bytes = as_bytes(own).view(rows, math.prod(own.shape[1:]) * own.element_size())
        return self._issue(
            "alltoall",
            row_bytes,
            lambda name: hvd.alltoall_async(row_bytes, splits=splits, name=name),
            [output],
            lambda result: copier([(output, slice(None))])(result[0].view(-1)),
            size=row_bytes.shape[1],
        )

    def barrier(self, opts: Any = None) -> HorovodWork:
        token = torch.zeros(1, dtype=torch.int32)
        return self._issue("barrier", token, lambda name: hvd.allreduce_async_(token, name=name, op=hvd.Sum), [token])

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> NoReturn:
        raise UnsupportedError("Horovod has no send and recv between two ranks. Use backend 'ddp' for them.")

    recv = recv_anysource = send

    # The names of torch 2.14 and later.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # --- what torch asks of any group ---

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    def shutdown(self) -> None:
        self._completions.stop()

    abort = shutdown

    # --- issuing ---

    def _gather(self, own: Tensor, parts: list[tuple[Tensor, slice]], result: Any) -> HorovodWork:
        payload = as_bytes(own)
        return self._issue(
            "allgather", payload, lambda name: hvd.allgather_async(payload, name=name), result, copier(parts)
        )

    def _issue(
        self,
        operation: str,
        tensor: Tensor,
        start: Callable[[str], int],
        result: Any,
        finish: Callable[[Any], Any] | None = None,
        size: int | None = None,
    ) -> HorovodWork:
        """Start an operation on `tensor` under its next name; `finish` puts Horovod's output where torch expects it.

        `size` is what is the same on every rank, the number of elements unless given.
        """
        device = tensor.device
        size = tensor.numel() if size is None else size
        if not size:  # nothing to move, and every rank knows
            return HorovodWork.completed(result, device)
        kind = f"{self._prefix}.{operation}.{tensor.dtype}.{size}"
        name = f"{kind}.{self._issued[kind] % _NAMES_PER_SHAPE}"
        self._issued[kind] += 1
        if (previous := self._latest.get(name)) is not None:
            previous.wait()
        work = HorovodWork(name, start(name), result, device, finish, self._timeout, self._completions)
        self._latest[name] = work
        self._completions.add(work)
        return work


def _last(works: list[HorovodWork]) -> dist.Work:
    """Return the work that completes after all `works`."""
    return works[-1] if works else HorovodWork.completed([], torch.device("cpu"))
