"""`unitrain launch` with a real Slurm on two hosts: in steps, in interactive shells, and after a warning signal."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, hosts
from requirements import needs_hosts, needs_open_mpi, needs_slurm
from slurm import slurm

pytestmark = [needs_hosts, needs_slurm]
ROOT = str(Path(__file__).parents[2])
LAUNCH = [sys.executable, "-m", "unitrain", "launch"]


@pytest.fixture(scope="module")
def allocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[Host], dict[str, str]]]:
    with (
        hosts(2, tmp_path_factory.mktemp("hosts")) as found,
        slurm(found, tmp_path_factory.mktemp("slurm")) as variables,
    ):
        yield found, variables | {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}


RANK = """
import os, socket, sys
from pathlib import Path

rank = next(os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if name in os.environ)
Path(sys.argv[1], rank).write_text(socket.gethostname())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(RANK)
    return path


def step_shell_command(step: list[str], *commands: list[str]) -> list[str]:
    """Return a command that runs `commands` in an interactive shell. The shell is a step of an allocation."""
    script = "; ".join(map(shlex.join, commands))
    # The other tasks of `srun --pty` have no terminal, so their shells end immediately.
    allocate = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", *step]
    line = shlex.join([*allocate, "bash", "-c", f"[ -t 0 ] || exit 0; {script}"])
    return ["script", "--quiet", "--return", "--command", line, "/dev/null"]


def test_launch_in_the_shell_of_a_step_uses_all_hosts(
    script: Path, tmp_path: Path, allocated: tuple[list[Host], dict[str, str]]
) -> None:
    found, variables = allocated
    launch = [*LAUNCH, "-np", "3", str(script), str(tmp_path)]
    one_task = ["srun", "--nodes=1", "--ntasks=1", "--nodelist=h2", "--pty"]
    done = found[0].run(step_shell_command(one_task, launch), variables)
    assert done.returncode == 0, done.stdout
    # The host of the shell has the first ranks.
    assert [(tmp_path / name).read_text() for name in "012"] == ["h2", "h2", "h1"]


STEPS = {
    "one task": ["srun", "--nodes=1", "--ntasks=1", "--pty"],
    "all tasks": ["srun", "--pty"],
    "interactive step": ["srun", "--interactive", "--preserve-env", "--pty"],  # as with use_interactive_step
}


@pytest.mark.parametrize("step", STEPS)
def test_launch_uses_all_tasks_of_the_job_in_every_kind_of_step_shell(
    step: str, script: Path, allocated: tuple[list[Host], dict[str, str]]
) -> None:
    found, variables = allocated
    dry_runs = [
        [*LAUNCH, "--dry-run", *more, str(script)] for more in ([], ["--backend", "horovod"], ["--launcher", "srun"])
    ]
    done = found[0].run(step_shell_command(STEPS[step], *dry_runs), variables)
    assert done.returncode == 0, done.stdout
    shares = re.findall(r"on (h.): .* --nproc-per-node (\d)", done.stdout)
    assert shares == [("h1", "2"), ("h2", "2")], done.stdout
    assert "-np 4 -H h1:2,h2:2" in done.stdout
    assert "--nodelist h1,h2 --nodes 2 --ntasks 4 --ntasks-per-node 2" in done.stdout


@needs_open_mpi
def test_mpirun_and_srun_start_ranks_from_a_step_shell(
    script: Path, tmp_path: Path, allocated: tuple[list[Host], dict[str, str]]
) -> None:
    """The step of the shell has been allocated all cores."""
    found, variables = allocated
    launches = []
    for launcher in ("mpirun", "srun"):
        (tmp_path / launcher).mkdir()
        launches.append([*LAUNCH, "--launcher", launcher, str(script), str(tmp_path / launcher)])
    done = found[0].run(step_shell_command(["srun", "--pty"], *launches), variables)
    assert done.returncode == 0, done.stdout
    assert [(tmp_path / "mpirun" / rank).read_text() for rank in "0123"] == ["h1", "h1", "h2", "h2"], done.stdout
    assert sorted((tmp_path / "srun" / rank).read_text() for rank in "0123") == ["h1", "h1", "h2", "h2"], done.stdout


