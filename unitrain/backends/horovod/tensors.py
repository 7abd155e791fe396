"""Conversion of torch tensors and reductions to forms that Horovod accepts, and of the results back to torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import horovod.torch as hvd
import torch
import torch.distributed as dist
from horovod.torch import mpi_lib_v2  # noqa: F401 (raises ImportError if missing; hvd only prints a message)
from torch import Tensor

from unitrain.backends.tensors import flatten, from_ordered_keys, has_unit_stride, ordered_keys
from unitrain.errors import UnsupportedError
from unitrain.monitoring.flight_recorder import dtype_name
from unitrain.torch_compat import require_torch

# Horovod stores element counts and offsets (for allgather, byte counts) in a C int: with 2^31 or more, it aborts or
# writes to wrong addresses. Tensors larger than MAX_PIECE_BYTES are therefore communicated in pieces.
MAX_PIECE_BYTES = 2**29
# Size limit for the result of an allgather in which the numbers of rows may differ between ranks.
MAX_GATHER_BYTES = 2**31 - 1
# Size limit for the data that a rank sends or receives in an alltoall with splits. Such an alltoall cannot be divided
# into pieces, because a rank does not know how many rows the other ranks exchange with each other.
MAX_ALLTOALL_BYTES = 2**31 - 1

_OPS = {
    "SUM": hvd.Sum,
    "AVG": hvd.Average,
    "MIN": hvd.Min,
    "MAX": hvd.Max,
    "PRODUCT": hvd.Product,
    "PREMUL_SUM": hvd.Sum,
}
_BITWISE = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_REAL = {torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64}
# Sums and products in a wider integer type are correct modulo 2^b, where b is the number of bits of the narrower type.
_INTEGERS = {
    **dict.fromkeys((torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32), torch.int32),
    **dict.fromkeys((torch.uint32, torch.int64), torch.int64),
}
_INT64_MIN = torch.iinfo(torch.int64).min


class Reduction(NamedTuple):
    """How Horovod reduces contiguous values of one dtype.

    Horovod reduces `encode(values)` by `op`, and `decode` converts the result to the original dtype. If `encode` is
    None, Horovod reduces the values themselves, viewed as `transfer_dtype` if that is given. If `combine` is given,
    Horovod only gathers the values of all ranks, and `combine` reduces two tensors in torch.
    """

    op: Any
    encode: Callable[[Tensor], Tensor] | None = None
    decode: Callable[[Tensor], Tensor] | None = None
    transfer_dtype: torch.dtype | None = None
    combine: Callable[[Tensor, Tensor], Tensor] | None = None

    def to_horovod(self, values: Tensor) -> Tensor:
        """Return `values`, [elements], in the form that Horovod reduces: a new tensor, or, if `encode` is None,
        `values` or a view of it."""
        if self.encode is not None:
            return self.encode(values)
        return values if self.transfer_dtype is None else values.view(self.transfer_dtype)

    def from_horovod(self, result: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a reduced tensor as values of `dtype`."""
        if self.decode is not None:
            return self.decode(result)
        return result.view(dtype)


def find_reduction(dtype: torch.dtype, op: Any) -> Reduction:
    """Return the reduction of `dtype` by torch's `op`.

    Raises UnsupportedError if the result cannot be computed exactly, apart from rounding to `dtype`. For the average of
    integers, `decode` raises the error instead, because only some values have no exact mean.
    """
    name = reduction_name(op)
    reduction = None
    if name in _BITWISE:
        reduction = _bitwise_reduction(dtype, name)
    elif name in _OPS:
        if dtype in _REAL:
            reduction = _complex_reduction(dtype, op, name)
        elif dtype.is_floating_point:
            reduction = _float_reduction(dtype, op, name)
        elif is_mean_of_integers(dtype, op):
            reduction = Reduction(hvd.Sum, _split_integers, lambda total: _divide_exactly(total, dtype))
        elif name not in ("AVG", "PREMUL_SUM"):
            reduction = _integer_reduction(dtype, name)
    if reduction is None:
        raise UnsupportedError(
            f"Horovod's process group cannot reduce {dtype_name(dtype)} by {name}. "
            + (
                "Use SUM and divide, or convert to a floating-point dtype first: tensor.double()"
                if name == "AVG"
                else "Use SUM, MIN, MAX or PRODUCT, or convert to another dtype first: tensor.double()"
            )
        )
    return reduction


