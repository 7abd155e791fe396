"""Other users and other hosts cannot read the secrets of a job or interfere with the job."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import shlex
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hosts import Host
from launches import SECONDS, running_launcher
from requirements import needs_hosts, needs_mpi

from unitrain.backends import objects
from unitrain.backends.horovod import horovodrun
from unitrain.bootstrap import authentication
from unitrain.bootstrap.messages import MessageStore
from unitrain.errors import AuthenticationError

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, "-m", "unitrain", "launch"]
VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
SECRET = "value-that-no-process-listing-shows"
# Argument: a folder. Each rank writes its prefix and environment to the folder, and waits for a file named "end".
SCRIPT = """
import json, os, sys, time

names = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")
rank = int(next(os.environ[name] for name in names if name in os.environ))
report = dict(prefix=sys.prefix, variables=dict(os.environ))
with open(f"{sys.argv[1]}/{rank}.part", "w") as file:
    json.dump(report, file)
os.rename(f"{sys.argv[1]}/{rank}.part", f"{sys.argv[1]}/{rank}.json")
while not os.path.exists(f"{sys.argv[1]}/end"):
    time.sleep(0.05)
"""
# The same with a backend. Rank 1 fails if the file "end" is not empty.
TRAINING = (
    "import unitrain\nbackend = unitrain.init(device='cpu', timeout_seconds=60)\n"
    + SCRIPT
    + """
if rank == 1 and open(f"{sys.argv[1]}/end").read():
    raise ValueError("an independent failure")
backend.barrier()
backend.shutdown()
"""
)
LAUNCHERS = [
    pytest.param(["--backend", "ddp"], id="torchrun"),
    pytest.param(["--backend", "horovod"], id="horovodrun"),
    pytest.param(["--backend", "horovod", "--mpi"], id="horovodrun with mpi", marks=needs_mpi),
    pytest.param(["--launcher", "mpirun"], id="mpirun", marks=needs_mpi),
]


def wait_for_ranks(folder: Path, count: int) -> list[dict[str, dict[str, str]]]:
    deadline = time.monotonic() + SECONDS
    while len(found := sorted(folder.glob("*.json"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return [json.loads(path.read_text()) for path in found]


@contextlib.contextmanager
def command_lines() -> Iterator[set[str]]:
    """Collect the command lines of all processes on this machine, including simulated hosts, until the context ends."""
    found: set[str] = set()
    ended = threading.Event()

    def collect() -> None:
        while not ended.is_set():
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # the process has ended
                    found.add((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            time.sleep(0.01)

    thread = threading.Thread(target=collect)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_ranks_run_in_the_virtual_environment_of_the_launch_command(backend: str, script: str, tmp_path: Path) -> None:
    """The virtual environment uses the packages of another one, and does not contain programs like torchrun."""
    own = tmp_path / "environment"
    venv.create(own, symlinks=True)
    (packages,) = own.glob("lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in others))
    command = [str(own / "bin" / "python"), "-m", "unitrain", "launch", "-np", "2", "--backend", backend]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with running_launcher([*command, script, str(tmp_path)], {"PATH": path}) as launch:
        rank_reports = wait_for_ranks(tmp_path, 2)
        (tmp_path / "end").touch()
        output = launch.output()
    assert [report["prefix"] for report in rank_reports] == [str(own), str(own)], output
    assert launch.process.returncode == 0, output


def check_secret(
    lines: set[str], output: str, rank_reports: list[dict[str, dict[str, str]]], names: tuple[str, ...]
) -> None:
    """Assert that each rank has the secrets, and that command lines and output contain neither the secrets nor the
    job's key."""
    (key,) = {report["variables"]["UNITRAIN_JOB_KEY"] for report in rank_reports}
    for report in rank_reports:
        assert {name: report["variables"].get(name) for name in names} == dict.fromkeys(names, SECRET)
    assert any("train.py" in line for line in lines)
    assert not [line for line in [*lines, output] if SECRET in line or key in line]


