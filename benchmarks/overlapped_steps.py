"""Backward passes with overlapped or sequential gradient reduction, and allreduce times per bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import loops
import torch
import torch.distributed as dist
from loops import BATCH, CLASSES, FEATURES, MODELS
from torch import Tensor
from torch.nn.functional import cross_entropy

from unitrain.backends.base import Backend

OVERLAPPED, SEQUENTIAL = "overlapped", "sequential"


@dataclass(frozen=True)
class Step:
    """Times on one rank in seconds since the start of the backward pass: `computed` (local gradients computed) and
    `reduced` (all gradients reduced). `buckets` contains the start, end and bytes of each bucket's allreduce."""

    computed: float
    reduced: float
    buckets: tuple[tuple[float, float, int], ...]

    @property
    def hidden(self) -> float:
        """The fraction of the communication time that had elapsed when the last gradient was computed."""
        moments = sorted({moment for begin, end, _ in self.buckets for moment in (begin, end)} | {self.computed})
        busy = [
            (begin, end)
            for begin, end in pairwise(moments)
            if any(start <= begin and end <= stop for start, stop, _ in self.buckets)
        ]
        return sum(end - begin for begin, end in busy if end <= self.computed) / sum(end - begin for begin, end in busy)


_steppers: dict[str, _Stepper] = {}


def take_turn(backend: Backend, reduction: str, model: str) -> Step:
    """Run one forward and backward pass of `model`, and return the times of the backward pass on this rank. All ranks
    must call this function."""
    if model not in _steppers:
        _steppers[model] = _Stepper(backend, MODELS[model][0])
    return _steppers[model].step(reduction)


class _Stepper:
    def __init__(self, backend: Backend, hidden: list[int]) -> None:
        torch.manual_seed(1)
        self._backend, self._model = backend, loops.network(hidden)
        self._samples = torch.randn(BATCH, FEATURES), torch.randint(0, CLASSES, (BATCH,))
        self._wrapped = backend.distributed_model(self._model)
        self._allreduces: list[tuple[float, dist.Work, Tensor]] = []
        self._end_times: dict[int, float] = {}
        self._options: Any = None
        self._computed = 0.0
        first = next(self._model.parameters())  # its gradient is computed last
        first.register_post_accumulate_grad_hook(self._record_computed)
        # The process group in which DDP's reducer reduces the buckets, on both backends.
        group: Any = self._wrapped._reducer_group
        self._allreduce: Callable[..., dist.Work] = group.allreduce
        group.allreduce = self._send

    def step(self, reduction: str) -> Step:
        self._model.zero_grad(set_to_none=False)
        tensors = [tensor for _, _, tensor in self._allreduces]
        self._allreduces, self._end_times = [], {}
        inputs, targets = self._samples
        if reduction == OVERLAPPED:
            loss = cross_entropy(self._wrapped(inputs), targets)
            self._backend.barrier()
            began = time.perf_counter()
            loss.backward()
        else:  # reduce the same buckets after all gradients are computed
            loss = cross_entropy(self._model(inputs), targets)
            self._backend.barrier()
            began = time.perf_counter()
            with self._backend.no_sync(self._wrapped):
                loss.backward()
            for work in [self._send([tensor], self._options) for tensor in tensors]:
                work.wait()
        ended = time.perf_counter()
        while len(self._end_times) < len(self._allreduces):  # another thread records the end of each allreduce
            time.sleep(0.0001)
        buckets = tuple(
            (start - began, self._end_times[index] - began, tensor.nbytes)
            for index, (start, _, tensor) in enumerate(self._allreduces)
        )
        return Step(self._computed - began, ended - began, buckets)

    def _send(self, tensors: list[Tensor], options: Any) -> dist.Work:
        self._options = options
        index, start = len(self._allreduces), time.perf_counter()
        work = self._allreduce(tensors, options)
        self._allreduces.append((start, work, tensors[0]))
        work.get_future().add_done_callback(lambda _: self._end_times.setdefault(index, time.perf_counter()))
        return work

    def _record_computed(self, _: Tensor) -> None:
        self._computed = time.perf_counter()
