"""Contract tests of several distributed models in one backward pass: the operations of different models are not mixed,
even if the ranks call the models in different orders, or use different layers of them."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.errors import CollectiveMismatchError
from unitrain.modules.sync_batch_norm import sync_batch_norm
from unitrain.testing.cases import contract, may_raise_unsupported_error, raises
from unitrain.testing.models import FEATURES, assert_gradients, batch, compute_loss, mean_gradients

# `run(models, rank, step)` runs a forward and a backward pass of a rank.
Run = Callable[[Sequence[nn.Module], int, int], None]


class TwoLayers(nn.Module):
    """Two layers that can also be called separately."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(FEATURES, FEATURES, bias=bias).double() for _ in range(2))

    def forward(self, inputs: Tensor, part: str = "all") -> Tensor:
        output: Tensor = inputs
        if part != "second":
            output = self.first(output).tanh()
        return output if part == "first" else self.second(output)


def build_models(count: int, *, equal_sizes: bool) -> list[nn.Module]:
    """Return `count` models, which are equal on every rank."""
    torch.manual_seed(0)
    return [TwoLayers(bias=equal_sizes or index % 2 == 0) for index in range(count)]


def run_in_random_order(models: Sequence[nn.Module], rank: int, step: int) -> None:
    """Call the models one after the other, in an order that depends on the rank."""
    order = list(range(len(models)))
    random.Random(10 * step + rank).shuffle(order)
    if rank < 2 and step == 0:  # at least two ranks differ in the first step
        order = order if rank == 0 else order[::-1]
    features = batch(rank, step)
    for index in order:
        features = models[index](features)
    compute_loss(features).backward()


def run_random_parts(models: Sequence[nn.Module], rank: int, step: int) -> None:
    """Call the models one inside the other. Each rank skips other layers."""
    rng = random.Random(10 * step + rank)
    features = batch(rank, step)
    nested = [index for index in range(len(models)) if index == 0 or rng.random() < 0.8]
    for index in nested:
        if (rank + step + index) % 2 == 0:
            features = models[index](features, "first")
    for index in reversed(nested):
        features = models[index](features, "second")
    unused = [index for index in range(len(models)) if index not in nested]
    # Every rank uses every model, because a model without a backward pass would not reduce its gradients.
    compute_loss(features + sum(models[index](batch(rank, step), "second") for index in unused)).backward()


def assert_means(
    backend: Backend, models: Sequence[nn.Module], run: Run, tolerance: float = 1e-12, **settings: object
) -> None:
    """Assert that the gradients of all distributed `models` are the means over ranks, in three steps."""
    twins = nn.ModuleList(copy.deepcopy(list(models)))
    everything = nn.ModuleList(models)
    distributed = [backend.distributed_model(model, **settings) for model in models]  # type: ignore[arg-type]
    for step in range(3):
        everything.zero_grad()
        run(distributed, backend.rank, step)
        expected = mean_gradients(backend, twins, lambda twin, rank, step=step: run(list(twin), rank, step))
        assert_gradients(everything, expected, tolerance)


@contract
def models_may_be_called_in_different_orders(backend: Backend) -> None:
    """DDP's buckets of the models start in different orders."""
    for count in (2, 3):
        for equal_sizes in (True, False):
            for find_unused in (False, True):
                models = build_models(count, equal_sizes=equal_sizes)
                assert_means(backend, models, run_in_random_order, find_unused_parameters=find_unused)


@contract
def ranks_may_skip_different_layers_of_several_models(backend: Backend) -> None:
    for count in (2, 3):
        for equal_sizes in (True, False):
            models = build_models(count, equal_sizes=equal_sizes)
            assert_means(backend, models, run_random_parts, find_unused_parameters=True)


@contract
def sharded_models_may_be_called_in_different_orders(backend: Backend) -> None:
    for find_unused in (False, True):
        run = run_random_parts if find_unused else run_in_random_order
        models = build_models(3, equal_sizes=True)
        assert_means(backend, models, run, find_unused_parameters=find_unused, shard="gradients")


@contract
def compressed_models_may_be_called_in_different_orders(backend: Backend) -> None:
    for shard in ("none", "gradients"):
        for find_unused in (False, True):
            run = run_random_parts if find_unused else run_in_random_order
            models = build_models(2, equal_sizes=True)
            settings = {"find_unused_parameters": find_unused, "shard": shard, "compression": "bf16"}
            assert_means(backend, models, run, 2e-2, **settings)


