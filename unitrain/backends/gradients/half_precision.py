"""Reduction of half-precision gradients in float32, so that each gradient is the mean over ranks, rounded once.

DDP divides half-precision gradients by the number of ranks and then sums them in half precision, so the result depends
on the transport, and differs from the rounded mean in about half of the elements on three ranks.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unitrain.backends.gradients.end_of_backward import BackwardStage, end_of_backward
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.backends.tensors import HALF_DTYPES

# Maximum number of buckets whose sums exist in float32 at the same time; further buckets wait. Transports process about
# two buckets at the same time.
_MAX_IN_FLIGHT = 4


def has_half_precision(model: nn.Module) -> bool:
    """Return whether `model` has parameters in half precision."""
    return any(parameter.dtype in HALF_DTYPES for parameter in model.parameters())


class _Bucket(NamedTuple):
    buffer: Tensor
    future: torch.futures.Future[Tensor]


class _BucketInFlight(NamedTuple):
    bucket: _Bucket
    total: Tensor  # float32, or the buffer itself if that is not in half precision
    work: dist.Work


class Float32Reduction:
    """A communication hook of DDP that sums buckets in half precision in float32, and other buckets as DDP does.

    With `find_unused_parameters`, the number of buckets in flight is not limited: DDP starts another allreduce after
    the last bucket, and all ranks must start the operations in the same order.
    """

    def __init__(self, reducer_group: ReducerGroup, *, find_unused_parameters: bool) -> None:
        self._max_in_flight = sys.maxsize if find_unused_parameters else _MAX_IN_FLIGHT
        # A weak reference, so that this object does not keep the groups alive after a shutdown.
        self._reducer_group, self._size = weakref.ref(reducer_group), reducer_group.size()
        self._waiting: deque[_Bucket] = deque()
        self._in_flight: deque[_BucketInFlight] = deque()

    @torch.no_grad()  # also in a backward pass with create_graph=True
    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Start to reduce `bucket`. The returned future completes at the end of the backward pass, or earlier."""
        if bucket.index() == 0:  # an exception may have interrupted the previous backward pass
            self._waiting.clear()
            self._in_flight.clear()
        buffer, group = bucket.buffer(), self._get_group()
        group.begin_bucket(buffer)
        devices: Any = [buffer.device] if buffer.is_cuda else None
        future = torch.futures.Future[Tensor](devices=devices)
        self._waiting.append(_Bucket(buffer, future))
        if not group.defers_allreduces:
            self._start_next()
        if bucket.is_last():
            end_of_backward.add(BackwardStage.REDUCE_BUCKETS, self._finish, group.model_number)
        return future

    def _start_next(self) -> None:
        """Complete the buckets whose collectives have completed, without waiting, and start the next ones, in order."""
        group = self._get_group()
        while self._in_flight and self._in_flight[0].work.is_completed():
            self._complete(self._in_flight.popleft())
        while self._waiting and len(self._in_flight) < self._max_in_flight:
            bucket = self._waiting.popleft()
            is_half = bucket.buffer.dtype in HALF_DTYPES
            total = bucket.buffer.float() if is_half else bucket.buffer.mul_(1 / self._size)  # DDP's arithmetic
            work = group.start_allreduce([total])
            if group.waits_on_stream:
                group.add_work(work)  # for the watchdog
            self._in_flight.append(_BucketInFlight(bucket, total, work))

    @torch.no_grad()
    def _finish(self) -> None:
        group = self._get_group()
        with group.monitored_wait():
            while True:
                self._start_next()
                if not self._in_flight:
                    return
                if not group.waits_on_stream:
                    group.wait_for_ranks(self._in_flight[0].work)
                self._complete(self._in_flight.popleft())

    def _complete(self, reduced: _BucketInFlight) -> None:
        reduced.work.wait()
        buffer = reduced.bucket.buffer
        if reduced.total is not buffer:
            buffer.copy_(reduced.total.div_(self._size))
        reduced.bucket.future.set_result(buffer)

    def _get_group(self) -> ReducerGroup:
        group = self._reducer_group()
        assert group is not None, "the graph of the running backward pass keeps the model alive"
        return group
