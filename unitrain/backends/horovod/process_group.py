"""Horovod's collectives as a torch.distributed `ProcessGroup`, registered as the backend "horovod".

With it, torch.distributed programs run on a Horovod or MPI cluster, including DistributedDataParallel with buckets and
hooks, ZeroRedundancyOptimizer, Join and object collectives. A unitrain backend is not required:

    unitrain.register_process_group()
    torch.distributed.init_process_group("horovod")

Point-to-point calls, groups with a subset of the ranks, and reductions that Horovod cannot compute exactly raise
UnsupportedError.
"""

# torch's stubs declare each collective by several overloads with other argument names; torch passes them by position.
# mypy: disable-error-code="override, assignment, call-arg"

from __future__ import annotations

import functools
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

from unitrain.backends.horovod import tensors as horovod_tensors
from unitrain.backends.horovod.runtime import export_torch_variables, start_horovod
from unitrain.backends.horovod.tensors import (
    ALLTOALL_BYTES,
    Destination,
    combine_rows,
    dense_bytes,
    find_reduction,
    flatten_dense,
    piece_slices,
)
from unitrain.backends.horovod.work import CompletionQueue, HorovodWork, join_works
from unitrain.bootstrap import environment
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import UnsupportedError
from unitrain.torch_compat import disable_compile

NAME = "horovod"
# Horovod negotiates an operation with a known name and shape with one bit, and other operations with a message to rank
# 0 and a response. Names are therefore reused, in the same order on every rank. A name is not reused before its
# previous operation has completed.
_NAMES_PER_SHAPE = 16
GroupT = TypeVar("GroupT", bound=dist.ProcessGroup)
_groups = 0


def register_process_group() -> None:
    """Make `torch.distributed.init_process_group("horovod")` available. See `horovod.register_process_group`."""
    register_backend()
    export_torch_variables(environment.detect())