@pytest.mark.parametrize("options", LAUNCHERS)
def test_command_lines_do_not_show_variables_on_one_host(options: list[str], script: str, tmp_path: Path) -> None:
    secrets = {"WANDB_API_KEY": SECRET, "NOTES": SECRET}
    with (
        command_lines() as lines,
        running_launcher([*LAUNCH, "-np", "2", *options, script, str(tmp_path)], secrets) as launch,
    ):
        rank_reports = wait_for_ranks(tmp_path, 2)
        (tmp_path / "end").touch()
        output = launch.output()
    check_secret(lines, output, rank_reports, ("WANDB_API_KEY", "NOTES"))
    assert launch.process.returncode == 0, output


@needs_hosts
@pytest.mark.parametrize("options", LAUNCHERS)
def test_command_lines_do_not_show_variables_on_two_hosts(
    options: list[str], two_hosts: list[Host], script: str, tmp_path: Path
) -> None:
    command = [*LAUNCH, *options, "-H", "h1:1,h2:1", "-x", "WANDB_API_KEY", script, str(tmp_path)]
    secrets = {"WANDB_API_KEY": SECRET, "UNITRAIN_NOTES": SECRET}
    with command_lines() as lines, two_hosts[0].start(command, VARIABLES | secrets) as process:
        rank_reports = wait_for_ranks(tmp_path, 2)
        (tmp_path / "end").touch()
        output, _ = process.communicate(timeout=SECONDS)
    check_secret(lines, output, rank_reports, tuple(secrets))
    assert process.returncode == 0, output


def listening_addresses(host: Host) -> set[str]:
    """Return the addresses on which the Python processes of a host listen."""
    found = host.run(["ss", "-ltnpH"]).stdout.splitlines()
    return {line.split()[3].rpartition(":")[0] for line in found if "python" in line or "pt_elastic" in line}


BACKENDS = [
    pytest.param(["--backend", "ddp"], id="ddp under torchrun"),
    pytest.param(["--backend", "horovod"], id="horovod under horovodrun"),
    pytest.param(
        ["--backend", "horovod", "--launcher", "torchrun"], id="horovod under torchrun", marks=pytest.mark.nightly
    ),
    pytest.param(
        ["--backend", "ddp", "--launcher", "horovodrun"], id="ddp under horovodrun", marks=pytest.mark.nightly
    ),
    pytest.param(["--backend", "ddp", "--launcher", "mpirun"], id="ddp under mpirun", marks=needs_mpi),
]


@needs_hosts
@pytest.mark.parametrize("options", BACKENDS)
def test_job_listens_only_on_the_addresses_of_its_ranks(
    options: list[str], two_hosts: list[Host], script: str, tmp_path: Path
) -> None:
    """A job on one host listens on the loopback interface. A job on two hosts listens on the addresses of the hosts."""
    Path(script).write_text(TRAINING)
    for number, (hosts, expected) in enumerate(((["-np", "2"], []), (["-H", "h1:1,h2:1"], two_hosts))):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = [*LAUNCH, *options, *hosts, "--max-restarts", "1", script, str(folder)]
        with two_hosts[0].start(command, VARIABLES) as process:
            wait_for_ranks(folder, 2)
            found = listening_addresses(two_hosts[0])
            (folder / "end").touch()
            output, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == 0, output
        assert found <= {"127.0.0.1", *(host.address for host in expected)}
        assert found


def connect_to_store(variables: dict[str, str]) -> torch.distributed.TCPStore:
    """Connect to the store of a job without the job's key, like another program on the host."""
    if server := variables.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"):
        url = f"http://{server}:{variables['HOROVOD_GLOO_RENDEZVOUS_PORT']}/unitrain/unitrain.0.0"
        with urllib.request.urlopen(url, timeout=20) as reply:
            address, port = json.loads(reply.read())
    else:
        address, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
    return torch.distributed.TCPStore(address, port, is_master=False)


