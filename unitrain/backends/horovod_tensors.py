"""torch's tensors and operations in the forms that Horovod takes, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.errors import UnsupportedError

REDUCIBLE = (torch.float64, torch.float32, torch.float16, torch.int64, torch.int32)
_WIDER = {torch.bfloat16: torch.float32}  # everything else that Horovod cannot reduce fits int32


def horovod_op(op: Any) -> Any:
    """Return Horovod's name for torch's reduction. Raises UnsupportedError for one that Horovod lacks."""
    for theirs, ours in (
        (dist.ReduceOp.SUM, hvd.Sum),
        (dist.ReduceOp.AVG, hvd.Average),
        (dist.ReduceOp.MIN, hvd.Min),
        (dist.ReduceOp.MAX, hvd.Max),
        (dist.ReduceOp.PRODUCT, hvd.Product),
    ):
        if op == theirs:
            return ours
    raise UnsupportedError(f"Horovod cannot reduce by {op}. Use SUM, AVG, MIN, MAX or PRODUCT.")


def reducible(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a dtype that Horovod reduces."""
    dtype = tensor.dtype if tensor.dtype in REDUCIBLE else _WIDER.get(tensor.dtype, torch.int32)
    return tensor.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return `tensor` as uint8 [bytes], sharing its memory where it is contiguous: what only moves needs no dtype."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def slices(parts: list[Tensor]) -> list[tuple[Tensor, slice]]:
    """Return each of the equal `parts` with its place in the gathered bytes."""
    count = parts[0].numel() * parts[0].element_size()
    return [(part, slice(rank * count, (rank + 1) * count)) for rank, part in enumerate(parts)]


def copier(parts: list[tuple[Tensor, slice]]) -> Callable[[Tensor], None]:
    """Return a function that copies slices of some bytes into tensors."""

    def copy(payload: Tensor) -> None:
        for part, place in parts:
            part.copy_(payload[place].view(part.dtype).view(part.shape))

    return copy
