"""Signals that arrive while all ranks wait for a checkpoint: SIGTERM from a scheduler, and Ctrl-C pressed twice."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from groups import nightly
from launches import Launch, running_launcher
from requirements import needs_mpi

from unitrain.checkpoint import files

# Each checkpoint sleeps for two seconds before it writes the manifest. From step 2, it first creates the file
# `writing`.
SCRIPT = """
import sys, time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import unitrain
from unitrain.checkpoint import files

folder = Path(sys.argv[1])
write_manifest = files.write_manifest

def write_slowly(*arguments, **named):
    if (folder / "step-000000001").exists():
        (folder / "writing").touch()
    time.sleep(2)
    write_manifest(*arguments, **named)

files.write_manifest = write_slowly
with unitrain.init(device="cpu") as backend:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = unitrain.TrainConfig(
        max_steps=50, batch_size=2, output_dir=folder, checkpoint_every_steps=1, async_checkpoints=False
    )
    data = TensorDataset(torch.ones(1000, 3), torch.ones(1000, 1))
    unitrain.Trainer(model, optimizer, nn.MSELoss(), backend=backend, config=config).fit(data)
"""
every_launcher = pytest.mark.parametrize(
    "launcher", [*nightly("torchrun"), "horovodrun", pytest.param("mpirun", marks=[needs_mpi, pytest.mark.nightly])]
)
# mpirun exits with 1 after SIGTERM, independently of the exit codes of its ranks.
TERMINATED_CODES = {"torchrun": 143, "horovodrun": 75, "mpirun": 1}
# After SIGINT, horovodrun sends SIGTERM to its ranks, which then save. The first SIGINT ends torchrun, and the second
# one ends mpirun.
INTERRUPTED_CODES = {"torchrun": 130, "horovodrun": 75, "mpirun": 1}
LAUNCHES = {
    "torchrun": ["--backend", "ddp"],
    "horovodrun": ["--backend", "horovod"],
    "mpirun": ["--backend", "horovod", "--launcher", "mpirun"],
}


def launch_command(launcher: str, folder: Path) -> list[str]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    (folder / "run").mkdir()
    launch = [sys.executable, "-m", "unitrain", "launch", "-np", "2", *LAUNCHES[launcher]]
    return [*launch, str(script), str(folder / "run")]


def wait_until_writing(launch: Launch, folder: Path) -> None:
    deadline = time.monotonic() + 90
    while not (folder / "run" / "writing").exists():
        assert time.monotonic() < deadline
        assert launch.process.poll() is None, launch.output()
        time.sleep(0.02)


def check_checkpoints(folder: Path) -> list[str]:
    """Assert that all checkpoints are complete, and return their names, newest first."""
    found = files.list_checkpoints(folder)
    assert [files.find_corruption(path) for path in found] == [None] * len(found)
    return [path.name for path in found]


@every_launcher
def test_a_save_is_completed_after_sigterm(launcher: str, tmp_path: Path) -> None:
    with running_launcher(launch_command(launcher, tmp_path), {"OMP_NUM_THREADS": "1"}) as launch:
        wait_until_writing(launch, tmp_path)
        launch.process.terminate()
        output = launch.output()
        launch.wait_until_all_exited(10)
    names = check_checkpoints(tmp_path / "run")
    (step,) = re.findall(r"stopped after step (\d+): SIGTERM was received by rank \d", output)
    assert names[0] == f"step-{int(step):09d}"
    assert launch.process.returncode == TERMINATED_CODES[launcher], output
    assert not list((tmp_path / "run").glob(".*unfinished*"))


@every_launcher
def test_two_interrupts_during_a_save_leave_a_complete_checkpoint(launcher: str, tmp_path: Path) -> None:
    """Like Ctrl-C in a terminal, the test signals the foreground process group. The checkpoint that is being written
    may remain incomplete, and is then not listed."""
    with running_launcher(launch_command(launcher, tmp_path), {"OMP_NUM_THREADS": "1"}) as launch:
        wait_until_writing(launch, tmp_path)
        os.killpg(launch.process.pid, signal.SIGINT)
        time.sleep(0.5)
        if launch.process.poll() is None:
            os.killpg(launch.process.pid, signal.SIGINT)
        output = launch.output()
        launch.wait_until_all_exited(10)
    names = check_checkpoints(tmp_path / "run")
    assert names
    assert launch.process.returncode == INTERRUPTED_CODES[launcher], output
