"""Metrics of torchmetrics on any number of ranks equal one metric that is updated with all samples in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchmetrics
from groups import GROUPS_ON_HOROVOD
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import classification, regression, retrieval, wrappers

from unitrain import EarlyStopping, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.errors import ConfigError, MetricError
from unitrain.metrics.torchmetrics import TorchMetrics
from unitrain.testing import RankGroup

RANKS_IMPORT = ("torchmetrics",)
CLASSES, BATCH = 3, 4
COUNTS = (29, 2)  # with 2 samples and 3 ranks, one rank has none


class States(torchmetrics.Metric):
    """A metric with a state of every kind. Some results depend on the order of the updates."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.add_state("total", torch.full((2,), 100.0, dtype=torch.float64), "sum")  # the default is not zero
        self.add_state("largest", torch.tensor(-torch.inf, dtype=torch.float64), "max")
        self.add_state("smallest", torch.tensor(torch.inf, dtype=torch.float64), "min")
        self.add_state("mean", torch.tensor(0.0, dtype=torch.float64), "mean")
        self.add_state("rows", [], "cat")
        self.add_state("words", [], None)
        self.add_state("lengths", torch.zeros(0, dtype=torch.float64), "cat")
        self.add_state("squares", torch.tensor(0.0, dtype=torch.float64), lambda stacked: stacked.sum(0))

    def update(self, output: Tensor, target: Tensor) -> None:
        values = output.double().sum(dim=1)
        self.total = self.total + torch.stack([values.sum(), values.abs().sum()])
        self.largest = torch.maximum(self.largest, values.max())
        self.smallest = torch.minimum(self.smallest, values.min())
        updates = self._update_count  # includes this update
        self.mean = (self.mean * (updates - 1) + values.mean()) / updates
        self.rows.append(values)
        self.words += [str(int(one)) for one in target[: 1 + int(target[0])]]  # some ranks have longer lists
        self.lengths = torch.cat([self.lengths, torch.tensor([float(len(target))], dtype=torch.float64)])
        self.squares = self.squares + (values**2).sum()

    def compute(self) -> dict[str, Any]:
        rows = torch.cat(self.rows)
        order = torch.arange(1, len(rows) + 1, dtype=torch.float64)
        return {
            "total": self.total,
            "largest": self.largest,
            "smallest": self.smallest,
            "mean": self.mean,
            "ordered": (rows * order).sum(),
            "words": float(int("".join(self.words)) % 1000003),
            "batches": (self.lengths * torch.arange(1, len(self.lengths) + 1)).sum(),
            "squares": self.squares,
        }


class Indexed(retrieval.RetrievalMAP):
    """A metric that uses the target as the index of the query. The states are lists without a reduction."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(output[:, 0], (output[:, 1] > 0).long(), target)


class Correlation(regression.PearsonCorrCoef):
    """A metric that correlates two columns. The states are tensors without a reduction."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.set_dtype(torch.float64)

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(output[:, 0].double(), output[:, 1].double() + output[:, 0].double())


class Squared(torchmetrics.MeanSquaredError):
    """A metric that computes in double precision, so that the summation order has no visible effect."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.set_dtype(torch.float64)

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(output[:, 0], target.to(output))


class Normalized(regression.NormalizedRootMeanSquaredError):
    """A metric of the moments of the targets. torchmetrics itself can merge these for two ranks only."""

    def __init__(self, normalization: Any, num_outputs: int = 1) -> None:
        super().__init__(normalization, num_outputs)
        self.set_dtype(torch.float64)

    def update(self, output: Tensor, target: Tensor) -> None:
        outputs = self.num_outputs
        super().update(output[:, :outputs].squeeze(1), (output[:, 1 : 1 + outputs] + 3).squeeze(1))


def collection(**settings: Any) -> torchmetrics.MetricCollection:
    """Return a collection in which all metrics except the last one share their state."""
    return torchmetrics.MetricCollection(
        {
            "precision": classification.MulticlassPrecision(CLASSES),
            "recall": classification.MulticlassRecall(CLASSES),
            "worst": classification.MulticlassF1Score(CLASSES, average=None),
            "squared": Squared(),
        },
        **settings,
    )


METRICS: dict[str, Callable[[], Any]] = {
    "states": States,
    "f1": lambda: torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="macro"),
    "of_classes": lambda: classification.MulticlassAccuracy(CLASSES, average=None),
    "labelled": lambda: wrappers.ClasswiseWrapper(
        classification.MulticlassRecall(CLASSES, average=None), ["a", "b", "c"]
    ),
    "area": lambda: classification.MulticlassAUROC(CLASSES),
    "ranked": Indexed,
    "correlation": Correlation,
    "composed": lambda: classification.MulticlassAccuracy(CLASSES) * 2 + Squared(sync_on_compute=False),
    "several": collection,
    "normalized_mean": lambda: Normalized("mean"),
    "normalized_range": lambda: Normalized("range"),
    "normalized_std": lambda: Normalized("std"),
    "normalized_l2": lambda: Normalized("l2"),
    "normalized_two": lambda: Normalized("std", 2),
}


class Scaled(nn.Module):
    """A model that scales its input, so that the output for a sample does not depend on its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, CLASSES, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(CLASSES, (count,), generator=generator))


