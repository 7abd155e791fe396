"""`unitrain submit` with a real Slurm on two hosts: a job saves after a warning signal, is requeued and resumes."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import hosts
from requirements import needs_hosts, needs_slurm
from slurm import slurm

SECONDS = 90
EPOCHS = 300
SCRIPT = f"""
import os, sys, time
import torch
import unitrain

class Slow(unitrain.Callback):
    def on_epoch_end(self, trainer, results):
        time.sleep(0 if "SLURM_RESTART_COUNT" in os.environ else 0.2)  # the signal must arrive during training

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
with unitrain.init(device="cpu") as backend:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    config = unitrain.TrainConfig(
        max_epochs={EPOCHS}, batch_size=8, checkpoint_every_epochs={EPOCHS}, output_dir=sys.argv[1],
        resume="auto", progress="off",
    )
    print(f"{{backend.name}} {{backend.rank}}/{{backend.size}} in attempt", os.environ.get("SLURM_RESTART_COUNT", "0"))
    unitrain.Trainer(
        model, optimizer, torch.nn.functional.mse_loss, backend=backend, config=config, callbacks=[Slow()]
    ).fit(data)
"""


@needs_hosts
@needs_slurm
@pytest.mark.timeout(240)
def test_job_is_requeued_after_the_warning_signal_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    history, log, daemons = tmp_path / "run" / "history.jsonl", tmp_path / "log", tmp_path / "slurm"
    daemons.mkdir()

    def wait_for(what: str, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > deadline:
                seen = found[0].run(["bash", "-c", "scontrol show job; sinfo -lN"], variables).stdout
                raise TimeoutError(f"{what} was not seen within {SECONDS} s:\n{log.read_text()}\n{seen}")
            time.sleep(0.2)

    with hosts(2, tmp_path) as found, slurm(found, daemons) as variables:
        variables |= {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}

        def run(*words: str) -> str:
            done = found[0].run(words, variables, seconds=60)
            assert done.returncode == 0, done.stdout
            return done.stdout

        def state() -> str:
            return run("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job).strip()

        def has_completed() -> bool:
            if state() == "PENDING":  # skip the delay of two minutes before a requeued job starts
                found[0].run(["scontrol", "update", f"JobId={job}", "StartTime=now"], variables)
            return state() == "COMPLETED"

        submit = [sys.executable, "-m", "unitrain", "submit", "--to", "slurm", "--nodes", "2", "--time", "30"]
        submitted = run(*submit, "--output", str(log), "--exclusive", "train.py", "run")
        match = re.search(r"^Submitted batch job (\d+)$", submitted, re.MULTILINE)
        assert match is not None, submitted
        job = match[1]
        wait_for("the first epoch", history.exists)
        run("scancel", "--signal=USR1", job)  # as Slurm does before the time limit
        wait_for("the requeued job", lambda: state() == "PENDING")
        # Slurm delays the second attempt until it has seen the end of the first attempt. This test skips the delay,
        # so it waits for idle nodes instead.
        wait_for("idle nodes", lambda: set(run("sinfo", "-hN", "--format=%T").split()) == {"idle"})
        time.sleep(3)
        wait_for("the end of the job", has_completed)
    output = log.read_text()
    assert [output.count(f"ddp {rank}/2 in attempt {attempt}") for attempt in (0, 1) for rank in (0, 1)] == [1] * 4, (
        output
    )
    epochs = [json.loads(line)["epoch"] for line in history.read_text().splitlines()]
    assert epochs == list(range(1, EPOCHS + 1))
