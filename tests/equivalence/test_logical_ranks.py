"""With logical ranks, runs are bit-identical on every backend and with any number of processes.

Each run trains a small network with four logical ranks in 1, 2 or 3 processes. Digests of all results are compared with
the digests of a run in one process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import ci, nightly
from logical_ranks_training import (
    BATCH,
    LOGICAL_RANKS,
    STEPS,
    VARIANTS,
    Confidence,
    Digests,
    Noisy,
    build,
    digest,
    train,
)
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, default_collate

import unitrain
from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.pipeline.replicas import Replicas
from unitrain.errors import CheckpointError, ConfigError, DataError, ModelError
from unitrain.testing import RankGroup
from unitrain.testing.cases import raises

RANKS_IMPORT = ("torchmetrics",)
GROUPS = [("ddp", 3), ("horovod", 2), *nightly(("ddp", 1), ("ddp", 2), ("horovod", 1), ("horovod", 3))]


def train_in_own_loop(backend: Backend) -> Digests:
    """Train in a loop with gradient accumulation, without the Trainer. Return the digests of all results."""
    model, optimizer, _, data = build("plain")
    wrapped = backend.distributed_model(model.to(backend.device), logical_ranks=LOGICAL_RANKS)
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


ALL_VARIANTS = (*VARIANTS, "own loop")


def train_variant(backend: Backend, variant: str) -> Digests:
    return train_in_own_loop(backend) if variant == "own loop" else train(backend, variant)


def train_all(backend: Backend) -> dict[str, Digests]:
    return {variant: train_variant(backend, variant) for variant in ALL_VARIANTS}


@pytest.fixture(scope="module")
def alone() -> dict[str, Digests]:
    with RankGroup("local", 1) as group:
        (runs,) = group.run(train_all, timeout_seconds=120)
    return runs


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as started:
        yield started


@pytest.mark.parametrize("variant", ALL_VARIANTS)
def test_runs_are_bit_identical_to_one_process(alone: dict[str, Digests], group: RankGroup, variant: str) -> None:
    for run in group.run(train_variant, variant, timeout_seconds=120):
        assert run == alone[variant]


@pytest.fixture(scope="module")
def route_groups() -> Iterator[dict[tuple[str, int], RankGroup]]:
    with RankGroup("ddp", 3) as three, RankGroup("local", 1) as one, RankGroup("horovod", 2) as two:
        yield {("ddp", 3): three, ("local", 1): one, ("horovod", 2): two}


def test_variants_are_different_runs(alone) -> None:
    """Every setting must have an effect. Otherwise, the test above would compare identical runs."""
    parameters = {variant: run["parameters"] for variant, run in alone.items()}
    assert parameters.pop("workers") == parameters["plain"], "augmentation must not depend on the workers"
    assert len(set(parameters.values())) == len(parameters)


@pytest.mark.parametrize("variant", ["accumulate", "synchronized all"])
@pytest.mark.parametrize("checkpoint_format", ["sharded", *ci("full")])
def test_run_resumes_within_an_epoch_with_another_number_of_processes(
    alone, route_groups, tmp_path: Path, checkpoint_format: str, variant: str
) -> None:
    route = [("ddp", 3, 2), ("local", 1, 5), ("horovod", 2, STEPS)]
    settings = {"output_dir": str(tmp_path), "resume": True, "checkpoint_format": checkpoint_format}
    for backend, size, steps in route:
        found = route_groups[backend, size].run(_resume, variant, {**settings, "max_steps": steps})
    for run in found:
        assert run == alone[variant]


def _resume(backend: Backend, variant: str, settings: dict[str, Any]) -> Digests:
    return train(backend, variant, **settings)


def resume_with_another_number_of_threads(backend: Backend, folder: str) -> list[str]:
    """Return the warnings about changed properties of the process, on which the bits depend."""
    records: list[logging.LogRecord] = []
    handler, logger, threads = logging.Handler(), logging.getLogger("unitrain"), torch.get_num_threads()
    handler.emit = records.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        for max_steps, num_threads in ((2, 1), (3, 2), (4, 2)):
            torch.set_num_threads(num_threads)
            train(backend, "plain", output_dir=folder, resume=True, max_steps=max_steps)
    finally:
        logger.removeHandler(handler)
        torch.set_num_threads(threads)
    return [text for record in records if "was written with" in (text := record.getMessage())]


def test_a_resumed_run_reports_changed_preconditions(group: RankGroup, tmp_path: Path) -> None:
    """A checkpoint contains the properties of the process. Only the first run with a changed property logs a
    warning."""
    warnings, *others = group.run(resume_with_another_number_of_threads, str(tmp_path / "run"))
    (warning,) = warnings
    assert "was written with threads=1, but this process has threads=2" in warning
    assert not any(others)


def assert_unsupported_combinations_raise(backend: Backend, folder: str) -> None:
    """Assert that unsupported combinations raise errors that name the setting, on every rank."""
    model, optimizer, _, data = build("plain")

    def distribute(**settings: Any) -> Any:
        return backend.distributed_model(model.to(backend.device), **{"logical_ranks": LOGICAL_RANKS, **settings})

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
    with pytest.raises(ConfigError, match="Pipelines do not support logical ranks"):
        unitrain.ShardedLoader(data, Replicas(backend, 1), batch_size=2, logical_ranks=LOGICAL_RANKS)
    with pytest.raises(ConfigError, match="compile=True is not supported with logical_ranks and sync_batch_norm"):
        TrainConfig(max_steps=1, logical_ranks=LOGICAL_RANKS, sync_batch_norm=True, compile=True)
    with pytest.raises(DataError, match="a collate_fn must keep all samples"):
        fit(DataLoader(data, BATCH, collate_fn=lambda items: default_collate(items[:1])))
    with pytest.raises(DataError, match="An iterable dataset is not supported with logical_ranks"):
        unitrain.ShardedLoader(Items(), backend, batch_size=2, logical_ranks=LOGICAL_RANKS)
    on_one_rank: Any = Items() if backend.rank == 0 else data
    with pytest.raises(DataError, match="An iterable dataset is not supported with logical_ranks"):
        unitrain.ShardedLoader(on_one_rank, backend, batch_size=2, shuffle=False, logical_ranks=LOGICAL_RANKS)
    fit(Noisy(), batch_size=BATCH, output_dir=folder)
    with pytest.raises(CheckpointError, match=r"has logical_ranks=4, but TrainConfig\.logical_ranks is None"):
        fit(Noisy(), batch_size=BATCH, output_dir=folder, resume=True, logical_ranks=None)


class Items(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_unsupported_combinations_are_rejected(group: RankGroup, tmp_path: Path) -> None:
    group.run(assert_unsupported_combinations_raise, str(tmp_path / "run"))


def assert_misuse_raises(backend: Backend) -> None:
    """Assert that a loop that reduces or steps too early, and an unused parameter, raise ModelError on every rank."""
    model, optimizer, _, data = build("unused")
    wrapped = backend.distributed_model(model.to(backend.device), logical_ranks=LOGICAL_RANKS)
    backend.distributed_optimizer(optimizer, wrapped)
    loader = unitrain.ShardedLoader(data, backend, batch_size=BATCH, logical_ranks=LOGICAL_RANKS)

    def train_epoch(batches: Iterator[Any]) -> None:
        for inputs, targets in batches:
            with nullcontext() if loader.ends_step else backend.no_sync(wrapped):
                cross_entropy(wrapped(inputs), targets).backward()

    with closing(iter(loader)) as batches:
        raises(ModelError, "parameters received no gradient on some logical rank: heads", lambda: train_epoch(batches))
    with closing(iter(unitrain.ShardedLoader(data, backend, batch_size=BATCH, logical_ranks=7))) as batches:
        inputs, targets = next(batches)
        raises(ModelError, "the batch belongs to one of 7 logical ranks", lambda: wrapped(inputs))
        ordinary, optimizer_of_ordinary, *_ = build("plain")
        ordinary = backend.distributed_model(ordinary.to(backend.device))
        backend.distributed_optimizer(optimizer_of_ordinary, ordinary)
        cross_entropy(ordinary(inputs), targets).backward()
        raises(ModelError, "but the model was distributed without them", optimizer_of_ordinary.step)
    if backend.size < 3:  # with three processes, some have a single logical rank
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
    group.run(assert_misuse_raises)


def assert_infinite_gradients_are_nan(backend: Backend) -> list[bytes]:
    """Assert that all gradients are NaN in a step in which one logical rank has an infinite input. Return the bits of
    the gradients."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    wrapped = backend.distributed_model(model.to(backend.device), logical_ranks=LOGICAL_RANKS)
    data = TensorDataset(torch.tensor([[1.0, 2.0]] * 3 + [[float("inf"), 1.0]]), torch.zeros(4, dtype=torch.long))
    loader = unitrain.ShardedLoader(DataLoader(data, 1), backend, logical_ranks=LOGICAL_RANKS)
    for inputs, targets in loader:
        with nullcontext() if loader.ends_step else backend.no_sync(wrapped):
            cross_entropy(wrapped(inputs), targets).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None and gradient.isnan().all() for gradient in gradients)
    return [gradient.cpu().numpy().tobytes() for gradient in gradients if gradient is not None]


