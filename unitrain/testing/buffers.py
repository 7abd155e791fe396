"""Contract tests of buffers that are broadcast during training, compared with a simulation in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from unitrain import broadcast_buffers
from unitrain.backends.base import Backend
from unitrain.testing.cases import contract
from unitrain.testing.models import FEATURES, batch, compute_loss

STEPS, FIRST_FROZEN_STEP, LEARNING_RATE = 8, 5, 0.05  # BatchNorm is in eval mode from FIRST_FROZEN_STEP on


class Centers(nn.Module):
    """Model that reads three buffers besides those of BatchNorm.

    Each forward pass in training mode, from index `first_write` on, changes `center` as `write_mode` specifies ("in
    place", "data" or "assigned data"), reassigns `scale`, and adds to `counts`, which is not read. `mask` is constant.
    """

    def __init__(self, write_mode: str = "in place", first_write: int = 0) -> None:
        super().__init__()
        self.write_mode, self.passes_without_write = write_mode, first_write
        torch.manual_seed(2)
        self.first, self.last = nn.Linear(FEATURES, 8).double(), nn.Linear(8, 3).double()
        self.normalized = nn.BatchNorm1d(8).double()
        self.center: Tensor
        self.scale: Tensor
        self.mask: Tensor
        self.counts: Tensor
        self.register_buffer("center", torch.zeros(FEATURES).double())
        self.register_buffer("scale", torch.ones(()).double())
        self.register_buffer("mask", torch.arange(8) % 3 > 0)
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        shifted = (x - self.center) * self.scale
        if self.training and self.passes_without_write > 0:
            self.passes_without_write -= 1
        elif self.training:
            with torch.no_grad():
                mean = 0.7 * self.center + 0.3 * x.mean(0)
                if self.write_mode == "in place":
                    self.center.copy_(mean)
                elif self.write_mode == "data":
                    self.center.data.copy_(mean)
                else:
                    self.center.data = mean
                self.scale = 0.8 * self.scale + 0.2 * x.std()
                self.counts += (x[:, 0] > 0).sum()
        output: Tensor = self.last(self.normalized(self.first(shifted)).tanh() * self.mask)
        return output


def buffers_to_broadcast(model: nn.Module) -> dict[str, Tensor]:
    """Return all buffers except those of BatchNorm layers in training mode."""
    statistics = {id(b) for m in model.modules() if isinstance(m, nn.BatchNorm1d) and m.training for b in m.buffers()}
    return {name: buffer for name, buffer in model.named_buffers() if id(buffer) not in statistics}


def simulate_ddp(size: int, accumulation_steps: int, steps: int = STEPS, **arguments: Any) -> nn.Module:
    """Simulate DDP with broadcast_buffers=True on `size` ranks in one process, and return rank 0's trained model."""
    models = [Centers(**arguments) for _ in range(size)]
    for step in range(steps):
        for model in models:
            model.normalized.train(step < FIRST_FROZEN_STEP)
        for name, buffer in buffers_to_broadcast(models[0]).items():
            for model in models[1:]:
                model.get_buffer(name).copy_(buffer)
        for micro_step in range(accumulation_steps):
            for rank, model in enumerate(models):
                (
                    compute_loss(model(batch(rank, step * accumulation_steps + micro_step))) / accumulation_steps
                ).backward()
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = torch.stack([p.grad for p in parameters if p.grad is not None]).mean(0)
            for parameter in parameters:
                parameter.data.sub_(LEARNING_RATE * mean)
                parameter.grad = None
    return models[0]


def train_on_backend(
    backend: Backend,
    accumulation_steps: int,
    broadcast_after_steps: Iterable[int],
    steps: int = STEPS,
    **arguments: Any,
) -> nn.Module:
    """Train on the backend, and return the model. Call `broadcast_buffers` after the steps `broadcast_after_steps`, as
    the Trainer does for an evaluation or a checkpoint."""
    model = Centers(**arguments)
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), wrapped)
    for step in range(steps):
        model.normalized.train(step < FIRST_FROZEN_STEP)
        for micro_step in range(accumulation_steps):
            x = batch(backend.rank, step * accumulation_steps + micro_step)
            if micro_step < accumulation_steps - 1:
                with backend.no_sync(wrapped):
                    (compute_loss(wrapped(x)) / accumulation_steps).backward()
            else:
                (compute_loss(wrapped(x)) / accumulation_steps).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in broadcast_after_steps:
            broadcast_buffers(wrapped, backend)
    return model


@contract
def buffers_read_in_training_forward_equal_rank_0(backend: Backend) -> None:
    for accumulation_steps in (1, 2):
        expected = simulate_ddp(backend.size, accumulation_steps)
        for broadcast_after_steps in ([], [1, 4, 6], range(STEPS)):
            model = train_on_backend(backend, accumulation_steps, broadcast_after_steps)
            for name, parameter in expected.named_parameters():
                torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=1e-9)
            broadcast_buffers(model, backend)
            for name, buffer in expected.named_buffers():
                torch.testing.assert_close(model.get_buffer(name), buffer, rtol=0, atol=1e-9)