@contract
def models_with_different_settings_share_a_backward_pass(backend: Backend) -> None:
    models = build_models(3, equal_sizes=True)
    twins = nn.ModuleList(copy.deepcopy(models))
    distributed = [
        backend.distributed_model(models[0], find_unused_parameters=True),
        backend.distributed_model(models[1], shard="gradients"),
        backend.distributed_model(models[2]),
    ]
    for step in range(3):
        nn.ModuleList(models).zero_grad()
        run_in_random_order(distributed, backend.rank, step)
        expected = mean_gradients(
            backend, twins, lambda twin, rank, step=step: run_in_random_order(list(twin), rank, step)
        )
        assert_gradients(nn.ModuleList(models), expected)


@contract
@may_raise_unsupported_error
def updates_of_several_sharded_optimizers_are_not_mixed(backend: Backend) -> None:
    models = build_models(2, equal_sizes=True)
    twins = copy.deepcopy(models)
    distributed = [backend.distributed_model(model, shard="state", find_unused_parameters=True) for model in models]
    optimizers = [
        backend.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), wrapped, shard="state")
        for model, wrapped in zip(models, distributed, strict=True)
    ]
    twin_optimizers = [torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9) for twin in twins]
    for step in range(3):
        nn.ModuleList(models).zero_grad()
        run_random_parts(distributed, backend.rank, step)
        expected = mean_gradients(
            backend, nn.ModuleList(twins), lambda twin, rank, step=step: run_random_parts(list(twin), rank, step)
        )
        for name, parameter in nn.ModuleList(twins).named_parameters():
            parameter.grad = expected[name]
        for optimizer in (*optimizers, *twin_optimizers):
            optimizer.step()
        for parameter, other in zip(nn.ModuleList(models).parameters(), nn.ModuleList(twins).parameters(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=0, atol=1e-12)


@contract
def synchronized_layers_of_several_models_are_not_mixed(backend: Backend) -> None:
    """Ranks that call layers of the same width in different orders raise the same error, also in the backward pass."""
    torch.manual_seed(0)
    layers = [sync_batch_norm(nn.BatchNorm1d(FEATURES).double(), backend) for _ in range(2)]
    inputs = batch(backend.rank).requires_grad_()

    def call(order: Sequence[int]) -> list[Tensor]:
        outputs: dict[int, Tensor] = {index: layers[index](inputs) for index in order}
        return [outputs[index] for index in range(2)]

    def backward_in_order(order: Sequence[int]) -> None:
        outputs = call([0, 1])
        for index in order:
            compute_loss(outputs[index]).backward()

    backward_in_order([0, 1])
    order = [0, 1] if backend.rank == 0 else [1, 0]
    for action in (partial(call, order), partial(backward_in_order, order)):
        if backend.size == 1:
            action()
        else:
            raises(CollectiveMismatchError, "BatchNorm", action)
    backward_in_order([1, 0])


@contract
def buffers_of_several_models_are_not_mixed(backend: Backend) -> None:
    """Ranks that call models with equal buffers in different orders raise the same error."""
    models = build_models(2, equal_sizes=True)
    for index, model in enumerate(models):
        model.register_buffer("offset", torch.full((3,), float(index)))
    distributed = [backend.distributed_model(model) for model in models]
    run_in_random_order([distributed[0], distributed[1]], 0, 0)
    order = distributed if backend.rank == 0 else distributed[::-1]
    if backend.size == 1:
        order[0](batch(0))
        return
    text = raises(CollectiveMismatchError, "called different collectives", lambda: order[0](batch(0)))
    assert "of model" in text, text
    assert [float(model.offset[0]) for model in models] == [0, 1]  # type: ignore[index]


@contract
def groups_of_deleted_models_are_used_again(backend: Backend) -> None:
    """Distributing one model after the other creates a limited number of process groups."""
    counts = []
    for _ in range(3):
        for _ in range(2):
            assert_means(backend, build_models(2, equal_sizes=True), run_in_random_order)
        gc.collect()
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    assert counts[2] == counts[1], f"the numbers of open files after two, four and six pairs of models: {counts}"
