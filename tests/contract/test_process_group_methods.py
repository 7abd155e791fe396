"""Direct calls of the methods of a process group have equal results on Gloo and on Horovod. The cases cover overloads,
argument checks, results of futures, sparse tensors and the monitored barrier."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import nightly
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from unitrain.backends.base import Backend
from unitrain.errors import CollectiveArgumentError, CollectiveMismatchError, CollectiveTimeoutError
from unitrain.testing import RankGroup

SHORT, LONG = timedelta(seconds=0.4), timedelta(seconds=30)


@pytest.fixture(scope="module", params=[3, *nightly(2)])
def groups(request: pytest.FixtureRequest) -> Any:
    with RankGroup("horovod", request.param) as horovod, RankGroup("ddp", request.param) as gloo:
        yield horovod, gloo


def world() -> Any:
    return dist.group.WORLD


def future_values(work: Any) -> Any:
    """Return the value of a work's future, as lists."""
    future = work.get_future()
    future.wait()
    return [tensor.to_dense().tolist() for tensor in future.value()]


def flatten(numbers: Any) -> list[Any]:
    return [number for one in numbers for number in flatten(one)] if isinstance(numbers, list) else [numbers]


def overloads(backend: Backend) -> list[Any]:
    rank, size, group = backend.rank, backend.size, world()
    own = torch.tensor([rank + 1.0, 2.0])

    def parts() -> list[Tensor]:
        return [torch.zeros(2) for _ in range(size)]

    results = [
        future_values(group.allreduce(own.clone())),
        future_values(group.allreduce(own.clone(), dist.ReduceOp.MAX)),
        future_values(group.allreduce(tensor=own.clone(), op=dist.ReduceOp.MIN, timeout=timedelta(seconds=30))),
        future_values(group.allreduce([own.clone()], dist.ReduceOp.PRODUCT)),
        future_values(group.broadcast(own.clone(), root=size - 1)),
        future_values(group.broadcast(own.clone(), 0, timedelta(seconds=30))),
        future_values(group.allgather(parts(), own)),
        future_values(group.allgather([parts()], [own])),
        future_values(group.all_gather_single(torch.zeros(2 * size), own)),
        future_values(group.alltoall_base(torch.zeros(2 * size), own.repeat(size), [], [])),
        future_values(group.all_to_all_single(torch.zeros(size), own[0].repeat(size), [1] * size, [1] * size)),
    ]
    reduced = own.clone()
    group.reduce(reduced, root=0, op=dist.ReduceOp.SUM).wait()
    gathered = parts() if rank == 1 else []
    group.gather(gathered, own, root=1).wait()
    scattered = torch.zeros(2)
    group.scatter(scattered, [own + other for other in range(size)] if rank == 0 else [], root=0).wait()
    part = torch.zeros(2)
    group.reduce_scatter(part, [own + other for other in range(size)], dist.ReduceOp.SUM).wait()
    group.barrier().wait()
    group.barrier(timeout=timedelta(seconds=30)).wait()
    return [*results, reduced.tolist() if rank == 0 else [], [one.tolist() for one in gathered], scattered.tolist(),
            part.tolist()]  # fmt: skip


def several_tensors_of_each_rank(backend: Backend) -> list[Any]:
    rank, size, group = backend.rank, backend.size, world()
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
        options = dist.AllreduceOptions()
        options.reduceOp = op
        tensors = [torch.tensor([2.0 * rank + 1, 3.0]), torch.tensor([2.0 * rank + 2, 4.0])]
        results += [future_values(group.allreduce(tensors, options)), [one.tolist() for one in tensors]]
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = size - 1, 1
    tensors = [torch.tensor([2.0 * rank]), torch.tensor([2.0 * rank + 1])]
    return [*results, future_values(group.broadcast(tensors, options)), [one.tolist() for one in tensors]]


def several_inputs_gathered(backend: Backend) -> list[Any]:
    own = [torch.tensor([10.0 * backend.rank + number]) for number in range(3)]
    parts = [[torch.zeros(1) for _ in range(3 * backend.size)] for _ in range(3)]
    future = world().allgather(parts, own).get_future()
    future.wait()
    return [[one.tolist() for one in some] for some in (*future.value(), *parts)]


