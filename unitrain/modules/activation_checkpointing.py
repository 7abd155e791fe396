"""Activation checkpointing: blocks save only their inputs, and recompute activations in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unitrain.backends.blocks import find_blocks
from unitrain.errors import ModelError
from unitrain.modules.run_time_classes import ReplacedForward, create_replacing_class
from unitrain.torch_compat import buffers_by_name, disable_compile, tensor_version
from unitrain.validation import check_instance


def checkpoint_activations(model: nn.Module, blocks: type[nn.Module] | str | Sequence[type[nn.Module] | str]) -> None:
    """Make all modules of `model` that are instances of `blocks` recompute their activations in the backward pass.

    `blocks` are classes or class names, such as "TransformerEncoderLayer". If blocks are nested, only the outermost
    ones are changed. Activations then take the memory of the inputs of all blocks plus the activations of one block;
    the step time increases by at most the time of a forward pass. The results are the same: the RNG state of dropout is
    restored, and running statistics and other buffers are updated once. The keys of `state_dict` do not change.

    Call it on every rank before `distributed_model`; it does not communicate. Raises ModelError if a block is neither a
    class nor a class name, if the model has no module of that class, or if a block is a container without a forward
    method, such as ModuleList.
    """
    fix = "Use checkpoint_activations(model, nn.TransformerEncoderLayer)"
    check_instance("checkpoint_activations(model)", model, nn.Module, "a torch.nn.Module", fix, error=ModelError)
    types = (type, str, list, tuple)
    check_instance("checkpoint_activations(blocks)", blocks, types, "classes or class names", fix, error=ModelError)
    for module in find_blocks(model, blocks, "checkpoint_activations").values():
        if not isinstance(module, CheckpointedForward):
            block_class: Any = type(module)
            module.__class__ = create_replacing_class(CheckpointedForward, block_class)


class CheckpointedForward(ReplacedForward):
    """A forward method with activation checkpointing. `checkpoint_activations` sets a block's class to a subclass of
    this class and of the block's original class.
    """

    class_name_prefix = "Checkpointed"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        forward = functools.partial(self.plain_class.forward, self)
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if any(True for _ in self.buffers()):
            return _checkpoint_with_buffers(self, forward, args, kwargs)
        return _checkpoint(forward, args, kwargs)


def _checkpoint(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **settings: Any) -> Any:
    # All arguments are passed as positional arguments, because torch detects in-place changes of positional arguments
    # before the backward pass, but not of keyword arguments.
    names = list(kwargs)
    count = len(args)

    def call_forward(*values: Any) -> Any:
        return forward(*values[:count], **dict(zip(names, values[count:], strict=True)))

    return checkpoint(call_forward, *args, *kwargs.values(), use_reentrant=False, **settings)


@disable_compile
def _checkpoint_with_buffers(
    block: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Checkpoint `block`, excluded from torch.compile (graph break), which does not accept `context_fn`."""

    def create_contexts() -> tuple[_RecordedBuffers, _RestoredBuffers]:
        recorded = _RecordedBuffers(block)
        return recorded, _RestoredBuffers(recorded)

    return _checkpoint(forward, args, kwargs, context_fn=create_contexts)


class _SavedBuffer(NamedTuple):
    """The buffer `name` in the dictionary `buffers` of a module, its version counter, and a copy of its value."""

    buffers: dict[str, Tensor | None]
    name: str
    buffer: Tensor
    version: int
    value: Tensor

    def is_changed(self) -> bool:
        """Return whether the buffer was replaced or written after it was saved."""
        return self.buffers.get(self.name) is not self.buffer or tensor_version(self.buffer) != self.version


class _BufferValues:
    """A snapshot of the buffers of a module and its submodules."""

    def __init__(self, block: nn.Module) -> None:
        self._saved_buffers = [
            _SavedBuffer(buffers, name, buffer, tensor_version(buffer), buffer.detach().clone())
            for buffers in map(buffers_by_name, block.modules())
            for name, buffer in buffers.items()
            if buffer is not None
        ]

    def release_unchanged(self) -> None:
        """Release the copies of buffers that are unchanged."""
        self._saved_buffers = [saved for saved in self._saved_buffers if saved.is_changed()]

    def restore(self) -> None:
        for saved in self._saved_buffers:
            saved.buffers[saved.name] = saved.buffer
            saved.buffer.data.copy_(saved.value)  # writes to `data`, because autograd may have saved the buffer


class _RecordedBuffers(AbstractContextManager[None]):
    """Context of the first forward pass. Saves the original values of the buffers that the forward pass changes."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.values = block, _BufferValues(block)

    def __exit__(self, *exc_info: object) -> None:
        self.values.release_unchanged()


class _RestoredBuffers(AbstractContextManager[None]):
    """Context of the recomputation, which starts with the same buffers as the first forward pass. At the end, the
    context restores the values that the buffers had before the recomputation.

    With a retained graph, every backward pass recomputes the activations, so the context may be entered several times.
    """

    def __init__(self, recorded: _RecordedBuffers) -> None:
        self._recorded, self._current_values = recorded, list[_BufferValues]()

    def __enter__(self) -> None:
        self._current_values.append(_BufferValues(self._recorded.block))
        self._recorded.values.restore()

    def __exit__(self, *exc_info: object) -> None:
        self._current_values.pop().restore()
