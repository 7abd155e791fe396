"""What other users of a host, and other hosts, can read of a job or do to it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host
from launches import SECONDS, started
from parts import needs_hosts, needs_mpi

ROOT = Path(__file__).parent.parent
LAUNCH = [sys.executable, "-m", "unitrain", "launch"]
VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
SECRET = "value-that-no-process-listing-shows"
# Its argument: the folder in which each rank writes what it sees, and waits for a file named "end".
SCRIPT = """
import json, os, sys, time

names = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
rank = int(next(os.environ[name] for name in names if name in os.environ))
told = dict(prefix=sys.prefix, variables=dict(os.environ))
with open(f"{sys.argv[1]}/{rank}.part", "w") as file:
    json.dump(told, file)
os.rename(f"{sys.argv[1]}/{rank}.part", f"{sys.argv[1]}/{rank}.json")
while not os.path.exists(f"{sys.argv[1]}/end"):
    time.sleep(0.05)
"""
LAUNCHERS = [
    pytest.param(["--backend", "ddp"], id="torchrun"),
    pytest.param(["--backend", "horovod"], id="horovodrun"),
    pytest.param(["--backend", "horovod", "--mpi"], id="horovodrun with mpi", marks=needs_mpi),
    pytest.param(["--launcher", "mpirun"], id="mpirun", marks=needs_mpi),
]


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def wait_for_ranks(folder: Path, count: int) -> list[dict[str, dict[str, str]]]:
    deadline = time.monotonic() + SECONDS
    while len(found := sorted(folder.glob("*.json"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [json.loads(path.read_text()) for path in found]


@contextlib.contextmanager
def command_lines() -> Iterator[set[str]]:
    """Collect the command lines of all processes of this machine, on all its hosts, until the context ends."""
    found: set[str] = set()
    ended = threading.Event()

    def collect() -> None:
        while not ended.is_set():
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    found.add(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            time.sleep(0.01)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_ranks_run_in_the_environment_of_the_launch(backend: str, script: str, tmp_path: Path) -> None:
    """An environment that uses the packages of another one, without programs such as torchrun of its own."""
    own = tmp_path / "environment"
    venv.create(own, symlinks=True)
    (packages,) = own.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in others))
    command = [str(own / "bin" / "python"), "-m", "unitrain", "launch", "-np", "2", "--backend", backend]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with started([*command, script, str(tmp_path)], {"PATH": path}) as launch:
        told = wait_for_ranks(tmp_path, 2)
        (tmp_path / "end").touch()
        said = launch.output()
    assert [one["prefix"] for one in told] == [str(own), str(own)], said
    assert launch.process.returncode == 0, said


def check_secret(lines: set[str], told: list[dict[str, dict[str, str]]], names: tuple[str, ...]) -> None:
    for one in told:
        assert {name: one["variables"].get(name) for name in names} == dict.fromkeys(names, SECRET)
    assert any("train.py" in line for line in lines)
    assert not [line for line in lines if SECRET in line]


@pytest.mark.parametrize("options", LAUNCHERS)
def test_no_command_line_shows_a_variable_on_one_host(options: list[str], script: str, tmp_path: Path) -> None:
    secrets = {"WANDB_API_KEY": SECRET, "NOTES": SECRET}
    with command_lines() as lines, started([*LAUNCH, "-np", "2", *options, script, str(tmp_path)], secrets) as launch:
        told = wait_for_ranks(tmp_path, 2)
        (tmp_path / "end").touch()
        said = launch.output()
    check_secret(lines, told, ("WANDB_API_KEY", "NOTES"))
    assert launch.process.returncode == 0, said


@needs_hosts
@pytest.mark.parametrize("options", LAUNCHERS)
def test_no_command_line_shows_a_variable_on_two_hosts(
    options: list[str], two_hosts: list[Host], script: str, tmp_path: Path
) -> None:
    command = [*LAUNCH, *options, "-H", "h1:1,h2:1", "-x", "WANDB_API_KEY", script, str(tmp_path)]
    secrets = {"WANDB_API_KEY": SECRET, "UNITRAIN_NOTES": SECRET}
    with command_lines() as lines, two_hosts[0].start(command, VARIABLES | secrets) as process:
        told = wait_for_ranks(tmp_path, 2)
        (tmp_path / "end").touch()
        said, _ = process.communicate(timeout=SECONDS)
    check_secret(lines, told, tuple(secrets))
    assert process.returncode == 0, said