def one_tensor_twice(backend: Backend) -> list[Any]:
    tensor = torch.tensor([1.0 + backend.rank])
    world().allreduce_coalesced([tensor, tensor]).wait()
    return tensor.tolist()


def means_of_integers(backend: Backend) -> list[Any]:
    """Compute means of integers. Gloo has no AVG, so its ranks return the expected means."""
    results = []
    for dtype in (torch.int8, torch.int64):
        largest = torch.iinfo(dtype).max - 4 * backend.size
        values = torch.tensor([4 * backend.rank, -7, largest + 4 * backend.rank]).to(dtype)
        if backend.name == "horovod":
            dist.all_reduce(values, dist.ReduceOp.AVG)
            results.append(values.tolist())
        else:
            mean = 2 * (backend.size - 1)
            results.append([mean, -7, largest + mean])
    return results


def inference_mode(backend: Backend) -> list[Any]:
    results = []
    with torch.inference_mode():
        own = torch.arange(2.0 * backend.size) + backend.rank
        parts = [torch.zeros_like(own) for _ in range(backend.size)]
        dist.all_gather(parts, own)
        part, whole = torch.zeros(2), own.clone()
        dist.reduce_scatter(part, list(own.view(backend.size, 2)))
        dist.all_reduce(whole)
        exchanged = torch.zeros_like(own)
        dist.all_to_all_single(exchanged, own)
        results += [one.tolist() for one in (*parts, part, whole, exchanged)]
    return results


def parts_of_different_sizes(backend: Backend) -> list[Any]:
    """Reduce-scatter tensors whose size depends on the receiving rank. Rank 0 receives an empty tensor."""
    inputs = [torch.arange(float(count)) + backend.rank for count in range(backend.size)]
    output = torch.zeros(backend.rank)
    dist.reduce_scatter(output, inputs)
    return output.tolist()


def sparse_tensors(backend: Backend) -> list[Any]:
    rank, size = backend.rank, backend.size
    results = []
    for dtype in (torch.float32, torch.float64, torch.int64):
        indices = torch.tensor([[rank, size - 1, size], [0, 1, 2]])
        own = torch.sparse_coo_tensor(indices, torch.arange(1.0, 4.0).to(dtype) + rank, (size + 1, 3))
        rows = torch.sparse_coo_tensor([[rank, 0]], torch.ones(2, 3, dtype=dtype) * rank, (size, 3))
        empty = torch.sparse_coo_tensor(torch.zeros(1, 0).long(), torch.zeros(0, dtype=dtype), (4,))
        on_rank_0 = empty if rank else torch.sparse_coo_tensor([[2]], torch.ones(1, dtype=dtype), (4,))
        for tensor in (own, rows, empty, on_rank_0):
            results.append(future_values(world().allreduce([tensor])))
            assert tensor.is_sparse
            results.append(tensor.to_dense().tolist())
    first, second = (torch.sparse_coo_tensor([[rank]], [1.0 + k], (size,)) for k in range(2))
    results.append(future_values(world().allreduce([first, second])))
    return results


def sparse_gradients(backend: Backend) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)).double()
    distributed = DistributedDataParallel(model)
    distributed(torch.tensor([backend.rank, 5, 5])).sum().backward()
    return [parameter.grad.to_dense().tolist() for parameter in model.parameters()]


def built_in_hooks(backend: Backend) -> list[Any]:
    results = []
    for hook in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        distributed = DistributedDataParallel(model)
        distributed._register_builtin_comm_hook(hook)
        for step in range(2):
            distributed(torch.full((1, 5), backend.rank + step + 1.0)).sum().backward()
        results += [parameter.grad.tolist() for parameter in model.parameters()]
    return results


def sequence_numbers(backend: Backend) -> list[Any]:
    first = world()._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(2))
    return [world()._get_sequence_number_for_group() - first]


