"""Functions for nested batches: move to a device, copy, map, and count samples."""

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
from unitrain.data.stream_state import StreamState
from unitrain.errors import DataError

_MAX_COMPARED_PARTS = 100


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor on `device`, in containers of the same types.

    An object that has a `to` method is moved with this method, even if it is a container. Other lists, tuples, named
    tuples, mappings and dataclasses are traversed, and any other object is returned unchanged. Batches are created on
    the CPU, so they are returned unchanged if `device` is the CPU.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to") and not isinstance(batch, type):
        # Check this before containers: a PackedSequence is a tuple, but one of its tensors must stay on the CPU.
        return _move_object(batch, device)
    return map_parts(lambda _, part: to_device(part, device), batch)


def copy_batch(batch: Any) -> Any:
    """Return `batch` with a copy of every tensor and array, in containers of the same types.

    An object that has a `clone` method is copied with this method, even if it is a container. Any other object that is
    not a container is returned unchanged.
    """
    if isinstance(batch, Tensor):
        clone = batch.clone()
        return clone.pin_memory() if batch.is_pinned() else clone
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if hasattr(batch, "clone") and not isinstance(batch, type):
        return batch.clone()
    return map_parts(lambda _, part: copy_batch(part), batch)


def map_tensors(function: Callable[[Tensor], Tensor], container: Any) -> Any:
    """Return `container` with `function` applied to each tensor that `map_parts` reaches."""
    return (
        function(container)
        if isinstance(container, Tensor)
        else map_parts(lambda _, part: map_tensors(function, part), container)
    )


def map_parts(function: Callable[[str, Any], Any], container: Any) -> Any:
    """Return `container` with each part replaced by `function(path, part)`, where `path` is the expression that selects
    the part, such as "[0]" or ".name".

    Parts are the items of lists, tuples and mappings and the fields of named tuples and dataclasses. A read-only
    mapping becomes a dictionary. Any other object is returned unchanged.
    """
    clone: Any
    if is_dataclass(container) and not isinstance(container, type):
        parts = {field.name: function(f".{field.name}", getattr(container, field.name)) for field in fields(container)}
        # Copy the object instead of calling __init__, whose parameters may differ from the fields. Frozen dataclasses
        # reject setattr.
        clone = copy.copy(container)
        set_field = object.__setattr__ if type(container).__dataclass_params__.frozen else setattr  # type: ignore[attr-defined]
        for name, part in parts.items():
            set_field(clone, name, part)
        return clone
    if isinstance(container, tuple) and (names := getattr(container, "_fields", None)):
        tuple_type: Any = type(container)
        return tuple_type._make(function(f".{name}", part) for name, part in zip(names, container, strict=True))
    if isinstance(container, (list, tuple)):
        return type(container)([function(f"[{index}]", part) for index, part in enumerate(container)])
    if isinstance(container, Mapping):
        mapped = {key: function(f"[{key!r}]", part) for key, part in container.items()}
        if type(container) is dict or not isinstance(container, MutableMapping):
            return mapped
        clone = copy.copy(container)  # keeps attributes such as a defaultdict's factory
        clone.update(mapped)
        return clone
    return container


def _move_object(batch: Any, device: torch.device) -> Any:
    try:
        moved_object = batch.to(device, non_blocking=True)
    except TypeError:  # many `to` methods take only the device
        moved_object = batch.to(device)
    return batch if moved_object is None else moved_object  # some `to` methods move in place and return None


class CountedBatch(NamedTuple):
    """A batch with two counts: the number of items passed to the `collate_fn`, and the number of samples in the batch.

    The counts differ if a `collate_fn` drops items. If the dataset yields batches, both are the number of samples.
    `state` is the state of a stateful dataset after the batch.
    """

    item_count: int
    sample_count: int
    batch: Any
    state: StreamState | None = None


class BatchInfo(NamedTuple):
    """The number of samples in an evaluation batch, and the batch's position in the data: the index of its first item.

    For an iterable dataset, the position counts only the items of this rank.
    """

    samples: int
    position: int


