"""Metrics of the torchmetrics package. Each rank updates its copy with its samples, and the states are merged exactly.

The package's synchronization uses torch.distributed, computes unweighted means if ranks have different numbers of
batches, and hangs if list states have different lengths. In this module, states that are sums, means, minima or maxima
are reduced over ranks, and only other states are gathered.
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
from unitrain.backends.synchronized_errors import call_on_all_ranks, gather_if_different
from unitrain.errors import ConfigError, MetricError


class _State(NamedTuple):
    """State of a metric or of an inner metric: the number of updates, and the tensors and lists by name."""

    updates: int
    values: dict[str, Any]


_States = dict[str, _State]  # of a metric and its inner metrics, by path


class _ReducibleState(NamedTuple):
    """A tensor state that an allreduce with `op` can merge, identified by metric index, inner metric path and name."""

    metric_index: int
    path: str
    name: str
    op: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def is_torchmetric(metric: object) -> bool:
    """Return whether `metric` is a Metric or MetricCollection of torchmetrics, without importing the package."""
    package: Any = sys.modules.get("torchmetrics")
    return package is not None and isinstance(metric, (package.Metric, package.MetricCollection))


class TorchMetrics:
    """Metrics that are updated together. `compute` returns the same results on all ranks. The numbers of batches may
    differ between ranks.

    A result equals that of a single metric updated with the batches of all ranks in rank order: sums use float64,
    concatenated states are in rank order, and mean states are weighted by their numbers of updates. The synchronization
    settings of the metrics do not change; `compute` resets the metrics. The constructor raises ConfigError for a
    Running metric, which depends on the order of batches. `compute` raises MetricError, on every rank, for a metric
    that cannot be computed or has a non-numeric result.

    With `has_logical_ranks`, the states of each logical rank are gathered, and merged in the order of the logical
    ranks. The results are then bit-identical for any number of processes. Call `begin_logical_rank` before the first
    batch of each logical rank.
    """

    def __init__(
        self, metrics: Mapping[str, Any], communicator: Communicator, *, has_logical_ranks: bool = False
    ) -> None:
        self._metrics = dict(metrics)
        self._communicator, self._has_logical_ranks = communicator, has_logical_ranks
        self._is_updated = self._is_logical_rank_updated = False
        self._states_by_logical_rank: list[list[_States]] = []
        for name, metric in self._metrics.items():
            for inner_metric in _find_metrics(metric).values():
                if type(inner_metric).__name__ == "Running":
                    raise ConfigError(
                        f"Metric {name!r} is a Running metric of torchmetrics. Its result covers only the last "
                        "batches, which depend on the number of ranks. Use the metric inside it."
                    )
            metric.to(communicator.device)
        self.result_names = {name: tuple(_predict_result_names(name, metric)) for name, metric in self._metrics.items()}

    def reset(self) -> None:
        """Reset the metrics."""
        self._is_updated = self._is_logical_rank_updated = False
        self._states_by_logical_rank = []
        for metric in self._metrics.values():
            metric.reset()

    def begin_logical_rank(self) -> None:
        """Begin the batches of the next logical rank of this process, with separate states."""
        if self._is_logical_rank_updated:
            self._is_logical_rank_updated = False
            # The lists are copied, because `reset` clears them.
            self._states_by_logical_rank.append(
                [_copy_lists(_read_states(metric)) for metric in self._metrics.values()]
            )
            for metric in self._metrics.values():
                metric.reset()

    def update(self, output: Any, target: Any) -> None:
        """Update every metric with one batch. Raises MetricError, on this rank only, if an update fails."""
        self._is_updated = self._is_logical_rank_updated = True
        for name, metric in self._metrics.items():
            try:
                metric.update(output, target)
            except Exception as error:
                where = f"could not be updated with a batch on rank {self._communicator.rank}"
                raise _metric_error(name, metric, where, error) from error

    def compute(self) -> dict[str, dict[str, float]]:
        """Return {name of the metric: {name of the result: result}}, and reset the metrics. All ranks must call this
        method. The results are NaN if no rank has updated the metrics."""
        communicator = self._communicator
        rank = communicator.rank if self._is_updated else communicator.size
        # The lowest rank with samples computes the result, because some metrics store properties of the samples outside
        # their state.
        root = int(communicator.allreduce(torch.tensor(rank, device="cpu"), "min"))
        if root == communicator.size:
            return {name: dict.fromkeys(names, float("nan")) for name, names in self.result_names.items()}
        if self._has_logical_ranks:
            self.begin_logical_rank()  # stores the states of the last logical rank
            states_by_rank = communicator.allgather_object(self._states_by_logical_rank)
            unmerged_states = [states for states_of_rank in states_by_rank for states in states_of_rank]
            reduced: list[_States] = [{} for _ in self._metrics]
        else:
            unmerged_states, reduced = self._reduce_and_gather_states()

        def compute_and_reset() -> dict[str, dict[str, float]]:
            try:
                return self._compute_results(unmerged_states, reduced) if root == communicator.rank else {}
            finally:
                self.reset()

        outcome = call_on_all_ranks(communicator, compute_and_reset)
        results: dict[str, dict[str, float]] = communicator.broadcast_object(outcome, root)
        return results

    def _reduce_and_gather_states(self) -> tuple[list[list[_States]], list[_States]]:
        """Return two lists: the states of all ranks that are not merged yet, and the states that an allreduce has
        merged. All ranks must call this method."""
        states = [_read_states(metric) for metric in self._metrics.values()]
        reduced = self._reduce_states(states)
        has_unmerged_states = any(
            values_by_name for metric_states in states for _, values_by_name in metric_states.values()
        )
        if self._communicator.allreduce(torch.tensor(has_unmerged_states, device="cpu"), "max"):
            return self._communicator.allgather_object(states), reduced
        return [states], reduced

    def _reduce_states(self, states: list[_States]) -> list[_States]:
        """Remove from `states` the states that an allreduce can merge, and return the merged states. All ranks must
        call this method.

        If the names, shapes or dtypes of the states differ between ranks, no state is removed. They may differ, because
        a metric may set the shape of a state at its first batch.
        """
        merged: list[_States] = [{} for _ in states]
        layout = list(_find_reducible_states(self._metrics.values(), states))
        if gather_if_different(self._communicator, layout) is not None or not layout:
            return merged
        metrics_by_path = [_find_metrics(metric) for metric in self._metrics.values()]
        for op, wide in dict.fromkeys((state_entry.op, _wide_dtype(state_entry.dtype)) for state_entry in layout):
            group = [
                state_entry for state_entry in layout if (state_entry.op, _wide_dtype(state_entry.dtype)) == (op, wide)
            ]
            parts, counts = [], []
            for metric_index, path, name, *_ in group:
                updates, values_by_name = states[metric_index][path]
                parts.append(_contribution(values_by_name.pop(name).to(wide), op, updates).reshape(-1))
                counts.append([updates, int(updates > 0)])
            total = self._communicator.allreduce(torch.cat(parts), "sum" if op == "mean" else op)  # type: ignore[arg-type]
            total_counts = self._communicator.allreduce(torch.tensor(counts, device="cpu"), "sum").tolist()
            values = total.split([part.numel() for part in parts])
            for state_entry, value, (updates, updated_ranks) in zip(group, values, total_counts, strict=True):
                default = metrics_by_path[state_entry.metric_index][state_entry.path]._defaults[state_entry.name]
                reduced = value.view(state_entry.shape)
                if op == "mean":
                    reduced = reduced / max(updates, 1)
                elif op == "sum":
                    # Each rank's sum includes the default value, but the merged sum must include it only once.
                    reduced = reduced - (updated_ranks - 1) * default.to(reduced)
                _, values_by_name = merged[state_entry.metric_index].setdefault(state_entry.path, _State(updates, {}))
                if updates:
                    values_by_name[state_entry.name] = reduced.to(state_entry.dtype)
        return merged

    def _compute_results(self, states: list[list[_States]], reduced: list[_States]) -> dict[str, dict[str, float]]:
        results = {}
        for (name, metric), states_of_ranks, reduced_states in zip(
            self._metrics.items(), zip(*states, strict=True), reduced, strict=True
        ):
            try:
                with _use_merged_states(metric, states_of_ranks, reduced_states):
                    results[name] = dict(_iterate_numbers(name, metric.compute()))
            except MetricError:
                raise
            except Exception as error:
                raise _metric_error(name, metric, "could not be computed", error) from error
        return results


def _find_metrics(metric: Any) -> dict[str, Any]:
    """Return the metric and its inner metrics, by path."""
    package: Any = sys.modules["torchmetrics"]
    for module in metric.modules():
        if isinstance(module, package.MetricCollection):
            module.items(copy_state=False)  # makes metrics of one compute group share their state
    return {path: module for path, module in metric.named_modules() if isinstance(module, package.Metric)}


def _read_states(metric: Any) -> _States:
    return {
        path: _State(part._update_count, {name: getattr(part, name) for name in part._defaults})
        for path, part in _find_metrics(metric).items()
    }


def _copy_lists(states: _States) -> _States:
    return {
        path: _State(
            updates, {name: list(value) if isinstance(value, list) else value for name, value in values.items()}
        )
        for path, (updates, values) in states.items()
    }


def _find_reducible_states(metrics: Iterable[Any], states: Iterable[_States]) -> Iterator[_ReducibleState]:
    """Yield the states of one rank that an allreduce can merge, in the same order on every rank."""
    functions: Any = sys.modules["torchmetrics.utilities"]
    ops = {
        functions.dim_zero_sum: "sum",
        functions.dim_zero_mean: "mean",
        functions.dim_zero_min: "min",
        functions.dim_zero_max: "max",
    }
    for metric_index, (metric, metric_states) in enumerate(zip(metrics, states, strict=True)):
        for path, part in _find_metrics(metric).items():
            for name, value in metric_states[path].values.items():
                op = ops.get(part._reductions.get(name))
                if op is not None and isinstance(value, Tensor) and not value.is_complex():
                    yield _ReducibleState(metric_index, path, name, op, tuple(value.shape), value.dtype)


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.int64


def _contribution(value: Tensor, op: str, updates: int) -> Tensor:
    """Return this rank's contribution to the reduction `op` of a state after `updates` updates. Without updates, this
    is the identity element of the reduction."""
    if op == "mean":
        return value.double() * updates if updates else torch.zeros_like(value, dtype=torch.float64)
    if updates:
        return value
    if op == "sum":
        return torch.zeros_like(value)
    if value.is_floating_point():
        return torch.full_like(value, -torch.inf if op == "max" else torch.inf)
    limits = torch.iinfo(value.dtype)
    return torch.full_like(value, limits.min if op == "max" else limits.max)


@contextmanager
def _use_merged_states(metric: Any, states_of_ranks: Sequence[_States], reduced: _States) -> Iterator[None]:
    """Context manager in which `metric` has the merged state of all ranks and does not synchronize. At the end, the
    local state is restored.

    `reduced` contains the states that are already merged, and `states_of_ranks` contains the other states of each rank
    or logical rank.
    """
    states_before = {path: (part, *_read_local_state(part)) for path, part in _find_metrics(metric).items()}
    try:
        for path, (part, *_) in states_before.items():
            rank_states = [states[path] for states in states_of_ranks if path in states and states[path].updates]
            if rank_states:
                part._update_count = sum(updates for updates, _ in rank_states)
                joined_states = _merge_nrmse_states(part, [state for _, state in rank_states])
                for name in rank_states[0][1]:
                    if name in joined_states:
                        setattr(part, name, joined_states[name])
                        continue
                    values = [(updates, state[name]) for updates, state in rank_states]
                    setattr(part, name, _merge(values, part._reductions.get(name), part._defaults.get(name)))
            if path in reduced:
                updates, values_by_name = reduced[path]
                part._update_count = updates
                for name, value in values_by_name.items():
                    setattr(part, name, value)
            part._computed, part._to_sync = None, False
        yield
    finally:
        for part, updates, to_sync, state in states_before.values():
            part._update_count, part._computed, part._to_sync = updates, None, to_sync
            for name, value in state.items():
                setattr(part, name, value)


def _read_local_state(metric: Any) -> tuple[int, bool, dict[str, Any]]:
    return metric._update_count, metric._to_sync, {name: getattr(metric, name) for name in metric._defaults}


def _merge_nrmse_states(metric: Any, states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the merged states of a NormalizedRootMeanSquaredError; an empty dictionary for any other metric.

    torchmetrics merges them in the metric's `compute`, which fails for more than two ranks.
    """
    nrmse_class = getattr(sys.modules["torchmetrics"], "NormalizedRootMeanSquaredError", None)
    if nrmse_class is None or not isinstance(metric, nrmse_class) or len(states) == 1:
        return {}
    states_of_ranks = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    count, mean, squares = (states_of_ranks[name].double() for name in ("total", "mean_val", "var_val"))
    mean_of_all = (count * mean).sum(0) / count.sum(0)
    joined_states = {
        "total": states_of_ranks["total"].sum(0),
        "mean_val": mean_of_all,
        "var_val": (squares + count * (mean - mean_of_all).square()).sum(0),  # a sum of squared distances from the mean
        "min_val": states_of_ranks["min_val"].amin(0),
        "max_val": states_of_ranks["max_val"].amax(0),
        "target_squared": states_of_ranks["target_squared"].double().sum(0),
    }
    return {name: value.to(states[0][name].dtype) for name, value in joined_states.items()}