@contract
def training_with_buffers_written_late_or_through_data_equals_ddp(backend: Backend) -> None:
    for write_mode, first_write, steps in (("data", 0, STEPS), ("assigned data", 2, STEPS), ("in place", 33, 36)):
        expected = simulate_ddp(backend.size, 1, steps, write_mode=write_mode, first_write=first_write)
        for broadcast_after_steps in (range(0), range(0, steps, 3)):
            model = train_on_backend(
                backend, 1, broadcast_after_steps, steps, write_mode=write_mode, first_write=first_write
            )
            for name, parameter in expected.named_parameters():
                torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0, atol=1e-9)


@contract
def two_forward_passes_of_a_model_with_buffers_may_precede_a_backward_pass(backend: Backend) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.layer = nn.Linear(FEATURES, 2).double()
            self.mask: Tensor
            self.register_buffer("mask", torch.tensor([1.0, 0.5]).double())

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.layer(x)) * self.mask

    model = Scaled()
    single = copy.deepcopy(model)
    wrapped = backend.distributed_model(model)
    (compute_loss(wrapped(batch(0, 0))) + compute_loss(wrapped(batch(0, 1)))).backward()
    (compute_loss(single(batch(0, 0))) + compute_loss(single(batch(0, 1)))).backward()
    torch.testing.assert_close(model.layer.weight.grad, single.layer.weight.grad)


@contract
def buffer_written_late_is_broadcast_afterwards(backend: Backend) -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.layer = nn.Linear(FEATURES, 2).double()
            self.shift: Tensor
            self.register_buffer("shift", torch.zeros(()).double())

        def forward(self, x: Tensor, writes_buffer: bool) -> Tensor:
            output: Tensor = self.layer(x + self.shift)
            if writes_buffer:
                self.shift += x.mean()
            return output

    model = Late()
    wrapped = backend.distributed_model(model)
    for step in range(40):
        # Only the last rank writes the buffer in step 10; every rank writes it from step 21 on.
        writes_buffer = step > 20 or (step == 10 and backend.rank == backend.size - 1)
        compute_loss(wrapped(batch(backend.rank, step), writes_buffer)).backward()
    broadcast_buffers(wrapped, backend)
    expected = sum(batch(0, step).mean() for step in range(21, 40)) + (
        batch(0, 10).mean() if backend.size == 1 else 0.0
    )
    torch.testing.assert_close(model.shift, torch.as_tensor(expected), rtol=0, atol=1e-12)


@contract
def running_statistics_and_unbroadcast_buffers_need_no_collective(backend: Backend) -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(FEATURES, 2).double(), nn.BatchNorm1d(2).double()
            self.mask: Tensor
            self.register_buffer("mask", torch.ones(2).double())

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = self.norm(self.layer(x)) * self.mask
            return output

    wrapped = backend.distributed_model(Constant(), broadcast_buffers=False)
    calls: list[str] = []

    def record_calls(name: str) -> None:
        original = getattr(backend, name)

        def call(*arguments: object, **settings: object) -> object:
            calls.append(name)
            return original(*arguments, **settings)

        setattr(backend, name, call)

    names = ("allreduce", "broadcast", "allgather", "allgather_object", "broadcast_object")
    for name in names:
        record_calls(name)
    try:
        for step in range(70):
            compute_loss(wrapped(batch(backend.rank, step))).backward()
            broadcast_buffers(wrapped, backend)
    finally:
        for name in names:
            delattr(backend, name)
    # On several ranks, the first forward pass broadcasts all buffers once; each broadcast_buffers call compares the
    # buffers between ranks and broadcasts the running statistics.
    counts = {name: calls.count(name) for name in set(calls)}
    assert counts == {"allreduce": 70, "broadcast": 70 + (1 if backend.size > 1 else 0)}, counts


_DTYPES = (
    torch.int8, torch.int16, torch.uint16, torch.bool, torch.bfloat16, torch.complex32, torch.complex64,
    torch.float8_e4m3fn, torch.float8_e5m2,
)  # fmt: skip


@contract
def parameters_and_buffers_of_all_dtypes_equal_rank_0(backend: Backend) -> None:
    model, values = nn.Linear(2, 1), torch.tensor([1.0, 0.0])
    for index, dtype in enumerate(_DTYPES):
        own = (values if backend.rank == 0 else 1 - values).to(dtype)
        model.register_parameter(f"parameter{index}", nn.Parameter(own.clone(), requires_grad=False))
        model.register_buffer(f"buffer{index}", own.clone())
        model.register_buffer(f"expanded{index}", own[:1].expand(3))
    wrapped = backend.distributed_model(model)
    wrapped(torch.ones(2, 2)).sum().backward()
    for index, dtype in enumerate(_DTYPES):
        expected = values.to(dtype)
        for tensor in (model.get_parameter(f"parameter{index}"), model.get_buffer(f"buffer{index}")):
            assert tensor.dtype == dtype
            assert torch.equal(tensor.detach().view(torch.uint8), expected.view(torch.uint8)), dtype
        expanded = model.get_buffer(f"expanded{index}").contiguous()
        assert torch.equal(expanded.view(torch.uint8), expected[:1].repeat(3).view(torch.uint8)), dtype
