"""Chunks of tensors: the rectangular blocks that sharded checkpoints write and read.

torch.distributed.checkpoint uses the same term. The chunks of a rank come from replicated tensors, from ranges of
elements (ZeRO-1), or from DTensors (FSDP2). Replicated tensors are divided such that all ranks write about the same
number of bytes. Nothing in this module communicates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.errors import ModelError

# Replicated tensors with fewer bytes are written by one rank.
_MIN_DIVIDED_BYTES = 2**16


@dataclass(frozen=True)
class TensorChunk:
    """The elements of tensor `name`, of global `shape`, from `offsets` to `offsets` + `data.shape`.

    `data` may be a view of this rank's tensor: saving reads it, and loading writes to it.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    data: Tensor


def is_distributed_tensor(value: Any) -> bool:
    """Return whether `value` is a torch.distributed.tensor.DTensor, without importing torch.distributed.tensor, which
    is slow."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def whole_chunk(name: str, tensor: Tensor) -> TensorChunk:
    """Return the complete `tensor` as one chunk."""
    return TensorChunk(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach())


def own_chunks(tensors: Mapping[str, Tensor], rank: int, size: int) -> list[TensorChunk]:
    """Return the chunks of `tensors` that this rank writes. Exactly one rank writes each element.

    Plain tensors are replicated, and divided such that each rank writes about the same number of bytes. The local
    elements of a DTensor are divided among the ranks that have the same elements.
    """
    chunks, replicated = [], {}
    for name, tensor in tensors.items():
        if is_distributed_tensor(tensor):
            chunks += _own_chunks_of_distributed(name, tensor)
        else:
            replicated[name] = tensor
    return [*_balanced_chunks(replicated, rank, size), *chunks]


def local_chunks(name: str, tensor: Tensor) -> list[TensorChunk]:
    """Return this rank's elements of `tensor`: the complete tensor, or the local elements of a DTensor."""
    if not is_distributed_tensor(tensor):
        return [whole_chunk(name, tensor)]
    local = _local_chunk(name, tensor)
    return [] if local is None else [local.chunk]


