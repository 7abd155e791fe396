"""Evaluation and prediction process each sample once, in the order of the dataset, on any number of ranks.

Hypothesis draws the examples. Each example covers all dataset sizes from 0 to 3N + 1 samples on N ranks, and chooses a
batch size and a kind of data for each size.
"""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from groups import nightly
from hypothesis import given, settings
from one_rank import simulate_rank
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from unitrain import TrainConfig, Trainer, prediction
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.evaluation_shard import EvaluationShard
from unitrain.errors import DataError, ModelError, UnitrainError
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
# Reproducible examples that are not stored in a folder. Two examples are 28 datasets on 4 ranks.
DRAWN = settings(max_examples=2, derandomize=True, database=None)
KINDS = ("tensors", "indexed", "loader", "shuffled")
Case = tuple[int, int, str]  # samples, batch size, kind of data


class Indexed(Dataset[tuple[Tensor, Tensor, int]]):
    """A dataset of a class that torch cannot inspect."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def samples(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randn(length, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (length,), generator=generator), torch.arange(length))


class Model(nn.Module):
    """A float64 model with running statistics, and with dropout during training."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(5), nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3))
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(inputs))
        return result


Nested = namedtuple("Nested", "index flags")


def forward(model: nn.Module, batch: list[Tensor]) -> tuple[Any, Tensor]:
    inputs, target, index = batch
    logits = model(inputs)
    return {"logits": logits, "rest": [Nested(index, logits > 0), None]}, target


def make_trainer(backend: Backend, **given: Any) -> Trainer:
    model = given.pop("model", None) or Model()
    config = TrainConfig(**{"max_epochs": 1, "progress": "off", **given.pop("config", {})})
    parts: dict[str, Any] = {
        "forward": forward,
        "metrics": {
            "index": lambda output, target: output["rest"][0].index,
            "accuracy": lambda output, target: (output["logits"].argmax(1) == target).double().mean(),
        },
        "loss_fn": lambda output, target: nn.functional.cross_entropy(output["logits"], target),
        **given,
    }
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), backend=backend, config=config, **parts)


def evaluate_and_predict(backend: Backend, cases: list[Case]) -> list[Any]:
    """For each case, return the results of evaluation and prediction and this rank's samples, or the error messages."""
    seen: list[int] = []

    def recording_forward(model: nn.Module, batch: list[Tensor]) -> tuple[Any, Tensor]:
        seen.extend(batch[2].tolist())
        return forward(model, batch)

    trainer = make_trainer(backend, forward=recording_forward)
    # Training updates separate statistics on each rank. Evaluation uses rank 0's statistics.
    trainer.backend.unwrap(trainer.model).norm.running_mean.fill_(0.25 + backend.rank)
    results: list[Any] = []
    for length, batch_size, kind in cases:
        data: Any = samples(length) if kind == "tensors" else Indexed(samples(length))
        if kind in ("tensors", "indexed"):
            trainer.config = TrainConfig(max_epochs=1, eval_batch_size=batch_size)
        else:  # evaluation ignores shuffle and drop_last
            data = DataLoader(data, batch_size, shuffle=kind == "shuffled" and length > 0, drop_last=True)
            trainer.config = TrainConfig(max_epochs=1)
        try:
            seen.clear()
            values = trainer.evaluate(data)
            evaluated = list(seen)
            seen.clear()
            results.append((values, trainer.predict(data), evaluated, list(seen)))
        except DataError as error:
            first_message = str(error)
            with pytest.raises(DataError) as caught:
                trainer.predict(data)
            results.append((first_message, str(caught.value)))
    return results


def expected_results(length: int) -> tuple[dict[str, float], Tensor]:
    """Return the metrics and outputs of plain torch on the complete dataset."""
    inputs, targets, index = samples(length).tensors
    model = Model().eval()
    model.norm.running_mean.fill_(0.25)
    with torch.no_grad():
        logits = model(inputs)
    accuracy = (logits.argmax(1) == targets).double().mean().item()
    loss = nn.functional.cross_entropy(logits, targets).item()
    return {"loss": loss, "index": index.double().mean().item(), "accuracy": accuracy}, logits


def assert_correct(case: Case, found: list[Any]) -> None:
    """Assert that the results of all ranks for `case` are correct."""
    length = case[0]
    if length == 0:
        empty = "The evaluation data is empty. Pass a dataset with at least one sample."
        assert found == [(empty, empty)] * len(found)
        return
    numbers, logits = expected_results(length)
    for values, outputs, *_ in found:
        assert values == found[0][0], "the results must be the same on every rank"
        assert values == pytest.approx(numbers, rel=0, abs=1e-12)
        assert list(outputs) == ["logits", "rest"]
        (index, flags), nothing = outputs["rest"]
        assert index.tolist() == list(range(length)), "outputs must be in the order of the dataset"
        assert isinstance(outputs["rest"][0], Nested)
        assert nothing is None
        assert outputs["logits"].dtype == torch.float64
        torch.testing.assert_close(outputs["logits"], logits, rtol=0, atol=1e-12)
        assert torch.equal(outputs["logits"], found[0][1]["logits"])
        assert flags.dtype == torch.bool
        assert torch.equal(flags, outputs["logits"] > 0)
    for rank_by_rank in zip(*(one[2:] for one in found), strict=True):
        assert [number for own in rank_by_rank for number in own] == list(range(length)), "each sample must occur once"