CASES: list[Callable[[Backend], list[Any]]] = [
    overloads, several_tensors_of_each_rank, several_inputs_gathered, one_tensor_twice, means_of_integers,
    inference_mode, parts_of_different_sizes, sparse_tensors, sparse_gradients, built_in_hooks, sequence_numbers,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_results_equal_the_results_of_gloo(groups: Any, case: Callable[[Backend], list[Any]]) -> None:
    horovod, gloo = groups
    for found, expected in zip(horovod.run(case), gloo.run(case), strict=True):
        assert len(found) == len(expected)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert flatten(one) == pytest.approx(flatten(other)), number


def call_with_invalid_arguments(backend: Backend) -> list[list[str]]:
    """Return the text that each error must contain, or the message if it does not contain the text. Also return these
    texts. All ranks raise the errors before any communication."""
    rank, size, group = backend.rank, backend.size, world()
    one, two = torch.zeros(1), torch.zeros(2)
    wide, sparse = torch.zeros(1, dtype=torch.float64), torch.sparse_coo_tensor([[0]], [1.0], (1,))
    maximum = dist.AllreduceOptions()
    maximum.reduceOp = dist.ReduceOp.MAX
    other_root = dist.ScatterOptions()
    other_root.rootRank = (rank + 1) % size
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("invalid root rank", lambda: group.broadcast(one, root=-1)),
        ("invalid root rank", lambda: group.reduce(one, root=size)),
        ("invalid root rank", lambda: group.gather([], one, root=size)),
        ("invalid root tensor", lambda: group.broadcast([], dist.BroadcastOptions())),
        ("invalid tensor type", lambda: group.allreduce([one, wide])),
        ("invalid tensor size", lambda: group.allreduce([one, two])),
        ("invalid tensor layout", lambda: group.allreduce([one, sparse])),
        ("unsupported reduction operation", lambda: group.allreduce([sparse], maximum)),
        ("requires non-empty tensor list", lambda: group.allreduce([])),
        ("requires non-empty tensor list", lambda: group.allreduce_coalesced([])),
        ("tensors must all have the same type", lambda: group.allreduce_coalesced([one, wide])),
        ("invalid tensor layout at index", lambda: group.allreduce_coalesced([one, sparse])),
        ("unsupported layout", lambda: group.allreduce_coalesced([sparse, sparse])),
        ("requires a single-element output tensor list", lambda: group.scatter([], [], dist.ScatterOptions())),
        ("requires a single-element input list", lambda: group.scatter([one], [], root_options(dist.ScatterOptions))),
        ("requires a single-element input tensor list", lambda: group.gather([], [one, one], dist.GatherOptions())),
        ("Incorrect input list size", lambda: group.scatter(one, [one] * (size + 1), root=rank)),
        ("Incorrect output list size", lambda: group.gather([one] * (size + 1), one, root=rank)),
        ("invalid output tensor list", lambda: group.allgather([[one] * (size + 1)], [one])),
        ("invalid tensor size", lambda: group.allgather([[two] * size], [one])),
        ("requires non-empty input tensor list", lambda: group.allgather_coalesced([[]] * size, [])),
        ("output lists should be equal to world size", lambda: group.allgather_coalesced([[one]] * (size + 1), [one])),
        ("invalid output size", lambda: group.allgather_coalesced([[one, one]] * size, [one])),
        ("invalid size of output tensor at index 0", lambda: group.allgather_coalesced([[two]] * size, [one])),
        ("invalid tensor type at index 0", lambda: group.allgather_coalesced([[wide]] * size, [one])),
        ("requires empty input on non-root", lambda: group.scatter([one], [[one] * size], other_root)),
    ]

    def root_options(options_class: Any) -> Any:
        options = options_class()
        options.rootRank = rank
        return options

    found_texts = []
    for expected, call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        message = str(caught.value)
        # torch's dispatcher rejects empty lists and sparse tensors before the call reaches Gloo.
        is_from_dispatcher = "no tensor arguments" in message or "Could not run" in message
        found_texts.append(expected if expected in message or is_from_dispatcher else message)
    group.allreduce(one).wait()  # the ranks can still communicate
    return [found_texts, [expected for expected, _ in calls]]


def test_invalid_arguments_raise_the_errors_of_gloo(groups: Any) -> None:
    for group in groups:
        for found_texts, expected in group.run(call_with_invalid_arguments):
            assert found_texts == expected


