"""Setting another default device in torch does not change the results of a program.

The default device in these tests is "meta". If a tensor is created on this device by mistake, it has no values, and the
case fails.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler
from torchmetrics import classification

import unitrain
from unitrain import LocalSGDConfig, PowerSGD, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.sharding.partition import MIN_DIVIDED_ELEMENTS
from unitrain.errors import CollectiveMismatchError, ConfigError, UnitrainError
from unitrain.testing import RankGroup

RANKS_IMPORT = ("torchmetrics",)
SAMPLES, INPUTS, CLASSES, STEPS = 29, 8, 4, 6
WIDTH = MIN_DIVIDED_ELEMENTS // INPUTS + 8  # large enough to be sharded
CPU = torch.device("cpu")
TIMEOUT_SECONDS = 200.0


class Items(Dataset[tuple[Tensor, ...]]):
    """A dataset whose samples are collated."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.data[index]

    def __len__(self) -> int:
        return len(self.data)


class Stream(IterableDataset[tuple[Tensor, ...]]):
    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return (self.data[index] for index in range(len(self.data)))


class TokenLoss:
    """A loss over tokens: the sum and the number of tokens."""

    def __call__(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return nn.functional.cross_entropy(output, target, reduction="sum"), (target + 1).sum()


def data(samples: int = SAMPLES) -> TensorDataset:
    with CPU:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(samples, INPUTS, generator=generator, dtype=torch.float64)
        return TensorDataset(inputs, torch.randint(CLASSES, (samples,), generator=generator))


def network(width: int = 6, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    with CPU:
        torch.manual_seed(0)
        first, last = nn.Linear(INPUTS, width), nn.Linear(width, CLASSES)
        return nn.Sequential(first, norm(width), nn.Dropout(0.1), nn.Tanh(), last).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def metrics(name: str) -> dict[str, Any]:
    if name == "torchmetrics":
        with CPU:
            accuracy, area = classification.MulticlassAccuracy(CLASSES), classification.MulticlassAUROC(CLASSES)
            return {"accuracy": accuracy, "area": area}
    return {"error": lambda output, target: (output.argmax(1) != target).double(), "one": lambda output, target: 1.0}


def state(*modules: nn.Module | None) -> list[Tensor]:
    values = [value for module in modules if module is not None for value in module.state_dict().values()]
    assert all(value.device.type == "cpu" for value in values)
    return values


def fit(backend: Backend, folder: Path, settings: dict[str, Any]) -> Any:
    """Train, evaluate and predict. If `settings` contain `interrupt`, end the run at this step, and resume it."""
    settings = dict(settings)
    source, interrupt, width = (
        settings.pop("data", "tensors"),
        settings.pop("interrupt", None),
        settings.pop("width", 6),
    )
    has_tokens, fused = settings.pop("tokens", False), settings.pop("fused", False)
    metrics_name, norm = settings.pop("metrics", "functions"), settings.pop("norm", nn.BatchNorm1d)
    training_data: Any = data()
    if source == "items":
        training_data = Items(training_data)
    elif source == "stream":
        training_data = Stream(training_data)
    elif source == "sampler":
        weights = list(range(1, SAMPLES + 1))
        with CPU:
            sampler = WeightedRandomSampler(weights, SAMPLES)
            training_data = DataLoader(training_data, batch_size=3, sampler=sampler)
    if source != "sampler":
        settings.setdefault("batch_size", 3)
    found: list[Any] = []
    for max_steps in (interrupt, STEPS) if interrupt else (STEPS,):
        model = network(width, norm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True) if fused else sgd(model)
        config = TrainConfig(
            **settings, max_steps=max_steps, seed=3, progress="off", output_dir=folder if interrupt else None,
            resume=bool(interrupt), checkpoint_every_steps=2 if interrupt else None,
        )  # fmt: skip
        trainer = Trainer(
            model, optimizer, TokenLoss() if has_tokens else nn.CrossEntropyLoss(), backend=backend, config=config,
            metrics=metrics(metrics_name),
        )  # fmt: skip
        results = trainer.fit(training_data, data(11))
        found = [results, state(backend.unwrap(trainer.model), trainer.averaged_model)]
        found += [trainer.evaluate(data(5)), trainer.predict(data(7))]
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "all": {
        "gradient_accumulation_steps": 2, "ema_decay": 0.5, "max_grad_norm": 0.5, "sync_batch_norm": True,
        "interrupt": 3, "metrics": "torchmetrics",
    },
    "batches": {"data": "items", "tokens": True, "find_unused_parameters": True, "interrupt": 2, "fused": True},
    "workers": {"data": "items", "num_workers": 1},
    "stream": {"data": "stream", "interrupt": 2},
    "sampler": {"data": "sampler"},
    "state": {"shard": "state", "width": WIDTH, "interrupt": 3, "ema_decay": 0.5},
    "gradients": {"shard": "gradients", "width": WIDTH, "interrupt": 3, "checkpoint_format": "full"},
    "parameters": {"shard": "parameters", "width": WIDTH, "interrupt": 3, "norm": nn.LayerNorm, "max_grad_norm": 0.5},
    "logical ranks": {"logical_ranks": 4, "interrupt": 3, "tokens": True, "norm": nn.LayerNorm},
    "interleaved logical ranks": {"logical_ranks": 4, "sync_batch_norm": True, "fused": True},
    "local SGD": {"local_sgd": 2, "interrupt": 3, "ema_decay": 0.5},
    "DiLoCo": {
        "local_sgd": LocalSGDConfig(steps=2, outer_lr=0.7, outer_momentum=0.9, compression="int8", fragments=2,
            overlap_steps=1), "interrupt": 3,
    },
    "bf16": {"compression": "bf16", "precision": "bf16"},
    "PowerSGD": {"compression": PowerSGD(rank=2, start_step=1), "interrupt": 4},
}  # fmt: skip


def call_collectives(backend: Backend) -> list[Any]:
    with CPU:
        own = torch.arange(8.0).view(4, 2) + backend.rank
        rows = torch.full((backend.rank + 1, 2), 2.0, requires_grad=True)
    gathered = unitrain.differentiable_allgather(rows, backend)
    (gradient,) = torch.autograd.grad(gathered.square().sum(), rows)
    found = [gathered.detach(), gradient]
    found += [backend.allreduce(own, op) for op in ("sum", "mean", "min", "max")]  # type: ignore[arg-type]
    found += [backend.allgather(own[: 1 + backend.rank]), backend.broadcast(own), backend.allgather(own[:0])]
    if backend.size in (1, 2):
        found.append(backend.reducescatter(own, "sum"))
    if isinstance(backend, unitrain.SupportsAllToAll):
        found.append(backend.alltoall(own))
    found += backend.allgather_object({"rank": backend.rank, "tensor": own})
    found.append(backend.broadcast_object([own, 3] if backend.rank == 0 else None))
    backend.barrier()
    return found


def errors_of_invalid_calls(backend: Backend) -> list[str]:
    """Return the errors of invalid calls."""
    with CPU:
        own = torch.ones(2 + backend.rank)
    found = []
    for call in (lambda: backend.allreduce(own), lambda: backend.broadcast_object(lambda: 0)):
        try:
            call()
        except UnitrainError as error:
            assert isinstance(error, CollectiveMismatchError | ConfigError), error
            found.append(re.sub(r"collective #\d+", "", str(error)))
    backend.barrier()
    assert len(found) == (0 if backend.size == 1 else 2)
    return found


def train_in_own_loop(backend: Backend, shard: str) -> list[Any]:
    model = backend.distributed_model(network(WIDTH, nn.LayerNorm), shard="none" if shard == "state" else shard)  # type: ignore[arg-type]
    optimizer = backend.distributed_optimizer(sgd(model), model, shard=shard)  # type: ignore[arg-type]
    loader = unitrain.ShardedLoader(data(), backend, batch_size=3, seed=3, gradient_accumulation_steps=2)
    mean = unitrain.MeanMetric(backend)
    exact = unitrain.MeanMetric(backend, exact=True)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        mean.update(loss, loader.num_samples)
        exact.update(1.5, loader.num_samples)
        with nullcontext() if loader.ends_step else backend.no_sync(model):
            (loss * loader.loss_weight).backward()
        if loader.ends_step:
            optimizer.step()
            optimizer.zero_grad()
    evaluation = unitrain.ShardedLoader(data(), backend, batch_size=3, shuffle=False)
    count = sum(len(targets) for _, targets in evaluation)
    saved = copy.deepcopy(optimizer.state_dict())
    return [list(backend.unwrap(model).state_dict().values()), saved, mean.compute(), exact.compute(), count]


def train_pipeline(backend: Backend) -> list[Any]:
    blocks = unitrain.Pipeline(
        network(norm=nn.LayerNorm), backend, nn.CrossEntropyLoss(), stages=backend.size, micro_batches=2,
        balance=[5] if backend.size == 1 else [2, 3],
    )  # fmt: skip
    optimizer = sgd(blocks)  # type: ignore[arg-type]
    losses = []
    for inputs, targets in unitrain.ShardedLoader(data(), blocks.replicas, batch_size=9, seed=3):
        losses.append(blocks.forward_backward(inputs, targets))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [losses, blocks.forward(data().tensors[0])]


# Settings of the cases that only the nightly tier runs.
NIGHTLY = {"workers", "sampler", "state", "gradients", "interleaved logical ranks", "local SGD", "bf16"}


def run_cases(backend: Backend, folder: Path, default_device: str | None, is_nightly: bool) -> dict[str, Any]:
    """Run the cases with this default device, and return their results."""
    cases: dict[str, Callable[[], Any]] = {
        "collectives": lambda: call_collectives(backend),
        "errors": lambda: errors_of_invalid_calls(backend),
        "pipeline": lambda: train_pipeline(backend),
        **{
            name: lambda s=settings, n=name: fit(backend, folder / n, s)
            for name, settings in SETTINGS.items()
            if is_nightly or name not in NIGHTLY
        },
        **{f"loop {shard}": lambda s=shard: train_in_own_loop(backend, s) for shard in ("none", "state", "parameters")},
    }
    found = {}
    for name, case in cases.items():
        with nullcontext() if default_device is None else torch.device(default_device):
            found[name] = case()
    return found


@pytest.mark.parametrize(
    ("group", "is_nightly"),
    [
        pytest.param(("ddp", 2), False, id="ddp-2", marks=pytest.mark.ci),
        *(
            pytest.param(group, True, id=f"{group[0]}-{group[1]}-all", marks=pytest.mark.nightly)
            for group in (("local", 1), ("ddp", 2), ("horovod", 2))
        ),
    ],
)
def test_results_do_not_depend_on_the_default_device(group: tuple[str, int], is_nightly: bool, tmp_path: Path) -> None:
    with RankGroup(*group) as ranks:
        expected = ranks.run(run_cases, tmp_path / "cpu", None, is_nightly, timeout_seconds=TIMEOUT_SECONDS)
        found = ranks.run(run_cases, tmp_path / "meta", "meta", is_nightly, timeout_seconds=TIMEOUT_SECONDS)
    for one, other in zip(found, expected, strict=True):
        assert one.pop("errors") == other["errors"]
        for name, result in one.items():
            torch.testing.assert_close(result, other[name], rtol=0, atol=0, msg=lambda text, n=name: f"{n}: {text}")
