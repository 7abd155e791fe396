"""Connections of the supervisor to ranks: detection of the first crashed rank and of orderly exits."""

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
# A rank without torch. The second argument determines how it ends.
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
    """A process that connects to the supervisor as a rank of `job`."""

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
        self.process.stdout.readline()  # the rank is connected, or was requested to exit

    def finish(self) -> int:
        """Let the process end, and return its exit code."""
        _, self.stderr = self.process.communicate("\n", timeout=30)
        return self.process.returncode


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def stop_process(process: subprocess.Popen[str]) -> None:
    """Send SIGSTOP, and wait until the kernel has stopped the process, which it does asynchronously."""
    process.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")


def test_first_crashed_rank_is_known_unless_another_rank_exited_before() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        crashing, exiting = Rank(ranks, 1, "is killed"), Rank(ranks, 0, "exits normally")
        wait_until(lambda: len(ranks._connections) == 2)
        assert crashing.finish() == -signal.SIGKILL
        wait_until(lambda: ranks.crashed_ranks)
        assert exiting.finish() == 0
        ranks.exit_all_ranks(30)
        assert (ranks.crashed_ranks, ranks.first_crashed_rank, ranks.unreachable_ranks, ranks.is_preempted) == (
            [1],
            1,
            [],
            False,
        )
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        crashing, exiting = Rank(ranks, 1, "is killed"), Rank(ranks, 0, "exits normally")
        wait_until(lambda: len(ranks._connections) == 2)
        assert exiting.finish() == 0
        wait_until(lambda: len(ranks._connections) == 1)
        crashing.finish()
        ranks.exit_all_ranks(30)
        assert (ranks.crashed_ranks, ranks.first_crashed_rank) == ([1], None)


@pytest.mark.parametrize("ending", ["is killed", "is killed after shutdown"])
def test_crash_after_the_backend_was_shut_down_does_not_require_a_restart(ending: str) -> None:
    """A script may call os._exit at its end."""
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        rank = Rank(ranks, 0, ending)
        wait_until(lambda: ranks.num_running == 1 or ending == "is killed after shutdown")
        assert rank.finish() == -signal.SIGKILL
        wait_until(lambda: ranks.crashed_ranks)
        assert ranks.has_running_rank_crashed == (ending == "is killed")


@pytest.mark.parametrize("early", [True, False])
def test_exit_request_reaches_a_rank_that_connects_before_or_after_it(early: bool) -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        if early:
            ranks.request_exit()
        rank = Rank(ranks, 0, "handles SIGTERM")
        if not early:
            ranks.request_exit()
        assert rank.finish() == 0
        wait_until(lambda: ranks.is_preempted)
        assert ranks.crashed_ranks == []


def test_exit_all_ranks_ends_connected_ranks_and_ranks_that_connect_later() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        left = Rank(ranks, 1, "handles SIGTERM")
        wait_until(lambda: ranks._connections)
        ranks.exit_all_ranks(30)
        late = Rank(ranks, 0, "handles SIGTERM")
        for rank in (left, late):
            assert rank.process.wait(30) == 1
            rank.process.communicate()
        wait_until(lambda: ranks.crashed_ranks == [1, 0])


def test_first_crashed_rank_is_unknown_if_the_launcher_kills_ranks_after_a_host_failed() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        lost, crashing = Rank(ranks, 1, "exits normally"), Rank(ranks, 0, "is killed")
        wait_until(lambda: len(ranks._connections) == 2)
        with ranks._state_changed:
            ranks._record_disconnect(1, DisconnectReason.UNREACHABLE, "")
        crashing.finish()
        lost.finish()
        wait_until(lambda: ranks.crashed_ranks)
        assert (ranks.unreachable_ranks, ranks.crashed_ranks, ranks.first_crashed_rank) == ([1], [0], None)


def test_rank_that_does_not_exit_is_unreachable_but_not_crashed() -> None:
    num_threads = threading.active_count()
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        stopped = Rank(ranks, 0, "exits normally")
        wait_until(lambda: ranks._connections)
        stop_process(stopped.process)
        ranks.exit_all_ranks(0.1)
    wait_until(lambda: threading.active_count() <= num_threads)
    assert (ranks.unreachable_ranks, ranks.crashed_ranks) == ([0], [])
    stopped.process.kill()
    stopped.process.communicate()


