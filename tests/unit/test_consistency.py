"""Size of the rows that the consistency check exchanges."""

from __future__ import annotations

from unitrain.backends.consistency import MAX_GATHERING_RANKS, compute_max_content_bytes


def test_row_content_is_a_multiple_of_8_bytes_for_every_number_of_ranks() -> None:
    sizes = [compute_max_content_bytes(size) for size in range(1, MAX_GATHERING_RANKS + 1)]
    assert [size for size in sizes if size % 8] == []
    assert max(sizes) == 4096 + 24
    assert min(sizes) == 1024 + 24