def register_backend() -> None:
    """Register only the backend's name with torch.distributed. Further calls do nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> HorovodProcessGroup:
    rank_info = environment.detect()
    if size != rank_info.size:
        raise UnsupportedError(
            f"A group of {size} ranks was requested, but Horovod's process group contains all {rank_info.size} ranks. "
            "Use backend 'ddp' for groups of a subset of ranks."
        )
    host = environment.get_variable("MASTER_ADDR") or "127.0.0.1"
    start_horovod(rank_info, Rendezvous(rank_info, store, host, timeout))
    return HorovodProcessGroup(rank, size, timeout)


def _disable_compile_of_collectives(group: type[GroupT]) -> type[GroupT]:
    """Exclude the collectives from torch.compile, because C++ code calls them inside compiled regions."""
    for name, method in list(vars(group).items()):
        is_entry_point = not name.startswith("_") or name in ("_allgather_base", "_reduce_scatter_base")
        if callable(method) and is_entry_point:
            setattr(group, name, disable_compile(method))
    return group


@_disable_compile_of_collectives
class HorovodProcessGroup(dist.ProcessGroup):
    """All ranks of Horovod as one torch.distributed group. Operations are asynchronous and complete in the order of
    issue.
    """

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        global _groups
        self._number, self._generation = _groups, 0
        self._prefix = f"unitrain.{_groups}.0"
        _groups += 1
        self._timeout = timeout
        self._completions = CompletionQueue()
        self._issued: defaultdict[str, int] = defaultdict(int)
        self._latest: WeakValueDictionary[str, HorovodWork] = WeakValueDictionary()
        self._group_name = self._group_desc = ""

    # --- collectives with torch.distributed's signatures: lists of tensors, results in place ---

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        (tensor,) = tensors
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        # A fast path for the common case: the general code takes 0.1 ms longer.
        if (
            tensor.dtype in (torch.float32, torch.float64)
            and op == dist.ReduceOp.SUM
            and 0 < tensor.numel() * tensor.element_size() <= horovod_tensors.PIECE_BYTES
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            values = tensor.detach().view(-1)
            return self._issue(
                "allreduce", values, functools.partial(hvd.allreduce_async_, values, op=hvd.Sum), tensors
            )
        return join_works(self._reduce("allreduce", tensor, tensor, op, tensors), tensors, tensor.device)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        works = [self._reduce("allreduce", tensor, tensor, opts.reduceOp, tensors) for tensor in tensors]
        return _join_all(works, tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        target = tensor if self.rank() == opts.rootRank else None
        return join_works(self._reduce("reduce", tensor, target, opts.reduceOp, tensors), tensors, tensor.device)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        payload, target = dense_bytes(tensor), Destination(tensor)
        works = []
        for place in piece_slices(len(payload), 1):
            piece, part = payload[place], target.bytes[place]
            shared = piece.data_ptr() == part.data_ptr()
            works.append(
                self._issue(
                    "broadcast",
                    piece,
                    functools.partial(hvd.broadcast_async_, piece, opts.rootRank),
                    tensors,
                    None if shared else _copy_function(part, target if place.stop == len(payload) else None),
                )
            )
        return join_works(works, tensors, tensor.device)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        (local_tensor,), (parts,) = inputs, outputs
        return join_works(self._gather(local_tensor, parts, outputs), outputs, local_tensor.device)

    def _allgather_base(self, output: Tensor, local_tensor: Tensor, opts: Any = None) -> dist.Work:
        return join_works(self._gather(local_tensor, output, [output]), [output], local_tensor.device)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        works = [
            self._gather(local_tensor, output, outputs) for output, local_tensor in zip(outputs, inputs, strict=True)
        ]
        return _join_all(works, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        (local_tensor,) = inputs
        parts = outputs[0] if self.rank() == opts.rootRank else []
        return join_works(self._gather(local_tensor, parts, outputs), outputs, local_tensor.device)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        (local_tensor,) = outputs
        target, size = Destination(local_tensor), self.size()
        parts = [dense_bytes(part) for part in inputs[0]] if self.rank() == opts.rootRank else []
        works = []
        for place in piece_slices(len(target.bytes), size):
            count = place.stop - place.start
            block = local_tensor.new_empty(size, count, dtype=torch.uint8)
            for rank, part in enumerate(parts):
                block[rank] = part[place]

            def finish(block: Tensor, place: slice = place) -> None:
                target.bytes[place] = block[self.rank()]
                if place.stop == len(target.bytes):
                    target.finish()

            works.append(
                self._issue(
                    "scatter",
                    block,
                    functools.partial(hvd.broadcast_async_, block, opts.rootRank),
                    outputs,
                    finish,
                )
            )
        return join_works(works, outputs, local_tensor.device)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        return self._reduce_scatter_base(outputs[0], torch.cat([flatten_dense(part) for part in inputs[0]]), opts)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        op = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return join_works(self._reduce_scatter(output, source, op, [output]), [output], output.device)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        works = [
            self._reduce_scatter(output, source, opts.reduceOp, outputs)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return _join_all(works, outputs)

    def alltoall_base(
        self, output: Tensor, local_tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> dist.Work:
        size, rows = self.size(), local_tensor.shape[0]
        row_bytes = math.prod(local_tensor.shape[1:]) * local_tensor.element_size()
        payload, target = dense_bytes(local_tensor).view(rows, row_bytes), Destination(output)
        if input_splits or output_splits:
            sent = input_splits or [rows // size] * size
            return join_works(self._exchange(payload, sent, target, [output]), [output], local_tensor.device)
        works = []
        for place in piece_slices(row_bytes, rows):
            piece = payload[:, place].contiguous()

            def finish(result: tuple[Tensor, Tensor], place: slice = place) -> None:
                target.bytes.view(-1, row_bytes)[:, place] = result[0]
                if place.stop == row_bytes:
                    target.finish()

            works.append(self._issue_exchange(piece, [rows // size] * size, [output], finish))
        return join_works(works, [output], local_tensor.device)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        sent = [dense_bytes(part) for part in inputs]
        targets = [Destination(part) for part in outputs]
        received = torch.empty(sum(len(target.bytes) for target in targets), dtype=torch.uint8, device=inputs[0].device)
        all_received = Destination(received)

        def finish() -> None:
            for target, part in zip(targets, received.split([len(one.bytes) for one in targets]), strict=True):
                target.bytes.copy_(part)
                target.finish()

        payload = torch.cat(sent).view(-1, 1)
        works = self._exchange(payload, [len(part) for part in sent], all_received, outputs, finish)
        return join_works(works, outputs, inputs[0].device)

    def barrier(self, opts: Any = None) -> HorovodWork:
        token = torch.zeros(1, dtype=torch.int32)
        return self._issue("barrier", token, functools.partial(hvd.allreduce_async_, token, op=hvd.Sum), [token])

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> NoReturn:
        raise UnsupportedError("Horovod does not support send and recv. Use backend 'ddp' for them.")

    recv = recv_anysource = send

    # Names of these methods since torch 2.14.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # --- attributes that torch expects of every group ---

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

    def start_new_names(self) -> None:
        """Use new names from now on, because some ranks have not started operations under the current names. All ranks
        call it."""
        self._generation += 1
        self._prefix = f"unitrain.{self._number}.{self._generation}"
        self._issued.clear()
        self._latest.clear()

    def shutdown(self) -> None:
        self._completions.stop()

    abort = shutdown

    # --- starting operations ---

    def _reduce(self, operation: str, source: Tensor, target: Tensor | None, op: Any, result: Any) -> list[HorovodWork]:
        """Start to reduce `source` into `target`, which is None if this rank does not need the result."""
        reduction_plan = find_reduction(source.dtype, op)
        if reduction_plan.combine is not None:
            return self._reduce_gathered(source, target, reduction_plan.combine, result)
        values = flatten_dense(source)
        in_place = reduction_plan.encode is None and target is source and values.data_ptr() == source.data_ptr()
        destination = None if in_place or target is None else Destination(target)
        works = []
        for place in piece_slices(len(values), _encoded_bytes(source.dtype)):
            wide = reduction_plan.to_horovod(values[place])

            def finish(reduced: Tensor, place: slice = place) -> None:
                if destination is not None:
                    destination.elements[place] = reduction_plan.from_horovod(reduced, source.dtype)
                    if place.stop == len(values):
                        destination.finish()

            # Values that are not encoded may share memory with the user's tensor.
            allreduce = hvd.allreduce_async_ if in_place or reduction_plan.encode is not None else hvd.allreduce_async
            works.append(
                self._issue(
                    operation,
                    wide,
                    functools.partial(allreduce, wide, op=reduction_plan.op),
                    result,
                    None if destination is None else finish,
                )
            )
        return works

    def _reduce_gathered(
        self,
        source: Tensor,
        target: Tensor | None,
        combine: Callable[[Tensor, Tensor], Tensor],
        result: Any,
        on_complete: Callable[[], None] = lambda: None,
    ) -> list[HorovodWork]:
        destination = None if target is None else Destination(target)

        def finish(gathered: Tensor, place: slice) -> None:
            if destination is not None:
                destination.bytes[place] = combine_rows(gathered.view(self.size(), -1), source.dtype, combine).view(
                    torch.uint8
                )
                if place.stop == len(destination.bytes):
                    destination.finish()
                    on_complete()

        return self._gather_pieces(source, result, finish)

    def _reduce_scatter(self, output: Tensor, source: Tensor, op: Any, result: Any) -> list[HorovodWork]:
        """Start to reduce `source`, which consists of `size` equal parts, and write this rank's part to `output`."""
        reduction_plan, size, destination = find_reduction(source.dtype, op), self.size(), Destination(output)
        parts = flatten_dense(source).view(size, -1) if source.numel() else source.new_empty(size, 0)
        if reduction_plan.combine is not None:
            complete = torch.empty_like(parts)

            def take_local_part() -> None:
                destination.elements.copy_(complete[self.rank()])
                destination.finish()

            return self._reduce_gathered(source, complete, reduction_plan.combine, result, take_local_part)
        scatters = reduction_plan.op in (
            hvd.Sum,
            hvd.Average,
        )  # Horovod supports reducescatter for these operations only
        works = []
        for place in piece_slices(parts.shape[1], _encoded_bytes(source.dtype) * size):
            wide = reduction_plan.to_horovod(parts[:, place].contiguous().view(-1))

            def finish(reduced: Tensor, place: slice = place) -> None:
                local_tensor = reduced if scatters else reduced.view(size, -1)[self.rank()]
                destination.elements[place] = reduction_plan.from_horovod(local_tensor, source.dtype)
                if place.stop == parts.shape[1]:
                    destination.finish()

            reduce = hvd.reducescatter_async if scatters else hvd.allreduce_async
            works.append(
                self._issue(
                    "reducescatter" if scatters else "allreduce",
                    wide,
                    functools.partial(reduce, wide, op=reduction_plan.op),
                    result,
                    finish,
                )
            )
        return works

    def _gather(self, local_tensor: Tensor, outputs: list[Tensor] | Tensor, result: Any) -> list[HorovodWork]:
        """Start to gather `local_tensor` of every rank into `outputs`: a list of tensors, one tensor, or an empty
        list."""
        count = local_tensor.numel() * local_tensor.element_size()
        if isinstance(outputs, Tensor):
            targets = [Destination(outputs)]
            rows = [*targets[0].bytes.view(self.size(), count)] if count else []
        else:
            targets = [Destination(output) for output in outputs]
            rows = [target.bytes for target in targets]

        def finish(gathered: Tensor, place: slice) -> None:
            for row, part in zip(
                rows, gathered.view(self.size(), -1), strict=False
            ):  # rows is empty if this rank needs no result
                row[place] = part
            if place.stop == count:
                for target in targets:
                    target.finish()

        return self._gather_pieces(local_tensor, result, finish)

    def _gather_pieces(self, local_tensor: Tensor, result: Any, finish: Callable[..., None]) -> list[HorovodWork]:
        """Start to gather the bytes of `local_tensor`.

        Each piece, uint8 [size * bytes], is passed to `finish(gathered, place=...)`.
        """
        payload, size, each = dense_bytes(local_tensor), self.size(), local_tensor.element_size()
        works = []
        for elements in piece_slices(local_tensor.numel(), size * each):
            place = slice(elements.start * each, elements.stop * each)
            piece = payload[place]
            works.append(
                self._issue(
                    "allgather",
                    piece,
                    functools.partial(hvd.allgather_async, piece),
                    result,
                    functools.partial(finish, place=place),
                )
            )
        return works

    def _exchange(
        self,
        payload: Tensor,
        splits: list[int],
        target: Destination,
        result: Any,
        on_complete: Callable[[], None] = lambda: None,
    ) -> list[HorovodWork]:
        """Start an alltoall of `payload`, uint8 [rows, bytes], that sends `splits[rank]` rows to each rank.

        Raises UnsupportedError if this rank sends or receives more than Horovod supports.
        """
        num_bytes = max(payload.numel(), len(target.bytes))
        if num_bytes > ALLTOALL_BYTES:
            raise UnsupportedError(
                f"Rank {self.rank()} exchanges {num_bytes:,} bytes in an alltoall with splits, but Horovod supports at "
                f"most {ALLTOALL_BYTES:,}. Exchange fewer rows, or parts of each row, per call: tensor[:, :half]"
            )

        def finish(received: tuple[Tensor, Tensor]) -> None:
            target.bytes.copy_(received[0].view(-1))
            target.finish()
            on_complete()

        return [self._issue_exchange(payload, splits, result, finish)] if payload.shape[1] else []

    def _issue_exchange(
        self, payload: Tensor, splits: list[int], result: Any, finish: Callable[[Any], None]
    ) -> HorovodWork:
        counts = torch.tensor(splits, dtype=torch.int32)
        return self._issue(
            "alltoall",
            payload,
            functools.partial(hvd.alltoall_async, payload, splits=counts),
            result,
            finish,
            size=payload.shape[1],
        )

    def _issue(
        self,
        operation: str,
        tensor: Tensor,
        start: Callable[..., int],
        result: Any,
        finish: Callable[[Any], Any] | None = None,
        size: int | None = None,
    ) -> HorovodWork:
        """Start an operation on `tensor` under the next name. `finish` copies Horovod's output to torch's result.

        `size` is equal on every rank, and is the number of elements by default.
        """
        device = tensor.device
        size = tensor.numel() if size is None else size
        kind = f"{self._prefix}.{operation}.{tensor.dtype}.{size}"
        name = f"{kind}.{self._issued[kind] % _NAMES_PER_SHAPE}"
        self._issued[kind] += 1
        if (previous := self._latest.get(name)) is not None:
            previous.wait()
        work = HorovodWork(name, start(name=name), result, device, finish, self._timeout, self._completions)
        self._latest[name] = work
        self._completions.add(work)
        return work


def _join_all(works: list[list[HorovodWork]], tensors: list[Tensor]) -> dist.Work:
    device = tensors[0].device if tensors else torch.device("cpu")
    return join_works([work for some in works for work in some], tensors, device)


def _copy_function(part: Tensor, target: Destination | None) -> Callable[[Tensor], None]:
    def copy(piece: Tensor) -> None:
        part.copy_(piece)
        if target is not None:
            target.finish()

    return copy


def _encoded_bytes(dtype: torch.dtype) -> int:
    return max(dtype.itemsize, 4)  # smaller dtypes are encoded in 32 bits
