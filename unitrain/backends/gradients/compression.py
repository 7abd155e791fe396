"""What a backend holds of a compression: a number format, or PowerSGD with its memory, found again by its model.

Compression inside DDP's reducer: what its buckets are made of when it has been told to hand them out.

Every collective is begun in the thread that runs backward, bucket by bucket in DDP's order, so that it is the same
order on all ranks. What a bucket needs a second collective for waits for the end of the backward, which would stand
still before, and could not reach collectives that other ranks are in.


Compression where there is one rank and no reducer: the same arithmetic, at the end of each backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from unitrain.backends.base import Communicator
from unitrain.backends.compression_setting import Compression, PowerSGD, read_compression
from unitrain.backends.gradients.outputs import gradient_tensors
from unitrain.backends.gradients.power_sgd import LowRankGradients, Wait
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.errors import ModelError
from unitrain.torch_compat import all_gather

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
Compressor = Literal["none", "fp16", "bf16"] | LowRankGradients


class CompressionStates:
    """The memories of those models of a backend that are compressed by PowerSGD."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[nn.Module, LowRankGradients] = WeakKeyDictionary()

    def compressor(self, compression: Compression, model: nn.Module, communicator: Communicator) -> Compressor:
        """Return what compresses the gradients of `model`, the user's own, from here on."""
        self._of.pop(model, None)
        read = read_compression(compression)
        if not isinstance(read, PowerSGD):
            return read
        self._of[model] = memory = LowRankGradients(read, model, communicator)
        return memory

    def of(self, model: nn.Module) -> LowRankGradients:
        """Return the memory of `model`, the user's own. Raises ModelError where it has none."""
        if model not in self._of:
            raise ModelError(
                f"The gradients of this {type(model).__name__} are not compressed by PowerSGD, so nothing is "
                'remembered of them. Use: model = backend.distributed_model(model, compression="powersgd")'
            )
        return self._of[model]


class _Running(NamedTuple):
    """A bucket whose first collective is on its way."""

    buffer: Tensor
    steps: Iterator[Wait]
    future: torch.futures.Future[Tensor]


def compress_buckets(model: DistributedDataParallel, compressor: Compressor, sent_in: ReducerGroup) -> None:
    """Let `model` reduce its gradients as `compressor` says. All ranks call it, before the first backward."""
    reduction = _Reduction(compressor, model, sent_in)
    # A lambda, because DDP compares the annotations of anything else, which are strings here.
    model.register_comm_hook(None, lambda state, bucket: reduction.add(bucket))


