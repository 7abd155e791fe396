"""Collectives in subgroups of Horovod's process group give the same results as with Gloo."""

from __future__ import annotations

import random
import resource
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import assert_equal
from groups import nightly
from preload import preloaded
from requirements import needs_mpi
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import unitrain
from unitrain.backends.base import Backend
from unitrain.errors import UnsupportedError
from unitrain.testing import RankGroup
from unitrain.testing.models import batch, build, compute_loss


def _run_collectives(group: dist.ProcessGroup, ranks: list[int]) -> list[Tensor]:
    """Run collectives in `group`, which contains the global `ranks`, and return their results."""
    rank, size = ranks.index(dist.get_rank()), len(ranks)
    own = torch.arange(2.0 * size) + 10 * dist.get_rank()
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        results.append(own.clone())
        dist.all_reduce(results[-1], op, group=group)
    for root in ranks:
        results.append(own.clone())
        dist.broadcast(results[-1], root, group=group)
    parts = [torch.zeros_like(own) for _ in ranks]
    dist.all_gather(parts, own, group=group)
    results += parts
    results.append(torch.zeros(2))
    dist.reduce_scatter(results[-1], list(own.view(size, 2)), group=group)
    results.append(torch.zeros_like(own))
    dist.all_to_all_single(results[-1], own, group=group)
    results.append(torch.zeros(2))
    dist.scatter(results[-1], list(own.view(size, 2)) if rank == size - 1 else None, src=ranks[-1], group=group)
    gathered = [torch.zeros_like(own) for _ in ranks] if rank == 0 else None
    dist.gather(own, gathered, dst=ranks[0], group=group)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": dist.get_rank()}, group=group)
    results.append(torch.tensor([one["rank"] for one in objects]))
    dist.barrier(group=group)
    return results + (gathered or [])


def error_of_a_horovod_group_with_a_gloo_default_group(backend: Backend) -> list[str]:
    unitrain.register_process_group()
    with pytest.raises(UnsupportedError) as caught:
        dist.new_group([0, 1], backend="horovod")
    return [str(caught.value)]


def test_a_horovod_group_requires_a_horovod_default_group() -> None:
    with RankGroup("ddp", 2) as group:
        for (message,) in group.run(error_of_a_horovod_group_with_a_gloo_default_group):
            assert "the default group has the backend 'gloo', which does not start Horovod" in message


def overlapping_groups(backend: Backend) -> list[Tensor]:
    rank, size = backend.rank, backend.size
    members = [sorted({one, (one + 1) % size}) for one in range(size)] + [[one] for one in range(size)]
    groups = [dist.new_group(ranks) for ranks in members]
    results = []
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            assert dist.get_process_group_ranks(group) == ranks
            results += _run_collectives(group, ranks)
    works = []
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            results.append(torch.full((3,), float(rank)))
            works.append(dist.all_reduce(results[-1], group=group, async_op=True))
    results.append(torch.ones(2) * rank)
    dist.all_reduce(results[-1])
    for work in works:
        work.wait()
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)
    return results


def groups_created_by_their_members(backend: Backend) -> list[Tensor]:
    ranks = list(range(backend.size - 1))
    results = []
    for turn in range(5):
        if backend.rank in ranks:
            group = dist.new_group(ranks, use_local_synchronization=True)
            results.append(torch.full((2,), float(backend.rank + turn)))
            dist.all_reduce(results[-1], group=group)
            dist.destroy_process_group(group)
    dist.barrier()
    return results


def two_groups_of_the_same_ranks(backend: Backend) -> list[Tensor]:
    ranks = list(range(1, backend.size))
    first, second = dist.new_group(ranks), dist.new_group(ranks)
    results = []
    if backend.rank in ranks:
        for turn in range(20):
            for group in (first, second):
                results.append(torch.full((3,), float(backend.rank + turn)))
                dist.all_reduce(results[-1], group=group, async_op=True).wait()
        dist.destroy_process_group(first)
        results += _run_collectives(second, ranks)
        dist.destroy_process_group(second)
    dist.barrier()
    return results