def make_trainer(backend: Backend, metrics: Any, **settings: Any) -> Trainer:
    model = Scaled()
    config = TrainConfig(**{"max_epochs": 1, "batch_size": BATCH, "progress": "off", **settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config, metrics=metrics)


def evaluate(backend: Backend) -> list[dict[str, float]]:
    """Evaluate datasets of each of the COUNTS twice, and assert that the metrics are reset."""
    metrics = {name: make_metric() for name, make_metric in METRICS.items()}
    trainer = make_trainer(backend, metrics)
    results = [trainer.evaluate(data(count)) for count in (*COUNTS, *COUNTS)]
    for name, metric in metrics.items():
        for part in metric.modules():
            # These two metrics have no state and do not update their count.
            outer = isinstance(part, wrappers.ClasswiseWrapper | torchmetrics.metric.CompositionalMetric)
            if isinstance(part, torchmetrics.Metric) and not outer:
                assert part.update_count == 0, name
                assert part._to_sync == part.sync_on_compute, name
                assert not part._is_synced
                for state, default in part._defaults.items():
                    found = getattr(part, state)
                    assert found == [] if isinstance(default, list) else torch.equal(found, default), (name, state)
    assert metrics["composed"].metric_b.sync_on_compute is False
    return results


def expected_results(count: int, size: int) -> dict[str, float]:
    """Return the results of plain torchmetrics in one process, for the batches of all ranks in rank order."""
    inputs, targets = data(count).tensors
    found: dict[str, float] = {"loss": nn.functional.cross_entropy(inputs, targets).item()}
    for name, make_metric in METRICS.items():
        metric = make_metric()
        for rank in range(size):
            first, last = rank * count // size, (rank + 1) * count // size
            for begin in range(first, last, BATCH):
                part = slice(begin, min(begin + BATCH, last))
                metric.update(inputs[part], targets[part])
        found |= flatten_result(name, metric.compute())
    return found


def flatten_result(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, dict):
        return {
            key: one for inner, part in value.items() for key, one in flatten_result(f"{name}_{inner}", part).items()
        }
    if isinstance(value, Tensor) and value.dim():
        return {f"{name}_{index}": float(one) for index, one in enumerate(value)}
    return {name: float(value)}


@pytest.fixture(
    scope="module",
    params=GROUPS_ON_HOROVOD,
    ids=lambda group: f"{group[0]}-{group[1]}",
)
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.filterwarnings("ignore:No positive samples:UserWarning")  # two samples cannot contain three classes
def test_torchmetrics_equal_one_metric_with_all_batches(group: RankGroup) -> None:
    everywhere = group.run(evaluate, timeout_seconds=120)
    for results in everywhere:
        assert repr(results) == repr(everywhere[0])  # NaN is one of the values
    for found, count in zip(everywhere[0], (*COUNTS, *COUNTS), strict=True):
        wanted = expected_results(count, len(everywhere))
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            if (name, count) == ("correlation", 2):
                continue  # for two ranks with one sample each, the formula of torchmetrics computes 0 / 0
            tolerance = 1e-7 if name == "loss" else 1e-12  # the loss is a mean over separately computed batches
            assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True), (name, count)


