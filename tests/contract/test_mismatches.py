"""If ranks call different operations, every rank reports the calls of all ranks. The error is raised immediately with
UNITRAIN_DEBUG=1, and otherwise within seconds."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
from groups import ci
from launches import running_ranks
from preload import preloaded

from unitrain.backends.base import Backend
from unitrain.errors import CollectiveMismatchError, ConfigError, EnvironmentVariableError
from unitrain.monitoring.flight_recorder import (
    CollectiveCall,
    FlightRecord,
    FlightRecorder,
    GradientPhase,
    describe_differences,
)
from unitrain.testing import RankGroup
from unitrain.testing.models import batch, build, compute_loss

ODD_RANK = 1  # the rank that calls a different operation


def other_order(backend: Backend, model: torch.nn.Module) -> None:
    if backend.rank == ODD_RANK:
        backend.allreduce(torch.ones(2))
    compute_loss(model(batch(backend.rank))).backward()
    backend.allreduce(torch.ones(2))


def skipped_backward(backend: Backend, model: torch.nn.Module) -> None:
    if backend.rank != ODD_RANK:
        compute_loss(model(batch(backend.rank))).backward()
    backend.barrier()


def skipped_collective(backend: Backend, model: torch.nn.Module) -> None:
    if backend.rank != ODD_RANK:
        backend.allreduce(torch.ones(2))
    backend.barrier()


def other_shape(backend: Backend, model: torch.nn.Module) -> None:
    backend.broadcast(torch.ones(2 if backend.rank != ODD_RANK else 3))


def other_dtype(backend: Backend, model: torch.nn.Module) -> None:
    backend.reducescatter(torch.ones(6, dtype=torch.float32 if backend.rank != ODD_RANK else torch.float64))


# The calls of the odd rank and of the other ranks, as stated in the error.
MISMATCHES = {
    other_order: ("allreduce(float32 [2], mean)", "gradients(float64 ["),
    skipped_backward: ("barrier()", "gradients(float64 ["),
    skipped_collective: ("barrier()", "allreduce(float32 [2], mean)"),
    other_shape: ("broadcast(float32 [3])", "broadcast(float32 [2])"),
    other_dtype: ("reducescatter(float64 [6], mean)", "reducescatter(float32 [6], mean)"),
}


def collect_errors(backend: Backend) -> list[str]:
    """Return the error of each of the MISMATCHES. The ranks continue after each error."""
    errors = []
    for mismatch in MISMATCHES:
        model = backend.distributed_model(build())
        for _ in range(2):
            compute_loss(model(batch(backend.rank))).backward()
        try:
            mismatch(backend, model)
        except CollectiveMismatchError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_every_rank_reports_the_calls_of_all_ranks(backend: str) -> None:
    with RankGroup(backend, 3, variables=preloaded({"UNITRAIN_DEBUG": "1"})) as group:
        errors = group.run(collect_errors)
    assert errors[0] == errors[1] == errors[2]
    assert len(errors[0]) == len(MISMATCHES)
    for text, (odd, others) in zip(errors[0], MISMATCHES.values(), strict=True):
        assert text.startswith(f"The ranks called different collectives: ranks 0, 2 called {others}"), text
        assert f"; rank {ODD_RANK} called {odd} (collective #" in text


PROGRAM = """\
import time
import torch
from torch import nn
import unitrain

with unitrain.init(device="cpu", timeout_seconds=90) as backend:
    model = backend.distributed_model(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    for step in range(3):
        if (step, backend.rank) == (2, 1):
            backend.allreduce(torch.ones(2))
        if step == 2:
            print("began", time.time(), flush=True)
        model(torch.ones(2, 3)).sum().backward()
    backend.allreduce(torch.ones(2))
"""


@pytest.mark.parametrize("backend", ["ddp", *ci("horovod")])
def test_ranks_in_different_operations_fail_before_the_timeout(backend: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    with running_ranks(script, backend, 2) as processes:
        outputs = [process.communicate(timeout=100)[0] for process in processes]
        ended = time.time()
    together = "\n".join(outputs)
    assert all(process.returncode for process in processes), together
    (began,) = re.findall(r"began (\S+)", together)  # printed by rank 0; rank 1 waits earlier
    assert ended - float(began) < 60, together  # about 8 s, longer on a busy machine; the timeout is 90 s
    assert "rank 1 failed first: CollectiveMismatchError: The ranks wait for each other in different" in together
    assert "rank 0 in backward #2, at train.py:13: model(" in together
    assert "rank 1 in allreduce(float32 [2], mean) (collective #" in together
    assert ", at train.py:10: backend.allreduce(torch.ones(2)). Call the same collectives" in together


def distribute_with_different_variables(backend: Backend, name: str, values: list[str]) -> str:
    import os

    os.environ[name] = values[backend.rank]
    try:
        backend.distributed_model(build())
    except (ConfigError, EnvironmentVariableError) as error:
        return str(error)
    finally:
        del os.environ[name]
    raise AssertionError("no error was raised")


def test_different_environment_variables_raise() -> None:
    with RankGroup("ddp", 2) as group:
        errors = group.run(distribute_with_different_variables, "UNITRAIN_DEBUG", ["0", "1"])
        assert errors[0] == errors[1]
        assert "UNITRAIN_DEBUG=False on rank 0 and UNITRAIN_DEBUG=True on rank 1" in errors[0]
        errors = group.run(distribute_with_different_variables, "UNITRAIN_BUCKETS_MB", ["1,25", "1,5"])
        assert errors[0] == errors[1]
        assert "UNITRAIN_BUCKETS_MB=(1, 25) on rank 0 and UNITRAIN_BUCKETS_MB=(1, 5) on rank 1" in errors[0]
        errors = group.run(distribute_with_different_variables, "UNITRAIN_BUCKETS_MB", ["1,25", "1"])
        assert all("UNITRAIN_BUCKETS_MB must be the sizes" in error for error in errors), errors


def test_the_flight_recorder_records_the_lines_of_callers() -> None:
    flight_recorder = FlightRecorder()
    assert flight_recorder.latest_entry_text == ""
    for number in range(40):
        flight_recorder.record(CollectiveCall(number, "barrier"))
    flight_recorder.record(GradientPhase("backward", 7))
    assert flight_recorder.latest_operation == "backward #7"
    assert flight_recorder.latest_entry_text.startswith("backward #7, at test_mismatches.py:")
    assert flight_recorder.latest_entry_text.endswith('flight_recorder.record(GradientPhase("backward", 7))')
    records = flight_recorder.records()
    assert [record.position for record in records] == list(range(25, 41))
    assert records[0].text.startswith("barrier() (collective #25), at test_mismatches.py:")


def test_records_are_compared_at_equal_positions() -> None:
    def records(*keys: str, first: int = 0) -> list[FlightRecord]:
        return [FlightRecord(first + index, key, f"{key}, at x.py:1") for index, key in enumerate(keys)]

    equal = {0: records("a", "b", "c"), 1: records("a", "b"), 2: records("b", first=1)}
    assert describe_differences(equal) == []
    assert describe_differences({0: records("a"), 1: records("b", first=1)}) == []
    assert describe_differences({0: records("a", "b"), 3: records("a", "c")})[1:] == [
        "  rank 0: a, at x.py:1", "  rank 0: b, at x.py:1", "  rank 3: a, at x.py:1", "  rank 3: c, at x.py:1",
    ]  # fmt: skip