def test_launch_in_each_of_several_tasks_is_rejected(
    script: Path, tmp_path: Path, allocated: tuple[list[Host], dict[str, str]]
) -> None:
    found, variables = allocated
    srun = ["srun", "--nodes=2", "--ntasks=2"]
    done = found[0].run([*srun, *LAUNCH, "-np", "2", str(script), str(tmp_path)], variables)
    assert done.returncode == 2, done.stdout
    assert "srun has started this command in each of 2 tasks, and each task would start all ranks." in done.stdout
    assert not (tmp_path / "0").exists()
    named = found[0].run([*srun, *LAUNCH, "--dry-run", "-np", "2", "-H", "localhost:2", str(script)], variables)
    assert named.returncode == 0, named.stdout
    assert named.stdout.count("--standalone --nproc-per-node 2") == 2


# torchrun terminates all ranks when one has exited. Each rank therefore waits until several ranks have received the
# signal. The second argument is the number of these ranks.
WAIT_FOR_SIGNAL = """
import os, sys, time
from pathlib import Path

from unitrain.progress.preemption import PreemptionHandler

name = next(os.environ[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK") if name in os.environ)
folder, count = Path(sys.argv[1]), int(sys.argv[2])
with PreemptionHandler(["SIGUSR1", "SIGTERM"]) as preemption:
    (folder / f"started-{name}").touch()
    end = time.monotonic() + 60
    while preemption.received_signal is None and time.monotonic() < end:
        time.sleep(0.02)
    (folder / f"received-{name}").touch()
    end = time.monotonic() + 30
    while len(list(folder.glob("received-*"))) < count and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(1)  # simulates writing a checkpoint
    (folder / f"saved-{name}").write_text(preemption.received_signal or "nothing")
sys.exit(75)
"""
BATCH = """#!/bin/bash
#SBATCH --signal=B:USR1@120
trap 'kill -USR1 $!' USR1
{launch} &
wait $!
wait $!
echo $? > {folder}/code
"""


@pytest.mark.parametrize(
    ("launcher", "target", "received"),
    [
        ("torchrun", "the steps", ["SIGUSR1", "SIGUSR1"]),
        ("torchrun", "the script", ["SIGUSR1", "SIGUSR1"]),
        # mpirun runs rank 0 in the batch step, and terminates rank 0 after rank 1 has exited.
        pytest.param("mpirun", "the steps", ["SIGTERM", "SIGUSR1"], marks=[needs_open_mpi, pytest.mark.nightly]),
        pytest.param("mpirun", "the script", ["SIGUSR1", "SIGUSR1"], marks=[needs_open_mpi, pytest.mark.nightly]),
    ],
)
def test_ranks_save_after_the_warning_signal_of_slurm(
    launcher: str, target: str, received: list[str], tmp_path: Path, allocated: tuple[list[Host], dict[str, str]]
) -> None:
    """`--signal=USR1` signals all processes of the steps: torchrun and its ranks, or the daemons of mpirun.

    `--signal=B:USR1` signals the batch script, which must forward the signal.
    """
    found, variables = allocated
    (tmp_path / "train.py").write_text(WAIT_FOR_SIGNAL)
    arguments = [str(tmp_path), str(received.count("SIGUSR1"))]
    launch = [*LAUNCH, "-np", "2", "--launcher", launcher, str(tmp_path / "train.py"), *arguments]
    batch = tmp_path / "batch"
    batch.write_text(BATCH.format(launch=shlex.join(launch), folder=tmp_path))

    def wait_for(name: str) -> None:
        deadline = time.monotonic() + 60
        while not ((path := tmp_path / name).exists() and (name.startswith("started") or path.read_text())):
            assert time.monotonic() < deadline, (name, (tmp_path / "log").read_text())
            time.sleep(0.1)

    submit = ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", f"--output={tmp_path}/log", str(batch)]
    job = found[0].run(submit, variables).stdout.strip()
    wait_for("started-0")
    wait_for("started-1")
    target_options = ["--batch"] if target == "the script" else []
    done = found[0].run(["scancel", *target_options, "--signal=USR1", job], variables)
    assert done.returncode == 0, done.stdout
    wait_for("code")
    log = (tmp_path / "log").read_text()
    assert (tmp_path / "code").read_text() == "75\n", log
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == received, log


