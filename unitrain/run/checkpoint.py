"""Checkpoints that any backend and any number of ranks can go on from.

A checkpoint is a folder `step-000000123` with three files. `model.safetensors` holds the parameters and buffers under
the user's own names, `training.pt` the rest (read it with `torch.load(..., weights_only=True)`), and `manifest.json`
the size and sha256 of both. It is written under another name and renamed when it is complete, so a folder of that name
is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_model, save_model
from torch import nn

from unitrain.backends.base import Communicator, raise_together
from unitrain.errors import CheckpointError
from unitrain.run.plain_state import plain_state

MODEL, TRAINING, MANIFEST = "model.safetensors", "training.pt", "manifest.json"
WRITABLE = "Check that the folder is writable and has room, or choose another output_dir."
_FORMAT = 1

_ResultT = TypeVar("_ResultT")
_log = logging.getLogger(__name__)


def on_rank_zero(communicator: Communicator, task: str, fix: str, action: Callable[[], _ResultT]) -> _ResultT | None:
    """Run `action` on rank 0 and return its result there, None elsewhere. All ranks call it, and learn of a failure.

    Raises CheckpointError on every rank when `action` fails: "Cannot `task`: ... `fix`".
    """
    result: _ResultT | None = None
    error: CheckpointError | None = None
    if communicator.rank == 0:
        try:
            result = action()
        except CheckpointError as caught:
            error = caught
        except Exception as caught:  # whatever it is, the other ranks would wait for ever if it left on this one alone
            error = CheckpointError(f"Cannot {task}: {caught}. {fix}")
            error.__cause__ = caught
    raise_together(communicator, error)
    return result


def prepare_folder(folder: Path, communicator: Communicator, *, resume: bool) -> None:
    """Make `folder` and prove that it can be written to, before training begins. All ranks call it.

    Raises CheckpointError on every rank when it cannot, or when it holds a run's checkpoints and `resume` is False.
    """

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for unfinished in folder.glob(".*.unfinished"):
            shutil.rmtree(unfinished)
        probe = folder / ".probe.unfinished"
        probe.mkdir()
        probe.rmdir()
        found = _candidates(folder)
        if found and not resume:
            raise CheckpointError(
                f"Output folder '{folder}' already holds a run, up to {found[0].name}. "
                "Use TrainConfig(resume=True) to go on from there, or another output_dir."
            )

    on_rank_zero(communicator, f"write to output folder '{folder}'", WRITABLE, prepare)


def save(folder: Path, step: int, model: nn.Module, training: dict[str, Any], communicator: Communicator) -> None:
    """Write the checkpoint of `step`: whole or not at all. All ranks call it; rank 0's `model` and `training` count.

    `training` may hold tensors, numbers (numpy's become Python's), strings and containers of these. Raises
    CheckpointError on every rank, also for anything in it that would not load back.
    """
    target = folder / f"step-{step:09d}"
    on_rank_zero(communicator, f"write checkpoint '{target}'", WRITABLE, lambda: _write(target, model, training))


def restore(
    where: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    communicator: Communicator,
    *,
    required: bool,
) -> dict[str, Any] | None:
    """Load the newest sound checkpoint in `where`, or the one that `where` is, and return its `training` part.

    All ranks call it and get the same answer, None where there is no checkpoint and none is `required`. Only rank 0
    reads files, and only its `model` and `optimizer` are loaded: `distributed_model` and `distributed_optimizer` pass
    them on. Every rank's `scheduler` is loaded. Raises CheckpointError on every rank when nothing sound is found, or
    when it does not fit.
    """

    def load() -> dict[str, Any] | None:
        path = _newest_sound(where, required=required)
        return None if path is None else _load(path, model, optimizer, scheduler)

    fix = "Read it with the versions of torch and unitrain that wrote it."
    training: dict[str, Any] | None = on_rank_zero(communicator, f"restore from '{where}'", fix, load)
    training = communicator.broadcast_object(training)
    if training is not None and scheduler is not None and communicator.rank != 0:
        scheduler.load_state_dict(training["scheduler"])
    return training


def damage(path: Path) -> str | None:
    """Return what is wrong with the files of checkpoint `path`, or None when all are there and unchanged."""
    try:
        files = json.loads((path / MANIFEST).read_text())["files"]
        for name in (MODEL, TRAINING):
            if (found := (path / name).stat().st_size) != files[name]["bytes"]:
                return f"{name} has {found} bytes instead of {files[name]['bytes']}"
            if _sha256(path / name) != files[name]["sha256"]:
                return f"the content of {name} has changed since it was written"
    except (OSError, ValueError, LookupError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _candidates(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir()), reverse=True)


def _newest_sound(where: Path, *, required: bool) -> Path | None:
    candidates = [where] if (where / MODEL).exists() or (where / MANIFEST).exists() else _candidates(where)
    for path in candidates:
        _refuse_newer(path)
        wrong = damage(path)
        if wrong is None:
            return path
        _log.warning("Checkpoint '%s' is skipped: %s.", path, wrong)
    if candidates:
        raise CheckpointError(
            f"None of the {len(candidates)} checkpoints in '{where}' is sound; in the newest, {damage(candidates[0])}. "
            "Restore the files from a copy, or start again in another output_dir."
        )
    if required:
        raise CheckpointError(f"There is no checkpoint in '{where}'. Give the output_dir of an earlier run.")
    return None


def _refuse_newer(path: Path) -> None:
    """Raise CheckpointError for a checkpoint of a later format, instead of going on from an older one beside it."""
    try:
        written = json.loads((path / MANIFEST).read_text())["format"]
    except (OSError, ValueError, LookupError, TypeError):
        return  # damaged, which is told by what is made of it
    if isinstance(written, int) and written > _FORMAT:
        raise CheckpointError(
            f"Checkpoint '{path}' was written by a newer unitrain, in format {written}; this one knows {_FORMAT}. "
            "Update unitrain, or start again in another output_dir."
        )


def _write(target: Path, model: nn.Module, training: dict[str, Any]) -> None:
    if target.exists() and damage(target) is None:
        return  # the same step of the same run: it was resumed there and had nothing left to do
    training = plain_state(training)
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    save_model(model, str(unfinished / MODEL))
    torch.save(training, unfinished / TRAINING)
    files = {
        name: {"bytes": (unfinished / name).stat().st_size, "sha256": _sha256(unfinished / name)}
        for name in (MODEL, TRAINING)
    }
    manifest = {"format": _FORMAT, "torch": torch.__version__, "files": files}
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for name in (MODEL, TRAINING, MANIFEST, "."):
        _flush(unfinished / name)
    if target.exists():
        shutil.rmtree(target)  # damaged, or it would have been kept above
    unfinished.rename(target)
    _flush(target.parent)


def _load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
    training: dict[str, Any] = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    if (training["scheduler"] is None) != (scheduler is None):
        has, lacks = ("no", "one") if scheduler is not None else ("a", "none")
        raise CheckpointError(
            f"Checkpoint '{path}' has {has} scheduler and this run has {lacks}. Build the run that wrote it."
        )
    try:
        load_model(model, str(path / MODEL), strict=True)
        optimizer.load_state_dict(training.pop("optimizer"))
        if scheduler is not None:
            scheduler.load_state_dict(training["scheduler"])
    except (RuntimeError, ValueError, LookupError) as error:
        found = " ".join(str(error).split())
        raise CheckpointError(
            f"Checkpoint '{path}' does not fit {type(model).__name__} with {type(optimizer).__name__}: {found}. "
            "Build the model and the optimizer that wrote it."
        ) from error
    return training


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Wait until `path`, a file or a folder, is on the disk and not only in its cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
