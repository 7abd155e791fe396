"""Images as loggers take them."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from unitrain.errors import TensorError

_CHANNELS = (1, 3, 4)


def check_image(image: Tensor) -> None:
    """Raise TensorError unless `image` is one, by its shape and dtype."""
    shape = list(image.shape) if isinstance(image, Tensor) else type(image).__name__
    fits = isinstance(image, Tensor) and (
        image.dim() == 2 or (image.dim() == 3 and (image.shape[0] in _CHANNELS or image.shape[2] in _CHANNELS))
    )
    if not fits or not (image.is_floating_point() or image.dtype in (torch.uint8, torch.bool)):
        raise TensorError(
            f"An image to log is a tensor [height, width], [channels, height, width] or [height, width, channels], "
            f"uint8 or floating between 0 and 1, with 1, 3 or 4 channels; got {shape} of "
            f"{getattr(image, 'dtype', None)}. Log one image at a time: trainer.log_image(name, images[0])."
        )


def to_pixels(image: Tensor) -> NDArray[Any]:
    """Return `image` as uint8 [height, width, channels] on the host; floating values are cut off below 0 and above 1.

    Where both ends have so few entries, the first are the channels.
    """
    pixels = image.detach().cpu()
    if pixels.dim() == 2:
        pixels = pixels.unsqueeze(0)
    if pixels.shape[0] in _CHANNELS:
        pixels = pixels.permute(1, 2, 0)
    if pixels.dtype != torch.uint8:
        pixels = (pixels.float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    return pixels.contiguous().clone().numpy()
