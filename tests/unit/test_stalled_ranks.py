"""StallDetector detects ranks that wait for each other in different operations, and only these ranks."""

from __future__ import annotations

import json
import threading
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

    def wait_in(self, rank: int, *operations: CollectiveCall | GradientPhase) -> None:
        """Start `operations` on `rank`, and wait in the first one."""
        for operation in operations:
            self.recorders[rank].record(operation)
        self.recorders[rank].begin_wait(operations[0])

    def poll(self, seconds: float) -> str | None:
        """Poll every 0.5 s, like a watchdog, and return the first failure as text."""
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            for member in reversed(self._ranks):  # rank 0 last, because it reads the waits of the other ranks
                if (failure := member.publish_and_compare(self.store)) is not None:  # type: ignore[arg-type]
                    return str(failure)
        return None


BACKWARD, BROADCAST = (
    GradientPhase("backward", 7, owner=0),
    CollectiveCall(3, "broadcast", root=0, dtype=torch.uint8, shape=(4,)),
)
OTHER_MODEL = GradientPhase("backward", 7, owner=1)


def test_ranks_in_different_operations_are_reported_within_four_seconds() -> None:
    job = Job(3)
    for rank in range(3):
        job.recorders[rank].record(GradientPhase("backward", 6, owner=0))
        job.wait_in(rank, BROADCAST if rank == 1 else BACKWARD)
    assert job.poll(2.5) is None
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


@pytest.mark.parametrize(
    "operations_by_rank",
    [
        # Buckets of a model with unused parameters and a collective inside the backward pass, in different orders.
        [[BROADCAST, BACKWARD], [BACKWARD, BROADCAST]],
        # Two models in one backward pass, whose buckets start in different orders.
        [[BACKWARD, OTHER_MODEL], [OTHER_MODEL, BACKWARD]],
        # Only one group has run a forward pass.
        [
            [GradientPhase("pipeline step", 1, 0, (0, 1))],
            [GradientPhase("pipeline step", 1, 0, (0, 1))],
            [GradientPhase("pipeline step", 0, 0, (2, 3))],
            [GradientPhase("pipeline step", 0, 0, (2, 3))],
        ],
        # A group waits for a rank that waits in an operation that all ranks have started.
        [[BROADCAST, BACKWARD], [BROADCAST], [GradientPhase("outer gradient", 2, ranks=(0, 2)), BROADCAST]],
    ],
    ids=["unused parameters", "two models", "groups", "slow network"],
)
def test_orders_that_differ_without_a_deadlock_are_not_reported(
    operations_by_rank: list[list[CollectiveCall | GradientPhase]],
) -> None:
    job = Job(len(operations_by_rank))
    for rank, operations in enumerate(operations_by_rank):
        job.wait_in(rank, *operations)
    assert job.poll(60) is None


def test_deadlock_of_some_ranks_is_reported_although_others_wait_for_them() -> None:
    job = Job(4)
    job.wait_in(0, BROADCAST)
    job.wait_in(1, GradientPhase("pipeline step", 4, 0, (1, 2)))
    job.wait_in(2, GradientPhase("pipeline forward", 4, 0, (1, 2)))
    job.wait_in(3, BROADCAST)
    text = job.poll(4)
    assert text is not None
    assert "rank 1 in pipeline step #4" in text
    assert "rank 2 in pipeline forward #4" in text


def test_cycle_of_three_ranks_is_reported() -> None:
    groups = [GradientPhase(kind, 0, ranks=ranks) for kind, ranks in (("a", (0, 1)), ("b", (1, 2)), ("c", (0, 2)))]
    job = Job(3)
    for rank in range(3):
        job.wait_in(rank, groups[rank])
    assert job.poll(4) is not None


def test_ranks_that_wait_again_after_a_computation_are_not_reported() -> None:
    job = Job(2)
    job.wait_in(0, BACKWARD)
    job.wait_in(1, BROADCAST)
    for _ in range(20):
        assert job.poll(2.5) is None
        job.recorders[1].begin_wait(BROADCAST)


def test_rank_whose_other_threads_start_operations_is_not_reported() -> None:
    job = Job(2)
    job.wait_in(0, BACKWARD)
    thread = threading.Thread(target=job.recorders[1].record, args=(CollectiveCall(2, "barrier"),))
    thread.start()
    thread.join()
    job.wait_in(1, BROADCAST)
    assert job.poll(20) is None


def test_wait_of_a_rank_that_has_continued_is_removed() -> None:
    job = Job(2)
    job.wait_in(1, BROADCAST)
    assert job.poll(3) is None
    assert json.loads(job.store.get("stalled/1")) is not None
    job.recorders[1].wait = None
    job.recorders[1].record(BACKWARD)
    job.wait_in(0, BACKWARD)
    assert job.poll(20) is None
    assert json.loads(job.store.get("stalled/1")) is None


def test_sequences_of_a_deleted_model_are_forgotten() -> None:
    recorder = FlightRecorder()
    phases = [GradientPhase("backward", 0, owner) for owner in range(12)]
    for phase in phases:
        recorder.record(phase)
    recorder.forget([phases[1].sequence, "bucket rebuild of 1"])
    assert set(recorder.latest_numbers) == {f"backward of {owner}" for owner in range(12) if owner != 1}


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
