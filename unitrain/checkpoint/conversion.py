"""Read checkpoints of other programs, to resume from them.

Supported formats: a state dictionary (`model.state_dict()`, optionally with DDP's prefix `module.`), a dictionary saved
by a training script (keys "model", "optimizer", "epoch" or common variants), safetensors files, Lightning's .ckpt
files, and folders of Accelerate's `save_state`.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from unitrain.checkpoint.files import read_tensors
from unitrain.errors import CheckpointError
from unitrain.validation import describe_value, is_finite_number

# Common keys, compared case-insensitively. The first one found is used.
_MODEL_KEYS = ("model", "model_state_dict", "state_dict", "model_state", "module", "net", "network", "weights")
_OPTIMIZER_KEYS = ("optimizer", "optimizer_state_dict", "optimizer_state", "optimizer_states", "optim")
_SCHEDULER_KEYS = ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_schedulers", "lr_scheduler_state_dict")
_EPOCH_KEYS = ("epoch", "epochs", "epochs_run")
_STEP_KEYS = ("global_step", "step", "steps", "iteration", "num_steps")
_DDP_PREFIX = "module."


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A checkpoint of another program: its model, and other state if present. `parse_count` checks the counts."""

    format_name: str
    model: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    scheduler: dict[str, Any] | None
    epoch: Any
    step: Any


def read_foreign_checkpoint(path: Path) -> ForeignCheckpoint:
    """Read a checkpoint of another program without executing code in it.

    Raises CheckpointError for unknown formats, unreadable files, and tensors that a checkpoint cannot contain.
    """
    checkpoint = _read_accelerate_folder(path) if path.is_dir() else _read_file(path)
    for name, tensor in checkpoint.model.items():
        kind = (
            "has no data (device 'meta')" if tensor.is_meta
            else "is a nested tensor" if tensor.is_nested
            else "is quantized" if tensor.is_quantized
            else f"is sparse ({tensor.layout})" if tensor.layout != torch.strided
            else None
        )  # fmt: skip
        if kind is not None:
            raise CheckpointError(
                f"Tensor {name!r} of '{path}' {kind}, but a checkpoint contains dense tensors. Save a dense tensor, "
                "for example with: tensor.to_dense()"
            )
    return checkpoint


def _read_file(path: Path) -> ForeignCheckpoint:
    if path.suffix == ".safetensors":
        return ForeignCheckpoint("safetensors file", _strip_ddp_prefix(_read_safetensors(path)), None, None, None, None)
    loaded = _load(path)
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"'{path}' contains an object of class {type(loaded).__name__}, not a dictionary. Save "
            "model.state_dict() instead of the model."
        )
    if _is_state_dict(loaded):
        return ForeignCheckpoint("state dictionary", _strip_ddp_prefix(loaded), None, None, None, None)
    return _read_dictionary(path, loaded)


def _read_dictionary(path: Path, loaded: dict[str, Any]) -> ForeignCheckpoint:
    entries = {str(name).lower(): value for name, value in loaded.items()}
    model = _first_present(entries, _MODEL_KEYS)
    if not (isinstance(model, dict) and _is_state_dict(model)):
        raise CheckpointError(
            f"'{path}' does not contain the state dictionary of a model under a known key. Its keys are: "
            f"{', '.join(map(str, loaded))}. "
            'Save it as {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}.'
        )
    is_lightning = "pytorch-lightning_version" in entries
    epoch, step = _first_present(entries, _EPOCH_KEYS), _first_present(entries, _STEP_KEYS)
    if is_lightning:
        epoch = _lightning_epochs(entries.get("loops"), epoch)
    format_name = "Lightning checkpoint" if is_lightning else "dictionary of a training script"
    optimizer = _optimizer_state(path, _first_present(entries, _OPTIMIZER_KEYS))
    scheduler = _single_state(path, "scheduler", _first_present(entries, _SCHEDULER_KEYS))
    return ForeignCheckpoint(format_name, _strip_ddp_prefix(model), optimizer, scheduler, epoch, step)


