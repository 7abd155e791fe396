"""Timeouts of collectives, backward passes and the rendezvous name the missing ranks. A failing rank ends all ranks."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import ci
from launches import running_launcher
from preload import preloaded
from requirements import needs_mpi
from torch import nn

from unitrain.backends.base import Backend
from unitrain.backends.process_group import ProcessGroupBackend
from unitrain.bootstrap import environment
from unitrain.bootstrap.network import reserve_port
from unitrain.errors import CollectiveTimeoutError
from unitrain.testing import RankError, RankGroup
from unitrain.testing.models import FEATURES, batch, build, compute_loss

BACKENDS = ("ddp", *ci("horovod"))
TIMEOUT = 4.0


def sleep_until_exists(file: str) -> None:
    while not Path(file).exists():
        time.sleep(0.5)


def miss_a_collective(backend: Backend, folder: str) -> tuple[str, float]:
    backend.barrier()
    if backend.rank == 1:
        sleep_until_exists(f"{folder}/0")
        sleep_until_exists(f"{folder}/2")
        return "", 0.0
    began = time.monotonic()
    try:
        backend.allreduce(torch.ones(2))
    except CollectiveTimeoutError as error:
        seconds = time.monotonic() - began
        Path(folder, str(backend.rank)).touch()
        return str(error), seconds
    raise AssertionError("the collective was completed")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_timeout_names_the_missing_rank(backend: str, tmp_path: Path) -> None:
    with RankGroup(backend, 3, backend_timeout_seconds=TIMEOUT) as group:
        results = group.run(miss_a_collective, str(tmp_path))
    for rank in (0, 2):
        text, seconds = results[rank]
        assert text.startswith("allreduce(float32 [2], mean) (collective #")
        assert f" timed out after 4 s on rank {rank}. Missing ranks: 1. " in text
        assert TIMEOUT * 0.9 <= seconds < TIMEOUT + 20


def miss_a_broadcast(backend: Backend, folder: str) -> str:
    assert isinstance(backend, ProcessGroupBackend)
    wait = backend.start_broadcasts([(torch.ones(2), 1)])
    wait()
    if backend.rank == 1:
        sleep_until_exists(f"{folder}/0")
        return ""
    wait = backend.start_broadcasts([(torch.ones(2), 1)])
    try:
        wait()
    except CollectiveTimeoutError as error:
        Path(folder, "0").touch()
        return str(error)
    raise AssertionError("the broadcast was completed")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_timeout_of_concurrent_broadcasts_names_the_missing_rank(backend: str, tmp_path: Path) -> None:
    with RankGroup(backend, 2, backend_timeout_seconds=TIMEOUT) as group:
        text = group.run(miss_a_broadcast, str(tmp_path))[0]
    assert text.startswith(f"parameter broadcast #1 timed out after {TIMEOUT:g} s on rank 0. Missing ranks: 1. ")


def test_a_group_that_cannot_start_raises_immediately() -> None:
    began = time.monotonic()
    with RankGroup("ddp", 2, command=["false"]) as group, pytest.raises(RankError) as caught:
        group.run(miss_a_collective, "")
    assert str(caught.value) == "Ranks 0, 1 of 2 on ddp did not start: a process ended with exit code 1."
    assert time.monotonic() - began < 30


def fail_or_sleep(backend: Backend, failing: int) -> None:
    if backend.rank == failing:
        raise ValueError("gives up")
    time.sleep(300)


@pytest.mark.parametrize(
    ("failing", "seconds", "limit"), [(0, 60.0, "1 s after that failure"), (2, 2.0, "after 2 s")], ids=["fails", "none"]
)
def test_an_error_of_a_group_states_the_waiting_time(
    failing: int, seconds: float, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unitrain.testing.ranks._AFTER_FAILURE_SECONDS", 1.0)
    with RankGroup("ddp", 2) as group, pytest.raises(RankError) as caught:
        group.run(fail_or_sleep, failing, timeout_seconds=seconds)
    assert f"Rank 1 was still busy {limit}:" in str(caught.value)


def large_model() -> nn.Module:
    """Return a model whose compressed gradients are exchanged by point-to-point messages on Gloo."""
    return nn.Sequential(nn.Linear(FEATURES, 20_000), nn.Linear(20_000, FEATURES), build()).double()


def miss_a_backward(backend: Backend, settings: dict[str, Any], num_completed: int, folder: str) -> tuple[str, float]:
    model = backend.distributed_model(large_model() if "compression" in settings else build(), **settings)
    for _ in range(num_completed):
        compute_loss(model(batch(backend.rank))).backward()
    if backend.rank == 1:
        sleep_until_exists(f"{folder}/0")
        return "", 0.0
    began = time.monotonic()
    try:
        compute_loss(model(batch(backend.rank))).backward()
    except CollectiveTimeoutError as error:
        seconds = time.monotonic() - began
        Path(folder, "0").touch()
        return str(error), seconds
    raise AssertionError("the backward was completed")


@pytest.mark.parametrize(
    ("backend", "settings", "num_completed", "operation"),
    [
        ("ddp", {}, 2, "backward #2"),
        ("ddp", {}, 1, "backward #1"),
        ("ddp", {"find_unused_parameters": True}, 1, "backward #1"),
        ("ddp", {"compression": "bf16"}, 2, "backward #2"),
        ("horovod", {}, 2, "backward #2"),
        pytest.param("horovod", {"compression": "bf16"}, 2, "backward #2", marks=pytest.mark.nightly),
    ],
    ids=["ddp", "ddp, second", "ddp, unused parameters", "ddp, compressed", "horovod", "horovod, compressed"],
)
def test_a_timeout_in_backward_names_the_missing_rank(
    backend: str, settings: dict[str, Any], num_completed: int, operation: str, tmp_path: Path
) -> None:
    with RankGroup(backend, 2, backend_timeout_seconds=TIMEOUT) as group:
        text, seconds = group.run(miss_a_backward, settings, num_completed, str(tmp_path))[0]
    assert text.startswith(f"{operation} timed out after {TIMEOUT:g} s on rank 0. Missing ranks: 1. ")
    # DDP rebuilds its buckets at the end of the first backward pass.
    last = r"last operation: (backward|bucket rebuild) #\d, at test_timeouts.py:\d+: compute_loss"
    assert re.search(rf"^  rank 1: at test_timeouts.py:\d+: time.sleep.*; {last}", text, re.M)
    assert TIMEOUT * 0.9 <= seconds < TIMEOUT + 20


SCRIPT = """
import sys, time, torch, unitrain

