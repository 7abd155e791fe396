"""Environment variables that `-x` forwards to ranks, and options that `--launcher-args` passes to launchers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from fake_programs import write_program

from unitrain.launchers import (
    LaunchError,
    LaunchSpec,
    build,
    parse_elastic,
    parse_exports,
    parse_hosts,
    parse_launcher_args,
)
from unitrain.launchers.agents import add_cleanup, parse_plan


def test_parse_exports_accepts_names_and_values() -> None:
    environ = {"HF_TOKEN": "abc", "EMPTY": ""}
    assert parse_exports(["HF_TOKEN", "A=b=c", "EMPTY", "B=", "A=d", "A"], environ) == (
        ("HF_TOKEN", "A", "EMPTY", "B"),
        {"A": "d", "B": ""},
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "-x needs the name of a variable, got ''. Write -x NAME or -x NAME=VALUE"),
        ("A B", "-x needs the name of a variable, got 'A B'. Write -x NAME or -x NAME=VALUE"),
        ("=1", "-x needs the name of a variable, got ''. Write -x NAME or -x NAME=VALUE"),
        (
            "LEVEL",
            "-x LEVEL forwards a variable that is not set here. Set it, with: export LEVEL=..., or leave -x LEVEL out",
        ),
        (
            "RANK=7",
            "-x RANK sets RANK to one value on all ranks, but the launcher sets it on each rank. Leave "
            "-x RANK out. Use -np to set the number of ranks.",
        ),
    ],
)
def test_parse_exports_rejects_invalid_variables(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_exports([text], {})
    assert str(caught.value) == message


def test_launcher_args_are_split_like_words_in_a_shell() -> None:
    given = ["--bind-to core", "-mca plm_rsh_args '-o Port=2222'", "--report-bindings"]
    assert parse_launcher_args(given) == (
        "--bind-to", "core", "-mca", "plm_rsh_args", "-o Port=2222", "--report-bindings",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "--name 'a",
            '--launcher-args "--name \'a" cannot be split into words: No closing quotation. Quote it as for a shell',
        ),
        ("core", "--launcher-args 'core' does not begin with an option. Give the option with its values"),
        ("", "--launcher-args '' does not begin with an option. Give the option with its values"),
    ],
)
def test_invalid_launcher_args_are_rejected(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_launcher_args([text])
    assert str(caught.value) == f'{message}, as in --launcher-args "--bind-to core"'


def test_launcher_args_precede_the_program() -> None:
    for launcher, program in (("torchrun", "train.py"), ("horovodrun", sys.executable)):
        argv = build(launcher, LaunchSpec(script="train.py", launcher_args=("--verbose",))).argv
        assert argv[argv.index(program, 4) - 1] == "--verbose", argv
    with pytest.raises(LaunchError, match=r"^--launcher-args '--verbose' are for a launcher, but one process"):
        build("none", LaunchSpec(script="train.py", launcher_args=("--verbose",)))


# Values that a list of words or patterns does not recognize as secret.
VALUES = {
    "API_KEYS": "a1b2,c3d4", "DB_PASSWORD1": "hunter2", "PRIVATEKEY": "-----BEGIN RSA PRIVATE KEY-----",
    "AZURE_STORAGE_CONNECTION_STRING": "DefaultEndpointsProtocol=https;AccountKey=abc==", "OPENAI": "sk-proj-abcdef",
    "GH": "ghp_abcdefghij", "LEVEL": "my-level", "DATABASE_URL": "postgres://me:word@host/runs", "EMPTY": "",
}  # fmt: skip


@pytest.mark.parametrize("hosts", ["", "a:1,b:1"])
@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun", "mpirun", "none"])
@pytest.mark.parametrize("is_forwarded", [True, False])
def test_values_are_on_no_command_line_and_not_shown(
    launcher: str, hosts: str, is_forwarded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value is set before the launch and forwarded by name, or part of -x NAME=VALUE."""
    write_program(tmp_path, "mpirun", "echo Open MPI")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if hosts and launcher == "none":
        hosts = "localhost:1"
    for name, value in VALUES.items() if is_forwarded else ():
        monkeypatch.setenv(name, value)
    texts = list(VALUES) if is_forwarded else [f"{name}={value}" for name, value in VALUES.items()]
    forwarded, values = parse_exports(texts)
    spec = LaunchSpec(
        script="t.py",
        num_processes=1 if launcher == "none" else 2,
        hosts=parse_hosts(hosts) if hosts else (),
        forwarded=forwarded,
        environment={**values, "UNITRAIN_LAUNCH": "1"},
    )
    command = build(launcher, spec)
    commands = [command] if launcher != "mpirun" or not hosts else [command, add_cleanup(command, launcher, spec)]
    for name, value in filter(all, VALUES.items()):
        assert all(value not in word for one in commands for word in one.argv)
        assert value not in command.shell()
        assert command.environment.get(name, os.environ.get(name)) == value
    if not is_forwarded:
        assert "GH=..." in command.shell()


def test_torchrun_forwards_the_names_of_all_variables_to_several_hosts() -> None:
    command = build(
        "torchrun",
        LaunchSpec(
            script="t.py", num_processes=2, hosts=parse_hosts("a:1,b:1"), forwarded=("A",), backend="horovod",
            environment={"A": "b"},
        ),
    )  # fmt: skip
    plan = parse_plan(command.argv[4:])
    assert {"A", "UNITRAIN_BACKEND", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"} <= set(plan["forwarded"])
    assert {"A": "b", "UNITRAIN_BACKEND": "horovod"}.items() <= command.environment.items()
    assert all("variables" not in host for host in plan["hosts"])


def test_error_for_an_elastic_job_does_not_contain_values() -> None:
    spec = LaunchSpec(
        script="t.py", num_processes=2, hosts=parse_hosts("a:1,b:1"), forwarded=("GH",),
        environment={"GH": "ghp_abcdefghij"}, elastic=parse_elastic("1:2"),
    )  # fmt: skip
    with pytest.raises(LaunchError, match=r"with your values of GH:") as caught:
        build("torchrun", spec)
    assert "ghp_" not in str(caught.value)
    assert "GH=..." in str(caught.value)
