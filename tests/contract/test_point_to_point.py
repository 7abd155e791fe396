"""Point-to-point messages on Horovod's process group have the results of Gloo."""

from __future__ import annotations

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

from unitrain.backends.base import Backend
from unitrain.testing import RankGroup

DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int64, torch.uint16,
    torch.bool, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def ring_of_all_dtypes(backend: Backend) -> list[Tensor]:
    rank, size = backend.rank, backend.size
    results = []
    for dtype in DTYPES:
        for count in (1, 7, 100_000):
            own = (torch.arange(count) % 50 + rank).to(dtype)
            received = torch.zeros(count).to(dtype)
            work = dist.isend(own, (rank + 1) % size)
            assert dist.recv(received, (rank - 1) % size) == (rank - 1) % size
            work.wait()
            results.append(received.to(torch.complex128) if dtype.is_complex else received.double())
    return results


def tags_in_another_order(backend: Backend) -> list[Tensor]:
    results = [torch.zeros(tag + 1) for tag in range(4)]
    if backend.rank == 0:
        works = [dist.isend(torch.full((tag + 1,), float(tag)), 1, tag=tag) for tag in range(4)]
    elif backend.rank == 1:
        works = [dist.irecv(results[tag], 0, tag=tag) for tag in (2, 0, 3, 1)]
    else:
        works = []
    for work in works:
        work.wait()
        assert work.is_completed()
    return results


def several_messages_with_one_tag(backend: Backend) -> list[Tensor]:
    results = [torch.zeros(2) for _ in range(50)]
    if backend.rank == 1:
        works = [dist.isend(torch.full((2,), float(turn)), 0) for turn in range(50)]
    elif backend.rank == 0:
        works = [dist.irecv(one, 1) for one in results]
    else:
        works = []
    for work in works:
        work.wait()
    return results


def batched_messages(backend: Backend) -> list[Tensor]:
    rank, size = backend.rank, backend.size
    received = [torch.zeros(3, dtype=torch.int64) for _ in range(size)]
    operations = []
    for peer in range(size):
        if peer != rank:
            operations.append(dist.P2POp(dist.irecv, received[peer], peer, tag=peer))
            operations.append(dist.P2POp(dist.isend, torch.arange(3) + 10 * rank + peer, peer, tag=rank))
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def messages_from_any_rank(backend: Backend) -> list[Tensor]:
    if backend.rank:
        dist.send(torch.tensor([float(backend.rank)]), 0, tag=3)
        return []
    results = []
    for _ in range(backend.size - 1):
        received = torch.zeros(1)
        source = dist.recv(received, tag=3)
        assert received.item() == source
        results.append(received)
    return [torch.cat(results).sort().values]


def messages_in_a_subgroup(backend: Backend) -> list[Tensor]:
    ranks = [0, backend.size - 1]
    group = dist.new_group(ranks)
    received = torch.zeros(2)
    if backend.rank == ranks[0]:
        dist.send(torch.ones(2), ranks[1], group=group)
        dist.recv(received, group=group, group_src=1)
    elif backend.rank == ranks[1]:
        dist.recv(received, ranks[0], group=group)
        dist.send(received + 1, group=group, group_dst=0)
    objects: list[Any] = [{"text": "x" * 1000}, 5] if backend.rank == 0 else [None, None]
    if backend.rank == 0:
        dist.send_object_list(objects, dst=backend.size - 1)
    elif backend.rank == backend.size - 1:
        dist.recv_object_list(objects, src=0)
        assert objects == [{"text": "x" * 1000}, 5]
    return [received]


def messages_during_collectives(backend: Backend) -> list[Tensor]:
    rank, size = backend.rank, backend.size
    results = []
    for turn in range(20):
        total, received = torch.full((1000,), float(rank + turn)), torch.zeros(1000)
        reduction = dist.all_reduce(total, async_op=True)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.full((1000,), float(rank * turn)), (rank + 1) % size),
                dist.P2POp(dist.irecv, received, (rank - 1) % size),
            ]
        )
        for work in (*works, reduction):
            work.wait()
        results += [total, received]
    return results