@pytest.mark.parametrize(
    ("backend", "fails"),
    [("ddp", False), ("ddp", True), ("horovod", True), pytest.param("horovod", False, marks=pytest.mark.nightly)],
)
def test_a_forged_failure_neither_ends_a_job_nor_hides_a_real_one(
    backend: str, fails: bool, script: str, tmp_path: Path
) -> None:
    Path(script).write_text(TRAINING)
    with running_launcher([*LAUNCH, "--backend", backend, "-np", "2", script, str(tmp_path)]) as launch:
        (first_report, _) = wait_for_ranks(tmp_path, 2)
        store = connect_to_store(first_report["variables"])
        assert store.check(["unitrain/0/0/failures/process/0"])  # the same prefix as messages of the job
        store.set("unitrain/0/0/failures/failure", json.dumps([0, "a forged failure", "0/1"]))
        time.sleep(8)  # a rank exits five seconds after it receives a failure report
        (tmp_path / "end").write_text("fail" if fails else "")
        output = launch.output()
    assert "a forged failure" not in output
    assert (launch.process.returncode != 0) is fails, output
    assert ("rank 1 failed first: ValueError: an independent failure" in output) is fails


# Runs collectives until the file "end" exists.
COMMUNICATING = (
    "import torch, unitrain\nbackend = unitrain.init(device='cpu', timeout_seconds=60)\n"
    + SCRIPT.partition("while not")[0]
    + """
while not backend.allreduce(torch.tensor(float(os.path.exists(f"{sys.argv[1]}/end"))), "max"):
    time.sleep(0.02)
backend.shutdown()
"""
)
OTHER_ADDRESS = "10.88.0.1"
# Arguments: "connect" or "attack", then addresses with ports. Prints the addresses that accept a connection. "attack"
# also sends unexpected data to each address, and keeps idle connections open for a while.
CLIENT = """
import os, socket, sys, time

mode, *targets = sys.argv[1:]
messages = [os.urandom(70_000), b"GET / HTTP/1.1\\r\\n\\r\\n", b"\\xff" * 16, b"\\0" * 64, b"\\1"]
idle = []
for target in targets:
    address, _, port = target.rpartition(":")
    for message in messages if mode == "attack" else [b""]:
        try:
            connection = socket.create_connection((address, int(port)), timeout=5)
        except OSError:
            break
        if message is messages[0] or not message:
            print(target, flush=True)
        try:
            connection.sendall(message)
        except OSError:
            pass
        idle.append(connection)
time.sleep(2 if mode == "attack" else 0)
"""


def add_network(host: Host) -> None:
    """Connect `host` to another network, in which its address is OTHER_ADDRESS."""
    for line in (
        "link add other type veth peer name peer", f"addr add {OTHER_ADDRESS}/24 dev other", "link set other up",
        "link set peer up",
    ):  # fmt: skip
        assert host.run(["ip", *line.split()]).returncode == 0


def listening_ports(host: Host, programs: Sequence[str]) -> set[int]:
    """Return the ports on which processes of a host listen, except sshd. The process names must contain one of
    `programs`."""
    lines = host.run(["ss", "-ltnpH"]).stdout.splitlines()
    found = [line for line in lines if any(program in line for program in programs)]
    return {int(line.split()[3].rpartition(":")[2]) for line in found} - {22}


def call_client(host: Host, folder: Path, mode: str, address: str, ports: set[int]) -> set[int]:
    """Run CLIENT on `host`, and return the ports of `address` that accept a connection."""
    script = folder / "client.py"
    script.write_text(CLIENT)
    targets = [f"{address}:{port}" for port in sorted(ports)]
    done = host.run(["python3", "-S", str(script), mode, *targets], fresh=True)
    assert done.returncode == 0, done.stdout
    return {int(line.rpartition(":")[2]) for line in done.stdout.splitlines()}


def forge_failure(host: Host, folder: Path, variables: dict[str, str]) -> None:
    """Write a forged failure report from `host` to the store of a job."""
    script = folder / "forge.py"
    script.write_text(
        f"import json, sys, urllib.request\nimport torch\n{inspect.getsource(connect_to_store)}\n"
        "store = connect_to_store(json.loads(sys.argv[1]))\n"
        "assert store.check(['unitrain/0/0/failures/process/0'])\n"
        "store.set('unitrain/0/0/failures/failure', json.dumps([0, 'a forged failure', '0/1']))\n"
    )
    done = host.run([sys.executable, str(script), json.dumps(variables)])
    assert done.returncode == 0, done.stdout


