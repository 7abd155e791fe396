"""Division of parameters among ranks."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from unitrain.backends.sharding.partition import MIN_DIVIDED_ELEMENTS, ParameterShard, divide_elements, divide_runs

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


@given(SIZES, st.integers(1, 5))
def test_divide_elements_assigns_every_element_to_one_rank(sizes: list[int], ranks: int) -> None:
    assert_complete(divide_elements(sizes, ranks), sizes)
