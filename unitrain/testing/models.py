"""Small models and their data for the contract suite, and what one process with the whole batch would compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend

ROWS, FEATURES = 4, 6  # samples per rank, and features of each


def build(seed: int = 0) -> nn.Module:
    """Return a small network with a normalisation layer; equal on every rank for an equal `seed`."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(rank: int, step: int = 0) -> Tensor:
    """Return rank's samples of a step: float64 [ROWS, FEATURES]."""
    return torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(1000 * step + rank)).double()


def loss_of(output: Tensor) -> Tensor:
    """Return a loss that is not linear in the output."""
    return (output.sin() * torch.linspace(1, 2, output.shape[-1]).double()).sum(-1).mean()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Return a copy of every parameter's gradient by name."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def mean_gradients(
    backend: Backend, model: nn.Module, run: Callable[[nn.Module, int], Any]
) -> dict[str, Tensor | None]:
    """Return the mean over ranks of the gradients that `run(model, rank)` leaves, computed by this rank alone.

    A parameter that no rank reaches has None; one that some do not reach counts as zero there.
    """
    found: list[dict[str, Tensor | None]] = []
    for rank in range(backend.size):
        model.zero_grad(set_to_none=True)
        run(model, rank)
        found.append(gradients(model))
    model.zero_grad(set_to_none=True)
    result: dict[str, Tensor | None] = {}
    for name in found[0]:
        parts = [part[name] for part in found]
        some = [part for part in parts if part is not None]
        result[name] = torch.stack(some).sum(0) / backend.size if some else None
    return result


def assert_gradients(actual: nn.Module, expected: dict[str, Tensor | None], tolerance: float = 1e-12) -> None:
    """Assert that `actual`'s gradients are the expected ones."""
    for name, parameter in actual.named_parameters():
        want = expected[name]
        if want is None or parameter.grad is None:
            assert want is None, f"{name} has no gradient"
            assert parameter.grad is None, f"{name} has a gradient, but no rank used it"
            continue
        torch.testing.assert_close(
            parameter.grad, want, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_reduced(
    backend: Backend, wrapped: nn.Module, model: nn.Module, twin: nn.Module, run: Callable[[nn.Module, int], Any]
) -> None:
    """Assert three times that `run` on `wrapped` leaves `model` the mean over ranks, as `twin` has it by itself.

    In the first step DDP forms its buckets, in the second it forms them anew.
    """
    for _ in range(3):
        model.zero_grad()
        run(wrapped, backend.rank)
        assert_gradients(model, mean_gradients(backend, twin, run))


def backward(model: nn.Module, rank: int, step: int = 0) -> None:
    """Run forward and backward on the batch of a rank and step."""
    loss_of(model(batch(rank, step))).backward()
