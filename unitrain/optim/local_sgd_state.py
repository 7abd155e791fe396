"""Checks and conversions of the checkpoint state of `local_sgd`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from unitrain import validation
from unitrain.errors import CheckpointError


def check_state(state: Any) -> None:
    """Raise CheckpointError unless `state` is empty or a result of `state_dict`."""
    problem = _describe_invalid_state(state)
    if problem is not None:
        raise CheckpointError(
            f"LocalSGD.load_state_dict takes a result of LocalSGD.state_dict, got {problem}. Pass the state "
            "that rank 0 saved, such as local.load_state_dict(checkpoint['local']), or {} to start without one."
        )


def _describe_invalid_state(state: Any) -> str | None:
    """Return a description of the error in `state`, or None if it is valid."""
    if not isinstance(state, Mapping):
        return validation.describe_value(state)
    if not state:
        return None
    for name in ("steps", "steps_since_synchronization", "synchronized_at"):
        value = state.get(name, 0 if name == "synchronized_at" else None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return f"{name}={validation.describe_value(value)}"
    ranks = state.get("ranks")
    if not (isinstance(ranks, list | tuple) and ranks and all(map(_is_state_of_rank, ranks))):
        return "a mapping without the states of the ranks"
    merges_in, outer = state.get("merges_in", {}), state.get("outer")
    if not isinstance(merges_in, Mapping):
        return f"merges_in={validation.describe_value(merges_in)}"
    tables = ("anchors", "momentum", "slice_errors")
    if not (isinstance(outer, Mapping) and all(isinstance(outer.get(name), Mapping) for name in tables)):
        return "a mapping without the state of the outer optimizer"
    return None


def _is_state_of_rank(state: Any) -> bool:
    return isinstance(state, Mapping) and all(isinstance(state.get(name), Mapping) for name in ("optimizer", "errors"))


def shapes_of(state: Mapping[str, Any]) -> dict[str, dict[str, list[int]]]:
    """Return the shapes of the tensors in each table of `state` whose keys are names of parameters or buffers."""
    return {
        table_name: {name: list(tensor.shape) for name, tensor in table.items()}
        for table_name, table in state.items()
        if table_name != "optimizer"
    }


def copy_to_host(value: Any) -> Any:
    """Return `value` with its tensors, in nested dictionaries, lists and tuples, copied to host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copy_to_host(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_to_host(inner) for inner in value)
    return value


def mean_of_ranks(values: Sequence[Any]) -> Any:
    """Return the mean of nested states of several ranks. Empty tables are ignored, and keys that are not in all
    tables are omitted. Values that cannot be averaged are taken from the first rank."""
    values = [value for value in values if not isinstance(value, dict) or value] or values
    first = values[0]
    if isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
        wide = torch.float64 if first.is_floating_point() else torch.complex128
        return torch.stack([value.to(wide) for value in values]).mean(0).to(first.dtype)
    if isinstance(first, dict):
        common = [key for key in first if all(key in value for value in values)]
        return {key: mean_of_ranks([value[key] for value in values]) for key in common}
    return first
