"""safetensors files that contain chunks of tensors, written and read one tensor at a time.

Each file is a valid safetensors file. Its metadata contains the offsets of the chunks in the form that
`torch.distributed.checkpoint.HuggingFaceStorageReader` reads (torch 2.14). A file contains each tensor name at most
once, so further chunks of a tensor are in further files of the same rank. The format is specified in
https://huggingface.co/docs/safetensors/index#format.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from unitrain.backends.sharding.tensor_chunks import TensorChunk
from unitrain.backends.tensors import as_bytes, copy_into, is_expanded
from unitrain.errors import CheckpointError

COMPLEX = "unitrain.complex"  # metadata entry with the names of complex tensors, as JSON
_OFFSETS_KEY = "DCP_SHARDING_INFO"
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 256 << 20
# Number of bytes that are written, hashed or read at once.
_BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class WrittenFile:
    """Size and SHA-256 digest of a file."""

    bytes: int
    sha256: str


def write_chunks(
    folder: Path, stem: str, chunks: Iterable[TensorChunk], metadata: dict[str, str]
) -> dict[str, WrittenFile]:
    """Write `chunks` to the new files `STEM.safetensors`, `STEM-1.safetensors`, ... in `folder`, flushed to disk.

    Return the files by name. Complex tensors are written as the real tensors of torch.view_as_real.
    """
    files: list[list[TensorChunk]] = []
    last_file_index: dict[str, int] = {}
    for chunk in chunks:
        file_index = last_file_index[chunk.name] = last_file_index.get(chunk.name, -1) + 1
        if file_index == len(files):
            files.append([])
        files[file_index].append(chunk)
    written = {}
    for file_index, contents in enumerate(files):
        name = f"{stem}-{file_index}.safetensors" if file_index else f"{stem}.safetensors"
        written[name] = _write_file(folder / name, contents, metadata)
    return written


def _write_file(path: Path, chunks: list[TensorChunk], metadata: dict[str, str]) -> WrittenFile:
    # In descending order of element size, so that every tensor is aligned.
    real_chunks = sorted(map(_as_real, chunks), key=lambda chunk: -chunk.data.element_size())
    names = [chunk.name for chunk in real_chunks if chunk.is_complex]
    offsets = {chunk.name: {"saved_offsets": chunk.offsets} for chunk in real_chunks}
    file_metadata = {"format": "pt", **metadata, _OFFSETS_KEY: json.dumps(offsets)}
    if names:
        file_metadata[COMPLEX] = json.dumps(names)
    with _TensorWriter(
        path, {chunk.name: (chunk.data.dtype, tuple(chunk.data.shape)) for chunk in real_chunks}, file_metadata
    ) as file:
        for chunk in real_chunks:
            file.write(chunk.data)
    return file.written


def write_tensors(path: Path, tensors: StoredTensors, metadata: dict[str, str]) -> WrittenFile:
    """Write all `tensors` to one safetensors file `path`, one tensor at a time, and flush it to disk."""
    ordered = sorted(tensors.tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    file_metadata = {"format": "pt", **metadata}
    if names := [name for name, tensor in ordered if tensor.is_complex]:
        file_metadata[COMPLEX] = json.dumps(names)
    with _TensorWriter(path, {name: (tensor.dtype, tensor.shape) for name, tensor in ordered}, file_metadata) as file:
        for name, _ in ordered:
            file.write(tensors.read_as_real(name))
    return file.written


@dataclass(frozen=True)
class _RealChunk:
    """A chunk whose complex numbers are viewed as pairs of real numbers in an additional last dimension."""

    name: str
    offsets: tuple[int, ...]
    data: Tensor
    is_complex: bool


def _as_real(chunk: TensorChunk) -> _RealChunk:
    if not chunk.data.is_complex():
        return _RealChunk(chunk.name, chunk.offsets, chunk.data.resolve_neg(), is_complex=False)
    return _RealChunk(chunk.name, (*chunk.offsets, 0), torch.view_as_real(chunk.data.resolve_conj()), is_complex=True)


class _TensorWriter:
    """Writes a new safetensors file, and computes its digest. Tensors are written in the order of `layout`.

    `written` is set at the end of the `with` block, unless an exception ended it.
    """

    written: WrittenFile

    def __init__(
        self, path: Path, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]
    ) -> None:
        header: dict[str, Any] = {"__metadata__": metadata}
        position = 0
        for name, (dtype, shape) in layout.items():
            if dtype not in _DTYPE_NAMES:
                raise CheckpointError(
                    f"Tensor {name!r} has dtype {dtype}, which safetensors does not support. Convert it to another "
                    "dtype, such as torch.float32."
                )
            end = position + prod(shape) * dtype.itemsize
            header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [position, end]}
            position = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self._header = struct.pack("<Q", len(encoded)) + encoded
        self._path, self._bytes, self._digest = path, 0, hashlib.sha256()

    def __enter__(self) -> _TensorWriter:
        self._file = self._path.open("xb")
        self._write(memoryview(self._header))
        return self

    def write(self, tensor: Tensor) -> None:
        """Write the next tensor. A copy is made if it is not contiguous or not on the CPU."""
        self._write(as_bytes(tensor.cpu()).numpy().data)

    def _write(self, content: memoryview) -> None:
        for start in range(0, len(content), _BLOCK_BYTES):
            block = content[start : start + _BLOCK_BYTES]
            self._digest.update(block)
            self._file.write(block)
        self._bytes += len(content)

    def __exit__(self, *exc_info: Any) -> None:
        with self._file:
            if exc_info[0] is None:
                self._file.flush()
                os.fsync(self._file.fileno())
                self.written = WrittenFile(self._bytes, self._digest.hexdigest())


# --- reading ---


@dataclass(frozen=True)
class _StoredChunk:
    """A stored chunk of a tensor: its first byte in `file`, its offsets in the tensor and its lengths."""

    file: str
    position: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that is stored in files. For complex numbers, `shape` has an additional last dimension of size 2, and
    `dtype` is real."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_complex: bool
    chunks: list[_StoredChunk] = field(default_factory=list)

    @property
    def original_shape(self) -> tuple[int, ...]:
        """The shape of the original tensor, real or complex."""
        return self.shape[:-1] if self.is_complex else self.shape

    @property
    def dtype_name(self) -> str:
        """The dtype in the notation of safetensors, such as "F32"; "C64" for complex numbers of 64 bits."""
        return f"C{16 * self.dtype.itemsize}" if self.is_complex else _DTYPE_NAMES[self.dtype]

    @property
    def original_dtype(self) -> torch.dtype:
        """The dtype of the original tensor, real or complex."""
        return self.dtype.to_complex() if self.is_complex else self.dtype


@dataclass(frozen=True)
class StoredTensors:
    """Index of the tensors whose chunks are stored in safetensors files in `folder`. Contains positions, not data."""

    folder: Path
    tensors: dict[str, StoredTensor]
    metadata: list[dict[str, str]]

    @classmethod
    def open(cls, folder: Path, names: Iterable[str]) -> StoredTensors:
        """Read the headers of the files `names` in `folder`.

        Raises CheckpointError for a file of a different format, and if elements of a tensor are missing.
        """
        tensors: dict[str, StoredTensor] = {}
        metadata = []
        for name in names:
            try:
                metadata.append(_add_tensors(tensors, folder, name))
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
                raise CheckpointError(
                    f"'{folder / name}' does not contain the tensors of a checkpoint: {type(error).__name__}: {error}. "
                    "Restore the file from a copy."
                ) from error
        for tensor, stored in tensors.items():
            found_elements = sum(prod(chunk.lengths) for chunk in stored.chunks)
            if found_elements != prod(stored.shape):
                raise CheckpointError(
                    f"The files in '{folder}' contain {found_elements} of {prod(stored.shape)} elements of tensor "
                    f"{tensor!r}. Restore the missing files from a copy."
                )
        return cls(folder, tensors, metadata)

    def read(self, chunks: Iterable[TensorChunk]) -> None:
        """Copy the stored elements of each chunk into its data. Dtypes are converted."""
        with _OpenFiles(self.folder) as files:
            for chunk in chunks:
                data = chunk.data
                # Writes to these views would change other elements or the sign of the numbers.
                is_special = is_expanded(data) or data.is_conj() or data.is_neg()
                target = torch.empty(data.shape, dtype=data.dtype, device="cpu") if is_special else data
                self._read_chunk(files, chunk, target)
                if is_special:
                    copy_into(data, target)

    def _read_chunk(self, files: _OpenFiles, chunk: TensorChunk, target: Tensor) -> None:
        stored, offsets = self.tensors[chunk.name], chunk.offsets
        if stored.is_complex:
            if not target.is_complex():
                raise ValueError(f"{chunk.name!r} is complex in the checkpoint and {target.dtype} in the model")
            target, offsets = torch.view_as_real(target), (*offsets, 0)
        for stored_chunk in stored.chunks:
            for block, overlap_slice in _read_overlap(files, stored_chunk, stored.dtype, offsets, tuple(target.shape)):
                target[overlap_slice].copy_(block)

    def read_as_real(self, name: str) -> Tensor:
        """Read and return tensor `name`; a complex tensor as a real tensor with an additional last dimension."""
        stored = self.tensors[name]
        result = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
        with _OpenFiles(self.folder) as files:
            for chunk in stored.chunks:
                for block, overlap_slice in _read_overlap(
                    files, chunk, stored.dtype, (0,) * len(stored.shape), stored.shape
                ):
                    result[overlap_slice].copy_(block)
        return result

    def read_tensor(self, name: str) -> Tensor:
        """Read and return tensor `name`."""
        tensor = self.read_as_real(name)
        return torch.view_as_complex(tensor) if self.tensors[name].is_complex else tensor


class _OpenFiles:
    """Context manager that opens each file at most once, and closes all files on exit."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, dict[str, BinaryIO]()

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        for file in self._files.values():
            file.close()

    def read(self, name: str, position: int, target: Tensor) -> None:
        """Fill contiguous `target` with the bytes from `position`."""
        if name not in self._files:
            self._files[name] = (self._folder / name).open("rb")
        file = self._files[name]
        file.seek(position)
        content = as_bytes(target).numpy().data
        if file.readinto(content) != len(content):  # type: ignore[attr-defined]
            raise ValueError(f"{name} ends within a tensor")


