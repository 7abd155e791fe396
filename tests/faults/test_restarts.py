"""A job that fails is started again, and ends where it would have ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launches import started

LAUNCH = [sys.executable, "-m", "unitrain", "launch"]

PROGRAM = """
import os, signal, sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

class Dies(unitrain.Callback):
    def on_step_end(self, trainer):
        mark = Path(sys.argv[1]) / "died"
        if trainer.backend.rank == 1 and trainer.progress.step == 7 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.Signals[(sys.argv[2:] or ["SIGKILL"])[0]])

with unitrain.init(device="cpu") as backend:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(60, 3), torch.randn(60, 1))
    config = unitrain.TrainConfig(
        max_epochs=2, batch_size=4, output_dir=Path(sys.argv[1]) / "run", checkpoint_every_steps=5, progress="off"
    )
    loss = nn.functional.mse_loss
    trainer = unitrain.Trainer(model, optimizer, loss, backend=backend, config=config, callbacks=[Dies()])
    trainer.fit(data)
    if backend.rank == 0:
        print("weights", model.weight.tolist(), "steps", trainer.progress.step)
"""


@pytest.mark.parametrize(
    ("backend", "launcher"), [pytest.param("ddp", "torchrun", marks=pytest.mark.nightly), ("horovod", "horovodrun")]
)
def test_a_rank_that_is_killed_costs_the_steps_since_the_last_checkpoint(
    backend: str, launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    results = []
    for name, prepared in (("whole", True), ("killed", False)):
        (tmp_path / name).mkdir()
        if prepared:
            (tmp_path / name / "died").touch()
        command = [*LAUNCH, "--backend", backend, "--launcher", launcher, "-np", "2", "--max-restarts", "2"]
        with started([*command, str(tmp_path / "train.py"), str(tmp_path / name)], {"OMP_NUM_THREADS": "1"}) as launch:
            output = launch.output()
            launch.wait_until_none_lives(10)
        assert launch.process.returncode == 0, output
        assert ("(restart 1 of 2)" in output) != prepared, output
        results += re.findall(r"weights .* steps 16", output)
        assert "goes on from" not in output or not prepared
    assert len(results) == 2
    assert results[0] == results[1]


def test_a_preempted_job_is_not_started_again_under_a_launcher_that_hides_it(tmp_path: Path) -> None:
    """torchrun ends with 1 where its ranks end with 75; they have told unitrain launch themselves."""
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [*LAUNCH, "--backend", "ddp", "-np", "2", "--max-restarts", "2", str(tmp_path / "train.py")]
    with started([*command, str(tmp_path), "SIGTERM"], {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
    assert launch.process.returncode == 75, output
    assert "started again" not in output
    assert "weights" not in output


FAILS = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); p.write_text(p.read_text() + 'x'); sys.exit(3)"


def test_it_is_given_up_after_so_many_attempts(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(FAILS)
    (tmp_path / "count").touch()
    finished = subprocess.run(
        [*LAUNCH, "--backend", "local", "--max-restarts", "2", str(tmp_path / "fails.py"), str(tmp_path / "count")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert finished.returncode == 3, finished.stderr
    assert (tmp_path / "count").read_text() == "xxx"


WAITS = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_what_is_asked_to_end_is_not_started_again(number: signal.Signals, tmp_path: Path) -> None:
    """Without a terminal, which sends an interrupt to the launcher too."""
    (tmp_path / "waits.py").write_text(WAITS)
    command = [*LAUNCH, "--backend", "local", "--max-restarts", "2", str(tmp_path / "waits.py"), str(tmp_path / "here")]
    with started(command) as launch:
        deadline = time.monotonic() + 60
        while not (tmp_path / "here").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(launch.process.pid, number)
        output = launch.output()
    assert launch.process.returncode == 128 + number, output
    assert "started again" not in output


def test_another_run_is_never_gone_on_with(tmp_path: Path) -> None:
    """Its folder is refused in every attempt, although the second could take it for the first one's."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "died").touch()
    alone = [*LAUNCH, "--backend", "local", "-np", "1"]
    script = [str(tmp_path / "train.py"), str(tmp_path)]
    for command, code in (([*alone, *script], 0), ([*alone, "--max-restarts", "1", *script], 1)):
        finished = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert finished.returncode == code, finished.stderr
    assert finished.stderr.count("already holds a run, up to step-") == 2, finished.stderr
