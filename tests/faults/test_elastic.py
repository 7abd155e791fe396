"""Elastic jobs with killed ranks and changing hosts have the final parameters of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

import elastic_training
import pytest
from elastic_training import EPOCHS, GLOBAL_BATCH, SAMPLES
from hosts import SECONDS, hosts
from launches import running_launcher
from requirements import needs_hosts, needs_mpi, needs_slurm
from slurm import slurm

from unitrain.testing import RankGroup

SCRIPT = elastic_training.__file__
LAUNCH = [sys.executable, "-m", "unitrain", "launch"]
VARIABLES = {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
STEPS = EPOCHS * SAMPLES // GLOBAL_BATCH


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the final parameters of a run in one process."""
    with RankGroup("local", 1) as group:
        (parameters,) = group.run(elastic_training.train, tmp_path_factory.mktemp("undisturbed"))
    return list(parameters)


def write_discovery_script(folder: Path) -> Path:
    """Write a discovery script that prints this host with the number of slots in the file `slots`. Return its path."""
    script = folder / "discover"
    script.write_text(f'#!/bin/sh\necho "localhost:$(cat {folder}/slots)"\n')
    script.chmod(0o755)
    return script


def wait_for_step(folder: Path, size: int, step: int) -> None:
    """Wait until a job with `size` ranks has completed `step` steps."""
    deadline = time.monotonic() + SECONDS
    progress = folder / "at-0"
    while True:
        found = [int(word) for word in progress.read_text().split()] if progress.exists() else []
        if len(found) == 2 and found[0] >= step and found[1] == size:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"no step {step} of {size} ranks within {SECONDS} s")
        time.sleep(0.1)


def check_run(folder: Path, expected: list[float], sizes: list[int], max_repeated_steps: int) -> None:
    """Assert that the run has completed with the `expected` parameters, had the numbers of ranks in `sizes`, repeated
    at most `max_repeated_steps` steps, and used every sample once per epoch."""
    size, parameters = json.loads((folder / "parameters.json").read_text())
    assert parameters == pytest.approx(expected, rel=0, abs=1e-9)
    assert size == sizes[-1]
    ranks = [
        [json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.glob("taken-*.txt"))
    ]
    step_sizes = [size for _, size, _ in ranks[0]]
    assert [size for index, size in enumerate(step_sizes) if index == 0 or step_sizes[index - 1] != size] == sizes
    assert len(step_sizes) - STEPS <= max_repeated_steps
    # If a step was repeated, use its last repetition and the number of ranks of this repetition.
    last = {step: size for step, size, _ in ranks[0]}
    assert sorted(last) == list(range(1, STEPS + 1))
    taken = [{step: samples for step, size, samples in lines if last[step] == size} for lines in ranks]
    for epoch in range(EPOCHS):
        steps = range(epoch * STEPS // EPOCHS + 1, (epoch + 1) * STEPS // EPOCHS + 1)
        trained = [[sample for rank in taken for sample in rank.get(step, [])] for step in steps]
        assert {len(samples) for samples in trained} == {GLOBAL_BATCH}
        assert sorted(chain.from_iterable(trained)) == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [
        ("ddp", "torchrun"),
        pytest.param("horovod", "horovodrun", marks=pytest.mark.nightly),
        pytest.param("ddp", "mpirun", marks=[needs_mpi, pytest.mark.nightly]),
    ],
)
def test_elastic_job_uses_added_slots_and_repeats_few_steps_after_a_kill(
    backend: str, launcher: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"2": {"7": "slots 3"}, "3": {"33": "kill 1"}}))
    (tmp_path / "slots").write_text("2")
    discover = str(write_discovery_script(tmp_path))
    options = ["--elastic", "1:3", "--max-restarts", "1", "--host-discovery-script", discover]
    command = [*LAUNCH, "--backend", backend, "--launcher", launcher, *options, SCRIPT, str(tmp_path), "1"]
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output, _ = launch.process.communicate(timeout=2 * SECONDS)  # three launches, one after the other
        launch.wait_until_all_exited(10)
    assert launch.process.returncode == 0, output
    assert "there are 3 slots instead of 2: asking the job to save a checkpoint and exit" in output
    assert output.count("(restart 1 of 1)") == 1, output  # a restart for added slots does not count as a failure
    check_run(tmp_path, undisturbed, [2, 3], max_repeated_steps=5)


