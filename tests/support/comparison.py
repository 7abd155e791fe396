"""Compares the results of two backends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assert_equal(one: Any, other: Any) -> None:
    """Assert that nested lists are equal. Tensors may differ by rounding in float32."""
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    else:
        assert one == other
