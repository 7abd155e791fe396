"""Rank groups of `unitrain.testing`: messages about ranks that fail or die, and cleanup."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import SkipTest

import pytest

from unitrain.backends.base import Backend
from unitrain.bootstrap import network
from unitrain.errors import MissingFeatureError
from unitrain.testing import RankError, RankGroup, fork_server


def process_id(backend: Backend, argument: bytes = b"") -> int:
    return os.getpid()


def exit_with_3(backend: Backend) -> None:
    os._exit(3)


def return_function(backend: Backend) -> Callable[[], None]:
    return lambda: None


def lack_feature_on(backend: Backend, ranks: list[int]) -> None:
    if backend.rank in ranks:
        raise MissingFeatureError("a feature requires another torch")


def test_test_is_skipped_only_if_all_ranks_lack_a_feature() -> None:
    with RankGroup("ddp", 2) as group:
        with pytest.raises(SkipTest, match=r"^a feature requires another torch$"):
            group.run(lack_feature_on, [0, 1])
        with pytest.raises(RankError) as caught:
            group.run(lack_feature_on, [1])
    assert caught.value.errors == {1: "a feature requires another torch"}


def test_a_process_that_connects_and_exits_is_reported_as_not_started() -> None:
    """The command replaces the rank program: it receives the same arguments, connects to the group, and exits."""
    program = "import socket, sys; socket.create_connection((sys.argv[-5], int(sys.argv[-4])))"
    with RankGroup("local", 1, command=[sys.executable, "-c", program]) as group, pytest.raises(RankError) as caught:
        group.run(process_id)
    assert str(caught.value) == "Ranks 0 of 1 on local did not start: a process ended with exit code 0."


def test_group_error_names_a_rank_that_died() -> None:
    with RankGroup("local", 1) as group, pytest.raises(RankError) as caught:
        group.run(exit_with_3)
    assert str(caught.value) == "Rank 0 of 1 on local failed first:\nProcessDied: the process has ended"
    assert caught.value.errors == {0: "the process has ended"}


def test_a_rank_that_died_between_two_calls_is_reported() -> None:
    with RankGroup("local", 1) as group:
        os.kill(group.run(process_id)[0], signal.SIGKILL)
        group._processes[0].wait(60)
        with pytest.raises(RankError, match="ProcessDied"):
            group.run(process_id, bytes(10_000_000))  # larger than the connection's buffers
        assert group.run(process_id)[0] > 0


def test_a_result_that_cannot_be_pickled_is_reported() -> None:
    with RankGroup("local", 1) as group, pytest.raises(RankError, match="pickle"):
        group.run(return_function)


def test_files_of_a_failed_rank_are_removed() -> None:
    with RankGroup("local", 1) as group:
        group.run(process_id)
        file = group._ranks[0].stacks_file
        assert file.exists()
        with pytest.raises(RankError):
            group.run(exit_with_3)
    assert not file.exists()


def test_all_ranks_are_killed_if_the_fork_server_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    server = fork_server.ForkServer()
    monkeypatch.setattr("unitrain.testing.ranks._shared_fork_server", server)
    with RankGroup("ddp", 2) as group:
        pids = group.run(process_id)
        server._process.kill()
        server._process.wait()
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "a rank is still running"
        time.sleep(0.05)


def test_a_fork_server_ends_if_its_parent_dies_within_a_request() -> None:
    parent, child = socket.socketpair()
    with child:
        with parent:
            parent.sendall(struct.pack("!I", 10) + b"12345")
        assert fork_server._receive(child) == (None, [])


def test_a_reserved_port_can_be_used_by_a_listener_only() -> None:
    with network.reserve_port() as reservation:
        port = reservation.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with network.listen("127.0.0.1", port) as listener:
            assert listener.getsockname()[1] == port
