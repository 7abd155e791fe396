"""A batch on its way from the loader to the model: moved to the device, and taken apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unitrain.errors import DataError


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor on `device`, through nested lists, tuples, named tuples and dictionaries.

    Batches are made on the CPU, so where that is the device they are returned as they are.
    """
    if device.type == "cpu":
        return batch
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([to_device(part, device) for part in batch])
    if isinstance(batch, dict):
        return {key: to_device(part, device) for key, part in batch.items()}
    return batch


def input_and_target(batch: Any) -> tuple[Any, Any]:
    """Take a batch apart. Raises DataError unless it is a pair."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[0], batch[1]
    size = f" of {len(batch)}" if isinstance(batch, (list, tuple, dict)) else ""
    raise DataError(
        f"A batch must be a pair (inputs, targets), got a {type(batch).__name__}{size}. "
        "Let the dataset's __getitem__ return (inputs, target); inputs may be a dictionary."
    )
