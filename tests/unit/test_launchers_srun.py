"""Commands that are built for srun, without Slurm: tests set Slurm's variables, and a fake scontrol lists two nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_programs import write_program

from unitrain.launchers import LaunchError, LaunchSpec, allocated_hosts, allocated_slots, build, parse_hosts
from unitrain.launchers.agents import parse_plan

ALLOCATION = {"SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an environment that contains only the variables of an allocation and PATH, which consists of one folder."""
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    write_program(tmp_path, "srun", "exit 1")
    write_program(tmp_path, "scontrol", '[ "$*" = "show hostnames n[1-2]" ] && echo n1 && echo n2')
    return tmp_path


def create_spec(folder: Path, **given: object) -> LaunchSpec:
    python = str(folder / "python")
    return LaunchSpec(**{"script": "train.py", "args": ("-v",), "python": python, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("processes", "tasks", "nodes", "per_node"),
    [
        (8, "4(x2)", "n1,n2", 4),
        (5, "4(x2)", "n1,n2", 4),
        (3, "4(x2)", "n1", 3),
        (3, "1,2", "n1,n2", 2),
        (2, "1,2", "n1,n2", 1),
    ],
)
def test_srun_fills_hosts_in_the_order_of_slurm(
    processes: int, tasks: str, nodes: str, per_node: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    command = build(
        "srun", create_spec(folder, num_processes=processes, backend="ddp", launcher_args=("--cpu-bind", "none"))
    )
    assert command.argv == (
        str(folder / "srun"), "--nodelist", nodes, "--nodes", str(len(nodes.split(","))), "--ntasks", str(processes),
        "--ntasks-per-node", str(per_node), "--kill-on-bad-exit=1", "--export", "ALL", "--wait", "0",
        "--cpu-bind", "none", str(folder / "python"), "train.py", "-v",
    )  # fmt: skip
    assert command.environment == {
        "UNITRAIN_BACKEND": "ddp", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "29734",
    }  # fmt: skip


def test_srun_command_contains_cpus_per_task_of_the_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Since Slurm 22.05, srun does not inherit this option from sbatch."""
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "6")
    command = build("srun", create_spec(folder, num_processes=2))
    assert "--cpus-per-task 6" in command.shell()
    assert command.environment["OMP_NUM_THREADS"] == "6"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS" not in build("srun", create_spec(folder, num_processes=2)).environment


def test_srun_inside_a_step_uses_overlap(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--overlap" not in build("srun", create_spec(folder)).argv
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert "--overlap" in build("srun", create_spec(folder)).argv


def test_srun_keeps_settings_of_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "4444")
    command = build("srun", create_spec(folder, launcher_args=("--wait", "60"), environment={"MASTER_ADDR": "n1-ib"}))
    assert (command.environment["MASTER_ADDR"], command.environment["MASTER_PORT"]) == ("n1-ib", "4444")
    assert command.shell().count("--wait") == 1


def test_allocated_slots_are_known_for_launchers_that_use_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [allocated_slots(launcher) for launcher in ("srun", "mpirun", "torchrun", "none")] == [8, 8, None, None]
    monkeypatch.delenv("SLURM_JOB_ID")
    assert allocated_slots("srun") is None


def test_torchrun_and_horovodrun_use_the_hosts_of_an_allocation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They use only this host if the command runs in one of several tasks, or if the allocation has one host."""
    for name in ("torchrun", "horovodrun"):
        write_program(folder, name, "exit 1")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    assert [allocated_slots(launcher) for launcher in ("torchrun", "horovodrun")] == [8, 8]
    command = build("torchrun", create_spec(folder, num_processes=6))
    counts = [item.argv[item.argv.index("--nproc-per-node") + 1] for _, item in command.per_host]
    assert [(host, count) for (host, _), count in zip(command.per_host, counts, strict=True)] == [
        ("n1", "4"),
        ("n2", "2"),
    ]
    assert "--master-addr n1 --master-port 29734" in command.shell()
    starts = [host["start"] for host in parse_plan(command.argv[4:])["hosts"]]
    assert [(start[0], start[6]) for start in starts] == [("srun", "--nodelist=n1"), ("srun", "--nodelist=n2")]
    assert "-H n1:4,n2:4" in build("horovodrun", create_spec(folder, num_processes=6, backend="horovod")).shell()
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    for name, value in (("SLURM_STEP_NUM_TASKS", "2"), ("SLURM_JOB_NUM_NODES", "1")):
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            assert "--standalone" in build("torchrun", create_spec(folder, num_processes=6)).argv


@pytest.mark.parametrize(
    ("described", "cpus", "slots"),
    [
        ("NumTasks=8 CPUs/Task=1 NtasksPerN:B:S:C=4:0:*:*", "64(x2)", [4, 4]),
        ("NumTasks=3 CPUs/Task=1 NtasksPerN:B:S:C=2:0:*:*", "64(x2)", [2, 1]),
        ("NumTasks=3 CPUs/Task=2 NtasksPerN:B:S:C=0:0:*:*", "2,4", [1, 2]),
        ("NumTasks=5 CPUs/Task=1 NtasksPerN:B:S:C=0:0:*:*", "64(x2)", [3, 2]),
        ("NumTasks=4 CPUs/Task=8 NtasksPerN:B:S:C=0:0:*:*", "4(x2)", [2, 2]),  # more CPUs than the hosts have
    ],
)
def test_tasks_of_the_job_are_used_inside_a_step(
    described: str, cpus: str, slots: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's variables describe the step. The shell of `srun --ntasks=1 --pty` is a step with one task."""
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    for name in ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", cpus)
    names, job = "show hostnames n[1-2]", "show job --oneliner 1234"
    write_program(
        folder,
        "scontrol",
        f'case "$*" in "{names}") echo n1; echo n2 ;; "{job}") echo "JobId=1234 {described} CoreSpec=*" ;; esac',
    )
    assert [host.slots for host in allocated_hosts("torchrun")] == slots
    assert [host.slots for host in allocated_hosts("srun")] == slots
    monkeypatch.setenv("SLURMD_NODENAME", "n2")
    assert [(host.name, host.slots) for host in allocated_hosts("torchrun")] == [("n2", slots[1]), ("n1", slots[0])]


def error_message(folder: Path, **given: object) -> str:
    with pytest.raises(LaunchError) as caught:
        build("srun", create_spec(folder, **given))
    return str(caught.value)


def test_invalid_requests_for_srun_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert error_message(folder, num_processes=9) == (
        "-np requests 9 processes, but Slurm job 1234 has 8 tasks. Use -np 8, or request more from Slurm: --ntasks 9"
    )
    assert error_message(folder, num_processes=2, hosts=parse_hosts("a:1,b:1")) == (
        "srun starts ranks on the hosts that Slurm has chosen, but -H names a,b. Leave -H out, and request the hosts "
        "from Slurm: salloc --nodelist a,b --ntasks 2 unitrain launch --launcher srun -np 2 ..."
    )
    assert error_message(folder, controller="mpi").startswith(
        "--mpi chooses horovodrun's controller, but the launcher is srun."
    )
    (folder / "srun").unlink()
    assert error_message(folder).startswith("Launcher 'srun' is not installed. It is part of Slurm")
    monkeypatch.delenv("SLURM_JOB_ID")
    assert error_message(folder, num_processes=4) == (
        "srun starts ranks in a Slurm allocation, but SLURM_JOB_ID is not set. srun is not installed on this host: "
        "use a host of the cluster. Put the command into an sbatch script, or request an allocation for it: "
        "salloc --ntasks 4 unitrain launch --launcher srun -np 4 ..."
    )


def test_invalid_slurm_variables_are_rejected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x3)")
    assert error_message(folder).startswith(
        "Slurm job 1234 has 2 hosts according to SLURM_JOB_NODELIST=n[1-2], but 3 according to SLURM_TASKS"
    )
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "four")
    assert error_message(folder).startswith(
        "SLURM_TASKS_PER_NODE must list counts per host, such as \"2(x3),1\", but is 'four'."
    )
    monkeypatch.delenv("SLURM_TASKS_PER_NODE")
    assert error_message(folder).startswith(
        "SLURM_JOB_ID=1234 indicates a Slurm allocation, but SLURM_TASKS_PER_NODE is not set."
    )
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    write_program(folder, "scontrol", "echo 'Invalid hostlist' >&2; exit 1")
    assert error_message(folder) == (
        "scontrol could not list the hosts of 'n[1-2]': Invalid hostlist. Try: scontrol show hostnames n[1-2]"
    )
    (folder / "scontrol").unlink()
    assert error_message(folder).startswith("scontrol, which is needed to list the hosts of 'n[1-2]', is not on PATH.")
