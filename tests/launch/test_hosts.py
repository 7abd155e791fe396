"""The simulated hosts that other tests use are isolated, reachable over ssh, and removed completely."""

from __future__ import annotations

import shlex
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import Host, hosts
from requirements import needs_hosts

pytestmark = needs_hosts
SSH = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=2"]


def test_simulated_hosts_have_separate_names_networks_and_processes(two_hosts: list[Host]) -> None:
    first, second = two_hosts
    for host, other in ((first, second), (second, first)):
        done = host.run(["sh", "-c", "hostname; pwd; echo $HOME $OWN; getent hosts h1 h2; ls /dev/shm"], {"OWN": "1"})
        assert done.stdout.split() == [
            host.name, str(Path.cwd()), str(host.home), "1", "10.77.0.1", "h1", "10.77.0.2", "h2",
        ]  # fmt: skip
        remote = host.run([*SSH, other.name, "hostname; pwd"])
        assert remote.stdout.splitlines()[-2:] == [other.name, str(other.home)]
    assert socket.gethostname() not in ("h1", "h2")


def test_processes_of_a_simulated_host_are_found_and_killed(
    two_hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = two_hosts
    first.run([*SSH, "h2", "sleep 300 >/dev/null 2>&1 &"])
    while list(second.find_processes().values()) != ["sleep 300"]:  # wait until the ssh connection is closed
        time.sleep(0.05)
    with pytest.raises(TimeoutError, match=r"still on h2 after 0\.2 s: .*sleep 300"):
        second.wait_until_all_exited(0.2)
    second.kill_all()
    assert second.find_processes() == first.find_processes() == {}
    printed, start = tmp_path / "printed", Host.start

    def start_and_wait_until_printed(host: Host, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
        process = start(host, *arguments, **options)
        while not printed.exists():
            assert process.poll() is None
            time.sleep(0.02)
        return process

    # The time limit of `run` starts after this function returns.
    monkeypatch.setattr(Host, "start", start_and_wait_until_printed)
    with pytest.raises(TimeoutError, match=r"on h1 was killed after 0\.5 s\. Output:\nhere"):
        first.run(["sh", "-c", f"echo here; touch {shlex.quote(str(printed))}; sleep 300"], seconds=0.5)
    assert first.find_processes() == {}


def test_disconnected_and_killed_simulated_hosts_do_not_respond(two_hosts: list[Host]) -> None:
    first, second = two_hosts
    second.disconnect_network()
    assert first.run([*SSH, "h2", "hostname"]).returncode == 255
    second.reconnect_network()
    deadline = time.monotonic() + 20  # h1 may cache that h2 is unreachable
    while first.run([*SSH, "h2", "hostname"]).returncode != 0:
        assert time.monotonic() < deadline
    with second.start(["sleep", "300"]) as running:
        second.kill()
    assert running.returncode != 0
    second.wait_until_all_exited(20)
    assert first.run([*SSH, "h2", "hostname"]).returncode == 255


def test_simulated_hosts_do_not_leave_processes_or_mounts(tmp_path: Path) -> None:
    with hosts(3, tmp_path, hostname_is_loopback=True) as three:
        assert three[2].run(["getent", "hosts", "h1", "h3"]).stdout.split()[::2] == ["10.77.0.1", "127.0.1.1"]
        running = three[1].start(["sleep", "300"])
        while not any("sleep" in command for command in three[1].find_processes().values()):
            assert running.poll() is None
            time.sleep(0.05)
        firsts = [host.first for host in three]
    assert running.communicate(timeout=60) == ("", None)
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in firsts) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in firsts)
    assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
