"""Broadcasting the buffers of a model, such as running means, and loading buffers that are expanded views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.backends.objects import broadcast_tensors
from unitrain.backends.tensors import copy_into, is_expanded
from unitrain.torch_compat import buffers_by_name


def check_model_and_communicator(function: str, model: Any, communicator: Any) -> None:
    """Raise ConfigError unless `model` is a module and `communicator` is a Communicator."""
    fix = f"Use {function}(model, backend)"
    validation.check_instance(f"{function}(model)", model, nn.Module, "a torch.nn.Module", fix)
    validation.check_instance(f"{function}(communicator)", communicator, Communicator, "a backend", fix)


def broadcast_buffers(model: nn.Module, communicator: Communicator) -> None:
    """Broadcast all buffers of `model` from rank 0, in one collective. All ranks call it.

    Call it before `model.eval()` and before saving, because during training each rank computes running statistics from
    its own samples. Training results do not change: the forward pass in training mode does not read running statistics,
    and the buffers that it reads are already equal. `model` is the module that `distributed_model` returned, or the
    user's module.
    """
    check_model_and_communicator("broadcast_buffers", model, communicator)
    # Writes to `data` do not invalidate an earlier forward pass whose backward pass has not run yet.
    broadcast_tensors(communicator, [buffer.data for buffer in model.buffers()])


def load_state(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> Any:
    """Return `model.load_state_dict(state, strict)`, with support for buffers that are expanded views.

    torch refuses to write to an expanded view, because its elements share memory.
    """
    expanded = [
        (buffers, name, buffer, buffer.contiguous())
        for buffers in map(buffers_by_name, model.modules())
        for name, buffer in buffers.items()
        if buffer is not None and is_expanded(buffer)
    ]
    for buffers, name, _, loaded in expanded:
        buffers[name] = loaded
    try:
        return model.load_state_dict(state, strict)
    finally:
        for buffers, name, buffer, loaded in expanded:
            copy_into(buffer, loaded)
            buffers[name] = buffer