def reduction_name(op: Any) -> str:
    """Return torch's name of `op`, such as "SUM"."""
    return next((name for name in (*_OPS, *_BITWISE) if op == getattr(dist.ReduceOp, name)), str(op))


def is_mean_of_integers(dtype: torch.dtype, op: Any) -> bool:
    """Return whether `op` is AVG and `dtype` is an integer dtype other than uint64."""
    return dtype in _INTEGERS and dtype != torch.uint64 and op == dist.ReduceOp.AVG


def _split_integers(values: Tensor) -> Tensor:
    """Return the upper and the lower 32 bits of `values` [n], and the number 1, as int64 [2 n + 1]. Sums of these
    tensors over ranks are exact."""
    wide = values.to(torch.int64)
    return torch.cat([wide >> 32, wide & 0xFFFFFFFF, wide.new_ones(1)])


def _divide_exactly(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the means of integers, given the sum of `_split_integers` over the ranks. Raises UnsupportedError if one
    of the means is not an integer."""
    size = int(total[-1])
    upper, lower = total[:-1].view(2, -1)
    quotient = upper.div(size, rounding_mode="floor")
    remainder = ((upper - quotient * size) << 32) + lower
    mean: Tensor = (quotient << 32) + remainder.div(size, rounding_mode="floor")
    if bool((remainder % size).any()):
        raise UnsupportedError(
            f"Horovod's process group cannot reduce {dtype_name(dtype)} by AVG. Use SUM and divide, or convert to a "
            "floating-point dtype first: tensor.double(). The mean is not an integer."
        )
    return mean.to(dtype)


def _float_reduction(dtype: torch.dtype, op: Any, name: str) -> Reduction | None:
    if dtype.itemsize < 4 and "x2" in dtype_name(dtype):  # two values in a byte
        return None
    hvd_op = _OPS[name]
    if name in ("MIN", "MAX"):
        order: Any = name.lower()
        return Reduction(hvd_op, lambda values: ordered_keys(values, order), lambda r: from_ordered_keys(r, dtype))
    wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
    if name == "PREMUL_SUM":
        require_torch("the reduction PREMUL_SUM on Horovod's process group")
        return Reduction(hvd_op, lambda values: torch.mul(values.to(wide), op.factor), lambda result: result.to(dtype))
    if dtype == wide or (dtype == torch.float16 and name == "SUM"):
        return Reduction(hvd_op)
    # AVG and PRODUCT also convert float16: the sum in an average may overflow, and MPI cannot multiply float16.
    return Reduction(hvd_op, lambda values: values.to(wide), lambda result: result.to(dtype))


def _complex_reduction(dtype: torch.dtype, op: Any, name: str) -> Reduction | None:
    if name == "PRODUCT" and dtype != torch.complex32:
        return Reduction(None, combine=torch.mul)
    real = _REAL[dtype]
    base = _float_reduction(real, op, name) if name in ("SUM", "AVG", "PREMUL_SUM") else None
    if base is None:
        return None
    if base.encode is None:
        return Reduction(base.op, transfer_dtype=real)
    return Reduction(
        base.op,
        lambda values: base.to_horovod(values.view(real)),
        lambda result: base.from_horovod(result, real).view(dtype),
    )


def _integer_reduction(dtype: torch.dtype, name: str) -> Reduction | None:
    if dtype == torch.bool:  # as in NCCL, the sum of booleans is true if any is
        op = hvd.Max if name in ("SUM", "MAX") else hvd.Min
        return Reduction(op, lambda values: values.to(torch.int32), lambda result: result.to(dtype))
    op = _OPS[name]
    if dtype in (torch.int32, torch.int64):
        return Reduction(op)
    if dtype in _INTEGERS:
        wide = _INTEGERS[dtype]
        return Reduction(op, lambda values: values.to(wide), lambda result: result.to(dtype))
    if dtype != torch.uint64:
        return None
    if name in ("SUM", "PRODUCT"):
        return Reduction(op, transfer_dtype=torch.int64)
    # With the highest bit inverted, signed integers have the order of unsigned ones.
    return Reduction(
        op,
        lambda values: values.view(torch.int64) ^ _INT64_MIN,
        lambda result: (result ^ _INT64_MIN).view(dtype),
    )


def _bitwise_reduction(dtype: torch.dtype, name: str) -> Reduction | None:
    function = _BITWISE[name]
    if dtype in _SIGNED:
        signed = _SIGNED[dtype]
        return Reduction(None, combine=lambda left, right: function(left.view(signed), right.view(signed)).view(dtype))
    if dtype in _INTEGERS or dtype == torch.bool:
        return Reduction(None, combine=function)
    return None


def combine_two(left: Tensor, right: Tensor, op: Any) -> Tensor:
    """Return the reduction by `op` of two tensors of one rank. Raises UnsupportedError for AVG and PREMUL_SUM."""
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "SUM": torch.add, "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum, **_BITWISE,
    }  # fmt: skip
    for name, function in functions.items():
        if op == getattr(dist.ReduceOp, name):
            return function(left, right)
    raise UnsupportedError(f"Horovod's process group can reduce only one tensor per rank by {op}. Use ReduceOp.SUM.")


def combine_rows(gathered: Tensor, dtype: torch.dtype, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the rows of `gathered`, uint8 [size, bytes], combined in rank order as values of `dtype`."""
    result: Tensor = functools.reduce(combine, (row.view(dtype) for row in gathered))
    return result


def piece_slices(num_elements: int, bytes_per_element: int) -> Iterator[slice]:
    """Yield the slices in which a tensor of `num_elements` elements is communicated. They depend only on the
    arguments."""
    max_elements = max(1, MAX_PIECE_BYTES // max(1, bytes_per_element))
    for start in range(0, num_elements, max_elements):
        yield slice(start, min(start + max_elements, num_elements))


def flatten_dense(tensor: Tensor) -> Tensor:
    """Return `flatten(tensor)`. Raises UnsupportedError for a sparse tensor."""
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"Horovod's process group takes dense tensors, got layout {tensor.layout}. Use tensor.to_dense() first."
        )
    return flatten(tensor)


def dense_bytes(tensor: Tensor) -> Tensor:
    """Return `tensor` as uint8 [bytes]. Raises UnsupportedError for a sparse tensor."""
    return flatten_dense(tensor).view(torch.uint8)


class Destination:
    """A tensor to which results are written in pieces: as `elements`, of its dtype, or as `bytes`, uint8.

    Both share memory with the tensor if it is contiguous. Otherwise `finish`, which must be called after the last
    piece, copies them to the tensor. `finish` also copies the tensor to the other tensors in `copies`.
    """

    def __init__(self, tensor: Tensor, copies: list[Tensor] | None = None) -> None:
        self._tensor = tensor.detach()
        self._copies = [copy.detach() for copy in copies or () if copy is not tensor]
        self._needs_copy = (
            not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or not has_unit_stride(tensor.view(-1))
        )
        self.elements = tensor.new_empty(tensor.numel()) if self._needs_copy else self._tensor.view(-1)

    @property
    def bytes(self) -> Tensor:
        return self.elements.view(torch.uint8)

    def finish(self) -> None:
        """Write all results to the tensor and to the other tensors in `copies`."""
        if self._needs_copy:
            self._tensor.copy_(self.elements.view(self._tensor.shape))
        for copy in self._copies:
            copy.copy_(self._tensor)
