"""What the user measures: functions of a batch, and metrics of torchmetrics, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.errors import ConfigError
from unitrain.metrics.means import Means
from unitrain.metrics.torchmetrics import TorchMetrics, is_torchmetric

# (output, target) -> its mean over the batch, or one value per sample; or a torchmetrics Metric or MetricCollection.
Metric = Callable[[Any, Any], Tensor | float]


class UserMetrics:
    """The metrics of a run by their names. All ranks use it alike, and all see the same numbers.

    A function's result is its mean over all samples. A torchmetrics object may have several results: those of metric
    "f1" are then "f1_" with the key or position of each; a MetricCollection in the place of all metrics names them
    itself. Raises ConfigError for two results of one name.
    """

    def __init__(self, metrics: Mapping[str, Metric] | nn.Module, communicator: Communicator) -> None:
        everything: dict[str, Any] = dict(metrics) if isinstance(metrics, Mapping) else {"": metrics}
        self._functions = {name: metric for name, metric in everything.items() if not is_torchmetric(metric)}
        stateful = {name: metric for name, metric in everything.items() if is_torchmetric(metric)}
        self._stateful = TorchMetrics(stateful, communicator) if stateful else None
        self._communicator, self._order = communicator, tuple(everything)
        self._means: Means
        names: Mapping[str, tuple[str, ...]] = {} if self._stateful is None else self._stateful.names
        self.names = _apart([found for name in self._order for found in names.get(name, (name,))])

    def reset(self) -> None:
        """Forget what was added before."""
        self._means = Means(tuple(self._functions), self._communicator.device)
        if self._stateful is not None:
            self._stateful.reset()

    def update(self, output: Any, target: Any, samples: int) -> None:
        """Measure one batch of so many samples."""
        self._means.add([metric(output, target) for metric in self._functions.values()], samples)
        if self._stateful is not None:
            self._stateful.update(output, target)

    def flush(self) -> None:
        """Add up what waits. An error that `update` has put off is raised now, on this rank alone."""
        self._means.flush()

    def compute(self) -> dict[str, float]:
        """Return every result over all that was added on all ranks, in the order of the metrics. All ranks call it."""
        means = self._means.reduce(self._communicator) if self._functions else {}
        found = {name: {name: mean} for name, mean in means.items()}
        if self._stateful is not None:
            found |= self._stateful.compute()
        results = [result for name in self._order for result in found[name].items()]
        _apart([name for name, _ in results])
        return dict(results)


def _apart(names: list[str]) -> tuple[str, ...]:
    """Return `names`. Raises ConfigError where one comes twice."""
    for name, times in Counter(names).items():
        if times > 1:
            raise ConfigError(
                f"Two metrics give a result called {name!r}. Give one of them another name in Trainer(metrics={{...}})."
            )
    return tuple(names)
