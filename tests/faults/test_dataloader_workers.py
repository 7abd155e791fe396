"""DataLoader workers that hang exit with their rank, and their position is reported."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from launches import running_launcher

from unitrain.bootstrap import environment

PROGRAM = """\
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
import unitrain

CASE, SECONDS = sys.argv[1], float(sys.argv[2])

class Items(Dataset):
    def __init__(self, hangs):
        self.hangs = hangs
    def __len__(self):
        return 120
    def __getitem__(self, index):
        if self.hangs and index > 40:
            open(f"{__file__}.{os.getpid()}.hangs", "w").close()
            time.sleep(3000)
        return torch.ones(3), torch.ones(1)

class Stream(IterableDataset):
    def __init__(self, hangs):
        self.items = Items(hangs)
    def __iter__(self):
        return (self.items[index] for index in range(120))

def main():
    with unitrain.init(device="cpu", timeout_seconds=SECONDS) as backend:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hangs = backend.rank == backend.size - 1 or CASE.endswith("all ranks")
        loader = DataLoader(
            (Stream if CASE == "stream" else Items)(hangs), batch_size=2, num_workers=2,
            persistent_workers=CASE == "persistent", multiprocessing_context="spawn" if CASE == "spawn" else None,
        )
        if CASE.startswith("own loop"):
            model = backend.distributed_model(model)
            for inputs, targets in loader:
                nn.functional.mse_loss(model(inputs), targets).backward()
        else:
            config = unitrain.TrainConfig(max_epochs=1, progress="off")
            unitrain.Trainer(model, optimizer, nn.functional.mse_loss, backend=backend, config=config).fit(loader)

if __name__ == "__main__":
    main()
"""

# What the worker is loading, as shown in the report. Without the Trainer, workers do not report it.
LOADED = {
    "trainer": r"item 4\d",
    "persistent": r"item 4\d",
    "stream": "the next batch",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("ddp", "trainer"),
        pytest.param("ddp", "persistent", marks=pytest.mark.nightly),
        ("ddp", "stream"),
        ("ddp", "own loop"),
        ("horovod", "trainer"),
        pytest.param("horovod", "own loop", marks=pytest.mark.nightly),
    ],
)
def test_a_job_with_a_hanging_worker_ends_and_reports_the_worker(backend: str, case: str, script: Path) -> None:
    command = [sys.executable, "-m", "unitrain", "launch", "--backend", backend, "-np", "2", str(script), case, "6"]
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()  # returns when no process holds the pipe
        launch.wait_until_all_exited(10)
    assert launch.process.returncode, output
    status = r"rank 1: waiting for a batch from DataLoader worker \d \(process \d+\)"
    if case in LOADED:
        status += rf", which has been loading {LOADED[case]} for \d+ s \(train.py:17: time.sleep\(3000\)\)"
    assert re.search(status, output), output
    assert re.search(r"Check the data loading of rank 1, or raise the limit", output), output
    assert "rank 1: in a backward pass" not in output, output


@pytest.mark.parametrize(
    ("backend", "case"),
    [
        ("ddp", "trainer, all ranks"),
        pytest.param("ddp", "own loop, all ranks", marks=pytest.mark.ci),
        pytest.param("horovod", "trainer, all ranks", marks=pytest.mark.nightly),
    ],
)
def test_a_job_whose_workers_hang_on_all_ranks_ends_and_reports_a_worker(backend: str, case: str, script: Path) -> None:
    command = [sys.executable, "-m", "unitrain", "launch", "--backend", backend, "-np", "2", str(script), case, "10"]
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()  # returns when no process holds the pipe
        launch.wait_until_all_exited(10)
    assert launch.process.returncode, output
    worker = r"DataLoader worker \d \(process \d+\)"
    if case.startswith("trainer"):
        worker += r", which has been loading item 4\d for \d+ s \(train.py:17: time.sleep\(3000\)\)"
    assert re.search(rf"unitrain: Rank \d has waited 10 s for a batch from {worker}, at train.py:\d+", output), output
    assert "Check the data loading of that worker, or raise the limit with unitrain.init(timeout_seconds=" in output


@pytest.mark.parametrize("case", ["trainer", "spawn", "own loop"])
def test_hanging_workers_exit_if_their_rank_is_killed(case: str, script: Path) -> None:
    variables = environment.without_launcher_variables() | {"OMP_NUM_THREADS": "1"}
    with running_launcher([sys.executable, str(script), case, "60"], variables) as launch:
        deadline = time.monotonic() + 90
        while len(list(script.parent.glob("*.hangs"))) < 2:
            assert time.monotonic() < deadline, "the workers do not hang"
            time.sleep(0.1)
        assert len(launch.find_processes()) >= 3
        os.kill(launch.process.pid, signal.SIGKILL)
        launch.wait_until_all_exited(30)
