"""Activation checkpointing: blocks of a model keep their inputs only, and repeat their forward in the backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unitrain.errors import ModelError, did_you_mean

_MAX_LISTED = 8


def checkpoint_activations(model: nn.Module, blocks: type[nn.Module] | str | Sequence[type[nn.Module] | str]) -> None:
    """Let each module of `model` whose class is one of `blocks` compute its activations again in backward.

    `blocks` are classes or names of classes, such as "TransformerEncoderLayer". Of nested blocks, only the outer one is
    changed. Memory for activations falls to the inputs of the blocks and the activations of one block, and the time of
    a step grows by up to one forward. The results are the same: random numbers of dropout are repeated, and running
    statistics of normalization layers are updated once. The keys of `state_dict` do not change.

    Call it on every rank before `distributed_model`. It does not communicate. Raises ModelError if a block is not a
    class, or if the model has no module of this class.
    """
    wanted = [blocks] if isinstance(blocks, type | str) else list(blocks)
    for block in wanted:
        _check_block(model, block)
    changed: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") or outer == "" for outer in changed)
        if not is_inside and any(_is_of_class(module, block) for block in wanted):
            changed.append(name)
            if not isinstance(module, CheckpointedForward):
                kind: Any = type(module)
                module.__class__ = _checkpointed_class(kind)


class CheckpointedForward:
    """The forward with activation checkpointing. `checkpoint_activations` changes the class of a block to a subclass of
    this class and the block's class."""

    plain: type[nn.Module]  # the class without checkpointing

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(self.plain.forward, self)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        settings: dict[str, Any] = {}
        if any(True for _ in self.buffers()):  # torch.compile does not accept other contexts
            settings["context_fn"] = lambda: (nullcontext(), _KeptBuffers(self))
        return checkpoint(forward, *args, use_reentrant=False, **settings, **kwargs)

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        # pickle cannot find a class that was created at run time.
        return _restore, (self.plain,), self.__getstate__()


@functools.cache
def _checkpointed_class(kind: Any) -> Any:
    return type(f"Checkpointed{kind.__name__}", (CheckpointedForward, kind), {"plain": kind})


def _restore(kind: Any) -> Any:
    checkpointed = _checkpointed_class(kind)
    return checkpointed.__new__(checkpointed)


class _KeptBuffers(AbstractContextManager[None]):
    """Restores the buffers of `block` at the end: the first forward has updated running statistics already.

    A retained graph repeats the forward in each backward, so the context may be entered several times.
    """

    def __init__(self, block: nn.Module) -> None:
        self._block, self._before = block, list[tuple[Tensor, Tensor]]()

    def __enter__(self) -> None:
        self._before = [(buffer, buffer.detach().clone()) for buffer in self._block.buffers()]

    def __exit__(self, *error: object) -> None:
        for buffer, value in self._before:
            buffer.data.copy_(value)  # through `data`, because autograd may have saved the buffer
        self._before = []


def _check_block(model: nn.Module, block: Any) -> None:
    names = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
    if isinstance(block, str):
        if block not in names and not any(_is_of_class(module, block) for module in model.modules()):
            shown = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
            raise ModelError(
                f"{type(model).__name__} has no module of class {block!r}, whose activations should be checkpointed. "
                f"{did_you_mean(block, names)}Classes of its modules: {shown}."
            )
    elif not (isinstance(block, type) and issubclass(block, nn.Module)):
        raise ModelError(
            f"checkpoint_activations takes classes of modules or their names, got {block!r}. "
            "Use checkpoint_activations(model, nn.TransformerEncoderLayer)."
        )
    elif not any(isinstance(module, block) for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has no module of class {block.__name__!r}, whose activations should be "
            f"checkpointed. Classes of its modules: {', '.join(names[:_MAX_LISTED])}."
        )


def _is_of_class(module: nn.Module, block: type[nn.Module] | str) -> bool:
    if isinstance(block, str):
        return any(kind.__name__ == block for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return isinstance(module, block)
