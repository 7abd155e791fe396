"""Division of blocks into pipeline stages, measurement of blocks, and micro-batches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import unitrain
from unitrain.backends.pipeline.measurement import BlockCost, create_memory_cost, create_time_cost, measure_blocks
from unitrain.backends.pipeline.micro_batches import micro_batch_sizes, split_targets
from unitrain.backends.pipeline.partition import partition
from unitrain.backends.pipeline.replicas import Replicas
from unitrain.errors import CollectiveMismatchError
from unitrain.testing.fake_backend import FakeBackend


def test_on_rank_zero_is_true_only_on_rank_0_of_a_pipeline_and_rejects_collectives() -> None:
    found = []
    for rank in range(4):
        replicas = Replicas(FakeBackend(rank, 4), stages=2)
        with replicas.on_rank_zero() as is_rank_zero:
            found.append(is_rank_zero)
            with pytest.raises(CollectiveMismatchError, match="was called inside on_rank_zero"):
                replicas.allreduce(torch.ones(1))
    assert found == [True, False, False, False]


def all_partitions(blocks: int, stages: int) -> list[list[int]]:
    cuts = itertools.combinations(range(1, blocks), stages - 1)
    return [[stop - start for start, stop in itertools.pairwise([0, *cut, blocks])] for cut in cuts]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4), st.sets(st.integers(0, 6)))
def test_partition_minimizes_the_maximum_cost_and_then_the_sum_of_squares(
    costs: list[int], stages: int, no_start: set[int]
) -> None:
    def cost(stage: int, start: int, stop: int) -> float:
        return math.inf if stage and start in no_start else sum(costs[start:stop]) * (stages - stage)

    def rating(counts: list[int]) -> tuple[float, float]:
        bounds = itertools.pairwise(itertools.accumulate(counts, initial=0))
        found = [cost(stage, start, stop) for stage, (start, stop) in enumerate(bounds)]
        return max(found), sum(one * one for one in found)

    candidates = [counts for counts in all_partitions(len(costs), stages) if rating(counts)[0] < math.inf]
    found = partition(len(costs), stages, cost) if len(costs) >= stages else None
    if not candidates:
        assert found is None
        return
    assert found in candidates
    assert rating(found) == min(map(rating, candidates))


def create_block_cost(seconds: float = 1.0, held: int = 0, state: int = 0, trained: bool = True) -> BlockCost:
    return BlockCost(seconds, state, held, 0, held, can_start_stage=True, is_trained=trained)


def test_stages_are_balanced_by_time() -> None:
    costs = [
        create_block_cost(5),
        create_block_cost(1),
        create_block_cost(1),
        create_block_cost(1),
        create_block_cost(1),
        create_block_cost(1),
    ]
    assert partition(6, 2, create_time_cost(costs)) == [1, 5]


def test_stages_without_trainable_parameters_are_excluded() -> None:
    costs = [create_block_cost(5), *(create_block_cost(trained=False) for _ in range(4)), create_block_cost(1)]
    assert partition(6, 2, create_time_cost(costs)) == [1, 5]
    assert partition(5, 2, create_time_cost(costs[:5])) is None


def test_first_stage_of_1f1b_has_fewer_blocks_because_it_holds_more_micro_batches() -> None:
    costs = [create_block_cost(held=10) for _ in range(6)]
    # Stage 0 holds the activations of two micro-batches. Stage 1 holds those of one micro-batch, and its stage input.
    assert partition(6, 2, create_memory_cost(costs, 2, 4, "1f1b")) == [2, 4]
    assert partition(6, 2, create_memory_cost(costs, 2, 4, "gpipe")) == [3, 3]
    assert partition(6, 2, create_memory_cost(costs, 2, 1, "1f1b")) == [3, 3]


class Stack(nn.Sequential):
    """A block of several layers."""


def test_measured_memory_equals_the_tensors_that_a_block_holds() -> None:
    torch.manual_seed(0)
    wide = Stack(nn.Linear(8, 100, bias=False), nn.Sigmoid(), nn.Linear(100, 8, bias=False))
    model = nn.Sequential(nn.Linear(8, 8), wide, nn.BatchNorm1d(8), nn.Dropout(0.5))
    before = torch.get_rng_state(), [value.clone() for value in model.state_dict().values()]
    first, plain, _, _ = measure_blocks(list(model.named_children()), torch.ones(16, 8), torch.device("cpu"))
    assert not first.can_start_stage
    assert plain.can_start_stage
    assert plain.input_bytes == 16 * 8 * 4
    assert plain.state_bytes == 4 * 4 * 1600
    # The block holds the outputs of Sigmoid and of the last Linear layer, but not of the first Linear layer.
    assert plain.held_bytes == 4 * 16 * (100 + 8)
    unitrain.checkpoint_activations(model, Stack)
    _, checkpointed, _, _ = measure_blocks(list(model.named_children()), torch.ones(16, 8), torch.device("cpu"))
    assert checkpointed.held_bytes == 4 * 16 * 8
    assert checkpointed.extra_bytes >= 4 * 16 * 100
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(map(torch.equal, model.state_dict().values(), before[1]))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_error_in_a_block_names_the_block() -> None:
    with pytest.raises(unitrain.ModelError, match=r"Block 'b' failed on a micro-batch of example_inputs: RuntimeError"):
        measure_blocks([("a", nn.Linear(2, 3)), ("b", nn.Linear(2, 2))], torch.ones(4, 2), torch.device("cpu"))


def test_micro_batches_differ_by_at_most_one_sample() -> None:
    assert micro_batch_sizes(10, 4) == [3, 3, 2, 2]
    assert micro_batch_sizes(8, 4) == [2, 2, 2, 2]
    assert micro_batch_sizes(2, 4) == [1, 1]


def test_weight_of_a_micro_batch_is_its_fraction_of_the_batch() -> None:
    targets = {"label": torch.arange(5), "masks": [torch.ones(5, 2)]}
    first, second = split_targets(targets, [3, 2], loss_weight=0.5)
    assert first.values["label"].tolist() == [0, 1, 2]
    assert second.values["masks"][0].shape == (2, 2)
    assert (first.weight, second.weight) == (0.3, 0.2)
