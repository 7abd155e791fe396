"""Contract tests of `distributed_model(logical_ranks=V)`: bit-identical results for any number of processes."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unitrain.backends.base import Backend
from unitrain.backends.current_batches import CurrentBatch, LogicalRank
from unitrain.backends.gradients.exact_reduction import ExactReduction
from unitrain.backends.logical_ranks import local_logical_ranks
from unitrain.errors import ConfigError, ModelError
from unitrain.modules.buffers import broadcast_buffers
from unitrain.testing.cases import contract, may_raise_unsupported_error, raises
from unitrain.testing.models import batch, build, compute_loss

_LOGICAL_RANKS = 5


def _use_logical_rank(backend: Backend, index: int) -> AbstractContextManager[None]:
    return backend.current_batches.enter(CurrentBatch(logical_rank=LogicalRank(index, _LOGICAL_RANKS)))


class _Centered(nn.Module):
    """A layer with a buffer that each forward pass reads and writes."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        centered: Tensor = x - self.center
        self.center = 0.5 * self.center + x.detach().mean(0)
        return centered.tanh()


class _Checkpointed(nn.Module):
    """A layer that is applied twice, once with activation checkpointing, so that its gradients are accumulated
    twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = checkpoint(self.layer, x, use_reentrant=True)
        output: Tensor = self.layer(hidden.tanh())
        return output


def _build_network() -> nn.Module:
    return nn.Sequential(build().float(), _Centered(), nn.BatchNorm1d(3))


def _copy_buffers(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def _set_buffers(model: nn.Module, values: list[Tensor]) -> None:
    for buffer, value in zip(model.buffers(), values, strict=True):
        buffer.copy_(value)


def _backward(model: nn.Module, rank: int, step: int, factor: float = 1.0) -> None:
    (factor * compute_loss(model(batch(rank, step).float()).double())).backward()


def _run_step(backend: Backend, model: nn.Module, micro_batches: range, factors: dict[int, float]) -> None:
    """Run the micro-batches with these indices for each logical rank of this process, and reduce their gradients.

    `factors` maps logical ranks to factors of their losses (default: 1).
    """
    ranks = local_logical_ranks(_LOGICAL_RANKS, backend.rank, backend.size)
    for rank in ranks:
        for step in micro_batches:
            is_last = (rank, step) == (ranks[-1], micro_batches[-1])
            with _use_logical_rank(backend, rank), nullcontext() if is_last else backend.no_sync(model):
                _backward(model, rank, step, factors.get(rank, 1.0))


def _compute_expected_gradients(
    model: nn.Module, micro_batches: range, factors: dict[int, float]
) -> list[Tensor | None]:
    """Return the gradients that a single process computes, and update the buffers of `model`. Assert that the gradients
    are the means over logical ranks, up to rounding."""
    gradients_by_rank, start = [], _copy_buffers(model)
    buffers_of_rank_0 = start
    for rank in range(_LOGICAL_RANKS):
        model.zero_grad()
        _set_buffers(model, start)
        for step in micro_batches:
            _backward(model, rank, step, factors.get(rank, 1.0))
        gradients_by_rank.append(
            [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]
        )
        buffers_of_rank_0 = buffers_of_rank_0 if rank else _copy_buffers(model)
    _set_buffers(model, buffers_of_rank_0)
    reduction = ExactReduction(
        [name for name, _ in model.named_parameters()],
        list(model.parameters()),
        logical_ranks=_LOGICAL_RANKS,
        bucket_bytes=2**20,
        start_allreduce=None,
        allows_unused=False,
    )
    stacked_gradients = [
        torch.stack([gradient for gradient in gradients if gradient is not None])
        for gradients in zip(*gradients_by_rank, strict=True)
    ]
    result = reduction.compute_mean(gradients_by_rank, all_ranks_have_run=True)
    for gradient, of_logical_ranks in zip(result, stacked_gradients, strict=True):
        assert gradient is not None
        tolerance = 1e-6 * of_logical_ranks.abs().max().item()
        mean = of_logical_ranks.double().mean(0)
        torch.testing.assert_close(gradient.double(), mean, rtol=0, atol=tolerance)
    return result


@contract
def logical_ranks_have_the_same_gradients_on_any_number_of_processes(backend: Backend) -> None:
    model, twin = _build_network(), _build_network()
    wrapped = backend.distributed_model(model, logical_ranks=_LOGICAL_RANKS)
    # The second step accumulates two micro-batches. In the third, the loss of logical rank 2 is multiplied by 1e20.
    for micro_batches, factors in ((range(1), {}), (range(1, 3), {}), (range(3, 4), {2: 1e20}), (range(4, 5), {})):
        model.zero_grad()
        _run_step(backend, wrapped, micro_batches, factors)
        for parameter, expected in zip(
            model.parameters(), _compute_expected_gradients(twin, micro_batches, factors), strict=True
        ):
            assert parameter.grad is not None
            assert expected is not None
            assert torch.equal(parameter.grad, expected)


@contract
@may_raise_unsupported_error
def model_distributed_again_with_logical_ranks_is_not_compressed(backend: Backend) -> None:
    model, twin = _build_network(), _build_network()
    backend.distributed_model(model, compression="bf16")
    wrapped = backend.distributed_model(model, logical_ranks=_LOGICAL_RANKS)
    _run_step(backend, wrapped, range(1), {})
    for parameter, expected in zip(model.parameters(), _compute_expected_gradients(twin, range(1), {}), strict=True):
        assert parameter.grad is not None
        assert expected is not None
        assert torch.equal(parameter.grad, expected)


@contract
def gradients_can_be_accumulated_several_times_in_a_backward_pass(backend: Backend) -> None:
    model = nn.Sequential(build().float(), _Checkpointed())
    twin = copy.deepcopy(model)
    wrapped = backend.distributed_model(model, logical_ranks=_LOGICAL_RANKS)
    twin.load_state_dict(model.state_dict())
    for step in range(3):
        model.zero_grad()
        _run_step(backend, wrapped, range(step, step + 1), {})
        expected_gradients = _compute_expected_gradients(twin, range(step, step + 1), {})
        for parameter, expected in zip(model.parameters(), expected_gradients, strict=True):
            assert parameter.grad is not None
            assert expected is not None
            assert torch.equal(parameter.grad, expected)


@contract
def logical_ranks_must_freeze_the_same_parameters_in_all_processes(backend: Backend) -> None:
    wrapped = backend.distributed_model(model := _build_network(), logical_ranks=_LOGICAL_RANKS)
    _run_step(backend, wrapped, range(1), {})
    model.zero_grad()
    (name, parameter), *others = model.named_parameters()
    parameter.requires_grad_(backend.rank == 0)
    if backend.size > 1:
        message = f"Parameter {name!r} is trained by some processes and frozen by others"
        raises(ModelError, message, lambda: _run_step(backend, wrapped, range(1, 2), {}))
        assert parameter.grad is None
        model.zero_grad()
    parameter.requires_grad_(False)
    _run_step(backend, wrapped, range(2, 3), {})
    assert parameter.grad is None
    for _, other in others:
        assert other.grad is not None


@contract
def buffers_are_those_of_logical_rank_0(backend: Backend) -> None:
    model, twin = _build_network(), _build_network()
    wrapped = backend.distributed_model(model, logical_ranks=_LOGICAL_RANKS)
    for step in range(3):
        _run_step(backend, wrapped, range(step, step + 1), {})
        _backward(twin, 0, step)
    broadcast_buffers(wrapped, backend)
    for buffer, expected in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(buffer, expected)


@contract
def reduced_gradients_of_logical_ranks_accumulate(backend: Backend) -> None:
    model, twin = _build_network(), _build_network()
    wrapped = backend.distributed_model(model, logical_ranks=_LOGICAL_RANKS)
    _run_step(backend, wrapped, range(1), {})
    _run_step(backend, wrapped, range(1, 2), {})
    first, second = (_compute_expected_gradients(twin, range(step, step + 1), {}) for step in (0, 1))
    for parameter, first_gradient, second_gradient in zip(model.parameters(), first, second, strict=True):
        assert first_gradient is not None
        assert second_gradient is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, second_gradient + first_gradient)


@contract
def logical_ranks_reject_unsupported_arguments(backend: Backend) -> None:
    model = _build_network()
    for settings, message in (
        ({"logical_ranks": 0}, "logical_ranks=...) must be at least 1, got 0"),
        ({"logical_ranks": 8, "shard": "state"}, "(shard='state') is not supported with logical_ranks"),
        ({"logical_ranks": 8, "compression": "bf16"}, "(compression='bf16') is not supported with logical_ranks"),
    ):
        raises(ConfigError, message, lambda settings=settings: backend.distributed_model(model, **settings))
    wrapped = backend.distributed_model(model, logical_ranks=_LOGICAL_RANKS)
    raises(ModelError, "the batch belongs to no logical rank", lambda: wrapped(batch(0).float()))
    with torch.no_grad():
        wrapped(batch(0).float())
