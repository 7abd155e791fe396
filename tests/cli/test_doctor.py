"""`unitrain doctor`: problems in simulated reports of ranks, and problems of real hosts."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hosts import Host, hosts
from launches import SECONDS, running_launcher
from requirements import needs_hosts, needs_mpi, needs_open_mpi
from torch.distributed import HashStore

from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.network import own_addresses
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.cli import unitrain
from unitrain.doctor import display, examination
from unitrain.doctor.facts import Facts, Gpu
from unitrain.doctor.findings import RankReport, find_problems
from unitrain.doctor.peers import PeerCheckResults, check_peers
from unitrain.processes import find_process_ids

GIB = 2**30
HOROVOD = {"version": "0.28.1", "cpu_operations": ["gloo"], "gpu_operations": [], "problems": []}
VALID = Facts(
    host="a", rank=0, local_rank=0, launcher="torchrun", evidence=("RANK=0",), machine="m1",
    name_addresses=("10.0.0.1",), interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"}, python="3.11.7",
    executable="python", unitrain="0.1.0", torch="2.9.0", torch_cuda=None, transports={"gloo": "yes"}, gpus=(),
    nvidia_driver=False, horovod=HOROVOD, cores=(0, 1, 2, 3), memory=8 * GIB, shared_memory=4 * GIB, open_files=65536,
    locked_memory=None, infiniband=False, folder="/work", folder_free=100 * GIB, programs={}, variables={},
    has_job_key=True,
)  # fmt: skip
REACHABLE = PeerCheckResults(address="10.0.0.1", unreachable={}, clock_offset_seconds=0.0, shares_folder=True)


def create_reports(*changes: dict[str, Any], **second_peer_checks: Any) -> list[RankReport]:
    """Return reports of two ranks on two hosts. The reports are valid except for the given values.

    `changes` contains facts of the first and of the second rank. `second_peer_checks` contains peer checks of the
    second rank.
    """
    first, second = ({"host": "a"} | changes[0], {"host": "b", "machine": "m2"} | (changes[1] if changes[1:] else {}))
    return [
        RankReport(replace(VALID, **first), REACHABLE),
        RankReport(
            replace(VALID, **{"rank": 1, **second}), replace(REACHABLE, address="10.0.0.2", **second_peer_checks)
        ),
    ]


IB = {"GLOO_SOCKET_IFNAME": "eth0,ib0"}
THREADS = {"OMP_NUM_THREADS": "8"}
GPU = Gpu(name="H100", memory=80 * GIB, uuid="GPU-1")
CASES: dict[str, tuple[Callable[[], list[RankReport]], str]] = {
    "torch": (
        lambda: create_reports({}, {"torch": "2.8.0"}),
        r"error: torch differs between ranks: 2\.9\.0 on rank 0; 2\.8\.0 on rank 1\. "
        r'\$ pip install "torch==2\.9\.0" on every host',
    ),
    "python": (
        lambda: create_reports({}, {"python": "3.12.1"}),
        r"error: Python differs between ranks: 3\.11 on rank 0; 3\.12 on",
    ),
    "ports": (
        lambda: create_reports({}, unreachable={"a": "10.0.0.1:4711: timed out"}),
        r"error: b cannot reach a at 10\.0\.0\.1:4711: timed out.* \$ sudo ufw allow from 10\.0\.0\.2  # on a",
    ),
    "one GPU": (
        lambda: create_reports({"gpus": (GPU,)}, {"gpus": (GPU,), "host": "a", "local_rank": 1, "machine": "m1"}),
        r"error: Ranks 0, 1 on a would use the same GPU, GPU-1\. \$ start one rank per GPU on that host, 1 in all",
    ),
    "no CUDA": (
        lambda: create_reports({"nvidia_driver": True}),
        r"error: a has an NVIDIA driver, but its torch 2\.9\.0 is built for the CPU",
    ),
    "hidden GPUs": (
        lambda: create_reports(
            {"nvidia_driver": True, "torch_cuda": "13.0", "variables": {"CUDA_VISIBLE_DEVICES": ""}}
        ),
        r"error: a has an NVIDIA driver, but torch sees no GPU: CUDA_VISIBLE_DEVICES is ''\. "
        r"\$ unset CUDA_VISIBLE_DEVICES$",
    ),
    "old driver": (
        lambda: create_reports({"nvidia_driver": True, "torch_cuda": "13.0"}),
        r"error: a has an NVIDIA driver, but torch sees no GPU\. "
        r"\$ nvidia-smi  # the CUDA version of the driver must be at least torch's 13\.0$",
    ),
    "no Horovod": (lambda: create_reports({"horovod": None}, {"horovod": None}), r"note: Horovod is not installed"),
    "Horovod on one": (
        lambda: create_reports({}, {"horovod": None}),
        r"error: Horovod is installed on some hosts, but not on b\. \$ unitrain horovod build",
    ),
    "other Horovod": (
        lambda: create_reports({}, {"horovod": {**HOROVOD, "cpu_operations": ["gloo", "mpi"]}}),
        r"error: Horovod differs between hosts: 0\.28\.1, gloo on a; 0\.28\.1, gloo, mpi on b",
    ),
    "broken Horovod": (
        lambda: create_reports(
            {"horovod": {**HOROVOD, "problems": [{"what": "It was built for torch 1.", "fix": "F", "fatal": True}]}}
        ),
        r"error: Horovod on a: It was built for torch 1\. \$ F",
    ),
    "loopback": (
        lambda: create_reports({"name_addresses": ("127.0.1.1",)}),
        r'warning: The name a resolves to 127\.0\.1\.1 on that host.*\$ sudo sed .*; echo "10\.0\.0\.1 a" \| sudo tee',
    ),
    "no name": (lambda: create_reports({"name_addresses": ()}), r"warning: The name a does not resolve on a itself"),
    "one name": (
        lambda: create_reports({}, {"host": "a"}),
        r"error: 2 machines have the name a. Ranks of different machines",
    ),
    "interface": (
        lambda: create_reports(
            {"variables": IB}, {"variables": IB, "interfaces": {"eth0": "10.0.0.2", "ib0": "10.1.0.2"}}
        ),
        r"error: GLOO_SOCKET_IFNAME is 'eth0,ib0', but a has only lo, eth0\. \$ unset GLOO_SOCKET_IFNAME",
    ),
    "folder": (
        lambda: create_reports({}, shares_folder=False),
        r"warning: b: files that rank 0 creates in /work are not visible there",
    ),
    "read-only folder": (
        lambda: [
            replace(report, peer_checks=replace(report.peer_checks or REACHABLE, shares_folder=False))
            for report in create_reports({})
        ],
        r"warning: Rank 0 cannot create files in /work on a",
    ),
    "full disk": (
        lambda: create_reports({}, {"folder_free": GIB // 2}),
        r"warning: /work on b has only 0\.5 GiB of free space",
    ),
    "shared memory": (
        lambda: create_reports({"shared_memory": 64 * 2**20}),
        r"warning: /dev/shm on a has 64 MiB.*\$ docker run --shm-size=8g",
    ),
    "files": (
        lambda: create_reports({"open_files": 1024}),
        r"warning: A process on a may open only 1024 files.*\$ ulimit -n 65536",
    ),
    "locked memory": (
        lambda: create_reports({"infiniband": True, "locked_memory": 65536}),
        r"warning: a has InfiniBand, but the limit of locked memory is 64 KiB",
    ),
    "cores": (
        lambda: create_reports({"cores": (2,)}, {"host": "a", "machine": "m1", "local_rank": 1, "cores": (2,)}),
        r"warning: 2 ranks share 1 core on a and will wait for each other\. \$ -np 1",
    ),
    "threads": (
        lambda: create_reports({"variables": THREADS}, {"variables": THREADS, "cores": tuple(range(8))}),
        r"warning: 1 rank with 8 threads each share 4 cores on a\. \$ export OMP_NUM_THREADS=4",
    ),
    "clock": (
        lambda: create_reports({}, clock_offset_seconds=-7.25),
        r"warning: The clock of b is 7\.2 s behind rank 0's",
    ),
    "no key": (
        lambda: create_reports({"has_job_key": False}, {"has_job_key": False}),
        r"warning: Ranks 0, 1 have no key to sign messages. Any program .* \$ unitrain launch \.\.\.",
    ),
    "listens on all interfaces": (
        lambda: create_reports({"launcher": "mpirun"}),
        r"note: mpirun listens on all interfaces of a\. \$ unitrain launch --interface eth0 \.\.\.",
    ),
    "variables": (
        lambda: create_reports({"variables": {"NCCL_DEBUG": "INFO"}}),
        r"warning: NCCL_DEBUG differs between ranks: 'INFO' on rank 0; unset on rank 1\. \$ unitrain launch -x NC",
    ),
}


OPEN_PORTS = (
    "note: torch's TCPStore on a and the data connections of all hosts have no authentication. Any program that can "
    "reach their ports can end or join the job. $ Use a private network, or a firewall that accepts connections only "
    "from 10.0.0.1, 10.0.0.2."
)


def describe_findings(reports: list[RankReport]) -> list[str]:
    """Return the findings, except the note that is reported for every job on several hosts."""
    found = describe_all_findings(reports)
    if len({report.facts.host for report in reports}) > 1:
        found.remove(OPEN_PORTS.replace("TCPStore on a", f"TCPStore on {reports[0].facts.host}"))
    return found


def describe_all_findings(reports: list[RankReport]) -> list[str]:
    return [f"{one.level}: {one.what} $ {one.fix}" for one in find_problems(reports)]


def test_valid_job_has_no_findings() -> None:
    assert describe_findings(create_reports({})) == []
    alone = replace(VALID, name_addresses=("127.0.1.1",), variables={"CUDA_VISIBLE_DEVICES": "0"})
    assert describe_findings([RankReport(alone, None)]) == []
    # Two ranks on one host that are bound to different cores.
    assert (
        describe_findings(
            create_reports({"cores": (0,)}, {"host": "a", "machine": "m1", "local_rank": 1, "cores": (1,)})
        )
        == []
    )


def test_peer_checks_succeed_if_the_rendezvous_has_an_ipv6_address() -> None:
    rank_info = RankInfo("none", rank=0, size=1, local_rank=0)
    checks = check_peers(Rendezvous(rank_info, HashStore(), "::1", timedelta(seconds=10)))
    assert checks == PeerCheckResults(
        address=own_addresses()[0], unreachable={}, clock_offset_seconds=0.0, shares_folder=True
    )


def test_folder_on_a_read_only_file_system_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """On such a file system, Linux raises EROFS even for the removal of a file that does not exist."""

    def fail(path: Path, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "touch", fail)
    monkeypatch.setattr(Path, "unlink", fail)
    rank_info = RankInfo("none", rank=0, size=1, local_rank=0)
    checks = check_peers(Rendezvous(rank_info, HashStore(), "127.0.0.1", timedelta(seconds=10)))
    assert not checks.shares_folder


def test_connections_without_authentication_are_reported_on_several_hosts() -> None:
    assert describe_all_findings(create_reports({})) == [OPEN_PORTS]
    with_horovodrun = {"variables": {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1"}}
    (found,) = describe_all_findings(create_reports(with_horovodrun, with_horovodrun))
    assert found.startswith("note: torch's TCPStore and Horovod's rendezvous server on a and the data connections of")
    on_one_interface = {"launcher": "mpirun", "variables": {"OMPI_MCA_oob_tcp_if_include": "eth0"}}
    assert describe_all_findings(create_reports(on_one_interface, on_one_interface)) == [OPEN_PORTS]


@pytest.mark.parametrize("case", CASES)
def test_each_problem_is_reported_exactly_once(case: str) -> None:
    create_case, expected = CASES[case]
    found = describe_findings(create_case())
    assert re.match(expected, found[0]), found
    assert len(found) == 1, found


def test_doctor_reports_this_host() -> None:
    result = CliRunner().invoke(unitrain, ["doctor", "--json"])
    report = json.loads(result.output)
    assert report["ok"] is (result.exit_code == 0)
    (rank,) = report["ranks"]
    assert Facts.from_dict(rank["facts"]).as_dict() == {
        **rank["facts"], "gpus": tuple(rank["facts"]["gpus"]), "evidence": (),
        "name_addresses": tuple(rank["facts"]["name_addresses"]), "cores": tuple(rank["facts"]["cores"]),
    }  # fmt: skip
    printed = CliRunner().invoke(unitrain, ["doctor"], env={"COLUMNS": "80"})
    assert printed.exit_code == result.exit_code
    assert rank["facts"]["torch"] in printed.output


def test_fix_is_printed_below_its_problem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    findings = [
        {"level": "warning", "what": "The disk is full.", "fix": "TrainConfig(keep_last=1)"},
        {"level": "note", "what": "mpirun listens.", "fix": "unitrain launch --interface eth0 ..."},
    ]
    display.show({"ranks": [{"facts": VALID.as_dict(), "peer_checks": None}], "findings": findings})
    assert capsys.readouterr().out.endswith(
        "warning  The disk is full.\n  Fix: TrainConfig(keep_last=1)\n"
        "note  mpirun listens.\n  Fix: unitrain launch --interface eth0 ...\n0 errors, 1 warning.\n"
    )


def test_large_limit_of_locked_memory_is_sufficient() -> None:
    assert describe_findings(create_reports({"infiniband": True, "locked_memory": 64 * GIB})) == []


@pytest.mark.parametrize("command", [["doctor", "--launch", "-np '2"], ["tune", "--launch", "-np '2", "train.py"]])
def test_unclosed_quote_is_a_usage_error(command: list[str]) -> None:
    result = CliRunner().invoke(unitrain, command)
    assert result.exit_code == 2
    assert "Invalid value for '--launch': \"-np '2\" cannot be split into words: No closing quotation." in result.output


def test_incomplete_launcher_variables_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    result = CliRunner().invoke(unitrain, ["doctor"])
    assert result.exit_code == 1
    assert "OMPI_COMM_WORLD_SIZE" in result.output


def test_usage_error_of_launch_is_printed_without_the_usage_of_launch() -> None:
    result = CliRunner().invoke(unitrain, ["doctor", "--launch", "-np x"])
    assert result.exit_code == 1
    message = result.output.partition("Error: ")[2]
    assert message.startswith("unitrain launch cannot start the ranks: Invalid value for '-np'")
    assert "Usage:" not in result.output


def test_missing_program_is_not_reported_as_an_invalid_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(unitrain, ["doctor", "--launch", "-np 4 -H node1:2,node2:2"])
    assert result.exit_code == 1
    message = result.output.partition("Error: ")[2]
    assert message.startswith("unitrain launch cannot start the ranks: ssh, which is needed to reach other hosts")


# A `sitecustomize` module that makes the ranks of mpirun hang.
HANGING_RANKS = """
import os, time
from pathlib import Path
if "OMPI_COMM_WORLD_RANK" in os.environ:
    Path(__file__).with_name("rank-" + os.environ["OMPI_COMM_WORLD_RANK"]).touch()
    time.sleep(300)
