"""Features that only some backends provide.

A capability is a small abstract class named `Supports...`. A backend provides it by subclassing it, and a feature
requests it once with `require_capability`, before any communication. A tunable is a setting that `unitrain tune` may
change. `unitrain tune` imports this module without torch, so this module must not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from unitrain.errors import ConfigError, UnsupportedError
from unitrain.validation import describe_value

if TYPE_CHECKING:
    from torch import Tensor, nn

    from unitrain.backends.rank_groups import Subgroup

CapabilityT = TypeVar("CapabilityT")


@dataclass(frozen=True)
class Tunable:
    """An environment variable that affects the speed of a backend. It changes results only by rounding errors.

    A variable with `needs_ranks_on_several_hosts` has an effect only on CPUs, and only if the job has several hosts and
    at least one host runs several ranks.
    """

    variable: str
    description: str
    default: str
    alternatives: tuple[str, ...]
    needs_ranks_on_several_hosts: bool = False


class CompressionState(ABC):
    """State of gradient compression that persists between steps and is stored in checkpoints.

    `get_loss_scale` returns the loss scale of the current backward pass, or None if losses are not scaled. The loss
    scale must be equal on every rank. The state is stored unscaled, because the loss scale may change before the next
    reduction. By default, the scale is that of the torch.amp.GradScaler whose `scale` method has scaled the loss.
    Replace the function if gradients contain another factor that changes between steps and is removed after the
    backward pass, such as a number of tokens.
    """

    get_loss_scale: Callable[[], Tensor | None]

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain types and CPU tensors. It is complete on rank 0 only. All ranks must call this
        method, between steps."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load rank 0's `state`; the arguments of other ranks are ignored. All ranks must call this method.

        If the number of ranks is unchanged and the state contains the error-feedback residuals of all ranks, each rank
        loads its own residuals. Otherwise, every rank loads the mean of the saved residuals, so their contribution to
        the mean gradient does not change. Raises CheckpointError on every rank if the state belongs to a different
        model.
        """


class SupportsPowerSGD(ABC):
    """A backend that compresses gradients by PowerSGD and provides its state for checkpoints."""

    @abstractmethod
    def compression_state(self, model: nn.Module) -> CompressionState:
        """Return the compression state of `model`, a module that `distributed_model` returned. Raises ModelError if it
        has none."""


class SupportsAsyncBroadcasts(ABC):
    """A backend with asynchronous in-place broadcasts of parts of tensors. All ranks call its methods."""

    @abstractmethod
    def start_broadcasts(self, pieces: Iterable[tuple[Tensor, int]]) -> Callable[[], None]:
        """Start to broadcast each piece in place from its root, and return a function that waits for all broadcasts.

        Each piece is a contiguous 1-D tensor and the rank of its root. Sizes and roots must be equal on every rank. The
        tensors must not be read or written before the returned function returns.
        """


class SupportsAllToAll(ABC):
    """A backend with an all-to-all. On other backends, features that need an all-to-all gather the complete tensors
    instead, which transfers more bytes."""

    @abstractmethod
    def alltoall(self, tensor: Tensor) -> Tensor:
        """Send the r-th of `size` equal slices of dim 0 to rank r, and return the slices from all ranks, in rank order.
        All ranks must call this method.

        The shape and dtype of `tensor` must be equal on all ranks; the result is a new tensor with the same shape and
        dtype. Raises TensorError if dim 0 is not divisible by `size`, and CollectiveMismatchError if shapes or dtypes
        differ between ranks.
        """


class SupportsPointToPoint(ABC):
    """A backend that provides subgroups of ranks with point-to-point communication."""

    @abstractmethod
    def create_rank_groups(self, groups: Sequence[Sequence[int]]) -> list[Subgroup]:
        """Create a group for each list of ranks in `groups`, and return the groups that contain this rank, in the order
        of `groups`. All ranks must call this method, with the same arguments. Each list must be in ascending order."""

    @abstractmethod
    def default_group(self) -> Subgroup:
        """Return the group of all ranks that reduces gradients, without communication. Its collectives have no
        consistency check."""


class SupportsShardedParameters(ABC):
    """A backend that shards parameters across ranks with `distributed_model(shard="parameters")`."""

    @abstractmethod
    def shard_copy(self, copy: nn.Module, model: nn.Module) -> None:
        """Shard the parameters of `copy` in the same way as those of `model`. `copy` is not trained. All ranks must
        call this method.

        `copy` is a copy of the user's module, such as an average of weights, that was made before the module was
        sharded. Its values are equal on all ranks. `model` is the module that `distributed_model` returned. Afterwards,
        forward passes of `copy` all-gather its parameters block by block.
        """


def require_capability(backend: object, capability: type[CapabilityT], feature: str) -> CapabilityT:
    """Return `backend` if it provides `capability`. Otherwise raise UnsupportedError, which names `feature`. Raises
    ConfigError if `capability` is not a class."""
    if not isinstance(capability, type):
        raise ConfigError(
            f"The capability of require_capability must be a class, got {describe_value(capability)}. "
            'Use require_capability(backend, SupportsPowerSGD, "PowerSGD").'
        )
    if not isinstance(backend, capability):
        name = getattr(backend, "name", type(backend).__name__)
        raise UnsupportedError(
            f"{feature} needs {capability.__name__}, which backend {name!r} does not provide. "
            f"Choose another backend with --backend, or leave {feature} out."
        )
    return backend
