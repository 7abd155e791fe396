"""The supervisor's connections to ranks: which rank has ended first, and how."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from unitrain.bootstrap.authentication import authenticate
from unitrain.monitoring import supervisor_client
from unitrain.monitoring.peer_connection import DisconnectReason
from unitrain.supervisor.ranks import MAX_UNAUTHENTICATED, RankConnections
from unitrain.supervisor.standby import Standby

KEY = "0123456789abcdef"
# A rank without torch, which ends in order, after a checkpoint, or is killed.
RANK = """
import os, signal, sys, time
from unitrain.bootstrap.authentication import authenticate
from unitrain.monitoring import supervisor_client
rank, ending = int(sys.argv[1]), sys.argv[2]
received = []
if ending != "has no handler":
    signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
supervisor_client.connect(rank, is_standby=ending == "is standby")
print("here", flush=True)
if ending == "is standby":
    supervisor_client.wait_for_start()
    supervisor_client.connect(rank)
    print("started", flush=True)
if ending == "handles SIGTERM" or ending == "has no handler":
    deadline = time.monotonic() + 60
    while not received and time.monotonic() < deadline:
        time.sleep(0.01)
    supervisor_client.report_preempted()
sys.stdin.readline()
if ending == "is killed after shutdown":
    supervisor_client.report_shutdown()
if ending.startswith("is killed"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Rank:
    """A process that is a rank of job "mine"."""

    def __init__(self, ranks: RankConnections, rank: int, ending: str, job: str = "mine", key: str = KEY) -> None:
        variables = {"UNITRAIN_SUPERVISOR": ranks.address, "UNITRAIN_JOB": job, "UNITRAIN_JOB_KEY": key}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), ending],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it is connected, or was asked to exit

    def end(self) -> int:
        _, self.stderr = self.process.communicate("\n", timeout=30)
        return self.process.returncode


