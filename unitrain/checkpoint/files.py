"""The file format of checkpoints. torch and safetensors can read the files without unitrain.

A checkpoint written by rank 0 is a folder `step-000000123` with these files:

    model.safetensors   parameters and buffers under the user's names
    training.pt         all other state; read it with `torch.load(..., weights_only=True)`
    manifest.json       size and sha256 of these two files, whether all trainable weights are finite, versions, step,
                        epoch, results, configuration and run ID
    config.yaml         the text passed as `Trainer(config_text=...)`, if there is one; the manifest has no digest of it

`sharded_files` describes the checkpoints written by all ranks.

The folder is created under a temporary name and renamed when it is complete.

model.safetensors stores complex tensors as the real tensors of torch.view_as_real, because safetensors does not support
complex128, and supports complex64 only since version 0.6. Its metadata lists the names of these tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model
from torch import Tensor, nn

from unitrain import __version__
from unitrain.checkpoint.state_copy import plain_state
from unitrain.checkpoint.tensor_files import COMPLEX
from unitrain.errors import CheckpointError
from unitrain.modules.buffers import load_state
from unitrain.output import get_logger
from unitrain.regular_files import read_regular_file

MODEL, TRAINING, MANIFEST, CONFIG = "model.safetensors", "training.pt", "manifest.json", "config.yaml"
RUN_ID = "run_id"
"""Field of the manifest: a random ID of the run that wrote the checkpoint. It does not change when the run resumes from
its own output_dir."""
FINITE = "finite"
"""Field of the manifest: whether all trainable weights are finite. Missing in checkpoints of other programs."""
_FORMAT, _NEWEST_FORMAT = 1, 2  # of checkpoints written by rank 0, and of sharded ones
# Names of files in a manifest. Other names, such as ../model.safetensors, are not read.
_FILE_NAME_PATTERN = re.compile(
    r"model\.safetensors|training\.pt|(model|optimizer|average|local_sgd)/rank-\d{5,}(-\d+)?\.(safetensors|pt)"
)
_MAX_MANIFEST_BYTES = 64 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux for renameat2
_PROBE_BYTES = 1 << 20  # more than a full file system accepts after a failed write
# The second name is temporary, see `publish`.
_CHECKPOINT_NAME_PATTERN = re.compile(r"step-(\d{9,})|\.step-(\d{9,})\.replaced\.unfinished")
# Temporary names of folders that are being written or removed.
_REPLACED_SUFFIX = ".replaced.unfinished"
_UNFINISHED_NAME_PATTERN = re.compile(r"\.(step-\d{9,}(\.replaced)?|probe-\d+)\.unfinished")

_log = get_logger(__name__)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of `step`."""
    return folder / f"step-{step:09d}"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint that `list_checkpoints` returns; -1 for any other name."""
    match = _CHECKPOINT_NAME_PATTERN.fullmatch(path.name)
    return -1 if match is None else int(match[1] or match[2])


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, newest first. Other names, such as step-000000006.old, are ignored.

    If a process was killed between the two renames of `publish`, the checkpoint is returned under its temporary name.
    """
    found = [path for path in folder.glob("*step-*") if step_of(path) >= 0 and path.is_dir()]
    # A temporary name starts with a dot.
    checkpoints = [path for path in found if not path.name.startswith(".") or _is_missing_under_final_name(path)]
    return sorted(checkpoints, key=lambda path: (step_of(path), path), reverse=True)


def identify_checkpoints(folder: Path) -> dict[Path, tuple[int, int]]:
    """Return the inode and the modification time of the manifest of each checkpoint in `folder`, by path.

    Both change if a checkpoint is replaced. Checkpoints without a manifest are omitted.
    """
    found = {}
    for path in list_checkpoints(folder):
        with contextlib.suppress(OSError):
            status = (path / MANIFEST).stat()
            found[path] = status.st_ino, status.st_mtime_ns
    return found


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a checkpoint, possibly a corrupt or renamed one, and not a folder of checkpoints.

    The output folder of a run may contain a model.safetensors or a manifest.json of another program.
    """
    return step_of(path) >= 0 or ("files" in read_manifest(path) and not list_checkpoints(path))


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished checkpoints of killed runs from `folder`, and files or links with such names. Rename a
    checkpoint back if its process was killed between the two renames of `publish`.
    """
    for path in folder.glob(".*.unfinished"):
        if _is_missing_under_final_name(path):
            path.rename(_final_path(path))
        elif _UNFINISHED_NAME_PATTERN.fullmatch(path.name):
            remove(path)


def _is_missing_under_final_name(path: Path) -> bool:
    """Return whether `path` is a checkpoint that `publish` has renamed to a temporary name, and whose replacement does
    not exist."""
    return step_of(path) >= 0 and not os.path.lexists(_final_path(path)) and (path / MANIFEST).exists()