@needs_hosts
@pytest.mark.parametrize(
    ("options", "on_two_hosts"),
    [
        pytest.param(["--backend", "ddp"], False, marks=pytest.mark.ci),
        pytest.param(["--backend", "ddp"], True, marks=pytest.mark.ci),
        pytest.param(["--backend", "horovod"], False, marks=pytest.mark.ci),
        pytest.param(["--backend", "horovod"], True, marks=pytest.mark.ci),
        pytest.param(["--launcher", "mpirun"], False, marks=[needs_mpi, pytest.mark.nightly]),
        pytest.param(["--launcher", "mpirun"], True, marks=[needs_mpi, pytest.mark.nightly]),
    ],
)
def test_other_programs_neither_reach_nor_disturb_a_job(
    options: list[str], on_two_hosts: bool, two_hosts: list[Host], script: str, tmp_path: Path
) -> None:
    """The job cannot be reached at addresses that it does not use. Unexpected data does not end it or blame a rank.

    The processes of Open MPI listen on all interfaces (docs/security.md).
    """
    Path(script).write_text(COMMUNICATING)
    first, second = two_hosts
    add_network(first)
    used = first.address if on_two_hosts else "127.0.0.1"
    command = [*LAUNCH, *options, *(["-H", "h1:1,h2:1"] if on_two_hosts else ["-np", "2"]), script, str(tmp_path)]
    with first.start(command, VARIABLES) as process:
        try:
            (first_report, _) = wait_for_ranks(tmp_path, 2)
            python_ports, all_ports = listening_ports(first, ("python", "pt_elastic")), listening_ports(first, ("",))
            unitrain_ports = set() if "mpirun" in options else python_ports
            for address in {first.address, OTHER_ADDRESS} - {used}:
                assert not call_client(first, tmp_path, "connect", address, unitrain_ports)
            if not on_two_hosts:
                assert not call_client(second, tmp_path, "connect", first.address, unitrain_ports)
            client = second if on_two_hosts else first
            assert call_client(client, tmp_path, "attack", used, all_ports) & python_ports
            # Under mpirun on one host, the ranks exchange the address of the store through MPI.
            if "mpirun" not in options or on_two_hosts:
                forge_failure(client, tmp_path, first_report["variables"])
            time.sleep(8)  # a rank exits five seconds after it receives a failure report
            assert process.poll() is None
            (tmp_path / "end").touch()
            output, _ = process.communicate(timeout=SECONDS)
        finally:
            for host in two_hosts:
                host.kill_all()
    assert process.returncode == 0, output
    assert "failed first" not in output
    assert "forged" not in output


class Harm:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return (open, (str(self._file), "w"))


def test_an_object_of_another_program_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNITRAIN_JOB_KEY", authentication.new_key())
    packed, _ = objects.pack({"lr": 0.1})
    assert objects.unpack(packed, torch.device("cpu")) == {"lr": 0.1}
    harm = pickle.dumps(Harm(tmp_path / "harm"))
    for forged in (harm + b"p", harm + b"p" + bytes(authentication.SIGNATURE_BYTES), b""):
        content = torch.frombuffer(bytearray(forged), dtype=torch.uint8) if forged else torch.empty(0).to(torch.uint8)
        with pytest.raises(AuthenticationError, match="an object with an invalid signature"):
            objects.unpack(content, torch.device("cpu"))
    assert not (tmp_path / "harm").exists()
    monkeypatch.setenv("UNITRAIN_JOB_KEY", authentication.new_key())
    with pytest.raises(AuthenticationError):
        objects.unpack(packed, torch.device("cpu"))


