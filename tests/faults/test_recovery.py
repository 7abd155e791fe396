"""Standby ranks replace killed ranks, and the final parameters are bit-identical to those of an undisturbed job."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import recovery_training
from hosts import Host
from launches import SECONDS, Launch, running_launcher
from recovery_training import CHECKPOINT_EVERY, GATES, STEPS
from requirements import needs_hosts, needs_mpi

LAUNCH = [sys.executable, "-m", "unitrain", "launch"]
VARIABLES = {"OMP_NUM_THREADS": "1"}
READY = "unitrain: the standby ranks are ready"


class Output:
    """Collects the lines that a launcher prints, in a thread."""

    def __init__(self, launch: Launch) -> None:
        self.lines: list[str] = []
        self._launch, self._new = launch, queue.Queue[str]()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._launch.process.stdout is not None
        for line in self._launch.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._new.put(self.lines[-1])

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str) -> None:
        """Wait for the next line with `text`."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                if text in self._new.get(timeout=max(deadline - time.monotonic(), 0.01)):
                    return
            except queue.Empty:
                raise TimeoutError(f"no {text!r} within {SECONDS} s in:\n{self.text}") from None

    def wait_for_exit(self) -> int:
        code = self._launch.process.wait(SECONDS)
        self._thread.join(10)
        return code


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def completed_steps(folder: Path, rank: int) -> list[int]:
    file = folder / f"steps-{rank}.txt"
    return [int(line.split()[0]) for line in file.read_text().splitlines()] if file.exists() else []


def wait_at_gate(folder: Path, gate: int, size: int = 2) -> None:
    """Wait until all ranks have reached the gate of step `gate`."""
    wait_until(lambda: all((completed_steps(folder, rank) or [0])[-1] == gate - 1 for rank in range(size)))


def kill_rank(folder: Path, rank: int) -> None:
    os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGKILL)


def find_standby_ranks(launch: Launch) -> list[int]:
    """Return the process IDs of the standby ranks. Exclude their launcher, which has the same arguments."""
    found = []
    for pid in launch.find_processes():
        with contextlib.suppress(OSError):  # the process has already ended
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(word.endswith(b"standby_rank.py") for word in words[1:3]):
                found.append(pid)
    return found


def memory_folder(output: Output) -> Path:
    """Return the folder for checkpoints in memory, as shown in the printed launcher command."""
    found = re.search(r"UNITRAIN_MEMORY_FOLDER=(\S+)", output.text)
    assert found is not None
    return Path(found[1])


def launch_command(folder: Path, backend: str, *options: str, launcher: str | None = None) -> list[str]:
    chosen = ["--launcher", launcher] if launcher is not None else []
    return [*LAUNCH, "--backend", backend, *chosen, *options, recovery_training.__file__, str(folder)]


def open_gates(folder: Path, gates: Sequence[int] = GATES) -> None:
    for gate in gates:
        (folder / f"pass-{gate}").touch()


