"""Division of the elements of parameters among ranks."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from unitrain.backends.sharding.partition import (
    MIN_DIVIDED_ELEMENTS,
    ParameterShard,
    divide_elements,
    divide_runs,
    iterate_batches,
)

SIZES = st.lists(st.integers(0, 5 * MIN_DIVIDED_ELEMENTS), max_size=12)


def assert_complete(shards: list[ParameterShard], sizes: list[int]) -> None:
    for index, size in enumerate(sizes):
        own = [shard for shard in shards if shard.index == index]
        assert own[0].start == 0
        assert own[-1].stop == size
        assert all(one.stop == other.start for one, other in pairwise(own))
        assert len({shard.owner for shard in own}) == len(own)


@given(SIZES, st.integers(1, 5), st.integers(1, 8 * MIN_DIVIDED_ELEMENTS))
def test_divide_runs_assigns_every_element_to_one_rank_and_balances_each_run(
    sizes: list[int], ranks: int, limit: int
) -> None:
    shards = divide_runs(sizes, ranks, limit)
    assert_complete(shards, sizes)
    runs, run = list[list[int]](), list[int]()
    for index in reversed(range(len(sizes))):
        run.append(index)
        if sum(sizes[one] for one in run) >= limit:
            runs.append(run)
            run = []
    for members in [*runs, run]:
        owned = [0] * ranks
        for shard in shards:
            if shard.index in members:
                owned[shard.owner] += shard.stop - shard.start
        assert max(owned) <= sum(owned) / ranks + MIN_DIVIDED_ELEMENTS + 16


@given(SIZES, st.integers(1, 5), st.integers(1, 8 * MIN_DIVIDED_ELEMENTS))
def test_batches_contain_every_shard_once_and_end_when_a_rank_reaches_the_limit(
    sizes: list[int], ranks: int, limit: int
) -> None:
    shards = divide_elements(sizes, ranks)
    batches = list(iterate_batches(shards, [4] * len(sizes), limit))
    assert sorted(map(repr, chain.from_iterable(batches))) == sorted(map(repr, shards))
    for owner in range(ranks):
        parts = [[shard for shard in batch if shard.owner == owner] for batch in batches]
        num_bytes = [sum(4 * (shard.stop - shard.start) for shard in part) for part in parts if part]
        assert all(found >= limit for found in num_bytes[:-1])
        # A batch ends as soon as it reaches the limit.
        assert all(4 * sum(one.stop - one.start for one in part[:-1]) < limit for part in parts)


class CountedSizes(list[int]):
    """A list that counts the accesses to its elements."""

    accesses = 0

    def __getitem__(self, index: Any) -> Any:
        self.accesses += 1
        return super().__getitem__(index)


def test_many_small_tensors_are_divided_with_a_constant_number_of_accesses_per_tensor() -> None:
    sizes = CountedSizes([10] * 2_000)
    divide_runs(sizes, 4, 10**7)
    assert 0 < sizes.accesses <= 4 * len(sizes)  # a quadratic algorithm reads each element 1,000 times on average


@given(SIZES, st.integers(1, 5))
@example([22275, 22273], 2)  # the boundary is one element before the end of the first tensor
def test_divide_elements_assigns_every_element_to_one_rank(sizes: list[int], ranks: int) -> None:
    assert_complete(divide_elements(sizes, ranks), sizes)