def _read_accelerate_folder(folder: Path) -> ForeignCheckpoint:
    weights = folder / "model.safetensors"
    if weights.exists():
        model = _read_safetensors(weights)
    elif (weights := folder / "pytorch_model.bin").exists():
        model = _load(weights)
        if not (isinstance(model, dict) and _is_state_dict(model)):
            raise CheckpointError(f"'{weights}' does not contain the state dictionary of a model. Pass another folder.")
    else:
        raise CheckpointError(
            f"'{folder}' has neither model.safetensors nor pytorch_model.bin, which Accelerate's save_state "
            "writes. Pass the path of a file in the folder."
        )
    files = [folder / f"{name}.bin" for name in ("optimizer", "scheduler")]
    states = [_load(file) if file.exists() else None for file in files]
    optimizer, scheduler = _optimizer_state(files[0], states[0]), _single_state(files[1], "scheduler", states[1])
    return ForeignCheckpoint("Accelerate folder", _strip_ddp_prefix(model), optimizer, scheduler, None, None)


def _check_regular(path: Path) -> None:
    """Raise CheckpointError for a FIFO or a device, which could block."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"'{path}' is not a regular file. Copy its content to a file.")


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    _check_regular(path)
    try:
        return read_tensors(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}. Pass a valid safetensors file.") from error


def _load(path: Path) -> Any:
    _check_regular(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise CheckpointError(
            f"'{path}' cannot be read without executing code from it: {reason} Save only tensors, numbers and strings, "
            "in the program that wrote it: torch.save(model.state_dict(), path)."
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise CheckpointError(f"'{path}' cannot be read: {error}. Pass a file that torch.save wrote.") from error


def _is_state_dict(value: dict[Any, Any]) -> bool:
    return bool(value) and all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items())


def _strip_ddp_prefix(model: dict[str, Tensor]) -> dict[str, Tensor]:
    if all(name.startswith(_DDP_PREFIX) for name in model):
        return {name.removeprefix(_DDP_PREFIX): value for name, value in model.items()}
    return dict(model)


def _first_present(entries: dict[str, Any], names: tuple[str, ...]) -> Any:
    return next((entries[name] for name in names if name in entries), None)


def _optimizer_state(path: Path, contents: Any) -> dict[str, Any] | None:
    state = _single_state(path, "optimizer", contents)
    if state is not None and not (isinstance(state.get("state"), dict) and isinstance(state.get("param_groups"), list)):
        raise _not_a_state(path, "optimizer", state)
    return state


def _single_state(path: Path, kind: str, contents: Any) -> dict[str, Any] | None:
    """Return the state of the optimizer or scheduler (`kind`), or the single state in a list such as Lightning's
    `optimizer_states`; None if there is none.

    Raises CheckpointError for a list of several states, and for other objects.
    """
    if isinstance(contents, (list, tuple)):
        if len(contents) > 1:
            raise CheckpointError(
                f"'{path}' has {len(contents)} optimizers or schedulers, but unitrain supports one. Save a checkpoint "
                "with one of each."
            )
        contents = contents[0] if contents else None
    if not (contents is None or isinstance(contents, dict)):
        raise _not_a_state(path, kind, contents)
    return contents


def _not_a_state(path: Path, kind: str, found: Any) -> CheckpointError:
    return CheckpointError(
        f"The {kind} of '{path}' must be a state dictionary, got {describe_value(found)}. Save {kind}.state_dict(), "
        f"or save the file without the {kind}."
    )


def _lightning_epochs(loops: Any, epoch: Any) -> Any:
    """Return the number of completed epochs in a Lightning checkpoint with the entries "loops" and "epoch".

    "epoch" is the index of the current epoch. Lightning increments it after it has written the checkpoint of the end of
    an epoch. Versions before 1.6 store the number of completed epochs.
    """
    try:
        fit_loop = loops["fit_loop"]
        processed = int(fit_loop["epoch_progress"]["current"]["processed"])
        batches = fit_loop["epoch_loop.batch_progress"]
        # Within the last batch of an epoch, the epoch is not counted yet.
        is_at_end = batches["is_last_batch"] and batches["current"]["completed"] < batches["current"]["processed"]
    except (KeyError, TypeError, ValueError):
        return epoch
    return processed + bool(is_at_end)


def parse_count(path: Path, name: str, value: Any) -> int:
    """Return the number of epochs or steps (`name`) that is stored in `path`, or 0 for None. Raises CheckpointError for
    a value that is not a whole number from 0 to 2**63 - 1."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is None:
        return 0
    if not is_finite_number(value) or value != int(value) or not 0 <= value < 2**63:
        raise CheckpointError(
            f"The {name} of '{path}' must be a whole number from 0 to {2**63 - 1}, got {describe_value(value)}. "
            f"Set it: --{name} 0"
        )
    return int(value)
