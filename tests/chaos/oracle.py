"""Checks of a finished trial: the final state, the samples of each epoch, and the remaining files."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from unitrain.checkpoint import files

from .trials import EPOCHS, STEPS, STEPS_PER_EPOCH

SAMPLES = 96


def check_result(folder: Path, expected: dict[str, Any]) -> list[str]:
    """Return the differences between the final state and history and those of the undisturbed run."""
    found = json.loads((folder / "result.json").read_text())[1]
    wrong = []
    if found["states"] != expected["states"]:
        wrong.append(f"bits: the final states are {found['states']} instead of {expected['states']}")
    if found["history"] != expected["history"]:
        wrong.append(f"history: {found['history']} instead of {expected['history']}")
    return wrong


def check_samples(folder: Path) -> list[str]:
    """Return errors about samples that were lost or repeated within an epoch.

    Steps that a later attempt repeats are ignored: an attempt replaces all steps after the step from which it starts.
    Each rank records the samples of a step before the gradients are reduced, so the records of a completed step are
    complete.
    """
    attempts: dict[int, list[dict[str, Any]]] = {}
    for path in (folder / "samples").iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            attempts.setdefault(rows[0]["attempt"], []).append(row)
    kept: dict[int, list[int]] = {}
    for number, rows in sorted(attempts.items()):
        starts = {row["start"] for row in rows if "start" in row}
        if len(starts) != 1:
            return [f"samples: the ranks of attempt {number} start from the steps {sorted(starts)}"]
        (start,) = starts
        if missing := set(range(1, start + 1)) - kept.keys():
            return [f"samples: attempt {number} starts from step {start}, but steps {sorted(missing)} were not trained"]
        kept = {step: samples for step, samples in kept.items() if step <= start}
        for row in rows:
            if "step" in row:
                kept.setdefault(row["step"], []).extend(row["samples"])
    wrong = []
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS_PER_EPOCH + 1, (epoch + 1) * STEPS_PER_EPOCH + 1)
        seen = Counter(sample for step in steps for sample in kept.get(step, []))
        lost = [sample for sample in range(SAMPLES) if sample not in seen]
        repeated = [sample for sample, count in seen.items() if count > 1]
        if lost or repeated:
            wrong.append(f"samples: in epoch {epoch + 1}, lost {lost}, repeated {sorted(repeated)}")
    if extra := [step for step in kept if step > STEPS]:
        wrong.append(f"samples: steps {extra} follow the last step")
    return wrong


def check_files(folder: Path) -> list[str]:
    """Return the files that are partial, corrupt or unexpected after all processes have exited."""
    run = folder / "disk" / "run"
    wrong = [f"partial file: {path.name}" for path in run.glob("*.unfinished")]
    checkpoints = files.list_checkpoints(run)
    if [path.name for path in checkpoints[:1]] != [files.checkpoint_path(run, STEPS).name]:
        wrong.append(f"checkpoints: {[path.name for path in checkpoints]}")
    damage_by_name = [(path.name, files.find_corruption(path)) for path in checkpoints]
    wrong += [f"checkpoint {name}: {damage}" for name, damage in damage_by_name if damage is not None]
    names = [path.name for path in (folder / "tmp").iterdir() if "unitrain" in path.name]
    return wrong + [f"left behind in TMPDIR: {name}" for name in names]
