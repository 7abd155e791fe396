"""`init_process_group("horovod")` without a launcher uses the given rank, size and rendezvous."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from groups import nightly
from hosts import hosts
from preload import preloaded
from requirements import needs_hosts, needs_mpi

from unitrain.bootstrap import environment
from unitrain.bootstrap.network import reserve_port

ROOT = str(Path(__file__).parents[2])
SPAWN = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import unitrain

def run_rank(rank, method, size):
    unitrain.register_process_group()
    if method.startswith("store:"):
        store = dist.FileStore(method.removeprefix("store:"), size)
        dist.init_process_group("horovod", store=store, rank=rank, world_size=size)
    else:
        dist.init_process_group("horovod", init_method=method, rank=rank, world_size=size)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert (dist.get_rank(), dist.get_world_size(), total.item()) == (rank, size, sum(range(size)))
    if rank == 0:
        dist.send(total, size - 1)
    elif rank == size - 1:
        dist.recv(total, 0)
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(run_rank, args=(sys.argv[1], 3), nprocs=3)
    print("finished")
"""

# The processes initialize and destroy groups with the same ranks, then groups with different ranks and sizes, and
# finally a group that includes a new process.
REPEATED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import unitrain

def run_rank(rank, folder):
    unitrain.register_process_group()
    if rank == 3:
        return join(folder, "other7", rank, [3, 0])
    for turn in range(4):
        dist.init_process_group("horovod", init_method=f"file://{folder}/{turn}", rank=rank, world_size=3)
        total = torch.full((3,), rank + 1.0)
        dist.all_reduce(total)
        assert total.tolist() == [6.0] * 3, (turn, total)
        pair = dist.new_group([0, 1])
        if rank < 2:
            total = torch.full((2,), rank + 1.0)
            dist.all_reduce(total, group=pair)
            assert total.tolist() == [3.0] * 2, (turn, total)
        dist.barrier()
        dist.destroy_process_group()
    for turn, ranks in enumerate(([2, 1, 0], [1, 0], [0, 1, 2], [1, 2], [2, 0, 1], [2, 0, 1], [1], [3, 0])):
        join(folder, f"other{turn}", rank, ranks)

def join(folder, name, rank, ranks):
    if rank not in ranks:
        return
    size, own = len(ranks), ranks.index(rank)
    store = dist.FileStore(f"{folder}/{name}", size)
    dist.init_process_group("horovod", store=store, rank=own, world_size=size)
    parts = [torch.zeros(1) for _ in ranks]
    dist.all_gather(parts, torch.tensor([float(rank)]))
    assert torch.cat(parts).tolist() == ranks, (name, parts)
    if size > 1:
        pair = dist.new_group([0, 1])
        if own < 2:
            total = torch.full((2,), own + 1.0)
            dist.all_reduce(total, group=pair)
            assert total.tolist() == [3.0] * 2, (name, total)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(run_rank, args=(sys.argv[1],), nprocs=4)
    print("finished")
"""

# Two processes per host start the same group twice, then groups in which rank 0 is another process or on another host.
ON_TWO_HOSTS = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import unitrain

def run_rank(local_rank, first):
    unitrain.register_process_group()
    number = first + local_rank
    groups = ([0, 1, 2, 3], [0, 1, 2, 3], [3, 1, 2, 0], [1, 2], [2, 3], [0, 1, 2, 3], [0])
    for turn, numbers in enumerate(groups):
        if number in numbers:
            join(f"tcp://h{1 + numbers[0] // 2}:{29500 + turn}", number, numbers)

def join(address, number, numbers):
    size, rank = len(numbers), numbers.index(number)
    dist.init_process_group("horovod", init_method=address, rank=rank, world_size=size)
    parts = [torch.zeros(1) for _ in numbers]
    dist.all_gather(parts, torch.tensor([float(number)]))
    assert torch.cat(parts).tolist() == numbers, (address, parts)
    if size > 1:
        pair = dist.new_group([0, size - 1])
        if rank in (0, size - 1):
            total = torch.full((2,), rank + 1.0)
            dist.all_reduce(total, group=pair)
            assert total.tolist() == [size + 1.0] * 2, (address, total)
            dist.send(total, size - 1) if rank == 0 else dist.recv(total, 0)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(run_rank, args=(int(sys.argv[1]),), nprocs=2)
    print("finished")
"""

# If a launcher has started Horovod, other ranks are rejected. MASTER_PORT is not set, so the ranks agree on a port
# through Horovod.
OTHER_RANKS_OF_A_LAUNCHER = """
import os, sys, torch, torch.distributed as dist
import unitrain

os.environ["MASTER_ADDR"] = "127.0.0.1"
unitrain.register_process_group()
dist.init_process_group("horovod")
rank = dist.get_rank()
dist.destroy_process_group()
try:
    dist.init_process_group("horovod", init_method=f"file://{sys.argv[1]}/other", rank=1 - rank, world_size=2)
except unitrain.UnsupportedError as error:
    assert f"rank {1 - rank} of 2 was requested, but Horovod already runs with other ranks" in str(error)
    print("refused")
dist.init_process_group("horovod", init_method=f"file://{sys.argv[1]}/same", rank=rank, world_size=2)
total = torch.ones(1)
dist.all_reduce(total)
assert total.item() == 2.0
dist.destroy_process_group()
"""

