"""A batch on its way from the loader to the model, whatever it is made of."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unitrain.backends.tensors import as_bytes
from unitrain.errors import DataError


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


class CountedBatch(NamedTuple):
    """A batch, the number of items that it was made of, and the number of samples that it holds.

    The two differ where a `collate_fn` leaves items out.
    """

    items: int
    samples: int
    batch: Any


class CountingCollate:
    """A `collate_fn` that returns the batch of the user's own as `CountedBatch`."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[Any]) -> CountedBatch:
        given = list(items)  # the user's own may change the list
        batch = self.collate(items)
        return CountedBatch(len(given), infer_sample_count(batch, given), batch)


def infer_sample_count(batch: Any, items: Sequence[Any]) -> int:
    """Return how many samples `batch` holds, which a `collate_fn` made of `items`; 0 for None.

    A list of samples holds its length. Anything else is taken for columns: the parts of a tuple, list, mapping or
    dataclass, or one tensor. The number of items is returned where any column has that length, and where the batch does
    not show another number: that takes columns which all agree on a length, that of a tensor's first dimension or of a
    list. Columns in which the samples are the second dimension hold the number of items.
    """
    if batch is None:
        return 0
    count = len(items)
    item = next((one for one in items if one is not None), None)
    parts = _parts(batch)
    if isinstance(batch, (list, tuple)):
        if not batch:
            return 0
        given = {id(one) for one in items}
        if item is not None and all(id(part) in given or _has_layout_of(part, item) for part in batch):
            return len(batch)
    columns = [batch] if parts is None else list(parts)
    if any(_length(column) == count for column in columns):
        return count
    lengths = [found for column in columns if (found := _lengths(column))]
    common = [length for length in (lengths[0] if lengths else ()) if all(length in found for found in lengths)]
    return count if not common or count in common or _samples_come_second(columns, count, item) else common[0]


def _parts(whole: Any) -> Iterator[Any] | None:
    """Return the parts of a container, None for anything else."""
    if isinstance(whole, Mapping):
        return iter(whole.values())
    if is_dataclass(whole) and not isinstance(whole, type):
        return (getattr(whole, field.name) for field in fields(whole))
    return iter(whole) if isinstance(whole, (list, tuple)) else None


def _length(column: Any) -> int | None:
    if isinstance(column, (Tensor, np.ndarray)):
        return len(column) if column.ndim else None
    return len(column) if isinstance(column, (list, tuple)) and not hasattr(column, "_fields") else None


def _lengths(column: Any) -> list[int]:
    """Return the numbers of samples that `column` can be of: its own length, and those on which its parts agree."""
    own, parts = _length(column), _parts(column)
    inner = [found for part in parts or () if (found := _lengths(part))]
    common = [length for length in (inner[0] if inner else ()) if all(length in found for found in inner)]
    return common if own is None else [own, *common]


def _has_layout_of(part: Any, item: Any) -> bool:
    """Return whether `part` of a batch may be a sample such as `item`, and not a column of samples."""
    if isinstance(part, (Tensor, np.ndarray)):
        return isinstance(item, (Tensor, np.ndarray)) and part.ndim == item.ndim
    if type(part) is not type(item):
        return False
    if isinstance(part, Mapping) and part.keys() != item.keys():
        return False
    ours, theirs = (list(islice(_parts(one) or (), 100)) for one in (part, item))
    return len(ours) == len(theirs) and all(_has_layout_of(*pair) for pair in zip(ours, theirs, strict=True))


def _samples_come_second(columns: list[Any], count: int, item: Any) -> bool:
    """Return whether the second dimension of all tensors is that of the samples, as in [time, samples, features]."""
    tensors = [leaf for column in columns for leaf in _leaves(column) if isinstance(leaf, Tensor) and leaf.ndim]
    shapes = {tuple(leaf.shape) for leaf in _leaves(item) if isinstance(leaf, (Tensor, np.ndarray))}
    return bool(tensors) and all(
        tensor.ndim > 1 and tensor.shape[1] == count and tuple(tensor.shape[1:]) not in shapes for tensor in tensors
    )


def count_batch_samples(batch: Any) -> int:
    """Return the first dimension of the first tensor in `batch`, whatever it is nested in. Raises DataError."""
    tensor = next((leaf for leaf in _leaves(batch) if isinstance(leaf, Tensor)), None)
    if tensor is None or tensor.dim() == 0:
        found = "there is none" if tensor is None else "has no dimension"
        raise DataError(
            f"The samples of a batch that the dataset has made are counted by its first tensor, which {found} in "
            f"this {type(batch).__name__}. Yield batches such as (inputs, targets), of tensors [samples, ...]."
        )
    return len(tensor)


def fingerprint(item: Any) -> int:
    """Return a number that is the same for items with the same tensors, arrays, numbers and strings."""
    number = 0
    for leaf in _leaves(item):
        if isinstance(leaf, Tensor):
            leaf = as_bytes(leaf.cpu()).numpy() if leaf.layout == torch.strided else ""
        if isinstance(leaf, np.ndarray | np.generic):
            content = leaf.tobytes()
        else:
            content = repr(leaf).encode() if isinstance(leaf, bool | int | float | str | bytes) else b""
        number = zlib.crc32(content, number)
    return number


def _leaves(whole: Any) -> list[Any]:
    found: list[Any] = []

    def visit(_: str, part: Any) -> Any:
        found.extend(_leaves(part))
        return part

    return [whole] if map_parts(visit, whole) is whole else found
