"""Commands that are built for torchrun, for horovodrun and without a launcher. No ranks are started."""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from fake_programs import write_program
from torch.distributed import run as torch_run

from unitrain import launchers
from unitrain.launchers import (
    Command,
    Host,
    LaunchError,
    LaunchSpec,
    agents,
    build,
    parse_elastic,
    parse_hosts,
    preflight,
)
from unitrain.launchers.agents import parse_plan
from unitrain.launchers.hosts import check_distinct, is_this_host
from unitrain.launchers.torchrun import commands_per_host

TORCHRUN = (sys.executable, "-P", "-m", "unitrain.bootstrap.torchrun")
HOROVODRUN = (sys.executable, "-P", "-m", "unitrain.backends.horovod.horovodrun")

ALLOWED = os.sched_getaffinity(0)


@pytest.fixture(autouse=True)
def _without_settings_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def create_spec(**given: object) -> LaunchSpec:
    return LaunchSpec(**{"script": "train.py", "args": ("--epochs", "3"), **given})  # type: ignore[arg-type]


# --- hosts ---


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:4,b:2", [Host("a", 4), Host("b", 2)]),
        ("a", [Host("a", 1)]),
        (" node-1.site:2 , 10.0.0.7:1 ", [Host("node-1.site", 2), Host("10.0.0.7", 1)]),
        ("[fe80::1]:3", [Host("[fe80::1]", 3)]),
    ],
)
def test_parse_hosts_reads_the_notation_of_horovod_and_mpi(text: str, hosts: list[Host]) -> None:
    assert list(parse_hosts(text)) == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:0", "Host 'a:0' must have a positive whole number of slots, got '0'. Use: -H a:1"),
        ("a:two", "Host 'a:two' must have a positive whole number of slots, got 'two'. Use: -H a:1"),
        ("a:²", "Host 'a:²' must have a positive whole number of slots, got '²'. Use: -H a:1"),
        ("a:", "Host 'a:' must have a positive whole number of slots, got ''. Use: -H a:1"),
        ("a:1,,b:1", "Host '' in 'a:1,,b:1' is not valid. Write name:slots, as in -H node1:4,node2:4"),
        ("a b:1", "Host 'a b:1' in 'a b:1' is not valid. Write name:slots, as in -H node1:4,node2:4"),
        (
            "-oProxyCommand=id:1",
            "Host '-oProxyCommand=id:1' in '-oProxyCommand=id:1' is not valid. Write name:slots, as in "
            "-H node1:4,node2:4",
        ),
        ("-F:1", "Host '-F:1' in '-F:1' is not valid. Write name:slots, as in -H node1:4,node2:4"),
        ("a:2,b:1,a:3", "Host 'a' is named twice in 'a:2,b:1,a:3'. Add up its slots: -H a:5,b:1"),
    ],
)
def test_parse_hosts_rejects_invalid_hosts(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hosts(text)
    assert str(caught.value) == message


def test_parse_hosts_rejects_more_digits_than_python_converts() -> None:
    with pytest.raises(LaunchError, match="must have a positive whole number of slots, got '111"):
        parse_hosts("a:" + "1" * 5000)


def test_hosts_with_the_same_address_are_rejected() -> None:
    addresses = {"a": "10.0.0.1", "a.site": "10.0.0.1", "b": "10.0.0.2"}

    def resolve(name: str) -> str:
        if name not in addresses:
            raise OSError("only ssh knows it")
        return addresses[name]

    check_distinct(parse_hosts("a:1,b:1,alias:1,other:1"), resolve)
    with pytest.raises(LaunchError, match=r"^Hosts 'a' and 'a\.site' are the same machine, 10\.0\.0\.1\. .* -H a:N$"):
        check_distinct(parse_hosts("a:1,b:1,a.site:1"), resolve)


# --- launch spec ---


def test_launch_spec_rejects_zero_processes_and_more_processes_than_slots() -> None:
    with pytest.raises(LaunchError, match=r"^A run needs at least 1 process, got -np 0\. Use: -np 1$"):
        create_spec(num_processes=0)
    with pytest.raises(LaunchError) as caught:
        create_spec(num_processes=4, hosts=parse_hosts("a:1,b:1"))
    assert str(caught.value) == (
        "-np requests 4 processes, but the hosts have 2 slots. Use -np 2, or give the hosts more slots: -H a:3,b:1"
    )
    with pytest.raises(LaunchError, match=r"but the hosts have 1 slot\. Use -np 1,"):
        create_spec(num_processes=2, hosts=parse_hosts("a"))
    create_spec(num_processes=4, hosts=parse_hosts("a:3,b:1"))  # the suggested hosts are sufficient


@pytest.mark.parametrize(
    ("processes", "hosts", "max_processes", "threads"),
    [(1, "", 1, "8"), (2, "", 2, "4"), (16, "", 16, "1"), (5, "a:4,b:4", 4, "2"), (3, "a:1,b:2", 2, "4")],
)
def test_threads_per_rank_divide_the_cores_of_the_fullest_host(
    processes: int, hosts: str, max_processes: int, threads: str
) -> None:
    launch_spec = create_spec(num_processes=processes, hosts=parse_hosts(hosts) if hosts else ())
    assert launch_spec.processes_on_fullest_host == max_processes
    assert launch_spec.variables == {"OMP_NUM_THREADS": threads}


def test_variables_set_by_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert create_spec(environment={"OMP_NUM_THREADS": "3"}, backend="ddp").variables == {
        "OMP_NUM_THREADS": "3",
        "UNITRAIN_BACKEND": "ddp",
    }
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert create_spec().variables == {}


# --- commands ---


def test_hostfile_is_read_in_the_notations_of_open_mpi_horovod_and_schedulers(tmp_path: Path) -> None:
    """Schedulers write one line per slot."""
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=4 max_slots=8\n\nb:2  # two\nc\nc\n")
    assert launchers.read_hostfile(path) == (Host("a", 4), Host("b", 2), Host("c", 2))
    for text, message in (
        ("a slots=x\n", r"must have a positive whole number of slots, got 'x'"),
        ("a 4\n", r"^Line 'a 4' of .* is not valid\. Write: a slots=4$"),
        ("# none\n", r"^--hostfile .* does not name a host\. Write one"),
    ):
        path.write_text(text)
        with pytest.raises(LaunchError, match=message):
            launchers.read_hostfile(path)
    with pytest.raises(LaunchError, match=r"^--hostfile .*absent cannot be read: .* Write one host per line"):
        launchers.read_hostfile(tmp_path / "absent")
    for endless in ("/dev/zero", "/dev/urandom"):
        with pytest.raises(LaunchError, match=rf"^--hostfile {endless} cannot be read: .* Write one host per line"):
            launchers.read_hostfile(Path(endless))


def test_interface_is_passed_to_the_launcher_and_to_libraries() -> None:
    launch_spec = create_spec(num_processes=2, hosts=parse_hosts("a.invalid:1,b.invalid:1"), interface="ib0")
    found = {"GLOO_SOCKET_IFNAME": "ib0", "HOROVOD_GLOO_IFACE": "ib0", "NCCL_SOCKET_IFNAME": "ib0"}
    for launcher, words in (("torchrun", ""), ("horovodrun", "--network-interfaces ib0")):
        command = build(launcher, launch_spec)
        assert words in command.shell()
        assert all(found.items() <= item.environment.items() for item in [v for _, v in command.per_host] or [command])


def test_torchrun_on_one_host_uses_a_standalone_rendezvous() -> None:
    command = build("torchrun", create_spec(num_processes=2, backend="horovod"))
    assert command.argv == (
        *TORCHRUN, "--standalone", "--nproc-per-node", "2", "--", "train.py", "--epochs", "3",
    )  # fmt: skip
    assert command.environment == {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "UNITRAIN_BACKEND": "horovod", "OMP_NUM_THREADS": "4",
    }  # fmt: skip


def test_torchrun_on_two_hosts_has_one_command_per_host() -> None:
    launch_spec = create_spec(num_processes=3, hosts=parse_hosts("a:2,b:2"))
    first, second = commands_per_host(launch_spec)
    common = ("--master-addr", "a", "--master-port", "29500", "--", "train.py", "--epochs", "3")
    assert first.argv[4:] == ("--nnodes", "2", "--node-rank", "0", "--nproc-per-node", "2", *common)
    assert second.argv[4:] == ("--nnodes", "2", "--node-rank", "1", "--nproc-per-node", "1", *common)
    command = build("torchrun", launch_spec)
    assert command.per_host == (("a", first), ("b", second))
    assert command.shell().splitlines() == [f"on a: {first.shell()}", f"on b: {second.shell()}"]
    assert command.argv[1:3] == ("-P", "-c")
    found = parse_plan(command.argv[4:])
    assert [(host["name"], tuple(host["argv"])) for host in found["hosts"]] == [("a", first.argv), ("b", second.argv)]
    assert [host["start"][0] for host in found["hosts"]] == ["ssh", "ssh"]
    assert "--master-port 4711" in build("torchrun", replace(launch_spec, port=4711)).shell()


def test_plan_of_2000_hosts_fits_into_the_command_line() -> None:
    """Linux limits one argument to 128 KiB and all arguments together to a quarter of the stack limit."""
    hosts = tuple(Host(f"198.18.{number // 100}.{number % 100}", 8) for number in range(2000))
    launch_spec = create_spec(num_processes=16000, hosts=hosts, args=("--data", "x" * 3000))
    command = build("torchrun", launch_spec)
    assert [tuple(host["argv"]) for host in parse_plan(command.argv[4:])["hosts"]] == [
        item.argv for item in commands_per_host(launch_spec)
    ]
    listed = "import sys; print(len(sys.argv))"
    done = subprocess.run([*command.argv[:3], listed, *command.argv[4:]], capture_output=True, text=True, check=True)
    assert done.stdout == f"{len(command.argv[3:])}\n"


def test_agents_do_not_import_modules_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("launchers", "click", "json"):
        (tmp_path / f"{name}.py").write_text(f"print('{name} of the current folder')")
    command = agents.build_command(
        [(Host("localhost", 1), Command(("sh", "-c", "echo began; exit 3")))], (), sys.executable, through_slurm=False
    )
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (3, "began\n")
    assert done.stderr == "unitrain: localhost failed first, with exit code 3\n"


def test_exit_code_255_of_a_program_on_this_host_is_not_reported_as_a_lost_connection() -> None:
    program = Command(("sh", "-c", "exit 255"))
    command = agents.build_command([(Host("localhost", 1), program)], (), sys.executable, through_slurm=False)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (255, "unitrain: localhost failed first, with exit code 255\n")


def test_cleanup_names_the_launcher_that_fails() -> None:
    launch_spec = create_spec(hosts=parse_hosts("a:1"), environment={launchers.LAUNCH_ID_VARIABLE: "1"})
    command = launchers.add_cleanup(Command((sys.executable, "-m", "launcher")), "horovodrun", launch_spec)
    assert [host["name"] for host in parse_plan(command.argv[4:])["hosts"]] == ["horovodrun", "a"]


def test_host_without_the_folder_runs_its_ranks_in_the_folder_of_the_agent(tmp_path: Path) -> None:
    """ssh starts an agent in the home folder of the host."""
    program = Command((sys.executable, "-c", "import os; print(os.getcwd())"))
    command = agents.build_command([(Host("localhost", 1), program)], (), sys.executable, through_slurm=False)
    plan = command[-1].replace(json.dumps(str(Path.cwd())), json.dumps(str(tmp_path / "missing")))
    done = subprocess.run([*command[:-1], plan], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")
    assert done.stderr == (
        f"unitrain: {tmp_path}/missing is not available on {socket.gethostname()}. The ranks there run in {tmp_path}\n"
    )


@pytest.mark.parametrize(
    ("package", "version", "fix"),
    [
        ("torch", "2.6.0", f"ssh b {sys.executable} -m pip install torch==2.6.0"),
        ("torch", "2.6.0+cu124", "Start from an environment that all hosts share"),
        ("unitrain", "0.1.0", "Start from an environment that all hosts share"),
        ("Python", "3.11", "Start from an environment that all hosts share"),
    ],
)
def test_pip_install_is_suggested_only_for_versions_of_the_package_index(package: str, version: str, fix: str) -> None:
    first, other = (
        preflight._ProbeResult(
            Host(name, 1), {"folder": True, "script": True, "versions": {package: found}, "interfaces": []}
        )
        for name, found in (("a", version), ("b", "0.0.1"))
    )
    with pytest.raises(LaunchError) as caught:
        preflight._check_probe_result(other, first, create_spec())
    assert str(caught.value).startswith(f"{package} is {version} on a, but 0.0.1 on b. ")
    assert str(caught.value).endswith(fix)


@pytest.mark.parametrize(
    ("has_folder", "message"),
    [
        (False, f"The current folder '{Path.cwd()}' does not exist on b. Start from a folder that all hosts share, or"),
        (True, f"Configuration file 'run.yaml' is not on b. .* or copy it: scp {Path.cwd()}/run.yaml b:{Path.cwd()}/"),
    ],
)
def test_host_without_the_configuration_file_is_reported(has_folder: bool, message: str) -> None:
    launch_spec = create_spec(script="unitrain", module=True, args=("train", "run.yaml", "--lr", "1"))
    facts = {"folder": has_folder, "script": False, "versions": {}, "interfaces": []}
    result = preflight._ProbeResult(Host("b", 1), facts)
    assert preflight._required_file(launch_spec) == "run.yaml"
    with pytest.raises(LaunchError, match=f"^{message}"):
        preflight._check_probe_result(result, result, launch_spec)


@pytest.mark.parametrize("port", ["abc", "0", "70000", "-1"])
@pytest.mark.parametrize("given", [True, False], ids=["with -x", "in the environment"])
def test_invalid_master_port_is_rejected(port: str, given: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fix = "leave -x MASTER_PORT out" if given else "clear the variable: unset MASTER_PORT"
    message = f"^MASTER_PORT must be a port from 1 to 65535, got '{port}'. To let unitrain choose a port, {fix}$"
    if given:
        with pytest.raises(LaunchError, match=message):
            create_spec(environment={"MASTER_PORT": port})
        return
    monkeypatch.setenv("MASTER_PORT", port)
    launch_spec = create_spec(num_processes=2, hosts=parse_hosts("a:1,b:1"))
    for function in (lambda: build("torchrun", launch_spec), lambda: launchers.check_hosts(launch_spec)):
        with pytest.raises(LaunchError, match=message):
            function()


def test_output_of_ssh_in_another_encoding_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(tmp_path, "ssh", "printf 'Zugriff verweigert \\374ber\\n' >&2; exit 255")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(LaunchError, match=r"^Host '192\.0\.2\.1' cannot be reached: Zugriff verweigert \ufffdber\."):
        launchers.check_hosts(create_spec(num_processes=1, hosts=parse_hosts("192.0.2.1:1")))


def test_missing_python_on_this_host_is_reported() -> None:
    launch_spec = create_spec(hosts=parse_hosts("localhost:1"), python="/missing/python")
    message = r"^'/missing/python' does not run on localhost: No such file or directory\. Install the environment"
    with pytest.raises(LaunchError, match=message):
        launchers.check_hosts(launch_spec)


def test_more_processes_than_a_host_can_run_are_rejected() -> None:
    for launcher in ("torchrun", "horovodrun", "mpirun"):
        with pytest.raises(
            LaunchError, match=r"^-np 80000 would start 80000 processes on one host; the limit is 4096\."
        ):
            build(launcher, create_spec(num_processes=80000, is_dry_run=True))
    with pytest.raises(LaunchError, match=r"^-np 9000 would start 5000 processes on one host"):
        build("torchrun", create_spec(num_processes=9000, hosts=parse_hosts("a:5000,b:5000"), is_dry_run=True))
    build("torchrun", create_spec(num_processes=8000, hosts=parse_hosts("a:4000,b:4000"), is_dry_run=True))


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun", "mpirun"])
def test_backend_local_with_several_processes_is_rejected_before_the_launch(launcher: str) -> None:
    with pytest.raises(LaunchError) as caught:
        build(launcher, create_spec(backend="local", num_processes=2, is_dry_run=True))
    assert str(caught.value) == (
        f"Backend 'local' runs one process, but {launcher} would start 2. Use --backend ddp or --backend horovod for "
        "-np 2, or -np 1 for one process."
    )


def test_threads_per_rank_respect_the_cpu_affinity() -> None:
    """A scheduler or `taskset` may restrict a process to some cores of the machine."""
    core = min(ALLOWED)
    shown = "from unitrain.launchers import LaunchSpec; print(LaunchSpec(script='t.py').variables['OMP_NUM_THREADS'])"
    done = subprocess.run(
        ["taskset", "--cpu-list", str(core), sys.executable, "-c", shown], capture_output=True, text=True, check=True
    )
    assert done.stdout == "1\n"


IGNORE_SIGUSR2 = """
import signal, sys, time
from pathlib import Path

signal.signal(signal.SIGUSR2, signal.SIG_IGN)
print("ready", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.05)
sys.exit(7)
"""


def test_signals_during_a_blocked_write_do_not_end_a_launch(tmp_path: Path) -> None:
    """A signal handler that writes to a buffered pipe fails if it interrupts another write to the same pipe."""
    end = tmp_path / "end"
    program = Command((sys.executable, "-c", IGNORE_SIGUSR2, str(end)))
    command = agents.build_command([(Host("localhost", 1), program)], (), sys.executable, through_slurm=False)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (holder,) = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        os.kill(holder, signal.SIGSTOP)
        pipe = os.open(f"/proc/{holder}/fd/0", os.O_RDWR)
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, 4096)
        os.close(pipe)
        for _ in range(4000):
            process.send_signal(signal.SIGUSR2)
            time.sleep(0.0002)
        os.kill(holder, signal.SIGCONT)
        end.touch()
        assert process.wait(60) == 7
    finally:
        process.kill()
        process.communicate()


def test_hosts_without_processes_do_not_get_a_torchrun_command() -> None:
    """torchrun raises an AssertionError without a message if it starts zero processes."""
    launch_spec = create_spec(num_processes=3, hosts=parse_hosts("a:2,b:2,c:2"))
    assert commands_per_host(launch_spec) == commands_per_host(
        create_spec(num_processes=3, hosts=parse_hosts("a:2,b:1"))
    )
    assert [host for host, _ in build("torchrun", launch_spec).per_host] == ["a", "b"]


def test_host_that_is_added_to_an_elastic_job_does_not_serve_the_rendezvous() -> None:
    for hosts, num_processes, is_single in (("b:4", 4, True), ("a:4,b:4", 8, False)):
        launch_spec = create_spec(num_processes=num_processes, hosts=parse_hosts(hosts), elastic=parse_elastic("1:8"))
        with pytest.raises(LaunchError) as caught:
            build("torchrun", launch_spec)
        *_, last, added = str(caught.value).splitlines()
        assert added == (
            "  on a host that is added later: the last of these commands, with the name of the new host in --local-addr"
            + ", and is_host=false instead of is_host=true" * is_single
        )
        assert ("is_host=true" in last) == is_single
        assert ("is_host=false" in last) != is_single


@pytest.mark.parametrize("launcher", ["none", "torchrun"])
def test_launchers_other_than_horovodrun_reject_a_controller(launcher: str) -> None:
    with pytest.raises(
        LaunchError, match=r"^--mpi chooses horovodrun's controller.* or use: --backend horovod --launcher horovodrun$"
    ):
        build(launcher, create_spec(controller="mpi"))


def test_launch_without_a_launcher_rejects_other_hosts() -> None:
    for here in ("localhost", "127.0.0.1", socket.gethostname()):
        assert "--standalone" in build("torchrun", create_spec(hosts=(Host(here, 1),))).argv
        build("none", create_spec(hosts=(Host(here, 1),)))
    for elsewhere in ("192.0.2.1", "elsewhere.invalid"):
        with pytest.raises(
            LaunchError, match=rf"on this host only, but -H names '{elsewhere}'\. Run the command there, or use "
        ):
            build("none", create_spec(hosts=(Host(elsewhere, 1),)))


@pytest.mark.parametrize(
    ("launch_spec", "options", "variables"),
    [
        (create_spec(num_processes=2), ["-np", "2", "--gloo"], {}),
        (
            create_spec(num_processes=2, controller="mpi", backend="horovod"),
            ["-np", "2", "--mpi"],
            {"UNITRAIN_BACKEND": "horovod", "OMPI_MCA_odls_base_sigkill_timeout": "4"}
            | ({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}),
        ),
        (create_spec(num_processes=2, hosts=(Host("localhost", 2),)), ["-np", "2", "-H", "localhost:2", "--gloo"], {}),
        (
            create_spec(num_processes=2, hosts=(Host("a.invalid", 2), Host("b.invalid", 1))),
            ["-np", "2", "-H", "a.invalid:2,b.invalid:1", "--gloo", "--disable-cache"],
            {},
        ),
    ],
    ids=["gloo", "mpi", "one host", "two hosts"],
)
def test_horovodrun_command_contains_hosts_controller_and_variables(
    launch_spec: LaunchSpec,
    options: list[str],
    variables: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_program(tmp_path, "mpirun", "exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    command = build("horovodrun", launch_spec)
    assert command.argv == (
        *HOROVODRUN, *options, "--", sys.executable, "train.py", "--epochs", "3",
    )  # fmt: skip
    assert command.environment == {"OMP_NUM_THREADS": "4"} | variables


# Exact, abbreviated and ambiguous options of torchrun and horovodrun, and the separator itself.
OPTION_LIKE_ARGUMENTS = [
    ("--log", "5"), ("--start", "4"), ("--local", "1"), ("--num", "3"), ("--min", "1"), ("--auto",), ("--no", "x"),
    ("--nnodes", "7"), ("-np", "8"), ("-h",), ("--help",), ("-m", "x"), ("--version",), ("--rdzv", "y"), ("--", "-t"),
    ("--stall", "1"), ("-x", "A=1"), ("--log=5",), ("a", "--", "--log"), ("--hosts", "b"),
]  # fmt: skip


@pytest.mark.parametrize("args", OPTION_LIKE_ARGUMENTS, ids=" ".join)
@pytest.mark.parametrize("is_module", [False, True])
def test_arguments_of_the_script_do_not_reach_the_parser_of_torchrun(args: tuple[str, ...], is_module: bool) -> None:
    command = build("torchrun", create_spec(num_processes=2, args=args, module=is_module))
    options = torch_run.parse_args(command.argv[4:])
    assert (options.training_script, tuple(options.training_script_args)) == ("train.py", args)
    assert (options.module, options.nproc_per_node, options.log_dir) == (is_module, "2", None)


@pytest.mark.parametrize("args", OPTION_LIKE_ARGUMENTS, ids=" ".join)
def test_arguments_of_the_script_do_not_reach_the_parser_of_horovodrun(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    horovodrun = importlib.import_module("unitrain.backends.horovod.horovodrun")
    command = build("horovodrun", create_spec(num_processes=2, args=args))
    monkeypatch.setattr(sys, "argv", list(command.argv[3:]))
    options = horovodrun.parse_arguments()
    assert tuple(options.command) == (sys.executable, "train.py", *args)
    assert (options.num_proc, options.hosts) == (2, None)


def test_horovodrun_with_mpi_rejects_ddp() -> None:
    with pytest.raises(
        LaunchError, match=r"^Backend 'ddp' needs a rendezvous address.* Omit --mpi, or use --backend horo"
    ):
        build("horovodrun", create_spec(controller="mpi", backend="ddp"))


def test_command_without_a_launcher_starts_one_local_process() -> None:
    command = build("none", create_spec(backend="local"))
    assert command.argv == (sys.executable, "train.py", "--epochs", "3")
    assert command.environment == {"UNITRAIN_BACKEND": "local", "OMP_NUM_THREADS": "8"}
    with pytest.raises(
        LaunchError,
        match=r"^Without a launcher, unitrain starts one process on this host, but -H names 2 hosts: a, b\.",
    ):
        build("none", create_spec(hosts=parse_hosts("a:1,b:1")))
    with pytest.raises(
        LaunchError, match=r"^Without a launcher, unitrain starts one process on this host, but -np requests 2\. Use "
    ):
        build("none", create_spec(num_processes=2))


def test_launchers_of_other_environments_on_path_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first torchrun or horovodrun on PATH might start the ranks with another Python and other packages."""
    for name in ("torchrun", "horovodrun"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build("torchrun", create_spec()).argv[:4] == TORCHRUN
    assert build("horovodrun", create_spec()).argv[:4] == HOROVODRUN
    assert {
        item.argv[:4] for item in commands_per_host(create_spec(num_processes=2, hosts=parse_hosts("a:1,b:1")))
    } == {TORCHRUN}


def test_missing_launcher_package_is_reported_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        LaunchError, match=r"^Launcher 'horovodrun' is not installed for .*\. Build .* with: unitrain horovod build$"
    ):
        build("horovodrun", create_spec())


def test_unknown_launcher_is_reported_with_a_suggestion() -> None:
    with pytest.raises(LaunchError) as caught:
        build("torchrunn", create_spec())
    assert str(caught.value) == (
        "Unknown launcher 'torchrunn'. Did you mean 'torchrun'? Available: horovodrun, mpirun, none, srun, torchrun."
    )


def test_command_is_quoted_for_a_shell() -> None:
    command = Command(("run", "a b", "it's", "$HOME", ""), {"NAME": "two words"})
    assert shlex.split(command.shell()) == ["NAME=two words", "run", "a b", "it's", "$HOME", ""]


def test_entry_point_adds_a_launcher_but_does_not_replace_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site_launcher.py").write_text(
        "from unitrain.launchers import Command\n\n\ndef build(spec):\n    return Command(('site', spec.script))\n"
    )
    metadata = tmp_path / "site_launcher-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: site-launcher\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[unitrain.launchers]\nsite = site_launcher:build\ntorchrun = site_launcher:build\n"
        "broken = a_library_nobody_has:build\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert launchers.available() == ["broken", "horovodrun", "mpirun", "none", "site", "srun", "torchrun"]
    assert build("site", create_spec()).argv == ("site", "train.py")
    assert build("torchrun", create_spec()).argv[:4] == TORCHRUN
    with pytest.raises(LaunchError) as caught:
        build("broken", create_spec())
    assert str(caught.value) == (
        "Launcher 'broken' cannot be loaded: No module named 'a_library_nobody_has'. Install the requirements of the "
        "package that provides 'a_library_nobody_has:build', or choose another launcher with --launcher."
    )


def test_host_name_with_a_label_of_more_than_63_characters_is_not_this_host() -> None:
    """For such a name, Python's resolver raises UnicodeError."""
    name = "a" * 64
    assert not is_this_host(Host(name, 1))
    check_distinct((Host(name, 1), Host("localhost", 1)))
