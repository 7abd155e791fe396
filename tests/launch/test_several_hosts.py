"""`unitrain launch` on two hosts: start of all ranks with one command, problems of hosts, and cleanup."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from hosts import Host
from launches import read_rank_reports
from requirements import needs_hosts, needs_mpi

pytestmark = needs_hosts
ROOT = str(Path(__file__).parents[2])
PYTHON = sys.executable
LAUNCH = [PYTHON, "-m", "unitrain", "launch"]
VARIABLES = {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
LAUNCHERS = [
    ("torchrun", ["--backend", "ddp"], []),
    ("horovodrun", ["--backend", "horovod"], []),
    ("mpirun", ["--launcher", "mpirun"], [needs_mpi]),
]
# Arguments: the folder for the reports of the ranks, and how the script ends. It does not import torch.
SCRIPT = """
import json, os, socket, sys, time

folder, end = sys.argv[1:]
names = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
rank = int(next(os.environ[name] for name in names if name in os.environ))
sizes = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")
size = int(next(os.environ[name] for name in sizes if name in os.environ))
keys = ("HF_TOKEN", "GLOO_SOCKET_IFNAME", "MASTER_PORT", "CUDA_VISIBLE_DEVICES")
report = dict(rank=rank, size=size, host=socket.gethostname(), **{key: os.environ.get(key) for key in keys})
with open(f"{folder}/{rank}.part", "w") as file:
    json.dump(report, file)
os.rename(f"{folder}/{rank}.part", f"{folder}/{rank}.json")
while len([name for name in os.listdir(folder) if name.endswith(".json")]) < size:
    time.sleep(0.05)
if end == "fails" and rank == size - 1:
    sys.exit("this rank fails")
if end != "returns":
    time.sleep(300)
"""


def wait_for_ranks(folder: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while len(read_rank_reports(folder)) < count:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def command_lines(hosts: list[Host]) -> str:
    return "\n".join(line for host in hosts for line in host.find_processes().values())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--backend", "ddp"], id="torchrun"),
        pytest.param(["--backend", "ddp", "--launcher", "mpirun"], id="mpirun", marks=needs_mpi),
    ],
)
def test_one_command_starts_ranks_on_all_hosts(
    options: list[str], two_hosts: list[Host], script: str, tmp_path: Path
) -> None:
    """Every rank receives a secret, but command lines do not contain the secret on any host."""
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# a comment\nh1 slots=2\nh2:1\n")
    command = [*LAUNCH, *options, "--hostfile", str(hostfile), "--interface", "eth0", "-x", "HF_TOKEN"]
    variables = VARIABLES | {"HF_TOKEN": "not-for-others"}
    with two_hosts[0].start([*command, script, str(tmp_path), "stays"], variables) as process:
        wait_for_ranks(tmp_path, 3, process)
        lines = command_lines(two_hosts)
        two_hosts[0].kill_all()
        output, _ = process.communicate()
    assert [(one["host"], one["size"]) for one in read_rank_reports(tmp_path)] == [("h1", 3), ("h1", 3), ("h2", 3)], (
        output
    )
    assert {one["HF_TOKEN"] for one in read_rank_reports(tmp_path)} == {"not-for-others"}
    assert {one["GLOO_SOCKET_IFNAME"] for one in read_rank_reports(tmp_path)} == {"eth0"}
    assert "not-for-others" not in lines
    assert "train.py" in lines
    for host in two_hosts:
        host.wait_until_all_exited(28)  # torchrun sends SIGKILL after 30 s


EXCHANGE = """
import torch, unitrain

with unitrain.init(device="cpu") as backend:
    exchange = backend._check_consistency.message_exchange
    peers = sorted(connection.getpeername()[0] for connection in exchange._connections.values())
    print(f"rank {backend.rank}: {backend.allreduce(torch.ones(3), 'sum').tolist()} {peers}", flush=True)
