"""A restarted run resumes from its newest checkpoint in memory. If that is missing or corrupt, it resumes from disk."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from groups import nightly
from torch import nn
from torch.utils.data import TensorDataset

from unitrain import Callback, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.bootstrap import environment
from unitrain.checkpoint import files, output_folder, sharded_files
from unitrain.checkpoint.memory import MemoryCheckpoints
from unitrain.testing import RankGroup

# With more ranks, a resumed run differs by rounding (docs/guides/elastic.md).
GROUPS_WITH_EQUAL_RESULTS = [("local", 1), ("ddp", 2), *nightly(("horovod", 2))]
STEPS, ON_DISK_EVERY, KILLED_AFTER = 12, 5, 8
WRITING_SECONDS = 0.1  # much longer than a step


class Kill(BaseException):
    """Simulates that the process is killed where this exception is raised."""


class Recorder(Callback):
    """Records the steps and, at the end of each step, the newest complete checkpoint in memory.

    Simulates a kill after step `kill_after`, and renames `folder` after step `remove_after`.
    """

    def __init__(self, kill_after: int | None, remove_after: int | None, folder: str) -> None:
        self.kill_after, self.remove_after, self.folder = kill_after, remove_after, folder
        self.steps: list[int] = []
        self.newest_in_memory: list[int] = []

    def on_micro_batch_end(self, trainer: Trainer, batch: Any, micro_batch: Any, loss: Any) -> None:
        if trainer.progress.step == self.kill_after:
            trainer.checkpointer.wait()
            raise Kill

    def on_step_end(self, trainer: Trainer) -> None:
        self.steps.append(trainer.progress.step)
        found: list[Path] = []
        with contextlib.suppress(FileNotFoundError):  # rank 0 may already have renamed the folder (see below)
            found = sorted(Path(self.folder).glob("*/step-*"))
        self.newest_in_memory.append(int(found[-1].name.removeprefix("step-")) if found else 0)
        if trainer.progress.step == self.remove_after and trainer.backend.rank == 0:
            Path(self.folder).rename(f"{self.folder}-removed")


def run(
    backend: Backend,
    folder: str,
    *,
    kill_after: int | None = None,
    remove_after: int | None = None,
    recorder: Recorder | None = None,
    **settings: Any,
) -> tuple[list[int], list[str]]:
    """Train like an attempt of a supervised job. Return the steps and the exact parameters."""
    memory = f"{folder}/memory"
    if backend.rank == 0:
        Path(memory).mkdir(exist_ok=True, parents=True)
    backend.barrier()
    variables = {environment.SHARED_MEMORY_FOLDER_VARIABLE: memory, environment.JOB_ID_VARIABLE: folder}
    os.environ.update(variables)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Linear(6, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = TensorDataset(torch.randn(36, 4), torch.randn(36, 1))
        config = TrainConfig(
            max_steps=STEPS, global_batch_size=6, output_dir=f"{folder}/run", checkpoint_every_steps=ON_DISK_EVERY,
            checkpoint_every_epochs=100, memory_checkpoint_every_steps=1, progress="off", **settings,
        )  # fmt: skip
        recorder = recorder or Recorder(kill_after, remove_after, memory)
        trainer = Trainer(
            model, optimizer, nn.functional.mse_loss, backend=backend, config=config, callbacks=[recorder]
        )
        if kill_after is None:
            trainer.fit(data)
        else:
            with pytest.raises(Kill):
                trainer.fit(data)
            trainer.checkpointer.release_folder()
        return recorder.steps, [value.hex() for tensor in model.parameters() for value in tensor.flatten().tolist()]
    finally:
        for name in variables:
            del os.environ[name]
        job_file = Path(folder, "run", ".job")
        if backend.rank == 0 and job_file.exists():  # the next attempt has other processes
            job_file.write_text(json.dumps({**json.loads(job_file.read_text()), "process": "of this attempt"}))
        backend.barrier()


@pytest.fixture(scope="module", params=GROUPS_WITH_EQUAL_RESULTS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def undisturbed(group: RankGroup, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the final parameters of a run that is not killed."""
    steps, parameters = group.run(run, str(tmp_path_factory.mktemp("undisturbed")))[0]
    assert steps == list(range(1, STEPS + 1))
    return list(parameters)