class CountingCollate:
    """A `collate_fn` that calls the user's `collate_fn` and returns the result as a `CountedBatch`."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[Any]) -> CountedBatch:
        given = list(items)  # the user's collate_fn may change the list
        batch = self.collate(items)
        return CountedBatch(len(given), infer_sample_count(batch, given), batch)


def infer_sample_count(batch: Any, items: Sequence[Any]) -> int:
    """Return the number of samples in `batch`, the result of a `collate_fn` for `items`; 0 if `batch` is None or an
    empty list or tuple.

    If the batch is a list of samples, the number is its length. Any other batch consists of columns: the parts of a
    tuple, list, mapping or dataclass, or one tensor. If all columns have the same length (first dimension of a tensor,
    or length of a list), and this length differs from the number of items, it is the number of samples, unless the
    second dimension of all tensors indexes the samples. In all other cases, the number of samples is the number of
    items. If the items are vectors, a list of vectors may contain samples or columns; it contains columns if one of the
    vectors has one element per item.
    """
    if batch is None:
        return 0
    count = len(items)
    item = next((nonempty_item for nonempty_item in items if nonempty_item is not None), None)
    parts = _parts(batch)
    columns = [batch] if parts is None else list(parts)
    has_full_column = any(_length(column) == count for column in columns)
    if isinstance(batch, (list, tuple)):
        if not batch:
            return 0
        given = {id(item) for item in items}
        is_ambiguous = has_full_column and isinstance(item, (Tensor, np.ndarray)) and item.ndim == 1
        if item is not None and all(
            id(part) in given or (_has_structure_of(part, item) and not is_ambiguous) for part in batch
        ):
            return len(batch)  # a list of samples, such as [first_item, second_item]
    if has_full_column:
        return count  # no sample was dropped
    lengths = [counts for column in columns if (counts := _possible_sample_counts(column))]
    common = [length for length in (lengths[0] if lengths else ()) if all(length in counts for counts in lengths)]
    if not common or count in common or _samples_are_in_dim_1(columns, count, item):
        return count  # unknown, or no sample was dropped
    return common[0]


def _parts(container: Any) -> Iterator[Any] | None:
    """Return an iterator over the parts of a container; None for any other object."""
    if isinstance(container, Mapping):
        return iter(container.values())
    if is_dataclass(container) and not isinstance(container, type):
        return (getattr(container, field.name) for field in fields(container))
    return iter(container) if isinstance(container, (list, tuple)) else None


def _length(column: Any) -> int | None:
    if isinstance(column, (Tensor, np.ndarray)):
        return len(column) if column.ndim else None
    return len(column) if isinstance(column, (list, tuple)) and not hasattr(column, "_fields") else None


def _possible_sample_counts(column: Any) -> list[int]:
    """Return the numbers of samples that `column` may have: its length, and the lengths that all its parts share."""
    length_here, parts = _length(column), _parts(column)
    inner = [counts for part in parts or () if (counts := _possible_sample_counts(part))]
    common = [length for length in (inner[0] if inner else ()) if all(length in counts for counts in inner)]
    return common if length_here is None else [length_here, *common]


def _has_structure_of(part: Any, item: Any) -> bool:
    """Return whether `part` of a batch has the structure of `item`. If so, `part` may be a sample instead of a
    column."""
    if isinstance(part, (Tensor, np.ndarray)):
        return isinstance(item, (Tensor, np.ndarray)) and part.ndim == item.ndim
    if type(part) is not type(item):
        return False
    if isinstance(part, Mapping) and part.keys() != item.keys():
        return False
    # Only the first 100 parts are compared, because a list may be long.
    parts, item_parts = (list(islice(_parts(container) or (), _MAX_COMPARED_PARTS)) for container in (part, item))
    return len(parts) == len(item_parts) and all(
        _has_structure_of(*pair) for pair in zip(parts, item_parts, strict=True)
    )


def _samples_are_in_dim_1(columns: list[Any], count: int, item: Any) -> bool:
    """Return whether the second dimension of all tensors indexes the samples, as in [time, samples, features].

    This is assumed if the second dimension of every tensor has size `count`, unless `item` contains a tensor whose
    shape is that of a tensor in the batch without the first dimension.
    """
    tensors = [leaf for column in columns for leaf in leaves(column) if isinstance(leaf, Tensor) and leaf.ndim]
    shapes = {tuple(leaf.shape) for leaf in leaves(item) if isinstance(leaf, (Tensor, np.ndarray))}
    return bool(tensors) and all(
        tensor.ndim > 1 and tensor.shape[1] == count and tuple(tensor.shape[1:]) not in shapes for tensor in tensors
    )


def count_batch_samples(batch: Any) -> int:
    """Return the size of the first dimension of the first tensor in `batch`, at any depth.

    In a mapping, 0-dim tensors are skipped. Raises DataError if the batch has no tensor, if its first tensor is 0-dim,
    or if the batch is a mapping with tensor values whose first dimensions differ.
    """
    tensors = [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]
    if isinstance(batch, Mapping):
        lengths = {key: len(value) for key, value in batch.items() if isinstance(value, Tensor) and value.dim()}
        if len(set(lengths.values())) > 1:
            lengths_text = ", ".join(f"{key!r}: {length}" for key, length in lengths.items())
            raise DataError(
                f"The number of samples in this {type(batch).__name__} is unknown, because the first dimensions of its "
                f"tensors differ ({lengths_text}). Make the samples the first dimension of each tensor, or let the "
                "dataset yield single samples, which are counted: DataLoader(dataset, batch_size=32, collate_fn=...)."
            )
        tensors = [tensor for tensor in tensors if tensor.dim()] or tensors
    if not tensors or tensors[0].dim() == 0:
        reason = "its first tensor is 0-dimensional" if tensors else "it contains no tensor"
        example = "(inputs, targets) with tensors of shape [samples, ...]"
        if isinstance(batch, Mapping):
            example = (
                '{"input_ids": ..., "labels": ...} with tensors of shape [samples, ...], as with '
                'dataset.with_format("torch")'
            )
        raise DataError(
            f"The number of samples in this {type(batch).__name__} is unknown, because {reason}. Yield batches "
            f"such as {example}."
        )
    return len(tensors[0])


def fingerprint(item: Any) -> int:
    """Return a hash of the dense tensors, arrays, real numbers and strings in `item`. Other parts are ignored."""
    crc = 0
    for leaf in leaves(item):
        if isinstance(leaf, Tensor):
            leaf = as_bytes(leaf.cpu()).numpy() if leaf.layout == torch.strided else ""
        if isinstance(leaf, np.ndarray | np.generic):
            content = leaf.tobytes()
        else:
            # The separator makes the numbers 1, 23 and 12, 3 different.
            content = f"{leaf!r} ".encode() if isinstance(leaf, bool | int | float | str | bytes) else b""
        crc = zlib.crc32(content, crc)
    return crc


def leaves(container: Any) -> list[Any]:
    """Return the parts of `container` at any depth that have no parts themselves, or [container] if it is not a
    container."""
    parts = _parts(container)
    return [container] if parts is None else [leaf for part in parts for leaf in leaves(part)]