def range_chunks(name: str, tensor: Tensor, start: int, stop: int, elements: Tensor) -> list[TensorChunk]:
    """Return the elements [start, stop) of a dense `tensor`, in storage order, as chunks.

    `elements`, [stop - start], contains these elements. The data of the chunks are views of it. Only the shape and the
    strides of `tensor` are used. The number of chunks is at most 2 * dimensions - 1.
    """
    order = sorted(range(tensor.ndim), key=lambda dim: tensor.stride(dim), reverse=True)
    inverse = [order.index(dim) for dim in range(tensor.ndim)]
    chunks, position = [], 0
    for offsets, lengths in _boxes([tensor.shape[dim] for dim in order], start, stop):
        data = elements[position : position + prod(lengths)].view(lengths).permute(inverse)
        position += prod(lengths)
        chunks.append(TensorChunk(name, tuple(tensor.shape), tuple(offsets[dim] for dim in inverse), data))
    return chunks


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, lengths) of the boxes that together contain the elements [start, stop) of a row-major tensor."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row_size = prod(shape[1:])
    start_row, stop_row = -(-start // row_size), stop // row_size
    if start_row > stop_row:  # inside one row
        yield from _boxes_of_row(shape, stop_row, start - stop_row * row_size, stop - stop_row * row_size)
        return
    yield from _boxes_of_row(shape, start_row - 1, start - (start_row - 1) * row_size, row_size)
    if start_row < stop_row:
        yield (start_row, *(0 for _ in shape[1:])), (stop_row - start_row, *shape[1:])
    yield from _boxes_of_row(shape, stop_row, 0, stop - stop_row * row_size)


def _boxes_of_row(
    shape: Sequence[int], row: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for offsets, lengths in _boxes(shape[1:], start, stop):
        yield (row, *offsets), (1, *lengths)


# --- replicated tensors ---


def _balanced_chunks(tensors: Mapping[str, Tensor], rank: int, size: int) -> list[TensorChunk]:
    """Return rank `rank`'s chunks of replicated `tensors`. Large tensors are divided along dimension 0."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    chunks, first = [], 0
    for name, tensor in tensors.items():
        begin, end = (_row_at(tensor, total * limit // size - first, limit, size) for limit in (rank, rank + 1))
        if begin is None or end is None:
            middle = first + tensor.nbytes // 2
            if rank == (min(middle * size // total, size - 1) if total else 0):
                chunks.append(whole_chunk(name, tensor))
        elif begin < end:
            chunks.append(_select_rows(whole_chunk(name, tensor), begin, end))
        first += tensor.nbytes
    return chunks


def _row_at(tensor: Tensor, position: int, rank: int, size: int) -> int | None:
    """Return the row of `tensor` at byte `position`, where the rows of `rank` begin, or the end of the tensor if `rank`
    is `size`. Return None if the tensor is not divided."""
    if not tensor.ndim or tensor.nbytes < _MIN_DIVIDED_BYTES:
        return None
    rows = tensor.shape[0]
    return rows if rank == size else min(max(position * rows // tensor.nbytes, 0), rows)


def _select_rows(chunk: TensorChunk, start: int, stop: int) -> TensorChunk:
    offsets = (chunk.offsets[0] + start, *chunk.offsets[1:])
    return replace(chunk, offsets=offsets, data=chunk.data[start:stop])


# --- DTensors ---


@dataclass(frozen=True)
class _LocalChunk:
    """The local elements of a DTensor. `replica_index` is the index of this rank among the `num_replicas` ranks that
    have the same elements."""

    chunk: TensorChunk
    replica_index: int
    num_replicas: int


def _own_chunks_of_distributed(name: str, tensor: Any) -> list[TensorChunk]:
    local = _local_chunk(name, tensor)
    if local is None:
        return []
    chunk, replica, replicas = local.chunk, local.replica_index, local.num_replicas
    if not chunk.data.numel():
        # Tensors without elements are written once, so that they exist in the checkpoint.
        is_first = replica == 0 and not any(chunk.offsets) and not prod(chunk.shape)
        return [chunk] if is_first else []
    if replicas == 1 or not chunk.shape:
        return [chunk] if replica == 0 else []
    rows = chunk.data.shape[0]
    begin, end = (rows * index // replicas for index in (replica, replica + 1))
    return [_select_rows(chunk, begin, end)] if begin < end else []


def _local_chunk(name: str, tensor: Any) -> _LocalChunk | None:
    """Return the local elements of a DTensor; None on a rank outside its mesh. Raises ModelError for placements other
    than Shard and Replicate."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    offsets, lengths = [0] * tensor.ndim, list(tensor.shape)
    replica, replicas = 0, 1
    for index, (placement, mesh_index) in enumerate(zip(tensor.placements, coordinate, strict=True)):
        ranks = mesh.size(index)
        if type(placement) is Replicate:
            replica, replicas = replica * ranks + mesh_index, replicas * ranks
        elif type(placement) is Shard:
            dim = placement.dim
            length = -(-lengths[dim] // ranks)  # as in torch.chunk
            begin = min(length * mesh_index, lengths[dim])
            offsets[dim] += begin
            lengths[dim] = min(length, lengths[dim] - begin)
        else:
            raise ModelError(
                f"Tensor {name!r} has placement {placement}, which a sharded checkpoint does not support. Shard its "
                'parameter by torch.distributed.tensor.Shard, or use TrainConfig(checkpoint_format="full").'
            )
    data = tensor.detach().to_local()
    assert tuple(data.shape) == tuple(lengths), (name, data.shape, lengths)
    return _LocalChunk(TensorChunk(name, tuple(tensor.shape), tuple(offsets), data), replica, replicas)


def empty_like_local(tensor: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a new tensor for this rank's elements of `tensor`, and the tensor that contains it: the same tensor, on
    the CPU, or a DTensor with the placements and the device of `tensor`.
    """
    if not is_distributed_tensor(tensor):
        empty = torch.empty(tensor.shape, dtype=dtype, device="cpu")
        return empty, empty
    from torch.distributed.tensor import DTensor

    local = torch.empty(tensor.to_local().shape, dtype=dtype, device=tensor.to_local().device)
    return local, DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def is_storable(value: Any) -> bool:
    """Return whether `value` is a tensor that can be divided into chunks: a DTensor, or a strided, unquantized instance
    of exactly Tensor, nn.Parameter or nn.Buffer."""
    if is_distributed_tensor(value):
        return True
    plain = type(value) in (Tensor, nn.Parameter, nn.Buffer)
    return plain and value.layout == torch.strided and not value.is_quantized