def checkpoints_in_memory(folder: Path) -> list[Path]:
    return sorted((folder / "memory").glob("*/step-*"))


def test_restarted_run_resumes_from_the_step_in_memory(
    group: RankGroup, undisturbed: list[str], tmp_path: Path
) -> None:
    group.run(partial(run, kill_after=KILLED_AFTER), str(tmp_path))
    (newest,) = checkpoints_in_memory(tmp_path)
    assert newest.name.endswith(str(KILLED_AFTER))
    for steps, parameters in group.run(run, str(tmp_path)):
        assert steps == list(range(KILLED_AFTER + 1, STEPS + 1))
        assert parameters == undisturbed


@pytest.mark.parametrize("damage", ["is corrupt", "is missing", "is older"])
def test_restarted_run_resumes_from_disk_without_a_valid_newer_checkpoint_in_memory(
    damage: str, group: RankGroup, undisturbed: list[str], tmp_path: Path
) -> None:
    """The checkpoint in memory is corrupt or missing, or is not newer than the one on disk."""
    killed_after = ON_DISK_EVERY if damage == "is older" else KILLED_AFTER
    group.run(partial(run, kill_after=killed_after), str(tmp_path))
    (newest,) = checkpoints_in_memory(tmp_path)
    if damage == "is corrupt":
        with (newest / "training.pt").open("r+b") as file:
            file.write(b"damaged")
    elif damage == "is missing":
        shutil.rmtree(newest)
    else:
        (newest / "training.pt").unlink()  # must not be read, because it is not newer
    for steps, parameters in group.run(run, str(tmp_path)):
        assert steps == list(range(ON_DISK_EVERY + 1, STEPS + 1))
        assert parameters == undisturbed


def test_corrupt_checkpoints_on_disk_do_not_hide_a_checkpoint_in_memory(
    group: RankGroup, undisturbed: list[str], tmp_path: Path
) -> None:
    group.run(partial(run, kill_after=ON_DISK_EVERY, checkpoint_format="sharded"), str(tmp_path))
    on_disk = tmp_path / "run" / f"step-{ON_DISK_EVERY:09d}"
    shutil.copytree(
        on_disk, tmp_path / "run" / f"step-{STEPS - 1:09d}"
    )  # corrupt: the step in its name differs from its content
    with (on_disk / "training.pt").open("r+b") as file:
        file.write(b"damaged")
    for steps, parameters in group.run(partial(run, checkpoint_format="sharded"), str(tmp_path)):
        assert steps == list(range(ON_DISK_EVERY + 1, STEPS + 1))
        assert parameters == undisturbed


@pytest.mark.parametrize("case", ["the folder was removed", "of another run"])
def test_a_checkpoint_in_memory_of_an_earlier_run_is_not_loaded(
    case: str, group: RankGroup, undisturbed: list[str], tmp_path: Path
) -> None:
    group.run(run, str(tmp_path))
    (newest,) = checkpoints_in_memory(tmp_path)
    assert newest.name.endswith(str(STEPS))
    if case == "of another run":
        newest.rename(tmp_path / newest.name)
    shutil.rmtree(tmp_path / "run")
    group.run(partial(run, kill_after=KILLED_AFTER), str(tmp_path))
    if case == "of another run":
        (tmp_path / newest.name).rename(newest)
    for steps, parameters in group.run(run, str(tmp_path)):
        assert steps == list(range(KILLED_AFTER + 1, STEPS + 1))
        assert parameters == undisturbed


def test_run_continues_if_the_memory_cannot_be_written(
    group: RankGroup, undisturbed: list[str], tmp_path: Path
) -> None:
    for steps, parameters in group.run(partial(run, remove_after=3), str(tmp_path)):
        assert steps == list(range(1, STEPS + 1))
        assert parameters == undisturbed
    assert not checkpoints_in_memory(tmp_path)
    assert (tmp_path / "run" / f"step-{STEPS:09d}").exists()


