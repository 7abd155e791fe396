"""Horovod's collectives as a torch.distributed `ProcessGroup`, registered as the backend "horovod".

With it, torch.distributed programs run on a Horovod or MPI cluster, including programs with DistributedDataParallel
(buckets and hooks), ZeroRedundancyOptimizer, Join and object collectives. A unitrain backend is not required:

    unitrain.register_process_group()
    torch.distributed.init_process_group("horovod")

Each group of a subset of the ranks uses a Horovod process set (process_sets.py). Messages between two ranks use TCP
connections (point_to_point.py). Reductions that cannot be computed exactly, apart from rounding, raise
UnsupportedError.
"""

# torch's stubs declare each collective by several overloads with different argument names; torch passes arguments by
# position.
# mypy: disable-error-code="override, assignment, call-arg"

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.horovod import signatures, sparse
from unitrain.backends.horovod import tensors as horovod_tensors
from unitrain.backends.horovod.monitored_barrier import MonitoredBarrier
from unitrain.backends.horovod.operations import OperationStarter
from unitrain.backends.horovod.point_to_point import MessageWork, PointToPoint
from unitrain.backends.horovod.process_sets import release_process_set
from unitrain.backends.horovod.runtime import export_torch_variables, next_group_number, start_for_group
from unitrain.backends.horovod.tensors import (
    Destination,
    combine_two,
    dense_bytes,
    flatten_dense,
    piece_slices,
)
from unitrain.backends.horovod.work import HorovodWork, join_works
from unitrain.bootstrap import environment
from unitrain.errors import CollectiveArgumentError, UnsupportedError
from unitrain.torch_compat import backend_options, default_store, disable_compile

BACKEND_NAME = "horovod"
GroupT = TypeVar("GroupT", bound=dist.ProcessGroup)


def register_process_group() -> None:
    """Make `torch.distributed.init_process_group("horovod")` available. See `horovod.register_process_group`."""
    register_backend()
    export_torch_variables(environment.detect())


def register_backend() -> None:
    """Register the backend with torch.distributed, without setting environment variables. Further calls do nothing."""
    if BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            BACKEND_NAME, _create_from_options, extended_api=True, devices=["cpu", *_gpu_devices()]
        )


def _gpu_devices() -> list[str]:
    return ["cuda"] if hvd.nccl_built() or hvd.cuda_built() or hvd.rocm_built() else []


def _create_from_options(options: Any, _: object) -> HorovodProcessGroup:
    """Return a group for torch's `init_process_group` or `new_group`. All its members must call this function."""
    rank, size, ranks = options.group_rank, options.group_size, options.global_ranks_in_group
    return _create_group(options.store, rank, size, options.timeout, ranks)


def _create_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, ranks: Sequence[int] = ()
) -> HorovodProcessGroup:
    """Return a group of the global `ranks`, or the default group if `ranks` is empty. All its members must call this
    function."""
    if not ranks:
        # The same store may be used for several default groups in succession, so each gets its own prefix.
        store = dist.PrefixStore(str(store.add(f"groups/{rank}", 1)), store)
        start_for_group(store, rank, size, timeout)
        return HorovodProcessGroup(store, rank, range(size), timeout)
    if BACKEND_NAME not in dist.get_backend_config():
        raise UnsupportedError(
            f"A Horovod group was requested, but the default group has the backend {dist.get_backend()!r}, which does "
            'not start Horovod. Call torch.distributed.init_process_group("horovod").'
        )
    if list(ranks) != sorted(ranks):
        raise UnsupportedError(
            f"A group of the ranks {list(ranks)} was requested, but the ranks of a Horovod group must be in ascending "
            f"order. Use torch.distributed.new_group({sorted(ranks)})."
        )
    # `store` is not used: its prefix contains torch's name of the group, which may differ between ranks.
    prefix = f"horovod/{'_'.join(map(str, ranks))}/{next_group_number(ranks)}"
    return HorovodProcessGroup(dist.PrefixStore(prefix, default_store()), rank, ranks, timeout)


def _disable_compile_of_collectives(group: type[GroupT]) -> type[GroupT]:
    """Exclude the collectives from torch.compile, because C++ code calls them inside compiled regions."""
    for name, method in list(vars(group).items()):
        is_entry_point = not name.startswith("_") or name in ("_allgather_base", "_reduce_scatter_base")
        if callable(method) and is_entry_point:
            setattr(group, name, disable_compile(method))
    return group


