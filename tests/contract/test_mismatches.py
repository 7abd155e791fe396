"""Ranks that call different operations: every rank reports the calls of all ranks, immediately with UNITRAIN_DEBUG=1,
and otherwise at the timeout."""

from __future__ import annotations

import pytest
import torch
from preload import preloaded

from unitrain.backends.base import Backend
from unitrain.errors import CollectiveMismatchError, CollectiveTimeoutError, ConfigError
from unitrain.monitoring.flight_recorder import (
    CollectiveCall,
    FlightRecord,
    FlightRecorder,
    GradientPhase,
    describe_differences,
)
from unitrain.testing import RankGroup
from unitrain.testing.models import batch, build, compute_loss

ODD = 1  # the rank that calls another operation


def other_order(backend: Backend, model: torch.nn.Module) -> None:
    if backend.rank == ODD:
        backend.allreduce(torch.ones(2))
    compute_loss(model(batch(backend.rank))).backward()
    backend.allreduce(torch.ones(2))


def skipped_backward(backend: Backend, model: torch.nn.Module) -> None:
    if backend.rank != ODD:
        compute_loss(model(batch(backend.rank))).backward()
    backend.barrier()


def skipped_collective(backend: Backend, model: torch.nn.Module) -> None:
    if backend.rank != ODD:
        backend.allreduce(torch.ones(2))
    backend.barrier()


def other_shape(backend: Backend, model: torch.nn.Module) -> None:
    backend.broadcast(torch.ones(2 if backend.rank != ODD else 3))


def other_dtype(backend: Backend, model: torch.nn.Module) -> None:
    backend.reducescatter(torch.ones(6, dtype=torch.float32 if backend.rank != ODD else torch.float64))


# Calls of the odd rank and of the other ranks in the error.
MISMATCHES = {
    other_order: ("allreduce(float32 [2], mean)", "gradients(float64 ["),
    skipped_backward: ("barrier()", "gradients(float64 ["),
    skipped_collective: ("barrier()", "allreduce(float32 [2], mean)"),
    other_shape: ("broadcast(float32 [3])", "broadcast(float32 [2])"),
    other_dtype: ("reducescatter(float64 [6], mean)", "reducescatter(float32 [6], mean)"),
}


def collect_errors(backend: Backend) -> list[str]:
    """Return the error of each of the MISMATCHES; the ranks continue after each."""
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
        assert f"; rank {ODD} called {odd} (collective #" in text


def time_out(backend: Backend) -> str:
    model = backend.distributed_model(build())
    for _ in range(2):
        compute_loss(model(batch(backend.rank))).backward()
    try:
        other_order(backend, model)
    except (CollectiveTimeoutError, RuntimeError) as error:
        return str(error)
    raise AssertionError("the ranks did not wait for each other")


def test_a_timeout_shows_the_differing_operations() -> None:
    with RankGroup("ddp", 2, backend_timeout_seconds=6.0) as group:
        first, second = group.run(time_out)
    # The rank that times out first closes Gloo's connections, which may be the only error on the other rank.
    assert "Missing ranks: " in first + second
    if "Missing ranks: " in first:
        assert "backward #2 timed out after 6 s on rank 0. Missing ranks: 1. " in first
        # Rank 1 may time out at the same time, and then no longer waits.
        assert "\n  rank 1: " in first
        if "\n  rank 1: waiting for other ranks" in first:
            assert "\n  rank 1: waiting for other ranks in allreduce(float32 [2], mean) (collective #" in first
    else:
        assert "\n  rank 0: waiting for other ranks in backward #2, at test_mismatches.py:" in second
    for text in (first, second):
        if "Missing ranks: " in text:
            *_, shown = text.partition("The latest operations differ between ranks")
            assert "  rank 0: backward #1, at test_mismatches.py:" in shown
            assert "  rank 0: backward #2, at test_mismatches.py:" in shown
            assert "  rank 1: allreduce(float32 [2], mean) (collective #" in shown


def set_debug_on_rank_1(backend: Backend) -> str:
    import os

    os.environ["UNITRAIN_DEBUG"] = str(backend.rank)
    try:
        backend.distributed_model(build())
    except ConfigError as error:
        return str(error)
    raise AssertionError("it was accepted")


def test_different_debug_settings_are_an_error() -> None:
    with RankGroup("ddp", 2) as group:
        errors = group.run(set_debug_on_rank_1)
    assert errors[0] == errors[1]
    assert "UNITRAIN_DEBUG=False on rank 0 and UNITRAIN_DEBUG=True on rank 1" in errors[0]


def test_the_flight_recorder_keeps_the_lines_of_callers() -> None:
    flight_recorder = FlightRecorder()
    assert flight_recorder.latest_entry == ""
    for number in range(40):
        flight_recorder.record(CollectiveCall(number, "barrier"))
    flight_recorder.record(GradientPhase("backward", 7))
    assert flight_recorder.latest_operation == "backward #7"
    assert flight_recorder.latest_entry.startswith("backward #7, at test_mismatches.py:")
    assert flight_recorder.latest_entry.endswith('flight_recorder.record(GradientPhase("backward", 7))')
    records = flight_recorder.records()
    assert [record.position for record in records] == list(range(25, 41))
    assert records[0].text.startswith("barrier() (collective #25), at test_mismatches.py:")


def test_records_are_compared_at_equal_positions() -> None:
    def records(*keys: str, first: int = 0) -> list[FlightRecord]:
        return [FlightRecord(first + at, key, f"{key}, at x.py:1") for at, key in enumerate(keys)]

    equal = {0: records("a", "b", "c"), 1: records("a", "b"), 2: records("b", first=1)}
    assert describe_differences(equal) == []
    assert describe_differences({0: records("a"), 1: records("b", first=1)}) == []
    assert describe_differences({0: records("a", "b"), 3: records("a", "c")})[1:] == [
        "  rank 0: a, at x.py:1", "  rank 0: b, at x.py:1", "  rank 3: a, at x.py:1", "  rank 3: c, at x.py:1",
    ]  # fmt: skip