# Rank 0 serves the store and destroys the group immediately. Rank 1 is slow and still reads the addresses.
DESTROYED_AT_ONCE = """
import os, sys, threading, torch.distributed as dist, torch.multiprocessing as mp
import unitrain
from unitrain.bootstrap.network import reserve_port

def run_rank(rank, ports):
    unitrain.register_process_group()
    if rank == 1:
        os.nice(15)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        sys.setswitchinterval(1e-5)
        for _ in range(3):
            threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(int, 1)], daemon=True).start()
    for port in ports:
        dist.init_process_group("horovod", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        dist.destroy_process_group()

if __name__ == "__main__":
    reservations = [reserve_port() for _ in range(20)]
    mp.spawn(run_rank, args=([reservation.getsockname()[1] for reservation in reservations],), nprocs=2)
    print("finished")
"""

# If a group has no default backend, torch 2.14 logs a warning, and torch 2.15 cannot attach the flight recorder.
DEFAULT_BACKEND = """
import torch.distributed as dist
import unitrain
unitrain.register_process_group()
dist.init_process_group("horovod", store=dist.HashStore(), rank=0, world_size=1)
for group in (dist.group.WORLD, dist.new_group([0])):
    assert not group._has_hooks()
dist.destroy_process_group()
print("finished")
"""

# Repeated hvd.init() and hvd.shutdown() under horovodrun.
REPEATED_HOROVOD = """
import os, torch, horovod.torch as hvd
os.environ["HOROVOD_FUSION_THRESHOLD"] = "1048576"
for turn in range(12):
    os.environ["HOROVOD_CYCLE_TIME"] = str(1 + turn % 2)
    hvd.init()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="x").tolist() == [2.0] * 3
    hvd.shutdown()
print("finished")
"""


def _run(command: list[str], timeout: float = 120) -> str:
    variables = environment.without_launcher_variables() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=preloaded(variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("method", ["tcp", "file", "store"])
def test_spawned_ranks_use_the_arguments(method: str, tmp_path: Path) -> None:
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    with reserve_port() as reservation:
        address = {
            "tcp": f"tcp://127.0.0.1:{reservation.getsockname()[1]}",
            "file": f"file://{tmp_path}/file",
            "store": f"store:{tmp_path}/store",
        }
        assert "finished" in _run([sys.executable, str(script), address[method]])


def test_groups_have_a_default_backend(tmp_path: Path) -> None:
    script = tmp_path / "default_backend.py"
    script.write_text(DEFAULT_BACKEND)
    assert _run([sys.executable, str(script)]) == "finished\n"


def test_groups_can_be_initialized_repeatedly_with_the_same_and_with_other_ranks(tmp_path: Path) -> None:
    script = tmp_path / "repeated.py"
    script.write_text(REPEATED)
    assert "finished" in _run([sys.executable, str(script), str(tmp_path)])


@pytest.mark.ci
def test_the_rank_that_serves_the_store_can_destroy_a_group_immediately(tmp_path: Path) -> None:
    script = tmp_path / "destroyed_at_once.py"
    script.write_text(DESTROYED_AT_ONCE)
    assert _run([sys.executable, str(script)]) == "finished\n"


@needs_hosts
@pytest.mark.parametrize("hostname_is_loopback", [True, *nightly(False)])
def test_groups_can_be_initialized_repeatedly_on_two_hosts(hostname_is_loopback: bool, tmp_path: Path) -> None:
    """On a host installed by Debian's installer, the host name resolves to 127.0.1.1."""
    script = tmp_path / "on_two_hosts.py"
    script.write_text(ON_TWO_HOSTS)
    folder = tmp_path / "hosts"
    folder.mkdir()
    with hosts(2, folder, hostname_is_loopback=hostname_is_loopback) as both:
        processes = [
            host.start([sys.executable, str(script), str(2 * number)], {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"})
            for number, host in enumerate(both)
        ]
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all("finished" in output for output in outputs), outputs


@pytest.mark.parametrize("controller", ["gloo", pytest.param("mpi", marks=[needs_mpi, pytest.mark.ci])])
def test_ranks_that_differ_from_the_launcher_are_rejected(controller: str, tmp_path: Path) -> None:
    script = tmp_path / "other_ranks.py"
    script.write_text(OTHER_RANKS_OF_A_LAUNCHER)
    command = [str(Path(sys.executable).with_name("horovodrun")), f"--{controller}", "-np", "2"]
    environment.export_defaults({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    assert _run([*command, sys.executable, str(script), str(tmp_path)]).count("refused") == 2


def test_horovod_can_be_initialized_repeatedly_under_horovodrun(tmp_path: Path) -> None:
    script = tmp_path / "repeated_horovod.py"
    script.write_text(REPEATED_HOROVOD)
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    assert _run([horovodrun, "--gloo", "-np", "2", sys.executable, str(script)]).count("finished") == 2
