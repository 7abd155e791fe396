"""Means of losses and metrics, weighted by samples and without rounding errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from unitrain.backends.local import LocalBackend
from unitrain.errors import TensorError
from unitrain.metrics.means import MeanMetric, Means
from unitrain.metrics.running_loss import RunningLoss

CPU = torch.device("cpu")


def test_means_weight_batches_by_their_samples() -> None:
    means = Means(("loss", "accuracy"), CPU)
    means.add((torch.tensor(1.0), torch.tensor([True, False, True])), 3)
    means.add((torch.tensor(5.0), torch.tensor([False])), 1)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 2.0, "accuracy": 0.5}


def test_means_accept_python_numbers_and_integer_tensors() -> None:
    means = Means(("a", "b"), CPU)
    means.add((0.25, torch.tensor(3)), 4)
    assert means.reduce(LocalBackend(CPU)) == {"a": 0.25, "b": 3.0}


def test_means_of_python_numbers_are_exact_in_float64() -> None:
    means = Means(("a", "b"), CPU)
    means.add((0.1, 16777217), 1)  # neither value is exact in float32
    assert means.reduce(LocalBackend(CPU)) == {"a": 0.1, "b": 16777217.0}


def test_means_do_not_lose_small_numbers_that_are_added_to_a_large_number() -> None:
    means = Means(("loss",), CPU)
    means.add((torch.tensor(1e8),), 1)
    for _ in range(1000):
        means.add((torch.tensor(1.0),), 1)  # in float32, 1e8 + 1 equals 1e8
    ((total,), samples) = means.reduce_totals(LocalBackend(CPU))
    assert (total, samples) == (100_001_000.0, 1001)


def test_reduce_resets_the_means() -> None:
    means = Means(("loss",), CPU)
    means.add((torch.tensor(1.0),), 2)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 1.0}
    assert math.isnan(means.reduce(LocalBackend(CPU))["loss"])
    means.add((torch.tensor(3.0),), 2)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 3.0}


def test_batch_without_samples_does_not_change_the_mean() -> None:
    means = Means(("loss",), CPU)
    means.add((torch.tensor(2.0),), 4)
    means.add((torch.tensor(float("nan")),), 0)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 2.0}


def test_means_do_not_keep_the_autograd_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    means = Means(("loss",), CPU)
    means.add((weight * 2,), 1)
    assert not means._sums[0].requires_grad


def test_value_of_another_shape_is_rejected() -> None:
    means = Means(("accuracy",), CPU)
    means.add((torch.ones(4, 2),), 4)
    with pytest.raises(
        TensorError, match=r"^accuracy of a batch of 4 must be one number or have shape \[4\], got shape \[4, 2\]\."
    ):
        means.reduce(LocalBackend(CPU))


def test_means_copy_values_that_are_changed_in_place_later() -> None:
    means, one, many = Means(("one", "many"), CPU), torch.zeros(()), torch.zeros(2)
    for number in range(1, 131):  # more batches than are summed at once
        one.fill_(number)
        many.fill_(2 * number)
        means.add((one, many), 2)
    assert means.reduce(LocalBackend(CPU)) == {"one": 65.5, "many": 131.0}


def test_running_loss_copies_a_loss_that_is_changed_in_place_later() -> None:
    loss, value = RunningLoss(LocalBackend(CPU)), torch.zeros(())
    for number in range(1, 4):
        loss.add(value.fill_(number), 1)
        loss.finish_step()
    assert loss.reduce_epoch_mean(1, 3) == 2.0


def mean_of(*updates: tuple[object, object]) -> float:
    """Return the mean of `updates`, which are pairs of a value and a count."""
    metric = MeanMetric(LocalBackend(CPU))
    for update in updates:
        metric.update(*update)  # type: ignore[arg-type]
    return metric.compute()


def test_mean_metric_copies_a_loss_that_is_changed_in_place_later() -> None:
    metric, loss = MeanMetric(LocalBackend(CPU)), torch.ones(3, requires_grad=True).mean()
    metric.update(loss, 3)
    loss += 100  # such as a penalty term
    metric.update(loss, 3)
    assert metric.compute() == 51.0


def test_mean_metric_copies_a_parameter_that_the_optimizer_changes_later() -> None:
    metric, temperature = MeanMetric(LocalBackend(CPU)), torch.nn.Parameter(torch.tensor(1.0))
    metric.update(temperature)
    with torch.no_grad():
        temperature.fill_(9.0)
    assert metric.compute() == 1.0


@pytest.mark.parametrize("exact", [False, True])
def test_mean_metric_copies_a_count_that_is_overwritten_later(exact: bool) -> None:
    metric, count = MeanMetric(LocalBackend(CPU), exact=exact), torch.tensor(1)
    metric.update(2.0, count)
    count.fill_(3)
    metric.update(6.0, count)
    assert metric.compute() == 5.0


@pytest.mark.parametrize("exact", [False, True])
def test_mean_metric_does_not_round_a_count_to_float32(exact: bool) -> None:
    metric = MeanMetric(LocalBackend(CPU), exact=exact)
    metric.update(0.0, 0.1)
    metric.update(1.0, 16777217.0)
    assert metric.compute() == 16777217.0 / (0.1 + 16777217.0)


def test_mean_metric_sums_batches_of_several_dtypes_without_rounding() -> None:
    values = [torch.tensor(16777217), torch.tensor(1.0, dtype=torch.float16), torch.tensor(1e-9, dtype=torch.float64)]
    assert mean_of(*((value, 1) for value in values)) == (16777218.0 + 1e-9) / 3


def test_mean_metric_accepts_means_and_values_per_sample_alternately() -> None:
    assert mean_of((1.0, 2), (torch.tensor([2.0, 3.0]), 2), (torch.tensor([4.0]), 1), (5.0, 1)) == 16 / 6


@pytest.mark.parametrize("count", [np.int64(2), np.int32(2), np.float64(2), torch.tensor(2), torch.tensor(2.0)])
def test_mean_metric_accepts_counts_of_numpy_and_torch(count: object) -> None:
    assert mean_of((1.0, count), (torch.tensor([4.0, 6.0]), count)) == 3.0


@pytest.mark.parametrize("count", [3, 3.0, torch.tensor(3)])
@pytest.mark.parametrize("shape", [(3, 2), (2,), (1,)])
def test_mean_metric_rejects_a_value_of_another_shape(count: object, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        TensorError, match=r"^The value of a batch of 3 must be one number or have shape \[3\], got shape \["
    ):
        mean_of((1.0, count), (torch.ones(shape), count))


@pytest.mark.parametrize("count", [1, 1.0, torch.tensor(1)])
def test_mean_metric_rejects_complex_values(count: object) -> None:
    with pytest.raises(TensorError, match=r"^The value of a batch must be a real number, got dtype complex64\."):
        mean_of((torch.tensor(1 + 2j), count))


def test_mean_metric_rejects_numbers_that_tensors_cannot_hold() -> None:
    with pytest.raises(TensorError, match=r"got the complex number \(1\+1j\)\."):
        mean_of((1 + 1j, 1))
    for count in (10**400, torch.tensor(1, device="meta")):
        for exact in (False, True):
            with pytest.raises(TensorError, match="must be a number of at least 0"):
                MeanMetric(LocalBackend(CPU), exact=exact).update(1.0, count)
    assert mean_of((2.0, 10**30), (torch.tensor(2.0), 10**30)) == 2.0
