"""The network, data and metric of examples/digits.yaml, which are those of the script digits.py.

unitrain train examples/digits.yaml
unitrain launch -np 2 --backend horovod examples/digits.yaml --batch_size 16
"""

from __future__ import annotations

from typing import Literal

import digits
from torch import Tensor, nn
from torch.utils.data import Dataset


def create_network() -> nn.Module:
    """Return a network that maps images [n, 1, 8, 8] to logits [n, 10]."""
    return digits.digits_network()


def create_data(part: Literal["train", "validation"], seed: int = 0) -> Dataset[tuple[Tensor, ...]]:
    """Return the images and digits of a part of the data.

    Args:
        part: 80% of the images for training, or the other 20% for validation.
        seed: the seed of the split.
    """
    train, validation = digits.digits_data(seed)
    return train if part == "train" else validation


def correct(output: Tensor, target: Tensor) -> Tensor:
    """Return, for each sample, whether the prediction is correct."""
    return digits.correct(output, target)
