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


def test_batches_count_by_their_samples() -> None:
    means = Means(("loss", "accuracy"), CPU)
    means.add((torch.tensor(1.0), torch.tensor([True, False, True])), 3)
    means.add((torch.tensor(5.0), torch.tensor([False])), 1)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 2.0, "accuracy": 0.5}


def test_numbers_of_python_and_integer_tensors_are_taken() -> None:
    means = Means(("a", "b"), CPU)
    means.add((0.25, torch.tensor(3)), 4)
    assert means.reduce(LocalBackend(CPU)) == {"a": 0.25, "b": 3.0}


def test_numbers_of_python_keep_their_digits() -> None:
    means = Means(("a", "b"), CPU)
    means.add((0.1, 16777217), 1)  # float32 has neither
    assert means.reduce(LocalBackend(CPU)) == {"a": 0.1, "b": 16777217.0}


def test_many_small_numbers_are_not_lost_beside_a_large_one() -> None:
    means = Means(("loss",), CPU)
    means.add((torch.tensor(1e8),), 1)
    for _ in range(1000):
        means.add((torch.tensor(1.0),), 1)  # in float32, 1e8 + 1 is 1e8
    ((total,), samples) = means.totals(LocalBackend(CPU))
    assert (total, samples) == (100_001_000.0, 1001)


def test_reading_starts_again() -> None:
    means = Means(("loss",), CPU)
    means.add((torch.tensor(1.0),), 2)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 1.0}
    assert math.isnan(means.reduce(LocalBackend(CPU))["loss"])
    means.add((torch.tensor(3.0),), 2)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 3.0}


def test_a_batch_without_samples_counts_for_nothing_whatever_its_value() -> None:
    means = Means(("loss",), CPU)
    means.add((torch.tensor(2.0),), 4)
    means.add((torch.tensor(float("nan")),), 0)
    assert means.reduce(LocalBackend(CPU)) == {"loss": 2.0}


def test_collecting_keeps_no_graph() -> None:
    weight = torch.ones((), requires_grad=True)
    means = Means(("loss",), CPU)
    means.add((weight * 2,), 1)
    assert not means._sums[0].requires_grad


def test_a_value_of_another_shape_is_refused() -> None:
    means = Means(("accuracy",), CPU)
    means.add((torch.ones(4, 2),), 4)
    with pytest.raises(TensorError, match=r"^accuracy of a batch of 4 must be one number or 4, got shape \[4, 2\]\."):
        means.reduce(LocalBackend(CPU))


def test_values_that_are_changed_later_count_as_they_were() -> None:
    means, one, many = Means(("one", "many"), CPU), torch.zeros(()), torch.zeros(2)
    for number in range(1, 131):  # more than are added up at a time
        one.fill_(number)
        many.fill_(2 * number)
        means.add((one, many), 2)
    assert means.reduce(LocalBackend(CPU)) == {"one": 65.5, "many": 131.0}


def test_a_loss_that_is_changed_later_counts_as_it_was() -> None:
    loss, value = RunningLoss(LocalBackend(CPU)), torch.zeros(())
    for number in range(1, 4):
        loss.add(value.fill_(number), 1)
        loss.finish_step()
    assert loss.epoch_mean(1, 3) == 2.0
