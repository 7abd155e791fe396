"""A batch on its way from the loader to the model, whatever it is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor on `device`, in containers of its own types; what is not known is kept.

    It goes through lists, tuples, named tuples, mappings and dataclasses, and leaves it to objects that have a method
    `to` to move themselves. Batches are made on the CPU, so where that is the device they are returned as they are.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to") and not isinstance(batch, type):
        # Before the containers: a PackedSequence is a tuple of which one part must stay on the CPU.
        return _moved(batch, device)
    return map_parts(lambda _, part: to_device(part, device), batch)


def copy_batch(batch: Any) -> Any:
    """Return `batch` with a copy of every tensor and array, in containers of its own types.

    Other objects are copied by their method `clone` if they have one, and otherwise kept.
    """
    if isinstance(batch, Tensor):
        clone = batch.clone()
        return clone.pin_memory() if batch.is_pinned() else clone
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if hasattr(batch, "clone") and not isinstance(batch, type):
        return batch.clone()
    return map_parts(lambda _, part: copy_batch(part), batch)


def map_tensors(function: Callable[[Tensor], Tensor], whole: Any) -> Any:
    """Return `whole` with what `function` makes of each tensor that `map_parts` comes to."""
    return (
        function(whole) if isinstance(whole, Tensor) else map_parts(lambda _, part: map_tensors(function, part), whole)
    )


def map_parts(function: Callable[[str, Any], Any], whole: Any) -> Any:
    """Return `whole` with each part replaced by what `function` makes of (how Python reaches it, such as "[0]", it).

    Parts are the items of lists, tuples and mappings and the fields of named tuples and dataclasses; a mapping that
    cannot be written to becomes a dictionary. Anything else is returned itself.
    """
    clone: Any
    if is_dataclass(whole) and not isinstance(whole, type):
        parts = {field.name: function(f".{field.name}", getattr(whole, field.name)) for field in fields(whole)}
        # A copy, because __init__ may want other things than the fields; frozen ones do not allow setattr.
        clone = copy.copy(whole)
        put = object.__setattr__ if type(whole).__dataclass_params__.frozen else setattr  # type: ignore[attr-defined]
        for name, part in parts.items():
            put(clone, name, part)
        return clone
    if isinstance(whole, tuple) and (names := getattr(whole, "_fields", None)):
        make: Any = type(whole)
        return make._make(function(f".{name}", part) for name, part in zip(names, whole, strict=True))
    if isinstance(whole, (list, tuple)):
        return type(whole)([function(f"[{index}]", part) for index, part in enumerate(whole)])
    if isinstance(whole, Mapping):
        mapped = {key: function(f"[{key!r}]", part) for key, part in whole.items()}
        if type(whole) is dict or not isinstance(whole, MutableMapping):
            return mapped
        clone = copy.copy(whole)  # with what its type has beside the items, such as a default
        clone.update(mapped)
        return clone
    return whole


def _moved(batch: Any, device: torch.device) -> Any:
    try:
        moved = batch.to(device, non_blocking=True)
    except TypeError:  # most take the device only
        moved = batch.to(device)
    return batch if moved is None else moved  # some move themselves and return nothing