def _merge(updates_and_states: list[tuple[int, Any]], reduction: Callable[..., Any] | None, default: Any) -> Any:
    """Merge one state over ranks according to `reduction`, the `dist_reduce_fx` of `add_state`. `updates_and_states`
    contains a pair (number of updates, state) per rank.

    Without a `reduction`, tensors are stacked, as in torchmetrics, and the metric merges them. A custom `reduction` is
    called with the stacked tensors or, if the states are lists, with one list of the items of all ranks.
    """
    functions: Any = sys.modules["torchmetrics.utilities"]
    states = [state for _, state in updates_and_states]
    if any(isinstance(state, list) for state in states):
        joined_items = [item for state in states for item in (state if isinstance(state, list) else [state])]
        if reduction is None or reduction is functions.dim_zero_cat:
            return joined_items
        return reduction(joined_items)
    if len(states) == 1:
        return states[0]
    if reduction is functions.dim_zero_cat:
        return torch.cat([state.reshape(-1) if state.dim() == 0 else state for state in states])
    stacked = torch.stack(states)
    if reduction is None:
        return stacked
    wide = stacked.double() if stacked.is_floating_point() else stacked
    if reduction is functions.dim_zero_sum:
        # Each rank's sum includes the default value, but the merged sum must include it only once.
        return (wide.sum(0) - (len(states) - 1) * default.to(wide)).to(stacked.dtype)
    if reduction is functions.dim_zero_mean:
        updates = torch.tensor(
            [updates for updates, _ in updates_and_states], dtype=torch.float64, device=stacked.device
        )
        weights = (updates / updates.sum()).reshape(-1, *[1] * (stacked.dim() - 1))
        return (stacked.double() * weights).sum(0).to(stacked.dtype)
    return reduction(stacked)


