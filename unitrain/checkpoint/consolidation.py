"""Write the model of a checkpoint to one safetensors file, which plain torch can load."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError

from unitrain.checkpoint import files, sharded_files
from unitrain.checkpoint.tensor_files import WrittenFile, write_tensors
from unitrain.errors import CheckpointError


def consolidate_model(path: Path, file: Path, *, average: bool) -> WrittenFile:
    """Write the weights of the valid checkpoint `path`, or its averaged weights if `average` is True, to the new
    safetensors file `file`.

    Tensors of a sharded checkpoint are read and written one at a time. Tied parameters are written once, and the
    metadata maps their other names to the name in the file, as `safetensors.torch.save_model` does. Raises
    CheckpointError if `file` exists or cannot be written, or if `average` is True and the checkpoint has no averaged
    weights.
    """
    if file.exists():
        raise CheckpointError(f"'{file}' already exists. Use another file name.")
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        unfinished.unlink(missing_ok=True)
        written = _write_model(path, unfinished, average=average)
        unfinished.rename(file)
    except CheckpointError:  # a subclass of OSError
        raise
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"File '{file}' cannot be written: {reason}. Use another folder.") from None
    finally:
        with suppress(OSError):  # the folder may be read-only
            unfinished.unlink(missing_ok=True)
    return written


def _write_model(path: Path, file: Path, *, average: bool) -> WrittenFile:
    is_sharded = sharded_files.is_sharded(path)
    if is_sharded:
        folder = sharded_files.AVERAGE_FOLDER if average else sharded_files.MODEL_FOLDER
        stored = sharded_files.open_tensors(path, folder)
        if stored.tensors:
            return write_tensors(file, stored, sharded_files.tied_names(path, folder))
    elif not average:
        shutil.copyfile(path / files.MODEL, file)
    else:
        training = torch.load(path / files.TRAINING, map_location="cpu", weights_only=True, mmap=True)
        if "average" in training:
            files.save_model_file(training["average"]["model"], file)
    if not file.exists():
        raise CheckpointError(
            f"Checkpoint '{path}' has no averaged weights, because its run had no ema_decay. Leave --average out."
            if average
            else f"Checkpoint '{path}' contains no weights: its model has neither parameters nor buffers."
        )
    files.flush(file)
    return WrittenFile(file.stat().st_size, files.sha256(file))
