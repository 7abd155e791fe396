"""Compares the results of two backends."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assert_equal(actual: Any, expected: Any) -> None:
    """Assert that nested lists are equal. Tensors may differ by rounding in float32."""
    if isinstance(actual, Tensor):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-7)
    elif isinstance(actual, list):
        assert len(actual) == len(expected)
        for a, b in zip(actual, expected, strict=True):
            assert_equal(a, b)
    else:
        assert actual == expected
