"""Tests of the Horovod patches on the installed Horovod, with real processes.

Each test fails without its patch: the job hangs, is much slower, or ends with an error, as stated in the docstrings.
Each rank runs in its own session, which is killed at the end of the test.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from preload import preloaded
from requirements import needs_network_namespaces

LIMIT_SECONDS = 100

# Runs Horovod's rendezvous server for the ranks on the given hosts. Prints the port, and ends when standard input
# closes.
SERVER = """
import sys
from horovod.runner.common.util.hosts import SlotInfo
from horovod.runner.http.http_server import RendezvousServer
hosts = sys.argv[1:]
local = [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
slots = [
    SlotInfo(hostname=host, rank=rank, size=len(hosts), local_rank=local[rank], local_size=hosts.count(host),
             cross_rank=local[:rank].count(local[rank]), cross_size=local.count(local[rank]))
    for rank, host in enumerate(hosts)
]
server = RendezvousServer()
port = server.start()
server.init(slots)
print("port", port, flush=True)
sys.stdin.read()
"""

# Rank 1 joins the first collective but not the second one. Only the stall inspector can report this to rank 0.
MISSING_RANK = """
import time, torch, horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(2), name="together")
if hvd.rank() == 1:
    time.sleep(600)
hvd.allreduce(torch.ones(2), name="alone")
"""

# Prints by what factor a small reducescatter slows down later large broadcasts.
BROADCASTS = """
import time, torch, horovod.torch as hvd
hvd.init()
large = torch.ones(4_000_000)

def seconds():
    taken = []
    for _ in range(5):
        hvd.allreduce(torch.ones(1), name="together")
        started = time.perf_counter()
        hvd.broadcast(large, 0, name="large")
        hvd.allreduce(torch.ones(1), name="together")
        taken.append(time.perf_counter() - started)
    return min(taken)  # the minimum excludes the load of other processes

before = seconds()
hvd.reducescatter(torch.ones(4), name="small")
print("slower by", seconds() / before, flush=True)
hvd.shutdown()
"""

# Prints ten times the median duration of ten operations, each after a pause, and the duration of twenty operations that
# are enqueued together.
CYCLES = """
import statistics, time, torch, horovod.torch as hvd
hvd.init()
values = torch.ones(4)
hvd.allreduce(values, name="together")
taken = []
for number in range(10):
    time.sleep(0.1)
    started = time.perf_counter()
    assert hvd.allreduce(values, op=hvd.Sum, name=f"single {number}").tolist() == [2] * 4
    taken.append(time.perf_counter() - started)
one_by_one = 10 * statistics.median(taken)
started = time.perf_counter()
handles = [hvd.allreduce_async(values, name=f"burst {number}") for number in range(20)]
for handle in handles:
    hvd.synchronize(handle)
print("one by one:", one_by_one, "at once:", time.perf_counter() - started, flush=True)
hvd.shutdown()
"""

# Prints ten times the median duration of ten operations in a process set that contains only rank 0, each after a pause.
# Meanwhile, rank 1 has no pending operation.
PROCESS_SET = """
import os, pathlib, statistics, time, torch, horovod.torch as hvd
from datetime import timedelta
from unitrain.backends.horovod.process_sets import add_process_set
hvd.init()
if hvd.rank() == 0:
    alone = add_process_set([0], timedelta(seconds=30), list)
    taken = []
    for number in range(10):
        time.sleep(0.1)
        started = time.perf_counter()
        hvd.allreduce(torch.ones(4), name=f"alone {number}", process_set=alone)
        taken.append(time.perf_counter() - started)
    print("one by one:", 10 * statistics.median(taken), flush=True)
    pathlib.Path(os.environ["DONE"]).touch()
while not pathlib.Path(os.environ["DONE"]).exists():
    time.sleep(0.05)
hvd.allreduce(torch.ones(4), name="together")
hvd.shutdown()
"""

# In a job with a process set, rank 1 is killed after rank 0 has completed the first operation. Then rank 0 waits for an
# operation of the process set.
KILLED = """
import os, pathlib, signal, time, torch, horovod.torch as hvd
from datetime import timedelta
from unitrain.backends.horovod.process_sets import add_process_set
hvd.init()
both = add_process_set([0, 1], timedelta(seconds=30), list)
alone = add_process_set([0], timedelta(seconds=30), list) if hvd.rank() == 0 else None
hvd.allreduce(torch.ones(4), name="both", process_set=both)
done = pathlib.Path(os.environ["DONE"])
if hvd.rank() == 0:
    done.touch()
