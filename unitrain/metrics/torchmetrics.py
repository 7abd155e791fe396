"""Metrics of the torchmetrics package: each rank updates its own with its samples, and they are merged exactly.

The package's own way of merging asks torch.distributed, takes the mean of what ranks with unequal numbers of batches
have, and waits for ever where they have lists of unequal lengths. Here states that are sums, means, minima or maxima
are reduced over ranks, and only the others are gathered.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import gather_if_different, raise_on_all_ranks
from unitrain.errors import ConfigError, MetricError

# Of one metric, or of a metric inside it: how often it was updated, and its tensors and lists by name.
_State = tuple[int, dict[str, Any]]
_States = dict[str, _State]


class _Reducible(NamedTuple):
    """A tensor of a metric that an allreduce merges: the number of the metric, the part of it, and the state's name."""

    metric: int
    place: str
    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype


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

    def reset(self) -> None:
        """Forget what the metrics have seen."""
        self._used = False
        for metric in self._metrics.values():
            metric.reset()

    def update(self, output: Any, target: Any) -> None:
        """Update every metric with one batch. Raises MetricError, on this rank alone, where one cannot be."""
        self._used = True
        for name, metric in self._metrics.items():
            try:
                metric.update(output, target)
            except Exception as error:
                where = f"could not be updated with a batch on rank {self._communicator.rank}"
                raise _failed(name, metric, where, error) from error

    def compute(self) -> dict[str, dict[str, float]]:
        """Return for each metric its results by their names, and start again. All ranks call it."""
        communicator = self._communicator
        rank = communicator.rank if self._used else communicator.size
        # Where there are samples a metric has seen what they look like, which some keep beside their state.
        root = int(communicator.allreduce(torch.tensor(rank), "min"))
        if root == communicator.size:
            return {name: dict.fromkeys(names, float("nan")) for name, names in self.names.items()}
        states = [_states(metric) for metric in self._metrics.values()]
        reduced = self._reduce_states(states)
        gathers = any(named for of_metric in states for _, named in of_metric.values())
        everywhere = [states]
        if communicator.allreduce(torch.tensor(gathers), "max"):
            everywhere = communicator.allgather_object(states)
        outcome, error = self._computed(everywhere, reduced) if root == communicator.rank else ({}, None)
        self.reset()
        raise_on_all_ranks(communicator, error)
        results: dict[str, dict[str, float]] = communicator.broadcast_object(outcome, root)
        return results

    def _reduce_states(self, states: list[_States]) -> list[_States]:
        """Take those out of `states` that an allreduce can merge, and return them merged. All ranks call it.

        None are taken if they differ between ranks in more than their values: a metric may give a state its shape when
        it sees the first batch.
        """
        merged: list[_States] = [{} for _ in states]
        layout = list(_reducible(self._metrics.values(), states))
        if gather_if_different(self._communicator, layout) is not None or not layout:
            return merged
        parts_of = [_parts(metric) for metric in self._metrics.values()]
        for kind, wide in dict.fromkeys((one.kind, _wide(one.dtype)) for one in layout):
            group = [one for one in layout if (one.kind, _wide(one.dtype)) == (kind, wide)]
            parts, counts = [], []
            for metric, place, name, *_ in group:
                updates, named = states[metric][place]
                parts.append(_contribution(named.pop(name).to(wide), kind, updates).reshape(-1))
                counts.append([updates, int(updates > 0)])
            total = self._communicator.allreduce(torch.cat(parts), "sum" if kind == "mean" else kind)  # type: ignore[arg-type]
            everywhere = self._communicator.allreduce(torch.tensor(counts), "sum").tolist()
            values = total.split([part.numel() for part in parts])
            for one, value, (updates, ranks) in zip(group, values, everywhere, strict=True):
                default = parts_of[one.metric][one.place]._defaults[one.name]
                found = value.view(one.shape)
                if kind == "mean":
                    found = found / max(updates, 1)
                elif kind == "sum":
                    # Each rank has begun with the default, which one metric would have begun with once.
                    found = found - (ranks - 1) * default.to(found)
                _, named = merged[one.metric].setdefault(one.place, (updates, {}))
                if updates:
                    named[one.name] = found.to(one.dtype)
        return merged

    def _computed(
        self, states: list[list[_States]], reduced: list[_States]
    ) -> tuple[dict[str, dict[str, float]], MetricError | None]:
        results = {}
        for (name, metric), of_ranks, known in zip(
            self._metrics.items(), zip(*states, strict=True), reduced, strict=True
        ):
            try:
                with _merged(metric, of_ranks, known):
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


def _states(metric: Any) -> _States:
    return {
        place: (part._update_count, {name: getattr(part, name) for name in part._defaults})
        for place, part in _parts(metric).items()
    }


def _reducible(metrics: Iterable[Any], states: Iterable[_States]) -> Iterator[_Reducible]:
    """Yield the states of one rank that an allreduce can merge, in an order that is the same on every rank."""
    functions: Any = sys.modules["torchmetrics.utilities"]
    kinds = {
        functions.dim_zero_sum: "sum",
        functions.dim_zero_mean: "mean",
        functions.dim_zero_min: "min",
        functions.dim_zero_max: "max",
    }
    for number, (metric, of_metric) in enumerate(zip(metrics, states, strict=True)):
        for place, part in _parts(metric).items():
            for name, value in of_metric[place][1].items():
                kind = kinds.get(part._reductions.get(name))
                if kind is not None and isinstance(value, Tensor) and not value.is_complex():
                    yield _Reducible(number, place, name, kind, tuple(value.shape), value.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.int64


def _contribution(value: Tensor, kind: str, updates: int) -> Tensor:
    """Return what a rank adds to a reduction of `kind`: nothing where the metric was not updated."""
    if kind == "mean":
        return value.double() * updates if updates else torch.zeros_like(value, dtype=torch.float64)
    if updates:
        return value
    if kind == "sum":
        return torch.zeros_like(value)
    if value.is_floating_point():
        return torch.full_like(value, -torch.inf if kind == "max" else torch.inf)
    limits = torch.iinfo(value.dtype)
    return torch.full_like(value, limits.min if kind == "max" else limits.max)


@contextmanager
def _merged(metric: Any, of_ranks: Sequence[_States], reduced: _States) -> Iterator[None]:
    """Inside it `metric` has the state of all ranks, and does not ask them for more; afterwards, its own again.

    `reduced` are states that are merged already, and `of_ranks` those of each rank that are not.
    """
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
            if place in reduced:
                updates, named = reduced[place]
                part._update_count = updates
                for name, value in named.items():
                    setattr(part, name, value)
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
            with _merged(untouched, [], {}):
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
