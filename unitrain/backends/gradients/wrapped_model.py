"""The base class of the wrappers that `distributed_model` returns. LocalBackend returns the user's model itself, except
with `logical_ranks`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.checks import check_same_trainable_parameters
from unitrain.errors import CollectiveMismatchError, CollectiveTimeoutError, ModelError
from unitrain.torch_compat import disable_compile, unwrap_compiled


class WrappedModel:
    """Mix-in for modules that call the user's model, `module`, and reduce its gradients. Such a module cannot be copied
    or pickled.

    `sharding_mode` is the argument `shard` of `distributed_model`.
    """

    module: nn.Module
    sharding_mode: Any

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


@disable_compile
def check_requires_grad_changes(
    communicator: Communicator,
    names: Sequence[str],
    required_grad_before: Sequence[bool],
    requires_grad_now: Sequence[bool],
) -> None:
    """Raise ModelError on every rank if parameters were frozen or unfrozen differently across ranks.

    `required_grad_before` and `requires_grad_now` are the values of requires_grad in the order of `names`, and differ.
    All ranks must call this function, which starts one collective. If some ranks do not, because no parameter was
    frozen or unfrozen on them, the others raise the error of the collective, which also names a parameter.
    """
    changed = [index for index in range(len(names)) if requires_grad_now[index] != required_grad_before[index]]
    index = next((index for index in changed if requires_grad_now[index]), changed[0])
    cause = (
        f"Parameter {names[index]!r} was {'unfrozen' if requires_grad_now[index] else 'frozen'} on rank "
        f"{communicator.rank}, but not on the other ranks. Freeze and unfreeze the same parameters on every rank "
        "before the same forward pass: parameter.requires_grad_(...)."
    )
    flags = torch.tensor(requires_grad_now, dtype=torch.int32, device=communicator.device)
    try:
        num_ranks = communicator.allreduce(flags, "sum")
    except (CollectiveMismatchError, CollectiveTimeoutError) as error:
        raise type(error)(f"{error} {cause}") from None
    if any(0 < count < communicator.size for count in num_ranks.tolist()):
        check_same_trainable_parameters(names, communicator.allgather_object(list(requires_grad_now)))
