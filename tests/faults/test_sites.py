"""Low-communication training with hosts that are slow, lose and regain the connection, or have a slow network."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import site_training
import torch
from hosts import SECONDS, hosts
from requirements import needs_hosts
from torch import nn

from unitrain import LocalSGD, LocalSGDConfig
from unitrain.backends.base import Backend
from unitrain.checkpoint import files
from unitrain.testing import RankGroup

SCRIPT = site_training.__file__
LAUNCH = [sys.executable, "-m", "unitrain", "launch"]
VARIABLES = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
WAIT_SECONDS = 60


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} was not created within {WAIT_SECONDS} s"
        time.sleep(0.01)


def train_with_a_slow_rank(backend: Backend, folder: Path, overlap_steps: int) -> list[float]:
    """Train for 7 steps. Rank 1 waits in step 2 until rank 0 has completed all steps that do not require rank 1."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = LocalSGD(model, optimizer, backend, LocalSGDConfig(steps=5, outer_lr=0.7, overlap_steps=overlap_steps))
    last = 4 + overlap_steps
    for step in range(1, 8):
        if step == 2 and backend.rank == 1:
            wait_for(folder / f"step-{last}")
        model(torch.full((2, 3), 1.0 + backend.rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        local.step()
        if backend.rank == 0:
            (folder / f"step-{step}").touch()
    local.synchronize()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize("backend", ["ddp", pytest.param("horovod", marks=pytest.mark.ci)])
def test_slow_site_delays_the_outer_step_only(backend: str, tmp_path: Path) -> None:
    """If rank 0 waited in another step, the test would deadlock."""
    with RankGroup(backend, 2) as group:
        for overlap_steps in (0, 2):
            folder = tmp_path / str(overlap_steps)
            folder.mkdir()
            first, second = group.run(train_with_a_slow_rank, folder, overlap_steps, timeout_seconds=90)
            assert first == second


def wait_for_step(folder: Path, size: int, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a job with `size` ranks has completed `step` steps."""
    deadline = time.monotonic() + SECONDS
    while True:
        found = [int(word) for word in (folder / "at-0").read_text().split()] if (folder / "at-0").exists() else []
        if len(found) == 2 and found[0] >= step and found[1] == size:
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"no step {step} of {size} ranks: {process.communicate(timeout=SECONDS)[0]}")
        time.sleep(0.1)


def read_start_weights(folder: Path, size: int) -> dict[int, list[Any]]:
    """Return the weights of each rank at the start of attempts with `size` ranks, by step."""
    found: dict[int, list[Any]] = {}
    for path in sorted(folder.glob(f"weights-{size}-*.json")):
        found.setdefault(int(path.name.split("-")[2]), []).append(json.loads(path.read_text()))
    return found


@pytest.mark.nightly
@needs_hosts
@pytest.mark.timeout(400)
def test_lost_site_is_excluded_and_rejoins_with_the_current_weights(tmp_path: Path) -> None:
    """Each process starts with different random weights."""
    (tmp_path / "hosts").mkdir()
    (tmp_path / "pause-2-10").touch()
    (tmp_path / "pause-1-20").touch()
    options = ["--backend", "horovod", "--elastic", "1:2", "--max-restarts", "3", "-H", "h1:1,h2:1"]
    command = [*LAUNCH, *options, SCRIPT, str(tmp_path), "120", "15"]
    with hosts(2, tmp_path / "hosts") as (first, second), first.start(command, VARIABLES) as launch:
        try:
            wait_for_step(tmp_path, 2, 10, launch)
            second.disconnect_network()
            second.kill_all()
            (tmp_path / "pause-2-10").unlink()
            wait_for_step(tmp_path, 1, 20, launch)
            second.reconnect_network()
            (tmp_path / "slow-1").touch()  # slow until the host is found
            (tmp_path / "pause-1-20").unlink()
            output, _ = launch.communicate(timeout=2 * SECONDS)
        finally:
            first.kill_all()
    assert launch.returncode == 0, output
    (alone,) = read_start_weights(tmp_path, 1)
    assert alone >= 10 - 10 % site_training.CHECKPOINT_EVERY_STEPS, (
        "only the steps since the checkpoint may be repeated"
    )
    rejoined = {step: found for step, found in read_start_weights(tmp_path, 2).items() if step >= 20}
    ((step, (own, other)),) = rejoined.items()
    assert own == other, "the host must rejoin with the weights of rank 0"
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()
    files.load_model_file(model, tmp_path / "run" / f"step-{step:09d}" / files.MODEL)
    assert own == pytest.approx(site_training.weights(model), rel=0, abs=1e-12)
    finals = [json.loads((tmp_path / f"final-{rank}.json").read_text()) for rank in (0, 1)]
    assert finals[0] == finals[1]


@pytest.mark.nightly
@needs_hosts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_job_runs_at_10_megabits_per_second_and_200_milliseconds(backend: str, tmp_path: Path) -> None:
    """A round trip takes 200 ms. Start-up, outer steps, checkpoints and shutdown succeed without false timeouts."""
    (tmp_path / "hosts").mkdir()
    with hosts(2, tmp_path / "hosts", network=(0.1, 10e6)) as two:
        options = ["--backend", backend, "-H", "h1:2,h2:2"]
        launched = two[0].run([*LAUNCH, *options, SCRIPT, str(tmp_path), "9", "60"], VARIABLES, seconds=500)
        for host in two:
            host.wait_until_all_exited(20)
    assert launched.returncode == 0, launched.stdout
    finals = [json.loads((tmp_path / f"final-{rank}.json").read_text()) for rank in range(4)]
    assert all(final == finals[0] for final in finals)
    assert files.list_checkpoints(tmp_path / "run")[0].name == "step-000000009"
    for word in ("timed out", "does not respond", "Traceback"):
        assert word not in launched.stdout, launched.stdout
