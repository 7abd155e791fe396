"""Batches of any structure: transfer to the device, and use in `forward`."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.batch import to_device
from unitrain.errors import ConfigError, DataError, ModelError, UnitrainError
from unitrain.testing import RankGroup

CPU, META = torch.device("cpu"), torch.device("meta")
LOCAL = LocalBackend(CPU)
Pair = namedtuple("Pair", "left right")


@dataclass
class Plain:
    values: Tensor
    label: str = "kept"


@dataclass(frozen=True, slots=True)
class Frozen:
    values: Tensor
    inner: Plain


@dataclass
class Derived:
    """A dataclass whose constructor takes a value that is not a field."""

    scale: InitVar[float]
    values: Tensor
    scaled: Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.scaled = self.values * scale


class Graph:
    """A class whose `to` returns a new object, as in PyTorch Geometric."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        assert non_blocking
        return Graph(self.values.to(device))


class Encoding(UserDict[str, Any]):
    """A class whose `to` works in place and takes only a device, as in BatchEncoding of older transformers versions."""

    def to(self, device: torch.device) -> Encoding:
        self.data = {name: value.to(device) for name, value in self.data.items()}
        return self


class Silent:
    """A class whose `to` works in place and returns None."""

    def __init__(self) -> None:
        self.values = torch.ones(1)

    def to(self, device: torch.device) -> None:
        self.values = self.values.to(device)


def test_to_device_keeps_container_types() -> None:
    one = torch.ones(1)
    counted = defaultdict(list, {"one": [one]})
    moved = to_device(
        {"list": [one, (one, "text")], "pair": Pair(one, 3), "ordered": OrderedDict(a=one), "counted": counted}, META
    )
    assert moved["list"][0].is_meta
    assert moved["list"][1][0].is_meta
    assert moved["list"][1][1] == "text"
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].left.is_meta
    assert moved["pair"].right == 3
    assert isinstance(moved["ordered"], OrderedDict)
    assert moved["ordered"]["a"].is_meta
    assert moved["counted"]["one"][0].is_meta
    assert moved["counted"]["more"] == []
    assert not one.is_meta
    assert not counted["one"][0].is_meta, "to_device must not modify the loader's batch"
    assert to_device(MappingProxyType({"a": one}), META)["a"].is_meta
    assert to_device(UserDict(a=one), META)["a"].is_meta


def test_to_device_moves_tensors_in_dataclasses() -> None:
    one = torch.ones(1)
    plain, derived = Plain(one), Derived(3.0, one)
    frozen = to_device(Frozen(one, plain), META)
    assert isinstance(frozen, Frozen)
    assert frozen.values.is_meta
    assert isinstance(frozen.inner, Plain)
    assert frozen.inner.values.is_meta
    assert frozen.inner.label == "kept"
    moved = to_device(derived, META)
    assert moved.values.is_meta
    assert moved.scaled.is_meta
    assert not any(tensor.is_meta for tensor in (plain.values, derived.values, derived.scaled))


def test_to_device_calls_the_to_method_of_objects() -> None:
    graph, encoding, silent = to_device((Graph(torch.ones(1)), Encoding(ids=torch.ones(1)), Silent()), META)
    assert graph.values.is_meta
    assert isinstance(encoding, Encoding)
    assert encoding["ids"].is_meta
    assert silent.values.is_meta
    packed = to_device(pack_sequence([torch.ones(3), torch.ones(2)]), META)
    assert packed.data.is_meta
    assert packed.batch_sizes.device == CPU, "batch_sizes describes the layout of the data and must stay on the CPU"


def test_to_device_propagates_errors_of_the_to_method() -> None:
    class Broken:
        def to(self, device: torch.device) -> None:
            raise TypeError("no such part")

    with pytest.raises(TypeError, match="no such part"):
        to_device([Broken()], META)


def test_to_device_returns_unknown_objects_unchanged() -> None:
    for thing in (None, "text", 3, np.ones(2), Graph, Plain, {1, 2}):
        assert to_device([thing], META)[0] is thing


def test_to_device_returns_the_same_batch_on_the_cpu() -> None:
    for batch in ([torch.ones(1)], Graph(torch.ones(1)), Plain(torch.ones(1))):
        assert to_device(batch, CPU) is batch


@dataclass
class Sample:
    """Batch type of a custom `collate_fn`."""

    left: Tensor
    right: Tensor
    target: Tensor