def _read_overlap(
    files: _OpenFiles, chunk: _StoredChunk, dtype: torch.dtype, offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """Yield the elements of `chunk` in the box (`offsets`, `lengths`), in blocks of rows, each with its index in the
    box.
    """
    starts = tuple(map(max, chunk.offsets, offsets))
    stops = tuple(
        min(first + length, other + other_length)
        for first, length, other, other_length in zip(chunk.offsets, chunk.lengths, offsets, lengths, strict=True)
    )
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return
    if not starts:
        scalar = torch.empty((), dtype=dtype, device="cpu")
        files.read(chunk.file, chunk.position, scalar)
        yield scalar, ()
        return
    row_shape = chunk.lengths[1:]
    row_bytes = prod(row_shape) * dtype.itemsize
    rows_per_block = max(1, _BLOCK_BYTES // row_bytes)
    in_row = tuple(
        slice(start - offset, stop - offset)
        for start, stop, offset in zip(starts[1:], stops[1:], chunk.offsets[1:], strict=True)
    )
    in_box = tuple(
        slice(start - offset, stop - offset)
        for start, stop, offset in zip(starts[1:], stops[1:], offsets[1:], strict=True)
    )
    for row in range(starts[0], stops[0], rows_per_block):
        end = min(row + rows_per_block, stops[0])
        block = torch.empty((end - row, *row_shape), dtype=dtype, device="cpu")
        files.read(chunk.file, chunk.position + (row - chunk.offsets[0]) * row_bytes, block)
        in_block = (slice(None), *in_row)
        yield block[in_block], (slice(row - offsets[0], end - offsets[0]), *in_box)


def _add_tensors(tensors: dict[str, StoredTensor], folder: Path, name: str) -> dict[str, str]:
    """Add the chunks in file `name` to `tensors`, and return the metadata of the file.

    Raises ValueError, TypeError, LookupError, AttributeError or RecursionError for a file of a different format.
    """
    header, start = _read_header(folder / name)
    size = (folder / name).stat().st_size
    metadata: dict[str, str] = header.pop("__metadata__", {})
    complex_names = json.loads(metadata.get(COMPLEX, "[]"))
    offsets = json.loads(metadata[_OFFSETS_KEY]) if _OFFSETS_KEY in metadata else {}
    for tensor, tensor_fields in header.items():
        lengths, dtype = tuple(map(operator.index, tensor_fields["shape"])), _DTYPES[tensor_fields["dtype"]]
        saved_offsets = tuple(map(operator.index, offsets[tensor]["saved_offsets"])) if offsets else (0,) * len(lengths)
        if min((*lengths, *saved_offsets, 0)) < 0:
            raise ValueError(f"tensor {tensor!r} has shape {list(lengths)} and offsets {list(saved_offsets)}")
        end = tuple(offset + length for offset, length in zip(saved_offsets, lengths, strict=True))
        first = start + operator.index(tensor_fields["data_offsets"][0])
        if not start <= first <= first + prod(lengths) * dtype.itemsize <= size:
            raise ValueError(f"the file does not contain all bytes of tensor {tensor!r}")
        stored_tensor = tensors.get(tensor) or StoredTensor(end, dtype, tensor in complex_names)
        shape = tuple(map(max, stored_tensor.shape, end))
        tensors[tensor] = replace(
            stored_tensor,
            shape=shape,
            chunks=[*stored_tensor.chunks, _StoredChunk(name, first, saved_offsets, lengths)],
        )
    return metadata


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the position of the first tensor."""
    with path.open("rb") as file:
        first = file.read(8)
        size = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 0 < size <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path.name} is not a safetensors file")
        header = json.loads(file.read(size))
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is not a safetensors file")
    return header, 8 + size
