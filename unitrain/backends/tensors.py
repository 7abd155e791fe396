"""Conversion of tensors to the forms that transports accept: flat elements, bytes, and ordered keys.

With ordered keys, every transport computes the same minimum and maximum as torch.minimum and torch.maximum, which
return NaN if any input is NaN. Gloo, MPI, NCCL and Horovod compare floating-point numbers with `<`, which is false for
NaN. Whether they return a NaN depends on the rank that passes it and on the algorithm, which depends on the tensor
size. They compare integers exactly, so a minimum or maximum is computed on integer keys, which have the same order as
the numbers. NaN has the largest key in a maximum, and the smallest key in a minimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from unitrain.torch_compat import has_memory

HALF_DTYPES = (torch.float16, torch.bfloat16)
_KEY_DTYPES = {torch.float32: torch.int32, torch.float64: torch.int64}


def flatten(tensor: Tensor) -> Tensor:
    """Return the elements of a dense `tensor`, [elements] with stride 1, sharing its memory if it is contiguous."""
    elements = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return elements if has_unit_stride(elements) else elements.clone(memory_format=torch.contiguous_format)


def has_unit_stride(elements: Tensor) -> bool:
    """Return whether contiguous `elements`, [n], can be viewed as another dtype.

    torch regards an empty tensor and a single element as contiguous at any stride, but can view them as bytes only at
    stride 1.
    """
    return elements.stride(0) == 1


def as_real(tensor: Tensor) -> Tensor:
    """Return `tensor`, or its view [..., 2] of real numbers if it is complex. The conjugate bit of `tensor` must not be
    set."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of `tensor`, of any dtype, as uint8 [bytes], sharing its memory if it is contiguous. All
    transports support uint8."""
    return flatten(tensor).view(torch.uint8)


def is_expanded(tensor: Tensor) -> bool:
    """Return whether `tensor` is an expanded view, in which elements share memory. torch raises an error for writes to
    such a view."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def find_shared_memory(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the names of two `tensors` that have elements in the same memory, or None.

    Different tensors may share memory as views or slices of one tensor, or by an assignment to `.data`. A tensor that
    occurs under several names counts once. Tensors without storage are not compared.
    """
    ranges: list[tuple[str, int, int, str]] = []
    for name, tensor in {id(tensor): (name, tensor) for name, tensor in tensors.items()}.values():
        if tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta and has_memory(tensor):
            start = tensor.data_ptr()
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            ranges.append((str(tensor.device), start, start + (last + 1) * tensor.element_size(), name))
    preceding: list[tuple[str, int, int, str]] = []  # whose ranges may overlap with the next range
    for device, start, stop, name in sorted(ranges):
        preceding = [other for other in preceding if other[0] == device and other[2] > start]
        for other in preceding:
            if _share_elements(tensors[other[3]], tensors[name], max(stop, other[2])):
                return other[3], name
        preceding.append((device, start, stop, name))
    return None


def _share_elements(first: Tensor, second: Tensor, stop: int) -> bool:
    """Return whether two tensors have elements in the same memory, although neither contains all elements of its range
    of addresses, such as two halves of the columns of a matrix. `first` has the lower address, and `stop` is the
    highest address of both."""
    distance, size = second.data_ptr() - first.data_ptr(), first.element_size()
    if second.element_size() != size or distance % size or is_expanded(first):
        return True
    is_used = torch.zeros((stop - first.data_ptr()) // size, dtype=torch.bool, device="cpu")
    is_used.as_strided(first.shape, first.stride()).fill_(True)
    return bool(is_used.as_strided(second.shape, second.stride(), distance // size).any())


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy `source` into `target`, of the same shape, even if `target` is an expanded view.

    Elements of an expanded view share memory, so torch raises an error for writes to them. This function writes each
    memory location once.
    """
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def needs_ordered_keys(dtype: torch.dtype, op: str) -> bool:
    """Return whether the reduction `op` of `dtype` must be computed on ordered keys."""
    return op in ("min", "max") and dtype.is_floating_point


def ordered_keys(values: Tensor, op: Literal["min", "max"]) -> Tensor:
    """Return the keys of `values` in a new contiguous int32 or int64 tensor. The minimum or maximum of the keys over
    ranks is the key of the minimum or maximum of the values.

    `values` has any floating-point dtype. Half precision is converted to float32, which is exact.
    """
    wide = values.detach().to(values.dtype if values.dtype in _KEY_DTYPES else torch.float32).contiguous()
    bits = wide.view(_KEY_DTYPES[wide.dtype])
    limits = torch.iinfo(bits.dtype)
    keys = _flip_negative(bits)
    return keys.masked_fill_(wide.isnan(), limits.max if op == "max" else limits.min)


def from_ordered_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `dtype` for `keys` from `ordered_keys`. The key of NaN becomes NaN.

    A minimum or maximum of keys is one of the keys, so no value is rounded.
    """
    wide = torch.float32 if keys.dtype == torch.int32 else torch.float64
    return _flip_negative(keys).view(wide).to(dtype)


def _flip_negative(bits: Tensor) -> Tensor:
    """Return `bits` with all bits except the sign inverted if the sign is set. The function is its own inverse.

    The magnitude bits of floating-point numbers are ordered like integers. For negative numbers this order is reversed,
    which the inversion corrects.
    """
    limits = torch.iinfo(bits.dtype)
    return (bits >> (limits.bits - 1)).bitwise_and_(limits.max).bitwise_xor_(bits)
