"""With logical ranks, a run has the same bits on any backend and any number of processes.

Each run trains a small network on four logical ranks, which 1, 2 or 3 processes compute. Digests of all results are
compared with those of one process.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from groups import nightly
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler, default_collate

import unitrain
from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.pipeline.replicas import Replicas
from unitrain.errors import CheckpointError, ConfigError, DataError, ModelError
from unitrain.testing import RankGroup
from unitrain.testing.cases import raises

LOGICAL_RANKS, BATCH, SAMPLES, STEPS = 4, 3, 62, 9
GROUPS = [("ddp", 2), ("ddp", 3), ("horovod", 3), *nightly(("ddp", 1), ("horovod", 1), ("horovod", 2))]
Digests = dict[str, Any]


class Noisy(Dataset[Any]):
    """Samples with augmentation by the generators of torch and numpy."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.inputs = torch.randn(SAMPLES, 1, 6, 6, generator=generator)
        self.targets = torch.randint(0, 4, (SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * torch.randn(1, 6, 6) + float(np.random.rand())
        return self.inputs[index] + noise, self.targets[index]


class Network(nn.Module):
    """A network with BatchNorm, dropout, a buffer that each forward pass reads and writes, and, if `has_branches`, two
    branches of which random numbers choose one."""

    def __init__(self, *, has_branches: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.3)
        )
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(2 if has_branches else 1))
        self.register_buffer("center", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        output: Tensor = self.heads[int(torch.randint(len(self.heads), ()))](hidden - self.center)
        if self.training:
            self.center = 0.9 * self.center + 0.1 * hidden.detach().mean(0)
        return output


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over the targets other than 3, and their number."""
    return cross_entropy(output, target, ignore_index=3, reduction="sum"), (target != 3).sum()


def spiked(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss that is 1e12 times as large for some batches."""
    return cross_entropy(output, target) * (1e12 if int(target[0]) == 2 else 1.0)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float()


class Draw(unitrain.Callback):
    """Draws a random number after each step."""

    def __init__(self) -> None:
        self.draws: list[float] = []

    def on_step_end(self, trainer: Any) -> None:
        self.draws.append(float(torch.rand(())))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "workers": {"num_workers": 2},
    "tokens": {"gradient_accumulation_steps": 2},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "spike": {},
    "unused": {"find_unused_parameters": True},
    "sampler": {"batch_size": None},
}


def build(variant: str) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
    """Return the model, the optimizer, the loss function and the data of a variant."""
    torch.manual_seed(1)
    model = Network(has_branches=variant == "unused")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data: Any = Noisy()
    if variant == "sampler":
        sampler = WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1).tolist(), SAMPLES)
        data = DataLoader(data, BATCH, sampler=sampler, collate_fn=lambda items: default_collate(items))
    return model, optimizer, {"tokens": summed, "spike": spiked}.get(variant, cross_entropy), data


def train(backend: Backend, variant: str, **settings: Any) -> Digests:
    """Train with the Trainer, and return the digests of all results."""
    model, optimizer, loss_fn, data = build(variant)
    settings = {"max_steps": STEPS, "batch_size": BATCH, **VARIANTS[variant], **settings}
    config = TrainConfig(
        logical_ranks=LOGICAL_RANKS, ema_decay=0.9, log_every_n_steps=2, seed=3, progress="off", **settings
    )
    draw = Draw()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    trainer = Trainer(
        model, optimizer, loss_fn, backend=backend, config=config, metrics={"accuracy": accuracy}, callbacks=[draw],
        scheduler=scheduler,
    )  # fmt: skip
    results = trainer.fit(data, TensorDataset(Noisy().inputs, Noisy().targets))
    unitrain.broadcast_buffers(model, backend)
    average = trainer.averaged_model
    assert average is not None
    outputs = trainer.predict(TensorDataset(Noisy().inputs, Noisy().targets))
    return {
        "parameters": digest(*model.parameters()),
        "buffers": digest(*model.buffers()),
        "state": digest(*(value for state in optimizer.state.values() for value in state.values())),
        "average": digest(*average.parameters(), *average.buffers()),
        "outputs": digest(outputs),
        "draws": draw.draws[-1],
        **{name: value.hex() for name, value in results.items()},
    }


