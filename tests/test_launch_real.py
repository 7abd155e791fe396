"""Every backend under every launcher, started for real, by `unitrain launch` and by hand."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
UNITRAIN = [str(BIN / "unitrain"), "launch", "-np", "2"]
SCRIPT = """
import json, os, sys, time
import torch
import unitrain

with unitrain.init(sys.argv[2] if len(sys.argv) > 2 else None, device="cpu", timeout_seconds=60) as backend:
    total = backend.allreduce(torch.tensor([backend.rank + 1.0, 10.0]), op="sum")
    told = dict(
        rank=backend.rank, size=backend.size, local_rank=backend.local_rank, local_size=backend.local_size,
        node_rank=backend.node_rank, num_nodes=backend.num_nodes, backend=backend.name, transport=backend.transport,
        total=total.tolist(), pid=os.getpid(), threads=torch.get_num_threads(),
    )
    with open(f"{sys.argv[1]}/{backend.rank}.json", "w") as file:
        json.dump(told, file)
    backend.barrier()
    if "fail" in sys.argv and backend.rank == 1:
        sys.exit(7)
    if "fail" in sys.argv or "stay" in sys.argv:
        time.sleep(120)
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run `command` in a session of its own, which ends with the test."""
    allow_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    process = subprocess.Popen(
        command,
        env=os.environ | allow_root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def told_by_ranks(folder: Path) -> list[dict[str, object]]:
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda one: one["rank"])


def lives(pid: object) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(lives(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there after {seconds} s: {[pid for pid in pids if lives(pid)]}"
        time.sleep(0.1)


HOROVODRUN = [str(BIN / "horovodrun"), "-np", "2"]
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
PYTHON = sys.executable


@pytest.mark.parametrize(
    ("command", "backend", "transport"),
    [
        ([*UNITRAIN], "ddp", "gloo"),
        ([*UNITRAIN, "--backend", "horovod"], "horovod", "gloo"),
        ([*UNITRAIN, "--backend", "horovod", "--mpi"], "horovod", "mpi"),
        ([*UNITRAIN, "--backend", "horovod", "--launcher", "torchrun"], "horovod", "gloo"),
        ([*UNITRAIN, "--backend", "ddp", "--launcher", "horovodrun"], "ddp", "gloo"),
        (TORCHRUN, "ddp", "gloo"),
        ([*HOROVODRUN, "--gloo", PYTHON], "horovod", "gloo"),
        ([*HOROVODRUN, "--mpi", PYTHON], "horovod", "mpi"),
        (["mpirun", "-np", "2", "--oversubscribe", PYTHON], "horovod", "mpi"),
    ],
    ids=[
        "ddp", "horovod", "horovod --mpi", "horovod torchrun", "ddp horovodrun",
        "torchrun by hand", "horovodrun --gloo by hand", "horovodrun --mpi by hand", "mpirun by hand",
    ],
)  # fmt: skip
def test_two_ranks(command: list[str], backend: str, transport: str, script: str, tmp_path: Path) -> None:
    with started([*command, script, str(tmp_path)]) as process:
        output, _ = process.communicate(timeout=100)
    assert process.returncode == 0, output
    common = {
        "size": 2, "local_size": 2, "node_rank": 0, "num_nodes": 1, "backend": backend, "transport": transport,
        "total": [3.0, 20.0],
    }  # fmt: skip
    told = told_by_ranks(tmp_path)
    for rank, one in enumerate(told):
        assert one == common | {"rank": rank, "local_rank": rank, "pid": one["pid"], "threads": one["threads"]}
    assert len({one["pid"] for one in told}) == 2
    if command[0] == UNITRAIN[0]:
        assert {one["threads"] for one in told} == {max(1, (os.cpu_count() or 1) // 2)}


def test_one_process_without_a_launcher(script: str, tmp_path: Path) -> None:
    for folder, command in (("plain", [PYTHON]), ("launched", [UNITRAIN[0], "launch", "--backend", "local"])):
        (tmp_path / folder).mkdir()
        with started([*command, script, str(tmp_path / folder)]) as process:
            output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, output
        (told,) = told_by_ranks(tmp_path / folder)
        assert (told["backend"], told["size"], told["total"]) == ("local", 1, [1.0, 10.0])


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_a_failing_rank_ends_the_launch_with_its_failure(backend: str, script: str, tmp_path: Path) -> None:
    with started([*UNITRAIN, "--backend", backend, script, str(tmp_path), backend, "fail"]) as process:
        output, _ = process.communicate(timeout=100)
        assert process.returncode not in (0, None), output
        wait_until_gone([one["pid"] for one in told_by_ranks(tmp_path)], 10)


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_a_signal_to_the_launch_ends_all_ranks(backend: str, script: str, tmp_path: Path) -> None:
    with started([*UNITRAIN, "--backend", backend, script, str(tmp_path), backend, "stay"]) as process:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.json"))) < 2 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        pids = [one["pid"] for one in told_by_ranks(tmp_path)]
        assert len(pids) == 2
        assert all(lives(pid) for pid in pids)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode != 0
        wait_until_gone(pids, 10)


def test_local_with_two_ranks_is_refused(script: str, tmp_path: Path) -> None:
    with started([*TORCHRUN, script, str(tmp_path), "local"]) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert (
        "LauncherMismatchError: Backend 'local' is one process, but torchrun started 2. "
        "Use --backend ddp or --backend horovod, or start it with: python script.py"
    ) in output
