"""Telling, on every rank alike, that a model has parameters which its loss does not reach.

Left alone, such a parameter makes ranks wait for a gradient that never comes, or silently keeps it local. The first
backward is watched, because that is where a model shows it; afterwards nothing is left in the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from unitrain.backends.gradients.outputs import gradient_tensors
from unitrain.errors import ModelError


def watch_first_backward(
    wrapped: nn.Module,
    model: nn.Module,
    exchange: Callable[[list[str]], list[list[str]]],
    applies: Callable[[], bool],
) -> None:
    """Raise ModelError on every rank from the first `backward` that leaves a parameter of `model` unused on any rank.

    `wrapped` is the module that is called; `exchange` gives every rank's names of unused parameters, and runs while no
    other collective of that backward has been waited for; `applies` tells, during a backward, whether it counts. One
    that reaches no parameter at all is not the model's: gradients of the inputs were asked for, or those of a model in
    front of it.
    """
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    last_used: dict[Tensor, int] = {}
    handles: list[RemovableHandle] = []
    watching, watched = True, -1

    def used(parameter: Tensor) -> None:
        last_used[parameter] = torch._C._current_graph_task_id()

    def finished() -> None:
        nonlocal watching
        # Backwards are numbered as they begin, those that run inside another one after it.
        reached = [parameter for parameter in names if last_used.get(parameter, -1) >= watched]
        # The user may have frozen some since.
        unused = [p for p in names if p.requires_grad and last_used.get(p, -1) < watched]
        if not watching or not reached:
            return
        watching = False
        for handle in handles:
            handle.remove()
        for parameter in names:
            if not parameter._post_accumulate_grad_hooks:  # an empty table of them would still cost every backward
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
        told = exchange([names[parameter] for parameter in unused])
        if unused:
            # Give the others the gradients they wait for, so that they, and the group, come out of this backward.
            with torch.enable_grad():
                torch.stack([parameter.sum() * 0 for parameter in unused]).sum().backward()
        if any(told):
            # After what else is to be done at the end of this backward: others wait for this rank's part in that.
            _queue_callback(lambda: _raise_if_any(told))

    def on_backward(gradient: Tensor) -> None:
        nonlocal watched
        backward = torch._C._current_graph_task_id()
        if watching and backward != watched and applies():
            watched = backward
            _queue_callback(finished)

    def on_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in gradient_tensors(output):
                tensor.register_hook(on_backward)

    handles.append(wrapped.register_forward_hook(on_forward))
    handles.extend(parameter.register_post_accumulate_grad_hook(used) for parameter in names)


def _queue_callback(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the backward that is running, before what is queued later."""
    Variable._execution_engine.queue_callback(callback)


def _raise_if_any(told: list[list[str]]) -> None:
    ranks = [str(rank) for rank, names in enumerate(told) if names]
    if not ranks:
        return
    names = list(dict.fromkeys(name for part in told for name in part))
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    where = "every rank" if len(ranks) == len(told) else f"rank {', '.join(ranks)}"
    raise ModelError(
        f"{len(names)} parameters got no gradient on {where}: {shown}. Use them in the loss, freeze them with "
        "requires_grad_(False), or allow it: backend.distributed_model(model, find_unused_parameters=True)."
    )
