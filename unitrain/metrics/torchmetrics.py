"""Metrics of the torchmetrics package: each rank updates its own with its samples, and they are merged exactly.

The package's own way of merging asks torch.distributed, takes the mean of what ranks with unequal numbers of batches
have, and waits for ever where they have lists of unequal lengths. Here all of a metric's state travels in one
collective of any backend.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from unitrain.backends.base import Communicator, raise_together
from unitrain.errors import ConfigError, MetricError

# Of one metric, or of a metric inside it: how often it was updated, and its tensors and lists by name.
_State = tuple[int, dict[str, Any]]


def is_torchmetric(metric: object) -> bool:
    """Whether `metric` is a Metric or MetricCollection of torchmetrics, which is not imported to find out."""
    package: Any = sys.modules.get("torchmetrics")
    return package is not None and isinstance(metric, (package.Metric, package.MetricCollection))


class TorchMetrics:
    """Some metrics that are updated together. All ranks use it alike, and all see the same numbers.

    A result is what one metric would compute that was given the batches of all ranks, in the order of the ranks: sums
    are added in float64, what is concatenated keeps that order, and a state that is a mean counts by the number of
    updates it is the mean of. The metrics stay the user's: their settings for synchronisation are not touched, and they
    are left as `reset` leaves them. Raises ConfigError for one that depends on how batches follow each other, and
    MetricError, on every rank, for one that fails or whose result is not made of numbers.
    """

    def __init__(self, metrics: Mapping[str, Any], communicator: Communicator) -> None:
        self._metrics = dict(metrics)
        self._communicator = communicator
        self._used = False
        for name, metric in self._metrics.items():
            for part in _parts(metric).values():
                if type(part).__name__ == "Running":
                    raise ConfigError(
                        f"Metric {name!r} is torchmetrics' Running, the result of the last batches only, which are "
                        "other ones for every number of ranks. Use the metric inside it."
                    )
            metric.to(communicator.device)
        self.names = {name: tuple(_trial(name, metric)) for name, metric in self._metrics.items()}

    def start(self) -> None:
        """Forget what the metrics have seen."""
        self._used = False
        for metric in self._metrics.values():
            metric.reset()

    def add(self, output: Any, target: Any) -> None:
        """Update every metric with one batch. Raises MetricError, on this rank alone, where one cannot be."""
        self._used = True
        for name, metric in self._metrics.items():
            try:
                metric.update(output, target)
            except Exception as error:
                where = f"could not be updated with a batch on rank {self._communicator.rank}"
                raise _failed(name, metric, where, error) from error

    def reduce(self) -> dict[str, dict[str, float]]:
        """Return for each metric its results by their names, and start again. All ranks call it."""
        here = (self._used, [_states(metric) for metric in self._metrics.values()])
        everywhere: list[tuple[bool, list[dict[str, _State]]]] = self._communicator.allgather_object(here)
        # Where there are samples a metric has seen what they look like, which some keep beside their state.
        root = next((rank for rank, (used, _) in enumerate(everywhere) if used), None)
        if root is None:
            return {name: dict.fromkeys(names, float("nan")) for name, names in self.names.items()}
        mine = root == self._communicator.rank
        outcome, error = self._computed([states for _, states in everywhere]) if mine else ({}, None)
        self.start()
        raise_together(self._communicator, error)
        results: dict[str, dict[str, float]] = self._communicator.broadcast_object(outcome, root)
        return results

    def _computed(
        self, states: list[list[dict[str, _State]]]
    ) -> tuple[dict[str, dict[str, float]], MetricError | None]:
        results = {}
        for (name, metric), of_ranks in zip(self._metrics.items(), zip(*states, strict=True), strict=True):
            try:
                with _merged(metric, of_ranks):
                    results[name] = dict(_numbers(name, metric.compute()))
            except MetricError as error:
                return {}, error
            except Exception as error:
                return {}, _failed(name, metric, "could not be computed", error)
        return results, None


def _parts(metric: Any) -> dict[str, Any]:
    """Return the metric and those inside it, by their place in it."""
    package: Any = sys.modules["torchmetrics"]
    for module in metric.modules():
        if isinstance(module, package.MetricCollection):
            module.items(copy_state=False)  # metrics that share the state of another one now refer to it
    return {place: module for place, module in metric.named_modules() if isinstance(module, package.Metric)}


def _states(metric: Any) -> dict[str, _State]:
    return {
        place: (part._update_count, {name: getattr(part, name) for name in part._defaults})
        for place, part in _parts(metric).items()
    }


@contextmanager
def _merged(metric: Any, of_ranks: Sequence[dict[str, _State]]) -> Iterator[None]:
    """Inside it `metric` has the state of all ranks, and does not ask them for more; afterwards, its own again."""
    own = {place: (part, *_states_of(part)) for place, part in _parts(metric).items()}
    try:
        for place, (part, *_) in own.items():
            found = [states[place] for states in of_ranks if place in states and states[place][0]]
            if found:
                part._update_count = sum(updates for updates, _ in found)
                joined = _joined_moments(part, [state for _, state in found])
                for name in found[0][1]:
                    if name in joined:
                        setattr(part, name, joined[name])
                        continue
                    values = [(updates, state[name]) for updates, state in found]
                    setattr(part, name, _merge(values, part._reductions.get(name), part._defaults.get(name)))
            part._computed, part._to_sync = None, False
        yield
    finally:
        for part, updates, syncs, state in own.values():
            part._update_count, part._computed, part._to_sync = updates, None, syncs
            for name, value in state.items():
                setattr(part, name, value)


def _states_of(part: Any) -> tuple[int, bool, dict[str, Any]]:
    return part._update_count, part._to_sync, {name: getattr(part, name) for name in part._defaults}


def _joined_moments(part: Any, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the states of a NormalizedRootMeanSquaredError over all targets; nothing for another metric.

    torchmetrics leaves them to the metric's compute, which fails for more than two ranks.
    """
    kind = getattr(sys.modules["torchmetrics"], "NormalizedRootMeanSquaredError", None)
    if kind is None or not isinstance(part, kind) or len(states) == 1:
        return {}
    of_ranks = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    count, mean, squares = (of_ranks[name].double() for name in ("total", "mean_val", "var_val"))
    whole = (count * mean).sum(0) / count.sum(0)
    joined = {
        "total": of_ranks["total"].sum(0),
        "mean_val": whole,
        "var_val": (squares + count * (mean - whole).square()).sum(0),  # a sum of squared distances from the mean
        "min_val": of_ranks["min_val"].amin(0),
        "max_val": of_ranks["max_val"].amax(0),
        "target_squared": of_ranks["target_squared"].double().sum(0),
    }
    return {name: value.to(states[0][name].dtype) for name, value in joined.items()}


