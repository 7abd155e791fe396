"""Contract tests of losses that are computed from gradients, nested backward passes, and sparse gradients."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unitrain.backends.base import Backend
from unitrain.errors import ModelError
from unitrain.testing.cases import assert_same_on_every_rank, contract, raises
from unitrain.testing.models import FEATURES, assert_gradients, assert_reduced, batch, compute_loss, mean_gradients


def _build() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def _penalty(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return a gradient penalty, which does not depend on the last bias of `model`."""
    inputs = inputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    penalty: Tensor = (slope.norm(dim=1) - 1).square().mean()
    return penalty


@contract
def losses_that_consist_of_gradients_are_reduced(backend: Backend) -> None:
    """Every second loss is a gradient penalty only, to which no output contributes."""
    model, twin = _build(), _build()
    wrapped = backend.distributed_model(model, find_unused_parameters=True)

    def run(m: nn.Module, rank: int, step: int, *, is_twice: bool = False) -> None:
        loss = _penalty(m, batch(rank, step))
        if step % 2:
            loss = loss + m(batch(rank, step + 10)).mean()
        if is_twice:
            loss.backward(retain_graph=True)
            m.zero_grad()
        loss.backward()

    for step in range(5):
        model.zero_grad()
        run(wrapped, backend.rank, step, is_twice=step == 4)
        assert_gradients(model, mean_gradients(backend, twin, partial(run, step=step)))
    model.get_parameter("2.bias").requires_grad_(False)
    run(wrapped, backend.rank, 5)
    model.get_parameter("2.bias").requires_grad_(True)
    model.zero_grad()
    run(wrapped, backend.rank, 6)
    assert_gradients(model, mean_gradients(backend, twin, partial(run, step=6)))


@contract
def second_derivatives_with_respect_to_parameters_are_reduced(backend: Backend) -> None:
    model, twin = _build(), _build()
    wrapped = backend.distributed_model(model, find_unused_parameters=True)

    def run(m: nn.Module, rank: int) -> None:
        weights = [parameter for parameter in m.parameters() if parameter.dim() == 2]
        gradients = torch.autograd.grad(m(batch(rank)).sum(), weights, create_graph=True)
        sum(gradient.square().sum() for gradient in gradients).backward()  # type: ignore[union-attr]

    assert_reduced(backend, wrapped, model, twin, run)


@contract
def losses_of_gradients_that_use_no_bias_raise_on_every_rank(backend: Backend) -> None:
    wrapped = backend.distributed_model(_build())
    text = raises(
        ModelError,
        "1 parameter received no gradient on every rank: 2.bias.",
        lambda: _penalty(wrapped, batch(backend.rank)).backward(),
    )
    assert_same_on_every_rank(backend, text)


class _Checkpointed(nn.Module):
    """A model that calls one block `repetitions` times with activation checkpointing."""

    def __init__(self, repetitions: int, *, use_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.block = nn.Linear(FEATURES, 6).double(), nn.Linear(6, 6).double()
        self.repetitions, self.use_reentrant = repetitions, use_reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        for _ in range(self.repetitions):
            hidden = checkpoint(self.block, hidden, use_reentrant=self.use_reentrant).tanh()
        return hidden


@contract
def checkpointed_blocks_are_reduced(backend: Backend) -> None:
    for repetitions, use_reentrant, find_unused in ((1, True, False), (3, False, False), (3, False, True)):
        model, twin = (_Checkpointed(repetitions, use_reentrant=use_reentrant) for _ in range(2))
        wrapped = backend.distributed_model(model, find_unused_parameters=find_unused)
        assert_reduced(backend, wrapped, model, twin, lambda m, rank: compute_loss(m(batch(rank))).backward())


@contract
def reentrant_checkpoints_of_a_shared_block_raise_on_every_rank(backend: Backend) -> None:
    if backend.size == 1:  # a single rank may compute the gradients in nested backward passes
        return
    for accumulates in (False, True):
        for repetitions, find_unused, found in (
            (3, False, "computed the gradient of parameter 'block."),
            (1, True, "With find_unused_parameters=True, the gradient of parameter 'block."),
        ):
            wrapped = backend.distributed_model(
                _Checkpointed(repetitions, use_reentrant=True), find_unused_parameters=find_unused
            )
            if accumulates:
                with backend.no_sync(wrapped):
                    compute_loss(wrapped(batch(backend.rank))).backward()
            text = raises(
                ModelError, found, lambda wrapped=wrapped: compute_loss(wrapped(batch(backend.rank))).backward()
            )
            assert "use_reentrant=False" in text
            assert_same_on_every_rank(backend, text)


class _SparseGradient(nn.Module):
    def __init__(self, *, uses_gather: bool) -> None:
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.ones(5, 2)), nn.Parameter(torch.ones(2))
        self.uses_gather = uses_gather

    def forward(self, indices: Tensor) -> Tensor:
        if self.uses_gather:
            return torch.gather(self.weight, 0, indices[:, None].expand(-1, 2), sparse_grad=True) * self.gain
        return nn.functional.embedding(indices, self.weight, sparse=True) * self.gain


@contract
def sparse_gradients_raise_on_every_rank(backend: Backend) -> None:
    for uses_gather in (False, True):
        # A single rank without DDP has no check if parameters may be unused.
        for find_unused in (False,) if backend.size == 1 else (False, True):
            wrapped = backend.distributed_model(
                _SparseGradient(uses_gather=uses_gather), find_unused_parameters=find_unused
            )
            text = raises(
                ModelError,
                "The gradient of parameter 'weight' is a tensor of layout torch.sparse_coo",
                lambda wrapped=wrapped: wrapped(torch.tensor([backend.rank, 1])).sum().backward(),
            )
            assert_same_on_every_rank(backend, text)
