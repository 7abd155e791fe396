"""An allgather with a gradient, for losses over the samples of all ranks, such as contrastive losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from unitrain.backends.base import Communicator


@_disable_dynamo  # a compiled model calls the collectives between the parts that are compiled
def differentiable_allgather(tensor: Tensor, communicator: Communicator) -> Tensor:
    """Concatenate every rank's `tensor` along dim 0, in rank order, with a gradient for every rank's tensor.

    All ranks call it, with tensors that may differ in dim 0, and run a backward through the result. The backward sums
    the gradients of the result over ranks, by one allreduce, and returns this rank's rows of the sum: the gradient of
    the sum of all ranks' losses. Because `distributed_model` then takes the mean over ranks, parameters get the
    gradient of the mean of the ranks' losses, as without an allgather. No loss is multiplied by the number of ranks;
    the following two are both equal to one process that computes the loss of the whole batch:

    - every rank computes the same loss of all gathered samples;
    - every rank computes the mean loss of its own samples, compared with all gathered ones. Where ranks have unequal
      numbers of samples, weight it like any other loss: by `samples * size / step_samples`.

    A dummy batch, of a rank without samples in this step, must not take part in others' losses: gather
    `tensor[:part.samples]`, as in examples/contrastive.py, or use data that is divided evenly.

    With grad mode enabled, the result requires grad even where this rank's tensor does not, for example because the
    rank has no samples, so that every rank takes part in the backward. Integers, and tensors in torch.no_grad(), are
    gathered by `communicator.allgather`. Use the result in the same order relative to other collectives on every rank.
    Gradients of gradients are supported.

    Raises TensorError for a tensor that no collective takes, and CollectiveMismatchError when ranks differ in dtype, in
    shape apart from dim 0, or in grad mode.
    """
    if not (isinstance(tensor, Tensor) and tensor.is_floating_point() and torch.is_grad_enabled()):
        return communicator.allgather(tensor)
    rows = tensor.shape[0] if tensor.dim() else 1
    counts: list[int] = communicator.allgather(torch.tensor([rows])).tolist()
    anchor = torch.empty(0, requires_grad=True)
    gathered: Tensor = _Allgather.apply(tensor, anchor, communicator, counts)
    return gathered


class _Allgather(torch.autograd.Function):
    """Gather tensors; `anchor` requires grad, so that there is a backward on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, anchor: Tensor, communicator: Communicator, counts: list[int]) -> Tensor:
        ctx.communicator, ctx.counts, ctx.shape = communicator, counts, tensor.shape
        return communicator.allgather(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        own: Tensor = _OwnRowsOfSum.apply(gradient, ctx.communicator, ctx.counts)
        return (own.view(ctx.shape) if ctx.needs_input_grad[0] else None), None, None, None


class _OwnRowsOfSum(torch.autograd.Function):
    """Sum a tensor of all ranks' rows over ranks, and return this rank's rows: the transpose of an allgather."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, communicator: Communicator, counts: list[int]) -> Tensor:
        ctx.communicator, ctx.counts = communicator, counts
        first = sum(counts[: communicator.rank])
        # A reducescatter takes equal parts only, and takes longer on CPUs.
        return communicator.allreduce(gradient, "sum").narrow(0, first, counts[communicator.rank]).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        anchor = torch.empty(0, requires_grad=True)
        return _Allgather.apply(gradient, anchor, ctx.communicator, ctx.counts), None, None