with unitrain.init(timeout_seconds=5 if sys.argv[1] == "sleeps" else 60, device="cpu") as backend:
    backend.barrier()
    if backend.rank == 1:
        if sys.argv[1] == "sleeps":
            time.sleep(300)
        print("fault", time.time(), flush=True)
        raise SystemExit("rank 1 gives up") if sys.argv[1] == "exits" else ValueError("rank 1 fails")
    for _ in range(1000):
        backend.allreduce(torch.ones(2))
"""


@pytest.mark.parametrize(
    ("backend", "launcher", "fault"),
    [
        *itertools.product(["ddp"], ["torchrun"], ["raises", "exits", "sleeps"]),
        *itertools.product(["horovod"], ["horovodrun"], ["raises", "exits", "sleeps"]),
        ("horovod", "torchrun", "raises"),
        pytest.param("horovod", "torchrun", "exits", marks=pytest.mark.nightly),
        pytest.param("horovod", "torchrun", "sleeps", marks=pytest.mark.nightly),
        pytest.param("horovod", "mpirun", "raises", marks=needs_mpi),
        pytest.param("ddp", "mpirun", "raises", marks=[needs_mpi, pytest.mark.nightly]),
    ],
)
def test_a_failing_rank_ends_the_job(backend: str, launcher: str, fault: str, tmp_path: Path) -> None:
    script = tmp_path / "faulty.py"
    script.write_text(SCRIPT)
    began = time.monotonic()
    command = [sys.executable, "-m", "unitrain", "launch", "--backend", backend, "--launcher", launcher, "-np", "2"]
    variables = {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    with running_launcher([*command, str(script), fault], variables) as launch:
        output = launch.output()
        ended = time.time()
        assert launch.process.returncode != 0, output
        launch.wait_until_all_exited(15)
    seconds = time.monotonic() - began
    expected = {
        "raises": "ValueError: rank 1 fails",
        "exits": "rank 1 gives up",
        "sleeps": "Missing ranks: 1",
    }[fault]
    assert expected in output, output
    assert seconds < 100, f"{seconds:.0f} s\n{output}"
    if fault != "sleeps":  # ranks must not wait until the collective timeout of 60 s
        (failed_at,) = re.findall(r"fault (\d+\.\d+)", output)
        assert ended - float(failed_at) < 30, f"{ended - float(failed_at):.0f} s\n{output}"


START_SCRIPT = """
import os, signal, sys, time, unitrain

if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    if sys.argv[1] == "is stopped":
        import horovod.torch as hvd
        hvd.init()
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(300)
unitrain.init(timeout_seconds=5, device="cpu")
"""


@needs_mpi
@pytest.mark.parametrize("fault", ["is stopped", pytest.param("sleeps", marks=pytest.mark.nightly)])
def test_initialization_under_mpirun_times_out(fault: str, tmp_path: Path) -> None:
    """Rank 0 waits in a Horovod broadcast or in the initialization of MPI."""
    script = tmp_path / "starts.py"
    script.write_text(START_SCRIPT)
    command = [sys.executable, "-m", "unitrain", "launch", "--launcher", "mpirun", "-np", "2"]
    command += ["--launcher-args", "-mca odls_base_sigkill_timeout 1"]
    with running_launcher([*command, str(script), fault], {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
        assert launch.process.returncode != 0, output
        launch.wait_until_all_exited(15)
    assert "CollectiveTimeoutError: Rank 0 of 2 could not start Horovod within 5 s: another rank has not" in output


@pytest.mark.parametrize("options", [[], pytest.param(["-O"], marks=pytest.mark.nightly)], ids=["python", "python -O"])
def test_ranks_that_never_start_are_reported(options: list[str], tmp_path: Path) -> None:
    """Only rank 0 of two ranks is started."""
    script = tmp_path / "train.py"
    script.write_text("import unitrain; unitrain.init('ddp', device='cpu', timeout_seconds=3)")
    with reserve_port() as reservation:
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(reservation.getsockname()[1]),
        }
        finished = subprocess.run(
            [sys.executable, *options, str(script)],
            env=preloaded(environment.copy() | variables),
            capture_output=True,
            text=True,
            timeout=100,  # importing torch without compiled bytecode is slow
            check=False,
        )
    assert finished.returncode == 1
    assert "CollectiveTimeoutError" in finished.stderr, finished.stderr
    assert "The rendezvous of 2 ranks timed out after 3 s, at 'positions'. Missing: rank 1." in finished.stderr, (
        finished.stderr
    )
