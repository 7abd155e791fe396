"""Contract tests of the collectives. Every rank computes the inputs of all ranks, and therefore the expected result."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import unitrain
from unitrain.backends.base import Backend
from unitrain.backends.capabilities import SupportsPointToPoint
from unitrain.backends.checks import DTYPES, REDUCE_OPS
from unitrain.backends.synchronized_errors import gather_if_different
from unitrain.errors import CollectiveMismatchError, ConfigError, TensorError
from unitrain.monitoring.flight_recorder import GradientPhase
from unitrain.testing.cases import assert_same_on_every_rank, contract, raises
from unitrain.testing.fake_backend import FakeBackend
from unitrain.testing.models import build, seeded_generator

# Small tensors are transferred together with the consistency check; larger ones such as (11, 13) are not.
_SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (1,), (5,), (3, 4), (2, 3, 2), (0,), (0, 3), (2, 0), (11, 13)),
    *((*(1,) * 10, 3), (*(1,) * 10, 143)),
)


def make_input(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the input of `rank`. The values are so small that products over 3 ranks are exact in every dtype."""
    generator = seeded_generator(17 * rank + len(shape))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    values = torch.randint(1, 5, shape, generator=generator)
    if dtype.is_floating_point:
        return (values * torch.where(torch.rand(shape, generator=generator) < 0.5, -0.5, 0.5)).to(dtype)
    return values.to(dtype)


def reduce_inputs(inputs: list[Tensor], op: str) -> Tensor:
    """Return the reduction of all ranks' `inputs`, computed in float64 or int64."""
    dtype = inputs[0].dtype
    stack = torch.stack(inputs)
    wide = stack.double() if dtype.is_floating_point else stack.long()
    result = {
        "sum": lambda: wide.sum(0),
        "mean": lambda: wide.mean(0),
        "min": lambda: wide.amin(0),
        "max": lambda: wide.amax(0),
        "product": lambda: wide.prod(0),
    }[op]()
    return result.to(dtype)


def is_reduction_supported(dtype: torch.dtype, op: str) -> bool:
    """Return whether backends support the reduction `op` for `dtype`."""
    return not (op == "mean" and not dtype.is_floating_point) and not (op == "sum" and dtype == torch.bool)


@contract
def allreduce_combines_every_dtype_op_and_shape(backend: Backend) -> None:
    for dtype, op, shape in itertools.product(DTYPES, REDUCE_OPS, _SHAPES):
        if not is_reduction_supported(dtype, op):
            continue
        own = make_input(backend.rank, shape, dtype)
        original = own.clone()
        result = backend.allreduce(own, op)  # type: ignore[arg-type]
        expected = reduce_inputs([make_input(rank, shape, dtype) for rank in range(backend.size)], op)
        assert_close(result, expected, msg=lambda text, case=(dtype, op, shape): f"{case}: {text}")
        assert torch.equal(own, original), (dtype, op, shape)
        assert result.data_ptr() != own.data_ptr() or not own.numel()


@contract
def allreduce_takes_the_mean_by_default(backend: Backend) -> None:
    result = backend.allreduce(torch.tensor([float(backend.rank)]))
    assert_close(result, torch.tensor([(backend.size - 1) / 2]))


@contract
def mean_is_finite_where_the_sum_overflows_float16(backend: Backend) -> None:
    own = torch.full((3, backend.size), 40_000.0, dtype=torch.float16)  # the sum of two overflows in float16
    assert torch.equal(backend.allreduce(own), own)
    assert torch.equal(backend.reducescatter(own.t())[0], own[:, 0])


@contract
def mean_of_integers_raises_on_every_rank(backend: Backend) -> None:
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        text = raises(TensorError, "mean", lambda dtype=dtype: backend.allreduce(torch.ones(2).to(dtype)))
        assert_same_on_every_rank(backend, text)
    raises(TensorError, "sum of booleans", lambda: backend.allreduce(torch.ones(2).bool(), "sum"))
    raises(TensorError, "mean", lambda: backend.reducescatter(torch.ones(backend.size).long()))


