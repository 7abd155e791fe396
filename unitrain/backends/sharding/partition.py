"""Partitioning of parameters into shards. Each rank updates its shards, and stores their optimizer state and, with
ZeRO-2, their gradients.

Tensors are dense, and are divided in storage order. `flat_view` returns a view in this order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Tensors with fewer elements are not split. The optimizer state of a rank therefore differs from the average by up to
# about 128 KiB, with two float32 values per element as in Adam.
MIN_DIVIDED_ELEMENTS = 2**14
# Elements per cache line of 64 bytes, for float32.
_ALIGNMENT = 16


@dataclass(frozen=True)
class ParameterShard:
    """Elements [start, stop), in storage order, of the parameter with index `index`. Rank `owner` updates them."""

    index: int
    start: int
    stop: int
    owner: int


def divide_elements(sizes: Sequence[int], num_ranks: int) -> list[ParameterShard]:
    """Return shards such that each rank owns a contiguous range with about the same number of elements.

    `sizes` are the element counts of the parameters. Tensors with fewer than MIN_DIVIDED_ELEMENTS elements have a
    single owner. A rank owns at most one shard of a tensor.
    """
    total = sum(sizes)
    limits = [total * rank // num_ranks for rank in range(1, num_ranks)]
    shards, first = list[ParameterShard](), 0
    for index, size in enumerate(sizes):
        cuts = [0]
        if size >= MIN_DIVIDED_ELEMENTS:
            inside = (limit - first for limit in limits if first < limit < first + size)
            cuts += sorted({cut - cut % _ALIGNMENT for cut in inside} - {0})
        for start, stop in zip(cuts, [*cuts[1:], size], strict=True):
            middle = first + (start + stop) / 2
            owner = sum(limit <= middle for limit in limits)
            if start and shards[-1].owner == owner:  # the aligned cut does not separate two owners
                shards[-1] = replace(shards[-1], stop=stop)
            else:
                shards.append(ParameterShard(index, start, stop, owner))
        first += size
    return shards


def divide_runs(sizes: Sequence[int], num_ranks: int, min_elements: int) -> list[ParameterShard]:
    """Return the shards of `divide_elements` for each run of consecutive tensors with at least `min_elements` elements,
    from the last tensor to the first. The last run may have fewer elements.

    Gradients are computed in this order, so each bucket of gradients is divided evenly among ranks.
    """
    shards, run, run_elements = [], list[int](), 0
    for index in reversed(range(len(sizes))):
        run.append(index)
        run_elements += sizes[index]
        if index == 0 or run_elements >= min_elements:
            shards += [
                replace(shard, index=run[shard.index])
                for shard in divide_elements([sizes[position] for position in run], num_ranks)
            ]
            run, run_elements = [], 0
    return shards


def divide_tensors(sizes: Sequence[int], num_ranks: int) -> list[ParameterShard]:
    """Return one shard per tensor. Tensors are assigned, in descending order of size, to the rank with the fewest
    elements.
    """
    elements = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        owners[index] = elements.index(min(elements))
        elements[owners[index]] += sizes[index]
    return [ParameterShard(index, 0, size, owners[index]) for index, size in enumerate(sizes)]


def iterate_batches(
    shards: Sequence[ParameterShard], element_bytes: Sequence[int], limit_bytes: int
) -> Iterator[list[ParameterShard]]:
    """Yield lists of shards with about `limit_bytes` bytes per rank, or less at the end. `element_bytes[i]` is the
    number of bytes per element of the parameter with index i.

    All ranks compute the same lists, so they can broadcast the shards in this order.
    """
    by_owner: dict[int, list[list[ParameterShard]]] = {}
    last_bytes: dict[int, int] = {}  # of the last batch of each owner
    for shard in shards:
        batches = by_owner.setdefault(shard.owner, [[]])
        if last_bytes.get(shard.owner, 0) >= limit_bytes:
            batches.append([])
            last_bytes[shard.owner] = 0
        batches[-1].append(shard)
        num_bytes = (shard.stop - shard.start) * element_bytes[shard.index]
        last_bytes[shard.owner] = last_bytes.get(shard.owner, 0) + num_bytes
    for index in range(max(map(len, by_owner.values()), default=0)):
        yield [shard for owner in sorted(by_owner) for batch in by_owner[owner][index : index + 1] for shard in batch]


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` fill a contiguous range of memory without overlap."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat_view(tensor: Tensor) -> Tensor:
    """Return the elements of a dense tensor in storage order, as a 1-D view."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def flatten_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return the elements of `tensor` in the storage order of `parameter`: a view, or a copy if the orders differ."""
    if tensor.stride() != parameter.stride():
        ordered = torch.empty_strided(parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device)
        tensor = ordered.copy_(tensor.detach())
    return flat_view(tensor.detach())
