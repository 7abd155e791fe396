"""Lightning, Accelerate and ignite have the same results on Horovod's process group as on Gloo's."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from launches import running_launcher
from requirements import needs_package

TORCHRUN = str(Path(sys.executable).parent / "torchrun")
SCRIPT = Path(__file__).parents[1] / "support" / "trainers_on_process_groups.py"


def train(trainer: str, backend: str) -> dict[str, Any]:
    """Train on two ranks, and return the results of rank 0."""
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", str(SCRIPT), trainer, backend]
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
    assert launch.process.returncode == 0, output
    (result,) = re.findall(r"RESULT (.*)", output)
    found: dict[str, Any] = json.loads(result)
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    "trainer",
    [pytest.param(name, marks=needs_package(name, "peers")) for name in ("lightning", "accelerate", "ignite")],
)
def test_trainer_of_another_library_has_the_same_results_on_horovod(trainer: str) -> None:
    expected, found = train(trainer, "gloo"), train(trainer, "horovod")
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert found["parameters"] == pytest.approx(expected["parameters"], abs=1e-6)
    assert max(map(abs, found["parameters"])) > 0.1
