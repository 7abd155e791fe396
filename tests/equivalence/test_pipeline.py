"""A Pipeline with stages and replicas trains like one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pipeline_cases as cases
import pytest
import torch

from unitrain.errors import UnsupportedError
from unitrain.testing import FakeBackend, RankGroup
from unitrain.testing.ranks import RankError
from unitrain.verify.record import Record, RecordRequest
from unitrain.verify.verdict import Outcome, RequestedRun, compare_outcomes

# Backend, number of ranks and number of stages.
SEVERAL_STAGES = {
    "2 stages": ("ddp", 2, 2),
    "3 stages": ("ddp", 3, 3),
    "2x2": ("ddp", 4, 2),
    "2x2 on Horovod": ("horovod", 4, 2),
}
LAYOUTS = {"one process": ("local", 1, 1), **SEVERAL_STAGES}


@pytest.fixture(scope="module", params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> Iterator[tuple[RankGroup, int]]:
    """Yield ranks that stay alive between tests, and their number of stages."""
    backend, size, stages = request.param
    with RankGroup(backend, size) as group:
        yield group, stages


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "dtype"),
    [("1f1b", 4, torch.float64), ("gpipe", 3, torch.float64), ("1f1b", 1, torch.float32)],
)
def test_pipeline_trains_like_one_process(
    layout: tuple[RankGroup, int], schedule: str, micro_batches: int, dtype: torch.dtype
) -> None:
    group, stages = layout
    group.run(cases.trains_like_one_process, stages, schedule, micro_batches, dtype)


@pytest.mark.parametrize("layout", SEVERAL_STAGES.values(), ids=SEVERAL_STAGES, indirect=True)
@pytest.mark.parametrize(
    "case",
    [
        cases.checkpointed_batch_norm_equals_micro_batches_of_one_process,
        cases.dropout_is_the_same_with_checkpointing,
        cases.autocast_keeps_the_dtype_of_parameters,
        cases.tied_parameters_in_one_stage_are_allowed,
        cases.frozen_blocks_join_a_trained_stage,
        cases.forward_keeps_no_activations,
        cases.rejects_invalid_models_and_settings,
        cases.invalid_values_on_the_last_rank_raise_on_every_rank,
    ],
    ids=lambda case: case.__name__,
)
def test_pipeline(layout: tuple[RankGroup, int], case: Callable[..., None]) -> None:
    group, stages = layout
    group.run(case, stages)


def test_different_batches_in_one_replica_raise_an_error_that_names_the_ranks() -> None:
    with RankGroup("ddp", 2) as group, pytest.raises(RankError) as caught:
        group.run(cases.different_batches_in_one_replica_raise, 2)
    assert caught.value.kind == "DataError"
    assert caught.value.errors[1].startswith(
        "Rank 1 has a different batch from rank 0, but both compute the same replica"
    )


@pytest.mark.parametrize(
    ("difference", "called"),
    [
        ("shape", "forward_backward with a batch of shape [6, 6] and dtype float64"),
        ("forward", "forward with a batch of shape [8, 6] and dtype float64"),
    ],
)
def test_different_shapes_in_one_replica_raise_immediately_and_name_the_ranks(difference: str, called: str) -> None:
    with RankGroup("ddp", 2) as group, pytest.raises(RankError) as caught:
        group.run(cases.different_shapes_in_one_replica_raise, 2, difference)
    assert caught.value.kind == "DataError"
    assert caught.value.errors[1].startswith(
        "Ranks 0 and 1 compute the same replica of the pipeline, but rank 0 called forward_backward with a batch "
        f"of shape [8, 6] and dtype float64, and rank 1 {called}. Load the data with unitrain.ShardedLoader("
    )


@pytest.mark.parametrize(
    ("backend", "fault"),
    [
        pytest.param("ddp", "inputs", marks=pytest.mark.nightly),
        ("ddp", "forward"),
        ("horovod", "targets"),
        pytest.param("ddp", "block", marks=pytest.mark.nightly),
        pytest.param("ddp", "shapes", marks=pytest.mark.nightly),
        pytest.param("horovod", "max_norm", marks=pytest.mark.nightly),
    ],
)
def test_an_error_that_one_rank_handles_ends_the_other_ranks(backend: str, fault: str) -> None:
    with RankGroup(backend, 2) as group, pytest.raises(RankError) as caught:
        group.run(cases.handle_an_error_on_the_last_rank, fault, timeout_seconds=30)
    assert caught.value.errors == {0: "the process has ended"}, caught.value


@pytest.mark.ci
def test_an_output_with_an_unsupported_dtype_raises_an_error_that_names_it() -> None:
    with RankGroup("ddp", 2) as group, pytest.raises(RankError) as caught:
        group.run(cases.forward_returns_an_unsupported_dtype, 2)
    assert caught.value.kind == "ModelError"
    assert "but the model returned torch.int16 [8]. Let the last block return such a tensor" in caught.value.errors[1]


def test_a_backend_without_point_to_point_rejects_stages() -> None:
    with pytest.raises(UnsupportedError, match="needs SupportsPointToPoint, which backend 'fake' does not provide"):
        cases.build_pipeline(FakeBackend(size=2), cases.build_model(), 2)


@pytest.mark.parametrize("backend", ["ddp", "horovod"])
def test_one_stage_with_replicas_trains_like_one_process(backend: str) -> None:
    with RankGroup(backend, 2) as group:
        group.run(cases.trains_like_one_process, 1, "1f1b", 4, torch.float64)


@pytest.mark.parametrize("layout", SEVERAL_STAGES.values(), ids=SEVERAL_STAGES, indirect=True)
def test_verify_compares_a_pipeline_with_one_process(layout: tuple[RankGroup, int], tmp_path: Path) -> None:
    group, stages = layout

    def record(name: str, ranks: RankGroup, *, wrong: bool) -> Outcome:
        folder = tmp_path / name
        folder.mkdir()
        RecordRequest(steps=6, emulated_ranks=group.size, float64=True).write(folder)
        ranks.run(cases.train_as_verified_script, str(folder), stages, group.size // stages, wrong)
        run = RequestedRun(backend=ranks.backend, emulated_ranks=group.size, processes=ranks.size)
        return Outcome(run=run, seconds=0.0, record=Record.read(folder))

    with RankGroup("local", 1) as alone:
        reference = record("reference", alone, wrong=False)
    assert reference.record is not None
    replicas = group.size // stages
    assert reference.record.global_batch_sizes() == [10 * replicas, 5 * replicas - 1] * 3
    for wrong, status in ((False, "same results"), (True, "differs")):
        found = record(status, group, wrong=wrong)
        compared = compare_outcomes(group.size, [reference, found], 1e-8, float64=True)
        row = compared.rows[1]
        assert row.status == status, row
        assert row.difference is not None
        assert row.difference.first_data_step is None
        assert found.record is not None
        assert found.record.losses() == pytest.approx(reference.record.losses(), abs=1e-2 if wrong else 1e-12)
        replica_mismatch = found.record.first_replica_mismatch()
        assert (replica_mismatch is not None) == (wrong and replicas > 1)
