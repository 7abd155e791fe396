"""Means: exact, weighted by samples."""

from __future__ import annotations

import math

import pytest
import torch

from unitrain.backends.local import LocalBackend
from unitrain.errors import TensorError
from unitrain.metrics.means import Means
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
    means.add((0.1, 16777217), 1)  # float32 has neither
    assert means.reduce(LocalBackend(CPU)) == {"a": 0.1, "b": 16777217.0}


def test_means_keep_small_numbers_added_to_a_large_one() -> None:
    means = Means(("loss",), CPU)
    means.add((torch.tensor(1e8),), 1)
    for _ in range(1000):
        means.add((torch.tensor(1.0),), 1)  # in float32, 1e8 + 1 is 1e8
    ((total,), samples) = means.totals(LocalBackend(CPU))
    assert (total, samples) == (100_001_000.0, 1001)


def test_reduce_discards_all_batches() -> None:
    means = Means(("loss",), CPU)
    means.add((torch.tensor(1.0),), 2)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 1.0}
    assert math.isnan(means.reduce(LocalBackend(CPU))["loss"])
    means.add((torch.tensor(3.0),), 2)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 3.0}


def test_batch_without_samples_has_no_effect_on_the_mean() -> None:
    means = Means(("loss",), CPU)
    means.add((torch.tensor(2.0),), 4)
    means.add((torch.tensor(float("nan")),), 0)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 2.0}


def test_means_keep_no_autograd_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    means = Means(("loss",), CPU)
    means.add((weight * 2,), 1)
    assert not means._sums[0].requires_grad


def test_value_of_another_shape_is_rejected() -> None:
    means = Means(("accuracy",), CPU)
    means.add((torch.ones(4, 2),), 4)
    with pytest.raises(TensorError, match=r"^accuracy of a batch of 4 must be one number or 4, got shape \[4, 2\]\."):
        means.reduce(LocalBackend(CPU))


def test_means_copy_values_that_are_changed_later() -> None:
    means, one, many = Means(("one", "many"), CPU), torch.zeros(()), torch.zeros(2)
    for number in range(1, 131):  # more than are added up at a time
        one.fill_(number)
        many.fill_(2 * number)
        means.add((one, many), 2)
    assert means.reduce(LocalBackend(CPU)) == {"one": 65.5, "many": 131.0}


def test_means_copy_a_loss_that_is_changed_later() -> None:
    loss, value = RunningLoss(LocalBackend(CPU)), torch.zeros(())
    for number in range(1, 4):
        loss.add(value.fill_(number), 1)
        loss.finish_step()
    assert loss.epoch_mean(1, 3) == 2.0
