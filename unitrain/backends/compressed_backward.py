"""Compression where there is one rank and no reducer: the same arithmetic, at the end of each backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from unitrain.backends.compression import HALF, Compressor
from unitrain.backends.outputs import gradient_tensors
from unitrain.backends.power_sgd import LowRankGradients


def compress_backward(model: nn.Module, compressor: Compressor, applies: Callable[[], bool]) -> None:
    """Let every backward of `model` end with its gradients compressed; `applies` tells, during a backward, whether it
    counts."""
    parameters = list(model.parameters())
    followed: set[Tensor] = set()
    reached: set[Tensor] = set()  # since gradients were compressed last, also by backwards that did not count
    backward = last_reaching = -1

    def finish() -> None:
        # Backwards are numbered as they begin, those that run inside another one after it. One that reached no
        # parameter is of torch.autograd.grad; what `no_sync` has added up before it is not complete.
        if last_reaching >= backward:
            _compress([parameter for parameter in parameters if parameter in reached], compressor)
            reached.clear()

    def on_gradient(parameter: Tensor) -> None:
        nonlocal last_reaching
        reached.add(parameter)
        last_reaching = torch._C._current_graph_task_id()

    def on_backward(gradient: Tensor) -> None:
        nonlocal backward
        if (current := torch._C._current_graph_task_id()) != backward and applies():
            backward = current
            Variable._execution_engine.queue_callback(finish)

    def on_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            return
        for parameter in parameters:
            if parameter.requires_grad and parameter not in followed:  # the user may have unfrozen it since
                followed.add(parameter)
                parameter.register_post_accumulate_grad_hook(on_gradient)
        for tensor in gradient_tensors(output):
            tensor.register_hook(on_backward)

    model.register_forward_hook(on_forward)


@torch.no_grad()
def _compress(parameters: list[nn.Parameter], compressor: Compressor) -> None:
    if isinstance(compressor, LowRankGradients):
        compressor.forget_unfinished()
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:  # another hook has taken it
            continue
        if isinstance(compressor, LowRankGradients):
            for _ in compressor.reduce([parameter], [gradient], lambda total: lambda: None):
                pass
        else:
            gradient.copy_(_rounded(gradient, HALF[compressor]))
    if isinstance(compressor, LowRankGradients):
        compressor.finish()


def _rounded(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    if not gradient.is_complex():
        return gradient.to(dtype)
    parts = torch.view_as_real(gradient.resolve_conj())  # converting a complex number drops its imaginary part
    return torch.view_as_complex(parts.to(dtype).to(parts.dtype))
