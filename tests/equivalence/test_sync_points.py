"""Sync points occur about every two seconds, at the same steps on all ranks."""

from __future__ import annotations

import pytest
import torch

from unitrain.backends.local import LocalBackend
from unitrain.progress.stopping import StopCoordinator
from unitrain.testing import run_ranks

LOCAL = LocalBackend(torch.device("cpu"))


def test_sync_points_are_about_two_seconds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("unitrain.progress.stopping.time.perf_counter", lambda: now)
    with StopCoordinator(LOCAL, max_seconds=None, signals=()) as stopping:
        stopping.exchange(0)
        stopping.start_timing(0)
        due = []
        for step in range(1, 61):
            now += 5.0 if step == 1 else 0.1  # the first step is slow: it compiles, allocates and connects
            if stopping.is_due(step):
                due.append(step)
                stopping.exchange(step)
        assert due == [1, 2, 22, 42]
        now += 1000.0  # the time of a validation does not count
        stopping.start_timing(60)
        assert next(step for step in range(61, 100) if stopping.is_due(step)) == 62


def test_short_epochs_do_not_delay_sync_points(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("unitrain.progress.stopping.time.perf_counter", lambda: now)
    with StopCoordinator(LOCAL, max_seconds=None, signals=()) as stopping:
        due = []
        for step in range(1, 101):
            if step % 7 == 1:
                stopping.start_timing(step - 1)
            now += 0.1
            if stopping.is_due(step):
                due.append(step)
                stopping.exchange(step)
            if step % 7 == 0:
                stopping.exchange(step)  # the end of an epoch
        assert due == [1, 21, 41, 61, 81]


def test_restored_steps_do_not_affect_the_measured_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("unitrain.progress.stopping.time.perf_counter", lambda: now)
    with StopCoordinator(LOCAL, max_seconds=None, signals=()) as stopping:
        now += 1.0
        stopping.exchange(5000)
        stopping.start_timing(5000)
        assert stopping.is_due(5001)


def exchange_with_uneven_delays(backend) -> tuple[list[int], list[list[list[float]]], float]:
    """Return the steps of the sync points, the exchanged values, and the total seconds."""
    import time

    due, exchanged, began = [], [], time.monotonic()
    with StopCoordinator(backend, max_seconds=None, signals=()) as stopping:
        stopping.start_timing(0)
        for step in range(1, 31):
            time.sleep(0.1 * backend.rank)
            if stopping.is_due(step):
                due.append(step)
                exchanged.append(stopping.exchange(step, numbers=[-backend.rank, step]))
    return due, exchanged, time.monotonic() - began


def test_sync_points_are_at_the_same_step_on_ranks_with_different_clocks() -> None:
    (*first, first_seconds), (*second, second_seconds) = run_ranks(exchange_with_uneven_delays, size=2, backend="ddp")
    assert first == second
    due, exchanged = first
    assert due[0] == 1
    # By rank 0's clock alone, the next sync point would be after millions of steps. On a busy machine, the 30 steps
    # take more than 3 s.
    assert 2 <= len(due) <= 3 + max(first_seconds, second_seconds)
    assert exchanged == [[[0, step], [-1, step]] for step in due]
