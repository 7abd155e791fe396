"""Compression inside DDP's reducer: what its buckets are made of when it has been told to hand them out.

Every collective is begun in the thread that runs backward, bucket by bucket in DDP's order, so that it is the same
order on all ranks. What a bucket needs a second collective for waits for the end of the backward, which would stand
still before, and could not reach collectives that other ranks are in.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from unitrain.backends.compression import HALF, Compressor
from unitrain.backends.gradient_group import GradientGroup
from unitrain.backends.power_sgd import LowRankGradients, Wait
from unitrain.backends.torch_names import all_gather


class _Running(NamedTuple):
    """A bucket whose first collective is on its way."""

    buffer: Tensor
    steps: Iterator[Wait]
    future: torch.futures.Future[Tensor]


def compress_buckets(model: DistributedDataParallel, compressor: Compressor, sent_in: GradientGroup) -> None:
    """Let `model` reduce its gradients as `compressor` says. All ranks call it, before the first backward."""
    reduction = _Reduction(compressor, model, sent_in)
    # A lambda, because DDP compares the annotations of anything else, which are strings here.
    model.register_comm_hook(None, lambda state, bucket: reduction.add(bucket))


class _Reduction:
    """The buckets of one backward, from the first that is ready to the end."""

    def __init__(self, compressor: Compressor, model: DistributedDataParallel, sent_in: GradientGroup) -> None:
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

    def _path(self) -> GradientGroup:
        sent_in = self._sent_in()
        assert sent_in is not None
        return sent_in


def _begun() -> None:
    """The first wait of a bucket whose collectives begin at the end of the backward."""
