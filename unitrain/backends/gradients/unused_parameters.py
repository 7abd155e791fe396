"""Detect parameters that the loss does not use, or that a nested backward pass uses, and raise an error on every rank.

If a rank does not use a parameter, the other ranks wait for a gradient that this rank never computes, or gradients
remain unreduced. Only the first backward pass is checked, because later ones usually use the same parameters and the
hooks are slow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unitrain.backends.gradients.end_of_backward import BackwardStage, end_of_backward, tensors_requiring_grad
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import ModelError
from unitrain.torch_compat import current_backward, drop_empty_gradient_hooks, gradient_hooks_disabled

_MAX_SHOWN_NAMES = 5


def register_first_backward_check(
    wrapped: nn.Module,
    model: nn.Module,
    allgather: Callable[[list[str]], list[list[str]]] | None,
    reduces_gradients: Callable[[], bool],
    *,
    model_number: int = 0,
    reduces_zeros: bool = True,
) -> Callable[[], None]:
    """Register hooks that check the first backward pass, and raise ModelError on every rank if any rank does not use a
    parameter of `model` that requires grad. Return a function that ends the check.

    They also raise ModelError for a sparse gradient and, with `reduces_zeros`, if DDP's reducer would reduce a gradient
    before it is complete, because nested backward passes, such as those of reentrant activation checkpointing, compute
    it.

    Args:
        wrapped: the module that the user calls.
        model: the module with the parameters.
        allgather: returns every rank's argument, in rank order. This function must also work while collectives of the
            backward pass are in flight. None if parameters may be unused.
        reduces_gradients: returns, during a backward pass, whether it reduces gradients. Other backward passes are not
            checked.
        model_number: the number of the model, in the order of which several models gather their names.
        reduces_zeros: whether to reduce zeros for unused parameters after their names have been gathered. False if
            `wrapped` itself completes the reduction at the end of a backward pass. The names are then gathered after
            the reduction, because other ranks may wait for the gradients before their backward passes end.

    A backward pass that reaches no parameter is not checked either: it computes gradients of the inputs, or of a model
    whose output is this model's input. If only some ranks run such a backward pass, and the remaining ranks run one
    that reduces gradients, the remaining ranks wait until the timeout, as after any skipped backward pass.
    """
    names: dict[Tensor, str] = {value: name for name, value in model.named_parameters() if value.requires_grad}
    last_used: dict[Tensor, int] = {}
    handles: list[RemovableHandle] = []
    is_active, checked_backward = True, -1
    follows_gradient_graph = False  # whether the last backward pass reached an output, but no parameter

    def on_gradient(parameter: Tensor) -> None:
        backward = current_backward()
        if follows_gradient_graph and (begin := begin_reference()) is not None:
            begin()  # a loss of gradients does not depend on the outputs
        if reduces_zeros and checked_backward != -1:
            is_repeated = last_used.get(parameter, -1) >= checked_backward
            if is_repeated or (allgather is None and backward != checked_backward):
                raise _nested_backward_error(names[parameter], is_repeated=is_repeated)
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ModelError(
                f"The gradient of parameter {names[parameter]!r} is a tensor of layout {parameter.grad.layout}, which "
                "unitrain does not reduce. Compute a dense gradient, for example with "
                "torch.nn.functional.embedding(..., sparse=False)."
            )
        last_used[parameter] = backward

    def on_end_of_backward() -> None:
        nonlocal checked_backward, follows_gradient_graph
        # Autograd graph task IDs increase, so `>=` includes nested backward passes.
        reached = {parameter for parameter in names if last_used.get(parameter, -1) >= checked_backward}
        if not is_active:
            return
        if not reached:
            checked_backward, follows_gradient_graph = -1, True
            return
        # The user may have frozen parameters since the hooks were registered.
        unused = [parameter for parameter in names if parameter.requires_grad and parameter not in reached]
        stop()
        if allgather is None:
            return
        unused_by_rank = allgather([names[parameter] for parameter in unused])
        if unused and reduces_zeros:
            # Other ranks wait for these gradients: reduce zeros, so that all ranks complete this backward pass.
            with ExitStack() as stack:
                for parameter in unused:
                    stack.enter_context(gradient_hooks_disabled(parameter))
                torch.autograd.backward(unused, [torch.zeros_like(parameter) for parameter in unused])
        if any(unused_by_rank):
            end_of_backward.add(BackwardStage.RAISE_ERRORS, lambda: raise_unused(unused_by_rank))

    def begin_check(_gradient: Tensor | None = None) -> None:
        nonlocal checked_backward, follows_gradient_graph
        backward, follows_gradient_graph = current_backward(), False
        if is_active and backward != checked_backward and reduces_gradients():
            checked_backward = backward
            stage = BackwardStage.FIND_UNUSED_PARAMETERS if reduces_zeros else BackwardStage.RAISE_ERRORS
            end_of_backward.add(stage, on_end_of_backward, model_number)

    # `begin_check` refers to `wrapped`, which the hooks of its parameters must not keep alive.
    begin_reference = weakref.ref(begin_check)

    def on_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_requiring_grad(output):
                tensor.register_hook(begin_check)

    def stop() -> None:
        nonlocal is_active
        is_active = False
        for handle in handles:
            handle.remove()
        for parameter in names:
            drop_empty_gradient_hooks(parameter)

    handles.append(wrapped.register_forward_hook(on_forward))
    handles.extend(parameter.register_post_accumulate_grad_hook(on_gradient) for parameter in names)
    weakref.finalize(wrapped, stop).atexit = False
    return stop


def gather_unused(rendezvous: Rendezvous, key: str, names: list[str]) -> list[list[str]]:
    """Return every rank's `names` of unused parameters, in rank order. A rank calls it at the end of the first backward
    pass that uses parameters of the model.

    Raises CollectiveTimeoutError on the ranks that call it unless all ranks do.
    """
    cause = (
        f"On rank {rendezvous.rank_info.rank}, a backward pass has used parameters of the model, but no backward pass "
        "of the missing ranks has used any. Use the parameters in the loss on every rank, for example with a factor of "
        "0."
    )
    return rendezvous.allgather(f"{key}/unused", names, cause)


def raise_unused(unused_by_rank: list[list[str]], *, suggests_find_unused: bool = True) -> None:
    """Raise ModelError with the unused parameters and their ranks. With `suggests_find_unused`, the message suggests
    find_unused_parameters=True."""
    ranks = [str(rank) for rank, names in enumerate(unused_by_rank) if names]
    names = list(dict.fromkeys(name for unused in unused_by_rank for name in unused))
    noun = "rank" if len(ranks) == 1 else "ranks"
    where = "every rank" if len(ranks) == len(unused_by_rank) else f"{noun} {', '.join(ranks)}"
    raise unused_error(names, where, suggests_find_unused=suggests_find_unused)


def _nested_backward_error(name: str, *, is_repeated: bool) -> ModelError:
    """Return the error for the parameter `name`, whose gradient a nested backward pass has computed."""
    found = (
        f"One backward pass computed the gradient of parameter {name!r} more than once"
        if is_repeated
        else f"With find_unused_parameters=True, the gradient of parameter {name!r} was computed in a nested backward "
        "pass, which the search for unused parameters does not find"
    )
    return ModelError(
        f"{found}, as with reentrant activation checkpointing, so it would be reduced before it is complete. Use "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False) or, with transformers, "
        'model.gradient_checkpointing_enable({"use_reentrant": False}).'
    )


def unused_error(names: list[str], where: str, *, suggests_find_unused: bool = True) -> ModelError:
    """Return the error for the parameters `names`, which received no gradient. `where` names the ranks or the stage.
    See `raise_unused` for `suggests_find_unused`."""
    names_text = ", ".join(names[:_MAX_SHOWN_NAMES])
    more = f" and {len(names) - _MAX_SHOWN_NAMES} more" if len(names) > _MAX_SHOWN_NAMES else ""
    count, them = ("1 parameter", "it") if len(names) == 1 else (f"{len(names)} parameters", "them")
    fix = (
        f"Use {them} in the loss, freeze {them} with requires_grad_(False), or allow unused parameters: "
        "backend.distributed_model(model, find_unused_parameters=True)."
        if suggests_find_unused
        else f"Use {them} in the loss, for example with a factor of 0, or freeze {them} with requires_grad_(False)."
    )
    return ModelError(f"{count} received no gradient on {where}: {names_text}{more}. {fix}")
