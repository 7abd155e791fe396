"""GPU code paths of the gradient reduction, with simulated works and a simulated clock instead of a GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from simulation import Clock, Event

from unitrain.backends.base import Backend
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.bootstrap import environment
from unitrain.errors import ModelError
from unitrain.monitoring.deadlines import Deadline, Deadlines
from unitrain.monitoring.flight_recorder import FlightRecorder, GradientPhase, ranks_without_phase
from unitrain.monitoring.loop_counters import LoopCounters
from unitrain.testing import RankGroup, compression, gradients, parameters


def describe_expired(deadlines: Deadlines) -> str | None:
    deadline = deadlines.find_expired()
    return None if deadline is None else deadline.describe()


def test_rank_that_has_passed_a_phase_is_not_missing() -> None:
    ahead, behind = FlightRecorder(), FlightRecorder()
    for flight_recorder, num_backwards in ((ahead, 8), (behind, 5)):
        for number in range(num_backwards):
            flight_recorder.record(GradientPhase("backward", number))
    records = {1: ahead.records(), 2: behind.records()}
    assert ranks_without_phase(GradientPhase("backward", 6), [1, 2, 3], records) == [2, 3]
    assert ranks_without_phase(GradientPhase("backward", 4), [1, 2, 3], records) == [3]
    assert ranks_without_phase(None, [1, 2], records) == [1, 2]


def test_rank_before_a_phase_is_missing_although_another_model_had_a_phase_of_that_number() -> None:
    waiting, stopped = FlightRecorder(), FlightRecorder()
    discriminator, generator = GradientPhase("backward", 3, owner=0), GradientPhase("backward", 3, owner=1)
    for flight_recorder in (waiting, stopped):
        flight_recorder.record(discriminator)
    waiting.record(generator)
    records = {1: waiting.records(), 2: stopped.records()}
    assert ranks_without_phase(generator, [1, 2], records) == [2]
    assert ranks_without_phase(discriminator, [1, 2], records) == []


class SimulatedMonitor:
    """Records the deadlines that are set."""

    def __init__(self) -> None:
        self.loop_counters, self.clock = LoopCounters(), Clock()
        self.deadlines = Deadlines(0.0, self.clock)

    def forget_sequences(self, sequences: list[str]) -> None:
        pass

    def record(self, phase: GradientPhase) -> None:
        pass

    def set_deadline(self, is_done: Callable[[], bool], phase: GradientPhase) -> Deadline:
        return self.deadlines.add(is_done, lambda: f"{phase} is not done")


class SimulatedNccl(dist.ProcessGroup):
    """A process group whose works complete when the test completes them. The host does not wait for the works."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.works: list[Any] = []

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        self.works.append(Event())
        return self.works[-1]


def test_the_deadline_is_active_while_the_host_waits_for_the_stream() -> None:
    group, monitor = SimulatedNccl(), SimulatedMonitor()
    reducer_group = ReducerGroup(group, 0, monitor, None, waits_on_stream=True)  # type: ignore[arg-type]
    found = []

    def end_of_backward() -> None:  # as in a timed step, in which the host waits here for the reduced gradients
        monitor.clock.now += 1.0
        monitor.deadlines.find_expired()
        monitor.clock.now += 1.0
        found.append(describe_expired(monitor.deadlines))

    def hook(gradient: torch.Tensor) -> None:
        reducer_group.expect_backward()
        reducer_group.allreduce([gradient])
        torch.autograd.Variable._execution_engine.queue_callback(end_of_backward)

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(hook)
    weight.sum().backward()
    assert found == ["backward #0 is not done"]
    group.works[0].done = True
    assert monitor.deadlines.find_expired() is None


class FailingGroup(SimulatedNccl):
    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        raise RuntimeError("the group has been closed")


class MonitorOfFailedJob(SimulatedMonitor):
    def raise_cause_of(self, error: BaseException) -> None:
        raise ModelError("rank 1 has another model") from error


@pytest.mark.parametrize("defers_allreduces", [False, True])
def test_allreduce_that_cannot_start_raises_the_error_of_the_failed_rank(defers_allreduces: bool) -> None:
    reducer_group = ReducerGroup(
        FailingGroup(),
        0,
        MonitorOfFailedJob(),  # type: ignore[arg-type]
        None,
        waits_on_stream=False,
        defers_allreduces=defers_allreduces,
    )

    def hook(gradient: torch.Tensor) -> None:
        reducer_group.expect_backward()
        reducer_group.allreduce([gradient])

    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(hook)
    with pytest.raises(ModelError, match="rank 1 has another model"):
        weight.sum().backward()


def run_cases_with_deferred_allreduces(backend: Backend) -> None:
    """Run some contract cases with all allreduces at the end of each backward pass."""
    assert backend._needs_group_order is False  # type: ignore[attr-defined]
    backend._needs_group_order = True  # type: ignore[attr-defined]
    gradients.collectives_may_run_inside_backward(backend)
    parameters.unused_parameters_have_zero_or_no_gradient(backend)
    parameters.one_backward_after_forwards_of_different_heads_reduces_both(backend)
    compression.parameters_used_in_an_earlier_micro_batch_are_compressed(backend)


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_contract_holds_if_gradients_are_reduced_at_the_end_of_the_backward_pass(backend: str) -> None:
    with RankGroup(backend, 2) as group:
        group.run(run_cases_with_deferred_allreduces)


def timeout_of_second_group(backend: Backend) -> float:
    """Return the transport timeout (in seconds) of the process group for models with unused parameters."""
    backend._waits_on_stream = True  # type: ignore[attr-defined]  # as with NCCL
    backend.distributed_model(torch.nn.Linear(2, 2), find_unused_parameters=True)
    group: Any = backend._model_groups._groups[-1].process_group  # type: ignore[attr-defined]
    timeout: float = group._get_backend(backend.device).options._timeout.total_seconds()
    return timeout


def test_the_second_group_times_out_after_the_watchdog() -> None:
    """NCCL's timeout terminates the process without a report, so the timeout of the watchdog must expire first."""
    with RankGroup("ddp", 2, backend_timeout_seconds=7) as group:
        assert group.run(timeout_of_second_group) == [7 + 30] * 2


SET_TRANSPORT_TIMEOUT = """\
import torch, torch.distributed as dist
from datetime import timedelta
from unitrain.torch_compat import set_transport_timeout
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = dist.distributed_c10d._get_default_group()
set_transport_timeout(group, torch.device("cpu"), timedelta(seconds=77))
transport = group._get_backend(torch.device("cpu"))
print(type(transport).__name__, transport.wrapped_pg.options._timeout)
"""


def test_transport_timeout_can_be_set_if_torch_distributed_debug_is_detail() -> None:
    variables = {**environment.without_launcher_variables(), "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    done = subprocess.run(
        [sys.executable, "-c", SET_TRANSPORT_TIMEOUT], env=variables, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.strip() == "_ProcessGroupWrapper 0:01:17", done.stderr