def one_group_per_thread(backend: Backend) -> list[Tensor]:
    groups = [dist.new_group() for _ in range(2)] + [dist.new_group([0, backend.size - 1]) for _ in range(2)]
    groups = [group for group in groups if group is not dist.GroupMember.NON_GROUP_MEMBER]
    totals = [torch.zeros(5) for _ in groups]
    errors = []

    def reduce_repeatedly(group: dist.ProcessGroup, total: Tensor) -> None:
        try:
            for turn in range(30):
                own = torch.full((5,), float(backend.rank + turn))
                dist.all_reduce(own, group=group)
                total += own
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=reduce_repeatedly, args=pair) for pair in zip(groups, totals, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return totals


def groups_with_idle_ranks(backend: Backend) -> list[Tensor]:
    """Use overlapping groups and a group of all ranks, in random order. Each rank pauses at different times, so that
    every rank sometimes waits for other ranks."""
    rank, size = backend.rank, backend.size
    members = [sorted({one, (one + 1) % size}) for one in range(size)] + [list(range(size))]
    groups = [dist.new_group(ranks) for ranks in members]
    order, pauses, results = random.Random(0), random.Random(rank), []
    for turn in range(150):
        index = order.randrange(len(groups))
        if rank in members[index]:
            time.sleep(pauses.choice((0, 0, 0, 0.001, 0.007)))
            results.append(torch.full((turn % 5 + 1,), float(rank + turn)))
            works = [dist.all_reduce(results[-1], group=groups[index], async_op=True)]
            if turn % 3 == 0:  # a second pending operation
                results.append(torch.full((2,), float(rank)))
                works.append(dist.all_reduce(results[-1], group=groups[index], async_op=True))
            for work in works:
                work.wait()
    for group, ranks in zip(groups, members, strict=True):
        if rank in ranks:
            dist.destroy_process_group(group)
    return results


def one_dimensional_mesh(backend: Backend) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (backend.size,), mesh_dim_names=("data",))
    return _run_collectives(mesh.get_group("data"), list(range(backend.size)))


def sharded_model(backend: Backend) -> list[Tensor]:
    model = build(seed=1).float()
    for layer in model.children():
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        compute_loss(model(batch(backend.rank, step).float()).double()).backward()
        optimizer.step()
    return [parameter.full_tensor() for parameter in model.parameters()]


def state_from_rank_zero(backend: Backend) -> list[Tensor]:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    model = build(seed=backend.rank).float()
    fully_shard(model)
    state = build(seed=7).float().state_dict() if backend.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return [parameter.full_tensor() for parameter in model.parameters()]


def asynchronous_checkpoint(backend: Backend, folder: str) -> list[Tensor]:
    import torch.distributed.checkpoint as dcp

    model = build(seed=3).float()
    fully_shard(model)
    expected = [parameter.full_tensor().clone() for parameter in model.parameters()]
    dcp.async_save({"model": model.state_dict()}, checkpoint_id=folder).result()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    loaded = [parameter.full_tensor() for parameter in model.parameters()]
    for one, other in zip(loaded, expected, strict=True):
        assert torch.equal(one, other)
    return loaded


def lists_of_tensors(backend: Backend) -> list[Tensor]:
    rank, size = backend.rank, backend.size
    received = [torch.zeros(3) for source in range(size)]
    dist.all_to_all(received, [torch.full((3,), 10.0 * rank + target) for target in range(size)])
    own = [torch.arange(3.0) + rank, torch.ones(2) * rank]
    gathered = [[torch.zeros_like(one) for one in own] for _ in range(size)]
    dist.all_gather_coalesced(gathered, own)
    future = dist.all_gather_coalesced(gathered, [one + 1 for one in own], async_op=True)
    for part, one in zip(future.wait(), gathered, strict=True):
        assert [tensor.data_ptr() for tensor in part] == [tensor.data_ptr() for tensor in one]
    leaf = torch.ones(4, requires_grad=True)
    from torch.distributed.nn.functional import all_gather

    (sum(part.sum() * (number + 1) for number, part in enumerate(all_gather(leaf * (rank + 1)))) ** 2).backward()
    return [*received, *(one for part in gathered for one in part), leaf.grad]


