"""StallDetector detects ranks that wait for each other in different operations, and only these ranks."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore, TCPStore, Work

from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import CollectiveTimeoutError
from unitrain.monitoring.failure_store import FailureStore
from unitrain.monitoring.flight_recorder import CollectiveCall, FlightRecorder, GradientPhase
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.monitoring.stalled_ranks import StallDetector


class Job:
    """Simulated ranks in one process. Each rank has a flight recorder; all ranks share a clock."""

    def __init__(self, size: int) -> None:
        self.now, self.store = 0.0, HashStore()
        self.recorders = [FlightRecorder() for _ in range(size)]
        self._ranks = [
            StallDetector(recorder, rank, size, lambda: self.now) for rank, recorder in enumerate(self.recorders)
        ]

    def wait_in(self, rank: int, operation: CollectiveCall | GradientPhase) -> None:
        self.recorders[rank].record(operation)
        self.recorders[rank].is_main_thread_waiting = True

    def poll(self, seconds: float) -> str | None:
        """Poll every 0.5 s, like a watchdog, and return the first failure as text."""
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            for member in reversed(self._ranks):  # rank 0 last, because it reads the records of the other ranks
                if (failure := member.publish_and_compare(self.store)) is not None:  # type: ignore[arg-type]
                    return str(failure)
        return None


BACKWARD, BROADCAST = (
    GradientPhase("backward", 7),
    CollectiveCall(3, "broadcast", root=0, dtype=torch.uint8, shape=(4,)),
)


def test_ranks_in_different_operations_are_reported_within_three_seconds() -> None:
    job = Job(3)
    for rank in range(3):
        job.recorders[rank].record(GradientPhase("backward", 6))
        job.wait_in(rank, BROADCAST if rank == 1 else BACKWARD)
    assert job.poll(1.5) is None
    text = job.poll(1.5)
    assert text is not None
    assert text.startswith("rank 1 failed first: CollectiveMismatchError: The ranks wait for each other in different ")
    assert "rank 1 in broadcast(uint8 [4]) (collective #3), at test_stalled_ranks.py:" in text
    assert "ranks 0, 2 in backward #7, at test_stalled_ranks.py:" in text


@pytest.mark.parametrize("progress", ["a rank computes", "the ranks continue", "a rank is ahead"])
def test_ranks_that_can_continue_are_not_reported(progress: str) -> None:
    job = Job(2)
    job.wait_in(0, BACKWARD)
    if progress == "a rank computes":
        job.recorders[1].record(BROADCAST)
    elif progress == "a rank is ahead":
        job.wait_in(1, BACKWARD)
        job.wait_in(1, BROADCAST)
    else:
        job.wait_in(1, BROADCAST)
        assert job.poll(1.5) is None
        job.wait_in(0, BACKWARD)
    assert job.poll(1.5 if progress == "the ranks continue" else 20) is None


def test_records_of_a_rank_that_has_continued_are_removed() -> None:
    job = Job(2)
    job.wait_in(1, BROADCAST)
    assert job.poll(3) is None
    assert json.loads(job.store.get("stalled/1"))
    job.recorders[1].is_main_thread_waiting = False
    job.recorders[1].record(BACKWARD)
    job.wait_in(0, BACKWARD)
    assert job.poll(20) is None
    assert json.loads(job.store.get("stalled/1")) == []


class DoneWork(Work):
    def wait(self, timeout: timedelta = timedelta()) -> bool:
        return True


class FailedWork(Work):
    def wait(self, timeout: timedelta = timedelta()) -> bool:
        raise RuntimeError("Timed out waiting 9000ms for send operation to complete")


@pytest.fixture
def monitor() -> FailureMonitor:
    rank_info = RankInfo("env", 0, 1, 0)
    return FailureMonitor(Rendezvous(rank_info, HashStore(), "127.0.0.1", timedelta(seconds=9)), polls=False)


def test_timeout_after_a_completed_wait_names_the_operation(monitor: FailureMonitor) -> None:
    monitor.record(BACKWARD)

    def wait_twice() -> None:
        with monitor.waiting():
            monitor.wait_for_ranks(DoneWork())
            assert monitor._recorder.is_main_thread_waiting
            FailedWork().wait()

    with pytest.raises(CollectiveTimeoutError, match="backward #7 timed out after 9 s on rank 0"):
        wait_twice()
    assert not monitor._recorder.is_main_thread_waiting


def test_main_thread_is_waiting_after_a_computation_only_if_it_was_waiting_before(monitor: FailureMonitor) -> None:
    with monitor.computing():
        pass
    assert not monitor._recorder.is_main_thread_waiting
    with monitor.waiting():
        with monitor.computing():
            assert not monitor._recorder.is_main_thread_waiting
        assert monitor._recorder.is_main_thread_waiting


def test_request_for_statuses_returns_an_empty_dict_if_the_store_has_exited() -> None:
    served = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    store = FailureStore(TCPStore("127.0.0.1", served.port, 2, is_master=False, wait_for_workers=False), 1, 5.0)
    del served
    assert store.request_statuses([0]) == {}
