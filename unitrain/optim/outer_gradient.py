"""Mean of outer gradients over ranks, with compression. `local_sgd_config.py` specifies the formulas.

A compressed mean takes two collectives, which together transfer as many elements as an allreduce: an all-to-all, after
which each rank computes its slice of the mean, and an allgather of the slices. An allreduce would compute the sums in
the compressed format, and in an order that depends on the transport.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.capabilities import SupportsAllToAll
from unitrain.backends.local_sgd_config import BLOCK, OuterCompression
from unitrain.backends.tensors import as_bytes

_SCALE_BYTES = 4
_LARGEST_INT8 = 127


class OuterMean:
    """Computes the mean over ranks of vectors with `elements` elements, [elements], with error feedback.

    `error` is the error of this rank, [elements], and `slice_error` is the error of this rank's slice of the mean,
    [slice]. Both are None without compression and before the first call.
    """

    def __init__(self, communicator: Communicator, compression: OuterCompression, elements: int) -> None:
        self._communicator, self._compression, self._elements = communicator, compression, elements
        self.slice_elements = -(-elements // (communicator.size * BLOCK)) * BLOCK
        """Number of elements of a rank's slice. The last slices may contain padding, which is zero."""
        self.error: Tensor | None = None
        self.slice_error: Tensor | None = None

    def __call__(self, values: Tensor) -> Tensor:
        """Return the mean of `values`, float32 or float64 [elements], as a new tensor. All ranks call it."""
        if self._compression == "none":
            return self._communicator.allreduce(values)
        size, slice_elements = self._communicator.size, self.slice_elements
        padded = values.new_zeros(size * slice_elements)
        padded[: self._elements] = values if self.error is None else values + self.error
        rows = padded.view(size, slice_elements)
        encoded = _encode(rows, self._compression)
        padded -= _decode(encoded, self._compression, values.dtype).view(-1)
        self.error = padded[: self._elements].clone()
        first, *others = _exchange_rows(encoded, self._communicator)
        mean = _decode(first, self._compression, values.dtype)
        for row in others:  # in rank order
            mean += _decode(row, self._compression, values.dtype)
        mean /= size
        if self.slice_error is not None:
            mean += self.slice_error
        own = _encode(mean.unsqueeze(0), self._compression)
        self.slice_error = mean - _decode(own[0], self._compression, values.dtype)
        gathered = self._communicator.allgather(own)
        return _decode(gathered, self._compression, values.dtype).view(-1)[: self._elements].clone()


def bytes_per_synchronization(elements: int, size: int, compression: OuterCompression, element_bytes: int = 4) -> int:
    """Return the number of bytes that a rank sends in a synchronization of `elements` elements between `size` ranks.

    `element_bytes` is the size of an element without compression.
    """
    slice_elements = -(-elements // (size * BLOCK)) * BLOCK
    if compression == "none":
        return 2 * (size - 1) * elements * element_bytes // size
    return 2 * (size - 1) * _row_bytes(slice_elements, compression)


def _row_bytes(elements: int, compression: OuterCompression) -> int:
    return 2 * elements if compression == "bf16" else elements + elements // BLOCK * _SCALE_BYTES


def _encode(rows: Tensor, compression: OuterCompression) -> Tensor:
    """Return `rows`, [rows, elements], in the format: uint8 [rows, bytes]. In int8, a row starts with its scales.

    Non-finite values remain non-finite.
    """
    if compression == "bf16":
        return as_bytes(rows.to(torch.bfloat16)).view(len(rows), -1)
    blocks = rows.view(len(rows), -1, BLOCK)
    scales = (blocks.abs().amax(dim=2) / _LARGEST_INT8).float()
    numbers = (blocks / scales.unsqueeze(2).to(rows.dtype)).round_()
    # A block of zeros has the scale 0. A non-finite value makes the scale of its block non-finite, and thus all decoded
    # values of the block.
    numbers = numbers.nan_to_num_(nan=1.0).clamp_(-_LARGEST_INT8, _LARGEST_INT8).to(torch.int8)
    return torch.cat([as_bytes(scales).view(len(rows), -1), as_bytes(numbers).view(len(rows), -1)], dim=1)


def _decode(encoded: Tensor, compression: OuterCompression, dtype: torch.dtype) -> Tensor:
    """Return the values of `encoded`, uint8 [..., bytes], as [..., elements] of `dtype`."""
    if compression == "bf16":
        return encoded.contiguous().view(torch.bfloat16).to(dtype)
    scale_bytes = encoded.shape[-1] // (BLOCK + _SCALE_BYTES) * _SCALE_BYTES
    scales = encoded[..., :scale_bytes].contiguous().view(torch.float32).to(dtype)
    numbers = encoded[..., scale_bytes:].contiguous().view(torch.int8).to(dtype)
    blocks = numbers.view(*encoded.shape[:-1], -1, BLOCK) * scales.unsqueeze(-1)
    return blocks.view(*encoded.shape[:-1], -1)


def _exchange_rows(rows: Tensor, communicator: Communicator) -> Tensor:
    """Send row r of `rows`, [ranks, bytes], to rank r, and return the rows from all ranks. All ranks call it."""
    if isinstance(communicator, SupportsAllToAll):
        return communicator.alltoall(rows)
    return communicator.allgather(rows.unsqueeze(0))[:, communicator.rank].contiguous()
