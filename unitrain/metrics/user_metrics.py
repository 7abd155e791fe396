"""Metrics passed to the Trainer: functions of a batch and torchmetrics objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.errors import ConfigError, TensorError
from unitrain.metrics.means import Means, create_means
from unitrain.metrics.torchmetrics import TorchMetrics, is_torchmetric
from unitrain.validation import describe_value

# A function (output, target) -> mean over the batch or one value per sample, or a torchmetrics Metric or
# MetricCollection.
Metric = Callable[[Any, Any], Tensor | float]


class UserMetrics:
    """The metrics of a run by name. `compute` returns the same results on all ranks. The numbers of batches may differ
    between ranks.

    The result of a function is its mean over all samples. A torchmetrics object can have several results: for a metric
    "f1" they are named "f1_" followed by the key or index. A MetricCollection passed instead of a dictionary determines
    the names. With `exact`, sums are exact, and the states of torchmetrics objects are merged in the order of the
    logical ranks, for each of which the caller calls `begin_logical_rank`. Raises ConfigError if two results have the
    same name.
    """

    def __init__(
        self, metrics: Mapping[str, Metric] | nn.Module, communicator: Communicator, *, exact: bool = False
    ) -> None:
        metrics_by_name: dict[str, Any] = dict(metrics) if isinstance(metrics, Mapping) else {"": metrics}
        self._functions = {name: metric for name, metric in metrics_by_name.items() if not is_torchmetric(metric)}
        torchmetrics = {name: metric for name, metric in metrics_by_name.items() if is_torchmetric(metric)}
        self._exact = exact
        self._torchmetrics = TorchMetrics(torchmetrics, communicator, has_logical_ranks=exact) if torchmetrics else None
        self._communicator, self._metric_names = communicator, tuple(metrics_by_name)
        self._means: Means
        result_names: Mapping[str, tuple[str, ...]] = (
            {} if self._torchmetrics is None else self._torchmetrics.result_names
        )
        self.names = _check_unique_names(
            [result for name in self._metric_names for result in result_names.get(name, (name,))]
        )

    def reset(self) -> None:
        """Discard all batches."""
        self._means = create_means(tuple(self._functions), self._communicator.device, exact=self._exact)
        if self._torchmetrics is not None:
            self._torchmetrics.reset()

    def begin_logical_rank(self) -> None:
        """Begin the batches of the next logical rank of this process."""
        if self._torchmetrics is not None:
            self._torchmetrics.begin_logical_rank()

    def update(self, output: Any, target: Any, samples: int) -> None:
        """Add a batch of `samples` samples. Raises, on this rank only, TensorError if a function does not return
        numbers, and MetricError if a torchmetrics object cannot be updated."""
        values = [_check_value(name, metric(output, target)) for name, metric in self._functions.items()]
        self._means.add(values, samples)
        if self._torchmetrics is not None:
            self._torchmetrics.update(output, target)

    def flush(self) -> None:
        """Sum the pending batches. Raises deferred errors of `update`, on this rank only."""
        self._means.flush()

    def compute(self) -> dict[str, float]:
        """Return the results over the batches of all ranks by name, in the order of the metrics. All ranks must call
        this method."""
        means = self._means.reduce(self._communicator) if self._functions else {}
        results_by_metric = {name: {name: mean} for name, mean in means.items()}
        if self._torchmetrics is not None:
            results_by_metric |= self._torchmetrics.compute()
        results = [result for name in self._metric_names for result in results_by_metric[name].items()]
        _check_unique_names([name for name, _ in results])
        return dict(results)


def _check_unique_names(names: list[str]) -> tuple[str, ...]:
    """Return `names`. Raises ConfigError if two are equal."""
    for name, times in Counter(names).items():
        if times > 1:
            raise ConfigError(
                f"Two metrics have a result named {name!r}. Give one of them another name in Trainer(metrics={{...}})."
            )
    return tuple(names)


def _check_value(name: str, value: Any) -> Tensor | float:
    """Return the result of metric `name` if it can be converted to a tensor of numbers, otherwise raise TensorError."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            return value
        description = f"a tensor of shape {list(value.shape)} on device meta"
    else:
        try:
            torch.tensor(value, dtype=torch.float64, device="cpu")
            return value  # type: ignore[no-any-return]
        except (TypeError, ValueError, OverflowError, RuntimeError):
            description = describe_value(value)
    raise TensorError(
        f"Metric {name!r} must return a number or a tensor of numbers for a batch, got {description}. Return the mean "
        "over the batch or one value per sample, and pass one function per result in Trainer(metrics={...})."
    )