def digest(*tensors: Tensor) -> str:
    content = b"".join(tensor.detach().double().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(content).hexdigest()[:12]


def train_in_own_loop(backend: Backend) -> Digests:
    """Train without the Trainer, with accumulation, and return the digests of all results."""
    model, optimizer, _, data = build("plain")
    wrapped = backend.distributed_model(model, logical_ranks=LOGICAL_RANKS)
    optimizer = backend.distributed_optimizer(optimizer, wrapped)
    loader = unitrain.ShardedLoader(
        data, backend, batch_size=BATCH, gradient_accumulation_steps=2, logical_ranks=LOGICAL_RANKS
    )
    mean, batches = unitrain.MeanMetric(backend, exact=True), 0
    for _ in range(2):
        for inputs, targets in loader:
            with nullcontext() if loader.ends_step else backend.no_sync(wrapped):
                loss = cross_entropy(wrapped(inputs), targets)
                (loss * loader.loss_weight).backward()
            batches += 1
            mean.update(loss.detach(), loader.num_samples)
            if loader.ends_step:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    assert batches == 2 * len(loader)
    unitrain.broadcast_buffers(wrapped, backend)
    return {
        "parameters": digest(*model.parameters()),
        "buffers": digest(*model.buffers()),
        "loss": mean.compute().hex(),
    }


def train_all(backend: Backend) -> dict[str, Digests]:
    return {**{variant: train(backend, variant) for variant in VARIANTS}, "own loop": train_in_own_loop(backend)}


@pytest.fixture(scope="module")
def alone() -> dict[str, Digests]:
    with RankGroup("local", 1) as group:
        (runs,) = group.run(train_all, timeout_seconds=120)
    return runs


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as started:
        yield started


@pytest.fixture(scope="module")
def runs(group: RankGroup) -> list[dict[str, Digests]]:
    return group.run(train_all, timeout_seconds=240)


@pytest.mark.parametrize("variant", [*VARIANTS, "own loop"])
def test_bits_equal_those_of_one_process(alone, runs, variant) -> None:
    for run in runs:
        assert run[variant] == alone[variant]


def test_variants_are_different_runs(alone) -> None:
    """Guards the test above against settings without effect."""
    parameters = {variant: run["parameters"] for variant, run in alone.items()}
    assert parameters.pop("workers") == parameters["plain"], "augmentation depends on the workers"
    assert len(set(parameters.values())) == len(parameters)


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_resume_on_other_processes_within_an_epoch(alone, tmp_path: Path, checkpoint_format: str) -> None:
    route = [("ddp", 3, 2), ("local", 1, 5), ("horovod", 2, STEPS)]
    settings = {"output_dir": str(tmp_path), "resume": True, "checkpoint_format": checkpoint_format}
    for backend, size, steps in route:
        with RankGroup(backend, size) as group:
            found = group.run(_resume, {**settings, "max_steps": steps})
    for run in found:
        assert run == alone["accumulate"]


def _resume(backend: Backend, settings: dict[str, Any]) -> Digests:
    return train(backend, "accumulate", **settings)


def check_errors(backend: Backend, folder: str) -> None:
    """Assert that unsupported combinations raise errors that name the setting, on every rank."""
    model, optimizer, _, data = build("plain")

    def distribute(**settings: Any) -> Any:
        return backend.distributed_model(model, **{"logical_ranks": LOGICAL_RANKS, **settings})

    def fit(data: Any, **settings: Any) -> None:
        config = TrainConfig(**{"max_steps": 1, "logical_ranks": LOGICAL_RANKS, "progress": "off", **settings})
        Trainer(model, optimizer, cross_entropy, backend=backend, config=config).fit(data)

    fewer = backend.size - 1
    if fewer:
        with pytest.raises(ConfigError, match=f"is {fewer}, but {backend.size} processes were started"):
            distribute(logical_ranks=fewer)
        with pytest.raises(ConfigError, match=rf"ShardedLoader.* is {fewer}, but {backend.size} processes"):
            unitrain.ShardedLoader(data, backend, batch_size=2, logical_ranks=fewer)
        with pytest.raises(ConfigError, match=rf"TrainConfig\.logical_ranks is {fewer}, but"):
            fit(data, batch_size=BATCH, logical_ranks=fewer)
    for settings in ({"shard": "state"}, {"shard": "gradients"}, {"compression": "fp16"}):
        (name,) = settings
        with pytest.raises(ConfigError, match=f"{name}=.* is not supported with logical_ranks"):
            distribute(**settings)
    wrapped = distribute()
    with pytest.raises(ConfigError, match="is not supported for a model with logical_ranks"):
        backend.distributed_optimizer(optimizer, wrapped, shard="state")
    with pytest.raises(ModelError, match="the batch belongs to no logical rank"):
        wrapped(torch.zeros(2, 1, 6, 6))
    with pytest.raises(ModelError, match="which is not supported with logical_ranks"):
        backend.distributed_model(unitrain.sync_batch_norm(Network(), backend), logical_ranks=LOGICAL_RANKS)
    with pytest.raises(ConfigError, match="Pipelines do not support logical ranks"):
        unitrain.ShardedLoader(data, Replicas(backend, 1), batch_size=2, logical_ranks=LOGICAL_RANKS)
    metrics = {"accuracy": torchmetrics.classification.MulticlassAccuracy(4)}
    with pytest.raises(ConfigError, match="Metric 'accuracy' is a torchmetrics object"):
        Trainer(
            model, optimizer, cross_entropy, backend=backend, metrics=metrics,
            config=TrainConfig(max_steps=1, batch_size=BATCH, logical_ranks=LOGICAL_RANKS),
        )  # fmt: skip
    with pytest.raises(ConfigError, match="sync_batch_norm=True is not supported with logical_ranks"):
        TrainConfig(max_steps=1, logical_ranks=LOGICAL_RANKS, sync_batch_norm=True)
    with pytest.raises(DataError, match="a collate_fn must keep all samples"):
        fit(DataLoader(data, BATCH, collate_fn=lambda items: default_collate(items[:1])))
    with pytest.raises(DataError, match="An iterable dataset is not supported with logical_ranks"):
        unitrain.ShardedLoader(Items(), backend, batch_size=2, logical_ranks=LOGICAL_RANKS)
    fit(Noisy(), batch_size=BATCH, output_dir=folder)
    with pytest.raises(CheckpointError, match=r"has logical_ranks=4, but TrainConfig\.logical_ranks is None"):
        fit(Noisy(), batch_size=BATCH, output_dir=folder, resume=True, logical_ranks=None)


class Items(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_unsupported_combinations(group: RankGroup, tmp_path: Path) -> None:
    group.run(check_errors, str(tmp_path / "run"))


def misuse(backend: Backend) -> None:
    """Assert that a loop that reduces or steps too early, and an unused parameter, raise ModelError on every rank."""
    model, optimizer, _, data = build("unused")
    wrapped = backend.distributed_model(model, logical_ranks=LOGICAL_RANKS)
    backend.distributed_optimizer(optimizer, wrapped)
    loader = unitrain.ShardedLoader(data, backend, batch_size=BATCH, logical_ranks=LOGICAL_RANKS)

    def train_epoch(batches: Iterator[Any]) -> None:
        for inputs, targets in batches:
            with nullcontext() if loader.ends_step else backend.no_sync(wrapped):
                cross_entropy(wrapped(inputs), targets).backward()

    with closing(iter(loader)) as batches:
        raises(ModelError, "parameters got no gradient on some logical rank: heads", lambda: train_epoch(batches))
    with closing(iter(unitrain.ShardedLoader(data, backend, batch_size=BATCH, logical_ranks=7))) as batches:
        inputs, targets = next(batches)
        raises(ModelError, "the batch belongs to one of 7 logical ranks", lambda: wrapped(inputs))
        ordinary, optimizer_of_ordinary, *_ = build("plain")
        ordinary = backend.distributed_model(ordinary)
        backend.distributed_optimizer(optimizer_of_ordinary, ordinary)
        cross_entropy(ordinary(inputs), targets).backward()
        raises(ModelError, "but the model was distributed without them", optimizer_of_ordinary.step)
    if backend.size < 3:  # otherwise some processes have a single logical rank
        with closing(iter(loader)) as batches:
            inputs, targets = next(batches)
            loss = cross_entropy(wrapped(inputs), targets)
            raises(ModelError, "before every logical rank had run", loss.backward)
        with closing(iter(loader)) as batches:
            inputs, targets = next(batches)
            with backend.no_sync(wrapped):
                cross_entropy(wrapped(inputs), targets).backward()
            wrapped(next(batches)[0])
            raises(ModelError, "before the gradients of all logical ranks were reduced", optimizer.step)


def test_misuse_raises_the_same_error_on_every_rank(group: RankGroup) -> None:
    group.run(misuse)


def non_finite(backend: Backend) -> list[bytes]:
    """Return the gradients, pickled, after a step in which one logical rank has an infinite loss."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    wrapped = backend.distributed_model(model, logical_ranks=LOGICAL_RANKS)
    data = TensorDataset(torch.tensor([[1.0, 2.0]] * 3 + [[float("inf"), 1.0]]), torch.zeros(4, dtype=torch.long))
    loader = unitrain.ShardedLoader(DataLoader(data, 1), backend, logical_ranks=LOGICAL_RANKS)
    for inputs, targets in loader:
        with nullcontext() if loader.ends_step else backend.no_sync(wrapped):
            cross_entropy(wrapped(inputs), targets).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.isnan().all() for gradient in gradients)
    return [pickle.dumps(gradient) for gradient in gradients]


def test_infinite_gradients_are_nan_on_every_rank(group: RankGroup) -> None:
    group.run(non_finite)
