"""Python objects as bytes that travel between ranks."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from unitrain.errors import ConfigError, UnitrainError

NOTHING = torch.empty(0, dtype=torch.uint8)


def pack(obj: Any) -> tuple[Tensor, UnitrainError | None]:
    """Return `obj` as uint8 [bytes], or no bytes and what to tell the user when it cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    except Exception as error:  # whatever an object's own __reduce__ raises
        return NOTHING, ConfigError(
            f"A {type(obj).__name__} was given to send to other ranks, and it cannot be pickled: {error}. "
            "Send plain data: numbers, strings, tensors, and lists and dictionaries of these."
        )
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8), None


def unpack(payload: Tensor, device: torch.device) -> Any:
    """Return the object that was packed, its tensors of any GPU now on `device`."""
    return _Unpickler(io.BytesIO(payload.numpy().tobytes()), device).load()


class _Pickler(pickle.Pickler):
    # A tensor of a GPU would be pickled as one of the sender's GPU: on the receivers that is a neighbour's, or missing.
    def persistent_id(self, obj: Any) -> Any:
        return obj.cpu() if isinstance(obj, Tensor) and obj.device.type == "cuda" else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, pid: Any) -> Tensor:
        moved: Tensor = pid.to(self._device)
        return moved
