"""On Horovod's process group, the tools of torch.distributed have the same results as on Gloo."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import assert_equal
from groups import ci, nightly
from preload import preloaded
from requirements import needs_mpi
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from unitrain.backends.base import Backend
from unitrain.bootstrap.network import reserve_port
from unitrain.errors import CollectiveTimeoutError
from unitrain.testing import RankGroup
from unitrain.testing.models import batch, build, compute_loss


def _result(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def plain_ddp(backend: Backend) -> list[Tensor]:
    model = DistributedDataParallel(build(seed=backend.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        compute_loss(model(batch(backend.rank, step))).backward()
        optimizer.step()
    return _result(model)


def zero_redundancy_optimizer(backend: Backend) -> list[Tensor]:
    model = DistributedDataParallel(build())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        compute_loss(model(batch(backend.rank, step))).backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    if backend.rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    return _result(model)


def join_with_uneven_inputs(backend: Backend) -> list[Tensor]:
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + 2 * backend.rank):
            optimizer.zero_grad()
            compute_loss(model(batch(backend.rank, step))).backward()
            optimizer.step()
    return _result(model)


def power_sgd_hook(backend: Backend) -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    model = DistributedDataParallel(build().float())
    model.register_comm_hook(
        power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2), power.powerSGD_hook
    )
    for step in range(4):
        model.zero_grad()
        compute_loss(model(batch(backend.rank, step).float()).double()).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def post_local_sgd(backend: Backend) -> list[Tensor]:
    """Average gradients over all ranks at first, then within groups of two ranks. Then also average the models every 2
    steps."""
    ranks = [[rank for rank in (first, first + 1) if rank < backend.size] for first in range(0, backend.size, 2)]
    groups = [dist.new_group(members) for members in ranks]
    model = DistributedDataParallel(build(seed=backend.rank))
    state = PostLocalSGDState(None, groups[backend.rank // 2], start_localSGD_iter=2)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    results = []
    for step in range(7):  # models are averaged after steps 2, 4 and 6
        optimizer.zero_grad()
        compute_loss(model(batch(backend.rank, step))).backward()
        optimizer.step()
        results += _result(model)
    return results


def object_collectives(backend: Backend) -> list[Any]:
    rank, size = backend.rank, backend.size
    own = {"rank": rank, "text": "x" * (100 * rank)}
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, own)
    received: list[Any] = [own, "second"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(received, src=size - 1)
    at_root: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(own, at_root, dst=0)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, [f"for {r}" for r in range(size)] if rank == 0 else None, src=0)
    return [gathered, received, at_root, scattered]


def tensor_collectives(backend: Backend) -> list[Tensor]:
    rank, size = backend.rank, backend.size
    results: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        own = torch.arange(2 * size).to(dtype) + rank
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            results.append(own.clone())
            dist.all_reduce(results[-1], op)
        results.append(own.clone() if rank == 0 else torch.zeros_like(own))
        dist.broadcast(results[-1], 0)
        parts = [torch.zeros_like(own) for _ in range(size)]
        dist.all_gather(parts, own)
        results += parts
        results.append(own.clone())
        dist.reduce(results[-1], dst=size - 1)
        if rank != size - 1:
            results.pop()  # on other ranks, the result of reduce is undefined
        at_root = [torch.zeros_like(own) for _ in range(size)] if rank == 0 else None
        dist.gather(own, at_root, dst=0)
        results += at_root or []
        results.append(torch.zeros_like(own))
        dist.scatter(results[-1], [own + r for r in range(size)] if rank == 0 else None, src=0)
        exchanged = torch.zeros_like(own)
        dist.all_to_all_single(exchanged, own)
        results.append(exchanged)
    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    dist.barrier()
    return results


def uneven_exchange(backend: Backend) -> list[Tensor]:
    """Exchange different numbers of rows between ranks, including zero, like tokens that are routed to experts."""
    rank, size = backend.rank, backend.size
    results = []
    for rows_for in (lambda source, target: source + 2 * target, lambda source, target: 3 * source, lambda *_: 0):
        sent = [rows_for(rank, target) for target in range(size)]
        received = [rows_for(source, rank) for source in range(size)]
        own = torch.arange(3 * sum(sent)).view(-1, 3) + 100 * rank
        results.append(torch.zeros(sum(received), 3, dtype=torch.int64))
        dist.all_to_all_single(results[-1], own, received, sent)
    return results


def a_second_group_of_all_ranks(backend: Backend) -> list[Tensor]:
    group = dist.new_group()
    results = []
    for turn in range(40):  # more operations than the names that Horovod reuses for a shape, on both groups at once
        first = torch.full((3,), float(backend.rank + turn))
        second = first * 2
        works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, group=group, async_op=True)]
        for work in works:
            work.wait()
        results += [first, second]
    return results


def functional_collectives(backend: Backend) -> list[Tensor]:
    import torch.distributed._functional_collectives as functional

    own = torch.arange(2.0 * backend.size) + backend.rank
    group = dist.group.WORLD
    return [
        functional.all_reduce(own, "sum", group) + 0,
        functional.all_gather_tensor(own, 0, group) + 0,
        functional.reduce_scatter_tensor(own, "sum", 0, group) + 0,
    ]


def compiled_functional_collectives(backend: Backend) -> list[Tensor]:
    import torch.distributed._functional_collectives as functional

    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name

    def compute(own: Tensor) -> tuple[Tensor, ...]:
        total = functional.all_reduce(own.sin(), "sum", group)
        gathered = functional.all_gather_tensor(total * 2, 0, group)
        return total + 1, gathered.cos(), functional.reduce_scatter_tensor(gathered + own[0], "sum", 0, group)

    compiled = torch.compile(compute, backend="aot_eager", fullgraph=True)
    return [*compiled(torch.arange(4.0) + backend.rank), *compiled(torch.arange(4.0) - backend.rank)]


CASES: list[Callable[[Backend], list[Any]]] = [
    plain_ddp,
    zero_redundancy_optimizer,
    join_with_uneven_inputs,
    power_sgd_hook,
    post_local_sgd,
    object_collectives,
    tensor_collectives,
    uneven_exchange,
    a_second_group_of_all_ranks,
    functional_collectives,
    *ci(compiled_functional_collectives),
]


@pytest.fixture(scope="module", params=[1, 3, *nightly(2)])
def groups(request: pytest.FixtureRequest) -> Iterator[tuple[RankGroup, RankGroup]]:
    with RankGroup("ddp", request.param) as gloo, RankGroup("horovod", request.param) as horovod:
        yield gloo, horovod


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_collectives_on_horovod_equal_those_on_gloo(groups, case) -> None:
    gloo, horovod = groups
    assert_equal(horovod.run(case), gloo.run(case))


def reduce_views(backend: Backend) -> list[Tensor]:
    wide = torch.stack([torch.arange(4.0) + backend.rank] * 2, dim=1)
    dist.all_reduce(wide[:, 0])
    dist.broadcast(wide[:, 1], 1)
    return [wide]


def test_views_that_are_not_contiguous_are_reduced_in_place() -> None:
    """Gloo reduces the memory of such views as if they were contiguous, so the results are not compared with Gloo."""
    with RankGroup("horovod", 2) as group:
        for (wide,) in group.run(reduce_views):
            assert wide.tolist() == [[1.0, 1.0], [3.0, 2.0], [5.0, 3.0], [7.0, 4.0]]


def wait_with_timeout(backend: Backend, folder: str) -> tuple[str, list[float]]:
    """Rank 0 starts the operation after the wait of rank 1 has timed out."""
    waited = Path(folder) / "waited"
    backend.barrier()
    if backend.rank == 0:
        deadline = time.monotonic() + 30
        while not waited.exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    own = torch.ones(2)
    work = dist.all_reduce(own, async_op=True)
    message_text = ""
    if backend.rank == 1:
        try:
            work.wait(timedelta(seconds=0.3))
        except CollectiveTimeoutError as error:
            message_text = str(error)
        waited.touch()
    work.wait()
    return message_text, own.tolist()


def test_wait_with_a_timeout_raises_and_may_be_repeated(tmp_path: Path) -> None:
    with RankGroup("horovod", 2) as group:
        (_, first), (message_text, second) = group.run(wait_with_timeout, str(tmp_path))
    assert "is not complete after 0.3 s" in message_text
    assert first == second == [2.0, 2.0]


def group_in_another_order(backend: Backend) -> str:
    try:
        dist.new_group([1, 0], sort_ranks=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_groups_with_ranks_in_another_order_raise_unsupported_error() -> None:
    with RankGroup("horovod", 2) as group:
        for text in group.run(group_in_another_order):
            assert text.startswith("UnsupportedError: A group of the ranks [1, 0] was requested, but the ranks of a ")


SCRIPT = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import unitrain

unitrain.register_process_group()
dist.init_process_group("horovod")

torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.full((2, 4), float(dist.get_rank() + step))).sum().backward()
    optimizer.step()
total = torch.ones(1)
dist.all_reduce(total)
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as file:
    file.write(f"{dist.get_backend()} {int(total)} {[p.tolist() for p in model.parameters()]}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "launcher",
    [
        "torchrun --standalone --nproc-per-node 2 --no-python",
        "horovodrun --gloo -np 2",
        pytest.param("horovodrun --mpi -np 2", marks=[needs_mpi, pytest.mark.nightly]),
        # The documentation describes this way to start ddp under mpirun.
        pytest.param("mpirun -np 2 --oversubscribe -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT={port}", marks=needs_mpi),
    ],
    ids=["torchrun", "horovodrun --gloo", "horovodrun --mpi", "mpirun with an address"],
)
def test_a_ddp_script_runs_on_the_horovod_process_group(launcher: str, tmp_path: Path) -> None:
    script = tmp_path / "plain_ddp.py"
    script.write_text(SCRIPT)
    with reserve_port() as reservation:
        program, *options = launcher.format(port=reservation.getsockname()[1]).split()
        program_path = Path(sys.executable).with_name(program)
        command = [
            str(program_path) if program_path.exists() else program,
            *options,
            sys.executable,
            str(script),
            str(tmp_path),
        ]
        subprocess.run(command, env=preloaded(_environment()), check=True, timeout=120)
    results = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert results[0].startswith("horovod 2 [")
    assert results[0] == results[1]


def _environment() -> dict[str, str]:
    from unitrain.bootstrap import environment

    return environment.copy() | {
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