@pytest.mark.parametrize("key", [None, "0123"])
def test_ranks_exchange_messages(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if key is not None:
        monkeypatch.setenv("UNITRAIN_JOB_KEY", key)
    store = torch.distributed.HashStore()
    messages = MessageStore(store, "watch", counters=["asked"])
    assert not messages.check(["failed"])
    assert messages.compare_set("failed", "", "first") == b"first"
    assert messages.compare_set("failed", "", "second") == b"first"
    assert (messages.get("failed"), messages.add("asked", 2)) == (b"first", 2)
    assert messages.check(["failed", "asked"])
    messages.append("posted", "[0, 1]")
    store.append("posted", "u[1, 2]\n")
    messages.append("posted", "[1, 3]")
    assert messages.lines("posted") == (["[0, 1]", "[1, 3]"] if key else ["[0, 1]", "[1, 2]", "[1, 3]"])
    assert messages.lines("nothing") == []


def test_a_message_of_another_program_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNITRAIN_JOB_KEY", "0123")
    store = torch.distributed.HashStore()
    messages = MessageStore(store, "watch")
    messages.set("heard/1", "an answer")
    for forged in (b"text", b"", store.get("heard/1"), bytes(range(128, 256))):  # the third has another key
        store.set("failed", forged.decode("latin-1"))
        assert not messages.check(["failed"])
        with pytest.raises(AuthenticationError, match="'watch/failed' was not written by a process of this job"):
            messages.get("failed")
    assert messages.compare_set("failed", "", "real") == b"real"
    assert messages.get("failed") == b"real"


def test_one_rank_replaces_the_message_of_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNITRAIN_JOB_KEY", "0123")
    store = torch.distributed.HashStore()
    store.set("failed", "forged")
    other = MessageStore(store, "watch")

    class DelayedStore:
        """Simulates that the other rank sets the message after this rank has read the forged value."""

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            found = store.compare_set(key, expected, desired)
            if not expected:
                assert other.compare_set(key, "", "of the other rank") == b"of the other rank"
            return found

    messages = MessageStore(DelayedStore(), "watch")  # type: ignore[arg-type]
    assert messages.compare_set("failed", "", "of this rank") == b"of the other rank"
    assert other.get("failed") == b"of the other rank"


def test_a_process_with_another_key_reports_the_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    store = torch.distributed.HashStore()
    messages = MessageStore(store, "start")
    for first, second, reason in (
        ("0123", None, "it is signed, and this process has no key"),
        (None, "0123", "it is not signed"),
        ("0123", "4567", "its signature is not valid"),
    ):
        for key, action in ((first, lambda: messages.set("seat", "[0, 1]")), (second, lambda: messages.get("seat"))):
            monkeypatch.delenv("UNITRAIN_JOB_KEY", raising=False)
            if key is not None:
                monkeypatch.setenv("UNITRAIN_JOB_KEY", key)
            with contextlib.nullcontext() if key == first else pytest.raises(AuthenticationError, match=reason):
                action()


def test_a_client_without_the_key_does_not_obtain_a_signature() -> None:
    def errors(key_here: str, key_there: str) -> list[BaseException | None]:
        results: list[BaseException | None] = [None, None]
        pair = socket.socketpair()

        def connect(index: int, key: str, is_server: bool) -> None:
            pair[index].settimeout(10)
            try:
                authentication.authenticate(pair[index], key, "supervision", is_server=is_server)
            except (AuthenticationError, OSError) as error:
                results[index] = error
                pair[index].close()

        threads = [threading.Thread(target=connect, args=one) for one in ((0, key_here, True), (1, key_there, False))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in pair:
            one.close()
        return results

    assert errors("a key", "a key") == [None, None]
    accepting, connecting = errors("a key", "another")
    assert isinstance(accepting, AuthenticationError)
    assert isinstance(connecting, ConnectionError)


def test_horovodrun_passes_variables_to_another_host_on_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of the folder contains shell syntax. A fake ssh runs the command on this host, without variables."""
    folder = tmp_path / "my $(touch harm) runs"
    folder.mkdir()
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec env -i /bin/sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", f"{SECRET} 'and'\n\"more\"")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.chdir(folder)
    rank = "import os; print(os.getcwd(), os.environ['NOTES'], 'CUDA_VISIBLE_DEVICES' in os.environ)"
    command = f"cd {folder} > /dev/null 2>&1 ; env HOROVOD_RANK=1 {shlex.join([sys.executable, '-c', rank])}"
    remote = horovodrun._remote_command(shlex.quote(command), "h2")
    assert SECRET not in remote
    done = subprocess.run(["/bin/sh", "-c", remote], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{folder} {os.environ['NOTES']} False\n"
    assert list(folder.iterdir()) == []
