"""Liveness check between rank 0 and the other ranks: connections, orderly exits and killed processes."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore

from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.messages import MessageStore
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.monitoring.liveness import LivenessCheck
from unitrain.monitoring.peer_connection import (
    ORDERLY_EXIT_MESSAGE,
    PREEMPTED_MESSAGE,
    DisconnectReason,
    PeerConnection,
)


class Ranks:
    """Liveness checks of several ranks in this process. `ended` receives the ranks that rank 0 reports as ended."""

    def __init__(self, size: int) -> None:
        self._size, self._store = size, HashStore()
        self.ended: queue.Queue[int] = queue.Queue()
        self.checks: dict[int, LivenessCheck] = {}
        self._thread = threading.Thread(target=self._start, args=(0,))
        self._thread.start()

    @property
    def port(self) -> int:
        """Port on which rank 0 listens."""
        return int(MessageStore(PrefixStore("liveness", self._store), "liveness").get("address").split()[0])

    def connect(self) -> None:
        """Start the other ranks, and wait until rank 0 is connected to them."""
        for rank in range(1, self._size):
            self._start(rank)
        self._thread.join()

    def _start(self, rank: int) -> None:
        info = RankInfo("env", rank, self._size, rank)
        rendezvous = Rendezvous(info, self._store, "127.0.0.1", timedelta(seconds=60))
        self.checks[rank] = LivenessCheck(rendezvous, self.ended.put if rank == 0 else lambda _: None)
        self.checks[rank].start()

    def close(self) -> None:
        """Close the connections of all ranks."""
        for check in self.checks.values():
            check.close()


@pytest.fixture(params=[None, "0123"], ids=["without a key", "with a key"])
def job_key(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNITRAIN_JOB_KEY", raising=False)
    if request.param is not None:
        monkeypatch.setenv("UNITRAIN_JOB_KEY", request.param)


@pytest.mark.usefixtures("job_key")
def test_orderly_exits_are_distinguished_from_killed_processes() -> None:
    ranks = Ranks(4)
    ranks.connect()
    assert sorted(ranks.checks[0]._peers) == [1, 2, 3]
    ranks.checks[2].close()
    deadline = time.monotonic() + 30
    while ranks.checks[0].exited_ranks != {2}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks.checks[3]._peers[0].interrupt()  # if a process is killed, the kernel closes its connections
    assert ranks.ended.get(timeout=30) == 3
    ranks.close()


@pytest.mark.usefixtures("job_key")
def test_silent_connections_do_not_delay_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unitrain.monitoring.liveness._ACCEPT_TIMEOUT_SECONDS", 60.0)
    ranks = Ranks(3)
    port = ranks.port
    with contextlib.ExitStack() as strangers:
        for content in [b""] * 30 + [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100]:
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            stranger.sendall(content)
        began = time.monotonic()
        ranks.connect()
        assert time.monotonic() - began < 30
    assert sorted(ranks.checks[0]._peers) == [1, 2]
    ranks.close()


@pytest.mark.usefixtures("job_key")
def test_oldest_silent_connections_are_closed_if_there_are_too_many() -> None:
    ranks = Ranks(2)
    port = ranks.port
    with contextlib.ExitStack() as strangers:
        for _ in range(100):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        ranks.connect()
    assert sorted(ranks.checks[0]._peers) == [1]
    ranks.close()


def test_rank_0_stops_waiting_for_missing_ranks_at_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("unitrain.monitoring.liveness._ACCEPT_TIMEOUT_SECONDS", 0.5)
    ranks = Ranks(3)
    with socket.create_connection(("127.0.0.1", ranks.port), timeout=10):
        ranks._thread.join(10)
    assert not ranks._thread.is_alive()
    assert ranks.checks[0]._peers == {}
    assert "ranks 1-2 did not connect to 127.0.0.1 within 0.5 s" in caplog.text


def test_rank_0_waits_longer_than_the_limit_of_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unitrain.monitoring.liveness._CONNECT_TIMEOUT_SECONDS", 0.2)
    ranks = Ranks(2)
    ranks._thread.join(1)
    assert ranks._thread.is_alive()
    monkeypatch.setattr("unitrain.monitoring.liveness._CONNECT_TIMEOUT_SECONDS", 10.0)
    ranks.connect()
    assert sorted(ranks.checks[0]._peers) == [1]
    ranks.close()


@pytest.mark.parametrize(
    ("messages", "disconnect"),
    [
        ([ORDERLY_EXIT_MESSAGE], DisconnectReason.ORDERLY),
        (["hello", PREEMPTED_MESSAGE], DisconnectReason.ORDERLY),
        ([], DisconnectReason.UNEXPECTED),
        (["hello"], DisconnectReason.UNEXPECTED),
        ([ORDERLY_EXIT_MESSAGE, "hello"], DisconnectReason.UNEXPECTED),
    ],
)
def test_connection_distinguishes_an_orderly_exit_of_its_peer_from_a_crash(
    messages: list[str], disconnect: DisconnectReason
) -> None:
    here, there = (PeerConnection(end) for end in socket.socketpair())
    for message in messages:
        there.send(message)
    there.close()
    received = []
    while isinstance(message := here.receive(), str):
        received.append(message)
    assert (received, message) == (messages, disconnect)
    here.close()


def test_ranks_start_without_a_liveness_check_if_rank_0_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: str, port: int) -> socket.socket:
        raise OSError("too many open files")

    monkeypatch.setattr("unitrain.monitoring.liveness.listen", fail)
    monkeypatch.setattr("unitrain.monitoring.liveness._ACCEPT_TIMEOUT_SECONDS", 60.0)
    ranks = Ranks(2)
    began = time.monotonic()
    ranks.connect()
    assert time.monotonic() - began < 30
    assert [check._peers for check in ranks.checks.values()] == [{}, {}]
    ranks.close()