@contract
def invalid_argument_on_one_rank_raises_on_every_rank(backend: Backend) -> None:
    if backend.size == 1:
        return
    tensor = torch.ones(2, dtype=torch.int64 if backend.rank == backend.size - 1 else torch.float32)
    text = raises(TensorError, "The mean of int64", lambda: backend.allreduce(tensor))
    assert_same_on_every_rank(backend, text)


@contract
def invalid_ops_roots_and_tensors_raise(backend: Backend) -> None:
    tensor = torch.ones(2)
    raises(ConfigError, "Did you mean 'mean'?", lambda: backend.allreduce(tensor, "maen"))  # type: ignore[arg-type]
    for root in (-1, backend.size):
        raises(ConfigError, f"Root {root}", lambda root=root: backend.broadcast(tensor, root))
        raises(ConfigError, f"Root {root}", lambda root=root: backend.broadcast_object(1, root))
    wrong: Any = torch.ones(2) if backend.rank == backend.size - 1 else 0
    text = raises(ConfigError, "Root tensor([1., 1.]", lambda: backend.broadcast_object(1, wrong))
    assert_same_on_every_rank(backend, text)
    raises(TensorError, "complex64", lambda: backend.allreduce(torch.ones(2, dtype=torch.complex64)))
    raises(TensorError, "takes a tensor, got int", lambda: backend.allreduce(3))  # type: ignore[arg-type]
    raises(TensorError, "to_dense", lambda: backend.allgather(torch.eye(2).to_sparse()))


@contract
def different_shapes_dtypes_ops_and_calls_raise_on_every_rank(backend: Backend) -> None:
    if backend.size == 1:
        return
    is_last_rank = backend.rank == backend.size - 1
    disagreements: list[Any] = [
        lambda: backend.allreduce(torch.ones(3 if is_last_rank else 2)),
        lambda: backend.allreduce(torch.ones(2, 1) if is_last_rank else torch.ones(2)),
        lambda: backend.allreduce(torch.ones(2).double() if is_last_rank else torch.ones(2)),
        lambda: backend.allreduce(torch.ones(2), "max" if is_last_rank else "min"),
        lambda: backend.broadcast(torch.ones(2), root=1 if is_last_rank else 0),
        lambda: backend.allgather(torch.ones(2, 3) if is_last_rank else torch.ones(2, 4)),
        lambda: backend.barrier() if is_last_rank else backend.allreduce(torch.ones(2)),
        lambda: (backend.reducescatter if is_last_rank else backend.allreduce)(torch.ones(backend.size * 5000)),
        lambda: backend.reducescatter(torch.ones(backend.size * (5000 if is_last_rank else 5001))),
        lambda: backend.allgather_object(1) if is_last_rank else backend.broadcast_object(1),
    ]
    for disagreement in disagreements:
        text = raises(CollectiveMismatchError, "called different collectives", disagreement)
        assert f"rank {backend.size - 1} called" in text, text
        assert_same_on_every_rank(backend, text)
    backend.barrier()  # the group still works
    complete_tensor = torch.arange(backend.size * 5000.0)
    assert torch.equal(backend.reducescatter(complete_tensor), complete_tensor.chunk(backend.size)[backend.rank])


@contract
def allgather_concatenates_in_rank_order(backend: Backend) -> None:
    for dtype, shape in itertools.product(DTYPES, _SHAPES):
        own = make_input(backend.rank, shape, dtype)
        original = own.clone()
        parts = [make_input(rank, shape, dtype).reshape(shape or (1,)) for rank in range(backend.size)]
        assert torch.equal(backend.allgather(own), torch.cat(parts)), (dtype, shape)
        assert torch.equal(own, original)


@contract
def allgather_accepts_a_different_dim_0_per_rank(backend: Backend) -> None:
    for counts in ([0, 3, 1], [2, 0, 0], [1, 2, 3], [0, 0, 0]):
        for dtype in DTYPES:
            parts = [make_input(rank, (counts[rank % 3], 2), dtype) for rank in range(backend.size)]
            gathered = backend.allgather(parts[backend.rank])
            assert torch.equal(gathered, torch.cat(parts)), (counts, dtype)


