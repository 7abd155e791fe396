"""Goodput, events and metrics of jobs with killed ranks: the categories add up to the measured wall-clock time."""

from __future__ import annotations

import http.client
import json
import re
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launches import running_launcher
from prometheus_client.parser import text_string_to_metric_families

from unitrain.bootstrap.network import reserve_port
from unitrain.cli import unitrain as command_line
from unitrain.progress.goodput import GoodputSummary, read_attempts

# Rank 1 is killed after step 7, and rank 0 after step 12. Checkpoints are saved after every fifth step. Records are
# written at sync points if a second has passed, so the last record before each kill includes the previous step. Before
# a kill, the rank waits until the endpoint has been read in the current attempt. After `fit`, rank 0 waits until the
# endpoint has been read again.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

folder = Path(sys.argv[1])

def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)

class Kills(unitrain.Callback):
    def on_step_end(self, trainer):
        step, rank = trainer.progress.step, trainer.backend.rank
        time.sleep(1.2 if step in (6, 11) else 0.1)
        for restarts, (killed, kill_step) in enumerate(((1, 7), (0, 12))):
            marker = folder / f"killed-{killed}"
            if (rank, step) == (killed, kill_step) and not marker.exists():
                wait_for(folder / f"scraped-{restarts}")
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self, trainer):
        if trainer.backend.rank == 0:
            print("time before", time.time())

with unitrain.init(device="cpu") as backend:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(60, 3), torch.randn(60, 1))
    config = unitrain.TrainConfig(
        max_epochs=2, batch_size=4, output_dir=folder / "run", checkpoint_every_steps=5, async_checkpoints=False,
        log_every_n_steps=1, peak_flops=1e9, progress="lines",
    )

    def loss_fn(output, target):
        return ((output - target) ** 2).sum(), 7 * len(target)

    trainer = unitrain.Trainer(model, optimizer, loss_fn, backend=backend, config=config, callbacks=[Kills()])
    trainer.fit(data, TensorDataset(*data[:8]))
    if backend.rank == 0:
        print("time after", time.time())
        (folder / "trained").touch()
        wait_for(folder / "scraped")
