"""Division of gradients by the number of tokens in a step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from unitrain.backends.local import LocalBackend
from unitrain.data.order import MicroBatch
from unitrain.optim.loss_weighting import Loss, LossWeighting


def divide_gradient(counts: Sequence[float], logical_rank: int | None) -> float:
    """Divide a gradient of 1 by the sum of `counts`, the numbers of tokens per micro-batch, and return the result."""
    weighting = LossWeighting(LocalBackend(torch.device("cpu")))
    micro_batch = MicroBatch(slice(0, 1), 1, len(counts), len(counts), True, logical_rank)
    for count in counts:
        weighting.weight_loss(Loss(torch.ones(()), torch.tensor(count, dtype=torch.float64)), micro_batch)
    for work in weighting.overlapped_work():
        work()
    parameter = torch.zeros((), dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    scale = weighting.loss_scale()
    assert scale is not None
    weighting.finish_step(torch.optim.SGD([parameter], lr=1.0), micro_batch)
    return float(parameter.grad * scale)


def test_fractional_counts_of_logical_ranks_have_the_same_sum_in_any_order() -> None:
    counts = (torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5).tolist()
    orders = [counts, counts[::-1], sorted(counts)]
    assert len({divide_gradient(order, 0) for order in orders}) == 1
    assert len({divide_gradient(order, None) for order in orders}) > 1, "ordinary float64 sums must depend on the order"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", [1, 1000, 65_536, 3_000_000, 2**31])
@pytest.mark.parametrize("samples", [1, 64])
def test_gradient_of_a_loss_over_many_tokens_is_that_of_the_mean(dtype: torch.dtype, tokens: int, samples: int) -> None:
    weighting = LossWeighting(LocalBackend(torch.device("cpu")))
    parameter = torch.ones((), dtype=dtype, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(2):  # the first step estimates the number of tokens per sample, the second one reuses it
        parameter.grad = None
        micro_batch = MicroBatch(slice(0, samples), samples, samples, samples, True, None)
        weighting.weight_loss(Loss(parameter * 2, tokens), micro_batch).backward()
        for work in weighting.overlapped_work():
            work()
        assert parameter.grad is not None
        scale = weighting.loss_scale()
        assert scale is not None
        # The gradient of the mean is below the range of float16, so the factor is compared before the last division.
        unscaled = float(parameter.grad) / float(scale)
        assert unscaled == pytest.approx(2 / samples, rel=0.01)
        weighting.finish_step(optimizer, micro_batch)
        assert float(parameter.grad) == pytest.approx(2 / tokens, rel=0.01, abs=1e-7)
