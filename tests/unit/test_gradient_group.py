"""What the GPU paths of the gradient reduction do, with simulated works, time and order instead of a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from unitrain.backends.base import Backend
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.bootstrap import environment
from unitrain.monitoring.flight_recorder import FlightRecorder, GradientWork, not_begun
from unitrain.monitoring.pending_work import Expectations
from unitrain.testing import RankGroup, compression, gradients, parameters


class Clock:
    """The simulated time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Event:
    """A simulated work or event, which is done when the test says so."""

    def __init__(self) -> None:
        self.done = False

    def is_completed(self) -> bool:
        return self.done


def _described(expectations: Expectations) -> str | None:
    overdue = expectations.overdue()
    return None if overdue is None else overdue.describe()


def test_backwards_that_the_host_adds_later_do_not_move_the_deadline() -> None:
    clock = Clock()
    expectations = Expectations(10.0, clock)
    events = [Event() for _ in range(20)]
    found = []
    for number, event in enumerate(events):
        expectations.add(event.is_completed, lambda number=number: f"backward {number}")
        found.append(_described(expectations))
        clock.now += 1.0
    # The first of them, and not the latest, which other ranks may not have begun.
    assert found == [None] * 11 + ["backward 0"] * 9


def test_the_time_of_a_backward_begins_when_the_one_before_it_is_done() -> None:
    clock = Clock()
    expectations = Expectations(10.0, clock)
    first, second = Event(), Event()
    for number, event in enumerate((first, second)):
        expectations.add(event.is_completed, lambda number=number: f"backward {number}")
    assert _described(expectations) is None
    clock.now = 8.0
    first.done = True
    assert _described(expectations) is None
    clock.now = 17.0
    assert _described(expectations) is None
    clock.now = 19.0
    assert _described(expectations) == "backward 1"
    second.done = True
    assert _described(expectations) is None


def test_a_rank_that_is_further_ahead_is_not_missing() -> None:
    ahead, behind = FlightRecorder(), FlightRecorder()
    for flight_recorder, backwards in ((ahead, 8), (behind, 5)):
        for number in range(backwards):
            flight_recorder.enter(GradientWork("backward", number))
    ledgers = {1: ahead.lines(), 2: behind.lines()}
    assert not_begun(GradientWork("backward", 6), [1, 2, 3], ledgers) == [2, 3]
    assert not_begun(GradientWork("backward", 4), [1, 2, 3], ledgers) == [3]
    assert not_begun(None, [1, 2], ledgers) == [1, 2]


class SimulatedWatch:
    """Records what is expected."""

    def __init__(self) -> None:
        from unitrain.monitoring.loop_counters import LoopCounters

        self.counters, self.expectations = LoopCounters(), Expectations(0.0, Clock())

    def expect(self, is_done: Callable[[], bool], tell: Callable[[], str]) -> Any:
        return self.expectations.add(is_done, tell)


class SimulatedNccl(dist.ProcessGroup):
    """A group whose works are done when the test says so; nobody waits for them on the host."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.works: list[Any] = []

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        self.works.append(Event())
        return self.works[-1]


def test_the_watchdog_is_active_while_the_host_waits_for_the_stream() -> None:
    group, watch = SimulatedNccl(), SimulatedWatch()
    waiting: Any = None
    sent = ReducerGroup(group, FlightRecorder(), _Waiting(), watch, waiting, on_stream=True)  # type: ignore[arg-type]
    active = []

    def end_of_backward() -> None:  # as in a timed step, where the host now waits until the gradients are global
        watch.expectations._clock.now += 1.0  # type: ignore[attr-defined]
        watch.expectations.overdue()
        watch.expectations._clock.now += 1.0  # type: ignore[attr-defined]
        active.append(_described(watch.expectations))

    def hook(gradient: torch.Tensor) -> None:
        sent.expect_backward()
        sent.allreduce([gradient])
        torch.autograd.Variable._execution_engine.queue_callback(end_of_backward)

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(hook)
    weight.sum().backward()
    assert active == ["began backward #0 is not done"]
    group.works[0].done = True
    assert watch.expectations.overdue() is None


class _Waiting:
    def who_is_missing(self, work: object) -> str:
        return f"{work} is not done"


def in_order(backend: Backend) -> None:
    """Run the contract's cases on unused parameters with all allreduces at the end of each backward."""
    backend._keeps_order = True  # type: ignore[attr-defined]
    gradients.collectives_may_run_inside_backward(backend)
    parameters.unused_parameters_count_as_zero_or_stay_none(backend)
    parameters.one_backward_may_follow_forwards_of_different_parts(backend)
    compression.what_only_an_earlier_micro_step_used_is_compressed_too(backend)


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_gradients_may_be_sent_at_the_end_of_the_backward(backend: str) -> None:
    with RankGroup(backend, 2) as group:
        group.run(in_order)


CHECKED = """\
import torch, torch.distributed as dist
from datetime import timedelta
from unitrain.backends.process_group import set_transport_timeout
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.distributed_c10d._get_default_group()
set_transport_timeout(group, torch.device("cpu"), timedelta(seconds=77))
transport = group._get_backend(torch.device("cpu"))
print(type(transport).__name__, transport.wrapped_pg.options._timeout)
"""


def test_the_timeout_of_a_transport_can_be_set_where_torch_checks_collectives() -> None:
    variables = {**environment.without_launcher(), "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    done = subprocess.run([sys.executable, "-c", CHECKED], env=variables, capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "_ProcessGroupWrapper 0:01:17", done.stderr
