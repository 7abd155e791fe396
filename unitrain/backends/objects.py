"""Python objects as bytes that travel between ranks."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor

from unitrain.authentication import SIGNATURE_BYTES, has_key, sign, verify
from unitrain.errors import AuthenticationError, ConfigError, UnitrainError

NOTHING = torch.empty(0, dtype=torch.uint8)
_PICKLED, _SAVED = b"p", b"t"
_PURPOSE = "object"


def pack(obj: Any) -> tuple[Tensor, UnitrainError | None]:
    """Return `obj` as uint8 [bytes], or no bytes and what to tell the user when it cannot be pickled."""
    file = io.BytesIO()
    try:
        try:
            _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
            file.write(_PICKLED)
        except _OnGPUError:
            file = io.BytesIO()
            torch.save(obj, file)
            file.write(_SAVED)
    except Exception as error:  # whatever an object's own __reduce__ raises
        return NOTHING, ConfigError(
            f"A {type(obj).__name__} was given to send to other ranks, and it cannot be pickled: {error}. "
            "Send plain data: numbers, strings, tensors, and lists and dictionaries of these."
        )
    file.write(sign(file.getvalue(), _PURPOSE))
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8), None


def unpack(payload: Tensor, device: torch.device) -> Any:
    """Return the object that was packed, its tensors of any GPU now on `device`.

    Raises AuthenticationError before it reads an object that no process of this job has packed: unpickling runs code.
    """
    content = payload.numpy().tobytes()
    if has_key():
        content, signature = content[:-SIGNATURE_BYTES], content[-SIGNATURE_BYTES:]
        if not verify(content, signature, _PURPOSE):
            raise AuthenticationError(
                "An object that this rank received was not sent by a rank of this job, and is not read: its signature "
                "is not valid. Give all ranks the same UNITRAIN_JOB_KEY, or see which other program can reach the "
                "job's ports: docs/security.md"
            )
    if content.endswith(_PICKLED):
        return pickle.loads(content)

    def place(storage: Any, location: str) -> Any:
        return storage if location == "cpu" else storage.to(device=device)

    return torch.load(io.BytesIO(content[:-1]), map_location=place, weights_only=False)


class _OnGPUError(Exception):
    """A tensor of a GPU was met, which pickle would send as one of the sender's GPU: on the receivers that is a
    neighbour's, or missing. torch's own format, several times as slow for a small object, can move it."""


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, Tensor) and obj.device.type == "cuda":
            raise _OnGPUError
        return None
