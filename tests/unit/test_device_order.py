"""Synchronization of the host with a device and of streams with a result, on a simulated device.

Tensors on torch's `meta` device have no values, so reading a value on the host raises an error.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import unitrain
from unitrain.backends.horovod import work as horovod_work
from unitrain.backends.local import LocalBackend
from unitrain.data.batch import CountedBatch
from unitrain.data.dummy_batches import StepAligner
from unitrain.data.order import MicroBatch
from unitrain.optim.loss_weighting import Loss, LossKind, LossWeighting

DEVICE = torch.device("meta")


class OneOfTwoRanks(LocalBackend):
    """One of two ranks with equal tensors. Unlike real backends, its collectives accept the meta device."""

    size = 2

    def __init__(self) -> None:
        super().__init__(DEVICE)

    def allreduce(self, tensor: Tensor, op: Any = "mean") -> Tensor:
        return tensor.detach() * (2 if op == "sum" else 1)

    def allgather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor.detach().reshape(tensor.shape or (1,))] * 2)


class HostCopyCounter(TorchFunctionMode):
    """Counts the device tensors that are created from Python numbers. On a GPU, the host waits for such a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function in (torch.tensor, torch.as_tensor) and torch.device(options.get("device", "cpu")) == DEVICE:
            self.count += 1
        return function(*arguments, **options)


def test_sync_batch_norm_waits_for_the_device_only_in_the_first_forward() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)).to(DEVICE)
    unitrain.sync_batch_norm(model, OneOfTwoRanks())
    for layer in (model[1], model[3]):
        layer._was_checked = True  # the first-forward check reads values on the host
    for expected in (2, 0, 0):  # once per layer
        with HostCopyCounter() as copies:
            model(torch.randn(5, 3, 8, 8, device=DEVICE)).sum().backward()
        assert copies.count == expected


def test_ranks_with_aligned_steps_do_not_wait_for_the_device() -> None:
    aligner = StepAligner(
        OneOfTwoRanks(),
        gradient_accumulation_steps=1,
        uneven="weight",
        max_batches_ahead=2,
        min_step_items=None,
        copies_batches=False,
    )
    steps = list(
        aligner.micro_batches(
            lambda: (CountedBatch(4, 4, number) for number in range(3)), start=0, stride=8, num_skipped=0
        )
    )
    assert [batch for batch, _ in steps] == [0, 1, 2]
    assert [part.step_samples for _, part in steps] == [8, 8, 8]


class OperationCounter(TorchDispatchMode):
    """Counts operations. Each operation is one kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.count += 1
        return function(*arguments, **(options or {}))


def test_division_by_tokens_has_the_same_number_of_operations_for_any_number_of_parameters() -> None:
    counts, micro_batch = [], MicroBatch(slice(0, 4), 4, step_samples=8, step_end=8, ends_step=True)
    for layers in (1, 40):
        model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)]).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        weighting = LossWeighting(OneOfTwoRanks())
        weighting._kind = LossKind.SUM  # only the kind of the first loss is compared across ranks
        weighting.weight_loss(Loss(torch.ones((), device=DEVICE), tokens=7), micro_batch)
        for overlapped in weighting.overlapped_work():
            overlapped()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with OperationCounter() as operations:
            weighting.finish_step(optimizer, micro_batch)
        counts.append(operations.count)
    assert counts[0] == counts[1] > 0


class Stream:
    """A simulated stream: its queued operations, and the events that later operations wait for."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.waits_for: list[Event] = []

    def wait_event(self, event: Event) -> None:
        self.waits_for.append(event)


class Event:
    """A simulated event: the operations that were queued in the stream when the event was recorded."""

    def __init__(self) -> None:
        self.after: list[str] = []

    def record(self, stream: Stream) -> None:
        self.after = [*stream.queued]


def test_wait_makes_the_stream_of_the_caller_wait_for_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    streams: dict[int, Stream] = {}

    def current_stream(device: torch.device) -> Stream:
        return streams.setdefault(threading.get_ident(), Stream())

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(horovod_work.hvd, "poll", lambda handle: True)
    monkeypatch.setattr(horovod_work.hvd, "synchronize", lambda handle: torch.ones(2))

    completions = horovod_work.CompletionQueue()
    try:
        work = horovod_work.HorovodWork(
            "allgather", 1, [], torch.device("cpu"),
            lambda output: current_stream(DEVICE).queued.append("copy"), timedelta(seconds=20), completions,
        )  # fmt: skip
        work._device = torch.device("cuda", 0)  # the future of such a work requires a GPU
        completions.add(work)
        while not work.is_completed():  # the thread of `completions` has its own stream
            threading.Event().wait(0.001)
        own = current_stream(DEVICE)
        assert own.queued == []
        assert own.waits_for == []
        work.wait()
        (event,) = own.waits_for
        assert event.after == ["copy"]
    finally:
        completions.stop()