def test_standby_ranks_run_after_the_supervisor_starts_them() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1", is_standby=True) as ranks:
        early = Rank(ranks, 0, "is standby")
        wait_until(lambda: ranks.num_ready == 1)
        assert ranks.num_running == 0
        ranks.start()
        late = Rank(ranks, 1, "is standby")  # starts immediately
        wait_until(lambda: ranks.num_running == 2)
        assert not ranks.has_disconnected_ranks
        assert not ranks.has_running_rank_crashed
        assert (early.finish(), late.finish()) == (0, 0)
        ranks.exit_all_ranks(30)
        assert ranks.crashed_ranks == []


@pytest.mark.parametrize("requested", [True, False])
def test_standby_ranks_that_are_not_started_exit_with_code_0(requested: bool) -> None:
    """They exit on request, or when the supervisor exits. For other exit codes, the launcher would report a failure."""
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1", is_standby=True) as ranks:
        rank = Rank(ranks, 0, "is standby")
        wait_until(lambda: ranks.num_ready == 1)
        if requested:
            assert ranks.exit_remaining_ranks(30)
            assert ranks.has_disconnected_ranks
    assert rank.process.wait(30) == 0
    assert "started" not in rank.process.communicate()[0]


def test_stopped_standby_rank_is_detected_because_it_does_not_respond() -> None:
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


def test_supervisor_does_not_wait_for_failed_standby_ranks_until_the_job_ends() -> None:
    """If a standby rank is stopped or has exited, the supervisor cancels all standby ranks in the background."""
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


def test_ranks_receive_sigterm_if_the_supervisor_has_exited() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        handles, plain = Rank(ranks, 0, "handles SIGTERM"), Rank(ranks, 1, "has no handler")
        wait_until(lambda: len(ranks._connections) == 2)
    assert handles.finish() == 0
    assert plain.finish() == -signal.SIGTERM


def test_rank_with_a_closed_stderr_pipe_exits_if_the_supervisor_has_exited() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        rank = Rank(ranks, 0, "has no handler")
        wait_until(lambda: ranks._connections)
        assert rank.process.stderr is not None
        rank.process.stderr.close()  # as if the reader of the pipe (the launcher) has exited
        rank.process.stderr = None
    assert rank.finish() == -signal.SIGTERM


def test_connections_without_the_key_or_job_are_ignored() -> None:
    with RankConnections("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        other = Rank(ranks, 0, "exits normally", job="another")
        without_key = Rank(ranks, 0, "exits normally", key="another")
        host, _, port = ranks.address.rpartition(":")
        for text in (b"GET / HTTP/1.1\r\n", b"[1]\n", b"x" * 2000):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(text)
        assert (other.finish(), without_key.finish()) == (0, 0)
        assert "rank 0 cannot reach unitrain launch" in without_key.stderr
        ranks.exit_all_ranks(0)
        assert (ranks.crashed_ranks, ranks.unreachable_ranks, ranks.is_preempted) == ([], [], False)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:x", ":"])
def test_invalid_supervisor_address_is_reported_but_does_not_raise(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNITRAIN_SUPERVISOR", address)
    supervisor_client.connect(0)
    assert f"rank 0 cannot reach unitrain launch at {address}" in capsys.readouterr().err


def test_rank_can_connect_after_the_supervisor_failed_to_accept_connections() -> None:
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
            # Linux reserved a descriptor for this connection when `accept` was called. The next `accept` fails.
            first.connect(address)
            time.sleep(0.5)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, raised)
        second.settimeout(10)
        second.connect(address)
        authenticate(second, KEY, supervisor_client.CONNECTION_PURPOSE, is_server=False)
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
        rank = Rank(ranks, 0, "exits normally")
        wait_until(lambda: ranks.num_running == 1)
        wait_until(lambda: threading.active_count() - before <= MAX_UNAUTHENTICATED + 1)
        for connection in (idle[0], idle[99]):
            assert len(connection.recv(100)) <= 16, "the supervisor may send its nonce before it closes the connection"
            assert connection.recv(100) == b""
        assert rank.finish() == 0
        wait_until(lambda: ranks.has_disconnected_ranks)
        assert ranks.crashed_ranks == []