@contract
def reducescatter_returns_the_chunk_of_the_rank(backend: Backend) -> None:
    for dtype, op, trailing_shape in itertools.product(DTYPES, REDUCE_OPS, ((), (3,), (2, 2), (0,))):
        if not is_reduction_supported(dtype, op):
            continue
        shape = (2 * backend.size, *trailing_shape)
        own = make_input(backend.rank, shape, dtype)
        original = own.clone()
        reduced_input = reduce_inputs([make_input(rank, shape, dtype) for rank in range(backend.size)], op)
        result = backend.reducescatter(own, op)  # type: ignore[arg-type]
        assert_close(result, reduced_input[2 * backend.rank : 2 * backend.rank + 2])
        assert torch.equal(own, original)
    raises(TensorError, "equal slices", lambda: backend.reducescatter(torch.ones(())))
    if backend.size > 1:
        raises(TensorError, "equal slices", lambda: backend.reducescatter(torch.ones(backend.size + 1)))


@contract
def broadcast_copies_from_every_root(backend: Backend) -> None:
    for dtype, shape, root in itertools.product(DTYPES, _SHAPES, range(backend.size)):
        own = make_input(backend.rank, shape, dtype)
        original = own.clone()
        result = backend.broadcast(own, root)
        assert torch.equal(result, make_input(root, shape, dtype)), (dtype, shape, root)
        assert torch.equal(own, original), "the input was changed"
        assert result.data_ptr() != own.data_ptr() or not own.numel()


@contract
def collectives_accept_noncontiguous_tensors(backend: Backend) -> None:
    def view(rank: int) -> Tensor:
        return make_input(rank, (6, 4 * backend.size), torch.float32).t()[::2]

    inputs = [view(rank) for rank in range(backend.size)]
    own = inputs[backend.rank]
    assert not own.is_contiguous()
    assert_close(backend.allreduce(own), reduce_inputs(inputs, "mean"))
    assert torch.equal(backend.allgather(own), torch.cat(inputs))
    assert torch.equal(backend.broadcast(own, backend.size - 1), inputs[-1])
    rows = own.shape[0] // backend.size
    assert_close(
        backend.reducescatter(own, "sum"), reduce_inputs(inputs, "sum")[rows * backend.rank : rows * (backend.rank + 1)]
    )


@contract
def collectives_accept_a_column_of_a_single_row(backend: Backend) -> None:
    inputs = [torch.full((1, 3), float(rank)) for rank in range(backend.size)]
    columns = [rows[:, 0] for rows in inputs]
    own = columns[backend.rank]
    assert own.stride() == (3,)
    assert_close(backend.allreduce(own), reduce_inputs(columns, "mean"))
    assert torch.equal(backend.allreduce(own, "min"), reduce_inputs(columns, "min"))
    assert torch.equal(backend.allgather(own), torch.cat(columns))
    assert torch.equal(backend.broadcast(own, backend.size - 1), columns[-1])


@contract
def allgather_of_one_row_returns_a_contiguous_tensor(backend: Backend) -> None:
    """Each rank has one row. The result must be contiguous, because a fused optimizer reads the memory of its state as
    if it were."""
    for shape in ((), (1,), (1, 3), (1, 2, 2)):
        inputs = [torch.full(shape, rank + 1.0) for rank in range(backend.size)]
        gathered = backend.allgather(inputs[backend.rank])
        assert torch.equal(gathered, torch.cat([rank_input.reshape(shape or (1,)) for rank_input in inputs]))
        assert gathered.is_contiguous(), (shape, gathered.stride())
        assert gathered.untyped_storage().nbytes() == gathered.nbytes, shape


