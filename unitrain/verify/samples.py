"""A number that stands for the samples of a batch, whatever their order."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from unitrain.backends.tensors import as_bytes


def digest_of_samples(batch: Any, count: int) -> int:
    """Return the sum of 64-bit digests of the `count` samples in `batch`, which is on the CPU.

    So several batches have the sum of theirs as that of all their samples, however these were cut up. A batch that does
    not tell which parts of it belong to one sample is digested as a whole.
    """
    rows = _rows(batch, count)
    return sum(_digest(row) for row in ([_whole(batch)] if rows is None else rows))


def digest_of_tensor(tensor: Tensor) -> str:
    """Return a digest of the tensor's bits, in hexadecimal."""
    return hashlib.blake2b(bits(tensor.detach().cpu()), digest_size=16).hexdigest()


def bits(tensor: Tensor) -> bytes:
    """Return the values of a dense tensor on the CPU, as they are in memory."""
    return as_bytes(tensor).numpy().tobytes()


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())


def _rows(part: Any, count: int) -> list[bytes] | None:
    """Return what `part` holds of each of `count` samples, None where that cannot be told."""
    if isinstance(part, Tensor):
        if part.layout is not torch.strided or part.dim() == 0 or len(part) != count:
            return None
        return [_whole(row) for row in part]
    if isinstance(part, Mapping):
        part = [part[key] for key in sorted(part, key=str)]
    elif is_dataclass(part):
        part = [getattr(part, field.name) for field in fields(part)]
    if not isinstance(part, list | tuple):
        return None
    inner = [_rows(one, count) for one in part]
    known = [rows for rows in inner if rows is not None]
    if len(known) == len(inner):
        return [b"|".join(rows) for rows in zip(*known, strict=True)]
    return [_whole(one) for one in part] if len(part) == count else None


def _whole(part: Any) -> bytes:
    if isinstance(part, Tensor):
        dense = (part if part.layout is torch.strided else part.to_dense()).cpu()
        return f"{dense.dtype} {list(dense.shape)} ".encode() + bits(dense)
    if isinstance(part, Mapping):
        return b"{" + b",".join(str(key).encode() + b":" + _whole(part[key]) for key in sorted(part, key=str)) + b"}"
    if isinstance(part, list | tuple):
        return b"[" + b",".join(map(_whole, part)) + b"]"
    if part is None or isinstance(part, str | int | float | bool):
        return repr(part).encode()
    file = io.BytesIO()
    try:
        _Pickler(file).dump(part)
    except Exception:  # whatever a type of the user's raises: its name is then all that is known of it
        return type(part).__qualname__.encode()
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Sees what is in tensors, of which pickle keeps addresses too."""

    def reducer_override(self, obj: Any) -> Any:
        return (bytes, (_whole(obj),)) if isinstance(obj, Tensor) else NotImplemented
