"""The rank, size and rendezvous that are passed to `init_process_group("horovod")`, without a launcher."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from preload import preloaded

from unitrain.bootstrap import environment

SPAWN = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import unitrain

def train(rank, method, size):
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
    mp.spawn(train, args=(sys.argv[1], 3), nprocs=3)
    print("finished")
"""

# The ranks initialize and destroy groups in one process, and then request groups with other ranks.
REPEATED = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
import unitrain

def train(rank, folder):
    unitrain.register_process_group()
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
    try:
        dist.init_process_group("horovod", init_method=f"file://{folder}/other", rank=2 - rank, world_size=3)
    except unitrain.UnsupportedError as error:
        assert f"rank {2 - rank} of 3 was requested, but Horovod already runs with other ranks" in str(error)
    else:
        raise AssertionError("not raised")

if __name__ == "__main__":
    mp.spawn(train, args=(sys.argv[1],), nprocs=3)
    print("finished")
"""

# Without a default backend, torch 2.14 logs a warning, and torch 2.15 cannot attach its flight recorder to the group.
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

# Horovod's own start and end, repeated under horovodrun.
REPEATED_HOROVOD = """
import torch, horovod.torch as hvd
for turn in range(12):
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = {"tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{tmp_path}/file", "store": f"store:{tmp_path}/store"}
    assert "finished" in _run([sys.executable, str(script), address[method]])


def test_groups_have_a_default_backend(tmp_path: Path) -> None:
    script = tmp_path / "default_backend.py"
    script.write_text(DEFAULT_BACKEND)
    assert _run([sys.executable, str(script)]) == "finished\n"


def test_groups_are_initialized_repeatedly_and_other_ranks_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "repeated.py"
    script.write_text(REPEATED)
    assert "finished" in _run([sys.executable, str(script), str(tmp_path)])


def test_horovod_is_initialized_repeatedly_under_horovodrun(tmp_path: Path) -> None:
    script = tmp_path / "repeated_horovod.py"
    script.write_text(REPEATED_HOROVOD)
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    assert _run([horovodrun, "--gloo", "-np", "2", sys.executable, str(script)]).count("finished") == 2
