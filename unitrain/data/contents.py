"""What is in an item or a batch that nobody has said anything about."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unitrain.data.batch import map_parts
from unitrain.errors import DataError


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
            leaf = leaf.detach().cpu().reshape(-1).view(torch.uint8).numpy() if leaf.layout == torch.strided else ""
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
