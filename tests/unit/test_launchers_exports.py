"""Environment variables that `-x` forwards to ranks, and options that `--launcher-args` passes to launchers."""

from __future__ import annotations

import sys

import pytest

from unitrain.launchers import LaunchError, LaunchSpec, build, parse_exports, parse_hosts, parse_launcher_args
from unitrain.launchers.agents import parse_plan
from unitrain.launchers.arguments import is_likely_secret
from unitrain.launchers.torchrun import commands_per_host


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("WANDB_API_KEY", "", True), ("HF_TOKEN", "", True), ("aws_secret_access_key", "", True), ("MY_PASS", "", True),
        ("DATABASE_URL", "postgres://me:word@host/runs", True), ("TOKENIZERS_PARALLELISM", "false", False),
        ("PGPASSWORD", "", True), ("SSHPASS", "", True), ("MYSQL_PWD", "", True), ("GITHUBTOKEN", "", True),
        ("PWD", "/home/me", False), ("OLDPWD", "/home/me", False), ("COMPASS", "north", False),
        ("MAX_TOKENS", "512", False), ("KEYBOARD", "us", False), ("DATABASE_URL", "http://host:80/a@b", False),
    ],
)  # fmt: skip
def test_is_likely_secret_detects_secret_names_and_urls_with_passwords(name: str, value: str, secret: bool) -> None:
    assert is_likely_secret(name, value) is secret


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
            "HF_TOKEN=abc",
            "-x HF_TOKEN=... puts a value that is probably secret on the command line, which all users of this host "
            "can read. Set it first, with: export HF_TOKEN=..., and pass only its name: -x HF_TOKEN",
        ),
        (
            "RANK=7",
            "-x RANK=7 sets RANK to one value on all ranks, but the launcher sets it on each rank. Leave "
            "-x RANK=7 out. Use -np to set the number of ranks.",
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


def test_torchrun_commands_on_several_hosts_contain_forwarded_values_except_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "abc")
    monkeypatch.setenv("LEVEL", "3")
    hosts = parse_hosts("a:1,b:1")
    launch_spec = LaunchSpec(
        script="t.py", num_processes=2, hosts=hosts, forwarded=("HF_TOKEN", "LEVEL", "A"), environment={"A": "b"}
    )
    for command in commands_per_host(launch_spec):
        assert {"LEVEL": "3", "A": "b"}.items() <= command.environment.items()
        assert "HF_TOKEN" not in command.environment
    command = build("torchrun", launch_spec)
    assert "abc" not in command.shell()
    assert "abc" not in " ".join(command.argv)


def test_torchrun_plan_for_several_hosts_contains_names_of_forwarded_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEVEL", "my-level")
    monkeypatch.setenv("UNITRAIN_BACKEND", "ddp")
    command = build(
        "torchrun",
        LaunchSpec(
            script="t.py", num_processes=2, hosts=parse_hosts("a:1,b:1"), forwarded=("LEVEL", "A"), backend="horovod",
            environment={"A": "b"},
        ),
    )  # fmt: skip
    assert "my-level" not in " ".join(command.argv)
    plan = parse_plan(command.argv[4:])
    assert "LEVEL" in plan["forwarded"]
    for host in plan["hosts"]:
        assert {"A": "b", "UNITRAIN_BACKEND": "horovod"}.items() <= host["variables"].items()


def test_printed_commands_do_not_contain_forwarded_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "abc")
    for launcher in ("torchrun", "horovodrun", "none"):
        assert "abc" not in build(launcher, LaunchSpec(script="train.py", forwarded=("HF_TOKEN",))).shell()