"""


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_ranks_on_two_hosts_exchange_rows_over_the_network(backend: str, two_hosts: list[Host], tmp_path: Path) -> None:
    script = tmp_path / "exchange.py"
    script.write_text(EXCHANGE)
    command = [*LAUNCH, "--backend", backend, "-H", "h1:2,h2:1", "--interface", "eth0", str(script)]
    with two_hosts[0].start(command, VARIABLES) as process:
        output, _ = process.communicate(timeout=200)
    here, there = (host.address for host in two_hosts)
    for rank, peers in enumerate(([here, there], [here, there], [here, here])):
        assert f"rank {rank}: [3.0, 3.0, 3.0] {peers}" in output, output


def test_dry_run_prints_one_command_per_host(two_hosts: list[Host], script: str) -> None:
    done = two_hosts[0].run([*LAUNCH, "--dry-run", "-H", "h1:2,h2:1", script, "."], VARIABLES)
    first, second = done.stdout.splitlines()
    assert first.startswith("on h1: TORCH_")
    assert second.startswith("on h2: TORCH_")
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr h1 --master-port 29500" in second


def test_concurrent_launches_do_not_share_a_rendezvous(two_hosts: list[Host], script: str, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    launched = []
    for folder in folders:
        folder.mkdir()
        launched.append(two_hosts[0].start([*LAUNCH, "-H", "h1:1,h2:1", script, str(folder), "returns"], VARIABLES))
    output = [process.communicate(timeout=90)[0] for process in launched]
    assert [process.returncode for process in launched] == [0, 0], output
    reports = [read_rank_reports(folder) for folder in folders]
    assert [[one["host"] for one in ranks] for ranks in reports] == [["h1", "h2"]] * 2
    assert reports[0][0]["MASTER_PORT"] != reports[1][0]["MASTER_PORT"]


@pytest.mark.parametrize(
    "options", [pytest.param(options, id=launcher, marks=needs) for launcher, options, needs in LAUNCHERS]
)
def test_devices_are_selected_on_each_host(
    options: list[str], two_hosts: list[Host], script: str, tmp_path: Path
) -> None:
    """Each host has one rank per selected device, although the first host has enough slots for all ranks."""
    command = [*LAUNCH, *options, "-H", "h1:4,h2:4", "--devices", "1,3", script, str(tmp_path), "returns"]
    with two_hosts[0].start(command, VARIABLES) as process:
        output, _ = process.communicate(timeout=90)
    reports = read_rank_reports(tmp_path)
    assert [one["host"] for one in reports] == ["h1", "h1", "h2", "h2"], output
    assert {one["CUDA_VISIBLE_DEVICES"] for one in reports} == {"1,3"}


def fail_rank(hosts: list[Host], process: subprocess.Popen[str]) -> None:
    """Do nothing, because the script itself makes the rank on the second host exit with code 1."""


def kill_launch(hosts: list[Host], process: subprocess.Popen[str]) -> None:
    """Send SIGKILL to the launch command, which cannot forward this signal."""
    (pid,) = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    hosts[0].signal(pid, signal.SIGKILL)


def terminate_launch(hosts: list[Host], process: subprocess.Popen[str]) -> None:
    (pid,) = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    hosts[0].signal(pid, signal.SIGTERM)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        pytest.param(options, fault, id=f"{launcher}-{fault.__name__}", marks=[*needs, *tier])
        for launcher, options, needs in LAUNCHERS
        for fault, fast in ((fail_rank, "torchrun"), (kill_launch, "horovodrun"), (terminate_launch, "mpirun"))
        for tier in ([] if launcher == fast else [pytest.mark.nightly],)
    ],
)
def test_all_ranks_exit_if_a_rank_fails_or_the_launch_is_killed(
    options: list[str],
    fault: Callable[[list[Host], subprocess.Popen[str]], None],
    two_hosts: list[Host],
    script: str,
    tmp_path: Path,
) -> None:
    end = "fails" if fault is fail_rank else "stays"
    with two_hosts[0].start([*LAUNCH, *options, "-H", "h1:1,h2:1", script, str(tmp_path), end], VARIABLES) as process:
        wait_for_ranks(tmp_path, 2, process)
        fault(two_hosts, process)
        for host in two_hosts:
            host.wait_until_all_exited(28)  # torchrun sends SIGKILL after 30 s
        output, _ = process.communicate(timeout=28)
    assert process.returncode != 0, output
    if fault is fail_rank:
        assert "this rank fails" in output


def test_launch_ends_if_a_host_fails(two_hosts: list[Host], script: str, tmp_path: Path) -> None:
    with two_hosts[0].start([*LAUNCH, "-H", "h1:1,h2:1", script, str(tmp_path), "stays"], VARIABLES) as process:
        wait_for_ranks(tmp_path, 2, process)
        two_hosts[1].kill()
        two_hosts[0].wait_until_all_exited(60)
        output, _ = process.communicate(timeout=60)
    assert "unitrain: h2 failed first, with exit code 255: the connection to the host was lost" in output
    assert process.returncode == 255


def disconnect_host(hosts: list[Host], script: Path) -> str:
    hosts[1].disconnect_network()
    return (
        "Host 'h2' cannot be reached: ssh: connect to host h2 port 22: No route to host. Leave it out of the hosts, or "
        "try: ssh h2 hostname"
    )


def change_host_key(hosts: list[Host], script: Path) -> str:
    known = hosts[0].home / ".ssh" / "known_hosts"
    first, second = (line.split(" ", 1) for line in known.read_text().splitlines())
    known.write_text(f"{second[0]} {first[1]}\n")
    return (
        "ssh rejects host 'h2' because its key has changed. If the host was reinstalled, remove the old key: "
        "ssh-keygen -R h2"
    )


def reject_login(hosts: list[Host], script: Path) -> str:
    (hosts[1].home / ".ssh" / "authorized_keys").unlink()
    return (
        "Host 'h2' does not accept a login without a password: root@h2: Permission denied (publickey). Install your "
        "key there: ssh-copy-id h2"
    )


def hide_script(hosts: list[Host], script: Path) -> str:
    assert hosts[1].run(["mount", "-t", "tmpfs", "tmpfs", str(script.parent)]).returncode == 0
    return (
        f"Script '{script}' is not on h2. Start from a folder that all hosts share, or copy it: "
        f"scp {script} h2:{script}"
    )


def hide_python(hosts: list[Host], script: Path) -> str:
    assert hosts[1].run(["mount", "-t", "tmpfs", "tmpfs", str(Path(PYTHON).parent)]).returncode == 0
    return f"'{PYTHON}' does not run on h2: "


def install_other_torch(hosts: list[Host], script: Path) -> str:
    (own,) = [file.locate() for file in metadata.files("torch") or [] if file.match("torch-*.dist-info/METADATA")]
    version = metadata.version("torch")
    other = script.parent / "METADATA"
    other.write_text(Path(str(own)).read_text().replace(f"Version: {version}", "Version: 2.6.0", 1))
    assert hosts[1].run(["mount", "--bind", str(other), str(own)]).returncode == 0
    fix = f"Install the same version there: ssh h2 {PYTHON} -m pip install torch=={version}"
    if "+" in version:  # a local version is not on the package index
        fix = "Start from an environment that all hosts share"
    return f"torch is {version} on h1, but 2.6.0 on h2. {fix}"


@pytest.mark.parametrize(
    "cause_problem",
    [disconnect_host, change_host_key, reject_login, hide_script, hide_python, install_other_torch],
    ids=lambda cause_problem: cause_problem.__name__,
)
def test_problems_of_hosts_are_reported_before_the_launch(
    cause_problem: Callable[[list[Host], Path], str], two_hosts: list[Host], script: str, tmp_path: Path
) -> None:
    expected = cause_problem(two_hosts, Path(script))
    began = time.monotonic()
    done = two_hosts[0].run([*LAUNCH, "-H", "h1:1,h2:1", script, str(tmp_path), "returns"], VARIABLES)
    assert time.monotonic() - began < 60
    assert done.returncode == 2
    assert f"Error: {expected}" in done.stdout
    assert not read_rank_reports(tmp_path)
    assert two_hosts[0].find_processes() == {}
    two_hosts[1].wait_until_all_exited(15)


PRINT_FOLDER = "import os, socket; print(socket.gethostname(), 'runs in', os.getcwd(), flush=True)"


@pytest.mark.ci
@pytest.mark.parametrize("options", [pytest.param(options, id=name, marks=marks) for name, options, marks in LAUNCHERS])
def test_ranks_run_in_the_home_folder_of_a_host_without_the_current_folder(
    options: list[str], two_hosts: list[Host], tmp_path: Path
) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "parent" / "work"
    script.write_text(PRINT_FOLDER)
    folder.mkdir(parents=True)
    assert two_hosts[1].run(["mount", "-t", "tmpfs", "tmpfs", str(folder.parent)]).returncode == 0
    command = ["env", f"--chdir={folder}", *LAUNCH, *options, "-H", "h1:1,h2:1", str(script)]
    done = two_hosts[0].run(command, VARIABLES)
    assert done.returncode == 0, done.stdout
    assert f"h1 runs in {folder}\n" in done.stdout
    assert f"h2 runs in {two_hosts[1].home}\n" in done.stdout


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        (
            ["-H", "h1:1,h7:1"], {},
            "Host 'h7' cannot be resolved on this host: ssh: Could not resolve hostname h7: ",
        ),
        (
            ["-H", "h1:1,h2:1", "-np", "3"], {},
            "-np requests 3 processes, but the hosts have 2 slots. Use -np 2, or give the hosts more slots: "
            "-H h1:2,h2:1",
        ),
        (
            ["-H", "h1:1,h2:1", "--interface", "ib0"], {},
            "--interface ib0 does not exist on h1, which has: eth0. Leave --interface out to use the interface with "
            "the route to the other hosts, or name an interface that all hosts have",
        ),
        (
            ["-H", "h1:1,h2:1"], {"MASTER_PORT": "22"},
            "MASTER_PORT is 22, but this port is not available on h1. To let unitrain choose a free port, clear the "
            "variable: unset MASTER_PORT",
        ),
        (
            ["-H", "localhost:1,h2:1"], {},
            "Ranks on 2 hosts connect to the first host, but on each host 'localhost' refers to that host "
            "itself. Use a name by which the other hosts can reach the first host, as in: -H h1:1",
        ),
    ],
    ids=["unknown name", "slots", "interface", "port", "localhost"],
)  # fmt: skip
def test_invalid_requests_are_reported_before_the_launch(
    options: list[str], variables: dict[str, str], expected: str, two_hosts: list[Host], script: str
) -> None:
    done = two_hosts[0].run([*LAUNCH, *options, script, ".", "returns"], VARIABLES | variables)
    assert f"Error: {expected}" in done.stdout
    assert done.returncode == 2
    for host in two_hosts:
        host.wait_until_all_exited(15)


FAILS_ONCE = """
import os, sys, time

folder, = sys.argv[1:]
again = os.path.exists(f"{folder}/failed")
open(f"{folder}/{os.environ['RANK']}.{again}", "w").close()
while not os.path.exists(f"{folder}/0.{again}"):
    time.sleep(0.05)
if not again and os.environ["RANK"] == "1":
    open(f"{folder}/failed", "w").close()
    sys.exit(3)
if not again:
    time.sleep(300)  # if all of its ranks exited, the agent would wait for other agents until 30 s after SIGTERM
"""


def test_job_on_two_hosts_is_restarted_after_a_failure(two_hosts: list[Host], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ONCE)
    command = [*LAUNCH, "--max-restarts", "1", "-H", "h1:1,h2:1", str(script), str(tmp_path)]
    done = two_hosts[0].run(command, VARIABLES, seconds=200)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("(restart 1 of 1)") == 1
    assert (tmp_path / "0.True").exists()
    assert (tmp_path / "1.True").exists()
    for host in two_hosts:
        host.wait_until_all_exited(15)
