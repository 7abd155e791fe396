"""Optimizer state of any size is sent as tensors, in chunks."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from requirements import needs_mpi
from torch import Tensor, nn

from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")


def create_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    weights = torch.randn(40, 30, generator=generator)
    return {
        "state": {
            0: {"step": torch.tensor(7.0), "exp_avg": weights, "view": weights.t()[::3], "one": weights[:1, 0]},
            1: {"half": weights[0].bfloat16(), "flags": weights[1] > 0, "nothing": torch.empty(0, 3), "history": []},
            2: {"complex": torch.complex(weights[0], weights[1]).conj(), "integers": torch.arange(50)},
        },
        "param_groups": [{"lr": 0.1, "betas": (0.9, torch.tensor(0.99)), "params": [0, 1, 2], "name": None}],
    }


def assert_equal(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert_equal(found[name], value)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert found == wanted


def broadcast_state(backend: Backend, chunk_bytes: int) -> tuple[int, int]:
    """Broadcast a state from rank 0. Return the number of broadcasts, and the number of bytes of the pickled part (0 on
    other ranks)."""
    from unitrain.backends import objects

    objects.CHUNK_BYTES = chunk_bytes
    broadcasts, pickled = 0, 0
    broadcast, pack = backend.broadcast, objects.pack

    def counted(tensor: Tensor, root: int = 0) -> Tensor:
        nonlocal broadcasts
        broadcasts += 1
        assert tensor.numel() <= chunk_bytes
        return broadcast(tensor, root)

    backend.broadcast = counted  # type: ignore[method-assign]
    try:
        sent = create_state() if backend.rank == 0 else {"other": 1}
        received = objects.broadcast_with_tensors(backend, sent)
    finally:
        backend.broadcast = broadcast  # type: ignore[method-assign]
    assert_equal(received, create_state())
    if backend.rank == 0:
        assert received is sent
        pickled = len(pack(objects._extract_tensors(sent, []))[0])
    return broadcasts, pickled


def broadcast_adam_state(backend: Backend) -> None:
    """Load the state of Adam on rank 0 only, and assert that all ranks receive it."""
    from unitrain.backends import objects

    objects.CHUNK_BYTES = 1000
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    for _ in range(3):
        model(torch.randn(4, 20)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(optimizer.state_dict())
    fresh = torch.optim.Adam(model.parameters(), amsgrad=True)
    if backend.rank == 0:
        fresh.load_state_dict(copy.deepcopy(saved))
    backend.distributed_optimizer(fresh, backend.distributed_model(model))
    assert_equal(fresh.state_dict(), saved)


@pytest.fixture(scope="module", params=[("ddp", 1), ("ddp", 3), ("horovod", 1), ("horovod", 2)], ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    backend, size = request.param
    with RankGroup(backend, size) as group:
        yield group


@pytest.mark.parametrize(("chunk_bytes", "least", "most"), [(2**26, 1, 1), (999, 8, 8)])
def test_tensors_are_sent_in_chunks_and_not_pickled(ranks: RankGroup, chunk_bytes: int, least: int, most: int) -> None:
    rank_results = ranks.run(broadcast_state, chunk_bytes)
    assert all(least <= broadcasts <= most for broadcasts, _ in rank_results)
    assert rank_results[0][1] < 2000  # the tensors have more than 7,000 bytes


def test_all_ranks_receive_the_adam_state_of_rank_0(ranks: RankGroup) -> None:
    ranks.run(broadcast_adam_state)


def transfer_gibibytes(backend: Backend) -> None:
    """Transfer more than 2 GiB in one call of each collective. The broadcast also has more than 2^31 elements."""
    from unitrain.backends import objects

    count = 2**31 + 5
    flags = torch.zeros(count, dtype=torch.uint8)
    if backend.rank == 0:
        flags[-1] = flags[2**30] = 7
    flags = backend.broadcast(flags)
    assert (int(flags[-1]), int(flags[2**30]), int(flags.count_nonzero())) == (7, 7, 2)
    del flags
    numbers = torch.full((count // 4 + 1,), float(backend.rank + 1))
    numbers[-1] = backend.rank
    reduced = backend.allreduce(numbers, "sum")
    assert (float(reduced[0]), float(reduced[-1]), float(reduced.min()), float(reduced.max())) == (3.0, 1.0, 1.0, 3.0)
    del reduced
    gathered = backend.allgather(numbers[: 2**28 + backend.rank])
    assert len(gathered) == 2 * 2**28 + 1
    assert bool((gathered[: 2**28] == 1).all())
    assert bool((gathered[2**28 :] == 2).all())
    del gathered, numbers
    moments = {name: torch.full((2**28 + 9,), float(backend.rank + 1)) for name in ("exp_avg", "exp_avg_sq")}
    received = objects.broadcast_with_tensors(backend, {"state": {0: moments}})
    assert all(bool((moment == 1).all()) for moment in received["state"][0].values())


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("backend", "command"),
    [
        ("ddp", []),
        ("horovod", [HOROVODRUN, "-np", "2", "--gloo"]),
        pytest.param("horovod", [HOROVODRUN, "-np", "2", "--mpi"], marks=needs_mpi),
    ],
    ids=["ddp", "horovod over Gloo", "horovod over MPI"],
)
def test_more_than_two_gibibytes_are_transferred(backend: str, command: list[str]) -> None:
    with RankGroup(backend, 2, command=command, backend_timeout_seconds=600) as group:
        group.run(transfer_gibibytes, timeout_seconds=1000)