@pytest.mark.nightly
@needs_hosts
def test_elastic_job_follows_added_and_removed_hosts(tmp_path: Path, undisturbed: list[float]) -> None:
    """A host is added when it becomes reachable. A host that loses its network is detected and removed."""
    (tmp_path / "plan.json").write_text(json.dumps({"2": {"5": "slow grown"}, "3": {"20": "slow shrunk"}}))
    options = ["--backend", "horovod", "--elastic", "1:3", "--max-restarts", "1", "-H", "h1:1,h2:1,h3:1"]
    (tmp_path / "hosts").mkdir()
    with hosts(3, tmp_path / "hosts", hostname_is_loopback=True) as (first, second, third):
        third.disconnect_network()
        with first.start([*LAUNCH, *options, SCRIPT, str(tmp_path), "1"], VARIABLES) as launch:
            try:
                wait_for_step(tmp_path, size=2, step=6)
                third.reconnect_network()
                wait_for_step(tmp_path, size=3, step=21)
                (tmp_path / "grown").touch()
                second.kill()
                wait_for_step(tmp_path, size=2, step=25)
                output, _ = launch.communicate(timeout=SECONDS)
            finally:
                first.kill_all()
        third.wait_until_all_exited(10)
    assert launch.returncode == 0, output
    assert "there are 3 slots instead of 2" in output
    assert "the host of rank 1 does not respond" in output
    check_run(tmp_path, undisturbed, [2, 3, 2], max_repeated_steps=5)


@pytest.mark.nightly
@needs_hosts
def test_elastic_torchrun_continues_on_the_remaining_hosts(tmp_path: Path, undisturbed: list[float]) -> None:
    """The test runs the commands that `unitrain launch` prints for each host, so torchrun's agents form the job. A lost
    host is detected by a timeout."""
    (tmp_path / "plan.json").write_text(json.dumps({"2": {"5": "slow shrunk"}, "1": {"10": "slow grown"}}))
    (tmp_path / "hosts").mkdir()
    options = ["--elastic", "1:3", "--max-restarts", "2", "-H", "h1:1,h2:1,h3:1", SCRIPT, str(tmp_path), "1", "15"]
    completed = subprocess.run([*LAUNCH, *options], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert completed.returncode == 2, completed.stderr
    lines = {
        line.split()[1]: line.partition(": ")[2] for line in completed.stderr.splitlines() if line.startswith("  on h")
    }
    with hosts(3, tmp_path / "hosts", hostname_is_loopback=True) as (first, second, third), ExitStack() as ended:
        agents = []
        for host in (first, second):
            agents.append(ended.enter_context(host.start(["sh", "-c", lines[f"{host.name}:"]], VARIABLES)))
            ended.callback(host.kill_all)
        wait_for_step(tmp_path, size=2, step=6)
        second.kill()
        wait_for_step(tmp_path, size=1, step=11)
        (tmp_path / "shrunk").touch()
        agents.append(ended.enter_context(third.start(["sh", "-c", lines["h3:"]], VARIABLES)))
        ended.callback(third.kill_all)
        wait_for_step(tmp_path, size=2, step=12)
        outputs = [agents[index].communicate(timeout=SECONDS)[0] for index in (0, 2)]
    assert [agents[0].returncode, agents[2].returncode] == [0, 0], outputs
    check_run(tmp_path, undisturbed, [2, 1, 2], max_repeated_steps=5)


@needs_slurm
def test_job_under_srun_is_restarted_after_a_rank_is_killed(tmp_path: Path, undisturbed: list[float]) -> None:
    """The job runs on two hosts, so some ranks connect to the launch command from another host."""
    (tmp_path / "plan.json").write_text(json.dumps({"2": {"12": "kill 1"}}))
    (tmp_path / "hosts").mkdir()
    (tmp_path / "slurm").mkdir()
    line = ["salloc", "-N", "2", "-n", "2", *LAUNCH, "--launcher", "srun", "--max-restarts", "1"]
    with (
        hosts(2, tmp_path / "hosts", hostname_is_loopback=True) as both,
        slurm(both, tmp_path / "slurm") as given,
    ):
        done = both[0].run([*line, SCRIPT, str(tmp_path)], VARIABLES | given)
    assert done.returncode == 0, done.stdout
    assert "(restart 1 of 1)" in done.stdout
    assert "cannot reach unitrain launch" not in done.stdout
    check_run(tmp_path, undisturbed, [2], max_repeated_steps=5)
