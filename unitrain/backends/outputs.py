"""What a forward returned, looked at for the tensors that a backward can start from."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor


def gradient_tensors(output: Any) -> list[Tensor]:
    """Return the tensors in `output` that carry gradients, looking into tuples, lists, dicts and dataclasses."""
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        output = vars(output)
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, list | tuple):
        return [tensor for part in output for tensor in gradient_tensors(part)]
    return []
