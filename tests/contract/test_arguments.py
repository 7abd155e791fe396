"""Arguments with wrong types or values raise the same error on every rank, which names the argument and the value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import unitrain
from unitrain import Loss, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.errors import ModelError, UnitrainError
from unitrain.testing import RankGroup


@dataclass
class Parts:
    """Arguments of a valid Trainer. Each case changes some of them."""

    backend: Backend
    folder: str

    def __post_init__(self) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))

    def make_trainer(self, *arguments: Any, **settings: Any) -> Trainer:
        settings = {"backend": self.backend, "config": self.make_config(), **settings}
        return Trainer(*(arguments or (self.model, self.optimizer, nn.functional.mse_loss)), **settings)

    def make_loader(self) -> unitrain.ShardedLoader:
        return unitrain.ShardedLoader(self.data, self.backend, batch_size=2)

    def make_config(self, **settings: Any) -> TrainConfig:
        return TrainConfig(**{"max_epochs": 1, "batch_size": 2, "progress": "off", **settings})

    def fit(self, loss_fn: Any = nn.functional.mse_loss, data: Any = None, **settings: Any) -> dict[str, float]:
        trainer = self.make_trainer(self.model, self.optimizer, loss_fn, config=self.make_config(**settings))
        return trainer.fit(self.data if data is None else data)


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class DataParallel(Wrapped):
    pass


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """A class with the name of torch's optimizer, whose constructor requires a process group. The local backend has
    no process group."""


def summed_loss(tokens: Any) -> Callable[[Any, Any], Any]:
    return lambda output, target: ((output - target).pow(2).sum(), tokens)


def metric(output: Any, target: Any) -> Any:
    return (output - target).mean()


def make_trainer_with_lazy_model(parts: Parts) -> None:
    model = nn.LazyLinear(1)
    parts.make_trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss)


def make_trainer_with_scheduler_of_another_optimizer(parts: Parts) -> None:
    parts.make_trainer(scheduler=StepLR(torch.optim.Adam(nn.Linear(1, 1).parameters()), 1))


BATCHES = [(torch.ones(4, 3), torch.ones(4, 1)) for _ in range(3)]

# Each case: the call, and the texts that the first and the second sentence of the error must contain.
CASES: dict[str, tuple[Callable[[Parts], Any], str, str]] = {
    "model class": (
        lambda p: p.make_trainer(nn.Linear, p.optimizer, nn.functional.mse_loss),
        "Trainer(model) must be a torch.nn.Module, got the class Linear.",
        "Pass the model itself",
    ),
    "model and optimizer swapped": (
        lambda p: p.make_trainer(p.optimizer, p.model, nn.functional.mse_loss),
        "Trainer(model) must be a torch.nn.Module, got an object of class SGD.",
        "Pass the model first and the optimizer second.",
    ),
    "wrapped model": (
        lambda p: p.make_trainer(DataParallel(p.model), p.optimizer, nn.functional.mse_loss),
        "Trainer(model) is wrapped in DataParallel",
        "model.module.",
    ),
    "lazy model": (
        make_trainer_with_lazy_model,
        "LazyLinear has lazy parameters that have no shape yet: weight, bias.",
        "model(inputs).",
    ),
    "optimizer class": (
        lambda p: p.make_trainer(p.model, torch.optim.Adam, nn.functional.mse_loss),
        "Trainer(optimizer) must be a torch.optim.Optimizer, got the class Adam.",
        "Adam(model.parameters(), lr=0.1).",
    ),
    "several optimizers": (
        lambda p: p.make_trainer(p.model, [p.optimizer, p.optimizer], nn.functional.mse_loss),
        "One optimizer was expected, got a list of 2.",
        "examples/gan.py",
    ),
    "several optimizers in a loop": (
        lambda p: p.backend.distributed_optimizer((p.optimizer,), p.backend.distributed_model(p.model)),  # type: ignore[arg-type]
        "One optimizer was expected, got a tuple of 1.",
        "optimizer = backend.distributed_optimizer(optimizer, model).",
    ),
    "optimizer that shards its state": (
        lambda p: p.make_trainer(
            p.model, ZeroRedundancyOptimizer(p.model.parameters(), lr=0.1), nn.functional.mse_loss
        ),
        "ZeroRedundancyOptimizer shards its state over ranks",
        'shard="state"',
    ),
    "optimizer and loss swapped": (
        lambda p: p.make_trainer(p.model, nn.MSELoss(), p.optimizer),
        "Trainer(optimizer) must be a torch.optim.Optimizer, got an object of class MSELoss.",
        "Pass the model first",
    ),
    "LBFGS": (
        lambda p: p.make_trainer(p.model, torch.optim.LBFGS(p.model.parameters()), nn.functional.mse_loss),
        "LBFGS evaluates the loss several times per step",
        "torch.optim.AdamW",
    ),
    "loss class": (
        lambda p: p.make_trainer(p.model, p.optimizer, nn.MSELoss),
        "Trainer(loss_fn) must be a function, got the class MSELoss.",
        "nn.CrossEntropyLoss()",
    ),
    "loss name": (
        lambda p: p.make_trainer(p.model, p.optimizer, "mse"),
        "Trainer(loss_fn) must be a function, got 'mse'.",
        "nn.CrossEntropyLoss()",
    ),
    "config class": (
        lambda p: p.make_trainer(config=TrainConfig),
        "Trainer(config=...) must be a TrainConfig, got the class TrainConfig.",
        "Use TrainConfig(max_epochs=10).",
    ),
    "config dict": (
        lambda p: p.make_trainer(config={"max_epochs": 1}),
        "Trainer(config=...) must be a TrainConfig, got {'max_epochs': 1}.",
        "Use TrainConfig(max_epochs=10).",
    ),
    "backend name": (
        lambda p: p.make_trainer(backend="ddp"),
        "Trainer(backend=...) must be a backend, got 'ddp'.",
        "with unitrain.init() as backend",
    ),
    "scheduler class": (
        lambda p: p.make_trainer(scheduler=StepLR),
        "Trainer(scheduler=...) must be a learning rate scheduler, got the class StepLR.",
        "CosineAnnealingLR(optimizer, 100)",
    ),
    "scheduler of another optimizer": (
        make_trainer_with_scheduler_of_another_optimizer,
        "Trainer(scheduler=...), of class StepLR, was built on another optimizer, of class Adam",
        "StepLR(optimizer, ...).",
    ),
    "list of metrics": (
        lambda p: p.make_trainer(metrics=[metric]),
        "Trainer(metrics=...) must be a dictionary of functions, got an object of class list.",
        "Use metrics={",
    ),
    "metric function given as a name": (
        lambda p: p.make_trainer(metrics={"accuracy": "accuracy"}),
        "Trainer(metrics={'accuracy': ...}) must be a function or a torchmetrics object, got 'accuracy'.",
        "Use metrics={",
    ),
    "metric without a name": (
        lambda p: p.make_trainer(metrics={3: metric}),
        "A name in Trainer(metrics=...) must be a non-empty string, got 3.",
        "Use metrics={",
    ),
    "metric called loss": (
        lambda p: p.make_trainer(metrics={"loss": metric}),
        "Trainer(metrics=...) has a result named 'loss'",
        "Give it another name",
    ),
    "forward class": (
        lambda p: p.make_trainer(forward=nn.Linear),
        "Trainer(forward=...) takes a function, got <class",
        "Use forward=lambda model, batch",
    ),
    "callback instead of a list": (
        lambda p: p.make_trainer(callbacks=unitrain.EarlyStopping()),
        "Trainer(callbacks=...) must be a list, got an object of class EarlyStopping.",
        "Use callbacks=[unitrain.EarlyStopping()].",
    ),
    "callback class": (
        lambda p: p.make_trainer(callbacks=[unitrain.EarlyStopping]),
        "A callback must be a unitrain.Callback, got <class",
        "Subclass unitrain.Callback",
    ),
    "logger name instead of a list": (
        lambda p: p.make_trainer(loggers="csv"),
        "The Trainer's loggers must be a list, got 'csv'.",
        "loggers=['",
    ),
    "logger class": (
        lambda p: p.make_trainer(loggers=[unitrain.CSVLogger]),
        "A logger must be a unitrain.Logger",
        "CSVLogger()",
    ),
    "logger folder": (
        lambda p: p.make_trainer(loggers=[unitrain.CSVLogger(3)]),  # type: ignore[arg-type]
        "CSVLogger(folder) must be a non-empty path, got 3.",
        'Use CSVLogger(folder="runs/first").',
    ),
    "data class": (
        lambda p: p.fit(data=TensorDataset),
        "Trainer.fit(train_data) must be a dataset or a DataLoader, got the class TensorDataset.",
        "TensorDataset(inputs, targets)",
    ),
    "path as data": (
        lambda p: p.fit(data="data/train"),
        "Trainer.fit(train_data) must be a dataset or a DataLoader, got 'data/train'.",
        "TensorDataset(inputs, targets)",
    ),
    "class as validation data": (
        lambda p: p.make_trainer().fit(p.data, {"clean": nn.Linear}),  # type: ignore[dict-item]
        "Trainer.fit(val_data['clean']) must be a dataset or a DataLoader, got the class Linear.",
        "TensorDataset(inputs, targets)",
    ),
    "batches as data": (
        lambda p: p.fit(data=BATCHES),
        "Trainer.fit(train_data) is a list of 3 sequences of tensors that are probably batches",
        "DataLoader(data, batch_size=32).",
    ),
    "batches to evaluate": (
        lambda p: p.make_trainer().evaluate(BATCHES),
        "Trainer.evaluate(data) is a list of 3 sequences",
        "DataLoader(data, batch_size=32).",
    ),
    "None as data to predict": (
        lambda p: p.make_trainer().predict(None),
        "Trainer.predict(data) must be a dataset or a DataLoader, got None.",
        "TensorDataset(inputs, targets)",
    ),
    "detached loss": (
        lambda p: p.fit(lambda output, target: nn.functional.mse_loss(output, target).detach()),
        "The loss does not depend on a parameter that requires a gradient",
        "without .detach()",
    ),
    "integer loss": (
        lambda p: p.fit(lambda output, target: (output > target).sum()),
        "The loss must be a floating-point number, got one of dtype int64.",
        "loss.mean()",
    ),
    "no tokens": (
        lambda p: p.fit(summed_loss(0)),
        "in a summed loss must be finite and above 0, or 0 if the sum is 0, got 0.",
        "Let",
    ),
    "negative number of tokens": (
        lambda p: p.fit(summed_loss(torch.tensor(-3))),
        "in a summed loss must be finite and above 0, or 0",
        "got -3. Let loss_fn",
    ),
    "nan tokens": (
        lambda p: p.fit(lambda output, target: Loss(*summed_loss(float("nan"))(output, target))),
        "in a summed loss must be finite and above 0, or 0",
        "got nan. Let loss_fn",
    ),
    "loss with an accuracy": (
        lambda p: p.fit(lambda output, target: (metric(output, target), (output > target).float().mean())),
        "The second item of the pair that loss_fn returned must be an integer",
        "let loss_fn return the loss alone",
    ),
    "boolean number of tokens": (
        lambda p: p.fit(summed_loss(True)),
        "in a summed loss must be finite and above 0, or 0",
        "got True. Let loss_fn",
    ),
    "keep_best with an unknown result": (
        lambda p: p.fit(output_dir=p.folder, keep_last=1, keep_best="val_loss"),
        "TrainConfig.keep_best 'val_loss' is not a result of this run.",
        "Available: train_loss.",
    ),
    "stop without a reason": (
        lambda p: p.make_trainer().stop(None),  # type: ignore[arg-type]
        "Trainer.stop(reason) must be a non-empty string, got None.",
        'Use trainer.stop("',
    ),
    "distributed_model of a class": (
        lambda p: p.backend.distributed_model(nn.Linear),  # type: ignore[arg-type]
        "distributed_model(model) must be a torch.nn.Module, got the class Linear.",
        "Pass the model itself",
    ),
    "distributed_model of a lazy model": (
        lambda p: p.backend.distributed_model(nn.LazyLinear(1)),
        "LazyLinear has lazy parameters that have no shape yet: weight, bias.",
        "model(inputs).",
    ),
    "string as find_unused_parameters": (
        lambda p: p.backend.distributed_model(p.model, find_unused_parameters="yes"),  # type: ignore[arg-type]
        "distributed_model(find_unused_parameters=...) must be True or False, got 'yes'.",
        "=True",
    ),
    "distributed_model with an unknown sharding": (
        lambda p: p.backend.distributed_model(p.model, shard="gradient"),  # type: ignore[arg-type]
        "Unknown distributed_model(shard=...) 'gradient'.",
        "Available: ",
    ),
    "distributed_optimizer of a class": (
        lambda p: p.backend.distributed_optimizer(torch.optim.SGD, p.model),  # type: ignore[arg-type]
        "distributed_optimizer(optimizer) must be a torch.optim.Optimizer, got the class SGD.",
        "SGD(model.parameters(), lr=0.1).",
    ),
    "distributed_optimizer swapped": (
        lambda p: p.backend.distributed_optimizer(p.model, p.optimizer),  # type: ignore[arg-type]
        "distributed_optimizer(optimizer) must be a torch.optim.Optimizer, got an object of class Linear.",
        "Pass the model first",
    ),
    "list as tensor of allreduce": (
        lambda p: p.backend.allreduce([1.0]),
        "A collective takes a tensor, got list.",
        "torch.tensor(",
    ),
    "string as root": (
        lambda p: p.backend.broadcast(torch.ones(1), root="0"),  # type: ignore[arg-type]
        "Root '0' is not one of the",
        "Use a root from 0 to",
    ),
    "broadcast_buffers swapped": (
        lambda p: unitrain.broadcast_buffers(p.backend, p.model),  # type: ignore[arg-type]
        "broadcast_buffers(model) must be a torch.nn.Module, got an object of class",
        "Use broadcast_buffers(model, backend).",
    ),
    "sync_batch_norm without a backend": (
        lambda p: unitrain.sync_batch_norm(p.model, "ddp"),  # type: ignore[arg-type]
        "sync_batch_norm(communicator) must be a backend, got 'ddp'.",
        "Use sync_batch_norm(model, backend).",
    ),
    "a model on device meta": (
        lambda p: p.backend.distributed_model(nn.Linear(3, 1, device="meta")),
        "Linear has tensors on device meta, which have no values: weight, bias.",
        "model.to_empty(device=backend.device)",
    ),
    "distributed_optimizer with the name of a model": (
        lambda p: p.backend.distributed_optimizer(p.optimizer, "model"),  # type: ignore[arg-type]
        "distributed_optimizer(model) must be a torch.nn.Module, got 'model'.",
        "Pass the model second.",
    ),
    "no_sync without a model": (
        lambda p: p.backend.no_sync(None),  # type: ignore[arg-type]
        "no_sync takes the model that distributed_model returned, got None.",
        "backend.distributed_model(model).",
    ),
    "unwrap without a model": (
        lambda p: p.backend.unwrap("model"),  # type: ignore[arg-type]
        "unwrap(model) must be a torch.nn.Module, got 'model'.",
        "Pass the model itself",
    ),
    "MeanMetric without a backend": (
        lambda p: unitrain.MeanMetric("ddp"),  # type: ignore[arg-type]
        "MeanMetric(backend) must be a backend, got 'ddp'.",
        "Use MeanMetric(backend).",
    ),
    "string as the value of a metric": (
        lambda p: unitrain.MeanMetric(p.backend).update("0.5"),  # type: ignore[arg-type]
        "MeanMetric.update(value) must be a number or a tensor of numbers, got '0.5'.",
        "metric.update(loss, len(targets)).",
    ),
    "metric with more values than its count": (
        lambda p: unitrain.MeanMetric(p.backend).update(torch.ones(3), torch.tensor(2)),
        "The value of a batch of 2 must be one number or have shape [2], got shape [3].",
        "with .mean().",
    ),
    "metric with more values than its count, a float": (
        lambda p: unitrain.MeanMetric(p.backend).update(torch.ones(3), 2.0),
        "The value of a batch of 2 must be one number or have shape [2], got shape [3].",
        "with .mean().",
    ),
    "differentiable_allgather without a backend": (
        lambda p: unitrain.differentiable_allgather(torch.ones(1), "ddp"),  # type: ignore[arg-type]
        "differentiable_allgather(communicator) must be a backend, got 'ddp'.",
        "Use differentiable_allgather(tensor, backend).",
    ),
    "checkpoint_activations of a string": (
        lambda p: unitrain.checkpoint_activations("model", torch.nn.Linear),  # type: ignore[arg-type]
        "checkpoint_activations(model) must be a torch.nn.Module, got 'model'.",
        "Use checkpoint_activations(model, nn.TransformerEncoderLayer).",
    ),
    "checkpoint_activations with a number": (
        lambda p: unitrain.checkpoint_activations(torch.nn.Linear(1, 1), 2),  # type: ignore[arg-type]
        "checkpoint_activations(blocks) must be classes or class names, got 2.",
        "Use checkpoint_activations(model, nn.TransformerEncoderLayer).",
    ),
    "shard_optimizer_state without an optimizer": (
        lambda p: unitrain.shard_optimizer_state(None, p.backend),  # type: ignore[arg-type]
        "shard_optimizer_state(optimizer) must be a torch.optim.Optimizer, got None.",
        "torch.optim.SGD(model.parameters(), lr=0.1).",
    ),
    "shard_optimizer_state without a backend": (
        lambda p: unitrain.shard_optimizer_state(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), "ddp"),  # type: ignore[arg-type]
        "shard_optimizer_state(communicator) must be a backend, got 'ddp'.",
        "Use shard_optimizer_state(optimizer, backend).",
    ),
    "require_capability of a string": (
        lambda p: unitrain.require_capability(p.backend, "SupportsPowerSGD", "PowerSGD"),  # type: ignore[arg-type]
        "The capability of require_capability must be a class, got 'SupportsPowerSGD'.",
        "Use require_capability(backend, SupportsPowerSGD",
    ),
    "load_weights without a path": (
        lambda p: p.make_trainer().load_weights(None),  # type: ignore[arg-type]
        "Trainer.load_weights(checkpoint) must be a non-empty path, got None.",
        'Use trainer.load_weights("best").',
    ),
    "ShardedLoader.epoch": (
        lambda p: setattr(p.make_loader(), "epoch", -1),
        "ShardedLoader.epoch must be at least 0, got -1.",
        "Use loader.epoch = 0.",
    ),
    "state of another object": (
        lambda p: p.make_loader().load_state_dict({}),
        "ShardedLoader.load_state_dict takes a state that state_dict() returned, got epoch=None.",
        "loader.state_dict().",
    ),
    "state of a loader with a negative position": (
        lambda p: p.make_loader().load_state_dict({**p.make_loader().state_dict(), "position": -1}),
        "ShardedLoader.load_state_dict takes a state that state_dict() returned, got position=-1.",
        "loader.state_dict().",
    ),
    "output folder with a NUL character": (
        lambda p: p.make_config(output_dir=Path("runs/\0")),
        "TrainConfig.output_dir must be a path, got 'runs/\\x00', which has a NUL character.",
        "Use output_dir=",
    ),
    "dictionary as a preemption signal": (
        lambda p: p.make_config(preemption_signals=({},)),
        "TrainConfig.preemption_signals has {}, which is not a signal that a program can handle.",
        "Use preemption_signals=",
    ),
    "EarlyStopping.patience": (
        lambda p: unitrain.EarlyStopping(patience=True),
        "EarlyStopping.patience must be an integer of at least 1, got True.",
        "Use 3.",
    ),
    "EarlyStopping.min_delta": (
        lambda p: unitrain.EarlyStopping(min_delta="0.1"),  # type: ignore[arg-type]
        "EarlyStopping.min_delta must be a finite number of at least 0, got '0.1'.",
        "Use 0.0.",
    ),
    "EarlyStopping.monitor": (
        lambda p: unitrain.EarlyStopping(None),  # type: ignore[arg-type]
        "EarlyStopping(monitor) must be a non-empty string, got None.",
        "Use EarlyStopping('val_loss').",
    ),
    "Profiler.folder": (
        lambda p: unitrain.Profiler(folder=""),
        "Profiler(folder=...) must be a non-empty path, got ''.",
        'Use Profiler(folder="runs/profile").',
    ),
}


def raised_messages(backend: Backend, folder: str) -> dict[str, str]:
    """Return the error message of each case, "accepted" if there is none, or the representation of another
    exception."""
    texts = {}
    for name, (case, _, _) in CASES.items():
        try:
            case(Parts(backend, folder))
            texts[name] = "accepted"
        except UnitrainError as error:
            texts[name] = str(error)
        except Exception as error:
            texts[name] = f"raw {type(error).__name__}: {error}"
    texts["still works"] = str(backend.allreduce(torch.ones(1), "sum").item() == backend.size)
    return texts


@pytest.fixture(
    scope="module", params=[("local", 1), ("ddp", 2), ("horovod", 2)], ids=["local-1", "ddp-2", "horovod-2"]
)
def messages_by_rank_and_case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, str]]]:
    """Return the error message of every case on each rank of a group."""
    with RankGroup(*request.param) as group:
        yield group.run(raised_messages, str(tmp_path_factory.mktemp("runs") / "run"))


@pytest.mark.parametrize("name", CASES)
def test_invalid_argument_error_names_argument_value_and_fix_on_every_rank(
    messages_by_rank_and_case: list[dict[str, str]], name: str
) -> None:
    _, found, fix = CASES[name]
    texts = [rank[name] for rank in messages_by_rank_and_case]
    assert len(set(texts)) == 1, texts
    assert found in texts[0], texts[0]
    assert fix in texts[0].partition(found.split(", got")[0])[2], texts[0]
    assert texts[0][0].isupper() or texts[0].startswith(
        ("broadcast_", "checkpoint_", "distributed_", "differentiable_", "no_sync", "shard_", "sync_", "unwrap")
    ), texts[0]
    assert texts[0].endswith("."), texts[0]


def test_ranks_communicate_after_an_argument_error(messages_by_rank_and_case: list[dict[str, str]]) -> None:
    assert [rank["still works"] for rank in messages_by_rank_and_case] == ["True"] * len(messages_by_rank_and_case)


def train_on_a_dataloader_of_a_list(backend: Backend) -> float:
    parts = Parts(backend, "")
    return parts.fit(data=DataLoader(BATCHES[0:1] * 4, batch_size=2), batch_size=None)["train_loss"]


def test_training_accepts_a_dataloader_of_a_list() -> None:
    with RankGroup("local", 1) as group:
        assert group.run(train_on_a_dataloader_of_a_list)[0] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"timeout_seconds": "20"},
            "timeout_seconds must be a number above 0 and at most 31536000 (a year), got '20'. Use",
        ),
        (
            {"timeout_seconds": True},
            "timeout_seconds must be a number above 0 and at most 31536000 (a year), got True.",
        ),
        (
            {"timeout_seconds": None},
            "timeout_seconds must be a number above 0 and at most 31536000 (a year), got None.",
        ),
        (
            {"timeout_seconds": float("nan")},
            "timeout_seconds must be a number above 0 and at most 31536000 (a year), got nan",
        ),
        (
            {"backend": Backend},
            "unitrain.init(backend) must be the name of a backend, got the class Backend. Use unitr",
        ),
        ({"backend": 3}, "unitrain.init(backend) must be the name of a backend, got 3."),
        ({"transport": 3}, "unitrain.init(transport=...) must be the name of a transport, got 3."),
        (
            {"device": "gpu"},
            "unitrain.init(device=...) must be a device such as 'cpu', 'cuda' or 'cuda:0', got 'gpu'. Use",
        ),
        ({"device": 1.5}, "unitrain.init(device=...) must be a device such as 'cpu', 'cuda' or 'cuda:0', got 1.5."),
    ],
)
def test_init_rejects_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnitrainError) as caught:
        unitrain.init(**{"backend": "local", **arguments})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"function": "train"}, "unitrain.run(function) must be a function, got 'train'. Pass the function and"),
        ({"args": "ab"}, "unitrain.run(args) must be a tuple or list, got"),
        ({"args": 3}, "unitrain.run(args) must be a tuple or list, got 3."),
        ({"kwargs": [1]}, "unitrain.run(kwargs) must be a dictionary, got [1]. Use kwargs={'learning_rate': 0.1}."),
        ({"np": "2"}, "unitrain.run(np=...) must be a whole number, got '2'. Use np=2 for two ranks."),
        ({"np": 0}, "unitrain.run(np=...) must be at least 1, got 0."),
        ({"backend": 3}, "unitrain.run(backend=...) must be a non-empty string, got 3."),
        ({"launcher": 3}, "unitrain.run(launcher=...) must be a non-empty string, got 3."),
        ({"timeout_seconds": "20"}, "unitrain.run(timeout_seconds=...) must be a number above 0, got '20'. Use None"),
    ],
)
def test_run_rejects_invalid_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnitrainError) as caught:
        unitrain.run(**{"function": print, "np": 1, **arguments})
    assert str(caught.value).startswith(message)


def call_after_shutdown(backend: Backend) -> dict[str, str]:
    parts = Parts(backend, "")
    trainer = parts.make_trainer()
    trainer.fit(parts.data)
    backend.shutdown()
    backend.shutdown()
    texts = {}
    calls: dict[str, Callable[[], Any]] = {
        "allreduce": lambda: backend.allreduce(torch.ones(1)),
        "allgather_object": lambda: backend.allgather_object(1),
        "barrier": backend.barrier,
        "distributed_model": lambda: backend.distributed_model(nn.Linear(3, 1)),
        "distributed_optimizer": lambda: backend.distributed_optimizer(parts.optimizer, parts.model),
        "Trainer": parts.make_trainer,
        "Trainer.fit": lambda: trainer.fit(parts.data),
        "Trainer.evaluate": lambda: trainer.evaluate(parts.data),
    }
    for name, call in calls.items():
        try:
            call()
        except UnitrainError as error:
            texts[name] = str(error)
    assert set(texts) == set(calls), texts
    if backend.size > 1:
        with pytest.raises(
            ModelError, match=r"^register_comm_hook was called after the backend was shut down\. Call it"
        ):
            trainer.model.register_comm_hook(None, lambda state, bucket: None)
    return texts


@pytest.mark.parametrize(("backend", "size"), [("local", 1), ("ddp", 2), ("horovod", 2)])
def test_calls_after_shutdown_raise(backend: str, size: int) -> None:
    with RankGroup(backend, size) as group:
        for texts in group.run(call_after_shutdown):
            for name, text in texts.items():
                assert text.startswith(f"{name} was called after the backend was shut down. Call it inside the block")


@pytest.mark.parametrize("name", ["history.jsonl", "steps.jsonl", "run.jsonl"])
def test_resumed_run_tolerates_rows_overwritten_with_zeros(name: str, tmp_path: Path, caplog: Any) -> None:
    """After a power loss, a file system may contain zeros in place of rows."""
    with unitrain.init("local") as backend:
        Parts(backend, "").fit(output_dir=tmp_path, log_every_n_steps=1)
        path = tmp_path / name
        rows = path.read_text().splitlines()
        with path.open("a") as file:
            file.write("\0" * 100 + '\n{"step": 1, "lo\n' + "\0" * 40)
        Parts(backend, "").fit(output_dir=tmp_path, log_every_n_steps=1, resume=True, max_epochs=2)
    assert path.read_text().splitlines()[: len(rows)] == rows
    assert (
        f"'{path}' has 2 damaged lines, which can happen after a power loss. The damaged lines are skipped."
        in caplog.text
    )


@pytest.mark.parametrize("content", ["[]", "\0\0\0", '{"batches": 5}', '{"batches": [[1]]}', '{"job": "a'])
def test_error_names_a_damaged_job_file(content: str, tmp_path: Path) -> None:
    with unitrain.init("local") as backend:
        Parts(backend, "").fit(output_dir=tmp_path)
        (tmp_path / ".job").write_text(content)
        with pytest.raises(UnitrainError) as caught:
            Parts(backend, "").fit(output_dir=tmp_path, resume=True)
    assert str(caught.value).startswith(
        f"'{tmp_path / '.job'}', which records the job that writes to this folder, is damaged"
    )
    assert "Remove the file" in str(caught.value)