@contract
def collectives_accept_negative_views(backend: Backend) -> None:
    inputs = [torch.complex(torch.ones(1, 2), torch.full((1, 2), float(rank))) for rank in range(backend.size)]
    plain = [-rank_input.imag[:, :1] for rank_input in inputs]
    own = inputs[backend.rank].conj().imag[:, :1]
    assert own.is_neg(), "not a view with the negative bit"
    assert_close(backend.allreduce(own), reduce_inputs(plain, "mean"))
    assert torch.equal(backend.allreduce(own, "min"), reduce_inputs(plain, "min"))
    assert torch.equal(backend.allgather(own), torch.cat(plain))
    assert torch.equal(backend.broadcast(own, backend.size - 1), plain[-1])


@contract
def meta_nested_and_lazy_tensors_raise_on_every_rank(backend: Backend) -> None:
    tensors = {
        "on device meta": torch.ones(backend.size, device="meta"),
        "a nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "a lazy module": torch.nn.LazyLinear(1).weight,
    }
    for description, tensor in tensors.items():
        own = tensor if backend.rank == backend.size - 1 else torch.ones(backend.size)
        for collective in (
            backend.allreduce,
            backend.allgather,
            backend.reducescatter,
            backend.broadcast,
            lambda tensor: unitrain.differentiable_allgather(tensor, backend),
        ):
            text = raises(TensorError, description, lambda collective=collective, own=own: collective(own))
            assert_same_on_every_rank(backend, text)


@contract
def tensor_that_requires_grad_raises_on_every_rank(backend: Backend) -> None:
    is_last_rank = backend.rank == backend.size - 1
    own = torch.ones(backend.size, requires_grad=is_last_rank)
    collectives = [backend.allreduce, backend.allgather, backend.reducescatter, backend.broadcast]
    for collective in collectives:
        raises(TensorError, "that requires grad", lambda collective=collective: collective(own * 2))
        text = raises(TensorError, "that requires grad", lambda collective=collective: collective(own))
        assert "differentiable_allgather" in text
        assert_same_on_every_rank(backend, text)
        with torch.no_grad():
            assert not collective(own).requires_grad
        assert not collective(own.detach()).requires_grad


@contract
def special_values_are_preserved(backend: Backend) -> None:
    own = torch.tensor([float("inf"), float("nan"), -0.0, 1e-40])
    for copied in (backend.broadcast(own), backend.allgather(own)[: len(own)]):
        assert_close(copied, own, equal_nan=True, rtol=0, atol=0)
        assert copied[2].signbit()
    result = backend.allreduce(own, "sum")
    assert torch.isinf(result[0])
    assert torch.isnan(result[1])


@contract
def min_and_max_propagate_nan(backend: Backend) -> None:
    floating = [dtype for dtype in DTYPES if dtype.is_floating_point]
    for dtype, op, columns in itertools.product(floating, ("min", "max"), (1, 5, 400)):  # small and large tensors
        # About 30 % of the elements are replaced with special values, which are chosen at random.
        values = torch.tensor([0.0, -0.0, 1.5, -2.5, torch.inf, -torch.inf, torch.nan, -torch.nan, 6e-8, -6e-8])
        inputs = []
        for rank in range(backend.size):
            generator = seeded_generator(rank)
            chosen = torch.randint(0, len(values), (2 * backend.size, columns), generator=generator)
            own = torch.randint(-9, 9, chosen.shape, generator=generator).float()
            inputs.append(torch.where(torch.rand(chosen.shape, generator=generator) < 0.3, values[chosen], own))
            if rank == backend.size - 1:
                inputs[rank][0, 0] = torch.nan
        inputs = [rank_input.to(dtype) for rank_input in inputs]
        expected = functools.reduce(torch.minimum if op == "min" else torch.maximum, inputs)
        assert expected.isnan().any()
        own = inputs[backend.rank]
        original = own.clone()
        result = backend.allreduce(own, op)  # type: ignore[arg-type]
        assert result.dtype == dtype
        assert_close(result, expected, equal_nan=True, rtol=0, atol=0)
        piece = backend.reducescatter(own, op)  # type: ignore[arg-type]
        assert_close(piece, expected[2 * backend.rank : 2 * backend.rank + 2], equal_nan=True, rtol=0, atol=0)
        assert_close(own, original, equal_nan=True, rtol=0, atol=0)


