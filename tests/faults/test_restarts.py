"""Jobs that are restarted after a failure have the same results as jobs without failures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hosts import Host
from launches import SECONDS, running_launcher
from requirements import needs_hosts

LAUNCH = [sys.executable, "-m", "unitrain", "launch"]

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

class KillOnce(unitrain.Callback):
    def on_step_end(self, trainer):
        marker = Path(sys.argv[1]) / "killed"
        if trainer.backend.rank == 1 and trainer.progress.step == 7 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.Signals[(sys.argv[2:] or ["SIGKILL"])[0]])
            # A thread records SIGTERM. The ranks exchange received signals at the end of the epoch, after the next
            # step.
            deadline = time.monotonic() + 30
            while trainer._stopping._preemption.received_signal is None and time.monotonic() < deadline:
                time.sleep(0.01)

with unitrain.init(device="cpu") as backend:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(60, 3), torch.randn(60, 1))
    config = unitrain.TrainConfig(
        max_epochs=2, batch_size=4, output_dir=Path(sys.argv[1]) / "run", checkpoint_every_steps=5, progress="off"
    )
    loss = nn.functional.mse_loss
    trainer = unitrain.Trainer(model, optimizer, loss, backend=backend, config=config, callbacks=[KillOnce()])
    trainer.fit(data)
    if backend.rank == 0:
        print("weights", model.weight.tolist(), "steps", trainer.progress.step)
"""


