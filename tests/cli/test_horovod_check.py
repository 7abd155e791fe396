"""`unitrain horovod check` describes the installed Horovod, even if its import fails, crashes or hangs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from preload import preloaded

from unitrain.cli.horovod import horovod
from unitrain.horovod_wheel import check, plan
from unitrain.horovod_wheel.patches import RUNTIME_FIXES


@pytest.fixture(scope="module")
def other_horovod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for PYTHONPATH with a copy of the installed Horovod without its library, which each test adds."""
    folder = check.inspect().folder
    assert folder is not None, "Horovod is not installed. Build it with: unitrain horovod build"
    copy = tmp_path_factory.mktemp("other")
    shutil.copytree(folder, copy / "horovod", ignore=shutil.ignore_patterns("*.so", "__pycache__", check.RECORD_FILE))
    yield copy
    shutil.rmtree(copy)


UNDEFINED = "extern void torch_gone(void); void PyInit_mpi_lib_v2(void) { torch_gone(); }"
CRASHING = "#include <stdlib.h>\nvoid PyInit_mpi_lib_v2(void) { abort(); }"
HANGING = "#include <unistd.h>\nvoid PyInit_mpi_lib_v2(void) { sleep(600); }"


def build_library(other: Path, code: str, *, built_for: str) -> None:
    (other / "horovod/metadata.json").write_text(json.dumps({"pytorch": built_for}))
    library = other / "horovod/torch" / f"mpi_lib_v2{sysconfig.get_config_var('EXT_SUFFIX')}"
    (other / "library.c").write_text(code)
    command = ["cc", "-shared", "-fPIC", "-Wl,-z,now", "-o", str(library), str(other / "library.c")]
    subprocess.run(command, check=True, timeout=60)


def inspect_horovod(other: Path) -> check.Report:
    return check.inspect(environment={"PYTHONPATH": str(other), "PATH": "/usr/bin:/bin"})


def test_check_reports_a_missing_horovod(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=60)
    report = check.inspect(str(tmp_path / "bare/bin/python"), environment={"PATH": "/usr/bin:/bin"})
    assert not report.is_usable
    assert report.problems[0].what.startswith("Horovod is not installed in ")
    assert report.problems[0].fix == "Build it for this torch with: unitrain horovod build"


def test_check_reports_a_horovod_built_for_another_torch(other_horovod: Path) -> None:
    import torch

    build_library(other_horovod, UNDEFINED, built_for="1.13.1+cu117")
    report = inspect_horovod(other_horovod)
    assert not report.is_usable
    [problem] = report.problems
    assert problem.what == f"Horovod was built for torch 1.13.1+cu117, but torch {torch.__version__} is installed."
    assert problem.fix == "Rebuild it for this torch with: unitrain horovod build"
    assert report.runtime_fixes is None


def test_check_reports_a_library_that_cannot_be_loaded(other_horovod: Path) -> None:
    import torch

    build_library(other_horovod, UNDEFINED, built_for=torch.__version__)
    report = inspect_horovod(other_horovod)
    assert not report.is_usable
    assert "undefined symbol: torch_gone" in report.problems[0].what


def test_check_reports_a_horovod_that_crashes(other_horovod: Path) -> None:
    import torch

    build_library(other_horovod, CRASHING, built_for=torch.__version__)
    report = inspect_horovod(other_horovod)
    assert not report.is_usable
    assert any("failed with exit status -6" in problem.what for problem in report.problems)


def test_check_reports_a_horovod_that_hangs(other_horovod: Path) -> None:
    import torch

    build_library(other_horovod, HANGING, built_for=torch.__version__)
    report = check.inspect(environment={"PYTHONPATH": str(other_horovod), "PATH": "/usr/bin:/bin"}, timeout_seconds=5)
    assert [problem.what for problem in report.problems] == ["`import horovod.torch` did not finish within 5 s."]
    report = check.inspect(timeout_seconds=0.001)
    assert [problem.what for problem in report.problems] == [
        f"The check of Horovod in {sys.executable} did not finish within 0.001 s."
    ]


def test_check_reports_the_capabilities_of_the_installed_horovod(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in preloaded(os.environ).items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(horovod, ["check", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["usable"]
    assert report["version"] == plan.HOROVOD
    assert "gloo" in report["controllers"]
    assert report["torch"] == report["built_for_torch"]
    assert report["runtime_fixes"] == list(RUNTIME_FIXES), (
        "the installed Horovod lacks patches. Rebuild it with: unitrain horovod build"
    )


def test_check_reports_the_limitations_of_a_usable_horovod() -> None:
    found = {
        "python": "python",
        "folder": "/h",
        "torch": "2.14.1",
        "metadata": {"pytorch": "2.14.1"},
        "gpus": 2,
        "built": {"gloo": 0, "mpi": 1, "nccl": 0},
        "mpirun": None,
        "launcher_error": "No module named 'distutils'",
    }
    report = check.create_report(found)
    text = " ".join(f"{problem.what} {problem.fix}" for problem in report.problems)
    assert report.is_usable
    for part in (
        "gloo-stall",
        "without the Gloo controller",
        "mpirun is not on PATH",
        "GPUs are visible (2)",
        "distutils",
    ):
        assert part in text