def pipeline_schedules(backend: Backend) -> list[Tensor]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    results = []
    for schedule in (ScheduleGPipe, Schedule1F1B):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(backend.size)]
        own = layers[backend.rank]
        stage = PipelineStage(own, backend.rank, backend.size, torch.device("cpu"))
        runner = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        inputs, target = torch.randn(8, 6), torch.randn(8, 6)
        losses: list[Tensor] = []
        for _ in range(2):
            if backend.rank == 0 and backend.size == 1:
                runner.step(inputs, target=target, losses=losses)
            elif backend.rank == 0:
                runner.step(inputs)
            elif backend.rank == backend.size - 1:
                runner.step(target=target, losses=losses)
            else:
                runner.step()
        results += [parameter.grad.clone() for parameter in own.parameters()] + [torch.tensor(len(losses))]
    return results


CASES: list[Callable[[Backend], list[Any]]] = [
    ring_of_all_dtypes,
    tags_in_another_order,
    several_messages_with_one_tag,
    batched_messages,
    messages_from_any_rank,
    messages_in_a_subgroup,
    messages_during_collectives,
    pipeline_schedules,
]


@pytest.fixture(scope="module", params=[3, *nightly(2, 4)])
def groups(request: pytest.FixtureRequest) -> Iterator[tuple[RankGroup, RankGroup]]:
    with RankGroup("ddp", request.param) as gloo, RankGroup("horovod", request.param) as horovod:
        yield gloo, horovod


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_messages_on_horovod_equal_those_on_gloo(groups, case) -> None:
    gloo, horovod = groups
    assert_equal(horovod.run(case), gloo.run(case))


@needs_mpi
@pytest.mark.parametrize("size", [2, *nightly(3, 4)])
def test_messages_between_ranks_of_mpirun_equal_those_on_gloo(size: int) -> None:
    command = ["mpirun", "-np", str(size), "--oversubscribe", "--allow-run-as-root"]
    variables = preloaded({"OMPI_MCA_mpi_yield_when_idle": "1"})  # there may be more ranks than cores
    with RankGroup("ddp", size) as gloo, RankGroup("horovod", size, command=command, variables=variables) as horovod:
        for case in CASES:
            assert_equal(horovod.run(case, timeout_seconds=240), gloo.run(case))


def strided_and_empty_tensors(backend: Backend) -> list[Tensor]:
    wide, empty = torch.zeros(4, 2), torch.empty(0)
    empty_column = torch.empty(0, 2)[:, 1]
    assert empty_column.stride() == (2,)
    if backend.rank == 0:
        dist.send((torch.arange(8.0).view(4, 2))[:, 1], 1)
        dist.send(empty, 1)
        dist.send(empty_column, 1)
    else:
        dist.recv(wide[:, 0], 0)
        dist.recv(empty, 0)
        dist.recv(empty_column, 0)
    dist.all_gather([torch.empty(0, 2)[:, 0] for _ in range(backend.size)], empty_column)
    return [wide]


def test_tensors_that_are_not_contiguous_are_received_in_place() -> None:
    """Gloo rejects such tensors, so the results are not compared with Gloo."""
    with RankGroup("horovod", 2) as group:
        _, (wide,) = group.run(strided_and_empty_tensors)
    assert wide.tolist() == [[1.0, 0.0], [3.0, 0.0], [5.0, 0.0], [7.0, 0.0]]


