"""The base class of the modules that `distributed_model` returns."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn


class WrappedModel:
    """A module that calls the user's model, `module`, and reduces its gradients. `shard` is the sharding setting."""

    module: nn.Module
    shard: Any

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context manager in which backward passes accumulate gradients that are not complete yet."""
        raise NotImplementedError

    def check_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError unless the gradients of all parameters of `optimizer` are reduced. No communication."""
        raise NotImplementedError

    def leave_group(self) -> None:
        """Release the process group."""
        raise NotImplementedError
