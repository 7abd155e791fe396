"""What `unitrain launch` learns of the ranks of a job: who has gone first, and how."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from unitrain.monitoring import supervisor_client
from unitrain.supervisor.ranks import Ranks

KEY = "0123456789abcdef"
# A rank that does as it is told, without torch: it leaves with a word, after a checkpoint, or without a word.
RANK = """
import os, signal, sys, time
from unitrain import supervised
rank, way = int(sys.argv[1]), sys.argv[2]
heard = []
if way != "plain":
    signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
supervised.follow(rank)
print("here", flush=True)
if way == "stays" or way == "plain":
    deadline = time.monotonic() + 60
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    supervised.tell_preempted()
sys.stdin.readline()
if way == "dies":
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Rank:
    """A process that is a rank of job "mine"."""

    def __init__(self, ranks: Ranks, rank: int, way: str, job: str = "mine", key: str = KEY) -> None:
        variables = {"UNITRAIN_SUPERVISOR": ranks.address, "UNITRAIN_JOB": job, "UNITRAIN_JOB_KEY": key}
        self.process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), way],
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()  # it is here, or has been told to end

    def leave(self) -> int:
        _, self.said = self.process.communicate("\n", timeout=30)
        return self.process.returncode


def wait_until(happens: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_rank_that_died_first_is_known_unless_another_had_left_before() -> None:
    with Ranks("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        dies, leaves = Rank(ranks, 1, "dies"), Rank(ranks, 0, "leaves")
        wait_until(lambda: len(ranks._present) == 2)
        assert dies.leave() == -signal.SIGKILL
        wait_until(lambda: ranks.lost)
        assert leaves.leave() == 0
        ranks.dismiss(30)
        assert (ranks.lost, ranks.first_lost, ranks.vanished, ranks.preempted) == ([1], 1, [], False)
    with Ranks("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        dies, leaves = Rank(ranks, 1, "dies"), Rank(ranks, 0, "leaves")
        wait_until(lambda: len(ranks._present) == 2)
        assert leaves.leave() == 0
        wait_until(lambda: len(ranks._present) == 1)
        dies.leave()
        ranks.dismiss(30)
        assert (ranks.lost, ranks.first_lost) == ([1], None)


@pytest.mark.parametrize("early", [True, False])
def test_rank_0_is_asked_to_end_now_or_when_it_comes(early: bool) -> None:
    with Ranks("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        if early:
            ranks.ask_to_end()
        asked = Rank(ranks, 0, "stays")
        if not early:
            ranks.ask_to_end()
        assert asked.leave() == 0
        wait_until(lambda: ranks.preempted)
        assert ranks.lost == []


def test_ranks_that_are_left_of_an_attempt_end_at_once() -> None:
    with Ranks("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        left = Rank(ranks, 1, "stays")
        wait_until(lambda: ranks._present)
        ranks.dismiss(30)
        late = Rank(ranks, 0, "stays")
        for rank in (left, late):
            assert rank.process.wait(30) == 1
            rank.process.communicate()
        wait_until(lambda: ranks.lost == [1, 0])


def test_ranks_end_after_a_checkpoint_where_the_launch_is_gone() -> None:
    with Ranks("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        handles, plain = Rank(ranks, 0, "stays"), Rank(ranks, 1, "plain")
        wait_until(lambda: len(ranks._present) == 2)
    assert handles.leave() == 0
    assert plain.leave() == -signal.SIGTERM


def test_strangers_are_no_ranks() -> None:
    with Ranks("mine", KEY, "127.0.0.1", "127.0.0.1") as ranks:
        other = Rank(ranks, 0, "leaves", job="another")
        without_key = Rank(ranks, 0, "leaves", key="another")
        host, _, port = ranks.address.rpartition(":")
        for text in (b"GET / HTTP/1.1\r\n", b"[1]\n", b"x" * 2000):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(text)
        assert (other.leave(), without_key.leave()) == (0, 0)
        assert "rank 0 cannot reach unitrain launch" in without_key.said
        ranks.dismiss(0)
        assert (ranks.lost, ranks.vanished, ranks.preempted) == ([], [], False)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1:x", ":"])
def test_an_address_that_cannot_be_read_is_a_line_and_no_error(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("UNITRAIN_SUPERVISOR", address)
    supervisor_client.follow(0)
    assert f"rank 0 cannot reach unitrain launch at {address}" in capsys.readouterr().err
