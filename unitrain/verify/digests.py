"""Digests of tensors, and order-independent digests of the samples of a batch."""

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


def digest_samples(batch: Any, count: int) -> int:
    """Return the sum of the 64-bit digests of the `count` samples in `batch`, which should be on the CPU, for speed.

    The sum does not depend on the division of samples into batches. If the samples cannot be separated, the batch is
    digested as one value.
    """
    rows = _split_rows(batch, count)
    return sum(_digest(row) for row in ([_serialize(batch)] if rows is None else rows))


def digest_tensor(tensor: Tensor) -> str:
    """Return a hexadecimal digest of the tensor's bits."""
    return hashlib.blake2b(tensor_bytes(tensor.detach().cpu()), digest_size=16).hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of the values of a dense CPU tensor."""
    return as_bytes(tensor).numpy().tobytes()


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _split_rows(value: Any, count: int) -> list[bytes] | None:
    """Return the serialized content of each of the `count` samples in `value`, or None if they cannot be separated."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.dim() == 0 or len(value) != count:
            return None
        return [_serialize(row) for row in value]
    if isinstance(value, Mapping):
        value = [value[key] for key in sorted(value, key=str)]
    elif is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    if not isinstance(value, list | tuple):
        return None
    inner = [_split_rows(item, count) for item in value]
    rows_by_item = [rows for rows in inner if rows is not None]
    if len(rows_by_item) == len(inner):
        # Items that are empty containers have no rows, and are skipped.
        return [b"|".join(rows) for rows in zip(*filter(None, rows_by_item), strict=True)]
    return [_serialize(item) for item in value] if len(value) == count else None


def _serialize(value: Any) -> bytes:
    if isinstance(value, Tensor):
        dense = (value if value.layout is torch.strided else value.to_dense()).cpu()
        return f"{dense.dtype} {list(dense.shape)} ".encode() + tensor_bytes(dense)
    if isinstance(value, Mapping):
        items = (str(key).encode() + b":" + _serialize(value[key]) for key in sorted(value, key=str))
        return b"{" + b",".join(items) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(map(_serialize, value)) + b"]"
    if value is None or isinstance(value, str | int | float | bool):
        return repr(value).encode()
    file = io.BytesIO()
    try:
        _ContentPickler(file).dump(value)
    except Exception:  # user-defined types may raise any error; then only the type name is digested
        return type(value).__qualname__.encode()
    return file.getvalue()


class _ContentPickler(pickle.Pickler):
    """Serializes tensors by content. The default pickle format would include memory addresses."""

    def reducer_override(self, obj: Any) -> Any:
        return (bytes, (_serialize(obj),)) if isinstance(obj, Tensor) else NotImplemented
