"""Make the buffers of a model, such as running means, equal on all ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.backends.objects import broadcast_tensors


def check_model_and_communicator(function: str, model: Any, communicator: Any) -> None:
    """Raise ConfigError unless `model` is a module and `communicator` is a Communicator."""
    fix = f"Use {function}(model, backend)"
    validation.check_instance(f"{function}(model)", model, nn.Module, "a torch.nn.Module", fix)
    validation.check_instance(f"{function}(communicator)", communicator, Communicator, "a backend", fix)


def share_buffers(model: nn.Module, communicator: Communicator) -> None:
    """Set every buffer of `model` to rank 0's, in one broadcast. All ranks call it.

    Call it before `model.eval()` and before saving: during training, each rank computes the running statistics from its
    samples only. It does not change training: rank 0's statistics stay the same, a forward in training mode does not
    read the statistics, and the buffers that it reads are rank 0's already. `model` is the module that
    `distributed_model` returned or the one passed to it. Parameters do not change.
    """
    check_model_and_communicator("share_buffers", model, communicator)
    # The distributed model detects buffers that a forward writes. Writing `data` does not count as such a write.
    broadcast_tensors(communicator, [buffer.data for buffer in model.buffers()])