class Formats(nn.Module):
    """A model that returns its input in every dtype and in different shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Tensor) -> Any:
        row = inputs.view(-1, 1)
        formats = {str(dtype): row.expand(-1, 2).to(dtype) for dtype in DTYPES}
        return {**formats, "vector": inputs, "none": inputs.new_empty(len(inputs), 0, 3), "last": inputs.view(-1, 1, 1)}


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def predict_as_bytes(backend: Backend, length: int) -> dict[str, tuple[Any, ...]]:
    """Predict in every dtype, gathering a few bytes at a time. Return dtypes, shapes and bytes."""
    before, prediction._MAX_GATHERED_BYTES = prediction._MAX_GATHERED_BYTES, 24
    try:
        outputs = make_trainer(backend, model=Formats(), forward=None).predict(
            DataLoader(TensorDataset(torch.arange(length) - 2.0), 2)
        )
    finally:
        prediction._MAX_GATHERED_BYTES = before
    return {name: dtype_shape_and_bytes(output) for name, output in outputs.items()}


def expected_as_bytes(length: int) -> dict[str, tuple[Any, ...]]:
    return {name: dtype_shape_and_bytes(output) for name, output in Formats()(torch.arange(length) - 2.0).items()}


def dtype_shape_and_bytes(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def draw_cases(size: int) -> Any:
    """Return a strategy that draws a batch size and a kind of data for each dataset size."""
    lengths = range(3 * size + 2)
    one = st.tuples(st.integers(1, 5), st.sampled_from(KINDS))
    drawn = st.tuples(*[one] * len(lengths))
    return drawn.map(lambda cases: [(length, *case) for length, case in zip(lengths, cases, strict=True)])


def test_prediction_is_exact_in_one_process() -> None:
    @settings(DRAWN, max_examples=5)
    @given(draw_cases(4))
    def run(cases: list[Case]) -> None:
        for case, found in zip(cases, evaluate_and_predict(LOCAL, cases), strict=True):
            assert_correct(case, [found])

    run()


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
@pytest.mark.parametrize("size", [1, 3, *nightly(2, 4)])
def test_prediction_is_exact_on_ranks(backend: str, size: int) -> None:
    with RankGroup(backend, size) as group:

        @DRAWN
        @given(draw_cases(size))
        def run(cases: list[Case]) -> None:
            by_rank = group.run(evaluate_and_predict, cases, timeout_seconds=200)
            for case, found in zip(cases, zip(*by_rank, strict=True), strict=True):
                assert_correct(case, list(found))

        run()
        expected_bytes = expected_as_bytes(7)
        for found in group.run(predict_as_bytes, 7):
            assert found == expected_bytes
        assert group.run(predict_stream_of_one_sample) == [[1, 2]] * size
        if size == 2:
            rank_results, other = group.run(predict_ragged)
            assert rank_results == other
            assert (
                "they differ between ranks: output: float32 [1] (per sample) and output: float32 [2]. Let"
                in rank_results
            )


@settings(DRAWN, max_examples=300)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 9))
def test_evaluation_shards_are_contiguous_in_rank_order(size: int, length: int, batch_size: int) -> None:
    shards = [
        EvaluationShard(samples(length), simulate_rank(rank, size), batch_size=batch_size) for rank in range(size)
    ]
    parts = [list(shard) for shard in shards]
    assert [int(i) for batches in parts for (_, _, index), _ in batches for i in index] == list(range(length))
    totals = [sum(info.samples for _, info in batches) for batches in parts]
    assert max(totals) - min(totals) <= 1
    assert all(info.samples <= batch_size for batches in parts for _, info in batches)


def test_prediction_keeps_every_dtype() -> None:
    assert predict_as_bytes(LOCAL, 7) == expected_as_bytes(7)


def test_prediction_keeps_the_nesting_of_outputs() -> None:
    @dataclass(frozen=True)
    class Scores:
        logits: Tensor
        best: Tensor

    def nested(model: nn.Module, batch: list[Tensor]) -> tuple[Any, None]:
        logits = model(batch[0])
        return (Scores(logits, logits.argmax(1)), OrderedDict(a=[logits]), None), None

    with torch.no_grad():
        logits = Model().eval()(samples(5).tensors[0])
    plain = make_trainer(LOCAL, forward=lambda model, batch: (model(batch[0]), None)).predict(DataLoader(samples(5), 2))
    torch.testing.assert_close(plain, logits, rtol=0, atol=1e-12)
    scores, mapping, nothing = make_trainer(LOCAL, forward=nested).predict(DataLoader(samples(5), 2))
    assert isinstance(scores, Scores)
    assert torch.equal(scores.logits, plain)
    assert torch.equal(scores.best, logits.argmax(1))
    assert isinstance(mapping, OrderedDict)
    assert torch.equal(mapping["a"][0], plain)
    assert nothing is None
    assert make_trainer(LOCAL, forward=lambda model, batch: (None, None)).predict(DataLoader(samples(5), 2)) is None


class Named(Dataset[dict[str, Tensor]]):
    """A dataset whose samples are dictionaries of inputs without a target."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": samples(5).tensors[0][index]}


