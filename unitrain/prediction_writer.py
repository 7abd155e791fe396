"""Writes the model outputs of all ranks to files in dataset order, without holding them in memory.

Format: a folder with one NumPy file per output tensor and `predictions.json`. The rows of each file are the samples in
dataset order, so the files do not depend on the number of ranks, except for rounding errors in the outputs. With
stream="own", the rows are in rank order.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.lib import format as numpy_format
from numpy.typing import NDArray
from torch import Tensor

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.checkpoint.folder_lock import LOCK_FILE, FolderLock
from unitrain.checkpoint.writer import MAX_WAIT_PER_COLLECTIVE_SECONDS
from unitrain.data.order import StrideUnit
from unitrain.errors import CheckpointError, ConfigError, DataError
from unitrain.prediction import OutputSpec, check_same_specs, split_output

_ResultT = TypeVar("_ResultT")

MANIFEST = "predictions.json"
_UNFINISHED = ".unfinished"
_FORMAT = 1
_TOKEN_SUFFIX = ".token"
_OPEN_FLAGS = os.O_RDWR | os.O_CREAT
# The rows of per-rank files are copied to the complete files in chunks of about this size.
_COPY_CHUNK_BYTES = 1 << 24
_NUMPY_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128,
}  # fmt: skip


@dataclass(frozen=True)
class PredictionWriter:
    """Folder to which `Trainer.predict(data, writer=...)` writes the outputs of the model.

    Each output tensor becomes a file such as `output.npy` or `output.logits.npy`, in NumPy's format, with one row per
    sample in dataset order. Read it with `numpy.load(path, mmap_mode="r")`. `predictions.json` contains the number of
    samples and, for each file, the path in the output, the dtype and the shape. NumPy has no bfloat16 and float8, so
    these outputs are written as float32, which represents them exactly.

    Ranks write their rows as they compute them. All hosts must see the folder. `folder` appears when all files are
    complete; until then, the files are in a folder whose name has the additional suffix `.unfinished`, which only one
    job can use at a time. An existing folder is an error, unless `overwrite` is True and the folder contains
    predictions or is empty.
    """

    folder: str | Path
    overwrite: bool = False

    def __post_init__(self) -> None:
        fix = 'Use PredictionWriter("runs/first/predictions")'
        object.__setattr__(self, "folder", validation.check_path("PredictionWriter(folder)", self.folder, fix))
        validation.check_boolean("PredictionWriter.overwrite", self.overwrite)
        if Path(self.folder).name in ("", ".."):
            raise ConfigError(
                f"PredictionWriter(folder) must be a path that ends in a name, got '{self.folder}'. {fix}."
            )

    @contextmanager
    def open(
        self, communicator: Communicator, first_row: int | None, stride_unit: StrideUnit | None
    ) -> Iterator[PredictionFiles]:
        """Context manager that yields the files of a prediction. All ranks must call this method.

        `first_row` and `stride_unit` are `first_sample` and `stride_unit` of the EvaluationShard. If the context ends
        with an exception, the unfinished files are removed. Raises on every rank: ConfigError if the folder exists and
        must not be replaced, is not visible to a rank, or is used by another program; DataError if it cannot be
        created; and CheckpointError if another job writes to it.
        """
        folder = Path(self.folder)
        unfinished_folder = folder.with_name(folder.name + _UNFINISHED)
        token = communicator.broadcast_object(os.urandom(8).hex()) + _TOKEN_SUFFIX
        lock = FolderLock(unfinished_folder)

        def check_folder() -> None:
            if folder.exists() or folder.is_symlink():
                if not self.overwrite:
                    raise ConfigError(
                        f"The folder of PredictionWriter, '{folder}', already exists. Choose another folder, or "
                        f"replace it with PredictionWriter({str(folder)!r}, overwrite=True)."
                    )
                if not _is_replaceable(folder):
                    raise ConfigError(
                        f"PredictionWriter('{folder}', overwrite=True) replaces only a folder of predictions, but "
                        f"'{folder}' contains no {MANIFEST}. Choose another folder."
                    )

        def try_to_create() -> bool:
            check_folder()
            if unfinished_folder.is_symlink():
                raise FileExistsError(errno.EEXIST, "It is a symbolic link", str(unfinished_folder))
            unfinished_folder.mkdir(parents=True, exist_ok=True)
            try:
                if not lock.acquire(MAX_WAIT_PER_COLLECTIVE_SECONDS):  # raises CheckpointError at its time limit
                    return False
            except FileNotFoundError:  # the other job has renamed or removed the folder of unfinished files
                return False
            check_folder()  # another job may have completed the folder
            leftover_files = [path for path in unfinished_folder.iterdir() if path.name != LOCK_FILE]  # of a killed job
            known_files = [
                path for path in leftover_files if path.suffix in (".npy", _TOKEN_SUFFIX) or path.name == MANIFEST
            ]
            foreign = next((path for path in leftover_files if path not in known_files), None)
            if foreign is not None:
                raise ConfigError(
                    f"PredictionWriter('{folder}') first writes to '{unfinished_folder}', which contains another file, "
                    f"'{foreign.name}'. Move this file, or choose another folder."
                )
            for path in leftover_files:
                path.unlink()
            (unfinished_folder / token).touch()
            return True

        def check_visible() -> None:
            if not (unfinished_folder / token).exists():
                raise ConfigError(
                    f"PredictionWriter('{folder}') is not visible to rank {communicator.rank}, because its host has "
                    "another file system. Use a folder that all hosts share."
                )

        files = PredictionFiles(folder, unfinished_folder, communicator, first_row, stride_unit)
        is_created = False
        try:
            # Rank 0 may wait for the lock longer than the collective timeout, so it periodically broadcasts whether it
            # has the lock.
            while not communicator.broadcast_object(_run_on_rank_zero(communicator, folder, try_to_create)):
                pass
            is_created = True
            _run_on_all_ranks(communicator, folder, check_visible)
            _run_on_rank_zero(communicator, folder, (unfinished_folder / token).unlink)
            yield files
        except BaseException:
            files.close()
            if communicator.rank == 0 and is_created:
                shutil.rmtree(unfinished_folder, ignore_errors=True)
            lock.release()
            if communicator.rank == 0 and not is_created:
                with suppress(OSError):  # the folder may contain files of another job or program
                    unfinished_folder.rmdir()
            raise
        lock.release()


class PredictionFiles:
    """The files of one prediction, with the interface of `unitrain.prediction.Outputs`."""

    def __init__(
        self,
        folder: Path,
        unfinished_folder: Path,
        communicator: Communicator,
        first_row: int | None,
        stride_unit: StrideUnit | None,
    ) -> None:
        self._folder, self._unfinished_folder, self._communicator = folder, unfinished_folder, communicator
        # If `first_row` is None, the rows are first written to files of this rank, and copied by `finish`.
        self._first_row, self._stride_unit = first_row, stride_unit
        self._specs: list[OutputSpec] = []
        self._descriptors: list[int] = []
        self._batch_rows: list[int] = []
        self._rows = 0

    def add_empty(self) -> None:
        """Record a batch without samples, for which the model is not called."""
        self._batch_rows.append(0)

    def add(self, output: Any, samples: int) -> None:
        """Write the output of a batch of `samples` samples.

        Raises ModelError if the output cannot be concatenated, and DataError if it cannot be written.
        """
        _, specs, tensors = split_output(output, samples)
        if not self._descriptors:
            self._specs = specs
            paths = [self._path(index, is_final=self._first_row is not None) for index in range(len(specs))]
            self._write(lambda: self._descriptors.extend(os.open(path, _OPEN_FLAGS, 0o666) for path in paths))
        check_same_specs("batches", self._specs, specs)

        def write_rows() -> None:
            for index, (descriptor, tensor) in enumerate(zip(self._descriptors, tensors, strict=True)):
                content = memoryview(_to_numpy(tensor).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
                _write_at(descriptor, content, self._offset(index, self._rows))

        self._write(write_rows)
        self._rows += samples
        self._batch_rows.append(samples)

    def finish(self) -> Path:
        """Complete the files, and return the folder. All ranks must call this method.

        Raises ModelError on all ranks if the outputs differ between ranks, and DataError if there are no samples or the
        files cannot be written.
        """
        communicator, folder = self._communicator, self._folder
        row_counts = self._batch_rows if self._stride_unit == "batches" else [self._rows]
        summaries = communicator.allgather_object((self._specs, bool(self._rows), row_counts))
        specs_by_rank = [specs for specs, has_rows, _ in summaries if has_rows]
        if not specs_by_rank:
            raise DataError("predict got data without samples. Pass data with at least one sample.")
        for specs in specs_by_rank:
            check_same_specs("ranks", specs_by_rank[0], specs)
        self._specs = specs_by_rank[0]
        total_rows = sum(sum(row_counts_of_rank) for _, _, row_counts_of_rank in summaries)
        if self._first_row is None:
            rows = _target_rows([row_counts for _, _, row_counts in summaries], self._stride_unit, communicator.rank)
            _run_on_all_ranks(communicator, folder, lambda: self._copy_rows(rows))
        _run_on_all_ranks(communicator, folder, self._flush_and_close)
        _run_on_rank_zero(communicator, folder, lambda: self._complete(total_rows))
        return folder

    def close(self) -> None:
        """Close the files of this rank."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)

    def _path(self, index: int, *, is_final: bool) -> Path:
        name = _file_names(self._specs)[index]
        return self._unfinished_folder / (name if is_final else f"rank-{self._communicator.rank}.{name}")

    def _offset(self, index: int, row: int) -> int:
        """Return the byte position of a row of this rank in the file of an output."""
        spec = self._specs[index]
        if self._first_row is None:
            return row * _row_bytes(spec)
        return len(_header(spec, 0)) + (self._first_row + row) * _row_bytes(spec)

    def _copy_rows(self, target_rows: NDArray[np.int64]) -> None:
        """Copy row i of this rank's files to row target_rows[i] of the complete files, for all i. Delete this rank's
        files."""
        for index, descriptor in enumerate(self._descriptors):
            spec, header = self._specs[index], len(_header(self._specs[index], 0))
            row_bytes = _row_bytes(spec)
            step = max(1, _COPY_CHUNK_BYTES // max(1, row_bytes))
            with _open_file(self._path(index, is_final=True)) as target:
                for first in range(0, len(target_rows) if row_bytes else 0, step):
                    positions = target_rows[first : first + step]
                    content = memoryview(os.pread(descriptor, len(positions) * row_bytes, first * row_bytes))
                    # Write each run of consecutive rows at once.
                    bounds = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
                    for start, stop in pairwise(bounds):
                        part = content[start * row_bytes : stop * row_bytes]
                        _write_at(target, part, header + int(positions[start]) * row_bytes)
                os.fsync(target)
            self._path(index, is_final=False).unlink()

    def _flush_and_close(self) -> None:
        for descriptor in self._descriptors:
            os.fsync(descriptor)
        self.close()

    def _complete(self, total_rows: int) -> None:
        """Write the headers and the manifest, and rename the folder. Rank 0 calls it when all rows are written."""
        outputs = []
        for spec, name in zip(self._specs, _file_names(self._specs), strict=True):
            path = self._unfinished_folder / name
            with _open_file(path) as file:
                header = _header(spec, total_rows)
                _write_at(file, memoryview(header), 0)
                os.ftruncate(file, len(header) + total_rows * _row_bytes(spec))
                os.fsync(file)
            outputs.append(
                {"path": spec.path, "file": name, "dtype": str(_numpy_dtype(spec)), "shape": [total_rows, *spec.shape]}
            )
        manifest = {"format": _FORMAT, "samples": total_rows, "outputs": outputs}
        (self._unfinished_folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        folder = self._folder
        if (folder.exists() or folder.is_symlink()) and not _is_replaceable(folder):
            raise FileExistsError(errno.EEXIST, "Another program has written to it", str(folder))
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        elif folder.exists() or folder.is_symlink():
            folder.unlink()
        self._unfinished_folder.rename(folder)
        (folder / LOCK_FILE).unlink(missing_ok=True)  # removed last, so that no other job can lock the folder earlier

    def _write(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            raise _data_error(self._folder, error) from error


def _is_replaceable(folder: Path) -> bool:
    """Return whether an existing path is a folder that contains predictions or is empty."""
    return folder.is_dir() and ((folder / MANIFEST).is_file() or not any(folder.iterdir()))


def _target_rows(row_counts: Sequence[Sequence[int]], unit: StrideUnit | None, rank: int) -> NDArray[np.int64]:
    """Return the positions of the rows of `rank` in the complete file, int64 [rows].

    With `unit` "samples", samples were assigned to ranks round-robin, and row_counts[rank] contains the number of rows.
    With "batches", batches were assigned round-robin, and row_counts[rank][i] is the number of rows of the rank's batch
    i. With None, the rows of rank r follow the rows of ranks 0 to r - 1.
    """
    num_rows = sum(row_counts[rank])
    if unit == "samples":
        return np.arange(num_rows, dtype=np.int64) * len(row_counts) + rank
    if unit is None:
        return np.arange(num_rows, dtype=np.int64) + sum(sum(counts) for counts in row_counts[:rank])
    lengths = np.zeros((max(map(len, row_counts)), len(row_counts)), dtype=np.int64)
    for column, counts in enumerate(row_counts):
        lengths[: len(counts), column] = counts
    ends = lengths.reshape(-1).cumsum().reshape(lengths.shape)
    starts = (ends - lengths)[: len(row_counts[rank]), rank]
    return np.concatenate(
        [np.arange(start, start + length) for start, length in zip(starts.tolist(), row_counts[rank], strict=True)]
        or [np.empty(0, dtype=np.int64)]
    )


def _file_names(specs: Sequence[OutputSpec]) -> list[str]:
    """Return a file name for each output, such as "output.logits.npy" for the path "output['logits']"."""
    names: list[str] = []
    for spec in specs:
        plain = re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", spec.path)
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", plain)
        repeated = sum(previous_name == name or previous_name.startswith(f"{name}~") for previous_name in names)
        names.append(f"{name}~{repeated}" if repeated else name)
    return [f"{name}.npy" for name in names]


def _numpy_dtype(spec: OutputSpec) -> np.dtype[Any]:
    dtype = spec.dtype if spec.dtype in _NUMPY_DTYPES else torch.float32
    return np.dtype(torch.empty(0, dtype=dtype, device="cpu").numpy().dtype)


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    return np.ascontiguousarray((tensor if tensor.dtype in _NUMPY_DTYPES else tensor.float()).numpy())


def _row_bytes(spec: OutputSpec) -> int:
    return math.prod(spec.shape) * _numpy_dtype(spec).itemsize


def _header(spec: OutputSpec, num_rows: int) -> bytes:
    """Return the header of a NumPy file. Its length does not depend on `num_rows`, because NumPy pads it."""
    file = io.BytesIO()
    description = numpy_format.dtype_to_descr(_numpy_dtype(spec))
    header = {"descr": description, "fortran_order": False, "shape": (num_rows, *spec.shape)}
    numpy_format.write_array_header_1_0(file, header)
    return file.getvalue()


@contextmanager
def _open_file(path: Path) -> Iterator[int]:
    """Context manager that opens a file for reading and writing, without a buffer, because other ranks write to the
    same file. Yields the file descriptor."""
    descriptor = os.open(path, _OPEN_FLAGS, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


def _data_error(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"The outputs cannot be written to PredictionWriter('{folder}'): {type(error).__name__}: {error}. Check that "
        "the folder is writable and has room, or choose another folder."
    )


def _run_on_all_ranks(communicator: Communicator, folder: Path, action: Callable[[], _ResultT]) -> _ResultT:
    """Call `action` on every rank, and return its result. If it raises OSError on any rank, raise DataError on every
    rank."""

    def call() -> _ResultT:
        try:
            return action()
        except CheckpointError:  # of the lock; a subclass of OSError
            raise
        except OSError as error:
            raise _data_error(folder, error) from error

    return call_on_all_ranks(communicator, call)


def _run_on_rank_zero(communicator: Communicator, folder: Path, action: Callable[[], _ResultT]) -> _ResultT | None:
    return _run_on_all_ranks(communicator, folder, lambda: action() if communicator.rank == 0 else None)