def _iterate_numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield a pair (name, number) for each number in `value`. The names of several numbers end with the key or
    index."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _iterate_numbers(f"{name}_{key}" if name else str(key), part)
    elif isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1):
        yield name, float(value)
    elif isinstance(value, Tensor) and value.dim() == 1:
        yield from ((f"{name}_{position}", float(part)) for position, part in enumerate(value.tolist()))
    else:
        shape = (
            f"a tensor of shape {list(value.shape)}"
            if isinstance(value, Tensor)
            else f"an object of class {type(value).__name__}"
        )
        raise MetricError(
            f"Metric {name!r} returns {shape}, but a result must be a number, a vector or a dictionary of these. "
            "Subclass it, and let its compute return the numbers to record."
        )


def _predict_result_names(name: str, metric: Any) -> Iterator[str]:
    """Yield the names of the results of `metric`, or only `name` if the metric cannot be computed before its first
    update."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # suppresses the warning that the metric was not updated
            fresh_copy = copy.deepcopy(metric)
            fresh_copy.reset()
            with _use_merged_states(fresh_copy, [], {}):
                value = fresh_copy.compute()
    except Exception:  # metrics that concatenate their inputs cannot be computed without inputs
        yield name
    else:
        yield from (result_name for result_name, _ in _iterate_numbers(name, value))


def _metric_error(name: str, metric: Any, action: str, error: Exception) -> MetricError:
    failure = MetricError(
        f"Metric {name!r}, a torchmetrics {type(metric).__name__}, {action}: {type(error).__name__}: {error}. "
        "Test it with the output of the model for one batch: metric.update(output, target)."
    )
    failure.__cause__ = error
    return failure
