"""Gradient compression: half precision, or PowerSGD with its state. `compression_setting.py` specifies the formulas.

With DDP, a comm hook compresses the buckets of DDP's reducer. A bucket takes up to two collectives. The autograd thread
starts the first collectives in DDP's bucket order, which is the same on all ranks, and the second ones at the end of
the backward pass. Waiting for a first collective during the backward pass could deadlock, because other ranks may wait
for collectives that this thread has not started yet. If the reducer group defers its allreduces, the first collectives
also start at the end. With the local backend, the same arithmetic runs at the end of each backward pass outside
`no_sync`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from unitrain.backends.base import Communicator
from unitrain.backends.compression_setting import Compression, PowerSGD, resolve_compression
from unitrain.backends.gradients.end_of_backward import (
    BackwardStage,
    do_not_wait,
    end_of_backward,
    tensors_requiring_grad,
)
from unitrain.backends.gradients.power_sgd import PowerSGDCompressor, Wait
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.backends.slow_network_exchange import start_allgather, start_alltoall
from unitrain.backends.tensors import HALF_DTYPES
from unitrain.errors import ModelError
from unitrain.torch_compat import current_backward

DTYPE_BY_COMPRESSION = {"fp16": torch.float16, "bf16": torch.bfloat16}
Compressor = Literal["none", "fp16", "bf16"] | PowerSGDCompressor


class CompressionStates:
    """The PowerSGD compressors of a backend, by model."""

    def __init__(self) -> None:
        self._compressors: WeakKeyDictionary[nn.Module, PowerSGDCompressor] = WeakKeyDictionary()

    def create(self, compression: Compression, model: nn.Module, communicator: Communicator) -> Compressor:
        """Return a new compressor for the gradients of `model`, the user's module. It replaces an earlier PowerSGD
        compressor of the model. Without PowerSGD, the compressor is the name of the compression."""
        self._compressors.pop(model, None)
        setting = resolve_compression(compression)
        if not isinstance(setting, PowerSGD):
            return setting
        self._compressors[model] = compressor = PowerSGDCompressor(setting, model, communicator)
        return compressor

    def get(self, model: nn.Module) -> PowerSGDCompressor:
        """Return the PowerSGD compressor of `model`, the user's module. Raises ModelError if it has none."""
        if model not in self._compressors:
            raise ModelError(
                f"The gradients of this {type(model).__name__} are not compressed by PowerSGD, so it has no "
                'compression state. Use: model = backend.distributed_model(model, compression="powersgd")'
            )
        return self._compressors[model]


class _BucketInFlight(NamedTuple):
    """A bucket whose first collective has started, or is deferred. `next(stages)` starts the next collective and
    returns its wait function."""

    buffer: Tensor
    stages: Iterator[Wait]
    future: torch.futures.Future[Tensor]


def register_compression_hook(
    model: DistributedDataParallel, compressor: Compressor, reducer_group: ReducerGroup
) -> None:
    """Register a comm hook that reduces the gradients of `model` with `compressor`, which is not "none". All ranks must
    call this function before the first backward pass."""
    compression = _BucketCompression(compressor, model, reducer_group)
    # DDP rejects a hook whose annotations are strings, as all annotations of this module are. A lambda has none.
    DistributedDataParallel.register_comm_hook(model, None, lambda state, bucket: compression.start_bucket(bucket))


