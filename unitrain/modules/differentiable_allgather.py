"""A differentiable allgather, for losses over the samples of all ranks, such as contrastive losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.torch_compat import disable_compile
from unitrain.validation import check_instance


@disable_compile  # graph break: collectives cannot be compiled
def differentiable_allgather(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Concatenate the `tensor` of all ranks along dim 0, in rank order, with gradients for all ranks' tensors.

    All ranks must call this function, with tensors that may differ in dim 0, and run a backward pass through the
    result. The backward pass sums the gradients of the result over ranks with one allreduce, and returns this rank's
    rows: the gradient of the sum of all ranks' losses. `distributed_model` then averages over ranks, so parameters
    receive the gradient of the mean of the ranks' losses, as without an allgather. Do not multiply the loss by the
    number of ranks. Both of the following produce the result of a single process that computes the loss of the global
    batch:

    - every rank computes the same loss of all gathered samples;
    - every rank computes the mean loss of its own samples against all gathered samples. If the number of samples
      differs between ranks, weight the loss as usual, by `samples * size / step_samples`.

    The dummy batch of a rank without samples must not contribute to the losses of other ranks: gather
    `tensor[:micro_batch.samples]`, as in examples/contrastive.py, or use data that is sharded evenly.

    With grad mode enabled, the result requires grad even if this rank's tensor does not (for example, because it has no
    samples), so that every rank participates in the backward pass. For integers and complex numbers, and in
    torch.no_grad(), the function returns the result of `communicator.allgather`, without gradients. On every rank,
    the backward pass must reach the result in the same order relative to other collectives. Double backward is
    supported.

    Raises TensorError for a tensor that collectives do not support, and CollectiveMismatchError if the dtype, the shape
    (except dim 0) or the grad mode differs between ranks.
    """
    fix = "Use differentiable_allgather(tensor, backend)"
    check_instance("differentiable_allgather(communicator)", communicator, Communicator, "a backend", fix)
    if not (torch.is_grad_enabled() and _is_regular_tensor(tensor) and tensor.is_floating_point()):
        return communicator.allgather(tensor)
    rows = tensor.shape[0] if tensor.dim() else 1
    # Five dimensions, so that this allgather does not match that of a rank that passed integers or disabled grad mode.
    row_counts: list[int] = communicator.allgather(torch.full((1, 1, 1, 1, 1), rows, device="cpu")).view(-1).tolist()
    anchor = torch.empty(0, requires_grad=True, device="cpu")
    gathered: Tensor = _Allgather.apply(tensor, anchor, communicator, row_counts)
    return gathered


def _is_regular_tensor(value: Any) -> bool:
    """Return whether `value` is a tensor that is not lazy, nested or on device meta. Otherwise,
    `communicator.allgather` raises TensorError on every rank."""
    if not isinstance(value, Tensor) or nn.parameter.is_lazy(value):
        return False
    return not (value.is_nested or value.is_meta)


class _Allgather(torch.autograd.Function):
    """Gather tensors. `anchor` requires grad, so that every rank runs the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, communicator: Communicator, row_counts: list[int]) -> Tensor:
        ctx.communicator, ctx.row_counts, ctx.shape = communicator, row_counts, tensor.shape
        return communicator.allgather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own: Tensor = _AllreduceAndSelectRows.apply(gradient, ctx.communicator, ctx.row_counts)
        return (own.view(ctx.shape) if ctx.needs_input_grad[0] else None), None, None, None


class _AllreduceAndSelectRows(torch.autograd.Function):
    """Allreduce a tensor with the rows of all ranks, and return this rank's rows: the backward of an allgather."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, communicator: Communicator, row_counts: list[int]) -> Tensor:
        ctx.communicator, ctx.row_counts = communicator, row_counts
        first = sum(row_counts[: communicator.rank])
        # A reducescatter would require equal parts and would be slower on CPUs.
        return communicator.allreduce(gradient, "sum").narrow(0, first, row_counts[communicator.rank]).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        anchor = torch.empty(0, requires_grad=True, device="cpu")
        return _Allgather.apply(gradient, anchor, ctx.communicator, ctx.row_counts), None, None
