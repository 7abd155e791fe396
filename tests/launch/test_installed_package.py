"""The wheel, installed outside the checkout: files, launches, dry runs and a type check.

Launches start in a folder with files named like modules of the standard library and of unitrain. The folder of the
script contains a package named `launchers`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from groups import nightly

import unitrain
from unitrain.horovod_wheel.build import extract

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 240
SCRIPT = """
import launchers
import neighbor
import torch
import unitrain

assert launchers.NAME == neighbor.NAME == "the user's"
with unitrain.init() as backend:
    total = backend.allreduce(torch.ones(2), op="sum").tolist()
    print(f"{backend.name} rank {backend.rank} of {backend.size}: {total} from {unitrain.__file__}", flush=True)
"""
TYPED_SCRIPT = """
from unitrain import Callback, Trainer
from unitrain.launchers import LaunchSpec, build, parse_hosts

command = build("torchrun", LaunchSpec(script="train.py", num_processes=2, hosts=parse_hosts("a:1,b:1")))
reveal_type(command.argv)
LaunchSpec(script=3)


class StopAfterFirstStep(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        trainer.stop("one step is enough")
"""


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, without PYTHONPATH and UNITRAIN_BACKEND."""
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "UNITRAIN_BACKEND")}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(
        command,
        cwd=folder,
        env={**environ, **root, **variables},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )


def build(source: Path, output: Path, artifact: str) -> Path:
    """Build `artifact` ("wheel", "sdist" or "editable") from a source folder without a network, and return its path."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{artifact}(sys.argv[1])"
    output.mkdir()
    done = run([sys.executable, "-c", code, str(output)], source)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = output.iterdir()
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the packaged files, because a build writes to its source folder."""
    folder = tmp_path_factory.mktemp("source") / "unitrain"
    folder.mkdir()
    for path in ROOT.iterdir():
        # Skip hidden files, because tests such as those of `unitrain doctor` create temporary hidden files.
        is_hidden = path.name.startswith(".")
        if not is_hidden and path.is_file() and path.suffix in (".py", ".toml", ".md", ".in", ".txt", ""):
            shutil.copy(path, folder)
    for name in ("unitrain", "launchers"):
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", ".mypy_cache", ".ruff_cache")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(source, tmp_path_factory.mktemp("built") / "wheel", "wheel")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that contains the wheel and the other packages of the test environment."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=TIMEOUT_SECONDS)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    # Folders in a .pth file are appended to sys.path. The .pth files in these folders, such as that of an editable
    # install of unitrain, are not read.
    (site_packages / "test_environment.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=TIMEOUT_SECONDS)
    return folder / "bin"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working directory with a script in `jobs` and with files that must not shadow modules."""
    for name in ("logging", "json", "click", "socket", "unitrain"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the current folder was imported')\n")
    jobs = tmp_path / "jobs"
    (jobs / "launchers").mkdir(parents=True)
    (jobs / "launchers" / "__init__.py").write_text('NAME = "the user\'s"\n')
    (jobs / "neighbor.py").write_text('NAME = "the user\'s"\n')
    (jobs / "train.py").write_text(SCRIPT)
    return tmp_path


def test_wheel_contains_every_file_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names))
    expected = {
        *(str(path.relative_to(ROOT)) for end in ("py", "patch") for path in (ROOT / "unitrain").rglob(f"*.{end}")),
        *(f"unitrain/{path.relative_to(ROOT)}" for path in (ROOT / "launchers").rglob("*.py")),
    }
    assert expected <= set(names)
    assert {"unitrain/py.typed", "unitrain/report/page.html", "unitrain/launchers/__init__.py"} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"unitrain"}


def test_wheel_built_from_the_sdist_has_the_same_files(source: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build(source, tmp_path / "sdist", "sdist")
    extract(sdist, tmp_path / "unpacked")
    (folder,) = (tmp_path / "unpacked").iterdir()
    rebuilt = build(folder, tmp_path / "wheel", "wheel")
    assert sorted(zipfile.ZipFile(rebuilt).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_editable_install_can_be_imported_in_the_parent_folder_of_the_checkout(source: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(build(source, tmp_path / "wheel", "editable")).extractall(tmp_path / "installed")
    assert source.name == "unitrain"  # the folder has no __init__.py, like a git clone
    code = "import site, sys; site.addsitedir(sys.argv[1]); import unitrain; print(unitrain.__version__)"
    # -S excludes the packages of the test environment, which include an editable install of the checkout.
    done = run([sys.executable, "-S", "-c", code, str(tmp_path / "installed")], source.parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{unitrain.__version__}\n"


@pytest.mark.parametrize("backend", ["horovod", *nightly("ddp")])
def test_two_ranks_import_the_installed_package_and_modules_next_to_the_script(
    backend: str, installed: Path, project: Path
) -> None:
    done = run([str(installed / "unitrain"), "launch", "--backend", backend, "-np", "2", "jobs/train.py"], project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(f"{backend} rank ") == 2
    assert done.stdout.count(": [2.0, 2.0] from ") == 2
    assert done.stdout.count(f"from {installed.parent}/lib/") == 2
    assert "was imported" not in done.stdout + done.stderr


def test_dry_run_of_every_launcher_prints_a_command_of_the_installed_package(installed: Path, project: Path) -> None:
    (project / "scontrol").write_text("#!/bin/sh\necho n1; echo n2\n")
    (project / "scontrol").chmod(0o755)
    slurm = {
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)",
        "PATH": f"{project}:{os.environ['PATH']}",
    }  # fmt: skip
    modules = {"torchrun": "unitrain.bootstrap.torchrun", "horovodrun": "unitrain.backends.horovod.horovodrun"}
    for launcher, count, variables in (
        ("torchrun", 2, {}), ("horovodrun", 2, {}), ("mpirun", 2, {}), ("none", 1, {}), ("srun", 2, slurm),
    ):  # fmt: skip
        command = [str(installed / "unitrain"), "launch", "--launcher", launcher, "-np", str(count), "--dry-run"]
        done = run([*command, "jobs/train.py"], project, **variables)
        assert done.returncode == 0, done.stderr
        assert str(installed / "python") in done.stdout
        assert done.stdout.endswith("jobs/train.py\n")
        if launcher in modules:
            assert f"{installed / 'python'} -P -m {modules[launcher]} " in done.stdout


def test_user_script_is_type_checked_against_the_installed_package(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TYPED_SCRIPT.lstrip())
    # Skip torch and its dependencies, because checking them takes a minute.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*,numpy.*]\nfollow_imports = skip\n")
    command = [str(installed / "python"), "-m", "mypy", "--strict", "--no-incremental", "script.py"]
    done = run(command, tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0] == 'script.py:5: note: Revealed type is "tuple[str, ...]"', done.stdout + done.stderr
    assert 'script.py:6: error: Argument "script" to "LaunchSpec" has incompatible type "int"' in lines[1]
    assert lines[2] == "Found 1 error in 1 file (checked 1 source file)"