class _Reduction:
    """The buckets of one backward, from the first that is ready to the end."""

    def __init__(self, compressor: Compressor, model: DistributedDataParallel, sent_in: ReducerGroup) -> None:
        self._compressor, self._size = compressor, dist.get_world_size()
        # Both let go of their group when the backend ends.
        self._model, self._sent_in = weakref.ref(model), weakref.ref(sent_in)
        self._running: list[tuple[_Running, Wait]] = []
        self._rooms: dict[int, Tensor] = {}

    @torch.no_grad()  # also where backward makes a graph of its own
    def add(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Begin to reduce `bucket`; its future is complete when the backward is."""
        if bucket.index() == 0:  # an exception may have ended an earlier backward before its last
            self._running.clear()
            if isinstance(self._compressor, LowRankGradients):
                self._compressor.forget_unfinished()
        buffer = bucket.buffer()
        self._path().begin(buffer)
        device = buffer.device
        future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        steps = self._steps(bucket)
        if self._path().at_end:
            steps = chain([_begun], steps)
        running = _Running(buffer, steps, future)
        self._running.append((running, next(running.steps)))
        if bucket.is_last():  # before DDP, which then waits for the futures
            Variable._execution_engine.queue_callback(self._finish)
        return running.future

    @torch.no_grad()
    def _finish(self) -> None:
        buckets = [running for running, _ in self._running]
        with self._path().finishing():
            while self._running:
                waiting, self._running = self._running, []
                for running, wait in waiting:
                    wait()
                    following = next(running.steps, None)
                    if following is not None:
                        self._running.append((running, following))
        if isinstance(self._compressor, LowRankGradients):
            self._compressor.finish()
        for running in buckets:
            running.future.set_result(running.buffer)

    def _steps(self, bucket: dist.GradBucket) -> Iterator[Wait]:
        if not isinstance(self._compressor, LowRankGradients):
            buffer = bucket.buffer()
            if buffer.is_complex():  # converting a complex number drops its imaginary part
                buffer = torch.view_as_real(buffer).view(-1)
            return self._reduce_half(buffer, self._room(bucket.index(), buffer, HALF[self._compressor]))
        parameters = bucket.parameters()
        # A bucket has one dtype, and complex gradients are always sent whole. DDP passes its buffer as real numbers,
        # of which `bucket.gradients()` then has only half.
        if self._compressor.sends_whole or parameters[0].is_complex():
            return self._compressor.reduce(parameters[:1], [bucket.buffer()], self._start_sum)  # no copies
        return self._compressor.reduce(parameters, bucket.gradients(), self._start_sum)

    def _room(self, index: int, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what a bucket is sent from and received into, [2, elements in equal parts for all ranks]; it is kept,
        because fresh memory costs more than the arithmetic."""
        shape = (2, -(-buffer.numel() // self._size) * self._size)
        room = self._rooms.get(index)
        if room is None or room.shape != shape:  # the first, or DDP has formed other buckets since
            room = self._rooms[index] = buffer.new_zeros(shape, dtype=dtype)
        return room

    def _reduce_half(self, buffer: Tensor, room: Tensor) -> Iterator[Wait]:
        """Make `buffer` the sum over ranks of what each rounds; as a reduce-scatter and an allgather, which move no
        more than an allreduce does. But an allreduce adds in half precision here and in single there, in an order of
        its own."""
        group = self._group()
        own, received = room
        own[: buffer.numel()] = buffer.div_(self._size)
        # As bytes: what only moves needs no dtype, and not every transport knows these.
        yield self._waiting(
            dist.all_to_all_single(received.view(torch.uint8), own.view(torch.uint8), group=group, async_op=True)
        )
        first, *others = received.chunk(self._size)
        total = buffer[: len(first)] if buffer.dtype == torch.float32 else first.float()
        total.copy_(first)
        for part in others:
            total += part
        first.copy_(total)
        yield self._waiting(all_gather(own.view(torch.uint8), first.view(torch.uint8), group=group, async_op=True))
        buffer.copy_(own[: buffer.numel()])

    def _start_sum(self, tensor: Tensor) -> Wait:
        return self._waiting(dist.all_reduce(tensor, group=self._group(), async_op=True))

    def _waiting(self, work: dist.Work | None) -> Wait:
        if work is None:
            return lambda: None
        self._path().add(work)
        return lambda: self._path().wait_for_ranks(work)

    def _group(self) -> dist.ProcessGroup:
        model = self._model()
        assert model is not None
        return model.process_group

    def _path(self) -> ReducerGroup:
        sent_in = self._sent_in()
        assert sent_in is not None
        return sent_in


def _begun() -> None:
    """The first wait of a bucket whose collectives begin at the end of the backward."""


def compress_backward(model: nn.Module, compressor: Compressor, applies: Callable[[], bool]) -> None:
    """Let every backward of `model` end with its gradients compressed; `applies` tells, during a backward, whether it
    counts."""
    parameters = list(model.parameters())
    followed: set[Tensor] = set()
    reached: set[Tensor] = set()  # since gradients were compressed last, also by backwards that did not count
    backward = last_reaching = -1

    def finish() -> None:
        # Backwards are numbered as they begin, those that run inside another one after it. One that reached no
        # parameter is of torch.autograd.grad; what `no_sync` has added up before it is not complete.
        if last_reaching >= backward:
            _compress([parameter for parameter in parameters if parameter in reached], compressor)
            reached.clear()

    def on_gradient(parameter: Tensor) -> None:
        nonlocal last_reaching
        reached.add(parameter)
        last_reaching = torch._C._current_graph_task_id()

    def on_backward(gradient: Tensor) -> None:
        nonlocal backward
        if (current := torch._C._current_graph_task_id()) != backward and applies():
            backward = current
            Variable._execution_engine.queue_callback(finish)

    def on_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter not in followed:  # the user may have unfrozen it since
                followed.add(parameter)
                parameter.register_post_accumulate_grad_hook(on_gradient)
        for tensor in gradient_tensors(output):
            tensor.register_hook(on_backward)

    model.register_forward_hook(on_forward)


@torch.no_grad()
def _compress(parameters: list[nn.Parameter], compressor: Compressor) -> None:
    if isinstance(compressor, LowRankGradients):
        compressor.forget_unfinished()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:  # another hook has taken it
            continue
        if isinstance(compressor, LowRankGradients):
            for _ in compressor.reduce([parameter], [gradient], lambda total: lambda: None):
                pass
        else:
            gradient.copy_(_rounded(gradient, HALF[compressor]))
    if isinstance(compressor, LowRankGradients):
        compressor.finish()


def _rounded(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    if not gradient.is_complex():
        return gradient.to(dtype)
    parts = torch.view_as_real(gradient.resolve_conj())  # converting a complex number drops its imaginary part
    return torch.view_as_complex(parts.to(dtype).to(parts.dtype))