def _merge(values: list[tuple[int, Any]], reduction: Callable[..., Any] | None, default: Any) -> Any:
    """Return one state for those of several ranks, each with its number of updates, as `add_state` has asked for it.

    Without a `reduction`, and with one of the user's own, tensors are stacked, as torchmetrics would: what becomes of
    them is up to the metric.
    """
    functions: Any = sys.modules["torchmetrics.utilities"]
    states = [state for _, state in values]
    if any(isinstance(state, list) for state in states):
        joined = [item for state in states for item in (state if isinstance(state, list) else [state])]
        if reduction is None or reduction is functions.dim_zero_cat:
            return joined
        return reduction(joined)
    if len(states) == 1:
        return states[0]
    if reduction is functions.dim_zero_cat:
        return torch.cat([state.reshape(-1) if state.dim() == 0 else state for state in states])
    stacked = torch.stack(states)
    if reduction is None:
        return stacked
    wide = stacked.double() if stacked.is_floating_point() else stacked
    if reduction is functions.dim_zero_sum:
        # Each rank has begun with the default, which one metric would have begun with once.
        return (wide.sum(0) - (len(states) - 1) * default.to(wide)).to(stacked.dtype)
    if reduction is functions.dim_zero_mean:
        updates = torch.tensor([updates for updates, _ in values], dtype=torch.float64, device=stacked.device)
        weights = (updates / updates.sum()).reshape(-1, *[1] * (stacked.dim() - 1))
        return (stacked.double() * weights).sum(0).to(stacked.dtype)
    return reduction(stacked)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers that `value` is made of: one, or some by their keys or positions."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _numbers(f"{name}_{key}" if name else str(key), part)
    elif isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        yield name, float(value)
    elif isinstance(value, Tensor) and value.dim() == 1:
        yield from ((f"{name}_{position}", float(part)) for position, part in enumerate(value.tolist()))
    else:
        shape = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise MetricError(
            f"Metric {name!r} gives {shape}, and a result is a number, a vector or a dictionary of these. "
            "Subclass it, and let its compute return the numbers to be followed."
        )


def _trial(name: str, metric: Any) -> Iterator[str]:
    """Yield the names of the results, as far as a metric that has seen nothing can tell, before an epoch is spent."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it has seen nothing
            untouched = copy.deepcopy(metric)
            untouched.reset()
            with _merged(untouched, []):
                value = untouched.compute()
    except Exception:  # those that keep all they are given cannot
        yield name
    else:
        yield from (found for found, _ in _numbers(name, value))


def _failed(name: str, metric: Any, what: str, error: Exception) -> MetricError:
    failure = MetricError(
        f"Metric {name!r}, a torchmetrics {type(metric).__name__}, {what}: {type(error).__name__}: {error}. "
        "Check it against what the model returns for one batch: metric.update(output, target)."
    )
    failure.__cause__ = error
    return failure