@pytest.mark.parametrize(
    ("backend", "launcher", "in_memory"),
    [
        ("ddp", "torchrun", True),
        pytest.param("horovod", "horovodrun", True, marks=pytest.mark.nightly),
        pytest.param("ddp", "torchrun", False, marks=pytest.mark.nightly),
        pytest.param("horovod", "mpirun", True, marks=[needs_mpi, pytest.mark.nightly]),
        pytest.param("ddp", "mpirun", True, marks=[needs_mpi, pytest.mark.nightly]),
    ],
)
def test_standby_ranks_replace_killed_ranks_with_the_same_bits(
    backend: str, launcher: str, in_memory: bool, tmp_path: Path
) -> None:
    """First rank 1 is killed, then rank 0 of the replacement. With checkpoints in memory, at most one step is
    repeated."""
    (undisturbed := tmp_path / "undisturbed").mkdir()
    open_gates(undisturbed)
    with running_launcher(launch_command(undisturbed, backend, "-np", "2", launcher=launcher), VARIABLES) as launch:
        text = launch.output()
    assert launch.process.returncode == 0, text
    (folder := tmp_path / "killed").mkdir()
    if in_memory:
        (folder / "memory").touch()
    options = ["--elastic", "2:2", "--max-restarts", "2", "--standby"]
    with running_launcher(launch_command(folder, backend, *options, launcher=launcher), VARIABLES) as launch:
        output = Output(launch)
        for gate, rank in zip(GATES, (1, 0), strict=True):
            wait_at_gate(folder, gate)
            output.wait_for(READY)
            kill_rank(folder, rank)
            output.wait_for(f"rank {rank} was killed or crashed; restarting the job from its newest checkpoint")
            (folder / f"pass-{gate}").touch()
        assert output.wait_for_exit() == 0, output.text
        launch.wait_until_all_exited(30)
    assert json.loads((folder / "result.json").read_text()) == json.loads((undisturbed / "result.json").read_text())
    for rank in (0, 1):
        steps = completed_steps(folder, rank)
        assert set(steps) == set(range(1, STEPS + 1))
        assert len(steps) - STEPS <= len(GATES) * (1 if in_memory else CHECKPOINT_EVERY - 1)
    assert not memory_folder(output).exists()
    # The launcher commands of standby ranks are not printed.
    assert output.text.count("UNITRAIN_JOB=") == 1, output.text


HOST_GATES = (15, 30, 45)


@pytest.mark.nightly
@needs_hosts
@pytest.mark.parametrize(
    ("backend", "launcher", "added"),
    [
        ("ddp", "torchrun", []),
        ("horovod", "horovodrun", ["--elastic", "3:3"]),
        pytest.param("horovod", "mpirun", [], marks=needs_mpi),
    ],
)
def test_standby_ranks_on_two_hosts_replace_killed_ranks(
    backend: str, launcher: str, added: list[str], two_hosts: list[Host], tmp_path: Path
) -> None:
    """One rank of the second host, rank 0, and all ranks of the second host are killed one after another. Each kill
    costs at most one step, and the final parameters are bit-identical to those of one process."""
    (undisturbed := tmp_path / "undisturbed").mkdir()
    (folder := tmp_path / "killed").mkdir()
    (undisturbed / "logical").touch()
    open_gates(undisturbed)
    with running_launcher([sys.executable, recovery_training.__file__, str(undisturbed)], VARIABLES) as alone:
        text = alone.output()
    assert alone.process.returncode == 0, text
    for name in ("memory", "logical"):
        (folder / name).touch()
    first, second = two_hosts
    options = ["-H", "h1:1,h2:2", *added, "--max-restarts", "3", "--standby"]
    line = [*launch_command(folder, backend, *options, launcher=launcher), *map(str, HOST_GATES)]
    with first.start(line, VARIABLES | {"PYTHONPATH": str(Path(__file__).parents[2])}) as process:
        output = Output(Launch(process, b""))
        try:
            for gate, host, ranks in zip(HOST_GATES, (second, first, second), ((2,), (0,), (1, 2)), strict=True):
                wait_at_gate(folder, gate, size=3)
                output.wait_for(READY)
                host.run(["kill", "-KILL", *((folder / f"pid-{rank}").read_text() for rank in ranks)])
                output.wait_for("was killed or crashed; restarting the job from its newest checkpoint")
                (folder / f"pass-{gate}").touch()
            assert output.wait_for_exit() == 0, output.text
        finally:
            for host in two_hosts:
                host.kill_all()
    assert json.loads((folder / "result.json").read_text()) == json.loads((undisturbed / "result.json").read_text())
    for rank in range(3):
        steps = completed_steps(folder, rank)
        assert set(steps) == set(range(1, STEPS + 1))
        assert len(steps) - STEPS <= len(HOST_GATES)


