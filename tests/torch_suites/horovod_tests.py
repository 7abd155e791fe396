"""Horovod's own tests of its PyTorch interface, on the Horovod of this environment.

The files come from a checkout of Horovod. They run as Horovod's CI runs them: with the Gloo controller, each test
starts Horovod and shuts it down.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

TEST_FILE = "test/parallel/test_torch.py"
SECONDS = 1500
# Tests that fail for a reason outside Horovod, with the reason.
_MUON = "it runs with each optimizer of torch, and the newer optimizer Muon accepts 2-D parameters only"
DIFFERENCES = {
    "test_broadcast_state": _MUON,
    "test_broadcast_state_no_grad": _MUON,
    "test_broadcast_state_options": _MUON,
    "test_force_allreduce": _MUON,
}
# Program of one rank: pytest with a report for each rank. The tests import the package `mock`, which unittest contains.
_PROGRAM = """
import os, sys, unittest.mock
import horovod.torch
import pytest

sys.modules["mock"] = unittest.mock
if "HOROVOD_RANK" not in os.environ:
    horovod.torch.shutdown = lambda: None  # MPI can start only once in a process
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
sys.exit(pytest.main([f"--junitxml={sys.argv[1]}{rank}", *sys.argv[2:]]))
"""


def run(folder: Path) -> tuple[list[str], bool]:
    """Run the tests on 2 ranks, with each controller. Return lines for the table, and whether all results are
    expected."""
    lines, is_passed = ["| Horovod's test_torch.py, 2 ranks | passed | skipped | failed |", "|---|---|---|---|"], True
    for controller in ("gloo", "mpi"):
        if controller == "mpi" and shutil.which("mpirun") is None:
            continue
        outcomes = _run(folder, controller)
        failed = sorted(test for test, outcome in outcomes.items() if outcome == "failed")
        unexpected = [test for test in failed if test not in DIFFERENCES]
        is_passed = is_passed and bool(outcomes) and not unexpected
        numbers = [sum(one == kind for one in outcomes.values()) for kind in ("passed", "skipped", "failed")]
        lines.append(f"| {controller} controller | " + " | ".join(map(str, numbers)) + " |")
        lines += [f"| `{test}` | | | {DIFFERENCES.get(test, 'unexpected')} |" for test in failed]
    return lines, is_passed


def _run(folder: Path, controller: str) -> dict[str, str]:
    """Return {test: outcome} of rank 0."""
    with tempfile.TemporaryDirectory() as text:
        report = Path(text) / "report.xml"
        arguments = ["-q", "-p", "no:cacheprovider", "--timeout=120", "-o", "addopts="]
        arguments.append(str(folder / TEST_FILE))
        command = [
            str(Path(sys.executable).parent / "horovodrun"), "-np", "2", f"--{controller}",
            sys.executable, "-c", _PROGRAM, str(report), *arguments,
        ]  # fmt: skip
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        subprocess.run(
            command, cwd=folder, env=environment, timeout=SECONDS, check=False, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        written = Path(f"{report}0")
        if not written.exists():
            return {}
        outcomes = {}
        for case in ElementTree.parse(written).iter("testcase"):
            kinds = {child.tag for child in case}
            name = re.sub(r"\[.*", "", case.attrib["name"])
            outcomes[name] = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        return outcomes
