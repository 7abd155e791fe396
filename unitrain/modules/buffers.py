"""Making the buffers of a model (running means and the like) the same on all ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.backends.objects import broadcast_tensors


def check_model_and_communicator(function: str, model: Any, communicator: Any) -> None:
    """Raise ConfigError unless these are a model and the communicator that shares it."""
    fix = f"Use {function}(model, backend)"
    validation.check_instance(f"{function}(model)", model, nn.Module, "a torch.nn.Module", fix)
    validation.check_instance(f"{function}(communicator)", communicator, Communicator, "a backend", fix)


def share_buffers(model: nn.Module, communicator: Communicator) -> None:
    """Set every buffer of `model` to rank 0's, in one broadcast. All ranks call it.

    Each rank gathers its own running statistics while it trains, from its own samples, so call it before `model.eval()`
    and before saving: what shows or stores the model must first decide for one of them. It does not change training:
    rank 0's statistics stay, no forward in training mode reads those of the other ranks, and buffers that it does read
    are rank 0's anyway. `model` may be what `distributed_model` returned or what it was given; parameters are left
    alone.
    """
    check_model_and_communicator("share_buffers", model, communicator)
    # Through `data`, because this is no write of a forward, which the wrapped model looks for.
    broadcast_tensors(communicator, [buffer.data for buffer in model.buffers()])
