"""With logical ranks, jobs with killed ranks, changing sizes or a changed backend are bit-identical to an undisturbed
run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import logical_ranks_training
import pytest
import torch
from launches import SECONDS, running_launcher
from logical_ranks_training import Digests, train
from requirements import needs_mpi

from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

SCRIPT = logical_ranks_training.__file__
LAUNCH = [sys.executable, "-m", "unitrain", "launch"]
# An epoch has 3 steps and checkpoints are saved every 4 steps, so runs resume within epochs.
STEPS = 40
VARIABLES = {"OMP_NUM_THREADS": "1"}


def train_alone(backend: Backend) -> Digests:
    torch.set_num_threads(1)
    return train(backend, "all", max_steps=STEPS)


@pytest.fixture(scope="module")
def undisturbed() -> Digests:
    with RankGroup("local", 1) as group:
        (digests,) = group.run(train_alone)
    return digests


def launch(folder: Path, backend: str, launcher: str, *options: str) -> tuple[int, str]:
    """Run the script under a launcher, and return the exit code and the output."""
    command = [*LAUNCH, "--backend", backend, "--launcher", launcher, *options, SCRIPT, str(folder), str(STEPS)]
    with running_launcher(command, VARIABLES) as started:
        output, _ = started.process.communicate(timeout=2 * SECONDS)
        started.wait_until_all_exited(10)
    return started.process.returncode, output


def write_plan(folder: Path, events: dict[str, dict[str, str]]) -> None:
    (folder / "plan.json").write_text(json.dumps(events))


def read_results(folder: Path) -> tuple[int, Digests]:
    """Return the final number of processes and the digests."""
    size, digests = json.loads((folder / "digests.json").read_text())
    return size, digests


def steps_by_size(folder: Path) -> list[tuple[int, int]]:
    """Return (step, number of processes) of each step of rank 0, in chronological order."""
    lines = (folder / "taken-0.txt").read_text().splitlines()
    return [(step, size) for step, size, _ in map(json.loads, lines)]


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [
        pytest.param("ddp", "torchrun", marks=pytest.mark.nightly),
        pytest.param("horovod", "horovodrun", marks=pytest.mark.nightly),
        pytest.param("horovod", "mpirun", marks=[needs_mpi, pytest.mark.nightly]),
    ],
)
def test_restarted_job_is_bit_identical_to_an_undisturbed_run(
    backend: str, launcher: str, tmp_path: Path, undisturbed: Digests
) -> None:
    write_plan(tmp_path, {"3": {"14": "kill 1", "31": "kill 0"}})
    code, output = launch(tmp_path, backend, launcher, "-np", "3", "--max-restarts", "2")
    assert code == 0, output
    assert "(restart 2 of 2)" in output
    assert read_results(tmp_path) == (3, undisturbed)
    steps = [step for step, _ in steps_by_size(tmp_path)]
    assert len(steps) > STEPS, "at least one step must be repeated"
    assert sorted(set(steps)) == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [
        pytest.param("ddp", "torchrun", marks=pytest.mark.ci),
        pytest.param("horovod", "horovodrun", marks=pytest.mark.nightly),
    ],
)
def test_elastic_job_is_bit_identical_to_an_undisturbed_run(
    backend: str, launcher: str, tmp_path: Path, undisturbed: Digests
) -> None:
    """The number of processes grows from 2 to 3, and a rank is killed."""
    write_plan(tmp_path, {"2": {"7": "slots 3"}, "3": {"29": "kill 1"}})
    (tmp_path / "slots").write_text("2")
    discover = tmp_path / "discover"
    discover.write_text(f'#!/bin/sh\necho "localhost:$(cat {tmp_path}/slots)"\n')
    discover.chmod(0o755)
    elastic = ["--elastic", "1:3", "--max-restarts", "1", "--host-discovery-script", str(discover)]
    code, output = launch(tmp_path, backend, launcher, *elastic)
    assert code == 0, output
    assert "there are 3 slots instead of 2" in output
    assert "(restart 1 of 1)" in output
    assert read_results(tmp_path) == (3, undisturbed)
    assert {size for _, size in steps_by_size(tmp_path)} == {2, 3}


def test_job_resumed_on_another_backend_is_bit_identical_to_an_undisturbed_run(
    tmp_path: Path, undisturbed: Digests
) -> None:
    """A job on Horovod is killed within an epoch, and resumes on another number of processes with DDP."""
    write_plan(tmp_path, {"3": {"21": "kill 2"}})  # before the checkpoint at the end of the epoch (step 21)
    code, output = launch(tmp_path, "horovod", "horovodrun", "-np", "3")
    assert code != 0, output
    assert not (tmp_path / "digests.json").exists()
    code, output = launch(tmp_path, "ddp", "torchrun", "-np", "2")
    assert code == 0, output
    assert read_results(tmp_path) == (2, undisturbed)
    first_step = next(step for step, size in steps_by_size(tmp_path) if size == 2)
    assert first_step == 21, "the job must resume from the checkpoint of step 20, within an epoch"
