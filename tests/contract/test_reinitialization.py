"""A process can start a backend again after `shutdown`, the same or another one, but not before."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from preload import preloaded
from requirements import needs_mpi

import unitrain
from unitrain.backends.base import Backend
from unitrain.bootstrap import environment
from unitrain.errors import ConfigError
from unitrain.testing import RankGroup
from unitrain.testing.models import batch, build, compute_loss

BIN = Path(sys.executable).parent
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"]
HOROVODRUN = [str(BIN / "horovodrun"), "-np", "2", "--gloo"]
MPIRUN = ["mpirun", "-np", "2", "--oversubscribe"]


def sums(backend: Backend) -> float:
    """Run a collective and reduce gradients, as a training run does."""
    model = build()
    compute_loss(backend.distributed_model(model)(batch(backend.rank))).backward()
    return float(backend.allreduce(torch.tensor(float(backend.rank)), "sum"))


def start_second_backend(backend: Backend) -> str:
    try:
        unitrain.init(backend.name, device="cpu")
    except ConfigError as error:
        backend.barrier()  # the first backend still works
        return str(error)
    raise AssertionError("two backends were started")


def start_repeatedly(backend: Backend, names: Sequence[str]) -> list[float]:
    backend.shutdown()
    found = []
    for name in names:
        with unitrain.init(name, device="cpu", timeout_seconds=30) as later:
            backend.shutdown()  # a second call, which must not end the later backend
            found.append(sums(later))
    return found


@pytest.mark.parametrize(
    ("backend", "command"),
    [
        ("ddp", []),
        ("ddp", TORCHRUN),
        pytest.param("ddp", HOROVODRUN, marks=pytest.mark.nightly),
        pytest.param("horovod", TORCHRUN, marks=pytest.mark.nightly),
        ("horovod", HOROVODRUN),
        pytest.param("horovod", MPIRUN, marks=needs_mpi),
    ],
    ids=["ddp", "ddp-torchrun", "ddp-horovodrun", "horovod-torchrun", "horovod-horovodrun", "horovod-mpirun"],
)
def test_ranks_can_start_a_backend_again_after_shutdown(backend: str, command: list[str]) -> None:
    environment.export_defaults({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    names = (
        [backend] * 3 if command == MPIRUN else ["horovod", "ddp", backend]
    )  # mpirun sets no rendezvous address for ddp
    with RankGroup(backend, 2, command=command, variables=preloaded({}) if command else {}) as group:
        for rank_results in group.run(start_second_backend):
            assert rank_results == (
                "This process already has a process group, from an earlier unitrain.init() or init_process_group(). "
                "Use that one, or end it first: backend.shutdown() or "
                "torch.distributed.destroy_process_group()"
            )
        assert group.run(sums) == [1.0, 1.0]
        assert group.run(start_repeatedly, names) == [[1.0] * 3] * 2


def test_local_backend_can_be_started_again_after_shutdown() -> None:
    with unitrain.init("local") as backend:
        assert start_second_backend(backend) == (
            "This process already has a backend, from an earlier unitrain.init(). "
            "Use that one, or end it first: backend.shutdown()"
        )
    with unitrain.init("local") as backend:
        assert sums(backend) == 0.0
    forgotten = unitrain.init("local")
    del forgotten
    unitrain.init("local").shutdown()
