"""Conversion of sparse tensors to rows of bytes, which Horovod gathers, and back."""

from __future__ import annotations

import functools
import math
import operator

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.horovod.tensors import MAX_GATHER_BYTES
from unitrain.errors import CollectiveArgumentError, UnsupportedError


def check_sparse_allreduce(tensor: Tensor, op: object) -> None:
    """Raise CollectiveArgumentError unless `tensor` is a COO tensor and `op` is SUM, as in Gloo."""
    if tensor.layout != torch.sparse_coo:
        raise CollectiveArgumentError(
            f"Horovod's allreduce does not support the layout {tensor.layout}. Use tensor.to_sparse_coo() first."
        )
    if op != dist.ReduceOp.SUM:
        raise CollectiveArgumentError(
            f"Horovod's allreduce got an unsupported reduction operation for a sparse tensor: {getattr(op, 'op', op)}. "
            "Use ReduceOp.SUM, or tensor.to_dense() first."
        )


def pack_rows(tensors: list[Tensor]) -> Tensor:
    """Return the sum of COO tensors as uint8 [non-zeros, bytes]: each row contains the indices and the values of an
    element."""
    total = functools.reduce(operator.add, tensors).coalesce()
    indices, values = total.indices(), total.values()
    return torch.cat([_as_bytes(indices.t()), _as_bytes(values)], dim=1)


def is_too_large(rows: Tensor, size: int) -> bool:
    """Return whether Horovod could not gather the rows of `size` ranks if each rank had as many bytes as `rows`."""
    return rows.numel() * size > MAX_GATHER_BYTES


def size_error(size: int) -> UnsupportedError:
    """Return the error that all ranks raise if the rows of one of the `size` ranks are too large."""
    return UnsupportedError(
        "The non-zero elements of a sparse tensor take up too many bytes on a rank: Horovod gathers at most "
        f"{MAX_GATHER_BYTES // size:,} bytes from each of {size} ranks. Use tensor.to_dense() first."
    )


def unpack_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return the sum of all ranks' rows as a coalesced tensor with the shape and dtype of `like`."""
    index_bytes = 8 * like.sparse_dim()
    indices = _contiguous_copy(rows[:, :index_bytes]).view(torch.int64).t()
    values = _contiguous_copy(rows[:, index_bytes:]).view(like.dtype).view(len(rows), *like.shape[like.sparse_dim() :])
    return torch.sparse_coo_tensor(indices, values, like.shape, device=values.device, check_invariants=False).coalesce()


def _as_bytes(rows: Tensor) -> Tensor:
    """Return a tensor, [rows, ...], as uint8 [rows, bytes]."""
    return _contiguous_copy(rows.reshape(len(rows), math.prod(rows.shape[1:]))).view(torch.uint8)


def _contiguous_copy(matrix: Tensor) -> Tensor:
    """Return a copy that view() accepts for any dtype. `contiguous` alone would keep the strides of dimensions of size
    1."""
    return matrix.new_empty(matrix.shape).copy_(matrix)
