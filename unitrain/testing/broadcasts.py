"""Contract tests of concurrent in-place broadcasts, for backends that use a process group."""

from __future__ import annotations

import torch
from torch import Tensor

from unitrain.backends import broadcasts
from unitrain.backends.base import Backend
from unitrain.backends.broadcasts import BUFFER_BYTES, MAX_PACKED_BYTES
from unitrain.backends.process_group import ProcessGroupBackend
from unitrain.errors import CollectiveMismatchError
from unitrain.testing.cases import contract, raises, replaced_settings
from unitrain.testing.models import seeded_generator

# Lengths of pieces in elements: empty, small, around the largest float32 piece that is packed, and large.
_LENGTHS = (
    0,
    1,
    5,
    1000,
    MAX_PACKED_BYTES // 4 - 1,
    MAX_PACKED_BYTES // 4,
    MAX_PACKED_BYTES // 4 + 1,
    MAX_PACKED_BYTES,
    MAX_PACKED_BYTES * 4,
)


def _pieces_with_roots(rank: int, size: int, lengths: tuple[int, ...] | list[int]) -> list[tuple[Tensor, int]]:
    """Return the pieces of `rank`, adjacent slices of one tensor per dtype, each with its root. The roots alternate."""
    pieces: list[tuple[Tensor, int]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        generator = seeded_generator(rank)
        flat = torch.randint(0, 2 if dtype == torch.bool else 100, (sum(lengths),), generator=generator).to(dtype)
        pieces += [(piece, len(pieces) + index) for index, piece in enumerate(flat.split(list(lengths)))]
    return [(piece, root % size) for piece, root in pieces]


@contract
def start_broadcasts_copies_each_piece_from_its_root_in_place(backend: Backend) -> None:
    if not isinstance(backend, ProcessGroupBackend):
        return
    many_small = [100 + index for index in range(3 * BUFFER_BYTES // 4 // 1000)] * backend.size
    for lengths in (_LENGTHS, [3], many_small, []):
        own = _pieces_with_roots(backend.rank, backend.size, lengths)
        inputs = [_pieces_with_roots(rank, backend.size, lengths) for rank in range(backend.size)]
        backend.start_broadcasts(iter(own))()
        for index, (piece, root) in enumerate(own):
            assert torch.equal(piece, inputs[root][index][0]), (index, len(piece), root)


@contract
def start_broadcasts_with_many_ranks_copies_each_piece_from_its_root_in_place(backend: Backend) -> None:
    if not isinstance(backend, ProcessGroupBackend):
        return
    settings = {"MAX_BROADCASTING_RANKS": 1, "MAX_GATHERED_BYTES": 2**20, "MAX_GATHERED_PIECE_BYTES": 2**19}
    equal = [7 * backend.size] * 5 * backend.size  # an allgather; other lengths need an allreduce
    with replaced_settings(broadcasts, settings):
        for lengths in (_LENGTHS, [3], equal, [MAX_PACKED_BYTES // 8] * 40, []):
            own = _pieces_with_roots(backend.rank, backend.size, lengths)
            inputs = [_pieces_with_roots(rank, backend.size, lengths) for rank in range(backend.size)]
            backend.start_broadcasts(iter(own))()
            for index, (piece, root) in enumerate(own):
                assert torch.equal(piece, inputs[root][index][0]), (index, len(piece), root)


@contract
def start_broadcasts_overlaps_with_collectives_and_other_broadcasts(backend: Backend) -> None:
    if not isinstance(backend, ProcessGroupBackend):
        return
    last_rank = backend.size - 1
    parameter = torch.nn.Parameter(torch.full((MAX_PACKED_BYTES,), float(backend.rank)))
    column = torch.full((1, 3), float(backend.rank))[:, 0]  # one element with stride 3
    assert column.stride() == (3,)
    wait_for_first = backend.start_broadcasts([(parameter, last_rank), (column, 0)])
    second = torch.full((10,), backend.rank)
    wait_for_second = backend.start_broadcasts([(second[:5], 0), (second[5:], last_rank)])
    total = backend.allreduce(torch.ones(MAX_PACKED_BYTES), "sum")
    wait_for_second()
    wait_for_first()
    assert torch.equal(total, torch.full((MAX_PACKED_BYTES,), float(backend.size)))
    assert torch.equal(parameter.detach(), torch.full((MAX_PACKED_BYTES,), float(last_rank)))
    assert column.item() == 0
    assert second.tolist() == [0] * 5 + [last_rank] * 5


@contract
def start_broadcasts_inside_on_rank_zero_raises(backend: Backend) -> None:
    if not isinstance(backend, ProcessGroupBackend):
        return
    with backend.on_rank_zero() as is_rank_zero:
        if is_rank_zero:
            raises(CollectiveMismatchError, "start_broadcasts was called", lambda: backend.start_broadcasts([]))
