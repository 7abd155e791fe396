"""User-defined communication hooks on the module that `distributed_model` returns, and the hierarchical allreduce."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from groups import SEVERAL_RANKS
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.backends.gradients.hierarchical_group import HierarchicalGroup
from unitrain.bootstrap.rendezvous import NodePosition
from unitrain.errors import ModelError
from unitrain.testing import RankGroup

STEPS = 3
# A function that registers a hook on a distributed model.
Register = Callable[[Any, Backend], None]


class Network(nn.Module):
    """A model with several gradient buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 1))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.body(inputs)
        return output


def mean_hook(state: dict[str, int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Compute the mean, like DDP without a hook, and count the buckets in `state`."""
    state["buckets"] = state.get("buckets", 0) + 1
    buffer = bucket.buffer().div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def hierarchical_hook(backend: Backend) -> Any:
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from hierarchical import HierarchicalReduction

    # With three ranks, the last rank is on another (simulated) host.
    return HierarchicalReduction(backend, [0, 0, 1][: backend.size])


def train(backend: Backend, register: Register | None) -> list[Tensor]:
    """Train with gradient accumulation and a layer that is frozen in the first step. Return the parameters."""
    network = Network()
    network.body[0].requires_grad_(False)
    model = backend.distributed_model(network)
    if register is not None:
        register(model, backend)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    backend.distributed_optimizer(optimizer, model)
    generator = torch.Generator().manual_seed(backend.rank)
    for _ in range(STEPS):
        with backend.no_sync(model):
            model(torch.randn(3, 8, generator=generator).double()).square().mean().backward()
        model(torch.randn(3, 8, generator=generator).double()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        network.body[0].requires_grad_(True)  # unfrozen after the first step
    return [parameter.detach().clone() for parameter in network.parameters()]


@contextmanager
def hierarchical_allreduce(backend: Backend) -> Iterator[None]:
    """Enable the hierarchical allreduce, and simulate two hosts. Of three ranks, the last one is on the second host."""
    rendezvous: Any = vars(backend)["_rendezvous"]
    positions = [NodePosition(rank % 2, 2 - rank // 2, rank // 2, 2) for rank in range(backend.size)]
    with (
        patch.dict(os.environ, {"UNITRAIN_HIERARCHICAL_ALLREDUCE": "1"}),
        patch.dict(vars(rendezvous), {"node_positions": positions}),
        patch.object(backend, "num_nodes", 2),
    ):
        yield


def train_hierarchically(backend: Backend) -> tuple[list[Tensor], int]:
    """Train with the hierarchical allreduce on two simulated hosts. Return the parameters and the number of reduced
    buckets."""
    allreduce, buckets = HierarchicalGroup.allreduce, []

    def count(group: HierarchicalGroup, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        buckets.append(len(tensors))
        return allreduce(group, tensors, opts)

    with hierarchical_allreduce(backend), patch.object(HierarchicalGroup, "allreduce", count):
        return train(backend, None), len(buckets)


class OuterLayers(nn.Module):
    """A first and a last layer, between which another model runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, inputs: Tensor, name: str) -> Tensor:
        output: Tensor = getattr(self, name)(inputs)
        return output


def reduce_two_models_in_different_orders(backend: Backend) -> list[Tensor]:
    """Return the gradients of two models after one backward pass. The last rank does not use the first layer, so it
    reduces the models in the opposite order."""
    torch.manual_seed(0)
    ends, middle = OuterLayers().double(), nn.Linear(8, 8).double()
    outer, inner = backend.distributed_model(ends, find_unused_parameters=True), backend.distributed_model(middle)
    hidden = torch.full((2, 8), backend.rank + 1.0, dtype=torch.float64)
    if backend.rank < backend.size - 1:
        hidden = outer(hidden, "first")
    outer(inner(hidden), "last").sum().backward()
    parameters = [*ends.parameters(), *middle.parameters()]
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


def train_with_each_hook(backend: Backend) -> dict[str, Any]:
    state: dict[str, int] = {}
    results = {
        "without": train(backend, None),
        "mean": train(backend, lambda model, _: model.register_comm_hook(state, mean_hook)),
        "buckets": state["buckets"],
    }
    hook = hierarchical_hook(backend)
    results["hierarchical"] = train(backend, lambda model, _: model.register_comm_hook(None, hook))
    results["hierarchical allreduce"], results["hierarchical buckets"] = train_hierarchically(backend)
    results["two models"] = reduce_two_models_in_different_orders(backend)
    with hierarchical_allreduce(backend):
        results["two models hierarchically"] = reduce_two_models_in_different_orders(backend)
    return results


def register_invalid_hooks(backend: Backend) -> list[str]:
    """Return the messages for a second hook, for a hook in addition to compression, and for a hook that raises an
    error."""
    model: Any = backend.distributed_model(Network())
    model.register_comm_hook({}, mean_hook)
    messages = []
    for wrong in (model, backend.distributed_model(Network(), compression="bf16")):
        try:
            wrong.register_comm_hook({}, mean_hook)
        except ModelError as error:
            messages.append(str(error))

    def failing(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: Any = torch.futures.Future()
        future.set_exception(ArithmeticError("the hook fails"))
        return future

    model = backend.distributed_model(Network())
    model.register_comm_hook(None, failing)
    try:
        model(torch.ones(1, 8).double()).sum().backward()
    except (ArithmeticError, RuntimeError) as error:
        messages.append(str(error))
    return messages


@pytest.fixture(scope="module", params=SEVERAL_RANKS, ids=lambda group: f"{group[0]}-{group[1]}")
def results(request: pytest.FixtureRequest) -> Iterator[list[dict[str, Any]]]:
    backend, size = request.param
    with RankGroup(backend, size) as group:
        found = group.run(train_with_each_hook)
        for result, messages in zip(found, group.run(register_invalid_hooks), strict=True):
            result["messages"] = messages
        yield found


def test_user_hook_reduces_the_gradients(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["buckets"] > STEPS  # several buckets per step
        torch.testing.assert_close(result["mean"], results[0]["without"], rtol=0, atol=1e-12)


def test_hierarchical_reduction_computes_the_mean_over_all_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        torch.testing.assert_close(result["hierarchical"], results[0]["without"], rtol=0, atol=1e-12)


def test_hierarchical_allreduce_computes_the_mean_over_all_ranks(results: list[dict[str, Any]]) -> None:
    for result in results:
        torch.testing.assert_close(result["hierarchical allreduce"], results[0]["without"], rtol=0, atol=1e-12)
        torch.testing.assert_close(
            result["hierarchical allreduce"], results[0]["hierarchical allreduce"], rtol=0, atol=0
        )
        # With two ranks on two hosts, there is one allreduce over all ranks.
        assert (result["hierarchical buckets"] > STEPS) == (len(results) == 3)


def test_hierarchical_allreduces_of_two_models_may_start_in_different_orders(results: list[dict[str, Any]]) -> None:
    for result in results:
        torch.testing.assert_close(result["two models hierarchically"], result["two models"], rtol=0, atol=1e-12)


def test_invalid_hooks_are_reported(results: list[dict[str, Any]]) -> None:
    for result in results:
        second, compressed, failing = result["messages"]
        assert second == compressed
        assert second.startswith("The gradients of this model already have a communication hook. Leave compression out")
        assert "the hook fails" in failing