def _final_path(path: Path) -> Path:
    return path.with_name(path.name.removeprefix(".").removesuffix(_REPLACED_SUFFIX))


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of checkpoint `path`; an empty dictionary if it cannot be read."""
    try:
        manifest = json.loads(read_regular_file(path / MANIFEST, _MAX_MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def is_finite(path: Path) -> bool:
    """Return whether the trainable weights of checkpoint `path` are finite, according to its manifest."""
    return read_manifest(path).get(FINITE) is not False


def finite_first(checkpoints: list[Path]) -> list[Path]:
    """Return `checkpoints` in the same order, except that those whose weights are not finite are moved to the end."""
    return sorted(checkpoints, key=lambda path: not is_finite(path))


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements of the floating-point and complex tensors are finite. Other tensors are ignored."""
    for tensor in tensors:
        if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        # The minimum and the maximum need no copy. They are not implemented for 8-bit types.
        extremes = torch.aminmax(real.detach() if real.element_size() > 1 else real.detach().float())
        if not all(bool(extreme.isfinite()) for extreme in extremes):
            return False
    return True


def find_corruption(path: Path, first_file: int = 0, stride: int = 1) -> str | None:
    """Return the reason why checkpoint `path` is corrupt, or None if all checked files are present and match their
    digests.

    All files are checked by default. Several processes can divide the files of a sharded checkpoint: this call checks
    every `stride`-th file, starting with index `first_file`.
    """
    try:
        manifest = json.loads(read_regular_file(path / MANIFEST, _MAX_MANIFEST_BYTES))
        files = manifest["files"]
        step = step_of(path)
        if step >= 0 and "step" in manifest and manifest["step"] != step:
            return f"it is the checkpoint of step {manifest['step']} under the name of another step"
        if (unknown := next((name for name in files if not _FILE_NAME_PATTERN.fullmatch(name)), None)) is not None:
            return f"its manifest lists an unknown file {unknown!r}"
        if "ranks" in manifest and manifest["files_sha256"] != file_list_digest(files):
            return "the list of files in its manifest has changed since it was written"
        names = [TRAINING, *sorted({*files} - {TRAINING})] if "ranks" in manifest else [MODEL, TRAINING]
        for name in names[first_file::stride]:
            if (size := (path / name).stat().st_size) != files[name]["bytes"]:
                return f"{name} has {size} bytes instead of {files[name]['bytes']}"
            if sha256(path / name) != files[name]["sha256"]:
                return f"the content of {name} has changed since it was written"
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def find_newest_valid(
    path_or_folder: Path, *, required: bool, check: Callable[[Path], str | None] = find_corruption
) -> Path | None:
    """Return `path_or_folder` if it is a checkpoint, or else the newest valid checkpoint in this folder; None if there
    is none.

    A checkpoint whose weights are not finite is returned only if no other one is valid. `check` returns the reason why
    a checkpoint is corrupt, or None. It is called for each checkpoint, until a checkpoint is valid. Logs a warning for
    each skipped checkpoint, and if a different run wrote the next older checkpoint. Raises CheckpointError if all
    checkpoints are corrupt, if there is none and `required` is True, or if a checked one has a format that this version
    cannot read.
    """
    candidates = [path_or_folder] if is_checkpoint(path_or_folder) else list_checkpoints(path_or_folder)
    reasons: list[str | None] = []
    for path in finite_first(candidates):
        _check_format(path)
        reasons.append(reason := check(path))
        if reason is None:
            for skipped in candidates[: candidates.index(path)]:
                if not is_finite(skipped):
                    _log.warning("Checkpoint '%s' is skipped: its weights are not finite.", skipped)
            _warn_of_other_run(path, candidates)
            return path
        _log.warning("Checkpoint '%s' is skipped: %s.", path, reason)
    if candidates:
        raise CheckpointError(
            f"No checkpoint in '{path_or_folder}' is valid (checked: {len(candidates)}); in the newest one, "
            f"{reasons[0]}. Restore the files from a copy, or start again in another output_dir."
        )
    if required:
        raise CheckpointError(f"There is no checkpoint in '{path_or_folder}'. Give the output_dir of an earlier run.")
    return None


def _warn_of_other_run(path: Path, checkpoints: list[Path]) -> None:
    """Log a warning if `path` and the next older one of `checkpoints` with a manifest were written by different runs.

    Only these two checkpoints are compared, so that a run which continues deliberately from a copied checkpoint warns
    once.
    """
    older_checkpoints = checkpoints[checkpoints.index(path) + 1 :]
    older = next((checkpoint for checkpoint in older_checkpoints if read_manifest(checkpoint)), None)
    if older is None:
        return
    (run, folder), (older_run, older_folder) = map(_read_origin, (path, older))
    if None in (run, older_run) or run == older_run:
        return
    _log.warning(
        "Checkpoint '%s' was written by another run (ID %s, output_dir='%s') than '%s' (ID %s, output_dir='%s'). It is "
        "loaded, because it has the highest step. If it was copied here by mistake, remove it and start again: "
        "rm -r '%s'",
        path, run, folder, older.name, older_run, older_folder, path,
    )  # fmt: skip


