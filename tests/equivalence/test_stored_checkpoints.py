"""Runs resume from checkpoints of earlier versions of unitrain, and each part of the state has a version."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import stored_training
import torch

from unitrain.backends.local import LocalBackend
from unitrain.checkpoint import files
from unitrain.errors import CheckpointError
from unitrain.progress.training_progress import EpochEnd
from unitrain.training_run import STATE_VERSIONS

VERSIONS = sorted(path.name for path in stored_training.FOLDER.iterdir())
# The structures of the parts of the state, by part and version. If a part has changed, see STATE_VERSIONS.
STRUCTURES = {
    ("loss", 1): (
        "{ranks: [{samples: int, sums: Tensor, tokens: Tensor, waiting: None, waiting_samples: []}], seen: [float], "
        "steps: int}"
    ),
    ("precision", 1): "{}",
    ("callbacks", 1): "{Stop: {steps: int}}",
    ("weighting", 1): "{tokens_per_sample: float}",
    ("average", 1): "{model: {0.weight: Tensor}, pending_steps: int, steps: int}",
    ("run", 2): (
        "{classes: {optimizer: str, scheduler: str}, epoch_end: {epoch: int, is_validated: bool, results: {train_loss: "
        "float}, speed: {learning_rate: float, samples_per_second: float, seconds: float}}, generators: [dict], "
        "learning_rate: {lr_scaling: str, reference_batch_size: None, warmup_steps: int}, logical_ranks: None, "
        "optimizer: dict, order: {length: int, permutation: str, sampler: None, shuffle: bool}, progress: {epoch: int, "
        "position: int, sample: int, step: int, step_in_epoch: int}, row: {epoch: int, epochs: float, "
        "learning_rate: float, samples_per_second: float, seconds: float, step: int, train_loss: float, val_loss: "
        "float}, scheduler: dict, scheduler_settings: dict, seed: int}"
    ),
}


def copy_run(version: str, name: str, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(stored_training.FOLDER / version / name, folder)
    (folder / "expected.json").unlink()
    return folder


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", stored_training.RUNS)
def test_run_resumes_from_a_checkpoint_of_an_earlier_version(version: str, name: str, tmp_path: Path) -> None:
    folder = copy_run(version, name, tmp_path)
    expected = json.loads((stored_training.FOLDER / version / name / "expected.json").read_text())
    with stored_training.group_of(name) as ranks:
        parameters, steps, results = ranks.run(stored_training.train, name, str(folder), None, True)[0]
    assert parameters == pytest.approx(expected["parameters"], rel=1e-6, abs=1e-9)
    assert results == pytest.approx(expected["results"], rel=1e-6)
    assert steps == expected["steps"] == stored_training.STEPS


def structure(value: Any) -> str:
    """Return the names and types in a state. The contents of a dictionary with the key `...` are omitted."""
    if isinstance(value, dict) and ... in value:
        return "dict"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {structure(value[name])}" for name in sorted(value, key=str)) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(dict.fromkeys(map(structure, value)))}]"
    return "None" if value is None else type(value).__name__


def read_training(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(files.list_checkpoints(folder)[0] / files.TRAINING, weights_only=True)
    return state


def change_training(folder: Path, name: str, value: Any) -> None:
    """Replace an entry of the training state of the newest checkpoint."""
    checkpoint = files.list_checkpoints(folder)[0]
    manifest = files.read_manifest(checkpoint)
    torch.save({**read_training(folder), name: value}, checkpoint / files.TRAINING)
    manifest["files"][files.TRAINING] = {
        "bytes": (checkpoint / files.TRAINING).stat().st_size, "sha256": files.sha256(checkpoint / files.TRAINING),
    }  # fmt: skip
    (checkpoint / files.MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("versions", {"loss": 99}, "The state 'loss' in '.*' has version 99, from a newer unitrain; this one reads"),
        ("loss", {"steps": 1}, "The state 'loss' in the checkpoint cannot be restored: KeyError: 'seen'"),
        (
            "average",
            {"steps": 1, "model": 3},
            "The state 'average' in the checkpoint cannot be restored: TypeError",
        ),
        ("callbacks", {"Stop": {}}, "The state 'callbacks' in the checkpoint cannot be restored: KeyError: 'steps'"),
    ],
)
def test_state_with_another_structure_is_rejected(tmp_path: Path, name: str, value: Any, message: str) -> None:
    folder = copy_run(VERSIONS[-1], "within_epoch", tmp_path)
    change_training(folder, name, value)
    with pytest.raises(CheckpointError, match=message):
        stored_training.train(LocalBackend(torch.device("cpu")), "within_epoch", str(folder), None, True)


def test_a_part_of_the_state_changes_only_with_its_version(tmp_path: Path) -> None:
    stored_training.train(LocalBackend(torch.device("cpu")), "within_epoch", str(tmp_path), 6, False)
    state = read_training(tmp_path)
    assert state.pop("versions") == STATE_VERSIONS
    state["average"]["model"] = {"0.weight": state["average"]["model"]["0.weight"]}
    # The structure of these entries depends on the version of torch, on the optimizer and on the scheduler.
    state |= {name: {...: 0} for name in ("optimizer", "scheduler", "scheduler_settings")}
    state["generators"] = [{...: 0}]
    state["epoch_end"] = asdict(EpochEnd(1, {"train_loss": 0.5}, state_of_speed(state["row"])))
    parts = {name: state.pop(name) for name in STATE_VERSIONS if name in state}
    found = {(name, STATE_VERSIONS[name]): structure(part) for name, part in {**parts, "run": state}.items()}
    assert found == STRUCTURES


def state_of_speed(row: dict[str, Any]) -> dict[str, float]:
    return {name: row[name] for name in ("learning_rate", "samples_per_second", "seconds")}