@contract
def objects_are_broadcast_and_gathered(backend: Backend) -> None:
    for root in range(backend.size):
        sent = {"rank": backend.rank, "nested": [1, (2.5, None), {"x"}], "tensor": torch.arange(3)}
        received = backend.broadcast_object(sent if backend.rank == root else None, root)
        assert received["rank"] == root
        assert received["nested"] == [1, (2.5, None), {"x"}]
        assert torch.equal(received["tensor"], torch.arange(3))
    gathered = backend.allgather_object("x" * backend.rank)
    assert gathered == ["x" * rank for rank in range(backend.size)]
    assert backend.allgather_object(None) == [None] * backend.size


@contract
def unpicklable_object_raises_on_every_rank(backend: Backend) -> None:
    if backend.size == 1:
        return
    last_rank = backend.size - 1
    sent = {"callback": lambda: None} if backend.rank == last_rank else {}
    for action in (lambda: backend.allgather_object(sent), lambda: backend.broadcast_object(sent, last_rank)):
        text = raises(ConfigError, "cannot be pickled", action)
        assert text.startswith("A dict was passed to an object collective")
        assert_same_on_every_rank(backend, text)


@contextmanager
def _forbid_gathering(backend: Backend) -> Iterator[None]:
    """Raise AssertionError if `allgather_object` is called inside this context."""

    def refuse(obj: Any) -> list[Any]:
        raise AssertionError("the objects were gathered")

    backend.allgather_object = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del backend.allgather_object


@contract
def values_are_gathered_only_if_they_differ(backend: Backend) -> None:
    last_rank = backend.size - 1
    with _forbid_gathering(backend):
        assert gather_if_different(backend, {"equal": [1, (2.5, None)]}) is None
    expected = None if last_rank == 0 else [{"rank": rank == last_rank} for rank in range(backend.size)]
    assert gather_if_different(backend, {"rank": backend.rank == last_rank}) == expected
    if last_rank > 0:
        for sent in (lambda: None, {"callback": lambda: None} if backend.rank == last_rank else {}):
            text = raises(ConfigError, "cannot be pickled", lambda sent=sent: gather_if_different(backend, sent))
            assert_same_on_every_rank(backend, text)


@contract
def equal_models_are_compared_without_gathering_them(backend: Backend) -> None:
    with _forbid_gathering(backend):
        backend.distributed_model(build().to(backend.device))


@contract
def large_tensors_and_objects_are_transferred(backend: Backend) -> None:
    big = torch.full((4_000_000,), float(backend.rank + 1))
    assert_close(backend.allreduce(big, "sum"), torch.full_like(big, backend.size * (backend.size + 1) / 2))
    text = bytes(range(256)) * 80_000
    assert backend.broadcast_object(text if backend.rank == 0 else None) == text
    assert all(part == text for part in backend.allgather_object(text))


@contract
def many_collectives_in_a_row_keep_their_order(backend: Backend) -> None:
    for call_index in range(100):
        result = backend.allreduce(torch.tensor([float(call_index * (backend.rank + 1))]), "sum")
        assert result.item() == call_index * backend.size * (backend.size + 1) / 2


@contract
def barrier_returns_after_every_rank_has_called_it(backend: Backend) -> None:
    """All ranks are on one host, so their monotonic clocks are the same."""
    for late_rank in range(backend.size):
        time.sleep(0.1 * (backend.rank == late_rank))
        called = time.monotonic()
        backend.barrier()
        returned = time.monotonic()
        times = backend.allgather_object((called, returned))
        assert min(end for _, end in times) >= max(begin for begin, _ in times), times


