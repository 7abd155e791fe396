"""Collectives over torch.distributed's default process group, whatever moves the bytes below it; read with `base.py`.

The ddp and the horovod backend share all of this, so that they are equal by construction.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unitrain import validation
from unitrain.backends import checks
from unitrain.backends.base import Backend, ReduceOp
from unitrain.backends.capabilities import CompressionState, SupportsPowerSGD, Tunable
from unitrain.backends.compression_setting import Compression
from unitrain.backends.consistency import ConsistencyCheck
from unitrain.backends.fork_safety import make_forks_safe
from unitrain.backends.gradients.compression import CompressionStates
from unitrain.backends.gradients.ddp_wrapper import (
    BUCKET_VIEW,
    BUCKETS,
    GlobalGradients,
    check_same_model,
    check_same_settings,
)
from unitrain.backends.gradients.forward_buffers import ForwardBuffers
from unitrain.backends.gradients.local_gradients import check_before_step
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.backends.objects import NOTHING, broadcast_with_tensors, pack, unpack
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.backends.tensors import from_ordered_keys, needs_keys, ordered_keys
from unitrain.bootstrap import environment
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import ModelError
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.torch_compat import all_gather, reduce_scatter

_TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # Gloo has no average: all transports sum, then divide, so that they round alike
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_HALF = (torch.float16, torch.bfloat16)
# NCCL aborts the process without a reason when its own timeout is over, so the watchdog must be earlier.
LAST_RESORT = timedelta(seconds=30)


class ProcessGroupBackend(Backend, SupportsPowerSGD):
    """A backend over torch.distributed's default group, which its subclass has initialised."""

    tunables: tuple[Tunable, ...] = (BUCKETS, BUCKET_VIEW)
    _waits_on_stream = False  # whether it is a GPU's stream, and not the host, that waits for gradients

    def __init__(
        self, rendezvous: Rendezvous, device: torch.device, transport: str, control: dist.ProcessGroup | None = None
    ) -> None:
        """`control` is the group of the consistency checks and small tensors, None for the default group."""
        make_forks_safe()
        self.device = device
        self.transport = transport
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._rendezvous = rendezvous
        self._ended = False
        self._wrapped: WeakSet[GlobalGradients] = WeakSet()
        self._gradient_group: Any = None
        self._memories = CompressionStates()
        own = rendezvous.node_positions[self.rank]
        self.local_rank, self.local_size = own.local_rank, own.local_size
        self.node_rank, self.num_nodes = own.node_rank, own.num_nodes
        # Whether the ranks must use several groups in one order.
        self._keeps_order = transport == "nccl"
        self._monitor = FailureMonitor(rendezvous, polls=device.type == "cpu")
        self._agree = ConsistencyCheck(self, self._monitor, control)

    def allreduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        dtype = _reduced_dtype(getattr(tensor, "dtype", torch.float32), op)  # the check tells of what is no tensor
        agreed = self._agree("allreduce", tensor, op=op, check=lambda: checks.check_reduce(tensor, op), dtype=dtype)
        if agreed.contents is not None:
            result = _reduced(agreed.contents.view(dtype), op).view(tensor.shape)
        elif agreed.total is not None:
            result = agreed.total.to(dtype).view(tensor.shape)
        elif op in ("min", "max") and needs_keys(dtype, op):
            keys = ordered_keys(_widened(tensor, dtype), op)
            self._monitor.wait_for_ranks(dist.all_reduce(keys, _TORCH_OPS[op], async_op=True))
            result = from_ordered_keys(keys, dtype)
        else:
            result = _widened(tensor, dtype)
            self._monitor.wait_for_ranks(dist.all_reduce(result, _TORCH_OPS[op], async_op=True))
        return self._finish(result, tensor.dtype, op)

    def allgather(self, tensor: Tensor) -> Tensor:
        dtype = getattr(tensor, "dtype", torch.float32)  # the check tells of what is no tensor
        agreed = self._agree("allgather", tensor, check=lambda: checks.check_tensor(tensor), dtype=dtype)
        rows, rest = agreed.counts, tensor.shape[1:]
        own = tensor.detach().reshape(tensor.shape or (1,))
        most = max(rows)
        if agreed.contents is not None:
            gathered = agreed.contents.view(tensor.dtype).reshape(self.size * most, *rest)
        else:
            # All transports carry equal pieces only, so shorter ones are padded.
            piece = own.to(_wide_dtype(tensor.dtype)).resolve_conj().resolve_neg().contiguous()
            if len(own) < most:
                piece = torch.cat([piece, piece.new_zeros((most - len(own), *rest))])
            gathered = piece.new_empty((self.size * most, *rest))
            if piece.numel():
                self._monitor.wait_for_ranks(all_gather(gathered.view(-1), piece.view(-1), async_op=True))
            gathered = gathered.to(tensor.dtype)
        if min(rows) == most:
            return gathered
        return torch.cat([piece[:count] for piece, count in zip(gathered.split(most), rows, strict=True)])

    def reducescatter(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        def check() -> None:
            checks.check_reduce(tensor, op)
            checks.check_divides(tensor, self.size)

        self._agree("reducescatter", tensor, op=op, check=check)
        whole = _widened(tensor, _reduced_dtype(tensor.dtype, op))
        if op in ("min", "max") and needs_keys(tensor.dtype, op):
            whole = ordered_keys(whole, op)
        result = whole.new_empty((whole.shape[0] // self.size, *whole.shape[1:]))
        if result.numel():
            self._monitor.wait_for_ranks(reduce_scatter(result, whole, _TORCH_OPS[op], async_op=True))
        if needs_keys(tensor.dtype, op):
            result = from_ordered_keys(result, tensor.dtype)
        return self._finish(result, tensor.dtype, op)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        def check() -> None:
            checks.check_tensor(tensor)
            checks.check_root(root, self.size)

        self._agree("broadcast", tensor, root=root, check=check)
        result = _widened(tensor, _wide_dtype(tensor.dtype))
        if result.numel():
            self._monitor.wait_for_ranks(dist.broadcast(result, root, async_op=True))
        return result.to(tensor.dtype)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        payload, problem = pack(obj) if root == self.rank else (NOTHING, None)

        def check() -> None:
            checks.check_root(root, self.size)
            if problem is not None:
                raise problem

        agreed = self._agree("broadcast_object", payload, root=root, check=check, dtype=torch.uint8)
        if agreed.contents is not None:
            payload = agreed.contents[root, : agreed.root_count]
        else:
            if root != self.rank:
                payload = torch.empty(agreed.root_count, dtype=torch.uint8)
            self._agree.broadcast_bytes(payload, root)
        return obj if root == self.rank else unpack(payload, self.device)

    def allgather_object(self, obj: Any) -> list[Any]:
        payload, problem = pack(obj)

        def check() -> None:
            if problem is not None:
                raise problem

        agreed = self._agree("allgather_object", payload, check=check, dtype=torch.uint8)
        if agreed.contents is not None:
            parts = [part[:count] for part, count in zip(agreed.contents, agreed.counts, strict=True)]
        else:
            parts = self._agree.gather_bytes(payload, agreed.counts)
        return [unpack(part, self.device) for part in parts]

    def barrier(self) -> None:
        self._agree("barrier")

    def distributed_model(
        self, model: nn.Module, *, find_unused_parameters: bool = False, compression: Compression = "none"
    ) -> nn.Module:
        def check() -> None:
            checks.check_model(model, compression, self.device)
            validation.switch("distributed_model(find_unused_parameters=...)", find_unused_parameters)

        self.check_running("distributed_model")
        call_on_all_ranks(self, check)
        debug = call_on_all_ranks(self, environment.is_debug_enabled)
        check_same_settings(
            self, find_unused_parameters=find_unused_parameters, compression=compression, **{environment.DEBUG: debug}
        )
        check_same_model(self, model)
        if find_unused_parameters and self._gradient_group is None:
            # Ranks that leave different parameters out send their gradients earlier or later than other ranks do,
            # relative to the collectives that run inside their backward. Within one group those would meet each other.
            self._gradient_group = dist.new_group(timeout=self._rendezvous.timeout)
            if self._waits_on_stream:
                set_transport_timeout(self._gradient_group, self.device, self._rendezvous.timeout + LAST_RESORT)
        own_group = self._gradient_group if find_unused_parameters else None
        wrapped = GlobalGradients(
            model,
            self.device,
            self._rendezvous,
            find_unused_parameters=find_unused_parameters,
            compressor=self._memories.compressor(compression, self.unwrap(model), self),
            group=own_group,
            buffers=ForwardBuffers(model, self) or None,
            sent_in=ReducerGroup(
                own_group or dist.distributed_c10d._get_default_group(),
                self._monitor,
                (lambda bucket: self._agree("gradients", bucket)) if debug else None,
                on_stream=self._waits_on_stream,
                at_end=own_group is not None and self._keeps_order,
            ),
        )
        self._wrapped.add(wrapped)
        return wrapped

    def compression_state(self, model: nn.Module) -> CompressionState:
        return self._memories.of(self.unwrap(model))

    def distributed_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        self.check_running("distributed_optimizer")
        call_on_all_ranks(self, lambda: checks.check_optimizer(optimizer, self.unwrap(model)))
        state = broadcast_with_tensors(self, optimizer.state_dict())
        if self.rank != 0:
            optimizer.load_state_dict(state)
        wrapped = getattr(model, "_orig_mod", model)
        if isinstance(wrapped, GlobalGradients):
            check_before_step(optimizer, wrapped.check_reduced)
        return optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        return self._synchronised(model).no_sync()

    def unwrap(self, model: nn.Module) -> nn.Module:
        model = getattr(model, "_orig_mod", model)  # the name torch.compile gives to what it wraps
        inner = model.module if isinstance(model, GlobalGradients) else model
        return getattr(inner, "_orig_mod", inner)

    def report_failure(self, error: BaseException) -> None:
        self._monitor.report_failure(error)

    def shutdown(self) -> None:
        self._monitor.stop()
        # A group ends with the last that holds it, and Gloo's threads with the group. Those that are still there when
        # the interpreter goes abort the process now and then (pytorch#179291).
        for model in self._wrapped:
            model.leave_group()
        self._gradient_group = None
        self._agree.leave_group()
        if not self._ended and dist.is_initialized():
            dist.destroy_process_group()
        self._is_shut_down = True
        self._ended = True  # another backend's group may be there by the time of a second call

    def _synchronised(self, model: nn.Module) -> GlobalGradients:
        found = getattr(model, "_orig_mod", model)
        if not isinstance(found, GlobalGradients):
            raise ModelError(
                f"no_sync takes the model that distributed_model returned, got {type(model).__name__}. "
                "Use: model = backend.distributed_model(model)"
            )
        return found

    def _finish(self, result: Tensor, dtype: torch.dtype, op: str) -> Tensor:
        if op == "mean":
            result /= self.size
        return result.to(dtype)


def set_transport_timeout(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
    """Let what moves tensors of `device` in `group` wait until `timeout`."""
    transport = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL it is wrapped in a group that checks arguments and has no timeout.
    getattr(transport, "wrapped_pg", transport)._set_default_timeout(timeout)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.uint8 if dtype == torch.bool else dtype  # no transport reduces booleans; 0 and 1 behave alike


def _reduced_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    # A sum over ranks can be more than half a format holds where the mean is not, and transports sum it in different
    # formats.
    return torch.float32 if dtype in _HALF and op != "min" and op != "max" else _wide_dtype(dtype)


def _reduced(parts: Tensor, op: ReduceOp) -> Tensor:
    """Return the `parts` of all ranks, [ranks, elements], combined in rank order, with the sum for the mean."""
    combine = {"min": torch.minimum, "max": torch.maximum, "product": torch.mul}.get(op, torch.add)
    return functools.reduce(combine, parts.unbind()[1:], parts[0].clone())


def _widened(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy to communicate in place."""
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