def _read_origin(path: Path) -> tuple[Any, Any]:
    """Return the ID and the output folder of the run that wrote checkpoint `path`. Each is None if it is unknown."""
    manifest = read_manifest(path)
    config = manifest.get("config")
    return manifest.get(RUN_ID), config.get("output_dir") if isinstance(config, dict) else None


def _check_format(path: Path) -> None:
    """Raise CheckpointError if the checkpoint has a newer format. If it were skipped, the run would resume from an
    older checkpoint."""
    written = read_manifest(path).get("format")
    if isinstance(written, int) and written > _NEWEST_FORMAT:
        raise CheckpointError(
            f"Checkpoint '{path}' was written by a newer unitrain, in format {written}; this version reads up to "
            f"{_NEWEST_FORMAT}. Update unitrain, or start again in another output_dir."
        )


def write(target: Path, model: dict[str, Tensor], training: dict[str, Any], manifest_fields: dict[str, Any]) -> None:
    """Write a checkpoint atomically, and replace an existing `target`.

    `manifest_fields` are JSON values for the manifest, in addition to versions and digests. Raises CheckpointError for
    state that `torch.load(..., weights_only=True)` rejects. OSError and the errors of torch.save and safetensors are
    raised unchanged.
    """
    training = plain_state(training)
    unfinished = staging_folder(target)
    remove(unfinished)
    unfinished.mkdir()
    save_model_file(model, unfinished / MODEL)
    save_object(training, unfinished / TRAINING)
    files = {
        name: {"bytes": (unfinished / name).stat().st_size, "sha256": sha256(unfinished / name)}
        for name in (MODEL, TRAINING)
    }
    write_manifest(unfinished, _FORMAT, manifest_fields, files)
    for name in (MODEL, TRAINING, "."):
        flush(unfinished / name)
    publish(unfinished, target)


def staging_folder(target: Path) -> Path:
    """Return the folder in which `write` prepares the checkpoint `target`."""
    return target.with_name(f".{target.name}.unfinished")


def save_object(value: Any, path: Path) -> None:
    """Write `value` with torch.save. Raises OSError if the file system rejects the write, for example because it is
    full, and RuntimeError for other errors of torch.save.

    The RuntimeError that torch.save raises does not contain the errno. Therefore, this function then writes to the file
    itself, which raises the OSError.
    """
    try:
        torch.save(value, path)
        return
    except RuntimeError as error:
        text = str(error)
    # The error, whose traceback keeps the file open, is released here, so that the space can be freed.
    with path.open("ab") as file:
        file.write(bytes(_PROBE_BYTES))
    raise RuntimeError(text)


