"""Commands that are built for Open MPI's mpirun. A fake mpirun on PATH prints a version. No ranks are started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_programs import write_program

from unitrain.launchers import Command, Host, LaunchError, LaunchSpec, build, parse_hosts

ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
DEFAULTS = ["--bind-to", "none", "--map-by", "slot", "-mca", "odls_base_sigkill_timeout", "4"]
SSH = ["-mca", "plm_rsh_args", "-o StrictHostKeyChecking=accept-new"]
KEEPALIVE = ["-mca", "oob_tcp_keepalive_time", "10"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set an environment that contains only PATH, which consists of one folder with a fake mpirun."""
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    write_program(tmp_path, "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    return tmp_path


def create_spec(folder: Path, **given: object) -> LaunchSpec:
    python = str(folder / "python")
    return LaunchSpec(**{"script": "train.py", "args": ("-v",), "python": python, **given})  # type: ignore[arg-type]


def mpirun_options(command: Command, folder: Path) -> list[str]:
    """Return the options of mpirun: the command without the program, the script and the arguments of the script."""
    assert command.argv[0] == str(folder / "mpirun")
    assert command.argv[-3:] == (str(folder / "python"), "train.py", "-v")
    return list(command.argv[1:-3])


def export_options(*variables: str) -> list[str]:
    return [word for name in variables for word in ("-x", name)]


def test_mpirun_does_not_set_a_rendezvous_for_horovod_on_one_host(folder: Path) -> None:
    command = build("mpirun", create_spec(folder, num_processes=2, backend="horovod"))
    assert mpirun_options(command, folder) == [
        "-np", "2", "-H", "localhost:2", *export_options("UNITRAIN_BACKEND", "OMP_NUM_THREADS"), *DEFAULTS,
    ]  # fmt: skip
    assert command.environment == {"UNITRAIN_BACKEND": "horovod", "OMP_NUM_THREADS": "4", **ROOT}


@pytest.mark.parametrize("hosts", [(), (Host("localhost", 3),), (Host("127.0.0.1", 2),)], ids=str)
@pytest.mark.parametrize("backend", ["ddp", None, "a_plugin"])
def test_mpirun_sets_a_free_port_for_ddp_on_one_host(
    folder: Path, hosts: tuple[Host, ...], backend: str | None
) -> None:
    commands = [build("mpirun", create_spec(folder, num_processes=2, hosts=hosts, backend=backend)) for _ in range(3)]
    for command in commands:
        assert command.environment["MASTER_ADDR"] == "127.0.0.1"
        assert f"-H {hosts[0] if hosts else 'localhost:2'}" in " ".join(command.argv)
        words = mpirun_options(command, folder)
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            assert words[words.index(name) - 1] == "-x"
    assert len({command.environment["MASTER_PORT"] for command in commands}) > 1


def test_mpirun_on_several_hosts_uses_the_first_host_and_forwards_library_variables(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "NCCL_DEBUG", "HOROVOD_CYCLE_TIME", "LD_LIBRARY_PATH", "EDITOR", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "a-value")
    launch_spec = create_spec(
        folder, num_processes=3, hosts=parse_hosts("a.invalid:2,b.invalid:1"), backend="ddp",
        forwarded=("WANDB_API_KEY", "LEVEL"), environment={"LEVEL": "3"},
    )  # fmt: skip
    command = build("mpirun", launch_spec)
    assert mpirun_options(command, folder) == [
        "-np", "3", "-H", "a.invalid:2,b.invalid:1",
        *export_options(
            "LEVEL", "UNITRAIN_BACKEND", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT", "WANDB_API_KEY",
            "HOROVOD_CYCLE_TIME", "LD_LIBRARY_PATH", "NCCL_DEBUG", "PATH", "PYTHONPATH",
        ),
        *DEFAULTS, *SSH, *KEEPALIVE,
    ]  # fmt: skip
    assert command.environment == {
        "LEVEL": "3", "UNITRAIN_BACKEND": "ddp", "OMP_NUM_THREADS": "4", "MASTER_ADDR": "a.invalid",
        "MASTER_PORT": "29500", **ROOT,
    }  # fmt: skip
    assert "a-value" not in command.shell()


def test_rendezvous_address_of_the_user_is_kept_and_forwarded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise, ranks with and without the address would connect to different stores."""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.9")
    hosts = parse_hosts("localhost:1,b.invalid:1")
    for backend in ("ddp", "horovod"):
        command = build("mpirun", create_spec(folder, num_processes=2, hosts=hosts, backend=backend))
        assert (command.environment["MASTER_ADDR"], command.environment["MASTER_PORT"]) == ("10.0.0.9", "29500")
        assert "-x MASTER_ADDR -x MASTER_PORT" in command.shell()


def test_localhost_is_rejected_as_the_first_of_several_hosts(folder: Path) -> None:
    for name in ("localhost", "127.0.0.1"):
        with pytest.raises(
            LaunchError, match=rf"^Ranks on 2 hosts connect to the first host, but on each host '{name}' "
        ):
            build(
                "mpirun",
                create_spec(folder, num_processes=2, hosts=(Host(name, 1), Host("b.invalid", 1)), backend="ddp"),
            )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("--bind-to", "core"), [*DEFAULTS[2:], "--bind-to", "core"]),
        (("-bind-to", "core"), [*DEFAULTS[2:], "-bind-to", "core"]),
        (
            ("--mca", "odls_base_sigkill_timeout", "60"),
            [*DEFAULTS[:4], "--mca", "odls_base_sigkill_timeout", "60"],
        ),
        (("-mca", "btl", "^openib"), [*DEFAULTS, "-mca", "btl", "^openib"]),
    ],
    ids=str,
)
def test_launcher_args_override_default_options(folder: Path, given: tuple[str, ...], words: list[str]) -> None:
    """Open MPI 4 rejects an MCA parameter that occurs twice."""
    command = build("mpirun", create_spec(folder, backend="horovod", launcher_args=given))
    assert mpirun_options(command, folder)[-len(words) :] == words
    assert mpirun_options(command, folder)[-len(words) - 1] == "OMP_NUM_THREADS"


def test_mpirun_of_another_mpi_implementation_is_rejected(folder: Path) -> None:
    write_program(folder, "mpirun", "echo 'HYDRA build details:'; echo '    Version:   4.0.2'")
    with pytest.raises(LaunchError) as caught:
        build("mpirun", create_spec(folder))
    assert str(caught.value) == (
        f"'{folder}/mpirun' is not Open MPI's mpirun: its --version prints 'HYDRA build details:'. Put Open MPI's "
        "mpirun first on PATH, or start the script with this program: mpiexec "
        "-genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT 29500 ..."
    )
    (folder / "mpirun").unlink()
    with pytest.raises(
        LaunchError, match=r"^Launcher 'mpirun' is not installed\. It is part of Open MPI: sudo apt-get inst"
    ):
        build("mpirun", create_spec(folder))


def test_mpirun_rejects_a_controller(folder: Path) -> None:
    with pytest.raises(LaunchError, match=r"^--mpi chooses horovodrun's controller, but the launcher is mpirun\."):
        build("mpirun", create_spec(folder, controller="mpi"))


def test_mpirun_in_an_allocation_uses_the_hosts_of_slurm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(folder, "scontrol", "echo n1.invalid; echo n2.invalid")
    for name, value in (("JOB_ID", "4071"), ("JOB_NODELIST", "n[1-2]"), ("TASKS_PER_NODE", "2(x2)")):
        monkeypatch.setenv(f"SLURM_{name}", value)
    command = build("mpirun", create_spec(folder, num_processes=4, backend="ddp"))
    assert "-H" not in command.argv
    assert "plm_rsh_args" not in command.argv  # Slurm starts the daemons of mpirun
    assert (command.environment["MASTER_ADDR"], command.environment["MASTER_PORT"]) == ("n1.invalid", "29571")
    with pytest.raises(LaunchError, match=r"^-np requests 5 processes, but Slurm job 4071 has 4 tasks\. Use -np 4,"):
        build("mpirun", create_spec(folder, num_processes=5, backend="ddp"))