else:
    deadline = time.monotonic() + 30
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    hvd.allreduce(torch.ones(4), name="after the kill", process_set=both)
except hvd.HorovodInternalError:
    print("raised", flush=True)
"""

# The last rank receives its result before all its data has been sent to rank 0 over a slow connection.
REDUCESCATTERS = """
import torch, horovod.torch as hvd
hvd.init()
for number in range(3):
    values = torch.full((12_000_000,), float(number + hvd.rank()))
    part = hvd.reducescatter(values, op=hvd.Sum, name="large")
    assert torch.equal(part, torch.full_like(part, 3 * number + 3)), f"wrong values in reducescatter {number}"
print("all values are correct", flush=True)
hvd.shutdown()
"""

# Prints the durations of an allgather and an alltoall, relative to an allreduce that sends the same number of bytes.
EXCHANGES = """
import time, torch, horovod.torch as hvd
hvd.init()
values = torch.ones(350_000)

def seconds(operation):
    operation()
    start = time.perf_counter()
    for _ in range(8):
        operation()
    return time.perf_counter() - start

allreduce = seconds(lambda: hvd.allreduce(values, name="allreduce"))
allgather = seconds(lambda: hvd.allgather(values, name="allgather"))
alltoall = seconds(lambda: hvd.alltoall(torch.cat([values, values]), name="alltoall"))
print("allgather", allgather / allreduce, "alltoall", alltoall / allreduce, flush=True)
hvd.shutdown()
"""

SUM_OF_RANKS = """
import torch, horovod.torch as hvd
hvd.init()
print("sum of ranks", int(hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum, name="x")), flush=True)
hvd.shutdown()
"""


class Processes:
    """Starts processes, and kills all of them at the end of the test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(self, name: str, *command: str, **variables: str) -> subprocess.Popen[str]:
        """Start a command in its own session. Write its output to the file `name`, and add `variables` to the
        environment. Python processes are forked from a preloaded interpreter."""
        # Variables of a launcher that runs the tests must not reach the ranks.
        inherited = {
            key: value for key, value in os.environ.items() if not key.startswith(("HOROVOD_", "OMPI_", "PMI"))
        }
        with (self._folder / name).open("w") as output:
            process = subprocess.Popen(
                command,
                env=preloaded(inherited | variables),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def write_script(self, name: str, text: str) -> str:
        """Write a script next to the output folder, and return its path."""
        path = self._folder.parent / f"{name}.py"
        path.write_text(text)
        return str(path)

    def output_of(self, name: str) -> str:
        return (self._folder / name).read_text(errors="replace")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Poll until `condition` returns a true value. If the time limit expires, fail with the output of all
        processes."""
        end = time.monotonic() + LIMIT_SECONDS
        while not condition():
            if time.monotonic() > end:
                printed = "\n".join(f"--- {file.name}\n{file.read_text()}" for file in sorted(self._folder.iterdir()))
                pytest.fail(f"{what} took more than {LIMIT_SECONDS} s\n{printed}")
            time.sleep(0.05)

    def kill_all(self) -> None:
        for process in self._started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=LIMIT_SECONDS)
            if process.stdin is not None:
                process.stdin.close()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    folder = tmp_path / "output"
    folder.mkdir()
    started = Processes(folder)
    try:
        yield started
    finally:
        started.kill_all()


def start_ranks(
    processes: Processes,
    script: str,
    hosts: tuple[str, ...],
    address: str,
    command_prefix: Callable[[int], tuple[str, ...]] = lambda rank: (),
    **variables: str,
) -> list[subprocess.Popen[str]]:
    """Start one rank of `script` per name in `hosts` under the Gloo controller.

    `command_prefix(rank)` returns the words that precede the command of a rank.

    If a host name occurs several times, the host has several ranks.
    """
    server, train = processes.write_script("server", SERVER), processes.write_script("train", script)
    processes.start("server", *command_prefix(0), sys.executable, server, *hosts)
    processes.wait_until(lambda: "port " in processes.output_of("server"), "the rendezvous server")
    found = re.search(r"port (\d+)", processes.output_of("server"))
    assert found is not None
    ranks, local = [], [hosts[:rank].count(host) for rank, host in enumerate(hosts)]
    for rank, host in enumerate(hosts):
        own = {
            "HOROVOD_RANK": str(rank),
            "HOROVOD_SIZE": str(len(hosts)),
            "HOROVOD_LOCAL_RANK": str(local[rank]),
            "HOROVOD_LOCAL_SIZE": str(hosts.count(host)),
            "HOROVOD_CROSS_RANK": str(local[:rank].count(local[rank])),
            "HOROVOD_CROSS_SIZE": str(local.count(local[rank])),
            "HOROVOD_HOSTNAME": host,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
            "HOROVOD_GLOO_RENDEZVOUS_PORT": found.group(1),
        }
        ranks.append(processes.start(f"rank{rank}", *command_prefix(rank), sys.executable, train, **own, **variables))
    return ranks


def test_stall_inspector_ends_a_job_with_a_missing_rank(processes: Processes) -> None:
    stall = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    waiting, _missing = start_ranks(
        processes, MISSING_RANK, ("localhost", "localhost"), "127.0.0.1", HOROVOD_GLOO_IFACE="lo", **stall
    )
    processes.wait_until(lambda: waiting.poll() is not None, "the end of the rank that waits")
    output = processes.output_of("rank0")
    assert waiting.returncode != 0
    assert "HorovodInternalError" in output
    assert re.search(r"alone.*missing ranks:? *1|Missing ranks:\s*1", output, re.DOTALL), output


def test_broadcast_after_a_small_reducescatter_is_fast(processes: Processes) -> None:
    """Without the patch, the broadcast is 300 to 400 times slower."""
    ranks = start_ranks(processes, BROADCASTS, ("localhost", "localhost"), "127.0.0.1", HOROVOD_GLOO_IFACE="lo")
    processes.wait_until(lambda: all(rank.poll() is not None for rank in ranks), "the end of both ranks")
    found = re.search(r"slower by ([0-9.]+)", processes.output_of("rank0"))
    assert found is not None, processes.output_of("rank0")
    assert float(found.group(1)) < 30


def test_operations_of_an_idle_thread_start_immediately(processes: Processes) -> None:
    """Without the patch, each of ten operations waits 0.3 s for the next cycle, 3 s in total."""
    cycles = {"HOROVOD_CYCLE_TIME": "400", "HOROVOD_IDLE_CYCLE_TIME": "2000"}
    ranks = start_ranks(processes, CYCLES, ("localhost", "localhost"), "127.0.0.1", HOROVOD_GLOO_IFACE="lo", **cycles)
    processes.wait_until(lambda: all(rank.poll() is not None for rank in ranks), "the end of both ranks")
    found = re.search(r"one by one: ([0-9.]+) at once: ([0-9.]+)", processes.output_of("rank0"))
    assert found is not None, processes.output_of("rank0")
    one_by_one, at_once = map(float, found.groups())
    assert one_by_one < 2.5
    assert at_once < 6  # twenty separate cycles would take 8 s


def test_operations_of_a_process_set_wake_the_other_ranks(processes: Processes, tmp_path: Path) -> None:
    """Without the patch, each of ten operations waits 0.3 s for the next cycle of rank 1."""
    cycles = {"HOROVOD_CYCLE_TIME": "400", "HOROVOD_IDLE_CYCLE_TIME": "2000", "DONE": str(tmp_path / "done")}
    ranks = start_ranks(
        processes, PROCESS_SET, ("localhost", "localhost"), "127.0.0.1", HOROVOD_GLOO_IFACE="lo", **cycles
    )
    processes.wait_until(lambda: all(rank.poll() is not None for rank in ranks), "the end of both ranks")
    assert [rank.returncode for rank in ranks] == [0, 0], processes.output_of("rank0")
    found = re.search(r"one by one: ([0-9.]+)", processes.output_of("rank0"))
    assert found is not None, processes.output_of("rank0")
    assert float(found.group(1)) < 2.5


def test_rank_with_process_sets_raises_after_another_rank_is_killed(processes: Processes, tmp_path: Path) -> None:
    """Without the patch, an exception in the background thread aborts the process."""
    variables = {"HOROVOD_GLOO_IFACE": "lo", "DONE": str(tmp_path / "done")}
    remaining, _killed = start_ranks(processes, KILLED, ("localhost", "localhost"), "127.0.0.1", **variables)
    processes.wait_until(lambda: remaining.poll() is not None, "the end of the remaining rank")
    output = processes.output_of("rank0")
    assert "raised" in output
    assert "terminate called" not in output
    assert remaining.returncode == 0


@pytest.fixture
def two_hosts(processes: Processes, tmp_path: Path) -> Callable[[int], tuple[str, ...]]:
    """Create two hosts on this machine. Return the `command_prefix` that runs rank 0 on the first host and all other
    ranks on the second host. Each host has its own network and name, and an /etc/hosts like that of Debian's
    installer.

    A host is a shell in new namespaces. When the shell ends, the kernel removes the namespaces and their virtual cable.
    """
    holders = []
    for host in (0, 1):
        names = tmp_path / f"hosts{host}"
        names.write_text(f"127.0.0.1 localhost\n127.0.1.1 host{host}\n10.99.0.{2 - host} host{1 - host}\n")
        setup = (
            f"hostname host{host} && mount --bind {names} /etc/hosts && ip link set lo up && echo up && exec sleep 600"
        )
        holders.append(processes.start(f"host{host}", "unshare", "--net", "--uts", "--mount", "sh", "-c", setup))
    for host in (0, 1):
        processes.wait_until(lambda host=host: "up" in processes.output_of(f"host{host}"), f"host {host}")
    first, second = (str(holder.pid) for holder in holders)
    cable = f"ip link add cable netns {first} type veth peer name cable netns {second}"
    subprocess.run(cable.split(), check=True, timeout=LIMIT_SECONDS)
    for host, pid in enumerate((first, second)):
        for command in (f"ip addr add 10.99.0.{host + 1}/24 dev cable", "ip link set cable up"):
            subprocess.run(["nsenter", "-t", pid, "--net", *command.split()], check=True, timeout=LIMIT_SECONDS)
    return lambda rank: ("nsenter", "-t", (first, second)[min(rank, 1)], "--net", "--uts", "--mount")


@needs_network_namespaces
def test_gloo_uses_the_named_interface_if_the_host_name_is_loopback(
    processes: Processes, two_hosts: Callable[[int], tuple[str, ...]]
) -> None:
    ranks = start_ranks(
        processes, SUM_OF_RANKS, ("host0", "host1"), "10.99.0.1", command_prefix=two_hosts, HOROVOD_GLOO_IFACE="cable"
    )
    processes.wait_until(lambda: all(rank.poll() is not None for rank in ranks), "the end of both ranks")
    for rank in (0, 1):
        assert "sum of ranks 3" in processes.output_of(f"rank{rank}"), processes.output_of(f"rank{rank}")
    assert [rank.returncode for rank in ranks] == [0, 0]


@needs_network_namespaces
def test_a_reducescatter_completes_after_all_data_is_sent(
    processes: Processes, two_hosts: Callable[[int], tuple[str, ...]]
) -> None:
    """Without the patch, rank 2 frees memory before it has been sent to rank 0, and ends with `writev: Bad address`."""
    shape = "tc qdisc add dev cable root tbf rate 400mbit burst 200kb latency 50ms"
    subprocess.run([*two_hosts(1), *shape.split()], check=True, timeout=LIMIT_SECONDS)
    ranks = start_ranks(
        processes,
        REDUCESCATTERS,
        ("host0", "host1", "host1"),
        "10.99.0.1",
        command_prefix=two_hosts,
        HOROVOD_GLOO_IFACE="cable",
    )
    processes.wait_until(lambda: all(rank.poll() is not None for rank in ranks), "the end of all ranks")
    for rank in range(3):
        assert "all values are correct" in processes.output_of(f"rank{rank}"), processes.output_of(f"rank{rank}")


@needs_network_namespaces
def test_both_ranks_of_an_allgather_and_of_an_alltoall_send_at_the_same_time(
    processes: Processes, two_hosts: Callable[[int], tuple[str, ...]]
) -> None:
    """Without the patch, the ranks send one after the other in many of the operations."""
    for host in (0, 1):
        shape = "tc qdisc add dev cable root tbf rate 100mbit burst 250kb latency 100ms"
        subprocess.run([*two_hosts(host), *shape.split()], check=True, timeout=LIMIT_SECONDS)
    ranks = start_ranks(
        processes, EXCHANGES, ("host0", "host1"), "10.99.0.1", command_prefix=two_hosts, HOROVOD_GLOO_IFACE="cable"
    )
    processes.wait_until(lambda: all(rank.poll() is not None for rank in ranks), "the end of both ranks")
    found = re.search(r"allgather ([0-9.]+) alltoall ([0-9.]+)", processes.output_of("rank0"))
    assert found is not None, processes.output_of("rank0")
    assert max(map(float, found.groups())) < 1.3, found.group()
