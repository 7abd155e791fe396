"""Chunks of tensors: their division among ranks, and their storage in files that other programs can read."""

from __future__ import annotations

import hashlib
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from unitrain.backends.sharding.tensor_chunks import TensorChunk, own_chunks, range_chunks, whole_chunk
from unitrain.checkpoint.tensor_files import StoredTensors, write_chunks, write_tensors
from unitrain.errors import CheckpointError


def numbered_tensor(shape: list[int], order: list[int]) -> Tensor:
    """Return a dense tensor of `shape` whose elements are numbered in storage order.

    `order` lists the dimensions from the largest to the smallest stride.
    """
    elements = torch.arange(prod(shape), dtype=torch.int64)
    return elements.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


def place_chunks(chunks: list[TensorChunk], tensor: Tensor) -> Tensor:
    """Copy the chunks into a new tensor like `tensor`, and check that they do not overlap."""
    result = torch.full(tensor.shape, -1, dtype=tensor.dtype)
    for chunk in chunks:
        assert chunk.shape == tuple(tensor.shape)
        target = result[
            tuple(slice(first, first + n) for first, n in zip(chunk.offsets, chunk.data.shape, strict=True))
        ]
        assert target.shape == chunk.data.shape
        assert (target == -1).all()
        target.copy_(chunk.data)
    return result


@settings(max_examples=60)
@given(st.data())
def test_range_chunks_contain_the_elements_of_a_range_in_storage_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    tensor = numbered_tensor(shape, data.draw(st.permutations(range(len(shape)))))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, tensor.numel())] * 2)))
    chunks = range_chunks("t", tensor, start, stop, torch.arange(start, stop))
    assert len(chunks) <= max(1, 2 * tensor.ndim - 1)
    expected = torch.where((tensor >= start) & (tensor < stop), tensor, -1)
    assert torch.equal(place_chunks(chunks, tensor), expected)


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=6), st.integers(1, 5))
def test_each_element_of_a_replicated_tensor_is_on_one_rank(shapes: list[list[int]], size: int) -> None:
    tensors = {str(index): numbered_tensor(shape, list(range(len(shape)))) for index, shape in enumerate(shapes)}
    by_rank = [own_chunks(tensors, rank, size) for rank in range(size)]
    for name, tensor in tensors.items():
        chunks = [chunk for chunks in by_rank for chunk in chunks if chunk.name == name]
        assert torch.equal(place_chunks(chunks, tensor), tensor)
        assert len(chunks) >= 1  # a tensor without elements has a chunk too
    loads = [sum(chunk.data.nbytes for chunk in chunks) for chunks in by_rank]
    largest_row = max(
        (tensor.nbytes // max(tensor.shape[0], 1) for tensor in tensors.values() if tensor.ndim), default=8
    )
    assert max(loads) - min(loads) <= 2 * max(2**16, largest_row) + 8


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def example_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        values = torch.randint(0, 100, (7, 3, 4), generator=generator)
        tensors[str(dtype)] = (values.to(torch.complex64) * 1j if dtype.is_complex else values.float()).to(dtype)
    tensors |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 3), "conjugate": torch.ones(3, 2).mul(1j).conj()}
    return tensors


def write_ranges(folder: Path, tensors: dict[str, Tensor], ranks: int) -> list[str]:
    """Write the elements of each tensor as one range per rank. A range consists of several rectangular chunks."""
    names: list[str] = []
    for rank in range(ranks):
        chunks = []
        for name, tensor in tensors.items():
            limits = [tensor.numel() * index // ranks for index in (rank, rank + 1)]
            flat = tensor.contiguous().view(-1) if tensor.numel() else tensor
            if tensor.ndim and tensor.numel():
                chunks += range_chunks(name, tensor.contiguous(), *limits, flat[limits[0] : limits[1]])
            elif rank == 1:
                chunks.append(whole_chunk(name, tensor))
        written = write_chunks(folder, f"rank-{rank:05d}", chunks, {})
        for name, facts in written.items():
            content = (folder / name).read_bytes()
            assert (facts.bytes, facts.sha256) == (len(content), hashlib.sha256(content).hexdigest())
            load_file(folder / name)  # checks that the file is a valid safetensors file
        names += written
    return names


def test_tensors_are_read_bit_identically_as_a_whole_and_in_other_ranges(tmp_path: Path) -> None:
    tensors = example_tensors()
    names = write_ranges(tmp_path, tensors, 3)
    assert len(names) > 3  # chunks of one range are in several files
    stored = StoredTensors.open(tmp_path, names)
    for name, tensor in tensors.items():
        assert torch.equal(stored.read_tensor(name).view(tensor.dtype), tensor), name
        assert stored.tensors[name].original_shape == tuple(tensor.shape)
        assert stored.tensors[name].original_dtype == tensor.dtype
        read = torch.zeros_like(tensor)
        stored.read(own_chunks({name: read}, 0, 1))
        assert torch.equal(read, tensor)
    first = tensors["torch.float32"]
    for start, stop in ((0, 84), (5, 6), (10, 71)):
        elements = torch.zeros(stop - start)
        stored.read(range_chunks("torch.float32", first, start, stop, elements))
        assert torch.equal(elements, first.reshape(-1)[start:stop])


def test_conjugate_and_expanded_tensors_are_read(tmp_path: Path) -> None:
    tensors = {"conjugate": torch.tensor([1 + 2j, 3 - 1j]), "expanded": torch.full((4, 3), 2.5)}
    stored = StoredTensors.open(tmp_path, write_ranges(tmp_path, tensors, 2))
    targets = {"conjugate": torch.zeros(2, dtype=torch.complex64).conj(), "expanded": torch.zeros(1, 3).expand(4, 3)}
    stored.read([whole_chunk(name, target) for name, target in targets.items()])
    assert torch.equal(targets["conjugate"], tensors["conjugate"])
    assert torch.equal(targets["expanded"], tensors["expanded"])


def test_all_tensors_are_written_to_one_file(tmp_path: Path) -> None:
    tensors = example_tensors()
    stored = StoredTensors.open(tmp_path, write_ranges(tmp_path, tensors, 2))
    write_tensors(tmp_path / "one.safetensors", stored, {})
    found = load_file(tmp_path / "one.safetensors")
    for name, tensor in tensors.items():
        expected = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        assert torch.equal(found[name], expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_distributed_checkpoint_reads_the_files(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    tensors = {name: tensor for name, tensor in example_tensors().items() if not tensor.is_complex()}
    write_ranges(tmp_path, tensors, 3)
    loaded: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor), name


def test_missing_elements_are_reported(tmp_path: Path) -> None:
    names = write_ranges(tmp_path, {"weight": torch.zeros(6, 2)}, 3)
    with pytest.raises(CheckpointError, match=r"^The files in '.*' contain 8 of 12 elements of tensor 'weight'\."):
        StoredTensors.open(tmp_path, [name for name in names if not name.startswith("rank-00001")])
