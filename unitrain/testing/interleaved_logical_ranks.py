"""Contract tests of `distributed_model(logical_ranks=V)` with synchronized BatchNorm, for which a process interleaves
its logical ranks."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unitrain.backends.base import Backend
from unitrain.backends.current_batches import CurrentBatch, LogicalRank
from unitrain.backends.gradients.interleaved_ranks_model import InterleavedRanksModel
from unitrain.backends.local import LocalBackend
from unitrain.backends.logical_ranks import local_logical_ranks
from unitrain.errors import CollectiveMismatchError, ModelError
from unitrain.modules.sync_batch_norm import sync_batch_norm
from unitrain.randomness import seed_generators
from unitrain.testing.cases import assert_same_on_every_rank, contract, raises
from unitrain.testing.models import FEATURES, batch, build, compute_loss

_LOGICAL_RANKS, _RANK_WITH_DUMMY_BATCH = 5, 3  # the second micro-batch of logical rank 3 has no samples


class _Branches(nn.Module):
    """Model with four branches, whose gradients with respect to their common input are added.

    Each forward pass draws random numbers from all generators and replaces a buffer. The backward pass recomputes a
    layer with BatchNorm.
    """

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)) for _ in range(4))
        self.recomputed = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None), nn.Dropout(0.3))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        noise = [float(torch.rand(())), float(np.random.rand()), random.random()]
        hidden = x.tanh()
        outputs = [
            branch(hidden) * (1 + 0.1 * factor) for branch, factor in zip(self.branches, [*noise, 1.0], strict=True)
        ]
        noise = [float(torch.rand(())), float(np.random.rand()), random.random()]
        centered = torch.stack(outputs).sum(0) + hidden - self.center + sum(noise)
        self.center = 0.5 * self.center + centered.detach().mean(0)
        output: Tensor = checkpoint(self.recomputed, centered, use_reentrant=False)
        return output


def _build_network() -> nn.Module:
    return nn.Sequential(build().float(), nn.BatchNorm1d(3), _Branches())


def _distribute(model: nn.Module, backend: Backend) -> InterleavedRanksModel:
    distributed = backend.distributed_model(sync_batch_norm(model, backend), logical_ranks=_LOGICAL_RANKS)
    assert isinstance(distributed, InterleavedRanksModel)
    return distributed


def _run_micro_batch(
    backend: Backend, model: nn.Module, logical_rank: int, micro_batch_index: int, action: Callable[[nn.Module], Any]
) -> None:
    is_dummy = logical_rank == _RANK_WITH_DUMMY_BATCH and micro_batch_index == 1
    with backend.current_batches.enter(CurrentBatch(is_dummy, LogicalRank(logical_rank, _LOGICAL_RANKS))):
        seed_generators(10 * micro_batch_index + logical_rank)
        action(model)


def _backward(logical_rank: int, micro_batch_index: int, model: nn.Module) -> None:
    loss = compute_loss(model(batch(logical_rank, micro_batch_index).to(next(model.parameters()).dtype)).double())
    (loss * (0.0 if logical_rank == _RANK_WITH_DUMMY_BATCH and micro_batch_index == 1 else 1.0)).backward()


def _run_step(backend: Backend, model: InterleavedRanksModel, micro_batch_indices: Sequence[int] = (0, 1)) -> None:
    """Run the micro-batches with these indices of the logical ranks of this process, and reduce their gradients."""
    for micro_batch_index in micro_batch_indices:
        _run_logical_ranks(
            backend,
            model,
            {},
            micro_batch_index=micro_batch_index,
            begins_step=micro_batch_index == micro_batch_indices[0],
            ends_step=micro_batch_index == micro_batch_indices[-1],
        )


def _run_logical_ranks(
    backend: Backend,
    model: InterleavedRanksModel,
    actions: dict[int, Callable[[nn.Module], Any]],
    *,
    micro_batch_index: int = 0,
    begins_step: bool = True,
    ends_step: bool = True,
) -> None:
    """Run a micro-batch of each logical rank of this process. `actions` maps logical ranks to functions that replace
    their forward and backward passes."""
    ranks = local_logical_ranks(_LOGICAL_RANKS, backend.rank, backend.size)
    functions = [
        partial(
            _run_micro_batch,
            backend,
            model,
            rank,
            micro_batch_index,
            actions.get(rank, partial(_backward, rank, micro_batch_index)),
        )
        for rank in ranks
    ]
    model.run_in_turns(functions, begins_step=begins_step, ends_step=ends_step)


def _assert_equal_buffers(model: nn.Module, expected: nn.Module) -> None:
    for (name, buffer), expected_buffer in zip(model.named_buffers(), expected.buffers(), strict=True):
        assert torch.equal(buffer, expected_buffer), f"the buffers {name} differ"


def _assert_equal_gradients(model: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), expected_parameter in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert parameter.grad is not None
        assert expected_parameter.grad is not None
        assert torch.equal(parameter.grad, expected_parameter.grad), f"the gradients of {name} differ"


@contract
def synchronized_logical_ranks_are_bit_identical_on_any_number_of_processes(backend: Backend) -> None:
    model, expected, local_backend = _build_network(), _build_network(), LocalBackend(backend.device)
    wrapped, wrapped_expected = _distribute(model, backend), _distribute(expected, local_backend)
    for _ in range(3):
        model.zero_grad()
        expected.zero_grad()
        _run_step(backend, wrapped)
        _run_step(local_backend, wrapped_expected)
        _assert_equal_gradients(model, expected)
        if backend.rank == 0:  # the other processes have buffers of other logical ranks
            _assert_equal_buffers(model, expected)
    statistics = [buffer.tolist() for name, buffer in model.named_buffers() if "running" in name]
    assert_same_on_every_rank(backend, statistics)
    local_backend.shutdown()


@contract
def synchronized_logical_ranks_normalize_over_all_samples(backend: Backend) -> None:
    """Compares with plain BatchNorm on one batch with the samples of all logical ranks."""

    def build_layers() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3), nn.BatchNorm1d(3)
        ).double()

    model, plain = build_layers(), build_layers()
    wrapped = _distribute(model, backend)
    for _ in range(3):
        model.zero_grad()
        plain.zero_grad()
        _run_step(backend, wrapped)
        for micro_batch_index in range(2):
            ranks = [rank for rank in range(_LOGICAL_RANKS) if (rank, micro_batch_index) != (_RANK_WITH_DUMMY_BATCH, 1)]
            outputs = plain(torch.cat([batch(rank, micro_batch_index) for rank in ranks])).chunk(len(ranks))
            (torch.stack([compute_loss(output) for output in outputs]).sum() / _LOGICAL_RANKS).backward()
        for (name, parameter), plain_parameter in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, plain_parameter.grad, rtol=1e-12, atol=1e-12, msg=name)
        for (name, buffer), plain_buffer in zip(model.named_buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(buffer, plain_buffer, rtol=1e-12, atol=1e-12, msg=name)


def _threads() -> set[threading.Thread]:
    """Return the threads of this process, except the thread that a collective starts when it waits for several
    seconds."""
    return {thread for thread in threading.enumerate() if thread.name != "unitrain store"}


@contract
def logical_ranks_that_call_different_layers_raise_an_error(backend: Backend) -> None:
    model = _CallsLayersByName()
    wrapped = _distribute(model, backend)
    ranks = local_logical_ranks(_LOGICAL_RANKS, backend.rank, backend.size)

    def call(*names: str) -> Callable[[nn.Module], Any]:
        def action(model: nn.Module) -> None:
            model(names).backward()

        return action

    def assert_fails(actions: dict[int, Callable[[nn.Module], Any]], text: str) -> None:
        threads = _threads()
        raises(CollectiveMismatchError, text, lambda: _run_logical_ranks(backend, wrapped, actions))
        assert not _threads() - threads

    default_actions = {rank: call("first", "second") for rank in range(_LOGICAL_RANKS)}
    assert_fails(default_actions | {0: call("second", "first")}, "calls BatchNorm")
    if backend.size < 3:  # otherwise some processes have a single logical rank, which cannot differ from another
        for rank in (ranks[0], ranks[-1]):
            assert_fails(default_actions | {rank: call("wide")}, "call different synchronized BatchNorm layers")
    if backend.size == 1:  # otherwise the other processes would wait
        for rank in (ranks[0], ranks[-1]):
            assert_fails(default_actions | {rank: call("first")}, "call different synchronized BatchNorm layers")
            assert_fails(
                default_actions | {rank: call("first", "second", "second")},
                "call different synchronized BatchNorm layers",
            )
    _run_logical_ranks(backend, wrapped, default_actions)  # a failed step does not affect the next step
    assert all(parameter.grad is not None for parameter in model.parameters())


class _CallsLayersByName(nn.Module):
    """Model that calls the layers whose names are passed."""

    def __init__(self) -> None:
        super().__init__()
        widths = {"first": 3, "second": 3, "wide": FEATURES}
        self.layers = nn.ModuleDict({name: nn.BatchNorm1d(width) for name, width in widths.items()})
        self.inputs = nn.ParameterDict({name: torch.randn(4, width) for name, width in widths.items()})

    def forward(self, names: Sequence[str]) -> Tensor:
        total = sum((parameter.sum() for parameter in self.parameters()), torch.zeros(()))
        for name in names:
            total = total + self.layers[name](self.inputs[name]).square().sum()
        return total


@contract
def an_exception_of_a_logical_rank_stops_the_other_logical_ranks(backend: Backend) -> None:
    wrapped = _distribute(_build_network(), backend)
    ranks = local_logical_ranks(_LOGICAL_RANKS, backend.rank, backend.size)

    def fail_in_forward(model: nn.Module) -> None:
        raise KeyError("in the forward pass")

    def fail_in_backward(rank: int, model: nn.Module) -> None:
        def hook(gradient: Tensor) -> None:
            raise KeyError("in the backward pass")

        output = model(batch(rank).float())
        output.register_hook(hook)
        output.sum().backward()

    for rank in (ranks[0], ranks[-1]):
        for action, text in (
            (fail_in_forward, "in the forward pass"),
            (partial(fail_in_backward, rank), "in the backward pass"),
        ):
            threads = _threads()
            raises(
                KeyError, text, lambda rank=rank, action=action: _run_logical_ranks(backend, wrapped, {rank: action})
            )
            assert not _threads() - threads
    wrapped.zero_grad()
    _run_step(backend, wrapped)
    assert all(parameter.grad is not None for parameter in wrapped.parameters())


@contract
def synchronized_logical_ranks_reject_unsupported_uses(backend: Backend) -> None:
    model = _build_network()
    wrapped = _distribute(model, backend)
    with backend.current_batches.enter(CurrentBatch(logical_rank=LogicalRank(0, _LOGICAL_RANKS))):
        for called in (wrapped, model):
            text = "Only the Trainer supports sync_batch_norm with logical_ranks"
            raises(ModelError, text, lambda called=called: called(batch(0).float()))
    raises(
        ModelError,
        "torch.nn.SyncBatchNorm, which is not supported with logical_ranks",
        lambda: backend.distributed_model(nn.Sequential(nn.SyncBatchNorm(3)), logical_ranks=_LOGICAL_RANKS),
    )
    compiled = sync_batch_norm(_build_network(), backend)
    compiled.compile()
    raises(
        ModelError,
        "A compiled model with sync_batch_norm is not supported with logical_ranks",
        lambda: backend.distributed_model(compiled, logical_ranks=_LOGICAL_RANKS),
    )
