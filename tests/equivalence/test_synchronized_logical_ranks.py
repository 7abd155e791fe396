"""Logical ranks with synchronized BatchNorm are bit-identical for any number of processes. The results equal those of
one process that normalizes over the complete micro-batch."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from groups import ci, nightly
from logical_ranks_training import BATCH, LOGICAL_RANKS, SAMPLES, Digests, train
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import unitrain
from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.logical_ranks import local_logical_ranks
from unitrain.errors import CollectiveMismatchError, ConfigError
from unitrain.testing import RankGroup
from unitrain.testing.cases import raises

RANKS_IMPORT = ("torchmetrics",)
GROUPS = [
    *ci(("ddp", 3), ("horovod", 2)),
    *nightly(("ddp", 1), ("ddp", 2), ("ddp", 4), ("horovod", 1), ("horovod", 3), ("horovod", 4)),
]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as started:
        yield started


def train_with_five(backend: Backend) -> dict[str, Digests]:
    """Train with five logical ranks, which are distributed unevenly over 2, 3 or 4 processes."""
    return {variant: train(backend, variant, logical_ranks=5) for variant in ("synchronized", "synchronized all")}


@pytest.fixture(scope="module")
def alone() -> dict[str, Digests]:
    with RankGroup("local", 1) as group:
        (runs,) = group.run(train_with_five, timeout_seconds=120)
    return runs


def test_uneven_logical_ranks_have_the_bits_of_one_process(alone, group: RankGroup) -> None:
    for run in group.run(train_with_five, timeout_seconds=240):
        assert run == alone


# --- comparison with plain torch ---

# Samples per micro-batch on all logical ranks together, for each step of an epoch, by gradient_accumulation_steps. In
# the last step of the first plan, two logical ranks have no samples.
PLANS = {1: [[12]] * 5 + [[2]], 2: [[12, 12], [12, 12], [8, 6]]}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(64, 8, bias=False),
            nn.BatchNorm1d(8),
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        output: Tensor = self.head(hidden.tanh() + hidden)
        return output


def build_model_optimizer_and_data(dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset]:
    torch.manual_seed(1)
    model = Layers().to(dtype)
    inputs, targets = torch.randn(SAMPLES, 1, 6, 6).to(dtype), torch.randint(0, 4, (SAMPLES,))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01), TensorDataset(inputs, targets)


def train_plain(dtype: torch.dtype, accumulation: int) -> dict[str, Tensor]:
    """Train one epoch in plain torch, with BatchNorm over the samples of all logical ranks."""
    model, optimizer, data = build_model_optimizer_and_data(dtype)
    inputs, targets = data.tensors
    start = 0
    for sizes in PLANS[accumulation]:
        for size in sizes:
            part = slice(start, start + size)
            (cross_entropy(model(inputs[part]), targets[part], reduction="sum") / sum(sizes)).backward()
            start += size
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert start == SAMPLES
    return model.state_dict()


def train_synchronized(backend: Backend, dtype: torch.dtype, accumulation: int) -> dict[str, Tensor]:
    model, optimizer, data = build_model_optimizer_and_data(dtype)
    config = TrainConfig(
        max_epochs=1, batch_size=BATCH, logical_ranks=LOGICAL_RANKS, gradient_accumulation_steps=accumulation,
        max_grad_norm=0.5, shuffle=False, progress="off",
    )  # fmt: skip
    unitrain.sync_batch_norm(model, backend)
    Trainer(model, optimizer, cross_entropy, backend=backend, config=config).fit(data)
    return model.state_dict()


@pytest.mark.parametrize("accumulation", PLANS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_results_equal_batch_norm_over_the_complete_micro_batch(
    group: RankGroup, dtype: torch.dtype, tolerance: float, accumulation: int
) -> None:
    expected = train_plain(dtype, accumulation)
    for state in group.run(train_synchronized, dtype, accumulation):
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=name)


# --- features and errors ---


def running_threads() -> set[threading.Thread]:
    """Return the threads of this process, except those that a collective starts after a wait of several seconds."""
    return {thread for thread in threading.enumerate() if thread.name != "unitrain store"}


def wait_until_others_end(threads: set[threading.Thread]) -> None:
    """Wait until all threads except `threads` have ended. When a DataLoader closes a multiprocessing queue, the thread
    of the queue ends later."""
    deadline = time.monotonic() + 30
    while others := running_threads() - threads:
        assert time.monotonic() < deadline, others
        time.sleep(0.01)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x).relu() + x
        return output


def train_blocks(backend: Backend, **settings: Any) -> list[list[float]]:
    """Train an epoch and return the parameters and buffers. Assert that the logical ranks run in threads, and that the
    threads end."""
    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(26, 8), torch.randint(0, 4, (26,)))
    config = TrainConfig(max_epochs=1, batch_size=2, logical_ranks=5, sync_batch_norm=True, progress="off", **settings)
    trainer = Trainer(model, optimizer, cross_entropy, backend=backend, config=config)
    calls, before = list[threading.Thread](), running_threads()
    hook = model.register_forward_hook(lambda *_: calls.append(threading.current_thread()))
    trainer.fit(data)
    hook.remove()
    steps, local_ranks = 3, len(local_logical_ranks(5, backend.rank, backend.size))
    assert len(calls) == steps * local_ranks
    assert len(set(calls)) == 1 + steps * (local_ranks - 1)
    wait_until_others_end(before)
    return [tensor.flatten().tolist() for tensor in (*model.parameters(), *model.buffers())]


def train_variants(backend: Backend) -> list[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return [
            train_blocks(backend),
            train_blocks(backend, checkpoint_activations=("Block",)),
            train_blocks(backend, channels_last=True, num_workers=1),
        ]
    finally:
        torch.set_num_threads(threads)


def test_recomputed_activations_have_the_same_bits(group: RankGroup) -> None:
    with RankGroup("local", 1) as alone:
        (expected,) = alone.run(train_variants)
    plain, recomputed, workers = expected
    assert plain == recomputed == workers
    for found in group.run(train_variants):
        assert found == expected


class Skipping(nn.Module):
    """A model that skips a synchronized layer for some batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.second(x) if x[0, 0] > 0 else self.second(self.first(x))
        return output


def assert_errors_on_every_rank(backend: Backend) -> None:
    model = Skipping()
    data = TensorDataset(torch.eye(20, 8), torch.randint(0, 4, (20,)))  # x[0, 0] > 0 only in sample 0
    config = TrainConfig(
        max_epochs=1, batch_size=4, logical_ranks=5, sync_batch_norm=True, shuffle=False, progress="off"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, cross_entropy, backend=backend, config=config)
    threads = running_threads()
    raises(CollectiveMismatchError, "while another rank calls another layer", lambda: trainer.fit(data))
    wait_until_others_end(threads)
    raises(
        ConfigError,
        "find_learning_rate does not support sync_batch_norm with logical_ranks",
        lambda: unitrain.find_learning_rate(trainer, data),
    )


def test_errors_are_raised_on_every_rank(group: RankGroup) -> None:
    group.run(assert_errors_on_every_rank)