def call_with_invalid_tensors(backend: Backend) -> list[str]:
    size, group = backend.size, world()
    odd = torch.zeros(size + 1)
    messages = []
    for call in (
        lambda: dist.reduce_scatter_tensor(torch.zeros(1), odd),
        lambda: dist.all_gather_into_tensor(odd, torch.zeros(1)),
        lambda: dist.all_to_all_single(torch.zeros(size + 1), odd),
        lambda: dist.all_to_all_single(odd, odd, [1] * size, [1] * size),
        lambda: group.reduce_scatter_tensor_coalesced([torch.zeros(1)], [odd]),
        lambda: dist.all_to_all_single(torch.zeros(4 * size), torch.zeros(2 * size)),
        lambda: dist.all_to_all_single(torch.zeros(size, 3), torch.zeros(size, 2), [1] * size, [1] * size),
        lambda: dist.all_to_all([torch.zeros(1)] * size, [torch.zeros(1)] * (size + 1)),
        lambda: dist.all_to_all([torch.zeros(1)] * (size - 1), [torch.zeros(1)] * size),
        lambda: group.alltoall([torch.zeros(1).double()] * size, [torch.zeros(1)] * size),
    ):
        with pytest.raises(CollectiveArgumentError) as caught:
            call()
        messages.append(str(caught.value))
    group.allreduce(odd).wait()
    return messages


def test_tensors_of_invalid_size_or_dtype_raise_on_every_rank(groups: Any) -> None:
    horovod, _ = groups
    messages = horovod.run(call_with_invalid_tensors)
    assert all(one == messages[0] for one in messages)
    assert "Horovod's reduce_scatter got input" in messages[0][0]


