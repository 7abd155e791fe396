"""Deadlines of the watchdog, with a simulated clock. tests/faults tests each deadline on real ranks."""

from __future__ import annotations

from simulation import Clock, Event

from unitrain.monitoring.deadlines import DataDeadline, Deadlines, ShutdownWaitDetector
from unitrain.monitoring.failure_store import Shutdown
from unitrain.monitoring.flight_recorder import GradientPhase


def describe_expired(deadlines: Deadlines) -> str | None:
    deadline = deadlines.find_expired()
    return None if deadline is None else deadline.describe()


def test_later_backward_passes_do_not_move_the_deadline() -> None:
    clock = Clock()
    deadlines = Deadlines(10.0, clock)
    events = [Event() for _ in range(20)]
    found = []
    for number, event in enumerate(events):
        deadlines.add(event.is_completed, lambda number=number: f"backward {number}")
        found.append(describe_expired(deadlines))
        clock.now += 1.0
    # The first deadline expires, not the latest: other ranks may not have started the latest backward pass.
    assert found == [None] * 11 + ["backward 0"] * 9


def test_deadline_of_a_backward_starts_when_the_previous_backward_is_done() -> None:
    clock = Clock()
    deadlines = Deadlines(10.0, clock)
    first, second = Event(), Event()
    for number, event in enumerate((first, second)):
        deadlines.add(event.is_completed, lambda number=number: f"backward {number}")
    assert describe_expired(deadlines) is None
    clock.now = 8.0
    first.done = True
    assert describe_expired(deadlines) is None
    clock.now = 17.0
    assert describe_expired(deadlines) is None
    clock.now = 19.0
    assert describe_expired(deadlines) == "backward 1"
    second.done = True
    assert describe_expired(deadlines) is None


BACKWARD = GradientPhase("backward", 8)


def test_wait_for_rank_that_shut_down_before_the_operation_is_endless_after_one_period() -> None:
    clock = Clock()
    wait = ShutdownWaitDetector(0.5, clock)
    shutdown = Shutdown(1, "its process exited", {"backward": 7})
    assert not wait.is_endless(shutdown, (3, BACKWARD))
    clock.now = 0.4
    assert not wait.is_endless(shutdown, (3, BACKWARD))
    clock.now = 0.5
    assert wait.is_endless(shutdown, (3, BACKWARD))


def test_wait_is_not_endless_if_the_rank_participated_or_this_rank_does_not_wait() -> None:
    clock = Clock()
    wait = ShutdownWaitDetector(0.5, clock)
    for clock.now in (0.0, 100.0):
        assert not wait.is_endless(Shutdown(1, "its process exited", {"backward": 8, "collective": 2}), (3, BACKWARD))
        assert not wait.is_endless(None, (3, BACKWARD))
        assert not wait.is_endless(Shutdown(1, "its process exited", {"backward": 7}), None)


def test_wait_in_a_group_is_not_endless_if_the_rank_that_shut_down_does_not_belong_to_the_group() -> None:
    clock = Clock()
    wait = ShutdownWaitDetector(0.5, clock)
    for clock.now in (0.0, 100.0):
        phase = GradientPhase("pipeline forward", 0, 1, ranks=(0, 2))
        assert not wait.is_endless(Shutdown(1, "its process exited", {}), (3, phase))
    assert wait.is_endless(Shutdown(2, "its process exited", {}), (3, phase))


def test_wait_is_endless_after_30_seconds_if_participation_of_rank_0_is_unknown() -> None:
    clock = Clock()
    wait = ShutdownWaitDetector(0.5, clock)
    shutdown = Shutdown(0, "its process exited")
    assert not wait.is_endless(shutdown, (3, BACKWARD))
    clock.now = 29.0
    assert not wait.is_endless(shutdown, (3, BACKWARD))
    assert not wait.is_endless(shutdown, (4, BACKWARD))  # the next wait has started, with the full time limit
    clock.now = 58.0
    assert not wait.is_endless(shutdown, (4, BACKWARD))
    clock.now = 59.0
    assert wait.is_endless(shutdown, (4, BACKWARD))
    assert not wait.is_endless(shutdown, None)
    clock.now = 60.0
    assert not wait.is_endless(shutdown, (4, BACKWARD))  # a new wait starts


def test_wait_for_one_batch_expires_and_waits_for_several_batches_do_not() -> None:
    clock = Clock()
    deadline = DataDeadline(10.0, clock)
    found = []
    for batch in [(1, 0)] * 9 + [(1, 1)] * 9 + [None] + [(1, 1)] * 12:
        found.append(deadline.has_expired(batch, 3))
        clock.now += 1.0
    assert found == [False] * 30 + [True]


def test_waits_for_the_first_batch_of_several_epochs_do_not_expire() -> None:
    clock = Clock()
    deadline = DataDeadline(10.0, clock)
    for epoch in range(20):
        assert not deadline.has_expired((1, 0), epoch)
        clock.now += 9.0
