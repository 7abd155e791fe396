"""Runs Horovod's own tests of its PyTorch interface on the installed Horovod.

The files are part of a Horovod checkout. As in Horovod's CI, each file runs on 2 new ranks, and with the Gloo
controller, each test initializes Horovod and shuts it down. The tests also run with one initialization per file.
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

FILES = ("test_torch.py", "test_adasum_pytorch.py", "test_timeline.py", "test_common.py")
SECONDS = 1500  # limit per file
# Tests that fail for a reason outside Horovod, with the reason.
_MUON = "it runs with each optimizer of torch, and the newer optimizer Muon accepts 2-D parameters only"
DIFFERENCES = {
    "test_broadcast_state": _MUON,
    "test_broadcast_state_no_grad": _MUON,
    "test_broadcast_state_options": _MUON,
    "test_force_allreduce": _MUON,
}
# (title, controller, whether Horovod is initialized once). A process can initialize MPI only once.
_CONFIGURATIONS = (
    ("Gloo, init and shutdown per test", "gloo", False),
    ("Gloo, one init", "gloo", True),
    ("MPI, one init", "mpi", True),
)
_TESTS_OF_SHUTDOWN = ("test_horovod_reinit", "test_horovod_is_initialized")
# Program of one rank: runs pytest with a report for each rank. The tests import the package `mock`, which is replaced
# by unittest.mock.
_PROGRAM = """
import os, sys, unittest.mock
import horovod.torch
import pytest

sys.modules["mock"] = unittest.mock
if sys.argv[1] == "once":
    horovod.torch.shutdown = lambda: None
rank = os.environ.get("HOROVOD_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
sys.exit(pytest.main([f"--junitxml={sys.argv[2]}{rank}", *sys.argv[3:]]))
"""


def run(folder: Path) -> tuple[list[str], bool]:
    """Run the tests in each configuration. Return lines for the table, and whether all results are expected."""
    lines = ["| Horovod's own tests, 2 ranks | passed | skipped | failed |", "|---|---|---|---|"]
    reasons: dict[str, str] = {}
    is_passed = True
    for title, controller, starts_once in _CONFIGURATIONS:
        if controller == "mpi" and shutil.which("mpirun") is None:
            continue
        found = [_run(folder / "test" / "parallel" / name, controller, starts_once) for name in FILES]
        outcomes = {test: outcome for one in found for test, outcome in one.items()}
        failed = sorted(test for test, outcome in outcomes.items() if outcome == "failed")
        reasons |= {test: DIFFERENCES.get(test, "unexpected") for test in failed}
        is_passed = is_passed and all(found) and set(failed) <= set(DIFFERENCES)
        counts = [
            sum(outcome == expected for outcome in outcomes.values()) for expected in ("passed", "skipped", "failed")
        ]
        lines.append(f"| {title} | " + " | ".join(map(str, counts)) + " |")
        lines += [f"| no results from {name} | | | |" for name, one in zip(FILES, found, strict=True) if not one]
    if reasons:
        lines += ["", "| failed test | reason |", "|---|---|"]
        lines += [f"| `{test}` | {reason} |" for test, reason in reasons.items()]
    return lines, is_passed


def _run(path: Path, controller: str, starts_once: bool) -> dict[str, str]:
    """Run the tests of a file, and return {test: outcome} of rank 0."""
    with tempfile.TemporaryDirectory() as text:
        report = Path(text) / "report.xml"
        arguments = ["-q", "-p", "no:cacheprovider", "--timeout=120", "-o", "addopts=", str(path)]
        if controller == "gloo" and starts_once:
            arguments += ["-k", " and ".join(f"not {test}" for test in _TESTS_OF_SHUTDOWN)]
        command = [
            str(Path(sys.executable).parent / "horovodrun"), "-np", "2", f"--{controller}",
            sys.executable, "-c", _PROGRAM, "once" if starts_once else "per test", str(report), *arguments,
        ]  # fmt: skip
        environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        subprocess.run(
            command, cwd=path.parent, env=environment, timeout=SECONDS, check=False, stdout=subprocess.DEVNULL,
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
