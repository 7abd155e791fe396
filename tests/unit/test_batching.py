"""Batch sizes: two of three settings determine the third, and contradictions are rejected with valid values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import IterableDataset

from unitrain.backends.local import LocalBackend
from unitrain.data.batch_size import BatchSizes, InitialBatchSizes, derive_batch_sizes, elastic_batch_sizes
from unitrain.data.iterable_training import TrainingStream
from unitrain.data.training_data import ShardSettings
from unitrain.errors import ConfigError


def test_two_batch_settings_determine_the_third() -> None:
    for size, batch_size, accumulate in itertools.product(range(1, 5), (1, 3, 8), (1, 2, 5)):
        global_batch = size * batch_size * accumulate
        expected = BatchSizes(batch_size, accumulate)
        assert (
            derive_batch_sizes(
                size, batch_size=batch_size, gradient_accumulation_steps=accumulate, global_batch_size=None
            )
            == expected
        )
        assert (
            derive_batch_sizes(
                size,
                batch_size=batch_size,
                gradient_accumulation_steps=None,
                global_batch_size=global_batch,
            )
            == expected
        )
        assert (
            derive_batch_sizes(
                size,
                batch_size=None,
                gradient_accumulation_steps=accumulate,
                global_batch_size=global_batch,
            )
            == expected
        )
        assert (
            derive_batch_sizes(
                size,
                batch_size=batch_size,
                gradient_accumulation_steps=accumulate,
                global_batch_size=global_batch,
            )
            == expected
        )


def test_gradient_accumulation_defaults_to_one_micro_batch() -> None:
    assert derive_batch_sizes(4, batch_size=8, gradient_accumulation_steps=None, global_batch_size=None) == BatchSizes(
        8, 1
    )
    assert derive_batch_sizes(
        4, batch_size=None, gradient_accumulation_steps=None, global_batch_size=256
    ) == BatchSizes(64, 1)
    assert derive_batch_sizes(
        4, batch_size=None, gradient_accumulation_steps=None, global_batch_size=None
    ) == BatchSizes(None, 1)


@pytest.mark.parametrize(
    ("size", "batch_size", "accumulate", "global_batch", "message"),
    [
        (3, 16, None, 100, r"size 100 is not divisible by 3 ranks x batch_size 16 = 48\. Use .*=96 or 144\."),
        (3, None, 2, 100, r"3 ranks x gradient_accumulation_steps 2 = 6\. Use global_batch_size=96 or 102\.$"),
        (4, None, None, 3, r"divisible by 4 ranks x gradient_accumulation_steps 1 = 4\. Use global_batch_size=4\.$"),
        (2, 8, 2, 64, r"64 is not 2 ranks x batch_size 8 x grad.*steps 2\. Leave out grad.*, which is then 4, or"),
    ],
)  # fmt: skip
def test_contradicting_batch_sizes_are_rejected_with_valid_suggestions(
    size: int, batch_size: int | None, accumulate: int | None, global_batch: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        derive_batch_sizes(
            size,
            batch_size=batch_size,
            gradient_accumulation_steps=accumulate,
            global_batch_size=global_batch,
        )


def test_elastic_job_keeps_its_global_batch_on_any_number_of_ranks() -> None:
    for size, first, batch_size, accumulate in itertools.product(range(1, 6), range(1, 6), (1, 3, 8), (None, 1, 2)):
        settings = {
            "batch_size": batch_size,
            "gradient_accumulation_steps": accumulate,
            "global_batch_size": None,
        }
        began = elastic_batch_sizes(first, None, **settings)
        global_batch = first * batch_size * (accumulate or 1)
        assert began == BatchSizes(batch_size, accumulate or 1, global_batch)
        found = elastic_batch_sizes(size, InitialBatchSizes(batch_size, global_batch), **settings)
        assert (found.batch_size, found.global_batch_size) == (batch_size, global_batch)
        # The smallest number of micro-batches that does not increase the batch size of a rank.
        assert (
            (found.gradient_accumulation_steps - 1) * size * batch_size
            < global_batch
            <= found.gradient_accumulation_steps * size * batch_size
        )


def test_elastic_job_accepts_a_global_batch_that_the_number_of_ranks_does_not_divide() -> None:
    alone = {"batch_size": None, "gradient_accumulation_steps": None, "global_batch_size": 8}
    assert elastic_batch_sizes(3, None, **alone) == BatchSizes(3, 1, 8)
    assert elastic_batch_sizes(1, InitialBatchSizes(3, 8), **alone) == BatchSizes(3, 3, 8)
    # The global batch is the same if the script computes batch_size from the number of ranks.
    assert elastic_batch_sizes(
        1, InitialBatchSizes(4, 8), batch_size=8, gradient_accumulation_steps=None, global_batch_size=None
    ) == BatchSizes(8, 1, 8)


def test_global_batch_is_approximated_if_all_batches_must_be_full() -> None:
    settings = {
        "batch_size": 4,
        "gradient_accumulation_steps": None,
        "global_batch_size": None,
        "full_batches_only": True,
    }
    found = {
        size: elastic_batch_sizes(size, InitialBatchSizes(4, 16), **settings).gradient_accumulation_steps
        for size in (1, 2, 3, 4, 8)
    }
    assert found == {1: 4, 2: 2, 3: 1, 4: 1, 8: 1}


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(40))


@pytest.mark.parametrize(("global_batch_size", "is_kept"), [(16, True), (18, False)])
def test_changed_global_batch_size_of_an_iterable_dataset_is_reported(
    global_batch_size: int, is_kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stored = InitialBatchSizes(4, global_batch_size)
    settings = ShardSettings(batch_size=4, is_elastic=True, initial_batch_sizes=stored)
    assert TrainingStream(Numbers(), LocalBackend(torch.device("cpu")), settings).global_batch_size == 16
    assert ("a multiple of the number of ranks times the batch size of a rank, 4." in caplog.text) is not is_kept