class StructuredDataset(Dataset[Any]):
    """The same samples in each structure: a mapping, a pair or a tuple of three."""

    def __init__(self, structure: str, length: int = 26) -> None:
        generator = torch.Generator().manual_seed(1)
        self.structure = structure
        self.inputs = torch.randn(length, 6, generator=generator)
        self.targets = torch.randint(3, (length,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.inputs[index], self.targets[index]
        left, right = inputs[:2], inputs[2:]
        if self.structure == "mapping":
            return {"left": left, "right": right, "target": target}
        return (inputs, target) if self.structure == "pair" else (left, right, target)


def collate_samples(rows: list[tuple[Tensor, Tensor, Tensor]]) -> Sample:
    return Sample(*(torch.stack(column) for column in zip(*rows, strict=True)))


class Model(nn.Module):
    """A model that takes two tensors, or one tensor that contains both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, left: Tensor, right: Tensor | None = None) -> Tensor:
        result: Tensor = self.layers(left if right is None else torch.cat([left, right], 1))
        return result


def forward_mapping(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["left"], right=batch["right"]), batch["target"]


def forward_sequence(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return model(*batch[:-1]), batch[-1]


def forward_dataclass(model: nn.Module, batch: Sample) -> tuple[Tensor, Tensor]:
    return model(batch.left, batch.right), batch.target


FORWARD_FUNCTIONS: dict[str, Any] = {
    "pair": None,
    "mapping": forward_mapping,
    "three": forward_sequence,
    "dataclass": forward_dataclass,
}


def is_correct(output: Tensor, target: Tensor) -> Tensor:
    return output.argmax(1) == target


def build_trainer(backend: Backend, forward: Any = None, accuracy: Any = is_correct, **settings: Any) -> Trainer:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    config = TrainConfig(**{"max_epochs": 3, "progress": "off", **settings})
    return Trainer(
        model, optimizer, nn.functional.cross_entropy, backend=backend, config=config, forward=forward,
        metrics={"accuracy": accuracy},
    )  # fmt: skip


def build_loader(structure: str, batch_size: int, length: int = 26) -> DataLoader[Any]:
    collate: Any = collate_samples if structure == "dataclass" else None
    return DataLoader(StructuredDataset(structure, length), batch_size=batch_size, shuffle=True, collate_fn=collate)


def train(backend: Backend, structure: str) -> tuple[list[Tensor], dict[str, float], list[tuple[bool, bool]]]:
    """Train on batches of the given structure, and return the parameters, the results and the calls of `forward`.

    For each call, the list contains whether the model was in training mode and whether it was the wrapped model.
    """
    calls: list[tuple[bool, bool]] = []

    def record_call(model: nn.Module, batch: Any) -> Any:
        calls.append((model.training, model is trainer.model))
        return FORWARD_FUNCTIONS[structure](model, batch)

    size = 12 // backend.size
    accumulate = 2 if backend.size < 3 else 1  # a step has 12 samples for any number of ranks
    trainer = build_trainer(
        backend, record_call if FORWARD_FUNCTIONS[structure] else None, gradient_accumulation_steps=accumulate
    )
    results = trainer.fit(build_loader(structure, size // accumulate), build_loader(structure, 5, 7))
    return (
        [parameter.detach().clone() for parameter in trainer.backend.unwrap(trainer.model).parameters()],
        results,
        calls,
    )


def train_with_every_structure(backend: Backend) -> dict[str, Any]:
    return {structure: train(backend, structure) for structure in FORWARD_FUNCTIONS}


def train_in_plain_torch() -> tuple[list[Tensor], float]:
    """Train in plain torch on global batches of 12; return the parameters and the loss on the validation samples."""
    from unitrain.data.order import epoch_order

    model, rows = Model(), StructuredDataset("pair")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        for part in epoch_order(26, seed=0, epoch=epoch, shuffle=True).split(12):
            nn.functional.cross_entropy(model(rows.inputs[part]), rows.targets[part]).backward()
            optimizer.step()
            optimizer.zero_grad()
    test = StructuredDataset("pair", 7)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(test.inputs), test.targets)
    return [parameter.detach() for parameter in model.parameters()], loss.item()


def check_runs(runs: list[dict[str, Any]]) -> None:
    expected, loss = train_in_plain_torch()
    for run in runs:
        for structure, (parameters, results, calls) in run.items():
            for one, pair, wanted in zip(parameters, runs[0]["pair"][0], expected, strict=True):
                assert torch.equal(one, pair), structure
                torch.testing.assert_close(one, wanted, rtol=0, atol=1e-6)
            assert results == runs[0]["pair"][1], structure
            assert results["val_loss"] == pytest.approx(loss, abs=1e-6)
            if structure != "pair":
                assert {training for training, _ in calls} == {True, False}
                assert all(wrapped for training, wrapped in calls if training)


def test_batch_structures_give_equal_training_in_one_process() -> None:
    check_runs([train_with_every_structure(LOCAL)])


@pytest.fixture(scope="module", params=[("ddp", 2), ("horovod", 3)], ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


def test_batch_structures_give_equal_training_on_ranks(group: RankGroup) -> None:
    runs = group.run(train_with_every_structure, timeout_seconds=200)
    check_runs(runs)
    for run in runs:
        for structure in FORWARD_FUNCTIONS:
            plain = [wrapped for training, wrapped in run[structure][2] if not training]
            assert not any(plain), "evaluation must call the model without its wrapper"


def test_batch_that_is_not_a_pair_is_rejected_with_an_example_of_forward() -> None:
    def raised_message(batch: Any) -> str:
        with pytest.raises(DataError) as caught:
            build_trainer(LOCAL, batch_size=2)._forward(nn.Identity(), batch)
        found, fix = str(caught.value).split(". For other batches, pass a function: ")
        start = "A batch must be a pair (inputs, targets) or a mapping of the model's keyword arguments, got "
        assert found.startswith(start)
        return f"{found.removeprefix(start)} -> {fix}"

    def forward(body: str) -> str:
        return f"Trainer(..., forward=lambda model, batch: {body})."

    expected = {
        "a list of 3": ([1, 2, 3], "(model(*batch[:-1]), batch[-1])"),
        "a list of 1": ([1], "(model(batch[0]), batch[0])"),
        "a tensor of shape [2, 3]": (torch.ones(2, 3), "(model(batch), batch)"),
        "an object of class Graph": (Graph(torch.ones(1)), "(model(batch.x), batch.y)"),
    }
    for found, (batch, body) in expected.items():
        assert raised_message(batch) == f"{found} -> {forward(body)}"


def test_invalid_forward_functions_and_results_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"^Trainer\(forward=\.\.\.\) takes a function, got 'mean'\. Use forward="):
        build_trainer(LOCAL, "mean")
    for result, found in (
        (torch.ones(2, 3), r"a tensor of shape \[2, 3\]"),
        (None, "an object of class NoneType"),
        ((1, 2, 3), "a tuple of 3"),
        ({"loss": 1}, "an object of class dict with 'loss'"),
    ):
        trainer = build_trainer(LOCAL, lambda model, batch, result=result: result)
        with pytest.raises(
            ModelError, match=rf"^forward must return a pair \(output, target\), got {found}\. End it wi"
        ):
            trainer.fit(build_loader("pair", 4))


def raised_messages(backend: Backend) -> list[str]:
    """Return the errors for invalid batches. Most datasets have one sample, so only one rank detects the error."""

    def short(model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    three = TensorDataset(*[torch.ones(1, 3)] * 3)
    pair = TensorDataset(torch.ones(1, 6), torch.zeros(1, dtype=torch.long))
    shapeless = build_trainer(backend, accuracy=lambda output, target: torch.ones(5), batch_size=2)
    attempts = [
        lambda: build_trainer(backend, 3, batch_size=2),
        lambda: build_trainer(backend, batch_size=2).fit(TensorDataset(*[torch.ones(6, 3)] * 3)),
        lambda: build_trainer(backend, short, batch_size=2).fit(StructuredDataset("pair")),
        lambda: build_trainer(backend, batch_size=2).evaluate(three),
        lambda: build_trainer(backend, short, batch_size=2).evaluate(pair),
        lambda: shapeless.evaluate(pair),
        lambda: build_trainer(backend, batch_size=2).predict(three),
        lambda: build_trainer(backend, short, batch_size=2).predict(pair),
    ]
    texts = []
    for attempt in attempts:
        try:
            attempt()
            texts.append("accepted")
        except UnitrainError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_error_is_equal_on_every_rank_if_one_rank_has_all_samples(group: RankGroup) -> None:
    here, *others = group.run(raised_messages, timeout_seconds=120)
    assert all(texts == here for texts in others)
    starts = [
        "ConfigError: Trainer(forward=...) takes a function, got 3.",
        "DataError: A batch must be a pair (inputs, targets) or a mapping of the model's keyword arguments, got a list",
        "ModelError: forward must return a pair (output, target), got a tensor of shape",
        "DataError: A batch must be a pair (inputs, targets) or a mapping of the model's keyword arguments, got a list",
        "ModelError: forward must return a pair (output, target), got a tensor of shape [1, 3].",
        "TensorError: accuracy of a batch of 1 must be one number or have shape [1], got shape [5].",
        "DataError: A batch must be a pair (inputs, targets) or a mapping of the model's keyword arguments, got a list",
        "ModelError: forward must return a pair (output, target), got a tensor of shape [1, 3].",
    ]
    for text, start in zip(here, starts, strict=True):
        assert text.startswith(start), text
