"""The base class of the wrappers that `distributed_model` returns. LocalBackend returns the user's model itself, except
with `logical_ranks`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from unitrain.errors import ModelError
from unitrain.torch_compat import unwrap_compiled


class WrappedModel:
    """A module that calls the user's model, `module`, and reduces its gradients. It cannot be copied or pickled.

    `shard` is the argument of `distributed_model`.
    """

    module: nn.Module
    shard: Any

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context manager in which backward passes accumulate local gradients without reducing them."""
        raise NotImplementedError

    def check_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError unless the gradients of all parameters of `optimizer` are reduced. Does not communicate."""
        raise NotImplementedError

    def leave_group(self) -> None:
        """Release the process group."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ModelError(
            f"The distributed {type(unwrap_compiled(self.module)).__name__} cannot be copied, because its copy would "
            "need a process group. Copy the model inside it: copy.deepcopy(backend.unwrap(model)), or "
            "AveragedModel(backend.unwrap(model))."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(
            f"The distributed {type(unwrap_compiled(self.module)).__name__} cannot be pickled, because it holds a "
            "process group. Save the model inside it: torch.save(backend.unwrap(model).state_dict(), path)."
        )