SUPERVISOR = """
import sys, time
from unitrain.supervisor.ranks import RankConnections
with RankConnections("mine", None, sys.argv[1], sys.argv[1], is_standby=True) as ranks:
    print(ranks.address, flush=True)
    time.sleep(300)
"""
# A standby rank, a running rank, or a running rank that sends a message after the network was disconnected.
CONNECTED_RANK = """
import sys, time
from pathlib import Path
from unitrain.monitoring import supervisor_client as client
client._KEEPALIVE_IDLE_SECONDS, client._KEEPALIVE_INTERVAL_SECONDS, client._KEEPALIVE_PROBES = 1, 1, 3
rank, kind, disconnected = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
client.connect(rank, is_standby=kind == "standby")
print("connected", flush=True)
if kind == "standby":
    client.wait_for_start()
while kind == "sends" and not disconnected.exists():
    time.sleep(0.01)
client.report_shutdown()
time.sleep(300)
"""


@needs_hosts
def test_ranks_exit_if_the_host_of_the_supervisor_is_lost(two_hosts: list[Host], tmp_path: Path) -> None:
    """The ranks also exit if a message to the supervisor is not acknowledged, which TCP keepalive does not detect."""
    first, second = two_hosts
    variables = {"PYTHONPATH": str(Path(__file__).parents[2]), "UNITRAIN_JOB": "mine"}
    disconnected = tmp_path / "disconnected"
    with first.start([sys.executable, "-c", SUPERVISOR, first.address], variables) as supervisor:
        ranks = []
        try:
            assert supervisor.stdout is not None
            variables["UNITRAIN_SUPERVISOR"] = supervisor.stdout.readline().strip()
            for rank, kind in enumerate(("standby", "idle", "sends")):
                argv = [sys.executable, "-c", CONNECTED_RANK, str(rank), kind, str(disconnected)]
                ranks.append(second.start(argv, variables))
                assert ranks[-1].stdout is not None
                assert ranks[-1].stdout.readline() == "connected\n"
            first.disconnect_network()
            disconnected.touch()
            outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
        finally:
            for host in two_hosts:
                host.kill_all()
            for process in ranks:
                process.communicate(timeout=60)
    assert ranks[0].returncode == 0, outputs
    for rank in (1, 2):
        assert outputs[rank] == f"unitrain: stopping rank {rank} because the host of unitrain launch does not respond\n"


def test_a_killed_standby_rank_does_not_affect_the_job(tmp_path: Path) -> None:
    """A restart after the standby ranks have exited starts new ranks."""
    with running_launcher(
        launch_command(tmp_path, "ddp", "-np", "2", "--max-restarts", "1", "--standby"), VARIABLES
    ) as launch:
        output = Output(launch)
        wait_at_gate(tmp_path, GATES[0])
        output.wait_for(READY)
        os.kill(find_standby_ranks(launch)[0], signal.SIGKILL)
        output.wait_for("the standby ranks have exited, so a restart will start new ranks")
        kill_rank(tmp_path, 1)
        open_gates(tmp_path)
        assert output.wait_for_exit() == 0, output.text
        launch.wait_until_all_exited(30)
    assert "restarting it from its newest checkpoint (restart 1 of 1)" in output.text
    assert set(completed_steps(tmp_path, 0)) == set(range(1, STEPS + 1))


@pytest.mark.parametrize(
    ("backend", "signum"),
    [
        ("ddp", signal.SIGKILL),
        pytest.param("horovod", signal.SIGKILL, marks=pytest.mark.nightly),
        pytest.param("ddp", signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_standby_ranks_exit_with_the_launch_command(backend: str, signum: signal.Signals, tmp_path: Path) -> None:
    """All ranks exit, and the checkpoints in memory are removed."""
    (tmp_path / "memory").touch()
    options = ["-np", "2", "--max-restarts", "1", "--standby"]
    with running_launcher(launch_command(tmp_path, backend, *options), VARIABLES) as launch:
        output = Output(launch)
        wait_at_gate(tmp_path, GATES[0])
        output.wait_for(READY)
        standby_ranks = find_standby_ranks(launch)
        assert len(standby_ranks) >= 2
        assert list(memory_folder(output).glob("*/step-*"))
        os.kill(launch.process.pid, signum)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in standby_ranks))
        open_gates(tmp_path)
        launch.wait_until_all_exited(30)
        output.wait_for_exit()  # the thread must not read while `running_launcher` closes the pipe
    assert not memory_folder(output).exists()
