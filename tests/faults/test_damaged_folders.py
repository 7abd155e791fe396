"""Output folders with files of wrong types or contents cause a clear error in limited time, or the run completes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.checkpoint import files
from unitrain.errors import CheckpointError
from unitrain.testing import RankGroup

NESTED_JSON = "[" * 200_000


DATA = TensorDataset(torch.ones(8, 3), torch.ones(8, 1))


def make_trainer(backend: Backend, folder: Path, loggers: tuple[str, ...] = (), max_epochs: int = 1) -> Trainer:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = TrainConfig(max_epochs=max_epochs, batch_size=2, progress="off", output_dir=folder, resume=True)
    return Trainer(model, optimizer, nn.functional.mse_loss, backend=backend, config=config, loggers=loggers)


def fit(backend: Backend, folder: Path, loggers: tuple[str, ...] = ()) -> None:
    make_trainer(backend, folder, loggers).fit(DATA)


def resume_and_return_steps(backend: Backend, folder: Path) -> tuple[int, int]:
    """Resume the run of `fit` for a second epoch, and return the steps before and after it."""
    trainer = make_trainer(backend, folder, max_epochs=2)
    first = trainer.progress.step
    trainer.fit(DATA)
    return first, trainer.progress.step


def fifo(name: str) -> Callable[[Path], object]:
    def create(folder: Path) -> None:
        folder.mkdir()
        os.mkfifo(folder / name)

    return create


def dangling_link(name: str) -> Callable[[Path], object]:
    def create(folder: Path) -> None:
        folder.mkdir()
        (folder / name).symlink_to(folder / "missing")

    return create


def subfolder(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).mkdir(parents=True)


def link_to_itself(folder: Path) -> None:
    folder.symlink_to(folder)


def nested_json_in_a_held_lock(folder: Path) -> Any:
    folder.mkdir()
    file = (folder / ".lock").open("w")
    file.write(NESTED_JSON)
    file.flush()
    fcntl.flock(file, fcntl.LOCK_EX)
    return file  # keeps the lock


def checkpoint_without_progress(folder: Path) -> None:
    model = nn.Linear(3, 1)
    folder.mkdir()
    files.write(folder / "step-000000004", dict(model.state_dict()), {"optimizer": None}, {"step": 4})


# Each case: a function that prepares the folder, and the start of the error, or "trained".
CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder is a FIFO": (os.mkfifo, "Cannot write to output folder '{}': FileExistsError"),
    "folder is a loop of links": (link_to_itself, "Cannot write to output folder '{}': FileExistsError"),
    "FIFO .lock": (fifo(".lock"), "'{}/.lock', the lock of the output folder, is not a regular file. Remove it: rm"),
    "FIFO .job": (fifo(".job"), "Cannot write to output folder '{}': OSError: [Errno 22] '{}/.job' is not a regular"),
    "FIFO run.jsonl": (
        fifo("run.jsonl"),
        "Cannot write '{}': OSError: [Errno 22] '{}/run.jsonl' is not a regular file",
    ),
    "FIFO history.jsonl": (fifo("history.jsonl"), "Cannot write '{}': OSError: [Errno 22] '{}/history.jsonl' is not a"),
    "FIFO steps.jsonl": (fifo("steps.jsonl"), "Cannot write '{}': OSError: [Errno 22] '{}/steps.jsonl' is not a regul"),
    "FIFO metrics.csv": (fifo("metrics.csv"), "trained"),
    "FIFO metrics.jsonl": (fifo("metrics.jsonl"), "trained"),
    "FIFO step-000000004": (fifo("step-000000004"), "trained"),
    "FIFO .step-000000004.unfinished": (fifo(".step-000000004.unfinished"), "trained"),
    "dangling link step-000000004": (dangling_link("step-000000004"), "trained"),
    "folder .job": (
        subfolder(".job"),
        "Cannot write to output folder '{}': OSError: [Errno 22] '{}/.job' is not a reg",
    ),
    "checkpoint without progress": (
        checkpoint_without_progress,
        "The checkpoint in '{}' contains no training progress",
    ),
    "nested JSON in a held .lock": (nested_json_in_a_held_lock, "Output folder '{}' is in use by another job: a job"),
}


def run_cases(backend: Backend, root: Path) -> dict[str, str]:
    """Return the error of each case, or "trained" if there is none."""
    os.environ["SLURM_JOB_ID"] = "7"  # the file .job is only read if the job has an ID
    texts = {}
    for number, (name, (prepare, _)) in enumerate(CASES.items()):
        folder = root / str(number)
        kept = prepare(folder)
        try:
            fit(backend, folder, ("csv", "jsonl") if "metrics" in name else ())
            texts[name] = "trained"
        except CheckpointError as error:
            texts[name] = str(error)
        del kept
    return texts


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    root = tmp_path_factory.mktemp("folders")
    with RankGroup("local", 1) as group:
        return root, group.run(run_cases, root, timeout_seconds=90)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_damaged_folder_is_reported_or_repaired(name: str, outcomes: tuple[Path, dict[str, str]]) -> None:
    root, texts = outcomes
    expected = CASES[name][1].replace("{}", str(root / str(list(CASES).index(name))))
    assert texts[name].startswith(expected), texts[name]


@pytest.mark.parametrize("content", [NESTED_JSON, "\\udcff", '{"step": 1e400}', "9" * 5000, "null"])
def test_a_damaged_line_of_the_history_is_skipped(content: str, tmp_path: Path) -> None:
    from unitrain.loggers.json_lines import drop_rows_after, last_row

    path = tmp_path / "history.jsonl"
    path.write_text(content + "\n" + json.dumps({"step": 3}) + "\n")
    drop_rows_after(3, path)
    assert path.read_text() == '{"step": 3}\n'
    assert last_row(path) == {"step": 3}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_kill_during_the_replacement_of_a_checkpoint_loses_nothing(
    can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a kill before each operation of `publish`, except the exchange of both folders."""
    operations = [(Path, "rename"), (files, "remove"), (files, "flush")]
    if not can_exchange:  # as on NFS
        monkeypatch.setattr(files, "_exchange_names", lambda *_: False)
    names = []
    for count in range(7):
        target, staging = (tmp_path / str(count) / name for name in ("step-000000003", ".step-000000003.unfinished"))
        target.parent.mkdir()
        for results in ("new", "old"):
            files.write(target, {"weight": torch.zeros(2)}, {"step": 3}, {"step": 3, "results": results})
            if results == "new":
                written = target.rename(tmp_path / f"{count}-new")
        written.rename(staging)
        left = [count]

        def call_or_raise(original: Any, *arguments: Any, left: list[int] = left) -> Any:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
            return original(*arguments)

        with monkeypatch.context() as patched:
            for owner, name in operations:
                original = getattr(owner, name)
                patched.setattr(owner, name, lambda *a, original=original: call_or_raise(original, *a))
            with contextlib.suppress(KeyboardInterrupt):
                files.publish(staging, target)
        # Before and after `remove_unfinished`, which the next run calls once it has locked the folder.
        for _ in range(2):
            found = files.find_newest_valid(target.parent, required=True)
            assert found is not None
            names.append(found.name)
            results = files.read_manifest(found)["results"]
            assert results == "new" or (count < 3 and not can_exchange)
            files.remove_unfinished(target.parent)
        assert names[-1] == target.name
        assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert names.count(f".{target.name}.replaced.unfinished") == (0 if can_exchange else 1)


def test_a_run_resumes_from_a_checkpoint_whose_replacement_was_not_published(tmp_path: Path) -> None:
    """A process was killed between the two renames that replace a checkpoint on NFS."""
    with RankGroup("local", 1) as group:
        group.run(fit, tmp_path)
        (checkpoint,) = files.list_checkpoints(tmp_path)
        checkpoint.rename(tmp_path / f".{checkpoint.name}.replaced.unfinished")
        (steps,) = group.run(resume_and_return_steps, tmp_path)
    assert steps == (4, 8)
    assert [path.name for path in files.list_checkpoints(tmp_path)] == ["step-000000008", checkpoint.name]
