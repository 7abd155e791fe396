"""Every dtype with every operation on Horovod's process group, compared with arithmetic in plain torch and Python."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import nightly
from torch import Tensor

from unitrain.backends.base import Backend
from unitrain.errors import UnsupportedError
from unitrain.testing import RankGroup

FLOATS = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
]  # fmt: skip
INTEGERS = [
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *INTEGERS, torch.bool, *COMPLEX]
# One dtype of each kind and width, because splitting and memory layouts depend only on these properties.
TYPICAL_DTYPES = [
    torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.uint64, torch.bool, torch.complex64,
    torch.complex128,
]  # fmt: skip
OPS = ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
TYPICAL_OPS = ["SUM", "AVG", "MAX", "BXOR", "PREMUL_SUM"]  # one operation of each kind
FACTOR = 0.5
COUNT = 23
# In bytes: the default limit, which these tests do not reach, and a limit that splits most tensors into several pieces.
LIMITS = [2**29, 40]
LIMITS_AND_DTYPES = pytest.mark.parametrize(
    ("limit", "dtypes"),
    [
        pytest.param(LIMITS[0], DTYPES, id="whole"),
        pytest.param(LIMITS[1], TYPICAL_DTYPES, id="pieces", marks=pytest.mark.ci),
        pytest.param(LIMITS[1], DTYPES, id="pieces of every dtype", marks=pytest.mark.nightly),
    ],
)


def create_input(rank: int, dtype: torch.dtype, count: int = COUNT) -> Tensor:
    """Return a rank's input tensor. Its values reveal operations that compute in a dtype that is too narrow."""
    generator = torch.Generator().manual_seed(11 * rank + 1)
    small = torch.randint(-3, 4, (2, count), generator=generator)
    if dtype == torch.bool:
        return small[0] > 0
    if dtype.is_complex:
        return torch.complex(small[0] * 0.5, small[1] * 0.5).to(dtype)
    if dtype.is_floating_point:
        result = (small[0] * 0.5).to(dtype)
        if rank == 1 and count:
            result[0] = torch.nan
        return result
    limits = torch.iinfo(dtype)
    chosen = torch.randint(0, 4, (count,), generator=generator).tolist()
    ends = [limits.max, limits.min, limits.max // 2 + 2]
    numbers = [
        ends[choice] if choice < 3 else int(one) % (limits.max + 1)
        for choice, one in zip(chosen, small[0], strict=True)
    ]
    return torch.tensor([one - (1 << limits.bits) if one >= 1 << 63 else one for one in numbers]).to(dtype)


def as_numbers(tensor: Tensor) -> list[int]:
    """Return integers as Python integers, which do not overflow."""
    bits = torch.iinfo(tensor.dtype).bits
    signed = torch.iinfo(tensor.dtype).min < 0
    return [int(one) if signed else int(one) % (1 << bits) for one in tensor.view(-1).to(torch.int64).tolist()]


def from_numbers(numbers: list[int], dtype: torch.dtype) -> Tensor:
    wrapped = [one % (1 << 64) for one in numbers]
    return torch.tensor([one - (1 << 64) if one >= 1 << 63 else one for one in wrapped], dtype=torch.int64).to(dtype)


def compute_expected(inputs: list[Tensor], op: str) -> Tensor | None:
    """Return the reduction of the ranks' `inputs`, or None if it is undefined."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        stack = torch.stack(inputs)
        found = {"SUM": stack.any(0), "MAX": stack.any(0), "BOR": stack.any(0), "MIN": stack.all(0)}
        found |= {"PRODUCT": stack.all(0), "BAND": stack.all(0), "BXOR": stack.sum(0) % 2 == 1}
        return found.get(op)
    if dtype in INTEGERS:
        combine: dict[str, Callable[[int, int], int]] = {
            "SUM": operator.add, "PRODUCT": operator.mul, "MIN": min, "MAX": max,
            "BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor,
        }  # fmt: skip
        columns = list(zip(*(as_numbers(one) for one in inputs), strict=True))
        if op == "AVG" and dtype != torch.uint64:  # defined only if every mean is an integer
            totals = [sum(column) for column in columns]
            if any(total % len(inputs) for total in totals):
                return None
            return from_numbers([total // len(inputs) for total in totals], dtype)
        if op not in combine:
            return None
        return from_numbers([functools.reduce(combine[op], column) for column in columns], dtype)
    if op in ("BAND", "BOR", "BXOR") or (dtype.is_complex and op in ("MIN", "MAX")):
        return None
    if dtype == torch.complex32 and op == "PRODUCT":  # torch does not implement it
        return None
    wide = torch.stack([one.to(torch.complex128 if dtype.is_complex else torch.float64) for one in inputs])
    result = {
        "SUM": lambda: wide.sum(0),
        "AVG": lambda: wide.sum(0) / len(inputs),
        "PRODUCT": lambda: wide.prod(0),
        "PREMUL_SUM": lambda: wide.sum(0) * FACTOR,
        "MIN": lambda: functools.reduce(torch.minimum, wide),
        "MAX": lambda: functools.reduce(torch.maximum, wide),
    }[op]()
    return result.to(dtype)


def torch_op(op: str) -> Any:
    return dist._make_nccl_premul_sum(FACTOR) if op == "PREMUL_SUM" else getattr(dist.ReduceOp, op)


def create_options(options_class: Any, op: str, root: int | None = None) -> Any:
    options = options_class()
    options.reduceOp = torch_op(op)
    if root is not None:
        options.rootRank = root
    return options


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def assert_same(found: Tensor, wanted: Tensor, *case: Any) -> None:
    assert found.dtype == wanted.dtype, case
    assert found.shape == wanted.shape, case
    wide = torch.complex128 if wanted.dtype.is_complex else torch.float64
    if wanted.dtype.is_floating_point or wanted.dtype.is_complex:
        rounding = 1e-6 if wanted.dtype.itemsize > 2 else 2e-3
        torch.testing.assert_close(
            found.to(wide), wanted.to(wide), rtol=rounding, atol=0, equal_nan=True, msg=lambda text: f"{case}: {text}"
        )
    else:
        assert torch.equal(as_bytes(found), as_bytes(wanted)), (*case, found, wanted)


def limit_pieces(limit: int) -> None:
    from unitrain.backends.horovod import tensors

    tensors.MAX_PIECE_BYTES = limit


def run_reductions(backend: Backend, limit: int, dtypes: list[torch.dtype]) -> list[str]:
    """Reduce each of `dtypes` with OPS, or TYPICAL_DTYPES with TYPICAL_OPS, in each collective. Return the messages of
    the errors that unsupported reductions raise."""
    limit_pieces(limit)
    group: Any = dist.group.WORLD
    rank, size = backend.rank, backend.size
    unsupported_messages = []
    for dtype, op in itertools.product(dtypes, TYPICAL_OPS if dtypes == TYPICAL_DTYPES else OPS):
        inputs = [create_input(one, dtype) for one in range(size)]
        wanted = compute_expected(inputs, op)
        if wanted is None:
            own = inputs[rank].clone()
            try:
                group.allreduce([own], create_options(dist.AllreduceOptions, op)).wait()
            except UnsupportedError as error:
                unsupported_messages.append(str(error))
            else:
                raise AssertionError(f"{dtype} by {op} raised no error, and became {own}")
            continue
        own = inputs[rank].clone()
        work = group.allreduce([own], create_options(dist.AllreduceOptions, op))
        (from_future,) = work.get_future().wait()
        work.wait()
        assert_same(own, wanted, "allreduce", dtype, op)
        assert from_future.data_ptr() == own.data_ptr()

        both = [inputs[rank].clone(), inputs[rank][:0].clone()]
        group.allreduce_coalesced(both, create_options(dist.AllreduceCoalescedOptions, op)).wait()
        assert_same(both[0], wanted, "allreduce_coalesced", dtype, op)

        own = inputs[rank].clone()
        group.reduce([own], create_options(dist.ReduceOptions, op, size - 1)).wait()
        assert_same(own, wanted if rank == size - 1 else inputs[rank], "reduce", dtype, op)

        wholes = [torch.cat([create_input(one + part, dtype) for part in range(size)]) for one in range(size)]
        full_expected = compute_expected(wholes, op)
        assert full_expected is not None
        part_wanted = full_expected.view(size, COUNT)[rank]
        part = torch.empty_like(inputs[rank])
        group.reduce_scatter_tensor_coalesced(
            [part], [wholes[rank]], create_options(dist.ReduceScatterOptions, op)
        ).wait()
        assert_same(part, part_wanted, "reduce_scatter_tensor_coalesced", dtype, op)
        part = torch.empty_like(inputs[rank])
        parts = [*wholes[rank].view(size, COUNT)]
        group.reduce_scatter([part], [parts], create_options(dist.ReduceScatterOptions, op)).wait()
        assert_same(part, part_wanted, "reduce_scatter", dtype, op)
        assert torch.equal(as_bytes(wholes[rank]), as_bytes(torch.cat(parts)))
    return unsupported_messages


# Memory layouts. Each function returns a tensor with the values of a flat tensor of 24 elements, or with some of them.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda flat: flat.clone(),
    "rows": lambda flat: flat.clone().view(6, 4),
    "transposed": lambda flat: flat.clone().view(4, 6).t(),
    "every other": lambda flat: torch.stack([flat, flat], 1)[:, 0],
    "no dimensions": lambda flat: flat[3].clone(),
    "expanded rows": lambda flat: flat.clone().view(2, 12)[:, ::2],
    "empty": lambda flat: flat[:0].clone(),
    "empty rows": lambda flat: flat[:0].clone().view(0, 3),
}


def create_input_in_layout(layout: str, rank: int, dtype: torch.dtype) -> Tensor:
    return LAYOUTS[layout](create_input(rank, dtype, 24))


def transfer_layouts(backend: Backend, limit: int, dtypes: list[torch.dtype], every_layout: bool) -> None:
    """Reduce and transfer tensors that are non-contiguous, empty or scalar."""
    limit_pieces(limit)
    group: Any = dist.group.WORLD
    rank, size = backend.rank, backend.size
    for layout, dtype in itertools.product(LAYOUTS, dtypes):
        if not every_layout and dtype not in TYPICAL_DTYPES and layout != "transposed":
            continue
        inputs = [create_input_in_layout(layout, one, dtype) for one in range(size)]
        for op in (
            ("SUM", "MAX", "BXOR") if dtype in (torch.float32, torch.complex64, torch.int16, torch.uint64) else ()
        ):
            wanted = compute_expected([one.reshape(-1) for one in inputs], op)
            if wanted is None:
                continue
            own = create_input_in_layout(layout, rank, dtype)
            group.allreduce([own], create_options(dist.AllreduceOptions, op)).wait()
            assert_same(own, wanted.view(own.shape), "allreduce", layout, dtype, op)
            if not inputs[0].dim():
                continue
            output = create_input_in_layout(layout, rank, dtype)
            full_input = torch.cat([inputs[rank]] * size)
            group._reduce_scatter_base(output, full_input, create_options(dist.ReduceScatterOptions, op)).wait()
            assert_same(output, wanted.view(own.shape), "reduce_scatter", layout, dtype, op)

        own = create_input_in_layout(layout, rank, dtype)
        dist.broadcast(own, size - 1)
        assert torch.equal(as_bytes(own), as_bytes(inputs[-1])), ("broadcast", layout, dtype)

        parts = [create_input_in_layout(layout, 5, dtype) for _ in range(size)]
        dist.all_gather(parts, inputs[rank])
        for part, source in zip(parts, inputs, strict=True):
            assert torch.equal(as_bytes(part), as_bytes(source)), ("all_gather", layout, dtype)

        at_root = [create_input_in_layout(layout, 5, dtype) for _ in range(size)]
        dist.gather(inputs[rank], at_root if rank == 0 else None, dst=0)
        for part, source in zip(at_root if rank == 0 else [], inputs, strict=False):
            assert torch.equal(as_bytes(part), as_bytes(source)), ("gather", layout, dtype)

        own = create_input_in_layout(layout, 5, dtype)
        dist.scatter(own, inputs if rank == size - 1 else None, src=size - 1)
        assert torch.equal(as_bytes(own), as_bytes(inputs[rank])), ("scatter", layout, dtype)

        received = [create_input_in_layout(layout, 5, dtype) for _ in range(size)]
        dist.all_to_all(received, [create_input_in_layout(layout, rank + target, dtype) for target in range(size)])
        for source, part in enumerate(received):
            assert torch.equal(as_bytes(part), as_bytes(create_input_in_layout(layout, source + rank, dtype))), (
                layout,
                dtype,
            )

        if not inputs[0].dim():
            continue
        gathered = torch.cat(inputs)
        output = torch.zeros_like(gathered)
        dist.all_gather_into_tensor(output, inputs[rank])
        assert torch.equal(as_bytes(output), as_bytes(gathered)), ("all_gather_into_tensor", layout, dtype)
        rows = [
            torch.cat([create_input_in_layout(layout, source + target, dtype) for target in range(size)])
            for source in range(size)
        ]
        output = torch.zeros_like(rows[0])
        dist.all_to_all_single(output, rows[rank])
        wanted = torch.cat([one.chunk(size)[rank] if len(one) else one for one in rows])
        assert torch.equal(as_bytes(output), as_bytes(wanted)), ("all_to_all_single", layout, dtype)


def transfer_conjugates(backend: Backend) -> None:
    limit_pieces(LIMITS[0])
    group: Any = dist.group.WORLD
    inputs = [create_input(rank, torch.complex64).conj() for rank in range(backend.size)]
    parts = [torch.zeros(COUNT, dtype=torch.complex64) for _ in inputs]
    group.allgather([parts], [inputs[backend.rank]]).wait()
    for part, source in zip(parts, inputs, strict=True):
        assert torch.equal(part, source.resolve_conj())
    received = create_input(backend.rank, torch.complex64).conj()
    group.broadcast([received], dist.BroadcastOptions()).wait()
    assert torch.equal(received.resolve_conj(), inputs[0].resolve_conj())


def run_coalesced_operations(backend: Backend) -> None:
    """Reduce and gather several tensors in one call. The first, the last or all tensors may be empty."""
    limit_pieces(LIMITS[0])
    rank, size = backend.rank, backend.size
    group: Any = dist.group.WORLD
    for counts in ((3, 0), (0, 3), (0, 0), (2, 3, 4), (5,) * 12, (4_000_000, 0)):
        if rank == size - 1:
            backend.barrier()  # delays this rank, so that a work object that completes too early is detected
        own = [torch.full((count,), rank + 1.0) for count in counts]
        work = group.allreduce_coalesced(own, create_options(dist.AllreduceCoalescedOptions, "SUM"))
        if rank != size - 1:
            backend.barrier()
        found = work.get_future().wait()
        assert [one.data_ptr() for one in found] == [one.data_ptr() for one in own], counts
        for one in own:
            assert torch.equal(one, torch.full_like(one, size * (size + 1) / 2)), counts
        work.wait()
        assert work.is_completed()
        assert work.is_success()

        full_input = [torch.full((count * size,), rank + 1.0) for count in counts]
        outputs = [torch.zeros(count) for count in counts]
        work = group.reduce_scatter_tensor_coalesced(
            outputs, full_input, create_options(dist.ReduceScatterOptions, "SUM")
        )
        work.wait()
        for one in outputs:
            assert torch.equal(one, torch.full_like(one, size * (size + 1) / 2)), counts

        outputs = [torch.zeros(count * size) for count in counts]
        work = group.allgather_into_tensor_coalesced(outputs, [torch.full((n,), rank + 1.0) for n in counts])
        assert len(work.get_future().wait()) == len(counts)
        for one, count in zip(outputs, counts, strict=True):
            assert torch.equal(one, torch.arange(1.0, size + 1).repeat_interleave(count)), counts


def run_coalesced_gathers(backend: Backend) -> None:
    """Gather lists of tensors of every dtype, including empty tensors."""
    limit_pieces(LIMITS[0])

    def tensors(rank: int, dtype: torch.dtype) -> list[Tensor]:
        return [
            create_input(rank, dtype),
            create_input(rank + 5, dtype, 6).view(2, 3).t(),
            create_input(rank, dtype, 0),
        ]

    for dtype in DTYPES:
        outputs = [[torch.zeros_like(one) for one in tensors(0, dtype)] for _ in range(backend.size)]
        dist.all_gather_coalesced(outputs, tensors(backend.rank, dtype))
        for rank, found in enumerate(outputs):
            for one, wanted in zip(found, tensors(rank, dtype), strict=True):
                assert torch.equal(as_bytes(one), as_bytes(wanted)), dtype


def run_torch_coalescing(backend: Backend) -> None:
    many = [torch.full((3,), backend.rank + 1.0) for _ in range(40)]  # more than can be in flight
    dist.all_reduce_coalesced(many)
    assert all(torch.equal(one, torch.full((3,), backend.size * (backend.size + 1) / 2)) for one in many)
    tensors = [torch.full((3,), backend.rank + 1.0), torch.zeros(0)]
    with dist._coalescing_manager(async_ops=True) as works:
        for tensor in tensors:
            dist.all_reduce(tensor)
    works.wait()
    assert torch.equal(tensors[0], torch.full((3,), backend.size * (backend.size + 1) / 2))


def count_pieces(backend: Backend) -> list[int]:
    """Return the number of operations that each collective starts for tensors of 1,000 bytes."""
    limit_pieces(250)
    group: Any = dist.group.WORLD
    if hasattr(group, "_get_backend") and not hasattr(group, "_num_issued"):
        group = group._get_backend(torch.device("cpu"))
    size, counts = backend.size, []
    own = torch.arange(250.0)
    collectives: list[Callable[[], Any]] = [
        lambda: dist.broadcast(own.clone(), 0),
        lambda: dist.all_reduce(own.clone()),
        lambda: dist.all_gather_into_tensor(own.new_empty(250 * size), own),
        lambda: dist.reduce_scatter_tensor(own.new_empty(250), own.repeat(size)),
        lambda: dist.all_to_all_single(own.new_empty(size, 250), own.repeat(size, 1)),
    ]
    for collective in collectives:
        before = sum(group._num_issued.values())
        collective()
        counts.append(sum(group._num_issued.values()) - before)
    return counts


def exchange_beyond_the_limit(backend: Backend, ranks: list[int]) -> list[str]:
    """Return the errors of exchanges and of sparse allreduces in which `ranks` send too many bytes."""
    from unitrain.backends.horovod import operations, sparse

    operations.MAX_ALLTOALL_BYTES, sparse.MAX_GATHER_BYTES = 100, 100 * backend.size
    rank, size = backend.rank, backend.size
    rows = [10 if sender in ranks else 2 for sender in range(size)]
    texts = []
    for turn in range(20):  # enough turns to reuse names
        is_large = turn % 4 == 3
        sent, received = ([rows[rank]] * size, rows) if is_large else ([2] * size, [2] * size)
        own, result = torch.full((sum(sent),), float(rank)), torch.full((sum(received),), -1.0)
        indices = torch.arange(10 if is_large and rank in ranks else 2)[None]
        total = torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1]), (10,), is_coalesced=True)
        if not is_large:
            dist.all_to_all_single(result, own, received, sent)
            assert result.tolist() == [float(sender) for sender in range(size) for _ in range(2)]
            dist.all_reduce(total)
            assert total.to_dense().tolist() == [float(size)] * 2 + [0.0] * 8
            continue
        exchange = functools.partial(dist.all_to_all_single, result, own, received, sent)
        for collective in (exchange, functools.partial(dist.all_reduce, total)):
            with pytest.raises(UnsupportedError) as caught:
                collective()
            texts.append(str(caught.value))
    return texts


@pytest.fixture(scope="module", params=[1, 3, *nightly(2)])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup("horovod", request.param) as group:
        yield group


@LIMITS_AND_DTYPES
def test_every_dtype_and_operation_is_reduced_or_raises(
    ranks: RankGroup, limit: int, dtypes: list[torch.dtype]
) -> None:
    rank_results = ranks.run(run_reductions, limit, dtypes)
    assert all(one == rank_results[0] for one in rank_results)
    text = "\n".join(rank_results[0])
    for dtype in (one for one in dtypes if one in INTEGERS and (len(rank_results) > 1 or one == torch.uint64)):
        name = str(dtype).removeprefix("torch.")
        assert f"cannot reduce {name} by AVG. Use SUM and divide" in text
    assert "cannot reduce complex64 by MAX." in text
    assert "cannot reduce float32 by BXOR." in text
    assert "cannot reduce bool by AVG." in text


@LIMITS_AND_DTYPES
@pytest.mark.parametrize("every_layout", [False, *nightly(True)])
def test_every_layout_is_reduced_and_transferred(
    ranks: RankGroup, limit: int, dtypes: list[torch.dtype], every_layout: bool
) -> None:
    ranks.run(transfer_layouts, limit, dtypes, every_layout)


def test_lazily_conjugated_tensors_are_transferred(ranks: RankGroup) -> None:
    ranks.run(transfer_conjugates)


def test_a_coalesced_operation_is_complete_when_all_its_tensors_are_complete(ranks: RankGroup) -> None:
    ranks.run(run_coalesced_operations)
    ranks.run(run_torch_coalescing)
    ranks.run(run_coalesced_gathers)


def test_large_tensors_are_sent_in_pieces(ranks: RankGroup) -> None:
    size = ranks.size
    for broadcast, allreduce, allgather, reduce_scatter, exchange in ranks.run(count_pieces):
        assert broadcast == 4
        assert allreduce == -(-250 // (250 // 4))
        assert allgather == -(-250 // (250 // (4 * size)))
        assert reduce_scatter == -(-250 // (250 // (4 * size)))
        assert exchange == -(-1000 // (250 // size))


def test_an_exchange_that_is_too_large_on_some_ranks_raises_on_every_rank() -> None:
    with RankGroup("horovod", 3) as group:
        for large_ranks in ([0], [2], [0, 1, 2]):
            first, *others = group.run(exchange_beyond_the_limit, large_ranks)
            assert others == [first] * 2
            alltoall, allreduce = first[:2]
            assert "alltoall with splits: Horovod supports at most 100. Exchange fewer rows" in alltoall
            assert "sparse tensor take up too many bytes on a rank: Horovod gathers at most 100 bytes from" in allreduce
            assert first == [alltoall, allreduce] * 5