def wait_until(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop_process(process: subprocess.Popen[str]) -> None:
    """Send SIGSTOP, and wait until the process is stopped, because the kernel stops it asynchronously."""
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def test_the_first_killed_rank_is_known_unless_another_rank_ended_before() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        dies, leaves = Rank(ranks, 1, "is killed"), Rank(ranks, 0, "ends in order")
        wait_until(lambda: len(ranks._connections) == 2)
        assert dies.end() == -signal.SIGKILL
        wait_until(lambda: ranks.crashed_ranks)
        assert leaves.end() == 0
        ranks.exit_all_ranks(30)
        assert (ranks.crashed_ranks, ranks.first_crashed_rank, ranks.unreachable_ranks, ranks.is_preempted) == (
            [1],
            1,
            [],
            False,
        )
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        dies, leaves = Rank(ranks, 1, "is killed"), Rank(ranks, 0, "ends in order")
        wait_until(lambda: len(ranks._connections) == 2)
        assert leaves.end() == 0
        wait_until(lambda: len(ranks._connections) == 1)
        dies.end()
        ranks.exit_all_ranks(30)
        assert (ranks.crashed_ranks, ranks.first_crashed_rank) == ([1], None)


@pytest.mark.parametrize("ending", ["is killed", "is killed after shutdown"])
def test_a_crash_after_the_shutdown_of_the_backend_is_distinguished(ending: str) -> None:
    """A script may call os._exit at its end, which does not require a restart."""
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        rank = Rank(ranks, 0, ending)
        wait_until(lambda: ranks.num_running == 1 or ending == "is killed after shutdown")
        assert rank.end() == -signal.SIGKILL
        wait_until(lambda: ranks.crashed_ranks)
        assert ranks.has_running_rank_crashed == (ending == "is killed")


@pytest.mark.parametrize("early", [True, False])
def test_rank_0_receives_the_request_to_end_before_or_after_it_connects(early: bool) -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        if early:
            ranks.request_exit()
        request_options = Rank(ranks, 0, "handles SIGTERM")
        if not early:
            ranks.request_exit()
        assert request_options.end() == 0
        wait_until(lambda: ranks.is_preempted)
        assert ranks.crashed_ranks == []


def test_remaining_ranks_of_an_attempt_exit_immediately() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        left = Rank(ranks, 1, "handles SIGTERM")
        wait_until(lambda: ranks._connections)
        ranks.exit_all_ranks(30)
        late = Rank(ranks, 0, "handles SIGTERM")
        for rank in (left, late):
            assert rank.process.wait(30) == 1
            rank.process.communicate()
        wait_until(lambda: ranks.crashed_ranks == [1, 0])


def test_no_rank_crashed_first_if_the_launcher_kills_the_ranks_after_a_host_was_lost() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        lost, dies = Rank(ranks, 1, "ends in order"), Rank(ranks, 0, "is killed")
        wait_until(lambda: len(ranks._connections) == 2)
        with ranks._state_changed:
            ranks._record_disconnect(1, DisconnectReason.UNREACHABLE, "")
        dies.end()
        lost.end()
        wait_until(lambda: ranks.crashed_ranks)
        assert (ranks.unreachable_ranks, ranks.crashed_ranks, ranks.first_crashed_rank) == ([1], [0], None)


def test_a_rank_that_does_not_exit_is_unreachable_and_has_not_crashed() -> None:
    num_threads = threading.active_count()
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        stopped = Rank(ranks, 0, "ends in order")
        wait_until(lambda: ranks._connections)
        stop_process(stopped.process)
        ranks.exit_all_ranks(0.1)
    wait_until(lambda: threading.active_count() <= num_threads)
    assert (ranks.unreachable_ranks, ranks.crashed_ranks) == ([0], [])
    stopped.process.kill()
    stopped.process.communicate()


def test_standby_ranks_run_after_they_are_started() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1", is_standby=True) as ranks:
        early = Rank(ranks, 0, "is standby")
        wait_until(lambda: ranks.num_ready == 1)
        assert ranks.num_running == 0
        ranks.start()
        late = Rank(ranks, 1, "is standby")  # starts immediately
        wait_until(lambda: ranks.num_running == 2)
        assert not ranks.has_disconnected_ranks
        assert not ranks.has_running_rank_crashed
        assert (early.end(), late.end()) == (0, 0)
        ranks.exit_all_ranks(30)
        assert ranks.crashed_ranks == []


@pytest.mark.parametrize("requested", [True, False])
def test_standby_ranks_exit_with_code_0_if_they_are_not_started(requested: bool) -> None:
    """On request, or if the supervisor has exited. Otherwise, their launcher would report a failure."""
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1", is_standby=True) as ranks:
        rank = Rank(ranks, 0, "is standby")
        wait_until(lambda: ranks.num_ready == 1)
        if requested:
            assert ranks.exit_remaining_ranks(30)
            assert ranks.has_disconnected_ranks
    assert rank.process.wait(30) == 0
    assert "started" not in rank.process.communicate()[0]


def test_a_stopped_standby_rank_does_not_respond() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1", is_standby=True) as ranks:
        standby_ranks = [Rank(ranks, rank, "is standby") for rank in range(2)]
        wait_until(lambda: ranks.num_ready == 2)
        assert ranks.wait_for_responses(30)
        stop_process(standby_ranks[1].process)
        assert not ranks.wait_for_responses(0.5)
        standby_ranks[1].process.send_signal(signal.SIGCONT)
        assert ranks.wait_for_responses(30)
    for rank in standby_ranks:
        rank.process.communicate(timeout=30)
        assert rank.process.returncode == 0


def test_standby_ranks_that_do_not_exit_are_not_awaited_before_the_job_ends() -> None:
    """They are neither started nor awaited if one is stopped; if one has exited, the others are not awaited."""
    has_begun, may_end, standby = threading.Event(), threading.Event(), Standby(Mock(uses_standby=True))

    def cancel() -> None:
        has_begun.set()
        may_end.wait(30)

    for can_start in (True, False):
        standby._attempt = Mock(
            hosts=(), can_start=can_start, wait_for_responses=lambda: False, is_ready=True, cancel=cancel
        )
        standby._is_ready = True
        has_begun.clear()
        began = time.monotonic()
        if can_start:
            assert standby.start_attempt((), Mock()) is None
        else:
            standby.update(Mock())
        assert time.monotonic() - began < 10
        assert has_begun.wait(30)
    may_end.set()
    standby.cancel()
    assert not any(thread.name == "unitrain standby" for thread in threading.enumerate())


def test_ranks_end_after_a_checkpoint_if_the_supervisor_has_ended() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        handles, plain = Rank(ranks, 0, "handles SIGTERM"), Rank(ranks, 1, "has no handler")
        wait_until(lambda: len(ranks._connections) == 2)
    assert handles.end() == 0
    assert plain.end() == -signal.SIGTERM


def test_a_rank_whose_error_output_nobody_reads_ends_if_the_supervisor_has_ended() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        rank = Rank(ranks, 0, "has no handler")
        wait_until(lambda: ranks._connections)
        assert rank.process.stderr is not None
        rank.process.stderr.close()  # the reader, such as the launcher, has exited
        rank.process.stderr = None
    assert rank.end() == -signal.SIGTERM


def test_connections_without_the_key_or_job_are_ignored() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        other = Rank(ranks, 0, "ends in order", job="another")
        without_key = Rank(ranks, 0, "ends in order", key="another")
        host, _, port = ranks.address.rpartition(":")
        for text in (b"GET / HTTP/1.1\r\n", b"[1]\n", b"x" * 2000):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(text)
        assert (other.end(), without_key.end()) == (0, 0)
        assert "rank 0 cannot reach unitrain launch" in without_key.stderr
        ranks.exit_all_ranks(0)
        assert (ranks.crashed_ranks, ranks.unreachable_ranks, ranks.is_preempted) == ([], [], False)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:x", ":"])
def test_an_invalid_supervisor_address_is_reported_without_an_error(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNITRAIN_SUPERVISOR", address)
    supervisor_client.connect(0)
    assert f"rank 0 cannot reach unitrain launch at {address}" in capsys.readouterr().err


def test_rank_is_served_after_connections_could_not_be_accepted() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks,
        socket.socket() as first,
        socket.socket() as second,
    ):
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)
        address = ("127.0.0.1", int(ranks.address.rpartition(":")[2]))
        next_descriptor = os.dup(first.fileno())
        os.close(next_descriptor)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor, raised[1]))
            first.connect(address)  # Linux reserved its descriptor when `accept` was called; the next call fails
            time.sleep(0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, raised)
        second.settimeout(10)
        second.connect(address)
        authenticate(second, KEY, supervisor_client.ROLE, is_server=False)
        second.sendall(b'{"rank": 3, "job": "mine"}\n')
        wait_until(lambda: 3 in ranks._connections)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert raised[0] >= min(2**16, limits[1])


def test_many_connections_without_the_key_do_not_exhaust_the_threads() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks, contextlib.ExitStack() as stack:
        host, _, port = ranks.address.rpartition(":")
        before = threading.active_count()
        idle = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            for _ in range(MAX_UNAUTHENTICATED + 100)
        ]
        rank = Rank(ranks, 0, "ends in order")
        wait_until(lambda: ranks.num_running == 1)
        wait_until(lambda: threading.active_count() - before <= MAX_UNAUTHENTICATED + 1)
        for connection in (idle[0], idle[99]):
            assert len(connection.recv(100)) <= 16, "the nonce at most, then the end"
            assert connection.recv(100) == b""
        assert rank.end() == 0
        wait_until(lambda: ranks.has_disconnected_ranks)
        assert ranks.crashed_ranks == []