def call_in_forked_process(backend: Backend) -> list[str]:
    """Return the error of a collective in a process that is forked from a rank."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            dist.all_reduce(torch.ones(2))
        except Exception as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        message = pipe.read()
    backend.barrier()
    return [message]


def test_collectives_in_a_forked_process_raise_immediately(groups: Any) -> None:
    horovod, _ = groups
    for (message,) in horovod.run(call_in_forked_process, timeout_seconds=20):
        assert message.startswith("A collective was called in a process that was forked from a rank")


def operations_in_flight(backend: Backend) -> list[float]:
    """Wait for operations with `wait_tensor`, without their work handles."""
    found = []
    with functional.allow_inflight_collective_as_graph_input_ctx():
        for _ in range(10):
            values, own = torch.ones(1_000_000), torch.full((500_000,), 3.0)
            gathered = torch.zeros(backend.size * len(own))
            dist.all_reduce(values, async_op=True)
            dist.all_gather_single(gathered, own, async_op=True)
            found += [functional.wait_tensor(gathered)[-1].item(), functional.wait_tensor(values)[-1].item()]
    return found


def test_wait_tensor_waits_for_operations_in_flight(groups: Any) -> None:
    for group in groups:
        for values in group.run(operations_in_flight):
            assert values == [3.0, float(group.size)] * 10


def coalescing_manager(backend: Backend) -> list[Any]:
    """Run collectives between _start_coalescing and _end_coalescing. The returned work has the results of all of
    them."""
    size, device = backend.size, torch.device("cpu")
    tensors = [torch.full((count,), 1.0) for count in (3, 4, 5)]
    world()._start_coalescing(device)
    for tensor in tensors:
        dist.all_reduce(tensor)
    work = world()._end_coalescing(device)
    found = work.get_future().wait()
    assert [one.data_ptr() for one in found] == [one.data_ptr() for one in tensors]
    assert all(bool((tensor == size).all()) for tensor in tensors)
    return []


def test_coalesced_operations_return_one_work_with_all_results(groups: Any) -> None:
    horovod, _ = groups
    horovod.run(coalescing_manager)


def monitored_barrier(backend: Backend) -> list[str]:
    rank, size = backend.rank, backend.size
    for wait_all_ranks in (False, True):
        world().monitored_barrier(timeout=LONG, wait_all_ranks=wait_all_ranks)
    message = ""
    if rank == 0 and size > 2:  # wait until all ranks except the missing one have reached the barrier
        barrier = world()._monitored_barrier
        barrier._store.wait([f"{barrier._barrier_index + 1}/{other}" for other in range(1, size - 1)], LONG)
    if rank != size - 1:
        with pytest.raises(RuntimeError) as caught:
            world().monitored_barrier(timeout=SHORT if rank == 0 else LONG)
        message = str(caught.value).split("Check")[0]
    backend.barrier()
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            world().monitored_barrier(timeout=SHORT, wait_all_ranks=True)
        message += str(caught.value)
    backend.barrier()
    return [message]


def test_a_monitored_barrier_names_missing_ranks(groups: Any) -> None:
    horovod, _ = groups
    results = horovod.run(monitored_barrier)
    last = len(results) - 1
    assert f"Rank {last} failed to pass monitoredBarrier in 400 ms" in results[0][0]
    assert f"Ranks {', '.join(map(str, range(1, last + 1)))} failed to pass monitoredBarrier" in results[0][0]
    for rank in range(1, last):
        assert f"Rank {rank} successfully reached monitoredBarrier, but received errors" in results[rank][0]


def wait_for_files(paths: list[Path]) -> None:
    deadline = time.monotonic() + 40
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def run_operation_with_timeout(backend: Backend, folder: str) -> list[str]:
    """Start an operation on rank 1 after it has timed out on rank 0, and return the error."""
    message, timed_out = "", Path(folder) / "timed out"
    if backend.rank == 0:
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError) as caught:
            world().allreduce(torch.ones(2), timeout=SHORT).wait()
        assert isinstance(caught.value, CollectiveTimeoutError)
        assert time.monotonic() - started < 20  # much less than the group's timeout of 60 s
        message = str(caught.value)
        timed_out.touch()
    else:
        wait_for_files([timed_out])
        world().allreduce(torch.ones(2)).wait()
    return [message]


def abort_operation(backend: Backend) -> list[str]:
    """Abort an operation of rank 0 that rank 1 does not start, and return the error."""
    group, message = dist.new_group([0, 1]), ""
    work = dist.all_reduce(torch.ones(2), group=group, async_op=True) if backend.rank == 0 else None
    distributed_c10d._abort_process_group(group)
    if work is not None:
        with pytest.raises(dist.DistBackendError) as caught:
            work.wait()
        message = str(caught.value)
    backend.barrier()
    return [message]


def test_a_timeout_raises_the_error_class_of_torch_and_abort_does_not_wait(tmp_path: Path) -> None:
    with RankGroup("horovod", 2) as group:
        ((message,), _) = group.run(run_operation_with_timeout, str(tmp_path))
        ((aborted,), _) = group.run(abort_operation, timeout_seconds=20)
    assert aborted == "Horovod's allreduce was aborted, because this rank has aborted its process group."
    assert "Horovod's allreduce timed out after 0.4 s, because rank 1 did not call it." in message


def run_operation_without_rank_1(backend: Backend, folder: str) -> str:
    """Return the timeout error on all ranks except rank 1, which starts the operation after the timeout."""
    group = dist.new_group(timeout=timedelta(seconds=6))
    if backend.rank == 1:
        wait_for_files([Path(folder, str(rank)) for rank in (0, 2)])
        dist.all_reduce(torch.ones(2), group=group)
        return ""
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(2), group=group)
    Path(folder, str(backend.rank)).touch()
    return str(caught.value)


def test_a_timeout_names_the_rank_that_did_not_start_the_operation(tmp_path: Path) -> None:
    with RankGroup("horovod", 3) as group:
        texts = group.run(run_operation_without_rank_1, str(tmp_path))
    expected = "Horovod's allreduce timed out after 6 s, because rank 1 did not call it. "
    assert [text.startswith(expected) for text in texts] == [True, False, True], texts


def run_different_operations(backend: Backend, names: list[str]) -> dict[str, list[str]]:
    """For each mismatched collective in `names`, return its error in a new group and the error of a later, correct
    collective in the same group."""
    ones, rank, ops = torch.ones(3), backend.rank, (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
    values = ones if rank == 0 else ones.int()
    mismatched: dict[str, Callable[[Any], object]] = {
        "size": lambda group: dist.all_reduce(torch.ones(5 + rank), group=group),
        "reduction": lambda group: dist.all_reduce(ones, ops[rank], group=group),
        "mean": lambda group: dist.all_reduce(ones, (dist.ReduceOp.SUM, dist.ReduceOp.AVG)[rank], group=group),
        "dtype": lambda group: dist.broadcast(values.clone(), 0, group=group),
        "gathered dtype": lambda group: dist.all_gather([values.clone(), values.clone()], values, group=group),
        "root": lambda group: dist.reduce(ones, rank, group=group),
    }
    found: dict[str, list[str]] = {}
    for name in names:
        group = dist.new_group([0, 1])
        with pytest.raises(CollectiveMismatchError) as caught:
            mismatched[name](group)
        with pytest.raises(CollectiveMismatchError) as later:
            dist.all_reduce(torch.ones(7), group=group)
        found[name] = [str(caught.value), str(later.value)]
    backend.barrier()
    return found


# Text for each rank's collective in the error, by the property in which the collectives differ.
MISMATCHES = {
    "size": ("allreduce SUM of 5 float32 elements", "allreduce SUM of 6 float32 elements"),
    "reduction": ("allreduce SUM of 3 float32 elements", "allreduce MAX of 3 float32 elements"),
    "dtype": ("broadcast from rank 0 of 3 float32 elements", "broadcast from rank 0 of 3 int32 elements"),
    "root": ("reduce to rank 0 SUM of 3 float32 elements", "reduce to rank 1 SUM of 3 float32 elements"),
    "mean": ("allreduce SUM of 3 float32 elements", "allreduce AVG of 3 float32 elements"),
    "gathered dtype": ("allgather of 3 float32 elements", "allgather of 3 int32 elements"),
}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["size", "dtype"], id="typical"),
        pytest.param(["reduction", "root", "mean", "gathered dtype"], id="other", marks=pytest.mark.nightly),
    ],
)
def test_different_collectives_are_reported_on_every_rank_before_the_timeout(names: list[str]) -> None:
    """Horovod cannot cancel the operations, and could match them with later ones. Therefore, the group rejects further
    operations."""
    with RankGroup("horovod", 2, backend_timeout_seconds=120) as group:
        first, second = group.run(run_different_operations, names, timeout_seconds=100)
    assert first == second
    for name in names:
        one, other = MISMATCHES[name]
        error, later = first[name]
        assert f"rank 0 waits for {one}, and rank 1 for {other}" in error
        assert later.startswith("This group cannot start operations after an earlier error")
        assert later.endswith(error)


def train_with_join(backend: Backend) -> list[list[float]]:
    """Train twice with DDP's join, and return the changes of the parameters. In join, C++ code waits for an operation
    that Python has started."""
    changes = []
    for _ in range(2):
        model = nn.Linear(4, 1)
        initial = [parameter.clone() for parameter in model.parameters()]
        ddp = DistributedDataParallel(model)
        dist.broadcast(initial[0].data, 0)
        dist.broadcast(initial[1].data, 0)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
        with ddp.join(divide_by_initial_world_size=False):
            for step in range(4 + 2 * backend.rank):
                optimizer.zero_grad()
                ddp(torch.full((2, 4), step + 1.0 + backend.rank)).sum().backward()
                optimizer.step()
        for parameter, value in zip(model.parameters(), initial, strict=True):
            changes.append((value - parameter).flatten().tolist())
    return changes


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_join_divides_by_the_number_of_ranks_with_data(backend: str) -> None:
    # The gradient of a weight is twice the input. Gradients are averaged over both ranks in steps 0 to 3. In steps 4
    # and 5, only rank 1 has data.
    weight = 2 * sum([1.5, 2.5, 3.5, 4.5, 6.0, 7.0])
    with RankGroup(backend, 2) as group:
        for changes in group.run(train_with_join):
            for found, expected in zip(changes, [[weight] * 4, [12.0]] * 2, strict=True):
                assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("call", ["send", "recv"])
def test_invalid_peer_ranks_are_rejected(call: str) -> None:
    with RankGroup("horovod", 2) as group:
        for messages in group.run(invalid_peers, call):
            assert len(messages) == 3
            for message in messages:
                assert "got an invalid rank" in message


def invalid_peers(backend: Backend, call: str) -> list[str]:
    group, messages = world(), []
    for peer in (9, -1, backend.rank):
        with pytest.raises(CollectiveArgumentError) as caught:
            getattr(group, call)([torch.ones(2)], peer, 0)
        messages.append(str(caught.value))
    return messages


def slow_rank(backend: Backend) -> list[float]:
    if backend.rank == 0:
        time.sleep(7)
    first, second = torch.ones(2), torch.ones(3)
    works = [dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)]
    for work in works:
        work.wait()
    return [*first.tolist(), *second.tolist()]


def test_a_slow_rank_is_not_reported_as_a_mismatch() -> None:
    with RankGroup("horovod", 2) as group:
        assert group.run(slow_rank) == [[2.0] * 5] * 2
