"""The consistency check before each collective: both kinds of exchange, and the number of messages of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from groups import nightly
from torch.testing import assert_close

from unitrain.backends import consistency
from unitrain.backends.base import Backend
from unitrain.backends.message_exchange import MessageExchange
from unitrain.backends.process_group import ProcessGroupBackend
from unitrain.errors import CollectiveMismatchError
from unitrain.monitoring.flight_recorder import CollectiveCall
from unitrain.testing import RankGroup, collectives, gradients
from unitrain.testing.cases import CASES as CONTRACT

GROUPS = [("ddp", 3), ("horovod", 2), *nightly(("ddp", 1), ("ddp", 2), ("horovod", 3))]
CASES = [
    case
    for name, case in CONTRACT.items()
    if case.__module__ in (collectives.__name__, gradients.__name__) and "compiled" not in name  # compiling is slow
]
EXCHANGES: dict[str, Any] = {"all_reduce": dist, "all_gather_single": consistency, "broadcast": dist, "isend": dist}


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def ranks_exchanging_sums(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """Yield ranks that exchange sums, like groups of more than MAX_GATHERING_RANKS ranks."""
    with RankGroup(*request.param) as group:
        group.run(enable_sum_exchange)
        yield group
        assert group.run(enable_sum_exchange) == [0] * group.size  # the processes have not been replaced


def enable_sum_exchange(_: Backend) -> int:
    """Make this process exchange sums. Return the previous maximum number of ranks that exchange rows."""
    before, consistency.MAX_GATHERING_RANKS = consistency.MAX_GATHERING_RANKS, 0
    return before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_sum_exchange_satisfies_the_contract(ranks_exchanging_sums: RankGroup, case: Callable[[Backend], None]) -> None:
    ranks_exchanging_sums.run(case)


def check_small_sums(backend: Backend) -> None:
    size = backend.size
    for dtype, count in itertools.product((torch.float64, torch.float32, torch.float16), (0, 1, 128, 129)):
        own = torch.linspace(-3, 5, count).to(dtype) + backend.rank
        total = sum((torch.linspace(-3, 5, count).to(dtype) + rank).double() for rank in range(size))
        assert_close(backend.allreduce(own, "sum"), torch.as_tensor(total).to(dtype).view(count))
        assert_close(backend.allreduce(own), torch.as_tensor(total / size).to(dtype).view(count))
    large = torch.tensor([2**53 + 1 + backend.rank])  # float64 cannot represent this number
    assert backend.allreduce(large, "sum").item() == sum(2**53 + 1 + rank for rank in range(size))
    special = backend.allreduce(torch.tensor([float("inf"), float("nan"), 1.0]), "sum")
    assert special[0].isinf()
    assert special[1].isnan()
    assert special[2] == size


def test_sum_exchange_reduces_small_tensors(ranks_exchanging_sums: RankGroup) -> None:
    ranks_exchanging_sums.run(check_small_sums)


def check_objects_of_any_size(backend: Backend) -> None:
    for length in (0, 1, 70_000):
        own = bytes([backend.rank]) * (length + backend.rank)
        assert backend.allgather_object(own) == [bytes([rank]) * (length + rank) for rank in range(backend.size)]
        for root in range(backend.size):
            assert backend.broadcast_object(own, root) == bytes([root]) * (length + root)


def test_sum_exchange_supports_objects_of_any_size(ranks_exchanging_sums: RankGroup) -> None:
    ranks_exchanging_sums.run(check_objects_of_any_size)


def record_exchanges(backend: Backend) -> list[list[tuple[str, int]]]:
    """For each collective, return the exchanges as pairs (operation, bytes of this rank's tensor)."""
    exchanges: list[tuple[str, int]] = []
    originals = {name: getattr(module, name) for name, module in EXCHANGES.items()}

    def record(name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            own = args[1] if name.startswith("all_gather") else args[0]
            exchanges.append((name, own.numel() * own.element_size()))
            return original(*args, **kwargs)

        return call

    results = []
    for name, original in originals.items():
        setattr(EXCHANGES[name], name, record(name, original))
    try:
        for collective in (
            backend.barrier,
            lambda: backend.allreduce(torch.ones(2)),
            lambda: backend.allreduce(torch.ones(100, dtype=torch.float64), "sum"),
            lambda: backend.allreduce(torch.ones(10_000)),
        ):
            exchanges.clear()
            collective()
            results.append(list(exchanges))
    finally:
        for name, original in originals.items():
            setattr(EXCHANGES[name], name, original)
    return results


def test_sum_exchange_sends_one_vector(ranks_exchanging_sums: RankGroup) -> None:
    vector = ("isend", 8 * (17 + 128))
    sent = {1: [0], 2: [1, 1], 3: [2, 1, 1]}[ranks_exchanging_sums.size]  # number of sends per rank, by number of ranks
    for count, exchanges in zip(sent, ranks_exchanging_sums.run(record_exchanges), strict=True):
        sum_over_ranks = count * [vector]
        # Horovod starts the allreduce before the check, without torch.distributed.
        data = [] if ranks_exchanging_sums.backend == "horovod" else [("all_reduce", 40_000)]
        assert exchanges == [sum_over_ranks] * 3 + [[*sum_over_ranks, *data]]


def test_sum_exchange_of_four_and_five_ranks_has_equal_bits_on_all_ranks() -> None:
    for size in (4, 5):
        with RankGroup("ddp", size) as group:
            group.run(enable_sum_exchange)
            group.run(check_small_sums)
            bits = group.run(reduce_random_numbers)
            assert bits == [bits[0]] * size


def reduce_random_numbers(backend: Backend) -> list[str]:
    generator = torch.Generator().manual_seed(backend.rank)
    own = torch.randn(100, dtype=torch.float64, generator=generator)
    total = sum(
        torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        for rank in range(backend.size)
    )
    summed = backend.allreduce(own, "sum")
    assert_close(summed, total)
    return [value.hex() for value in summed.tolist()]


def record_message_exchanges(backend: Backend) -> tuple[list[list[tuple[str, int]]], list[int]]:
    """For each collective, return the exchanges through torch.distributed. Also return the number of bytes of each
    message that was sent over direct connections."""
    direct: list[int] = []
    original = MessageExchange.allgather

    def record(exchange: MessageExchange, message: bytearray) -> bytearray:
        direct.append(len(message))
        return original(exchange, message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MessageExchange, "allgather", record)
        return record_exchanges(backend), direct


def use_gloo_for_rows(backend: Backend) -> None:
    """Make this process exchange rows over Gloo, like groups of more than `message_exchange.MAX_RANKS` ranks."""
    assert isinstance(backend, ProcessGroupBackend)
    backend._check_consistency.message_exchange = None


@pytest.mark.parametrize("is_direct", [True, False])
def test_consistency_check_sends_one_message_per_collective(*, is_direct: bool) -> None:
    num_bytes = 8 * 3 + 4096 + 24
    row = [] if is_direct else [("all_gather_single", num_bytes)]
    with RankGroup("ddp", 2) as group:
        if not is_direct:
            group.run(use_gloo_for_rows)
        results = group.run(record_message_exchanges)
    for exchanges, direct in results:
        assert exchanges == [row, row, row, [*row, ("all_reduce", 40_000)]]
        assert direct == (4 * [num_bytes] if is_direct else [])


def reduce_different_sizes(backend: Backend) -> str:
    try:
        backend.allreduce(torch.ones(200_000 if backend.rank == 0 else 1))
    except CollectiveMismatchError as error:
        assert backend.allreduce(torch.ones(300_000), "sum").unique().item() == backend.size
        return str(error)
    raise AssertionError("no error was raised")


def test_sum_exchange_names_the_ranks_that_differ(ranks_exchanging_sums: RankGroup) -> None:
    if ranks_exchanging_sums.size == 1:
        return
    texts = ranks_exchanging_sums.run(reduce_different_sizes)
    assert len(set(texts)) == 1
    assert "rank 0 called allreduce(float32 [200000], mean) (collective #" in texts[0]
    assert "called allreduce(float32 [1], mean) (collective #" in texts[0]


def test_fingerprints_are_equal_if_and_only_if_calls_match() -> None:
    float32 = torch.float32
    reference = CollectiveCall(3, "allreduce", "sum", -1, float32, (2, 3))
    assert reference.fingerprint == CollectiveCall(3, "allreduce", "sum", -1, float32, (2, 3)).fingerprint
    others = [
        CollectiveCall(4, "allreduce", "sum", -1, float32, (2, 3)),
        CollectiveCall(3, "reducescatter", "sum", -1, float32, (2, 3)),
        CollectiveCall(3, "allreduce", "mean", -1, float32, (2, 3)),
        CollectiveCall(3, "allreduce", "sum", -1, torch.float64, (2, 3)),
        CollectiveCall(3, "allreduce", "sum", -1, float32, (3, 2)),
        CollectiveCall(3, "allreduce", "sum", -1, float32, (2, 3, 1)),
        CollectiveCall(3, "allreduce", "sum", -1, float32, (2, 3), is_rejected=True),
        CollectiveCall(3, "broadcast", "sum", 0, float32, (2, 3)),
    ]
    found = {call.fingerprint for call in [reference, *others]}
    assert len(found) == 1 + len(others)
    assert all(0 <= fingerprint < 2**63 for fingerprint in found)
    uneven = [CollectiveCall(0, "allgather", "", -1, float32, (rows, 3)) for rows in (0, 5)]
    assert uneven[0].fingerprint == uneven[1].fingerprint
    assert uneven[0].fingerprint != CollectiveCall(0, "allgather", "", -1, float32, (5, 4)).fingerprint
    objects = [CollectiveCall(0, "broadcast_object", "", 0, torch.uint8, (size,)) for size in (0, 5)]
    assert objects[0].fingerprint == objects[1].fingerprint
