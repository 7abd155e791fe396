"""The alltoall and allgather of gradient compression and low-communication training, on all ranks and in subgroups."""

from __future__ import annotations

import gc
import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends import slow_network_exchange
from unitrain.backends.base import Backend
from unitrain.backends.slow_network_exchange import start_allgather, start_alltoall
from unitrain.testing import RankGroup

# Bytes per rank: around the size at which the order of messages changes on Gloo, and larger than a socket's buffer.
SIZES = [1, 65535, 65536, 65537, 3_000_000]


def bytes_from(sender: int, receiver: int, number: int, size: int) -> Tensor:
    """Return the bytes that `sender` sends to `receiver` in the operation with `number`."""
    generator = torch.Generator().manual_seed(100 * number + 10 * sender + receiver)
    return torch.randint(256, (size,), generator=generator, dtype=torch.uint8)


def exchange(backend: Backend, ranks: list[int]) -> int:
    """Exchange bytes between `ranks` of the backend, with all operations in flight at the same time. Return the number
    of operations that were messages of this module, rather than collectives of the transport."""
    group = dist.new_group(ranks)
    if backend.rank not in ranks:
        return 0
    own, size = group.rank(), group.size()
    started = []
    for number, (part, is_alltoall) in enumerate(itertools.product(SIZES, [True, False])):
        output = torch.empty(size * part, dtype=torch.uint8)
        if is_alltoall:
            source = torch.cat([bytes_from(own, receiver, number, part) for receiver in range(size)])
            work = start_alltoall(output, source, group)
            expected = torch.cat([bytes_from(sender, own, number, part) for sender in range(size)])
        else:
            source = bytes_from(own, 0, number, part)
            work = start_allgather(output, source, group)
            expected = torch.cat([bytes_from(sender, 0, number, part) for sender in range(size)])
        started.append((work, source, output, expected))  # the source is kept during the transfer
    for work, _, output, expected in started:
        if work is not None:
            work.wait()
            assert work.is_completed()
        assert torch.equal(output, expected)
    assert not slow_network_exchange._unfinished
    return sum(isinstance(work, slow_network_exchange._Exchange) for work, *_ in started)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_exchanges_equal_the_expected_bytes_on_ddp(size: int) -> None:
    with RankGroup("ddp", size) as group:
        assert group.run(exchange, list(range(size))) == [6] * size
        if size == 3:  # positions in these groups differ from ranks
            assert group.run(exchange, [0, 2]) == [6, 0, 6]
            assert group.run(exchange, [1, 2]) == [0, 6, 6]


def use_the_group_after_a_dropped_exchange(backend: Backend) -> bool:
    """Start an exchange without waiting for it, as if an exception had interrupted a backward pass, and then another
    one. Return whether the latter transfers the expected bytes."""
    group: Any = dist.group.WORLD
    if backend.rank == 1:
        time.sleep(0.5)  # until then, rank 0 cannot have sent its bytes
    start_allgather(torch.empty(6_000_000, dtype=torch.uint8), torch.zeros(3_000_000, dtype=torch.uint8), group)
    gc.collect()
    assert len(slow_network_exchange._unfinished) == 1
    backend.barrier()
    output = torch.empty(200_000, dtype=torch.uint8)
    work = start_allgather(output, torch.full((100_000,), backend.rank, dtype=torch.uint8), group)
    assert work is not None
    work.wait()
    backend.shutdown()
    assert not slow_network_exchange._unfinished
    return torch.equal(output, torch.arange(2).repeat_interleave(100_000))


def test_group_works_after_an_exchange_without_wait() -> None:
    with RankGroup("ddp", 2, backend_timeout_seconds=10) as group:
        assert group.run(use_the_group_after_a_dropped_exchange) == [True, True]


@pytest.mark.parametrize("size", [2, 3])
def test_exchanges_equal_the_expected_bytes_on_horovod(size: int) -> None:
    with RankGroup("horovod", size) as group:
        assert group.run(exchange, list(range(size))) == [0] * size
