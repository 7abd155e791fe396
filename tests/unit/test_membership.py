"""Selection of the hosts of an elastic job: listed hosts, reachable hosts, and hosts whose ranks failed."""

from __future__ import annotations

import shlex
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from unitrain.cli import unitrain
from unitrain.launchers import ElasticRange, Host, LaunchError, discover_hosts, parse_elastic, parse_hosts
from unitrain.launchers.elastic import find_reachable_hosts
from unitrain.supervisor import membership
from unitrain.supervisor.launch_plan import LaunchRequest, plan_launch
from unitrain.supervisor.membership import Membership


class Cluster:
    """Simulated cluster. `listed` names all hosts, and `silent` names the hosts that do not respond."""

    def __init__(self, listed: str) -> None:
        self.listed = listed
        self.silent: set[str] = set()
        self.requested_hosts: list[str] = []

    def hosts(self) -> tuple[Host, ...]:
        if self.listed == "broken":
            raise LaunchError("the script is broken")
        return parse_hosts(self.listed) if self.listed else ()

    def find_reachable_hosts(self, hosts: list[Host]) -> set[str]:
        self.requested_hosts = [host.name for host in hosts]
        return set(self.requested_hosts) - self.silent


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster("a:2,b:2,c:2")
    monkeypatch.setattr(membership, "find_reachable_hosts", made.find_reachable_hosts)
    monkeypatch.setattr(membership, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(membership, "_PROBE_AGAIN_SECONDS", 0.0)
    return made


def select_hosts(members: Membership) -> str:
    return ",".join(map(str, members.wait_for_hosts(threading.Event())))


def find_stable_change(members: Membership) -> str | None:
    assert members.find_change() is None, "hosts that join one after another must restart the job only once"
    return members.find_change()


def test_hosts_are_filled_in_order_up_to_the_maximum(cluster: Cluster) -> None:
    assert select_hosts(Membership(ElasticRange(1, 6), cluster.hosts, 1)) == "a:2,b:2,c:2"
    assert select_hosts(Membership(ElasticRange(1, 3), cluster.hosts, 1)) == "a:2,b:1"
    cluster.silent = {"a"}
    assert select_hosts(Membership(ElasticRange(3, 6), cluster.hosts, 1)) == "b:2,c:2"


def test_hosts_of_the_previous_attempt_precede_added_hosts(cluster: Cluster) -> None:
    cluster.silent = {"a"}
    members = Membership(ElasticRange(1, 6), cluster.hosts, 1)
    assert select_hosts(members) == "b:2,c:2"
    assert members.find_change() is None
    assert cluster.requested_hosts == ["a"]  # hosts of the running job are not checked
    cluster.silent = set()
    assert find_stable_change(members) == "there are 6 slots instead of 4"
    assert select_hosts(members) == "b:2,c:2,a:2"
    assert find_stable_change(members) is None


def test_host_that_is_no_longer_listed_is_removed_if_enough_slots_remain(cluster: Cluster) -> None:
    members = Membership(ElasticRange(3, 6), cluster.hosts, 1)
    select_hosts(members)
    cluster.listed = "a:2,c:1"
    assert find_stable_change(members) == "b is no longer listed, c has 1 slot instead of 2, and 3 slots remain"
    cluster.listed = "a:2"
    assert find_stable_change(members) is None
    cluster.listed = "broken"
    assert find_stable_change(members) is None


def test_wait_for_hosts_is_reported_and_times_out(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.silent = {"a", "b"}
    members = Membership(ElasticRange(3, 6), cluster.hosts, 0.05)
    with pytest.raises(LaunchError) as caught:
        select_hosts(members)
    assert str(caught.value) == (
        "--elastic 3:6 needs slots for at least 3 ranks, but after 0.05 s the hosts that respond are: c:2. "
        "Start more hosts, or raise the limit with: --elastic-timeout 0.1"
    )
    assert capsys.readouterr().err == "unitrain: waiting for slots for 3 ranks; hosts that respond: c:2\n"
    ended = threading.Event()
    ended.set()
    assert members.wait_for_hosts(ended) == ()


def test_failed_request_for_the_host_list_is_retried(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.listed = "broken"
    members = Membership(ElasticRange(3, 6), cluster.hosts, 0.05)
    with pytest.raises(LaunchError, match=r"after 0\.05 s the hosts that respond are: none \(the script is broken\)\."):
        select_hosts(members)
    timer = threading.Timer(0.1, lambda: setattr(cluster, "listed", "a:2,b:2"))
    timer.start()
    assert select_hosts(Membership(ElasticRange(3, 6), cluster.hosts, 10)) == "a:2,b:2"
    timer.join()
    assert "waiting for slots for 3 ranks; hosts that respond: none (the script is broken)" in capsys.readouterr().err


def test_host_whose_rank_fails_first_twice_in_a_row_is_excluded(cluster: Cluster) -> None:
    members = Membership(ElasticRange(3, 6), cluster.hosts, 1)
    select_hosts(members)
    for rank in (2, None, 3):
        members.record_failure(rank)
    assert select_hosts(members) == "a:2,b:2,c:2"
    members.record_failure(2)
    assert select_hosts(members) == "a:2,c:2"
    cluster.listed = "a:2,b:2"
    assert select_hosts(members) == "a:2,b:2"


def test_output_of_the_discovery_script_is_parsed_and_invalid_output_is_rejected(tmp_path: Path) -> None:
    script = tmp_path / "discover"
    script.write_text("#!/bin/sh\nprintf 'a:4\\n\\n b \\n'\n")
    with pytest.raises(LaunchError, match=r"discover' cannot be run: Permission denied\. .*chmod \+x "):
        discover_hosts(script)
    script.chmod(0o755)
    assert discover_hosts(script) == (Host("a", 4), Host("b", 1))
    script.write_text("#!/bin/sh\n")
    assert discover_hosts(script) == ()
    script.write_text("#!/bin/sh\necho no network >&2\nexit 3\n")
    with pytest.raises(LaunchError, match=r"discover' ended with exit code 3: no network\. "):
        discover_hosts(script)
    script.write_text("#!/bin/sh\nprintf '\\377\\n'\n")
    with pytest.raises(LaunchError, match=r"is not valid\. Write name:slots"):
        discover_hosts(script)
    script.write_text("#!/bin/sh\necho a:x\n")
    with pytest.raises(LaunchError, match="positive whole number of slots, got 'x'"):
        discover_hosts(script)
    script.write_text("#!/bin/sh\nyes host:1 | head -c 30000000\n")
    with pytest.raises(
        LaunchError, match=r"discover' printed 30000000 characters; the limit is 262144\. The script must print one"
    ):
        discover_hosts(script)
    script.write_text("#!/bin/sh\nyes text | head -c 30000000 >&2\nexit 1\n")
    with pytest.raises(LaunchError, match=r"ended with exit code 1: [tex\n]+\. The script must print") as caught:
        discover_hosts(script)
    assert len(str(caught.value)) < 5000
    script.write_text("#!/bin/sh\nyes host | head -n 50000\n")
    with pytest.raises(LaunchError, match="Host 'host' is named twice in 'host,host") as caught:
        discover_hosts(script)
    assert len(str(caught.value)) < 5000


def test_only_reachable_hosts_are_found() -> None:
    assert find_reachable_hosts([Host("localhost", 1), Host("no-such-host.invalid", 1)]) == {"localhost"}


def test_missing_ssh_is_reported_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_reachable_hosts([Host("localhost", 1), Host("a", 1)]) == {"localhost"}
    with pytest.raises(LaunchError, match="ssh, which is needed to reach other hosts, is not installed"):
        find_reachable_hosts([Host("a", 1), Host("b", 1)])
    listed = [Host("localhost", 2)]
    members = Membership(parse_elastic("2:4"), lambda: tuple(listed), 60.0)
    assert select_hosts(members) == "localhost:2"
    listed.append(Host("a", 2))
    assert members.find_change() is None, "a running job must continue on its hosts"
    members = Membership(parse_elastic("4:4"), lambda: (Host("a", 4),), 60.0)
    with pytest.raises(LaunchError, match="sudo apt-get install openssh-client"):
        select_hosts(members)


def test_failed_host_discovery_is_retried_within_the_elastic_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(membership, "POLL_SECONDS", 0.01)
    (tmp_path / "train.py").touch()
    script = tmp_path / "discover"
    # The script fails in its first two runs.
    script.write_text(f"#!/bin/sh\necho >> {tmp_path}/runs\n[ $(wc -l < {tmp_path}/runs) -gt 2 ] && echo localhost:2\n")
    script.chmod(0o755)
    request = LaunchRequest(
        script=tmp_path / "train.py", backend="horovod", elastic="2:2", host_discovery_script=script
    )
    plan = plan_launch(request)
    assert "ended with exit code 1" in capsys.readouterr().err
    assert plan.membership is not None
    assert select_hosts(plan.membership) == "localhost:2"
    with pytest.raises(LaunchError, match="cannot be run: No such file or directory"):
        plan_launch(replace(request, host_discovery_script=tmp_path / "absent"))


@pytest.mark.parametrize("text", ["2", "a:b", "2:", ":3", "2:3:4", "-1:3", "1.5:2"])
def test_invalid_elastic_range_is_rejected(text: str) -> None:
    with pytest.raises(LaunchError, match=r"--elastic takes MIN:MAX ranks, got .* as in --elastic 2:8"):
        parse_elastic(text)


def test_elastic_range_is_parsed_and_an_impossible_range_is_rejected() -> None:
    assert parse_elastic("2:8") == ElasticRange(2, 8)
    with pytest.raises(LaunchError, match=r"got '4:2'\. Use --elastic 2:4"):
        parse_elastic("4:2")
    with pytest.raises(LaunchError, match=r"got '0:2'\. Use --elastic 1:2"):
        parse_elastic("0:2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-np", "2"], "-np 2 requests a fixed number of ranks, but --elastic 2:4 requests a variable number."),
        (["-H", "a:1"], "--elastic 2:4 needs slots for 2 ranks, but the hosts have 1 in all. Use --elastic 1:4, or"),
        (["-H", "a:2", "--host-discovery-script", "x"], "-H a:2 and --host-discovery-script 'x' both name the hosts"),
        (
            ["--backend", "local"],
            "--elastic 2:4 changes the number of ranks, but without a launcher there is always exactly one rank",
        ),
        (["--launcher", "srun"], "but the hosts of a Slurm job are fixed. Leave --elastic out, and let"),
        (
            ["-H", "a:2,b:1"],
            "--elastic 2:4 counts ranks, so all hosts need the same number of slots; -H gives a:2 and b:1. "
            "Use -H a:1,b:1, or --launcher horovodrun.",
        ),
        (
            ["-H", "a:3,b:3", "--elastic", "4:5"],
            "--elastic 4:5 contains no multiple of 3, the number of slots of each host. Use",
        ),
    ],
)
def test_invalid_options_of_an_elastic_job_are_rejected(options: list[str], message: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    result = CliRunner().invoke(unitrain, ["launch", "--dry-run", "--elastic", "2:4", *options, str(script)])
    assert result.exit_code == 2, result.output
    assert message in result.stderr


@pytest.mark.parametrize(
    ("hosts", "options", "endpoint"),
    [
        ("a:2,b:2", ["-x", "MASTER_PORT=30000"], "a:30000"),
        ("a:2,b:2", ["-x", "MASTER_ADDR=c"], "c:29500"),
        ("[fe80::1]:2,[fe80::2]:2", [], "[fe80::1]:29500"),
    ],
)
def test_elastic_torchrun_uses_the_rendezvous_address_of_the_user(
    hosts: str, options: list[str], endpoint: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    command = ["launch", "--dry-run", "--elastic", "3:8", "-H", hosts, *options, str(script)]
    output = CliRunner().invoke(unitrain, command).stderr
    assert output.count(f"--rdzv-endpoint {shlex.quote(endpoint)} --rdzv-id ") == 2, output
    for host in hosts.split(","):
        assert f"--local-addr {host.rpartition(':')[0].strip('[]')} --rdzv-conf " in output


def test_elastic_torchrun_on_several_hosts_uses_nnodes_instead_of_the_supervisor(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    options = ["--elastic", "3:8", "--max-restarts", "5", "-H", "a:2,b:2"]
    result = CliRunner().invoke(unitrain, ["launch", "--dry-run", *options, str(script)])
    assert result.exit_code == 2
    first, second, added = result.stderr.splitlines()[-3:]
    common = "--nnodes 2:4 --nproc-per-node 2 --max-restarts 5 --rdzv-backend c10d --rdzv-endpoint a:29500 --rdzv-id "
    for line, name, is_host in ((first, "a", "true"), (second, "b", "false")):
        assert line.startswith(f"  on {name}: ")
        assert common in line
        assert f"--local-addr {name} --rdzv-conf is_host={is_host},last_call_timeout=" in line
        assert "UNITRAIN_ELASTIC=3:8" in line
        assert "UNITRAIN_SUPERVISOR" not in line
    assert first.split("UNITRAIN_JOB=")[1].split()[0] == second.split("UNITRAIN_JOB=")[1].split()[0]
    assert added == (
        "  on a host that is added later: the last of these commands, with the name of the new host in --local-addr"
    )
