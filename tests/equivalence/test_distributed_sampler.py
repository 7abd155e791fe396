"""Ports of a DistributedDataParallel script with a DistributedSampler give the same results as the script, even with
BatchNorm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from groups import SEVERAL_RANKS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

SEED, EPOCHS, BATCH_SIZE, LENGTH = 7, 3, 4, 72


@pytest.fixture(scope="module", params=SEVERAL_RANKS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(LENGTH, 6, generator=generator) * torch.arange(1, LENGTH + 1).unsqueeze(1)
    return TensorDataset(inputs, torch.randint(3, (LENGTH,), generator=generator))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, sampler: DistributedSampler[Any]) -> None:
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(samples(), batch_size=BATCH_SIZE, sampler=sampler):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def train_original(backend: Backend) -> nn.Module:
    """Train with plain torch, in the process group that the backend created."""
    model = network()
    train(DistributedDataParallel(model), optimizer_of(model), DistributedSampler(samples(), seed=SEED))
    return model


def train_in_own_loop(backend: Backend) -> nn.Module:
    model = network()
    optimizer = optimizer_of(model)
    wrapped = backend.distributed_model(model)
    sampler = DistributedSampler(samples(), backend.size, backend.rank, seed=SEED)
    train(wrapped, backend.distributed_optimizer(optimizer, wrapped), sampler)
    return model


def train_with_trainer(backend: Backend) -> nn.Module:
    model = network()
    config = TrainConfig(max_epochs=EPOCHS, batch_size=BATCH_SIZE, seed=SEED, progress="off")
    Trainer(model, optimizer_of(model), nn.functional.cross_entropy, backend=backend, config=config).fit(samples())
    return model


def train_all(backend: Backend) -> list[dict[str, Tensor]]:
    return [
        train_function(backend).state_dict()
        for train_function in (train_original, train_in_own_loop, train_with_trainer)
    ]


def test_port_with_batch_norm_reproduces_the_original_script(group: RankGroup) -> None:
    for rank, (expected, *ports) in enumerate(group.run(train_all)):
        for port in ports:
            for name, wanted in expected.items():
                if "running" in name and rank:
                    continue  # evaluation and checkpoints use rank 0's buffers
                # DistributedDataParallel sums the gradients of three ranks in another order.
                torch.testing.assert_close(port[name], wanted, rtol=0, atol=0 if group.size < 3 else 1e-5)