def test_infinite_gradients_are_nan_on_every_rank(group: RankGroup) -> None:
    bits = group.run(assert_infinite_gradients_are_nan)
    assert bits == [bits[0]] * len(bits)


def evaluate_without_metrics(backend: Backend) -> None:
    """Assert that the validation of a run without metrics returns the loss of plain torch."""
    torch.manual_seed(1)
    model = nn.Linear(2, 3)
    data = TensorDataset(torch.randn(10, 2), torch.randint(0, 3, (10,)))
    config = TrainConfig(max_epochs=1, batch_size=2, logical_ranks=LOGICAL_RANKS, progress="off")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, cross_entropy, backend=backend, config=config)
    results = trainer.fit(data, data)
    expected = cross_entropy(model(data.tensors[0]), data.tensors[1]).item()
    assert results["val_loss"] == pytest.approx(expected, rel=1e-6)
    assert trainer.evaluate(data)["loss"] == results["val_loss"]


def test_validation_without_metrics_returns_the_loss(group: RankGroup) -> None:
    group.run(evaluate_without_metrics)


class Incomplete(Noisy):
    """A dataset in which some samples are None, including all samples of the first batch of the second logical rank."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return None if index in (1, 8, 15, 16, 17, 33, 50) else sample


def drop_none(items: list[Any]) -> Any:
    kept = [item for item in items if item is not None]
    return default_collate(kept) if kept else None


def evaluate_with_dropped_samples(backend: Backend) -> tuple[dict[str, str], list[list[float]]]:
    """Evaluate a model whose branches depend on random numbers. Return the results, and this rank's batches of a
    loader, each followed by a random number."""
    data = DataLoader(Incomplete(), BATCH, collate_fn=drop_none)
    model, optimizer, loss_fn, _ = build("unused")
    config = TrainConfig(max_steps=1, logical_ranks=LOGICAL_RANKS, find_unused_parameters=True, progress="off")
    metrics = {"confidence": Confidence()}
    trainer = Trainer(model, optimizer, loss_fn, backend=backend, metrics=metrics, config=config)
    results = {name: value.hex() for name, value in trainer.evaluate(data).items()}
    loader = unitrain.ShardedLoader(data, backend, shuffle=False, logical_ranks=LOGICAL_RANKS)
    return results, [[*inputs.flatten().tolist(), float(torch.rand(()))] for inputs, _ in loader]


def test_evaluation_with_dropped_samples_is_bit_identical_to_one_process(
    group: RankGroup, route_groups: dict[tuple[str, int], RankGroup]
) -> None:
    ((expected, batches),) = route_groups["local", 1].run(evaluate_with_dropped_samples)
    found = group.run(evaluate_with_dropped_samples)
    assert [results for results, _ in found] == [expected] * group.size
    assert [batch for _, own in found for batch in own] == batches