CASES: list[Callable[[Backend], list[Any]]] = [
    overlapping_groups,
    two_groups_of_the_same_ranks,
    one_group_per_thread,
    groups_with_idle_ranks,
    one_dimensional_mesh,
    sharded_model,
    state_from_rank_zero,
    lists_of_tensors,
    groups_created_by_their_members,  # run last, because afterwards torch gives new groups different names on each rank
]


@pytest.fixture(scope="module", params=[3, *nightly(2, 4)])
def groups(request: pytest.FixtureRequest) -> Iterator[tuple[RankGroup, RankGroup]]:
    with RankGroup("ddp", request.param) as gloo, RankGroup("horovod", request.param) as horovod:
        yield gloo, horovod


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_subgroups_on_horovod_equal_those_on_gloo(groups, case) -> None:
    gloo, horovod = groups
    assert_equal(horovod.run(case), gloo.run(case))


def test_a_sharded_model_is_saved_asynchronously(groups, tmp_path) -> None:
    gloo, horovod = groups
    assert_equal(
        horovod.run(asynchronous_checkpoint, str(tmp_path / "horovod")),
        gloo.run(asynchronous_checkpoint, str(tmp_path / "gloo")),
    )


def mesh_of_two_dimensions(backend: Backend) -> list[Tensor]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, backend.size // 2), mesh_dim_names=("data", "tensor"))
    results = []
    for name in ("data", "tensor"):
        group = mesh.get_group(name)
        results += _run_collectives(group, dist.get_process_group_ranks(group))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        inputs = torch.randn(5, 8, generator=torch.Generator().manual_seed(step + 100 * mesh.get_local_rank("data")))
        model(inputs).square().sum().backward()
        optimizer.step()
    return [*results, *(parameter.full_tensor() for parameter in model.parameters())]


@pytest.mark.parametrize("size", [2, *nightly(4)])
def test_a_mesh_of_two_dimensions_has_the_results_of_gloo(size: int) -> None:
    with RankGroup("ddp", size) as gloo, RankGroup("horovod", size) as horovod:
        assert_equal(horovod.run(mesh_of_two_dimensions), gloo.run(mesh_of_two_dimensions))


@needs_mpi
@pytest.mark.parametrize("size", [2, *nightly(3, 4)])
def test_subgroups_over_mpi_equal_those_on_gloo(size: int) -> None:
    command = ["mpirun", "-np", str(size), "--oversubscribe", "--allow-run-as-root"]
    variables = preloaded({"OMPI_MCA_mpi_yield_when_idle": "1"})  # there may be more ranks than cores
    cases = [
        overlapping_groups,
        two_groups_of_the_same_ranks,
        one_group_per_thread,
        groups_with_idle_ranks,
        groups_created_by_their_members,
    ]
    with RankGroup("ddp", size) as gloo, RankGroup("horovod", size, command=command, variables=variables) as horovod:
        for case in cases:
            assert_equal(horovod.run(case, timeout_seconds=240), gloo.run(case))


def counts_of_process_sets(backend: Backend) -> list[int]:
    from horovod.torch.mpi_ops import _basics

    counts = [_basics.MPI_LIB_CTYPES.horovod_number_of_process_sets()]
    backend.barrier()
    for _ in range(3):
        group = dist.new_group([0, 1])
        if backend.rank < 2:
            dist.all_reduce(torch.ones(1), group=group)
        backend.barrier()
        counts.append(_basics.MPI_LIB_CTYPES.horovod_number_of_process_sets())
        backend.barrier()  # wait until all ranks have counted
        if backend.rank < 2:
            dist.destroy_process_group(group)
        deadline = time.monotonic() + 30
        while _basics.MPI_LIB_CTYPES.horovod_number_of_process_sets() > counts[0] and time.monotonic() < deadline:
            time.sleep(0.01)
        counts.append(_basics.MPI_LIB_CTYPES.horovod_number_of_process_sets())
        backend.barrier()
    return counts