def verify_slowly_in_memory(backend: Backend, folder: str, checkpoint_format: str) -> tuple[str, int]:
    """Return the name of the checkpoint in memory that a restarted run would load, and how often the ranks communicate
    while it is verified.

    With the full format, rank 0 verifies it alone; otherwise, the last rank verifies longer than the others.
    """
    name = "broadcast_object" if checkpoint_format == "full" else "allgather_object"
    communicate, progress = getattr(backend, name), []
    find_corruption = files.find_corruption

    def record(value: Any, *arguments: Any) -> Any:
        result = communicate(value, *arguments)
        if result == "in progress" or (isinstance(result, list) and True in result):
            progress.append(result)
        return result

    def verify_slowly(path: Path, *arguments: int) -> str | None:
        deadline = time.monotonic() + 10
        is_slow = checkpoint_format == "full" or backend.rank == backend.size - 1
        while is_slow and len(progress) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return find_corruption(path, *arguments)

    memory = MemoryCheckpoints(Path(folder) / "memory" / "run", backend, asynchronous=False)
    with (
        mock.patch.object(output_folder, "_PROGRESS_INTERVAL_SECONDS", 0.05),
        mock.patch.object(files, "find_corruption", verify_slowly),
        mock.patch.object(backend, name, record),
    ):
        found = memory.prepare_and_find_newer(Path(folder) / "run", continues=True)
    assert found is not None
    return found.name, len(progress)


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_ranks_communicate_while_a_checkpoint_in_memory_is_verified(
    group: RankGroup, tmp_path: Path, checkpoint_format: str
) -> None:
    """Otherwise, a wait for a rank that verifies a large file would time out."""
    group.run(partial(run, kill_after=KILLED_AFTER, checkpoint_format=checkpoint_format), str(tmp_path))
    (newest,) = checkpoints_in_memory(tmp_path)
    newest.parent.rename(tmp_path / "memory" / "run")
    for name, num_reports in group.run(verify_slowly_in_memory, str(tmp_path), checkpoint_format):
        assert name == newest.name
        assert num_reports >= 2


def run_with_slow_memory(backend: Backend, folder: str, **settings: Any) -> list[int]:
    """Train with writes that take much longer than a step. Return the newest step in memory at the end of each step.

    Each write waits until all ranks have recorded the step, because ranks do not end a step at the same time.
    """
    recorded = [Path(folder) / f"recorded-{rank}" for rank in range(backend.size)]

    class AnnouncingRecorder(Recorder):
        def on_step_end(self, trainer: Trainer) -> None:
            super().on_step_end(trainer)
            with recorded[backend.rank].open("a") as file:
                file.write("x")

    def slow(function: Any) -> Any:
        def write(*args: Any, **kwargs: Any) -> Any:
            steps, deadline = len(recorder.steps), time.monotonic() + 30
            while not all(path.exists() and path.stat().st_size >= steps for path in recorded):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(WRITING_SECONDS)
            return function(*args, **kwargs)

        return write

    recorder = AnnouncingRecorder(None, None, f"{folder}/memory")
    with (
        mock.patch.object(files, "write", slow(files.write)),
        mock.patch.object(sharded_files, "write_shard", slow(sharded_files.write_shard)),
    ):
        run(backend, folder, recorder=recorder, **settings)
    return recorder.newest_in_memory


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_a_step_ends_after_the_checkpoint_of_the_previous_step_is_in_memory(
    group: RankGroup, tmp_path: Path, checkpoint_format: str
) -> None:
    """Therefore, a killed rank loses at most one completed step."""
    for newest in group.run(partial(run_with_slow_memory, checkpoint_format=checkpoint_format), str(tmp_path)):
        assert newest == list(range(STEPS))


def test_sharded_state_is_restored_from_memory(group: RankGroup, tmp_path: Path) -> None:
    results = []
    for name, kill_after in (("undisturbed", None), ("killed", KILLED_AFTER)):
        if kill_after is not None:
            group.run(partial(run, kill_after=kill_after, shard="state"), str(tmp_path / name))
        results.append(group.run(partial(run, shard="state"), str(tmp_path / name)))
    assert [steps for steps, _ in results[1]] == [list(range(KILLED_AFTER + 1, STEPS + 1))] * len(results[1])
    assert [parameters for _, parameters in results[0]] == [parameters for _, parameters in results[1]]