RUN_FUNCTION = """
import os, socket
import unitrain

def host():
    return socket.gethostname()

for launcher in ("torchrun", "horovodrun", "mpirun"):
    print(launcher, unitrain.run(host, np=2, launcher=launcher))
try:
    unitrain.run(host, np=2, launcher="srun")
except unitrain.UnitrainError as error:
    print(error)
"""


@needs_open_mpi
def test_functions_in_an_allocation_run_only_on_this_host(
    tmp_path: Path, allocated: tuple[list[Host], dict[str, str]]
) -> None:
    found, variables = allocated
    script = tmp_path / "program.py"
    script.write_text(RUN_FUNCTION)
    allocate = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1"]
    done = found[0].run([*allocate, sys.executable, str(script)], variables)
    assert done.returncode == 0, done.stdout
    for launcher in ("torchrun", "horovodrun", "mpirun"):
        assert f"{launcher} ['h1', 'h1']\n" in done.stdout
    assert "unitrain.run starts ranks on this machine only, but srun starts them on h1, h2." in done.stdout


# torchrun terminates all ranks when one has exited, so each rank waits until both have written their host name.
WRITE_HOST = """
import socket
import time
from pathlib import Path

path = Path(__file__).with_name("hosts")
with path.open("a") as hosts:
    hosts.write(socket.gethostname() + " ")
deadline = time.monotonic() + 30
while len(path.read_text().split()) < 2 and time.monotonic() < deadline:
    time.sleep(0.05)
raise SystemExit("no training")
"""


@pytest.mark.parametrize("command", [["verify", "--backends", "ddp", "--cpu"], ["memory", "--backend", "ddp"]])
def test_verify_and_memory_in_an_allocation_run_only_on_this_host(
    command: list[str], tmp_path: Path, allocated: tuple[list[Host], dict[str, str]]
) -> None:
    found, variables = allocated
    (tmp_path / "script.py").write_text(WRITE_HOST)
    allocate = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1"]
    script = str(tmp_path / "script.py")
    done = found[0].run([*allocate, sys.executable, "-m", "unitrain", *command, "-np", "2", script], variables)
    assert done.returncode == 1, done.stdout
    assert (tmp_path / "hosts").read_text().split() == ["h1", "h1"], done.stdout


# A `sitecustomize` module that makes the ranks of srun hang.
HANGING_RANKS = """
import os, sys, time
from pathlib import Path
if "--marked-json" in sys.orig_argv and "launch" not in sys.orig_argv:
    Path(__file__).with_name("rank-" + os.environ["SLURM_PROCID"]).touch()
    time.sleep(300)
"""


def test_signal_to_doctor_terminates_ranks_of_srun_on_other_hosts(
    tmp_path: Path, allocated: tuple[list[Host], dict[str, str]]
) -> None:
    found, variables = allocated
    (tmp_path / "sitecustomize.py").write_text(HANGING_RANKS)
    doctor = [sys.executable, "-m", "unitrain", "doctor", "--launch", "--launcher srun"]
    # The shell must not exit before the check, because Slurm would then terminate all steps of the allocation.
    shell = (
        f"cd {tmp_path}; {shlex.join(doctor)} & until [ -e rank-0 ] && [ -e rank-1 ]; do sleep 0.1; done; "
        "kill $!; wait $!; echo $? > status; until [ -e checked ]; do sleep 0.1; done"
    )
    allocate = ["salloc", "--quiet", "--nodes=2", "--ntasks-per-node=1", "timeout", "90", "sh", "-c", shell]
    with found[0].start(allocate, variables | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}, fresh=True) as shell_process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "status").exists() or any(
            "--marked-json" in command for command in found[1].find_processes().values()
        ):
            if time.monotonic() > deadline:
                pytest.fail(str(found[1].find_processes()))
            time.sleep(0.1)
        (tmp_path / "checked").touch()
        shell_process.wait(60)
    assert (tmp_path / "status").read_text() == "143\n"
