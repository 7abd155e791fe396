"""Runs of hundreds of steps with logical ranks are bit-identical on all backends, transports and numbers of processes.

The runs combine bf16, accumulation, clipping, an uneven last batch, dropout, BatchNorm, AdamW and averaged weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from groups import nightly
from logical_ranks_training import Digests, train
from preload import preloaded
from requirements import needs_mpi

from unitrain.backends.base import Backend
from unitrain.bootstrap import environment
from unitrain.testing import RankGroup

HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")
GROUPS = [
    ("ddp", 3, "gloo"),
    pytest.param(("horovod", 2, "mpi"), marks=[needs_mpi, pytest.mark.nightly]),
    *nightly(("ddp", 2, "gloo"), ("ddp", 4, "gloo"), ("horovod", 2, "gloo"), ("horovod", 3, "gloo")),
    pytest.param(("horovod", 4, "mpi"), marks=[needs_mpi, pytest.mark.nightly]),
]
NUM_STEPS = nightly(200, 1000)


def train_long(backend: Backend, steps: int) -> tuple[str, Digests]:
    """Train, and return the transport and the digests of all results."""
    torch.set_num_threads(1)
    return backend.transport, train(backend, "all", max_steps=steps)


def train_compiled(backend: Backend) -> Digests:
    """Train on batches of equal size, and return the digests of the trained state."""
    torch.set_num_threads(1)
    digests = train(backend, "equal", compile=True)
    return {name: digests[name] for name in ("parameters", "buffers", "state", "average")}


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: "-".join(map(str, group)))
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    backend, size, transport = request.param
    command = []
    if transport == "mpi":
        environment.export_defaults(
            {
                "OMPI_ALLOW_RUN_AS_ROOT": "1",
                "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                "OMPI_MCA_mpi_yield_when_idle": "1",  # there may be more ranks than cores
            }
        )
        command = [HOROVODRUN, "-np", str(size), "--mpi"]
    variables = preloaded({}) if command else None
    with RankGroup(backend, size, command=command, variables=variables) as started:
        started.transport = transport  # type: ignore[attr-defined]
        yield started


@pytest.fixture(scope="module")
def alone() -> Iterator[RankGroup]:
    with RankGroup("local", 1) as started:
        yield started


@pytest.fixture(scope="module")
def expected() -> dict[int, Digests]:
    """Cache of the digests of one process, by number of steps."""
    return {}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("steps", NUM_STEPS)
def test_long_runs_are_bit_identical_to_one_process(
    group: RankGroup, alone: RankGroup, expected: dict[int, Digests], steps: int
) -> None:
    if steps not in expected:
        ((_, expected[steps]),) = alone.run(train_long, steps, timeout_seconds=900)
    for transport, digests in group.run(train_long, steps, timeout_seconds=1200):
        assert transport == group.transport  # type: ignore[attr-defined]
        assert digests == expected[steps]


@pytest.mark.nightly
def test_compiled_training_is_bit_identical_to_one_process(alone: RankGroup) -> None:
    (expected,) = alone.run(train_compiled, timeout_seconds=240)
    with RankGroup("ddp", 2) as group:
        assert group.run(train_compiled, timeout_seconds=280) == [expected] * 2
