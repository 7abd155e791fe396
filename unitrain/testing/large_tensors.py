"""Contract tests of reducescatter and allgather for each transfer method: over direct connections, in pieces, and by
broadcasts.

Cases that cover all dtypes and operations use small pieces, so that they do not communicate gigabytes.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor
from torch.testing import assert_close

from unitrain.backends import composed_collectives
from unitrain.backends.base import Backend
from unitrain.backends.checks import DTYPES, REDUCE_OPS
from unitrain.testing.cases import contract, replaced_settings
from unitrain.testing.collectives import is_reduction_supported, make_input, reduce_inputs
from unitrain.testing.models import seeded_generator

# Pieces of 384 bytes, results of any size gathered by broadcasts, and no direct connections.
_SMALL_PIECES = {"MAX_PIECE_BUFFER_BYTES": 384, "MIN_BROADCAST_BYTES": 1, "MAX_DIRECT_BYTES": 0}


@contract
def reducescatter_in_pieces_equals_reducescatter_in_one_piece(backend: Backend) -> None:
    for dtype, op in itertools.product(DTYPES, REDUCE_OPS):
        if not is_reduction_supported(dtype, op):
            continue
        shape = (3 * backend.size, 17)
        inputs = [make_input(rank, shape, dtype) for rank in range(backend.size)]
        own = inputs[backend.rank]
        for argument in (own, own.t().contiguous().t()):  # contiguous or not
            original = argument.clone()
            with replaced_settings(composed_collectives, _SMALL_PIECES):
                result = backend.reducescatter(argument, op)  # type: ignore[arg-type]
            expected = reduce_inputs(inputs, op)[3 * backend.rank : 3 * backend.rank + 3]
            assert_close(result, expected, msg=lambda text, case=(dtype, op): f"{case}: {text}")
            assert torch.equal(argument, original), (dtype, op)
        assert torch.equal(result, backend.reducescatter(own, op)), (dtype, op)  # type: ignore[arg-type]


@contract
def min_and_max_propagate_nan_in_every_piece(backend: Backend) -> None:
    for dtype, op in itertools.product((torch.float16, torch.bfloat16, torch.float32, torch.float64), ("min", "max")):
        inputs = []
        for rank in range(backend.size):
            values = torch.randn(backend.size, 150, generator=seeded_generator(rank)).to(dtype)
            values[:, rank::11] = torch.nan
            values[:, rank + 3 :: 13] = -torch.inf
            inputs.append(values)
        expected = functools.reduce(torch.minimum if op == "min" else torch.maximum, inputs)[backend.rank]
        with replaced_settings(composed_collectives, _SMALL_PIECES):
            result = backend.reducescatter(inputs[backend.rank], op)[0]  # type: ignore[arg-type]
        assert_close(result, expected, equal_nan=True, rtol=0, atol=0)


@contract
def reducescatter_of_a_large_tensor_equals_a_slice_of_the_allreduce(backend: Backend) -> None:
    columns = 5 * composed_collectives.MAX_PIECE_BUFFER_BYTES // 8 // backend.size + 1  # two and a half pieces
    generator = seeded_generator(backend.rank)
    own = torch.rand(backend.size, columns, generator=generator)
    assert_close(backend.reducescatter(own)[0], backend.allreduce(own)[backend.rank])
    half = torch.full((backend.size, columns), 40_000.0, dtype=torch.float16)  # the sum overflows in float16
    assert torch.equal(backend.reducescatter(half)[0], half[0])


@contract
def allgather_of_large_tensors_concatenates_in_rank_order(backend: Backend) -> None:
    def check(inputs: list[Tensor], case: object) -> None:
        own = inputs[backend.rank]
        original = own.clone()
        gathered = backend.allgather(own)
        assert gathered.dtype == own.dtype
        assert torch.equal(gathered, torch.cat(inputs)), case
        assert torch.equal(own, original), case

    ranks = range(backend.size)
    for dtype, counts in itertools.product(DTYPES, ([400, 400, 400], [0, 300, 100], [500, 0, 0], [0, 0, 200])):
        check([make_input(rank, (counts[rank % 3], 50), dtype) for rank in ranks], (dtype, counts))
    with replaced_settings(composed_collectives, _SMALL_PIECES):
        for dtype, counts in itertools.product(DTYPES, ([40, 40, 40], [0, 30, 10], [1, 0, 0], [0, 0, 0])):
            check([make_input(rank, (counts[rank % 3], 5), dtype) for rank in ranks], (dtype, counts))
            check([make_input(rank, (5, counts[rank % 3]), dtype).t() for rank in ranks], ("transposed", dtype, counts))
        negative = [torch.complex(torch.ones(9, 9), torch.full((9, 9), 1.0 + rank)).conj().imag for rank in ranks]
        assert negative[0].is_neg()
        check(negative, "negative views")