"""
RESTARTS = ("unitrain_restarts_total", "")  # available after the first sync point of an attempt


class Scraper:
    """Reads the endpoint on `port` every 0.2 s. `samples` contains every response as values by name and labels.

    `folder` receives the files that PROGRAM waits for.
    """

    def __init__(self, port: int, folder: Path) -> None:
        self._port, self._folder, self.samples = port, folder, list[dict[tuple[str, str], float]]()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            is_trained = (self._folder / "trained").exists()
            try:
                text = urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10).read().decode()
            except (OSError, http.client.HTTPException):  # the rank was killed while it responded
                continue
            self.samples.append(
                {
                    (sample.name, ",".join(sample.labels.values())): sample.value
                    for family in text_string_to_metric_families(text)
                    for sample in family.samples
                }
            )
            if RESTARTS in self.samples[-1]:
                (self._folder / f"scraped-{self.samples[-1][RESTARTS]:.0f}").touch()
            if is_trained:
                (self._folder / "scraped").touch()


def read_events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.ci
@pytest.mark.parametrize(("backend", "launcher"), [("ddp", "torchrun"), ("horovod", "horovodrun")])
def test_goodput_of_a_job_with_killed_ranks_adds_up_to_its_wall_clock_time(
    backend: str, launcher: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    with reserve_port() as reservation:
        port = reservation.getsockname()[1]
        command = [
            sys.executable, "-m", "unitrain", "launch", "--backend", backend, "--launcher", launcher, "-np", "2",
            "--max-restarts", "3", "--metrics-port", str(port), str(tmp_path / "train.py"), str(tmp_path),
        ]  # fmt: skip
        started = time.time()
        with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
            # Under tests/support/preload.py, the time of the run starts when the process of `unitrain launch` is
            # forked, so wait for this process.
            while len(launch.find_processes()) < 2:
                assert launch.process.poll() is None, launch.output()
                time.sleep(0.01)
            since = time.time()
            scraper = Scraper(port, tmp_path)
            output = launch.output()
            scraper.stop()
    assert launch.process.returncode == 0, output

    # The total is the time from the start of `unitrain launch` to the end of `fit`.
    attempts = read_attempts(tmp_path / "run")
    summary = GoodputSummary.of(attempts)
    before, after = (float(re.findall(rf"time {name} ([\d.]+)", output)[-1]) for name in ("before", "after"))
    assert before - since - 0.05 <= summary.total_seconds <= after - started + 0.05, output
    assert attempts[-1].ended - attempts[0].started == pytest.approx(summary.total_seconds, abs=0.05)

    # When rank 1 is killed, rank 0 is either terminated or raises an exception after step 7.
    reached = attempts[0].last_step
    assert (reached, attempts[0].status) in [(6, "running"), (7, "failed")]
    assert [(attempt.first_step, attempt.last_step, attempt.status) for attempt in attempts] == [
        (0, reached, attempts[0].status), (5, 11, "running"), (10, 16, "finished"),
    ]  # fmt: skip
    assert [attempt.replayed_steps for attempt in attempts] == [0, reached - 5, 1]
    for category, least in {
        "training": 3.0,
        "replayed": 2.4,
        "startup": 1.0,
        "restart": 3.0,
        "checkpoint": 0.01,
    }.items():
        assert summary.seconds[category] >= least, (category, summary)
    assert f"goodput {100 * summary.goodput:.1f} %" in " ".join(output.split()), output
    shown = CliRunner().invoke(command_line, ["report", "--goodput", str(tmp_path / "run")])
    assert shown.exit_code == 0
    assert re.search(rf"2 restarts, {reached - 4} replayed steps", shown.output)
    assert re.search(r"(running, or killed|failed)\n.*running, or killed\n.*finished", shown.output)

    events = read_events(tmp_path / "run")
    found = [(event["attempt"], event["event"], event["step"]) for event in events]
    assert [event for event in found if event[1] not in ("checkpoint", "validation", "straggler")] == [
        (1, "start", 0), (1, "failure", reached), (2, "restart", 5), (2, "failure", 11), (3, "restart", 10),
        (3, "end", 16),
    ]  # fmt: skip
    # An epoch of 8 steps is saved before its validation, and again with the results.
    steps = [(attempt, step) for attempt, event, step in found if event == "checkpoint"]
    assert steps == [(1, 5), (2, 8), (2, 8), (2, 10), (3, 15), (3, 16), (3, 16)]
    reasons = [event["reason"] for event in events if event["event"] == "failure"]
    assert reasons[0] == "rank 1 was killed or crashed" or attempts[0].status == "failed"
    assert reasons[1:] == ["rank 0 was killed or crashed"]

    # Counters of the run never decrease, not even from one attempt to the next.
    for name in ("unitrain_goodput_seconds_total", "unitrain_restarts_total", "unitrain_replayed_steps_total"):
        for key in {key for sample in scraper.samples for key in sample if key[0] == name}:
            values = [sample[key] for sample in scraper.samples if key in sample]
            assert values == sorted(values), (key, values)

    # The endpoint was read in all attempts, on the same port.
    assert {sample[RESTARTS] for sample in scraper.samples if RESTARTS in sample} == {0, 1, 2}
    last = scraper.samples[-1]
    assert last["unitrain_step", ""] == 16
    assert last["unitrain_replayed_steps_total", ""] == reached - 4
    assert last["unitrain_goodput_ratio", ""] == pytest.approx(summary.goodput, rel=0.5)
    assert last["unitrain_tokens_per_second", ""] > 0
    assert last["unitrain_mfu", ""] > 0
    for rank in ("0", "1"):
        assert last["unitrain_memory_bytes", rank] > 1e7
        assert last["unitrain_slow_rank", rank] in (0, 1)
        assert last["unitrain_phase_seconds_total", f"compute,{rank}"] > 0


# Attempts 1 and 3 fail before the Trainer is created, and attempt 2 after step 6.
FAILING_PROGRAM = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

folder = Path(sys.argv[1])
attempt = len(list(folder.glob("attempt-*"))) + 1
(folder / f"attempt-{attempt}").touch()

class Fails(unitrain.Callback):
    def on_step_end(self, trainer):
        if (attempt, trainer.progress.step) == (2, 6):
            raise OSError("a network error")

with unitrain.init(device="cpu") as backend:
    if attempt in (1, 3):
        raise OSError("the data is missing")
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = unitrain.TrainConfig(
        max_steps=8, batch_size=4, output_dir=folder / "run", checkpoint_every_steps=4, progress="lines"
    )
    trainer = unitrain.Trainer(model, optimizer, nn.MSELoss(), backend=backend, config=config, callbacks=[Fails()])
    trainer.fit(TensorDataset(torch.randn(60, 3), torch.randn(60, 1)))
"""


@pytest.mark.ci
def test_attempts_that_fail_before_fit_are_part_of_the_goodput(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING_PROGRAM)
    command = [
        sys.executable, "-m", "unitrain", "launch", "--backend", "ddp", "--launcher", "torchrun", "-np", "1",
        "--max-restarts", "3", str(tmp_path / "train.py"), str(tmp_path),
    ]  # fmt: skip
    started = time.time()
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
    ended = time.time()
    assert launch.process.returncode == 0, output
    attempts = read_attempts(tmp_path / "run")
    assert [(attempt.first_step, attempt.last_step, attempt.status) for attempt in attempts] == [
        (0, 0, "failed"), (0, 6, "failed"), (6, 6, "failed"), (4, 8, "finished"),
    ]  # fmt: skip
    summary = GoodputSummary.of(attempts)
    assert attempts[-1].ended - attempts[0].started == pytest.approx(summary.total_seconds, abs=0.05)
    assert attempts[0].started >= started - 0.05
    assert attempts[-1].ended <= ended + 0.05
    assert attempts[0].seconds.keys() == {"hosts", "startup"}
    assert attempts[2].seconds["restart"] > 0
    found = [(event["attempt"], event["event"], event["step"]) for event in read_events(tmp_path / "run")]
    assert [event for event in found if event[1] in ("start", "failure", "restart", "end")] == [
        (1, "failure", 0), (2, "restart", 0), (2, "failure", 6), (3, "failure", 6), (4, "restart", 4), (4, "end", 8),
    ]  # fmt: skip
