"""What a backend holds of a compression: a number format, or PowerSGD with its memory, found again by its model."""

from __future__ import annotations

from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.compression_setting import Compression, PowerSGD, read_compression
from unitrain.backends.power_sgd import LowRankGradients
from unitrain.errors import ModelError

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
Compressor = Literal["none", "fp16", "bf16"] | LowRankGradients


class Memories:
    """The memories of those models of a backend that are compressed by PowerSGD."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[nn.Module, LowRankGradients] = WeakKeyDictionary()

    def compressor(self, compression: Compression, model: nn.Module, communicator: Communicator) -> Compressor:
        """Return what compresses the gradients of `model`, the user's own, from here on."""
        self._of.pop(model, None)
        read = read_compression(compression)
        if not isinstance(read, PowerSGD):
            return read
        self._of[model] = memory = LowRankGradients(read, model, communicator)
        return memory

    def of(self, model: nn.Module) -> LowRankGradients:
        """Return the memory of `model`, the user's own. Raises ModelError where it has none."""
        if model not in self._of:
            raise ModelError(
                f"The gradients of this {type(model).__name__} are not compressed by PowerSGD, so nothing is "
                'remembered of them. Use: model = backend.distributed_model(model, compression="powersgd")'
            )
        return self._of[model]
