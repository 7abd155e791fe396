"""A job whose ranks are killed, and whose hosts come and go, goes on, and ends where an undisturbed one ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import elastic_training
import pytest
from elastic_training import EPOCHS, GLOBAL_BATCH, SAMPLES
from launches import started
from parts import needs_mpi

from unitrain.testing import RankGroup

SCRIPT = elastic_training.__file__
LAUNCH = [sys.executable, "-m", "unitrain", "launch"]
STEPS = EPOCHS * SAMPLES // GLOBAL_BATCH


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The parameters that one process comes to."""
    with RankGroup("local", 1) as group:
        (parameters,) = group.run(elastic_training.train, tmp_path_factory.mktemp("undisturbed"))
    return list(parameters)


def discovery(folder: Path) -> Path:
    """Return a script that says there are as many slots here as the file `slots` has."""
    script = folder / "discover"
    script.write_text(f'#!/bin/sh\necho "localhost:$(cat {folder}/slots)"\n')
    script.chmod(0o755)
    return script


def check(folder: Path, expected: list[float], sizes: list[int], lost: int) -> None:
    """Check that the run has gone through these numbers of ranks, repeated at most `lost` steps, and come to its end
    with every sample trained on once an epoch."""
    size, parameters = json.loads((folder / "parameters.json").read_text())
    assert parameters == pytest.approx(expected, rel=0, abs=1e-9)
    assert size == sizes[-1]
    taken: dict[int, dict[int, list[int]]] = {}
    gone_through: list[int] = []
    for line in (folder / "taken-0.txt").read_text().splitlines():
        gone_through += [json.loads(line)[1]]
    assert [one for at, one in enumerate(gone_through) if at == 0 or gone_through[at - 1] != one] == sizes
    assert len(gone_through) - STEPS <= lost
    for file in folder.glob("taken-*.txt"):
        for line in file.read_text().splitlines():
            step, ranks, samples = json.loads(line)
            # What was done again counts as it was done last, by as many ranks as there were then.
            taken.setdefault(step, {}).setdefault(ranks, [])
            taken[step][ranks] = [*taken[step][ranks], *samples]
    assert set(taken) == set(range(1, STEPS + 1))
    for epoch in range(EPOCHS):
        trained: list[int] = []
        for step in range(epoch * STEPS // EPOCHS + 1, (epoch + 1) * STEPS // EPOCHS + 1):
            for samples in taken[step].values():
                assert len(set(samples)) == GLOBAL_BATCH, (step, samples)
            trained += sorted(set(samples))
        assert sorted(trained) == list(range(SAMPLES))


@pytest.mark.parametrize(
    ("backend", "launcher"),
    [("ddp", "torchrun"), ("horovod", "horovodrun"), pytest.param("ddp", "mpirun", marks=needs_mpi)],
)
def test_slots_that_are_added_are_used_and_a_killed_rank_costs_a_few_steps(
    backend: str, launcher: str, tmp_path: Path, undisturbed: list[float]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"2": {"7": "slots 3"}, "3": {"33": "kill 1"}}))
    (tmp_path / "slots").write_text("2")
    options = ["--elastic", "1:3", "--max-restarts", "1", "--host-discovery-script", str(discovery(tmp_path))]
    command = [*LAUNCH, "--backend", backend, "--launcher", launcher, *options, SCRIPT, str(tmp_path), "1"]
    with started(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
        launch.wait_until_none_lives(10)
    assert launch.process.returncode == 0, output
    assert "there are slots for 3 ranks instead of 2: the job is asked to save and end" in output
    assert output.count("it is started again, 1 of 1") == 1, output  # that there are more slots is no failure
    check(tmp_path, undisturbed, [2, 3], lost=5)