def empty_messages_from_any_rank(backend: Backend) -> list[Any]:
    if backend.rank != 0:
        dist.send(torch.empty(0), 0)
        dist.send(torch.empty(0, 3), 0, tag=1)
        dist.send(torch.tensor([5.0]), 0, tag=1)
        return []
    sources = sorted(dist.recv(torch.empty(0), None) for _ in range(backend.size - 1))
    work = dist.irecv(torch.empty(0, 3), None, tag=1)
    assert work is not None
    work.wait()
    received = torch.zeros(1)
    dist.recv(received, work._source_rank(), tag=1)  # the next message of the same rank
    return [sources, received.item()]


def test_empty_tensors_are_received_from_any_rank() -> None:
    """Gloo cannot receive empty tensors from any rank, so the results are not compared with Gloo."""
    with RankGroup("horovod", 2) as group:
        assert group.run(empty_messages_from_any_rank)[0] == [[1], 5.0]


def large_message(backend: Backend) -> bool:
    received = torch.zeros(2**31 + 10, dtype=torch.uint8)
    if backend.rank == 0:
        received[-1] = 7
        dist.send(received, 1)
    else:
        dist.recv(received, 0)
    return int(received[-1]) == 7 and int(received.max()) == 7


@pytest.mark.nightly
def test_a_message_of_more_than_2_gib_is_received() -> None:
    with RankGroup("horovod", 2) as group:
        assert group.run(large_message) == [True, True]


def receive_without_send(backend: Backend) -> str:
    if backend.rank == 1:
        work = dist.irecv(torch.zeros(3), 0, tag=4)
        try:
            work.wait(timedelta(seconds=0.5))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    time.sleep(1)
    return ""


def test_a_receive_that_times_out_names_the_missing_rank() -> None:
    with RankGroup("horovod", 2) as group:
        _, text = group.run(receive_without_send)
    assert text.startswith("GroupTimeoutError: Receiving 12 bytes with tag 4 from rank 0 timed out after 0.5 s")


def sparse_message(backend: Backend) -> str:
    try:
        dist.send(torch.eye(3).to_sparse(), 1 - backend.rank)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_sparse_tensors_are_rejected() -> None:
    with RankGroup("horovod", 2) as group:
        for text in group.run(sparse_message):
            assert "takes dense tensors" in text


def group_with_one_unconnected_rank(backend: Backend) -> tuple[float, list[str]]:
    """Send messages in a group in which only the last rank has failed to connect."""
    from unitrain.backends.horovod import point_to_point

    create, warnings = point_to_point.create_gloo_group, list[str]()
    transports = []  # keep the last rank's connections open while the other ranks connect to it

    def connect_and_fail(*arguments: Any, connects: bool = True, **location: Any) -> Any:
        transport = create(*arguments, connects=connects, **location)
        transports.append(transport)
        if connects and backend.rank == backend.size - 1:
            raise RuntimeError("Connection refused\nat a line of Gloo")
        return transport

    def record(message: str, *arguments: Any) -> None:
        warnings.append(message % arguments)

    point_to_point.create_gloo_group, point_to_point._LOGGER.warning = connect_and_fail, record  # type: ignore[assignment,method-assign]
    try:
        group = dist.new_group(list(range(backend.size)), timeout=timedelta(seconds=20))
    finally:
        point_to_point.create_gloo_group = create
        del point_to_point._LOGGER.warning
    transports.clear()
    received = torch.zeros(1)
    work = dist.isend(torch.tensor([float(backend.rank)]), (backend.rank + 1) % backend.size, group=group)
    dist.recv(received, (backend.rank - 1) % backend.size, group=group)
    work.wait()
    dist.destroy_process_group(group)
    return received.item(), warnings


def test_all_ranks_use_the_same_transport_if_one_rank_cannot_connect() -> None:
    with RankGroup("horovod", 3) as group:
        results = group.run(group_with_one_unconnected_rank)
    assert [received for received, _ in results] == [2.0, 0.0, 1.0]
    assert [len(warnings) for _, warnings in results] == [1, 0, 0]
    assert "cannot connect to send messages: rank 2: Connection refused. Collectives are not" in results[0][1][0]
