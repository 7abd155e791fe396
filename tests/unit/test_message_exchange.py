"""Exchange of messages over direct connections: results, fallback to Gloo, and errors."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import pytest
from torch.distributed import HashStore

from unitrain.backends import message_exchange
from unitrain.backends.message_exchange import MAX_RANKS, MessageExchange
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.network import LOOPBACK
from unitrain.bootstrap.rendezvous import Rendezvous

T = TypeVar("T")
# The error depends on whether this rank sends its message before or after the other rank closes the connection.
PEER_LOST = "^(Connection closed by peer|Connection reset by peer|Broken pipe): the exchange with rank {} failed"


@pytest.fixture(autouse=True, params=[None, "0123"], ids=["without a key", "with a key"])
def job_key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.delenv("UNITRAIN_JOB_KEY", raising=False)
    if request.param is not None:
        monkeypatch.setenv("UNITRAIN_JOB_KEY", request.param)


def run_on_ranks(size: int, function: Callable[[int], T]) -> list[T]:
    """Call `function(rank)` in one thread per rank, and return the results in rank order."""
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(function, range(size), timeout=60))


def connect(size: int, *, declining_rank: int = -1) -> list[MessageExchange | None]:
    store = HashStore()

    def connect_rank(rank: int) -> MessageExchange | None:
        info = RankInfo("env", rank, size, rank)
        rendezvous = Rendezvous(info, store, LOOPBACK, timedelta(seconds=30))
        # Skip the cached property, which would wait for the other ranks while it holds a lock that threads share.
        vars(rendezvous)["own_address"] = LOOPBACK
        return MessageExchange.connect(rendezvous, is_wanted=rank != declining_rank, max_polling_seconds=0.005)

    return run_on_ranks(size, connect_rank)


def connect_all(size: int) -> list[MessageExchange]:
    return [exchange for exchange in connect(size) if exchange is not None]


def close(exchanges: list[MessageExchange]) -> None:
    for exchange in exchanges:
        exchange.close()


@pytest.mark.parametrize("size", [2, 3, MAX_RANKS])
def test_allgather_returns_all_messages_in_rank_order_on_every_rank(size: int) -> None:
    exchanges = connect_all(size)
    for length in (1, 4120, 3_000_000):  # the last length exceeds the socket buffers
        messages = [bytes([rank + 1]) * length for rank in range(size)]
        for step in range(3):
            results = run_on_ranks(size, lambda rank, messages=messages: exchanges[rank].allgather(messages[rank]))
            assert results == [b"".join(messages)] * size, (length, step)
    close(exchanges)


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_receives_the_bytes_that_other_ranks_send_to_it(size: int) -> None:
    exchanges = connect_all(size)
    for length in (0, 1, 3_000_000):

        def exchange(rank: int, length: int = length) -> list[bytes]:
            # Rank 0 sends nothing to rank 1, and every pair of ranks exchanges different numbers of bytes.
            sent = [bytes([rank, other]) * (length * rank + other) for other in range(size)]
            received = [bytearray(2 * (length * other + rank) * (other > 0 or rank != 1)) for other in range(size)]
            if rank == 0:
                sent[1] = b""
            exchanges[rank].exchange([*map(memoryview, sent)], [*map(memoryview, received)])
            return [bytes(part) for part in received]

        for rank, received in enumerate(run_on_ranks(size, exchange)):
            for other, part in enumerate(received):
                count = 0 if other == 0 and rank == 1 else length * other + rank
                assert part == (bytes([other, rank]) * count if other != rank else bytes(2 * count)), (length, rank)
    close(exchanges)


def test_allgather_waits_for_a_late_rank() -> None:
    exchanges = connect_all(3)

    def gather(rank: int) -> bytes:
        time.sleep(0.2 * rank)  # longer than the phase in which ranks poll without sleeping
        return bytes(exchanges[rank].allgather(b"%d" % rank))

    assert run_on_ranks(3, gather) == [b"012"] * 3
    close(exchanges)


def test_ranks_do_not_connect_if_one_rank_declines() -> None:
    assert connect(3, declining_rank=1) == [None] * 3


def test_ranks_do_not_connect_if_one_rank_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    create, calls = socket.create_server, iter(range(3))

    def fail_once(*args: object, **kwargs: object) -> socket.socket:
        if next(calls) == 1:
            raise OSError("too many open files")
        return create(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("unitrain.backends.message_exchange.socket.create_server", fail_once)
    assert connect(3) == [None] * 3


def test_ranks_do_not_connect_if_two_ranks_cannot_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_exchange, "_CONNECT_TIMEOUT_SECONDS", 0.5)
    original = message_exchange.connect_to_rank

    def fail_for_rank_2(
        host: str, port: int, token: str, own_rank: int, purpose: str, timeout_seconds: float
    ) -> socket.socket:
        if own_rank == 2:
            raise ConnectionRefusedError("connection refused")
        return original(host, port, token, own_rank, purpose, timeout_seconds)

    monkeypatch.setattr(message_exchange, "connect_to_rank", fail_for_rank_2)
    assert connect(3) == [None] * 3


def test_ranks_do_not_connect_if_there_are_too_many_or_only_one() -> None:
    assert connect(MAX_RANKS + 1) == [None] * (MAX_RANKS + 1)
    assert connect(1) == [None]


def test_ranks_listen_only_on_the_interface_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = []
    create = socket.create_server

    def record_address(address: tuple[str, int], **kwargs: int) -> socket.socket:
        addresses.append(address)
        return create(address, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr("unitrain.backends.message_exchange.socket.create_server", record_address)
    close(connect_all(2))
    assert addresses == [(LOOPBACK, 0)] * 2


def test_error_of_allgather_names_the_rank_that_has_closed_its_connection() -> None:
    exchanges = connect_all(2)
    exchanges[1].close()
    with pytest.raises(RuntimeError, match=PEER_LOST.format(1)):
        exchanges[0].allgather(b"message")
    for exchange in exchanges:
        with pytest.raises(RuntimeError, match="an earlier collective failed"):
            exchange.allgather(b"message")
    close(exchanges)


def test_allgather_raises_an_error_after_the_timeout() -> None:
    exchanges = connect_all(3)
    for exchange in exchanges:  # set after the ranks have connected, which may take longer
        exchange._timeout_seconds = 0.3

    def gather(rank: int) -> float:
        if rank == 1:
            return 0.0
        time.sleep(0.1 * rank)  # rank 2 starts later than rank 0 and must report a timeout too
        began = time.monotonic()
        with pytest.raises(RuntimeError, match=r"^Timed out waiting 0.3 s for the message of another rank"):
            exchanges[rank].allgather(b"message")
        return time.monotonic() - began

    first, _, last = run_on_ranks(3, gather)
    assert all(0.3 <= seconds < 20 for seconds in (first, last))
    close(exchanges)


def test_forked_process_does_not_keep_the_connections_open() -> None:
    reads, writes = os.pipe()
    exchanges = connect_all(2)
    child = os.fork()
    if child == 0:
        os.read(reads, 1)
        os._exit(0)
    try:
        exchanges[0].close()
        with pytest.raises(RuntimeError, match=PEER_LOST.format(0)):
            exchanges[1].allgather(b"message")
    finally:
        os.write(writes, b"x")
        os.waitpid(child, 0)
        for descriptor in (reads, writes):
            os.close(descriptor)
        close(exchanges)


def test_programs_that_are_not_ranks_cannot_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    create, strangers = socket.create_server, []

    def with_stranger(address: tuple[str, int], **kwargs: int) -> socket.socket:
        server = create(address, **kwargs)  # type: ignore[arg-type]
        stranger = socket.create_connection(server.getsockname(), timeout=10)
        stranger.sendall(b"0" * 200)
        strangers.append(stranger)
        return server

    monkeypatch.setattr("unitrain.backends.message_exchange.socket.create_server", with_stranger)
    exchanges = connect_all(2)
    assert run_on_ranks(2, lambda rank: bytes(exchanges[rank].allgather(b"%d" % rank))) == [b"01"] * 2
    close(exchanges)
    for stranger in strangers:
        stranger.close()


def test_rank_that_has_started_the_next_exchange_does_not_block_other_ranks() -> None:
    exchanges = connect_all(3)

    def gather(rank: int) -> list[bytes]:
        found = []
        for step in range(2):
            if rank == 2:
                time.sleep(0.1)
            found.append(bytes(exchanges[rank].allgather(b"%d%d" % (step, rank))))
        return found

    assert run_on_ranks(3, gather) == [[b"000102", b"101112"]] * 3
    close(exchanges)