@pytest.mark.parametrize(
    ("backend", "launcher"), [pytest.param("ddp", "torchrun", marks=pytest.mark.nightly), ("horovod", "horovodrun")]
)
def test_a_job_with_a_killed_rank_resumes_from_the_last_checkpoint(backend: str, launcher: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    results = []
    for name, is_undisturbed in (("undisturbed", True), ("restarted", False)):
        (tmp_path / name).mkdir()
        if is_undisturbed:
            (tmp_path / name / "killed").touch()
        command = [*LAUNCH, "--backend", backend, "--launcher", launcher, "-np", "2", "--max-restarts", "2"]
        with running_launcher(
            [*command, str(tmp_path / "train.py"), str(tmp_path / name)], {"OMP_NUM_THREADS": "1"}
        ) as launch:
            output = launch.output()
            launch.wait_until_all_exited(10)
        assert launch.process.returncode == 0, output
        assert ("(restart 1 of 2)" in output) != is_undisturbed, output
        results += re.findall(r"weights .* steps 16", output)
    assert len(results) == 2
    assert results[0] == results[1]


def test_a_preempted_job_is_not_restarted_if_the_launcher_hides_the_exit_code(tmp_path: Path) -> None:
    """torchrun exits with 1 if its ranks exit with 75, but the ranks also report the preemption to the supervisor."""
    (tmp_path / "train.py").write_text(PROGRAM)
    command = [*LAUNCH, "--backend", "ddp", "-np", "2", "--max-restarts", "2", str(tmp_path / "train.py")]
    with running_launcher([*command, str(tmp_path), "SIGTERM"], {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
    assert launch.process.returncode == 75, output
    assert "restarting" not in output
    assert "weights" not in output


FAILS = "import sys, pathlib; p = pathlib.Path(sys.argv[1]); p.write_text(p.read_text() + 'x'); sys.exit(3)"


def test_a_job_is_not_restarted_more_often_than_allowed(tmp_path: Path) -> None:
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


SLEEP = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_job_is_not_restarted_after_an_interrupt_or_termination_signal(signum: signal.Signals, tmp_path: Path) -> None:
    """The job has no terminal, which would also send the interrupt to the launcher."""
    (tmp_path / "sleep.py").write_text(SLEEP)
    command = [
        *LAUNCH,
        "--backend",
        "local",
        "--max-restarts",
        "2",
        str(tmp_path / "sleep.py"),
        str(tmp_path / "started"),
    ]
    with running_launcher([*command, str(tmp_path / "sleep.py"), str(tmp_path / "started")]) as launch:
        deadline = time.monotonic() + 60
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(launch.process.pid, signum)
        output = launch.output()
    received = signal.SIGTERM if signum == signal.SIGHUP else signum
    assert launch.process.returncode == 128 + received, output
    assert "restarting" not in output
    memory = re.search(r"UNITRAIN_MEMORY_FOLDER=(\S+)", output)
    assert memory is not None, output
    assert not Path(memory[1]).exists()


LEAVES_A_PROCESS = """
import os, signal, subprocess, sys
from pathlib import Path
import unitrain

with unitrain.init(device="cpu"):
    if not (killed := Path(sys.argv[1], "killed")).exists():
        killed.touch()
        subprocess.Popen(["sleep", "100"], start_new_session=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ci
def test_process_that_outlives_a_killed_rank_does_not_prevent_the_restart(tmp_path: Path) -> None:
    """horovodrun would wait for this process, because the process keeps the rank's output pipes open."""
    (tmp_path / "train.py").write_text(LEAVES_A_PROCESS)
    command = [*LAUNCH, "--backend", "local", "--launcher", "horovodrun", "-np", "1", "--max-restarts", "1"]
    with running_launcher([*command, str(tmp_path / "train.py"), str(tmp_path)]) as launch:
        output = launch.output()
        assert launch.find_processes()  # only the process that outlives the rank
    assert launch.process.returncode == 0, output
    assert "(restart 1 of 1)" in output, output


@pytest.mark.nightly
@needs_hosts
def test_process_that_outlives_a_rank_on_another_host_does_not_prevent_the_restart(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    """ssh waits for it, so the supervisor ends the launcher."""
    (tmp_path / "train.py").write_text(LEAVES_A_PROCESS)
    command = [*LAUNCH, "--backend", "local", "--launcher", "horovodrun", "-H", "h2:1", "--max-restarts", "1"]
    variables = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = two_hosts[0].run([*command, str(tmp_path / "train.py"), str(tmp_path)], variables)
    assert done.returncode == 0, done.stdout
    assert "unitrain: all ranks have exited, but the launcher has not; ending it" in done.stdout
    assert "(restart 1 of 1)" in done.stdout


SAVES_SLOWLY = """
import sys, time
from pathlib import Path
import unitrain
from unitrain.monitoring import supervisor_client
from unitrain.progress.preemption import PreemptionHandler

with unitrain.init(device="cpu") as backend, PreemptionHandler(["SIGTERM"]) as preemption:
    saved = Path(sys.argv[1], f"saved-{backend.rank}")
    if not saved.exists():
        Path(sys.argv[1], f"started-{backend.rank}").touch()
        deadline = time.monotonic() + 60
        while preemption.received_signal is None and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(3)  # the time that a checkpoint takes
        saved.write_text(str(preemption.received_signal))
        supervisor_client.report_preempted()
        raise unitrain.Preempted("SIGTERM was received")
"""


@pytest.mark.nightly
def test_ranks_save_before_the_restart_if_their_launcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SAVES_SLOWLY)
    command = [*LAUNCH, "-np", "2", "--max-restarts", "1", str(tmp_path / "train.py"), str(tmp_path)]
    # `fresh` is required, because the ranks disable their parent-death signal. The stub of a rank that is forked from
    # the preloaded interpreter would still receive this signal, and forward it to the rank.
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}, fresh=True) as launch:
        deadline = time.monotonic() + SECONDS
        while len(list(tmp_path.glob("started-*"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        (torchrun,) = psutil.Process(launch.process.pid).children()
        torchrun.kill()
        output = launch.output()
    assert launch.process.returncode == 0, output
    assert "the job ended with exit code 137; restarting it from its newest checkpoint (restart 1 of 1)" in output
    for rank in range(2):
        assert (tmp_path / f"saved-{rank}").read_text() == "SIGTERM", output


def test_a_run_of_another_job_is_not_resumed(tmp_path: Path) -> None:
    """The folder of another job is rejected in every attempt. The second attempt must not mistake it for the folder of
    the first attempt."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "killed").touch()
    alone = [*LAUNCH, "--backend", "local", "-np", "1"]
    script = [str(tmp_path / "train.py"), str(tmp_path)]
    for command, code in (([*alone, *script], 0), ([*alone, "--max-restarts", "1", *script], 1)):
        with running_launcher(command) as launch:
            output = launch.output()
        assert launch.process.returncode == code, output
    assert output.count("already holds a run, up to step-") == 2, output