class Failing(torchmetrics.MeanMetric):
    """A metric that raises an error in the method `where` on the last rank."""

    def __init__(self, backend: Backend, where: str) -> None:
        super().__init__()
        self.where = where if backend.rank == backend.size - 1 else ""

    def update(self, output: Tensor, target: Tensor) -> None:
        if self.where == "update":
            raise ValueError("target is wrong")
        super().update(output)

    def compute(self) -> Any:
        if not self.update_called:
            raise ValueError("nothing to compute")  # the shape is only known after an update
        return torch.zeros(2, 2)


def errors_of_unusable_metrics(backend: Backend) -> list[tuple[str, str]]:
    """Return the errors of unusable metrics, and assert that later evaluations work."""
    message_text = []
    trainer = make_trainer(backend, {"broken": Failing(backend, "update")})
    for _ in range(2):
        try:
            trainer.evaluate(data(29))
        except MetricError as error:
            message_text.append(("update", str(error)))
    for name, metric in (
        ("compute", Failing(backend, "")),
        ("confusion", classification.MulticlassConfusionMatrix(CLASSES)),
        ("running", wrappers.Running(torchmetrics.MeanMetric())),
        ("several", collection()),
    ):
        metrics = {name: metric, "several_squared": lambda output, target: 0.0}
        try:
            make_trainer(backend, metrics).evaluate(data(29))
        except (MetricError, ConfigError) as error:
            message_text.append((name, f"{type(error).__name__}: {error}"))
    trainer = make_trainer(backend, {"f1": METRICS["f1"]()})
    message_text.append(("fine", "" if trainer.evaluate(data(29))["f1"] > 0 else "nothing"))
    return message_text


def test_unusable_metrics_raise_the_same_error_on_every_rank(group: RankGroup) -> None:
    everywhere = group.run(errors_of_unusable_metrics)
    assert all(message_text == everywhere[0] for message_text in everywhere)
    first, again, compute, confusion, running, several, fine = everywhere[0]
    assert first == again
    last = len(everywhere) - 1
    assert first[1].startswith(
        f"Metric 'broken', a torchmetrics Failing, could not be updated with a batch on rank {last}: ValueError: "
        "target is wrong. "
    )
    assert compute[1].startswith(
        "MetricError: Metric 'compute' returns a tensor of shape [2, 2], but a result must be a number, "
    )
    assert confusion[1].startswith("MetricError: Metric 'confusion' returns a tensor of shape [3, 3], ")
    assert running[1].startswith("ConfigError: Metric 'running' is a Running metric of torchmetrics. ")
    assert several[1].startswith("ConfigError: Two metrics have a result named 'several_squared'. ")
    assert fine == ("fine", "")


def fit_with_collection(backend: Backend) -> tuple[dict[str, float], tuple[str, ...], int]:
    """Train with a MetricCollection as `metrics`, and with early stopping on one of the results."""
    trainer = make_trainer(backend, collection(prefix="of_"), max_epochs=5)
    trainer._callbacks = type(trainer._callbacks)([EarlyStopping("val_of_worst_1", mode="max", patience=2)])
    return trainer.fit(data(29), data(29)), trainer.result_names, trainer.progress.epoch


def test_results_of_a_collection_can_be_monitored(group: RankGroup) -> None:
    everywhere = group.run(fit_with_collection)
    assert all(one == everywhere[0] for one in everywhere)
    results, names, epochs = everywhere[0]
    assert tuple(results) == names
    assert names[2:] == tuple(
        f"val_of_{name}" for name in ("precision", "recall", "squared", "worst_0", "worst_1", "worst_2")
    )
    assert epochs == 3


def count_gathered_objects(backend: Backend) -> list[int]:
    """Return the number of gathered objects for a metric with sums, and for a metric that stores all predictions."""
    counts = []
    allgather_object = type(backend).allgather_object

    def counted(own: Backend, obj: Any) -> list[Any]:
        counts[-1] += 1
        return allgather_object(own, obj)

    type(backend).allgather_object = counted  # type: ignore[method-assign]
    try:
        for metric in (classification.MulticlassAccuracy(CLASSES), classification.MulticlassAUROC(CLASSES)):
            taken = TorchMetrics({"metric": metric}, backend)
            counts.append(0)
            taken.reset()
            taken.update(*data(29).tensors)
            taken.compute()
    finally:
        type(backend).allgather_object = allgather_object  # type: ignore[method-assign]
    return counts


def test_only_states_that_cannot_be_reduced_are_gathered(group: RankGroup) -> None:
    assert group.run(count_gathered_objects) == [[0, 1]] * group.size