class _BucketCompression:
    """Compresses and reduces the buckets of the current backward pass."""

    def __init__(self, compressor: Compressor, model: DistributedDataParallel, reducer_group: ReducerGroup) -> None:
        self._compressor, self._world_size = compressor, dist.get_world_size()
        # The references are weak, so that this object does not keep the groups alive after a shutdown.
        self._model, self._reducer_group = weakref.ref(model), weakref.ref(reducer_group)
        self._in_flight: list[tuple[_BucketInFlight, Wait]] = []
        self._scratch: dict[int, Tensor] = {}

    @torch.no_grad()  # also in a backward pass with create_graph=True
    def start_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to reduce `bucket`. The returned future completes at the end of the backward pass."""
        if bucket.index() == 0:  # an exception may have interrupted the previous backward pass
            self._in_flight.clear()
            if isinstance(self._compressor, PowerSGDCompressor):
                self._compressor.discard_unfinished()
        buffer = bucket.buffer()
        self._get_reducer_group().begin_bucket(buffer)
        device = buffer.device
        future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        stages = self._compress(bucket)
        if self._get_reducer_group().defers_allreduces:
            stages = chain([do_not_wait], stages)
        in_flight = _BucketInFlight(buffer, stages, future)
        self._in_flight.append((in_flight, next(in_flight.stages)))
        if bucket.is_last():
            for index in [index for index in self._scratch if index > bucket.index()]:
                del self._scratch[index]  # of an earlier reducer with more buckets, before parameters were frozen
            model_number = self._get_reducer_group().model_number
            end_of_backward.add(BackwardStage.COMPRESS, self._finish, model_number)
        return in_flight.future

    @torch.no_grad()
    def _finish(self) -> None:
        started_buckets = [in_flight for in_flight, _ in self._in_flight]
        with self._get_reducer_group().monitored_wait():
            while self._in_flight:
                waiting, self._in_flight = self._in_flight, []
                for in_flight, wait in waiting:
                    wait()
                    next_wait = next(in_flight.stages, None)
                    if next_wait is not None:
                        self._in_flight.append((in_flight, next_wait))
        if isinstance(self._compressor, PowerSGDCompressor):
            self._compressor.finish()
        for in_flight in started_buckets:
            in_flight.future.set_result(in_flight.buffer)

    def _compress(self, bucket: dist.GradBucket) -> Iterator[Wait]:
        if not isinstance(self._compressor, PowerSGDCompressor):
            buffer = bucket.buffer()
            # Currently, DDP passes a complex bucket as real numbers. If it were complex, a conversion to half precision
            # would drop the imaginary parts.
            if buffer.is_complex():
                buffer = torch.view_as_real(buffer).view(-1)
            is_half = buffer.dtype in HALF_DTYPES
            dtype = buffer.dtype if is_half else DTYPE_BY_COMPRESSION[self._compressor]
            scratch = self._scratch_for(bucket.index(), buffer, dtype)
            return self._reduce_half(buffer, scratch)
        parameters = bucket.parameters()
        # A bucket has one dtype, and complex gradients are never compressed by PowerSGD. DDP passes a complex bucket as
        # real numbers, and `bucket.gradients()` returns only half of them.
        if self._compressor.is_before_start_step or parameters[0].is_complex():
            return self._compressor.reduce(parameters[:1], [bucket.buffer()], self._start_allreduce)  # whole buffer
        return self._compressor.reduce(parameters, bucket.gradients(), self._start_allreduce)

    def _scratch_for(self, index: int, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a send buffer and a receive buffer for a bucket: [2, elements padded to a multiple of the number of
        ranks]. On two ranks, the shape is [3, elements], and the last two rows are the receive buffer.

        They are reused in later backward passes, because allocating them takes longer than the arithmetic.
        """
        padded = -(-buffer.numel() // self._world_size) * self._world_size
        shape = (3, buffer.numel()) if self._world_size == 2 else (2, padded)
        scratch = self._scratch.get(index)
        # DDP changes the buckets after the first backward pass.
        if scratch is None or (scratch.shape, scratch.dtype) != (shape, dtype):
            scratch = self._scratch[index] = buffer.new_zeros(shape, dtype=dtype)
        return scratch

    def _reduce_half(self, buffer: Tensor, scratch: Tensor) -> Iterator[Wait]:
        """Replace `buffer` with the sum over ranks of round(values / number of ranks). The sum is also rounded to half
        precision. Values that are already in half precision are divided after the sum, so that they are rounded once.

        An all-to-all and an allgather transfer as many bytes as an allreduce. An allreduce would add in half precision
        and in an order that depends on the transport, whereas here each rank sums one slice in float32, in rank order.
        On two ranks, one allgather transfers the same number of bytes, and there is no second collective that would
        have to wait for the end of the backward pass.
        """
        group = self._get_process_group()
        own, received = scratch[0], scratch[1:].view(-1)
        is_half = buffer.dtype in HALF_DTYPES
        own[: buffer.numel()] = buffer if is_half else buffer.div_(self._world_size)
        divisor = self._world_size if is_half else 1
        # As bytes, because some transports do not support half precision.
        own_bytes, received_bytes = own.view(torch.uint8), received.view(torch.uint8)
        rank_parts = received.chunk(self._world_size)
        if self._world_size == 2:
            yield self._start(lambda: start_allgather(received_bytes, own_bytes, group))
            own.copy_(_sum_in_float32(rank_parts, buffer, divisor))
        else:
            yield self._start(lambda: start_alltoall(received_bytes, own_bytes, group))
            reduced_part = rank_parts[0]  # rank 0's part, which the sum replaces
            reduced_part.copy_(_sum_in_float32(rank_parts, buffer, divisor))
            part_bytes = reduced_part.view(torch.uint8)
            yield self._start(lambda: start_allgather(own_bytes, part_bytes, group))
        buffer.copy_(own[: buffer.numel()])

    def _start_allreduce(self, tensor: Tensor) -> Wait:
        return self._start(lambda: dist.all_reduce(tensor, group=self._get_process_group(), async_op=True))

    def _start(self, collective: Callable[[], dist.Work | None]) -> Wait:
        """Start `collective`, and return a function that waits for it. If it cannot start because of another rank's
        ModelError, re-raise that error."""
        try:
            work = collective()
        except RuntimeError as error:  # the connection to a rank is closed
            self._get_reducer_group().raise_cause_of(error)
            raise
        if work is None:
            return do_not_wait
        self._get_reducer_group().add_work(work)
        return lambda: self._get_reducer_group().wait_for_ranks(work)

    def _get_process_group(self) -> dist.ProcessGroup:
        model = self._model()
        assert model is not None
        return model.process_group

    def _get_reducer_group(self) -> ReducerGroup:
        reducer_group = self._reducer_group()
        assert reducer_group is not None
        return reducer_group


def _sum_in_float32(parts: Sequence[Tensor], buffer: Tensor, divisor: int) -> Tensor:
    """Return the sum of tensors of the same size, added in their order, divided by `divisor`; in the memory of `buffer`
    if it is float32."""
    total = buffer[: len(parts[0])] if buffer.dtype == torch.float32 else parts[0].float()
    total.copy_(parts[0])
    for part in parts[1:]:
        total += part
    return total if divisor == 1 else total.div_(divisor)


def compress_each_backward(
    model: nn.Module, compressor: Compressor, reduces_gradients: Callable[[], bool]
) -> Callable[[], None]:
    """Register hooks that compress the gradients at the end of each backward pass of `model` outside `no_sync`, on a
    single rank. Return a function that ends the compression.

    `reduces_gradients` returns, during a backward pass, whether this pass runs outside `no_sync`.
    """
    parameters = list(model.parameters())
    handles: list[RemovableHandle] = []
    hooked: set[Tensor] = set()
    reached: set[Tensor] = set()  # since the last compression, including backward passes inside no_sync
    backward = last_reaching_backward = -1

    def compress() -> None:
        # Autograd graph task IDs increase, so `>=` includes nested backward passes. A backward pass that reaches no
        # parameter, as in torch.autograd.grad, adds nothing to the accumulated gradients, so they are not compressed.
        if last_reaching_backward >= backward:
            _compress_gradients([parameter for parameter in parameters if parameter in reached], compressor)
            reached.clear()

    def on_gradient(parameter: Tensor) -> None:
        nonlocal last_reaching_backward
        reached.add(parameter)
        last_reaching_backward = current_backward()

    def on_output_gradient(gradient: Tensor) -> None:
        nonlocal backward
        if (current := current_backward()) != backward and reduces_gradients():
            backward = current
            end_of_backward.add(BackwardStage.COMPRESS, compress)

    def on_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter not in hooked:  # the user may have unfrozen it
                hooked.add(parameter)
                handles.append(parameter.register_post_accumulate_grad_hook(on_gradient))
        for tensor in tensors_requiring_grad(output):
            tensor.register_hook(on_output_gradient)

    def stop() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    handles.append(model.register_forward_hook(on_forward))
    return stop


@torch.no_grad()
def _compress_gradients(parameters: list[nn.Parameter], compressor: Compressor) -> None:
    if isinstance(compressor, PowerSGDCompressor):
        compressor.discard_unfinished()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:  # another hook has removed it
            continue
        if isinstance(compressor, PowerSGDCompressor):
            for _ in compressor.reduce([parameter], [gradient], lambda total: do_not_wait):
                pass
        elif gradient.dtype not in HALF_DTYPES:
            gradient.copy_(_round_to_dtype(gradient, DTYPE_BY_COMPRESSION[compressor]))
    if isinstance(compressor, PowerSGDCompressor):
        compressor.finish()


def _round_to_dtype(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    if not gradient.is_complex():
        return gradient.to(dtype)
    parts = torch.view_as_real(gradient.resolve_conj())  # converting a complex number drops its imaginary part
    return torch.view_as_complex(parts.to(dtype).to(parts.dtype))
