"""Check images, histograms and tables, and convert them for loggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unitrain.errors import ConfigError, TensorError

_CHANNELS = (1, 3, 4)
_BINS = 64


def check_image(image: Tensor) -> None:
    """Raise TensorError unless `image` has the shape and dtype (uint8, bool or floating point) of an image."""
    is_tensor = isinstance(image, Tensor)
    found = (
        f"shape {list(image.shape)} and {image.dtype}" if is_tensor else f"an object of class {type(image).__name__}"
    )
    is_image = is_tensor and (
        image.dim() == 2 or (image.dim() == 3 and (image.shape[0] in _CHANNELS or image.shape[2] in _CHANNELS))
    )
    if not is_image or not (image.is_floating_point() or image.dtype in (torch.uint8, torch.bool)):
        raise TensorError(
            "An image to log must be a tensor [height, width], [channels, height, width] or [height, width, channels], "
            f"uint8 or floating point between 0 and 1, with 1, 3 or 4 channels; got {found}. "
            "Log one image at a time: trainer.log_image(name, images[0])."
        )


def to_pixels(image: Tensor) -> NDArray[Any]:
    """Return `image` as a uint8 array [height, width, channels]. Values of other dtypes are clamped to [0, 1] and
    multiplied by 255.

    If both the first and the last dimension could be channels, the first dimension is used.
    """
    pixels = image.detach().cpu()
    if pixels.dim() == 2:
        pixels = pixels.unsqueeze(0)
    if pixels.shape[0] in _CHANNELS:
        pixels = pixels.permute(1, 2, 0)
    if pixels.dtype != torch.uint8:
        pixels = (pixels.float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    return pixels.contiguous().clone().numpy()


def to_histogram(values: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (counts, edges) of 64 bins of equal width over the finite `values`. For complex values, the magnitudes are
    used.

    Raises TensorError if `values` is not a tensor.
    """
    if not isinstance(values, Tensor):
        raise TensorError(
            f"trainer.log_histogram takes a tensor of any shape, got {type(values).__name__}. Use torch.tensor(values)."
        )
    dense = values.detach().to_dense() if values.layout is not torch.strided else values.detach()
    numbers = (dense.abs() if dense.is_complex() else dense).double().cpu().reshape(-1).numpy()
    finite = numbers[np.isfinite(numbers)]
    try:
        return np.histogram(finite, bins=_BINS)
    except ValueError:  # the values differ so little that the edges of the bins would be equal
        margin = _BINS * np.spacing(np.abs(finite).max())
        return np.histogram(finite, bins=_BINS, range=(finite.min() - margin, finite.max() + margin))


def check_table(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Raise ConfigError unless `columns` is a list of names, and every row has a cell of a supported type per
    column."""
    is_list = isinstance(columns, Sequence) and not isinstance(columns, str)
    if not is_list or not columns or not all(isinstance(column, str) for column in columns):
        raise ConfigError(
            f"trainer.log_table({name!r}) needs a list of column names, got {columns!r}. "
            'Use trainer.log_table("samples", ["label", "predicted"], [[7, 1]]).'
        )
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ConfigError(
            f"trainer.log_table({name!r}) needs a list of rows, got {type(rows).__name__}. "
            'Use trainer.log_table("samples", ["label", "predicted"], [[7, 1]]).'
        )
    for number, row in enumerate(rows):
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != len(columns):
            raise ConfigError(
                f"Row {number} of trainer.log_table({name!r}) is {row!r}, but the columns are {list(columns)}. "
                "Give each row a cell for each column."
            )
        for cell in row:
            if not (cell is None or isinstance(cell, str | int | float | bool)):
                raise ConfigError(
                    f"Row {number} of trainer.log_table({name!r}) has an object of class {type(cell).__name__}. "
                    "Use numbers, strings, booleans or None, as from tensor.tolist()."
                )