class OfMapping(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (Model, TensorDataset(*samples(5).tensors[:2])),
        (Model, TensorDataset(samples(5).tensors[0])),
        (Model, list(samples(5).tensors[0])),
        (OfMapping, Named()),
    ],
    ids=["pairs", "tensors", "inputs", "mappings"],
)
def test_targets_may_be_missing(model: type[nn.Module], data: Any) -> None:
    with torch.no_grad():
        logits = Model().eval()(samples(5).tensors[0])
    found = make_trainer(LOCAL, model=model(), forward=None, config={"eval_batch_size": 2}).predict(data)
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-12)


def test_prediction_does_not_change_the_model() -> None:
    model = Model()
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outputs = make_trainer(LOCAL, model=model).predict(DataLoader(samples(7), 2))
    assert (model.training, model.norm.training, model.head.training) == (True, False, True)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not outputs["logits"].requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


def test_predicted_outputs_have_separate_memory() -> None:
    """An output that is a view of a larger tensor must not keep the tensor alive. An output buffer that the model
    overwrites must not change earlier predictions."""
    buffer = torch.zeros(2, 1000)

    def reused(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, None]:
        buffer[:, 0] = batch[2].double()
        return buffer[:, 0], None

    outputs = make_trainer(LOCAL, forward=reused).predict(DataLoader(samples(6), 2))
    assert outputs.tolist() == list(range(6))
    assert outputs.untyped_storage().nbytes() == 6 * outputs.element_size()


def test_prediction_uses_the_precision_of_the_run() -> None:
    model = nn.Linear(5, 3)
    data = TensorDataset(samples(5).tensors[0].float())
    found = make_trainer(LOCAL, model=model, forward=None, config={"precision": "bf16"}).predict(DataLoader(data, 2))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(data.tensors[0])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, wanted)


def test_error_names_outputs_that_cannot_be_concatenated() -> None:
    def predict(make_output: Any) -> Any:
        return make_trainer(LOCAL, forward=lambda model, batch: (make_output(batch[2]), None)).predict(
            DataLoader(samples(5), 2)
        )

    mean: Any = lambda index: {"loss": index.double().mean()}  # noqa: E731
    with pytest.raises(
        ModelError,
        match=r"^predict collects tensors with one row per sample, but output\['loss'\] has shape \[\] for a "
        r"batch of 2\. Do not return it from forward, or let",
    ):
        predict(mean)
    with pytest.raises(ModelError, match=r"but output\[1\]\.index has shape \[3, 2\] for a batch of 2\."):
        predict(lambda index: (index, Nested(torch.ones(3, 2), index)))
    with pytest.raises(
        ModelError, match=r"^predict collects tensors, but output\[0\] is an object of class str\. Do not return it"
    ):
        predict(lambda index: ["text", index])
    with pytest.raises(ModelError, match=r"^predict collects dense tensors, but output has layout torch\.sparse_coo"):
        predict(lambda index: index.double().to_sparse())
    with pytest.raises(
        ModelError,
        match=r"they differ between batches: output: float32 \[1\] \(per sample\) and output: float32 \[3\]\. Let "
        r"forward return the same shapes for every batch, for example padded",
    ):
        predict(lambda index: torch.ones(len(index), int(index[0]) + 1))
    with pytest.raises(ModelError, match=r"output\['b'\]: int64 \[\] \(per sample\) and no other output\."):
        predict(lambda index: {"a": index, "b": index} if index[0] == 0 else {"a": index})


def predict_ragged(backend: Backend) -> str:
    """Predict outputs whose width differs between ranks, and return the error."""
    trainer = make_trainer(backend, forward=lambda model, batch: (torch.ones(len(batch[2]), backend.rank + 1), None))
    try:
        trainer.predict(DataLoader(samples(5), 2))
    except UnitrainError as error:
        return str(error)
    return "accepted"


class OneSample(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield samples(1)[0]


def predict_stream_of_one_sample(backend: Backend) -> list[int]:
    """Predict a stream with a single sample, which only one rank processes. Return the shape of the outputs."""
    settings = {"stream": "shared", "batch_size": 2}
    trainer = make_trainer(backend, forward=lambda model, batch: (torch.ones(len(batch[2]), 2), None), config=settings)
    return list(trainer.predict(OneSample()).shape)
