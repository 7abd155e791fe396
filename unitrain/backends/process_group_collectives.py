"""Collectives over torch.distributed's default process group, for any transport, with a consistency check."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends import checks, composed_collectives
from unitrain.backends.base import Communicator, ReduceOp
from unitrain.backends.capabilities import SupportsAllToAll
from unitrain.backends.composed_collectives import (
    PiecewiseReduceScatter,
    gather_by_broadcasts,
    gather_directly,
    is_broadcast_gather_faster,
    reduce_in_rank_order,
    reduce_scatter_directly,
)
from unitrain.backends.consistency import ConsistencyCheck
from unitrain.backends.message_exchange import MessageExchange
from unitrain.backends.objects import EMPTY_PAYLOAD, pack, unpack
from unitrain.backends.tensors import HALF_DTYPES, as_bytes, from_ordered_keys, needs_ordered_keys, ordered_keys
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.torch_compat import all_gather_single, reduce_scatter_single

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # Gloo has no average; with a sum and a division, all transports round the same way
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


class ProcessGroupCollectives(Communicator, SupportsAllToAll):
    """The collectives of a backend over the default process group. The backend sets all attributes."""

    _check_consistency: ConsistencyCheck
    _monitor: FailureMonitor
    transport: str
    _uses_all_to_all: bool

    def allreduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        dtype = _reduction_dtype(getattr(tensor, "dtype", torch.float32), op)  # the check rejects other objects
        checked = self._check_consistency(
            "allreduce", tensor, op=op, check=lambda: checks.check_reduction(tensor, op), dtype=dtype
        )
        if checked.contents is not None:
            result = reduce_in_rank_order(checked.contents.view(dtype).unbind(), op).view(tensor.shape)
        elif checked.total is not None:
            result = checked.total.to(dtype).view(tensor.shape)
        elif op in ("min", "max") and needs_ordered_keys(dtype, op):
            keys = ordered_keys(_contiguous_copy(tensor, dtype), op)
            self._monitor.wait_for_ranks(dist.all_reduce(keys, _TORCH_OPS[op], async_op=True))
            result = from_ordered_keys(keys, dtype)
        else:
            result = _contiguous_copy(tensor, dtype)
            self._monitor.wait_for_ranks(dist.all_reduce(result, _TORCH_OPS[op], async_op=True))
        return self._finish_reduction(result, tensor.dtype, op)

    def allgather(self, tensor: Tensor) -> Tensor:
        dtype = getattr(tensor, "dtype", torch.float32)  # the check rejects other objects
        checked = self._check_consistency("allgather", tensor, check=lambda: checks.check_tensor(tensor), dtype=dtype)
        rows, row_shape = checked.counts_by_rank, tensor.shape[1:]
        own = tensor.detach().reshape(tensor.shape or (1,))
        max_rows = max(rows)
        if checked.contents is not None:
            # A view of the received rows would not be contiguous, and fused optimizers require contiguous state.
            contents = checked.contents.view(tensor.dtype).clone(memory_format=torch.contiguous_format)
            gathered = contents.view(self.size * max_rows, *row_shape)
        elif (
            exchange := self._direct_connections(own, sum(rows) * math.prod(row_shape), is_allgather=True)
        ) is not None:
            with self._monitor.waiting():
                return gather_directly(own, rows, self.rank, exchange)
        elif is_broadcast_gather_faster(own, rows):
            return gather_by_broadcasts(own, rows, self.rank, self._monitor.wait_for_ranks)
        else:
            # Transports can only gather tensors of equal size, so shorter tensors are padded.
            padded = own.to(_transport_dtype(tensor.dtype)).resolve_conj().resolve_neg().contiguous()
            if len(own) < max_rows:
                padded = torch.cat([padded, padded.new_zeros((max_rows - len(own), *row_shape))])
            gathered = padded.new_empty((self.size * max_rows, *row_shape))
            if padded.numel():
                self._monitor.wait_for_ranks(all_gather_single(gathered.view(-1), padded.view(-1), async_op=True))
            gathered = gathered.to(tensor.dtype)
        if min(rows) == max_rows:
            return gathered
        return torch.cat([rank_rows[:count] for rank_rows, count in zip(gathered.split(max_rows), rows, strict=True)])

    def reducescatter(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        def check() -> None:
            checks.check_reduction(tensor, op)
            checks.check_divisible(tensor, self.size)

        self._check_consistency("reducescatter", tensor, op=op, check=check)
        if (exchange := self._direct_connections(tensor, tensor.numel())) is not None:
            dtype = _reduction_dtype(tensor.dtype, op)
            with self._monitor.waiting():
                result = reduce_scatter_directly(tensor, op, dtype, self.rank, self.size, exchange)
            return self._finish_reduction(result, tensor.dtype, op)
        if tensor.device.type == "cpu" and tensor.numel():
            return self._create_piecewise_reducescatter(tensor, op).finish(self._monitor.wait_for_ranks)
        source = _contiguous_copy(tensor, _reduction_dtype(tensor.dtype, op))
        if op in ("min", "max") and needs_ordered_keys(tensor.dtype, op):
            source = ordered_keys(source, op)
        result = source.new_empty((source.shape[0] // self.size, *source.shape[1:]))
        if result.numel():
            self._monitor.wait_for_ranks(reduce_scatter_single(result, source, _TORCH_OPS[op], async_op=True))
        if needs_ordered_keys(tensor.dtype, op):
            result = from_ordered_keys(result, tensor.dtype)
        return self._finish_reduction(result, tensor.dtype, op)

    def alltoall(self, tensor: Tensor) -> Tensor:
        def check() -> None:
            checks.check_tensor(tensor)
            checks.check_divisible(tensor, self.size, "alltoall")

        self._check_consistency("alltoall", tensor, check=check)
        sent = _contiguous_copy(tensor, tensor.dtype)
        received = torch.empty_like(sent)
        if sent.numel():  # transferred as bytes, because some transports do not support all dtypes
            work = dist.all_to_all_single(as_bytes(received), as_bytes(sent), async_op=True)
            self._monitor.wait_for_ranks(work)
        return received

    def broadcast(self, tensor: Tensor, root: int = 0, *, caller: str = "") -> Tensor:
        """As in Communicator. `caller` identifies the model that broadcasts its buffers, so that the buffers of
        different models are not mixed."""

        def check() -> None:
            checks.check_tensor(tensor)
            checks.check_root(root, self.size)

        self._check_consistency("broadcast", tensor, root=root, check=check, caller=caller)
        result = _contiguous_copy(tensor, _transport_dtype(tensor.dtype))
        if result.numel():
            self._monitor.wait_for_ranks(dist.broadcast(result, root, async_op=True))
        return result.to(tensor.dtype)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        is_root = isinstance(root, int) and root == self.rank
        payload, error = pack(obj) if is_root else (EMPTY_PAYLOAD, None)

        def check() -> None:
            checks.check_root(root, self.size)
            if error is not None:
                raise error

        checked = self._check_consistency("broadcast_object", payload, root=root, check=check, dtype=torch.uint8)
        if checked.contents is not None:
            payload = checked.contents[root, : checked.root_count]
        else:
            if not is_root:
                payload = torch.empty(checked.root_count, dtype=torch.uint8, device="cpu")
            self._check_consistency.broadcast_bytes(payload, root)
        return obj if is_root else unpack(payload, self.device)

    def allgather_object(self, obj: Any) -> list[Any]:
        payload, error = pack(obj)

        def check() -> None:
            if error is not None:
                raise error

        checked = self._check_consistency("allgather_object", payload, check=check, dtype=torch.uint8)
        if checked.contents is not None:
            parts = [part[:count] for part, count in zip(checked.contents, checked.counts_by_rank, strict=True)]
        else:
            parts = self._check_consistency.gather_bytes(payload, checked.counts_by_rank)
        return [unpack(part, self.device) for part in parts]

    def barrier(self) -> None:
        self._check_consistency("barrier")

    def _direct_connections(
        self, tensor: Tensor, num_elements: int, *, is_allgather: bool = False
    ) -> MessageExchange | None:
        """Return the direct connections to the other ranks if they exist and are faster than the transport, otherwise
        None.

        `num_elements` is the number of elements of a reducescatter's input or, with `is_allgather`, of an allgather's
        result, in the dtype of `tensor`. Either all ranks return connections, or none.
        """
        limit = composed_collectives.MAX_DIRECT_BYTES
        if is_allgather and self.transport == "mpi":
            limit = min(limit, composed_collectives.MAX_DIRECT_GATHER_BYTES_WITH_MPI)
        if tensor.device.type != "cpu" or not 0 < num_elements * tensor.element_size() <= limit:
            return None
        return self._check_consistency.message_exchange

    def _create_piecewise_reducescatter(self, tensor: Tensor, op: ReduceOp) -> PiecewiseReduceScatter:
        dtype = _reduction_dtype(tensor.dtype, op)
        return PiecewiseReduceScatter(
            tensor, op, _TORCH_OPS[op], dtype, self.rank, self.size, uses_all_to_all=self._uses_all_to_all
        )

    def _finish_reduction(self, result: Tensor, dtype: torch.dtype, op: str) -> Tensor:
        if op == "mean":
            result /= self.size
        return result.to(dtype)


def _transport_dtype(dtype: torch.dtype) -> torch.dtype:
    # Transports do not reduce booleans. As uint8, they have the same minimum and maximum.
    return torch.uint8 if dtype == torch.bool else dtype


def _reduction_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    # A sum in half precision may overflow even if the mean does not, and transports add in different precisions.
    return torch.float32 if dtype in HALF_DTYPES and op not in ("min", "max") else _transport_dtype(dtype)


def _contiguous_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy, which a collective may overwrite."""
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