def resources_of_failed_groups(backend: Backend) -> list[int]:
    """Return the number of process sets and the number of threads after each of two failed attempts to create a
    group."""
    from horovod.torch.mpi_ops import _basics

    from unitrain.backends.horovod import process_group

    counts = []
    for _ in range(2):
        if backend.rank < 2:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(process_group, "PointToPoint", no_sockets)
                with pytest.raises(RuntimeError, match="no sockets"):
                    dist.new_group([0, 1], use_local_synchronization=True)
        deadline = time.monotonic() + 30
        while _basics.MPI_LIB_CTYPES.horovod_number_of_process_sets() > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        backend.barrier()
        counts.append(_basics.MPI_LIB_CTYPES.horovod_number_of_process_sets())
        counts.append(sum(thread.name == "unitrain-horovod" for thread in threading.enumerate()))
        backend.barrier()  # wait until all ranks have counted
    return counts


def no_sockets(*_: Any) -> None:
    raise RuntimeError("no sockets")


def test_destroying_a_group_removes_its_process_set_on_all_ranks() -> None:
    with RankGroup("horovod", 3) as group:
        assert group.run(resources_of_failed_groups) == [[1, 1, 1, 1]] * 3
        assert group.run(counts_of_process_sets) == [[1, 2, 1, 2, 1, 2, 1]] * 3


def wakeups_of_idle_ranks(backend: Backend) -> list[float]:
    """Return how often per second the threads of this process wake up, without a group and with an idle group.

    If other processes use the cores, the threads wake up less often. Therefore, this function returns the maximum of
    several intervals without a group, and the minimum of several intervals with a group.
    """
    rates = []
    for has_group in (False, True):
        group = dist.new_group([0, 1]) if has_group else None
        if group is not None and backend.rank < 2:
            dist.all_reduce(torch.ones(1), group=group)
        backend.barrier()
        time.sleep(0.2)
        measured = []
        for _ in range(3):
            before, began = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw, time.monotonic()
            time.sleep(0.4)
            wakeups = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
            measured.append(wakeups / (time.monotonic() - began))
        rates.append(min(measured) if has_group else max(measured))
        backend.barrier()
        if has_group and backend.rank < 2:
            dist.destroy_process_group(group)
    return rates


def test_threads_of_an_idle_group_do_not_wake_up_more_often() -> None:
    """If an idle group kept Horovod's cycle time of 0.5 ms instead of the idle cycle time of 5 ms, its threads would
    wake up ten times as often."""
    with RankGroup("horovod", 3) as group:
        for without, with_group in group.run(wakeups_of_idle_ranks):
            assert with_group < 2 * without + 100


def sum_of_ranks(backend: Backend) -> float:
    value = torch.tensor(float(backend.rank))
    dist.all_reduce(value)
    return value.item()


def incomplete_group(backend: Backend) -> str:
    if backend.rank == 0:
        try:
            dist.new_group([0, 2], timeout=timedelta(seconds=1), use_local_synchronization=True)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def communicate_in_groups_with_different_names(backend: Backend) -> list[float]:
    """Communicate in a group of all ranks and a group of two ranks. torch's names of these groups differ between the
    ranks."""
    results = []
    for ranks in (None, [0, 2]):
        group = dist.new_group(ranks)
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            value = torch.tensor(float(backend.rank))
            dist.all_reduce(value, group=group)
            results.append(value.item())
    if backend.rank != 1:
        other = 2 - backend.rank
        value = torch.zeros(1)
        works = [dist.isend(torch.tensor([10.0 + backend.rank]), other, group), dist.irecv(value, other, group)]
        for work in works:
            work.wait()
        results.append(value.item())
    return results


def test_error_names_a_member_that_does_not_create_its_group() -> None:
    with RankGroup("horovod", 3) as group:
        first, *_ = group.run(incomplete_group)
        assert first.startswith("GroupTimeoutError: The creation of a group of the ranks [0, 2] timed out after 1 s")
        assert "Missing: rank 2." in first
        assert group.run(sum_of_ranks) == [3.0] * 3
        assert group.run(communicate_in_groups_with_different_names) == [[3.0, 2.0, 12.0], [3.0], [3.0, 2.0, 10.0]]
