"""What is in an item or a batch that nobody has said anything about."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unitrain.backends.tensors import as_bytes
from unitrain.data.batch import map_parts
from unitrain.errors import DataError


class Counted(NamedTuple):
    """A batch, the number of items that it was made of, and the number of samples that it holds.

    The two differ where a `collate_fn` leaves items out.
    """

    items: int
    samples: int
    batch: Any


class CountingCollate:
    """A `collate_fn` that returns the batch of the user's own as `Counted`."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, items: Sequence[Any]) -> Counted:
        given = list(items)  # the user's own may change the list
        batch = self.collate(items)
        return Counted(len(given), held_samples(batch, given), batch)


def held_samples(batch: Any, items: Sequence[Any]) -> int:
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


def count_samples(batch: Any) -> int:
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
