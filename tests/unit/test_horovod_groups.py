"""Horovod's process group on one rank: completion of works, process sets, mismatches and monitored barriers."""

from __future__ import annotations

import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unitrain.backends.horovod import mismatches
from unitrain.backends.horovod import work as horovod_work
from unitrain.backends.horovod.mismatches import MismatchDetector, Operation
from unitrain.backends.horovod.monitored_barrier import MonitoredBarrier
from unitrain.backends.horovod.process_sets import release_process_set

CPU = torch.device("cpu")


@pytest.fixture
def finished_handles(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Replace Horovod's `poll` and `synchronize`. Return the set of finished handles, which tests extend."""
    handles: set[int] = set()
    monkeypatch.setattr(horovod_work.hvd, "poll", lambda handle: handle in handles)
    monkeypatch.setattr(horovod_work.hvd, "synchronize", lambda handle: torch.ones(2))
    return handles


def start_work(completions: horovod_work.CompletionQueue, handle: int) -> horovod_work.HorovodWork:
    work = horovod_work.HorovodWork("allreduce", handle, [], CPU, None, timedelta(seconds=60), completions)
    completions.add(work)
    return work


def test_abort_does_not_wait_for_pending_operations(finished_handles: set[int]) -> None:
    finished_handles.add(1)
    completions = horovod_work.CompletionQueue()
    works = [start_work(completions, handle) for handle in (1, 2, 3)]
    works[0].wait()
    errors: list[Any] = []

    def wait_in_thread() -> None:
        try:
            works[1].wait()
        except Exception as error:
            errors.append(error)

    waiting = threading.Thread(target=wait_in_thread)
    waiting.start()
    started = time.monotonic()
    completions.abort()
    waiting.join()
    assert time.monotonic() - started < 30  # the timeout of the operations is 60 s
    for error in (*errors, works[2].exception()):
        assert isinstance(error, dist.DistBackendError)
        assert str(error) == "Horovod's allreduce was aborted, because this rank has aborted its process group."
    assert len(errors) == 1
    assert works[0].is_success()


def test_completed_works_keep_only_small_results(finished_handles: set[int]) -> None:
    finished_handles |= {1, 2, 3}
    completions = horovod_work.CompletionQueue()
    results = [torch.ones(4), torch.ones(100_000)[:4], torch.ones(100_000)]
    references = []
    for handle, result in enumerate(results, start=1):
        work = horovod_work.HorovodWork("allreduce", handle, [result], CPU, None, timedelta(seconds=60), completions)
        completions.add(work)
        work.wait()
        references.append(weakref.ref(work))
    del work
    completions.stop()
    assert [reference() is not None for reference in references] == [True, False, False]


def test_error_in_the_processing_of_a_result_is_raised_once(
    finished_handles: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    backward = -1
    ends: list[Any] = []
    monkeypatch.setattr(horovod_work, "current_backward", lambda: backward)
    monkeypatch.setattr(horovod_work.end_of_backward, "add", lambda _, function: ends.append(function))
    completions = horovod_work.CompletionQueue()

    def fail(_: Any) -> None:
        raise ValueError(f"backward pass {backward}")

    for backward in (-1, 0, 1):
        work = start_work(completions, backward + 2)
        work._process_output = fail if backward < 1 else None
        finished_handles.add(backward + 2)  # last, because the background thread then completes the work
        if backward < 1:
            with pytest.raises(ValueError, match=f"backward pass {backward}"):
                work.wait()
        else:
            work.wait()
    completions.stop()
    assert len(ends) == 2
    ends[1]()


@pytest.mark.parametrize("completer", ["unitrain-horovod", "MainThread"])
def test_callback_may_stop_the_queue(
    finished_handles: set[int], monkeypatch: pytest.MonkeyPatch, completer: str
) -> None:
    """The callback runs in the first thread that polls after an operation has finished."""
    poll = horovod_work.hvd.poll
    monkeypatch.setattr(
        horovod_work.hvd, "poll", lambda handle: threading.current_thread().name == completer and poll(handle)
    )
    completions = horovod_work.CompletionQueue()
    work = start_work(completions, 1)
    results: list[Any] = []

    def stop(_: Any) -> None:
        try:
            results.append(completions.stop())
        except Exception as error:
            results.append(error)

    work.get_future().add_done_callback(stop)
    finished_handles.add(1)
    work.wait()
    completions.stop()
    assert results == [None]


def test_process_set_may_be_removed_after_horovod_was_shut_down() -> None:
    release_process_set([0, 1])


@pytest.mark.parametrize(
    ("name", "size", "text"),
    [
        ("allreduce.SUM", 5000, "allreduce SUM of 5,000 float32 elements"),
        ("broadcast.from_rank_3", 5000, "broadcast from rank 3 of 5,000 float32 elements"),
        ("allgather", 5000, "allgather of 5,000 float32 elements"),
        ("alltoall", 4096, "alltoall with 4,096 bytes per row"),
        ("sparse_allreduce", 12, "sparse_allreduce with 12 bytes per row"),
    ],
)
def test_operations_are_described_with_their_size(name: str, size: int, text: str) -> None:
    assert Operation(0, name, "float32", size).describe() == text


def test_store_that_does_not_respond_blocks_only_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mismatches, "_STORE_TIMEOUT_SECONDS", 0.05)
    responds = threading.Event()

    class Store(dist.HashStore):
        def clone(self) -> dist.Store:
            responds.wait()
            return self

    def create_detector(rank: int) -> MismatchDetector:
        return MismatchDetector(
            store, rank, (4, 6), lambda: [Operation(0, "allreduce.SUM", "float32", rank)], lambda: True
        )

    store = Store()
    root, other = create_detector(0), create_detector(1)
    before = threading.active_count()
    for _ in range(5):
        assert other.compare_with_rank_0() is None
    assert threading.active_count() <= before + 1
    monkeypatch.setattr(mismatches, "_STORE_TIMEOUT_SECONDS", 30.0)
    responds.set()
    assert root.compare_with_rank_0() is None
    deadline = time.monotonic() + 30
    while (error := other.compare_with_rank_0()) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "rank 4 waits for allreduce SUM of 0 float32 elements, and rank 6 for allreduce SUM of 1 float32" in str(
        error
    )


def test_ranks_that_have_not_published_an_operation_are_missing() -> None:
    pending: dict[int, list[Operation]] = {rank: [] for rank in range(4)}
    operation, later = Operation(7, "allreduce.SUM", "float32", 3), Operation(8, "allreduce.SUM", "float32", 3)
    pending |= {0: [operation], 1: [operation, later], 2: [later]}

    class Store(dist.HashStore):
        def clone(self) -> dist.Store:
            return self

    store = Store()
    detectors = [
        MismatchDetector(store, rank, (1, 3, 5, 7), lambda rank=rank: pending[rank], bool) for rank in range(4)
    ]  # type: ignore[misc]
    for detector in detectors[:3]:
        detector.compare_with_rank_0()
    assert detectors[0].find_missing_ranks(operation) == [5, 7]
    assert detectors[1].find_missing_ranks(later) == [1, 7]
    pending[2] = pending[3] = [operation]
    for detector in detectors[2:]:
        detector.compare_with_rank_0()
    assert detectors[0].find_missing_ranks(operation) == []


def test_failed_monitored_barrier_keeps_the_result_of_the_previous_barrier() -> None:
    """A rank that is missing in a barrier may still have to read the result of the previous barrier."""
    store = dist.HashStore()
    keys, barrier = dist.PrefixStore("monitored_barrier", store), MonitoredBarrier(store, 0, 2)
    keys.set("1/1", "")  # rank 1 reaches the first barrier
    barrier.wait(timedelta(seconds=5), wait_all_ranks=False)
    with pytest.raises(dist.DistBackendError, match="Rank 1 failed to pass monitoredBarrier in 50 ms"):
        barrier.wait(timedelta(milliseconds=50), wait_all_ranks=False)
    assert keys.check(["1"])
    keys.set("3/1", "")
    barrier.wait(timedelta(seconds=5), wait_all_ranks=False)
    assert not keys.check(["2"])
