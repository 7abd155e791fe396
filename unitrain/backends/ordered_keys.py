"""Floating-point numbers as integers of the same order, so that every transport takes the same minimum and maximum.

Gloo, MPI, NCCL and Horovod compare floating-point numbers with `<`, which is false for NaN: whether a NaN survives
depends on the rank that has it and on the algorithm, and so on the size of the tensor. torch.minimum and torch.maximum
return NaN where any input is NaN. Integers are compared exactly everywhere, so a minimum or maximum is taken of integer
keys: NaN has the largest key of all in a maximum, and the smallest of all in a minimum.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}


def takes_keys(dtype: torch.dtype, op: str) -> bool:
    """Return whether the reduction `op`, "min" or "max" among others, must be taken of keys for values of `dtype`."""
    return op in ("min", "max") and dtype.is_floating_point


def ordered_keys(values: Tensor, op: Literal["min", "max"]) -> Tensor:
    """Return a new contiguous int32 or int64 tensor whose minimum or maximum over ranks is that of `values`.

    `values` is of any floating-point dtype; those of less than 32 bits are converted to float32, which is exact.
    """
    wide = values.detach().to(values.dtype if values.dtype in _KEYS else torch.float32).contiguous()
    bits = wide.view(_KEYS[wide.dtype])
    limits = torch.iinfo(bits.dtype)
    keys = _flip_negative(bits)
    return keys.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def from_ordered_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `dtype` that `ordered_keys` made `keys` of; the key of NaN becomes NaN.

    Keys are reduced to one of themselves, so no value is rounded on the way.
    """
    wide = torch.float32 if keys.dtype == torch.int32 else torch.float64
    return _flip_negative(keys).view(wide).to(dtype)


def _flip_negative(bits: Tensor) -> Tensor:
    """Return `bits` with all but the sign inverted where the sign is set; applied twice, it changes nothing.

    A floating-point number is a sign and a magnitude, whose bits are ordered like integers. Among negative numbers the
    larger magnitude is the smaller number, hence the inversion.
    """
    limits = torch.iinfo(bits.dtype)
    return (bits >> (limits.bits - 1)).bitwise_and_(limits.max).bitwise_xor_(bits)
