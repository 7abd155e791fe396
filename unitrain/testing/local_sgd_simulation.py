"""A simulation of all ranks of `LocalSGD` in one process, in plain torch, and a comparison with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.local_sgd_config import LocalSGDConfig
from unitrain.optim.local_sgd import LocalSGD
from unitrain.testing.cases import assert_same_on_every_rank
from unitrain.testing.models import batch, build, compute_loss

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return an inner optimizer as in local SGD."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Return an inner optimizer as in DiLoCo."""
    return torch.optim.AdamW(parameters, lr=0.02)


def train(
    backend: Backend, local_sgd: LocalSGD, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range
) -> None:
    """Train on the batches of this rank."""
    for step in steps:
        compute_loss(model(batch(backend.rank, step))).backward()
        local_sgd.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad()
        local_sgd.step()


def create_local_sgd(
    backend: Backend, settings: LocalSGDConfig | int, make_optimizer: MakeOptimizer = sgd, seed: int = 0
) -> tuple[LocalSGD, nn.Module, torch.optim.Optimizer]:
    """Return `LocalSGD` for a new model, the model, and its optimizer."""
    model = build(seed)
    optimizer = make_optimizer(list(model.parameters()))
    return LocalSGD(model, optimizer, backend, settings), model, optimizer


def parameter_vector(model: nn.Module) -> Tensor:
    """Return a copy of all parameters of `model` as one vector, [elements]."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def set_parameter_vector(model: nn.Module, values: Tensor) -> None:
    """Set all parameters of `model` to `values`, a vector as returned by `parameter_vector`."""
    nn.utils.vector_to_parameters(values.clone(), model.parameters())


# The elements of each fragment, by number of fragments. The parameters have 48, 8, 8, 8, 24 and 3 elements.
FRAGMENT_RANGES_BY_COUNT = {1: [(0, 99)], 2: [(0, 48), (48, 99)], 3: [(0, 48), (48, 64), (64, 99)]}


@dataclass
class _Fragment:
    """Elements [`first`, `end`) of the parameter vector.

    `start_step` is the local step of the first transfer. `errors` are the compression errors of each group, and
    `mean_error` is that of the mean. `mean` is the mean outer gradient that is merged in local step `merge_step`, or
    None.
    """

    first: int
    end: int
    start_step: int
    errors: list[Tensor]
    mean_error: Tensor
    momentum: Tensor
    mean: Tensor | None = None
    merge_step: int = 0


class Simulation:
    """All ranks in one process, in plain torch. `weights` are the parameters of each rank, [elements]."""

    def __init__(self, size: int, settings: LocalSGDConfig, make_optimizer: MakeOptimizer) -> None:
        self.settings = settings
        self.models = [build() for _ in range(size)]
        self.optimizers = [make_optimizer(list(model.parameters())) for model in self.models]
        self.outer_weights = parameter_vector(self.models[0])
        self.groups = divide_ranks(size, settings.synchronous_ranks)
        self.fragments = []
        for index, (first, end) in enumerate(FRAGMENT_RANGES_BY_COUNT[settings.fragments]):
            zeros = torch.zeros(end - first).double()
            errors = [zeros.clone() for _ in self.groups]
            start_step = settings.steps * (index + 1) // settings.fragments
            self.fragments.append(_Fragment(first, end, start_step, errors, zeros.clone(), zeros.clone()))
        self.local_steps = 0

    @property
    def weights(self) -> list[Tensor]:
        return [parameter_vector(model) for model in self.models]

    def train(self, steps: range) -> None:
        for step in steps:
            for rank, model in enumerate(self.models):
                compute_loss(model(batch(rank, step))).backward()
            is_warm_up = step < self.settings.warmup_steps
            for group in [list(range(len(self.models)))] if is_warm_up else self.groups:
                self._average_gradients(group)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if is_warm_up:
                self.outer_weights = parameter_vector(self.models[0])
                continue
            self.local_steps += 1
            for fragment in self.fragments:
                if fragment.mean is not None and self.local_steps == fragment.merge_step:
                    self._merge(fragment, self.settings.mixing)
                if (self.local_steps - fragment.start_step) % self.settings.steps == 0:
                    fragment.mean = self._average_outer_gradients(fragment)
                    fragment.merge_step = self.local_steps + self.settings.overlap_steps
                    if self.settings.overlap_steps == 0:
                        self._merge(fragment, 0)

    def _merge(self, fragment: _Fragment, mixing: float) -> None:
        """Update the outer weights of a fragment as torch.optim.SGD(nesterov=True) does, and merge them into the
        weights of all ranks."""
        mean, momentum, part = fragment.mean, self.settings.outer_momentum, slice(fragment.first, fragment.end)
        assert mean is not None
        fragment.mean = None
        fragment.momentum = momentum * fragment.momentum + mean
        self.outer_weights[part] -= self.settings.outer_lr * (mean + momentum * fragment.momentum)
        for model in self.models:
            weights = parameter_vector(model)
            weights[part] = mixing * weights[part] + (1 - mixing) * self.outer_weights[part]
            set_parameter_vector(model, weights)

    def _average_outer_gradients(self, fragment: _Fragment) -> Tensor:
        """Return the mean of the outer gradients over all ranks, and update the compression errors. The ranks of a
        group have the same outer gradient."""
        part, size = slice(fragment.first, fragment.end), len(self.models)
        differences = [
            self.outer_weights[part] - parameter_vector(self.models[group[0]])[part] for group in self.groups
        ]
        if self.settings.compression == "none":
            return sum((len(g) * d for g, d in zip(self.groups, differences, strict=True)), torch.tensor(0.0)) / size
        round_values = round_to_bf16 if self.settings.compression == "bf16" else round_to_int8
        sent = []
        for index, difference in enumerate(differences):
            weight = len(self.groups[index]) * len(self.groups) / size
            unrounded = weight * difference + fragment.errors[index]
            sent.append(round_values(unrounded))
            fragment.errors[index] = unrounded - sent[-1]
        unrounded = torch.stack(sent).sum(0) / len(sent) + fragment.mean_error
        mean = round_values(unrounded)
        fragment.mean_error = unrounded - mean
        return mean

    def _average_gradients(self, ranks: list[int]) -> None:
        for parameters in zip(*(self.models[rank].parameters() for rank in ranks), strict=True):
            mean = torch.stack([parameter.grad for parameter in parameters if parameter.grad is not None]).mean(0)
            for parameter in parameters:
                parameter.grad = mean.clone()


def divide_ranks(size: int, synchronous_ranks: Any) -> list[list[int]]:
    """Return the ranks of each synchronous group. All ranks are on one host."""
    if isinstance(synchronous_ranks, tuple):
        ends = torch.tensor(synchronous_ranks).cumsum(0).tolist()
        return [list(range(end - count, end)) for end, count in zip(ends, synchronous_ranks, strict=True)]
    count = size if synchronous_ranks == "host" else synchronous_ranks
    return [list(range(size))[first : first + count] for first in range(0, size, count)]


def round_to_bf16(values: Tensor) -> Tensor:
    """Return `values` rounded to bf16."""
    return values.bfloat16().to(values.dtype)


def round_to_int8(values: Tensor) -> Tensor:
    """Return `values` rounded to 255 levels per block of 1024 elements."""
    parts = []
    for block in values.split(1024):
        scale = (block.abs().max() / 127).float().to(values.dtype)
        parts.append((block / scale).round() * scale if scale > 0 else torch.zeros_like(block))
    return torch.cat(parts)


def compare_with_simulation(
    backend: Backend, settings: LocalSGDConfig, make_optimizer: MakeOptimizer, steps: int, tolerance: float = 1e-12
) -> None:
    """Compare `LocalSGD` with the simulation after each step, and in `averaged_weights`."""
    local_sgd, model, optimizer = create_local_sgd(backend, settings, make_optimizer)
    simulation = Simulation(backend.size, settings, make_optimizer)
    initial = parameter_vector(model)
    for step in range(steps):
        train(backend, local_sgd, model, optimizer, range(step, step + 1))
        simulation.train(range(step, step + 1))
        own, expected = parameter_vector(model), simulation.weights
        torch.testing.assert_close(own, expected[backend.rank], rtol=0, atol=tolerance)
        with local_sgd.averaged_weights(), local_sgd.averaged_weights():
            mean = parameter_vector(model)
            assert_same_on_every_rank(backend, mean.tolist())
            torch.testing.assert_close(mean, torch.stack(expected).mean(0), rtol=0, atol=tolerance)
        assert torch.equal(parameter_vector(model), own)
    local_sgd.synchronize()
    assert torch.equal(parameter_vector(model), mean)
    assert (mean - initial).abs().max() > 0.01