"""
# A `sitecustomize` module that makes `unitrain launch` hang after it has started a process in another session.
HANGING_LAUNCH = """
import subprocess, sys, time
from pathlib import Path
if "launch" in sys.orig_argv:
    subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(__file__).with_name("started").touch()
    time.sleep(300)
"""


@needs_open_mpi
def test_signal_to_doctor_terminates_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING_RANKS)
    command = [sys.executable, "-m", "unitrain", "doctor", "--launch", "-np 2 --launcher mpirun"]
    with running_launcher(command, {"PYTHONPATH": str(tmp_path)}, fresh=True) as launch:
        deadline = time.monotonic() + SECONDS
        while not (tmp_path / "rank-0").exists() or not (tmp_path / "rank-1").exists():
            assert launch.process.poll() is None, launch.output()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        launch.process.send_signal(signal.SIGTERM)
        assert launch.process.wait(60) == 128 + signal.SIGTERM
        launch.wait_until_all_exited(30)


def test_launch_that_hangs_is_terminated_with_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING_LAUNCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("UNITRAIN_TEST_LAUNCH", tmp_path.name)
    monkeypatch.setattr(examination, "_LAUNCH_SECONDS", 2.0)
    started, start = tmp_path / "started", subprocess.Popen

    def start_and_wait_until_it_hangs(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = start(*arguments, **options)
        deadline = time.monotonic() + SECONDS
        while not started.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return process

    # The time limit of the examination starts after this function returns.
    monkeypatch.setattr(subprocess, "Popen", start_and_wait_until_it_hangs)
    with pytest.raises(examination.ExaminationError, match="The launch did not finish within 3 s"):
        examination.examine_launch(("-np", "2"), timeout_seconds=1)
    assert started.exists()
    assert list(find_process_ids(f"UNITRAIN_TEST_LAUNCH={tmp_path.name}".encode())) == []


@needs_hosts
@needs_mpi
def test_problems_between_hosts_are_found(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    with hosts(2, tmp_path_factory.mktemp("hosts"), hostname_is_loopback=True) as (first, second):
        assert second.run(["mount", "-o", "remount,size=64m", "/dev/shm"]).returncode == 0
        apart = tmp_path / "work"
        apart.mkdir()
        assert second.run(["mount", "-t", "tmpfs", "tmpfs", str(apart)]).returncode == 0
        report = run_doctor(first, apart, "-np 3 -H h1:2,h2:1 --launcher mpirun")
        texts = [finding["what"] for finding in report["findings"]]
        assert [entry["facts"]["host"] for entry in report["ranks"]] == ["h1", "h1", "h2"]
        assert [entry["peer_checks"]["address"] for entry in report["ranks"]] == ["10.77.0.1", "10.77.0.1", "10.77.0.2"]
        assert any(text.startswith("/dev/shm on h2 has 64 MiB") for text in texts)
        assert any(text.startswith(f"h2: files that rank 0 creates in {apart} are not visible there") for text in texts)
        for name in ("h1", "h2"):
            assert any(text.startswith(f"The name {name} resolves to 127.0.1.1") for text in texts)
        assert any(text.startswith("torch's TCPStore on h1 and the data connections of all hosts") for text in texts)
        assert "mpirun listens on all interfaces of h1." in texts
        selected = run_doctor(first, tmp_path, "-np 2 -H h1:1,h2:1 --launcher mpirun --interface eth0")
        assert not any("listens on all" in finding["what"] for finding in selected["findings"])
        assert all(entry["facts"]["has_job_key"] for entry in report["ranks"])
        assert not any("cannot reach" in text or "clock" in text for text in texts)
        assert list(apart.iterdir()) == []


def run_doctor(host: Host, folder: Path, launch: str) -> dict[str, Any]:
    program = ["-m", "unitrain", "doctor", "--json", "--timeout-seconds", "60", "--launch", launch]
    done = host.run(["env", f"--chdir={folder}", sys.executable, *program])
    return json.loads(done.stdout[done.stdout.index("{") :])