@_disable_compile_of_collectives
class HorovodProcessGroup(OperationStarter):
    """Horovod ranks as a torch.distributed group. Collectives are asynchronous and complete in the order of issue.

    All members of the group share `store`. `ranks` are their ranks in Horovod, in ascending order.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(store, rank, ranks, timeout)
        try:
            self._connect(store, rank, ranks, timeout)
        except BaseException:
            self.abort()
            raise
        self._sequence_number = 0

    def _connect(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        self._messages = PointToPoint(store, rank, ranks, timeout)
        for device in ("cpu", *_gpu_devices()):
            # C++ code calls this transport for operations that this class does not define.
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, self._messages.transport)
        # torch 2.15 attaches its flight recorder to the default backend.
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        self._group_name = self._group_desc = ""
        self._monitored_barrier = MonitoredBarrier(store, rank, len(ranks))
        # As soon as this constructor returns, the rank that serves the store may destroy the group, and with it the
        # store, from which the other ranks read the addresses of the transport. Therefore, wait for all ranks.
        self.barrier(None).wait()

    # --- collectives with torch.distributed's signatures: lists of tensors, results in place ---

    @signatures.accepts(signatures.allreduce)
    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        tensor, op = tensors[0], opts.reduceOp
        if len(tensors) > 1 or tensor.layout != torch.strided:
            return self._allreduce_sparse_or_several(tensors, op)
        # A fast path for the common case: the general code takes 0.1 ms longer.
        if (
            tensor.dtype in (torch.float32, torch.float64)
            and op == dist.ReduceOp.SUM
            and 0 < tensor.numel() * tensor.element_size() <= horovod_tensors.MAX_PIECE_BYTES
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            values = tensor.detach().view(-1)
            return self._issue(
                "allreduce.SUM", values, functools.partial(hvd.allreduce_async_, values, op=hvd.Sum), tensors
            )
        return join_works(self._reduce("allreduce", tensor, tensor, op, tensors), tensors, tensor.device)

    def _allreduce_sparse_or_several(self, tensors: list[Tensor], op: Any) -> dist.Work:
        """Reduce one sparse tensor of each rank, or several dense or sparse tensors of each rank. Each of these tensors
        receives the result."""
        first = tensors[0]
        if first.layout == torch.strided:
            total = functools.reduce(functools.partial(combine_two, op=op), tensors)

            def copy_to_all() -> None:
                for tensor in tensors:
                    tensor.detach().copy_(total)

            works = self._reduce("allreduce", total, total, op, tensors, copy_to_all)
            return join_works(works, tensors, first.device)
        sparse.check_sparse_allreduce(first, op)
        rows, size = sparse.pack_rows(tensors), self.size()

        def finish(gathered: Tensor) -> None:
            total = sparse.unpack_rows(gathered, first)
            for tensor in tensors:  # detach() would not share the number of non-zero elements
                tensor.copy_(total)

        is_refused = sparse.is_too_large(rows, size)
        start, refusal = hvd.allgather_async, sparse.size_error(size)
        return self._issue_rows("sparse_allreduce", rows, start, tensors, finish, refusal, is_refused=is_refused)

    @signatures.accepts(signatures.allreduce_coalesced)
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        # A tensor may occur several times. Each operation reduces the original values.
        addresses = [tensor.data_ptr() for tensor in tensors]
        sources = [
            tensor.clone() if address in addresses[:index] else tensor
            for index, (tensor, address) in enumerate(zip(tensors, addresses, strict=True))
        ]
        works = [
            self._reduce("allreduce", source, tensor, opts.reduceOp, tensors)
            for source, tensor in zip(sources, tensors, strict=True)
        ]
        return _join_all(works, tensors)

    @signatures.accepts(signatures.reduce)
    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        (tensor,) = tensors
        target = tensor if self.rank() == opts.rootRank else None
        works = self._reduce(f"reduce.to_rank_{opts.rootRank}", tensor, target, opts.reduceOp, tensors)
        return join_works(works, tensors, tensor.device)

    @signatures.accepts(signatures.broadcast)
    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        tensor = tensors[opts.rootTensor]
        payload, target = dense_bytes(tensor), Destination(tensor, copies=tensors)
        works = []
        for byte_range in piece_slices(len(payload), 1):
            piece, part = payload[byte_range], target.bytes[byte_range]
            shared = piece.data_ptr() == part.data_ptr()
            works.append(
                self._issue(
                    f"broadcast.from_rank_{opts.rootRank}",
                    piece,
                    functools.partial(hvd.broadcast_async_, piece, self._ranks[opts.rootRank]),
                    tensors,
                    None
                    if shared and len(tensors) == 1
                    else _create_copy_function(part, target if byte_range.stop == len(payload) else None),
                    len(piece) // tensor.element_size(),
                    dtype=tensor.dtype,
                )
            )
        return join_works(works, tensors, tensor.device)

    @signatures.accepts(signatures.allgather)
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        count, parts = len(inputs), outputs[0]
        if count == 1:
            return join_works(self._gather(inputs[0], parts, parts), parts, inputs[0].device)

        def copy_to_all() -> None:
            for output in outputs[1:]:
                for target, part in zip(output, parts, strict=True):
                    target.detach().copy_(part)

        works = []
        for index, tensor in enumerate(inputs):
            is_last = index == count - 1
            works += self._gather(tensor, parts[index::count], outputs, copy_to_all if is_last else None)
        return join_works(works, outputs, inputs[0].device)

    @signatures.accepts(signatures.all_gather_single)
    def _allgather_base(self, output: Tensor, local_tensor: Tensor, opts: Any) -> dist.Work:
        return join_works(self._gather(local_tensor, output, [output]), [output], local_tensor.device)

    @signatures.accepts(signatures.allgather_coalesced)
    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        works = [
            self._gather(local_tensor, list(parts), outputs)
            for local_tensor, parts in zip(inputs, zip(*outputs, strict=True), strict=True)
        ]
        return join_works([work for works_of_tensor in works for work in works_of_tensor], outputs, inputs[0].device)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        works = [
            self._gather(local_tensor, output, outputs) for output, local_tensor in zip(outputs, inputs, strict=True)
        ]
        return _join_all(works, outputs)

    @signatures.accepts(signatures.gather)
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        (local_tensor,) = inputs
        parts = outputs[0] if self.rank() == opts.rootRank else []
        works = self._gather(local_tensor, parts, parts, operation=f"gather.to_rank_{opts.rootRank}")
        return join_works(works, parts, local_tensor.device)

    @signatures.accepts(signatures.scatter)
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        (local_tensor,) = outputs
        target, size = Destination(local_tensor), self.size()
        parts = [dense_bytes(part) for part in inputs[0]] if self.rank() == opts.rootRank else []
        works = []
        for byte_range in piece_slices(len(target.bytes), size):
            count = byte_range.stop - byte_range.start
            block = local_tensor.new_empty(size, count, dtype=torch.uint8)
            for rank, part in enumerate(parts):
                block[rank] = part[byte_range]

            def finish(block: Tensor, byte_range: slice = byte_range) -> None:
                target.bytes[byte_range] = block[self.rank()]
                if byte_range.stop == len(target.bytes):
                    target.finish()

            works.append(
                self._issue(
                    f"scatter.from_rank_{opts.rootRank}",
                    block,
                    functools.partial(hvd.broadcast_async_, block, self._ranks[opts.rootRank]),
                    outputs,
                    finish,
                    count // local_tensor.element_size(),
                    dtype=local_tensor.dtype,
                )
            )
        return join_works(works, outputs, local_tensor.device)

    @signatures.accepts(signatures.reduce_scatter)
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        (output,), (parts,) = outputs, inputs
        source = torch.cat([flatten_dense(part) for part in parts])
        counts = [part.numel() for part in parts]
        if len(set(counts)) == 1:
            works = self._reduce_scatter(output, source, opts.reduceOp, outputs)
        else:  # Horovod scatters equal parts only
            local_part = source.split(counts)[self.rank()].view(output.shape)
            works = self._reduce(
                "reducescatter", source, source, opts.reduceOp, outputs, lambda: output.detach().copy_(local_part)
            )
        return join_works(works, outputs, output.device)

    @signatures.accepts(signatures.reduce_scatter_single)
    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any) -> dist.Work:
        return join_works(self._reduce_scatter(output, source, opts.reduceOp, [output]), [output], output.device)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = dist.ReduceScatterOptions() if opts is None else opts
        works = [
            self._reduce_scatter(output, source, opts.reduceOp, outputs)
            for output, source in zip(outputs, inputs, strict=True)
        ]
        return _join_all(works, outputs)

    @signatures.accepts(signatures.all_to_all_single)
    def alltoall_base(
        self, output: Tensor, local_tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any
    ) -> dist.Work:
        size, rows = self.size(), local_tensor.shape[0]
        _check_splits("input", input_splits, rows, size)
        _check_splits("output", output_splits, output.shape[0], size)
        row_bytes = math.prod(local_tensor.shape[1:]) * local_tensor.element_size()
        signatures.check_alltoall_output(output, local_tensor, has_splits=bool(input_splits or output_splits))
        payload, target = dense_bytes(local_tensor).view(rows, row_bytes), Destination(output)
        if input_splits or output_splits:
            sent = input_splits or [rows // size] * size
            return join_works(self._alltoall(payload, sent, target, [output]), [output], local_tensor.device)
        counts = torch.tensor([rows // size] * size, dtype=torch.int32, device="cpu")
        works = []
        for byte_range in piece_slices(row_bytes, rows):
            piece = payload[:, byte_range].contiguous()

            def finish(result: tuple[Tensor, Tensor], byte_range: slice = byte_range) -> None:
                target.bytes.view(-1, row_bytes)[:, byte_range] = result[0]
                if byte_range.stop == row_bytes:
                    target.finish()

            start = functools.partial(hvd.alltoall_async, piece, splits=counts)
            works.append(self._issue("alltoall", piece, start, [output], finish, piece.shape[1]))
        return join_works(works, [output], local_tensor.device)

    @signatures.accepts(signatures.alltoall)
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        sent = [dense_bytes(part) for part in inputs]
        targets = [Destination(part) for part in outputs]
        received = torch.empty(sum(len(target.bytes) for target in targets), dtype=torch.uint8, device=inputs[0].device)
        all_received = Destination(received)

        def finish() -> None:
            for target, part in zip(
                targets, received.split([len(target_tensor.bytes) for target_tensor in targets]), strict=True
            ):
                target.bytes.copy_(part)
                target.finish()

        payload = torch.cat(sent).view(-1, 1)
        works = self._alltoall(payload, [len(part) for part in sent], all_received, outputs, finish)
        return join_works(works, outputs, inputs[0].device)

    @signatures.accepts(signatures.barrier)
    def barrier(self, opts: Any) -> HorovodWork:
        token = torch.zeros(1, dtype=torch.int32, device="cpu")
        return self._issue("barrier", token, functools.partial(hvd.allreduce_async_, token, op=hvd.Sum), [token])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._monitored_barrier.wait(self._timeout if timeout is None else timeout, wait_all_ranks)

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> MessageWork:
        (tensor,) = tensors
        signatures.check_peer("send", self, rank)
        return self._messages.send(tensor, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> MessageWork:
        (tensor,) = tensors
        signatures.check_peer("recv", self, rank)
        return self._messages.recv(tensor, rank, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> MessageWork:
        (tensor,) = tensors
        return self._messages.recv(tensor, None, tag)

    # Names of these methods since torch 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # --- coalescing: Horovod fuses operations itself, so only their works are joined ---

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced_works = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced_works = self._coalesced_works or [], None
        results = [tensor for work in works for tensor in work.result()]
        return join_works(works, list({id(tensor): tensor for tensor in results}.values()), device)

    # --- attributes that torch expects of every group ---

    @property
    def options(self) -> Any:
        """A copy of the options of this group, with its timeout."""
        return backend_options(BACKEND_NAME, self._timeout)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND_NAME

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

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the operations that are started from now on."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the sequence numbers of all ranks start at 0."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of Horovod operations that this rank has started in this group. A collective may start
        several."""
        return self._sequence_number

    def shutdown(self) -> None:
        """Wait until all operations of this rank have finished or timed out, and release the resources of the group."""
        self._completions.stop()
        self._release_process_set()

    def abort(self) -> None:
        """Release the resources of the group without waiting for other ranks. Pending operations raise
        DistBackendError."""
        self._completions.abort()
        self._release_process_set()

    def _release_process_set(self) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            release_process_set(self._ranks)


def _join_all(works: list[list[HorovodWork]], tensors: list[Tensor]) -> dist.Work:
    device = tensors[0].device if tensors else torch.device("cpu")
    return join_works([work for works_of_tensor in works for work in works_of_tensor], tensors, device)


def _check_splits(direction: str, splits: list[int], num_rows: int, size: int) -> None:
    if splits and (len(splits) != size or sum(splits) != num_rows):
        raise CollectiveArgumentError(
            f"Horovod's all_to_all got {direction} splits {list(splits)} for {num_rows} rows on {size} ranks. "
            f"Pass {size} splits with a sum of {num_rows}."
        )
    if not splits and num_rows % size:
        raise CollectiveArgumentError(
            f"Horovod's all_to_all cannot divide {num_rows} {direction} rows into {size} equal splits. Pass "
            f"{direction}_split_sizes."
        )


def _create_copy_function(part: Tensor, target: Destination | None) -> Callable[[Tensor], None]:
    def copy(piece: Tensor) -> None:
        part.copy_(piece)
        if target is not None:
            target.finish()

    return copy