def write_manifest(
    staging_folder: Path, file_format: int, manifest_fields: dict[str, Any], files: dict[str, Any]
) -> None:
    """Write the manifest to folder `staging_folder` and flush it to disk. `files` are the sizes and digests by name.

    The field CONFIG, if there is one, is written to a separate file with this name.
    """
    manifest_fields = dict(manifest_fields)
    if (text := manifest_fields.pop(CONFIG, None)) is not None:
        (staging_folder / CONFIG).write_text(text, encoding="utf-8")
        flush(staging_folder / CONFIG)
    versions = {"format": file_format, "unitrain": __version__, "torch": torch.__version__}
    manifest = {**versions, **manifest_fields, "files": files}
    (staging_folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    flush(staging_folder / MANIFEST)


def publish(staging_folder: Path, target: Path) -> None:
    """Rename the complete folder `staging_folder` to `target`, replacing an existing `target`.

    If the file system cannot exchange two names, an existing `target` is first renamed to a temporary name. After a
    kill between these two renames, `list_checkpoints` returns the temporary name, and `remove_unfinished` restores
    `target`.
    """
    replaced = target.with_name(f".{target.name}{_REPLACED_SUFFIX}")
    # An existing `target` is corrupt, a dangling link, or a checkpoint of the same step, such as one that was written
    # before the results of the epoch were known.
    if os.path.lexists(target):
        if _exchange_names(staging_folder, target):
            flush(target.parent)
            remove(staging_folder)
            return
        remove(replaced)
        target.rename(replaced)
    staging_folder.rename(target)
    flush(target.parent)
    remove(replaced)


def _exchange_names(first: Path, second: Path) -> bool:
    """Exchange the names of two folders in one operation, so that a kill cannot lose both. Return False if the system
    or the file system, such as NFS, does not support it.
    """
    function = getattr(ctypes.CDLL(None), "renameat2", None)  # in glibc since 2.28
    if function is None:
        return False
    status: int = function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    return status == 0


def file_list_digest(files: dict[str, Any]) -> str:
    """Return the SHA-256 digest of the entry "files" of a manifest.

    The digest detects missing entries of a sharded checkpoint, whose number of files is not fixed.
    """
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


class _Weights:
    """Implements the module methods that safetensors calls to save and load shared tensors without duplicates.

    Complex tensors are read and written as real ones. `load_state_dict` loads into `model`; `complex_tensors` are the
    names of the complex tensors in the file.
    """

    def __init__(
        self, state: dict[str, Tensor], model: nn.Module | None = None, complex_tensors: Container[str] = ()
    ) -> None:
        self._state, self._model, self._complex_tensors = state, model, complex_tensors

    def state_dict(self) -> dict[str, Tensor]:
        return _copy_partial_views(
            {
                name: torch.view_as_real(value.resolve_conj()) if value.is_complex() else value.resolve_neg()
                for name, value in self._state.items()
            }
        )

    def load_state_dict(self, state: dict[str, Tensor], strict: bool = True) -> Any:
        """Load the tensors into the model."""
        assert self._model is not None
        return load_state(self._model, _restore_complex(state, self._complex_tensors), strict=strict)


def _copy_partial_views(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return `state` with copies of all tensors that are not contiguous or do not cover their storage.

    safetensors rejects slices, expanded views, the weights of an LSTM on a GPU, and tensors that share the memory of
    others in another layout. Identical views share one copy, so that tied parameters are stored once.
    """
    copies: dict[Any, Tensor] = {}
    separate = {}
    for name, value in state.items():
        if not value.numel() or _covers_storage(value):
            separate[name] = value
            continue
        view = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        if view not in copies:
            copies[view] = value.detach().clone(memory_format=torch.contiguous_format)
        separate[name] = copies[view]
    return separate


def _covers_storage(value: Tensor) -> bool:
    storage = value.untyped_storage()
    return value.is_contiguous() and value.data_ptr() == storage.data_ptr() and value.nbytes == storage.nbytes()


def complex_names(path: Path) -> list[str]:
    """Return the names of the complex tensors in safetensors file `path`, which are stored as real tensors."""
    with safe_open(path, framework="pt") as file:
        names: list[str] = json.loads((file.metadata() or {}).get(COMPLEX, "[]"))
    return names


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file written by unitrain or another program."""
    with torch.device("cpu"):  # safetensors 0.5 and older create tensors on the default device
        return _restore_complex(load_file(path), complex_names(path))


def save_model_file(state: dict[str, Tensor], path: Path) -> None:
    """Write the state dict of a model to safetensors file `path`. Tied parameters are written once."""
    names = [name for name, value in state.items() if value.is_complex()]
    metadata = {"format": "pt"}  # which `from_pretrained` of transformers requires
    if names:
        metadata[COMPLEX] = json.dumps(names)
    save_model(_Weights(state), str(path), metadata)  # type: ignore[arg-type]


def load_model_file(model: nn.Module, path: Path) -> None:
    """Load safetensors file `path` into `model`. Raises RuntimeError, ValueError or LookupError on a mismatch."""
    # safetensors' error message contains the class name, so use the name of the user's class.
    weights = type(type(model).__name__, (_Weights,), {})(model.state_dict(), model, complex_names(path))
    with torch.device("cpu"):  # as in `read_tensors`
        load_model(weights, str(path), strict=True)


def _restore_complex(state: dict[str, Tensor], names: Container[str]) -> dict[str, Tensor]:
    return {name: _as_complex(value) if name in names else value for name, value in state.items()}


def _as_complex(parts: Tensor) -> Tensor:
    """Return the complex tensor with these real and imaginary parts, with the alignment that complex numbers require.

    Real tensors in a safetensors file may have only half of this alignment, and torch then crashes when it reads
    complex128.
    """
    is_aligned = parts.data_ptr() % (2 * parts.element_size()) == 0
    return torch.view_as_complex(parts if is_aligned else parts.clone())


def remove(path: Path) -> None:
    """Remove a folder, a file or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Return the SHA-256 digest of a file. Raises OSError for a FIFO or device, which could block."""
    if not path.is_file():  # reading a FIFO or a device would block
        raise OSError(errno.EINVAL, f"'{path}' is not a regular file")
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def real_path(path: Path) -> Path:
    """Return the absolute path without symbolic links. Unlike Path.resolve, it accepts circular links."""
    return Path(os.path.realpath(path))


def flush(path: Path) -> None:
    """Flush the file or folder `path` to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