@contract
def ranks_and_local_ranks_are_numbered_without_gaps(backend: Backend) -> None:
    positions = backend.allgather_object(
        (backend.rank, backend.size, backend.node_rank, backend.local_rank, backend.local_size, backend.num_nodes)
    )
    assert [position[0] for position in positions] == list(range(backend.size))
    assert {position[1] for position in positions} == {backend.size}
    places = [(position[2], position[3]) for position in positions]
    assert len(set(places)) == backend.size, f"two ranks have the same node rank and local rank: {places}"
    for node in range(backend.num_nodes):
        local_ranks = sorted(place[1] for place in places if place[0] == node)
        assert local_ranks == list(range(len(local_ranks)))
        assert all(position[4] == len(local_ranks) for position in positions if position[2] == node)


@contract
def collective_inside_on_rank_zero_raises_immediately(backend: Backend) -> None:
    collectives = {
        "allreduce": lambda: backend.allreduce(torch.ones(1)),
        "allgather": lambda: backend.allgather(torch.ones(1)),
        "reducescatter": lambda: backend.reducescatter(torch.ones(backend.size)),
        "broadcast": lambda: backend.broadcast(torch.ones(1)),
        "broadcast_object": lambda: backend.broadcast_object(1),
        "allgather_object": lambda: backend.allgather_object(1),
        "barrier": backend.barrier,
    }
    with backend.on_rank_zero() as is_rank_zero:
        assert is_rank_zero == (backend.rank == 0)
        for name, collective in collectives.items():
            if is_rank_zero:
                expected_message = f"{name} was called inside on_rank_zero"
                raises(CollectiveMismatchError, expected_message, collective)
        # Other threads are not inside the block, and may call collectives if all ranks do.
        with ThreadPoolExecutor(1) as executor:
            for collective in collectives.values():
                executor.submit(collective).result()
    for collective in collectives.values():
        collective()


@contract
def fake_backend_returns_the_results_of_this_backend(backend: Backend) -> None:
    for dtype, shape in itertools.product(DTYPES, ((), (5,), (2 * backend.size, 3))):
        inputs = [make_input(rank, shape, dtype) for rank in range(backend.size)]
        own = inputs[backend.rank]
        fake = FakeBackend(backend.rank, backend.size, peers=lambda operation, value, rank, inputs=inputs: inputs[rank])
        assert torch.equal(fake.allgather(own), backend.allgather(own)), (dtype, shape)
        assert torch.equal(fake.broadcast(own, backend.size - 1), backend.broadcast(own, backend.size - 1))
        for op in REDUCE_OPS:
            if is_reduction_supported(dtype, op):
                assert_close(fake.allreduce(own, op), backend.allreduce(own, op))  # type: ignore[arg-type]
                if shape[:1] == (2 * backend.size,):
                    assert_close(fake.reducescatter(own, op), backend.reducescatter(own, op))  # type: ignore[arg-type]
    fake = FakeBackend(backend.rank, backend.size, peers=lambda operation, value, rank: rank)
    assert fake.allgather_object(backend.rank) == backend.allgather_object(backend.rank)
    assert fake.broadcast_object(backend.rank, 0) == backend.broadcast_object(backend.rank, 0)
    fake.barrier()
    assert [operation for operation, _ in fake.calls] == ["allgather_object", "broadcast_object", "barrier"]


@contract
def default_group_has_all_ranks(backend: Backend) -> None:
    """Its mean and its allgather may be in progress at the same time."""
    if not isinstance(backend, SupportsPointToPoint):
        return
    group = backend.default_group()
    assert (group.ranks, group.index) == (tuple(range(backend.size)), backend.rank)
    rows = [torch.arange(5.0) * (rank + 1) for rank in range(backend.size)]
    for number in range(2):
        phase = GradientPhase("benchmark", number)
        group.monitor.record(phase)
        own = rows[backend.rank]
        waits = [group.start_mean(own, phase), group.start_allgather(own.unsqueeze(0), phase)]
        mean, gathered = (wait() for wait in waits)
        assert_close(mean, torch.stack(rows).mean(dim=0))
        assert torch.equal(gathered, torch.stack(rows))
        assert torch.equal(own, torch.arange(5.0) * (backend.rank + 1))
