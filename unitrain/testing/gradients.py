"""Contract tests of `distributed_model` and `no_sync`: after `backward`, every gradient is the mean over ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unitrain.backends.base import Backend
from unitrain.errors import ModelError
from unitrain.testing.cases import contract, raises
from unitrain.testing.models import (
    assert_gradients,
    assert_reduced,
    backward,
    batch,
    build,
    compute_loss,
    gradients,
    mean_gradients,
    seeded_generator,
)


@contract
def gradients_are_the_mean_over_ranks_after_backward(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    for step in range(4):
        model.zero_grad()
        backward(wrapped, backend.rank, step)
        assert_gradients(model, mean_gradients(backend, twin, lambda m, rank, step=step: backward(m, rank, step)))


@contract
def distributed_model_broadcasts_parameters_and_buffers_of_rank_0(backend: Backend) -> None:
    model = nn.Sequential(build(seed=backend.rank), nn.BatchNorm1d(3).double())
    for buffer in model[1].buffers():
        buffer += backend.rank
    backend.distributed_model(model)
    expected = nn.Sequential(build(seed=0), nn.BatchNorm1d(3).double()).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@contract
def wrapping_changes_no_parameter_or_learning_rate(backend: Backend) -> None:
    model = build()
    before = copy.deepcopy(model.state_dict())
    wrapped = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), wrapped)
    backward(wrapped, backend.rank)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state, "the optimizer was stepped"
    assert optimizer.param_groups[0]["lr"] == 0.1


@contract
def backward_after_no_sync_reduces_accumulated_gradients(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    step = 0
    for micro_steps in (1, 3, 2, 5, 1):
        model.zero_grad()
        window = range(step, step + micro_steps)
        for micro_step in window:
            if micro_step == window[-1]:
                backward(wrapped, backend.rank, micro_step)
            else:
                with backend.no_sync(wrapped):
                    backward(wrapped, backend.rank, micro_step)

        def run_window(m: nn.Module, rank: int, window: range = window) -> None:
            for micro_step in window:
                backward(m, rank, micro_step)

        assert_gradients(model, mean_gradients(backend, twin, run_window))
        step += micro_steps


@contract
def no_sync_keeps_gradients_local(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    with backend.no_sync(wrapped):
        backward(wrapped, backend.rank)
    backward(twin, backend.rank)
    assert_gradients(model, gradients(twin), 0)


@contract
def no_sync_rejects_an_undistributed_model(backend: Backend) -> None:
    for model in (build(), None, "model"):
        raises(
            ModelError, "no_sync takes the model that distributed_model returned", lambda m=model: backend.no_sync(m)
        )


@contract
def clipping_uses_global_gradients(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    backward(wrapped, backend.rank)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    expected = mean_gradients(backend, twin, backward)
    for name, parameter in twin.named_parameters():
        parameter.grad = expected[name]
    expected_norm = nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-12, atol=0)
    assert_gradients(model, gradients(twin))


@contract
def two_backward_passes_accumulate(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    for _ in range(2):
        model.zero_grad()
        backward(wrapped, backend.rank, 0)
        backward(wrapped, backend.rank, 1)

        def backward_twice(m: nn.Module, rank: int) -> None:
            backward(m, rank, 0)
            backward(m, rank, 1)

        assert_gradients(model, mean_gradients(backend, twin, backward_twice))


@contract
def one_backward_through_two_forwards_reduces_both(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)

    def run(m: nn.Module, rank: int) -> None:
        (compute_loss(m(batch(rank, 0))) + compute_loss(m(batch(rank, 1)))).backward()

    assert_reduced(backend, wrapped, model, twin, run)


@contract
def retained_graph_is_reduced_in_every_backward(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)

    def run(m: nn.Module, rank: int) -> None:
        loss = compute_loss(m(batch(rank)))
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()

    assert_reduced(backend, wrapped, model, twin, run)


class CheckpointedBlock(nn.Module):
    """A block with activation checkpointing, which recomputes activations in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.block = build(seed=5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return result


@contract
def activation_checkpointing_gives_global_gradients(backend: Backend) -> None:
    model, twin = CheckpointedBlock(), CheckpointedBlock()
    wrapped = backend.distributed_model(model)
    for _ in range(2):
        model.zero_grad()
        backward(wrapped, backend.rank)
        assert_gradients(model, mean_gradients(backend, twin, backward))


class _SumInBackward(torch.autograd.Function):
    """Identity function that calls a collective in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, backend: Backend) -> Tensor:
        ctx.backend = backend
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        total = ctx.backend.allreduce(gradient.new_ones(3), "sum")
        assert total.tolist() == [ctx.backend.size] * 3
        return gradient, None


class _Deep(nn.Module):
    """Layers with one gradient bucket per layer. With a backend, each layer calls a collective in its backward pass.

    `forward` skips the layers with indices in `skipped`.
    """

    def __init__(self, backend: Backend | None) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layers = nn.ModuleList(nn.Linear(400, 400).double() for _ in range(8))
        self.backend = backend

    def forward(self, x: Tensor, skipped: set[int]) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = x if index in skipped else layer(x).tanh()
            x = x if self.backend is None else _SumInBackward.apply(x, self.backend)
        return x


@contract
def collectives_may_run_inside_backward(backend: Backend) -> None:
    """Also tests ranks that skip different parameters, so that their buckets become ready at different times."""
    for find_unused_parameters in (False, True):
        model, twin = _Deep(backend), _Deep(None)
        wrapped = backend.distributed_model(model, find_unused_parameters=find_unused_parameters)
        for step in range(4):

            def run(
                m: nn.Module, rank: int, step: int = step, find_unused_parameters: bool = find_unused_parameters
            ) -> None:
                skipped = {(2 * rank + step) % 8, (rank + 5 * step) % 8} if find_unused_parameters else set()
                x = torch.randn(2, 400, generator=seeded_generator(rank)).double().requires_grad_()
                m(x, skipped).sin().sum().backward()

            model.zero_grad()
            run(wrapped, backend.rank)
            assert_gradients(model, mean_gradients(backend, twin, run), 1e-10)


@contract
def zero_grad_supports_both_values_of_set_to_none(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    for step, set_to_none in enumerate((True, False, False, True)):
        model.zero_grad(set_to_none=set_to_none)
        backward(wrapped, backend.rank, step)
        assert_gradients(model, mean_gradients(backend, twin, lambda m, rank, step=step: backward(m, rank, step)))


@contract
def evaluation_forward_does_not_communicate(backend: Backend) -> None:
    model, twin = build(), build()
    wrapped = backend.distributed_model(model)
    for step in range(2):
        with torch.no_grad():
            for _ in range(backend.rank):  # a different number of forward passes on each rank
                wrapped(batch(backend.rank))
        model.zero_grad()
        backward(wrapped, backend.rank, step)
        assert_gradients(model, mean_gradients(backend, twin, lambda m, rank, step=step: backward(m, rank, step)))


@contract
def unwrap_returns_the_users_model(backend: Backend) -> None:
    model = build()
    wrapped = backend.distributed_model(model)
    assert backend.unwrap(wrapped) is model
    assert backend.unwrap(model) is model
    assert list(backend.unwrap(wrapped).state_dict()) == list(build().state_dict())


def _compile(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend="aot_eager")
    return compiled  # type: ignore[no-any-return]


@contract
def compiled_models_are_reduced(backend: Backend) -> None:
    for compile_inside in (True, False):
        model, twin = build(), build()
        if compile_inside:
            wrapped = backend.distributed_model(_compile(model))
        else:
            wrapped = _compile(backend.distributed_model(model))
        for step in range(2):
            model.zero_grad()
            with backend.no_sync(wrapped):
                backward(wrapped, backend.rank, step)
            backward(wrapped, backend.rank, step + 7)

            def run(m: nn.Module, rank: int, step: int = step) -> None:
                backward(m, rank, step)
                backward(m, rank, step + 7)

            assert_gradients(model, mean_gradients(backend, twin, run))
        assert backend.unwrap(wrapped) is model


@contract
def backward_that_creates_a_graph_raises(backend: Backend) -> None:
    """A second derivative that torch.autograd.grad computes is reduced; `backward(create_graph=True)` raises."""
    model, twin = build(), build()
    wrapped = backend.distributed_model(model, find_unused_parameters=True)
    if backend.size > 1:
        loss = compute_loss(wrapped(batch(backend.rank)))
        raises(ModelError, "backward(create_graph=True) was called", lambda: loss.backward(create_graph=True))

    def run(model: nn.Module, rank: int) -> None:
        inputs = batch(rank).requires_grad_()
        loss = compute_loss(model(inputs))
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + gradient.square().sum()).backward()

    assert_reduced(backend, wrapped, model, twin, run)
