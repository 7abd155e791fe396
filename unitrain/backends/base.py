"""The interface every backend implements, and all that the training loop knows about distribution.

The rules below hold on every backend alike; `unitrain.testing` turns each of them into a test.

1. Collectives return new tensors and leave their input untouched, for float64/32/16, bfloat16, int64/32, uint8 and
   bool. The mean of integers or booleans is an error, and so is the sum of booleans. A minimum or maximum is NaN where
   any rank has NaN. Results have no gradient history, so a tensor that requires grad is an error, except under
   torch.no_grad(): pass tensor.detach(), or call `unitrain.differentiable_allgather`.
2. After `loss.backward()` outside `no_sync`, every `.grad` is the mean over ranks: clipping, loss scaling, logging and
   `optimizer.step()` are then plain torch code. A step on gradients that are not global is a ModelError. A `.grad` may
   share memory with what is reduced, as under DDP's gradient_as_bucket_view: the next backward overwrites a reference
   that was kept past `zero_grad`, unless it was cloned.
3. `distributed_model` makes parameters and buffers equal to rank 0's; nothing else steps the optimizer or touches the
   learning rate. Buffers that a training forward reads and writes, such as a codebook, become rank 0's before each
   forward that follows a forward outside `no_sync`, as in DDP. Running statistics of normalization layers, which are
   read in eval mode only, stay each rank's own until their layer changes to eval mode or `share_buffers` is called.
4. The optimizer stays the user's own object, and its `state_dict` loads on any other backend.
5. A mistake in a collective's arguments raises the same error on every rank, before any data moves.
6. The same run gives the same parameters on every backend.
7. Compression is arithmetic, the same at every size, also at one rank, where nothing travels. Gradients g of N ranks
   become, once their backward is over:

   "none"              mean(g)
   "fp16", "bf16"      round(sum(round(g / N))): round is to the format, to nearest; what travels is of the format, and
                       the sum of it is taken in float32, in the order of ranks, whatever the transport sums in. A
                       gradient beyond what fp16 holds becomes infinite, as in a forward in fp16.
   PowerSGD            P Q^T, of low rank, for each matrix that is worth it, and mean(g) for all else: see `PowerSGD`.

   What `no_sync` adds up is compressed once, as a whole, and the gradients that remain are the same on every rank.

Every method of `Communicator`, and those of `Backend` that say so, must be called by all ranks in the same order. It
may be in the middle of a backward, whose gradients are on their way meanwhile.
"""

from __future__ import annotations

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from unitrain.backends.compression_setting import Compression
from unitrain.backends.tunables import Tunable
from unitrain.bootstrap.environment import RankInfo
from unitrain.errors import (
    CollectiveMismatchError,
    ConfigError,
    Preempted,
    UnitrainError,
    UnsupportedError,
)
from unitrain.monitoring.stack_inspection import call_site as call_site

ReduceOp = Literal["mean", "sum", "min", "max", "product"]
CapabilityT = TypeVar("CapabilityT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class StartOptions:
    """What a backend is started with: where the launcher put this process, and what the user asked for.

    None for `device` or `transport` leaves the choice to the backend.
    """

    rank_info: RankInfo
    device: str | torch.device | None = None
    transport: str | None = None
    timeout: timedelta = timedelta(minutes=5)


class Communicator(ABC):
    """A fixed set of ranks that talk; `rank` runs from 0 to `size` - 1 and `device` is where this rank computes."""

    rank: int
    size: int
    device: torch.device

    @abstractmethod
    def allreduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        """Combine `tensor` over ranks element by element; every rank gets the result, in the dtype of its input.

        Booleans take "min" and "product" (all) and "max" (any). Raises TensorError for the mean of integers and
        CollectiveMismatchError when shapes, dtypes or operations differ between ranks.
        """

    @abstractmethod
    def allgather(self, tensor: Tensor) -> Tensor:
        """Concatenate every rank's `tensor` along dim 0, in rank order; dim 0 may differ per rank, even be 0.

        A zero-dimensional tensor counts as one element, so the result has shape [size].
        """

    @abstractmethod
    def reducescatter(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        """Combine `tensor` over ranks and return this rank's equal slice of dim 0, of length `tensor.shape[0] / size`.

        Raises TensorError when dim 0 does not divide by `size`.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Return a copy of the root's `tensor`; the other ranks pass one of the same shape and dtype."""

    @abstractmethod
    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return the root's picklable `obj` on every rank; what other ranks pass is ignored."""

    @abstractmethod
    def allgather_object(self, obj: Any) -> list[Any]:
        """Return every rank's picklable `obj`, in rank order."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""


class Backend(Communicator):
    """A communicator that also knows how gradients become global, and where its ranks run.

    `transport` is what moves the bytes ("gloo", "nccl", "mpi", or "none"). `local_rank` counts within a host,
    `node_rank` numbers the hosts, and `tunables` are what `unitrain tune` may change. Use it as a context manager: it
    shuts down on a clean exit only, because a shutdown during an exception makes the launcher blame another rank.
    """

    name: str
    transport: str
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    tunables: tuple[Tunable, ...] = ()
    _alone = 0  # how many blocks of on_rank_zero the caller is in
    _is_shut_down = False

    @classmethod
    @abstractmethod
    def start(cls, options: StartOptions) -> Self:
        """Join the other ranks and return the backend; every wait ends within `options.timeout`. All ranks call it."""

    @abstractmethod
    def distributed_model(
        self, model: nn.Module, *, unused_parameters: bool = False, compression: Compression = "none"
    ) -> nn.Module:
        """Return a module whose `backward` leaves the mean gradient over ranks in every `.grad`. All ranks call it.

        Parameters and buffers become rank 0's. With `unused_parameters`, one that a rank did not use counts as zero
        there, and one that no rank used keeps `grad` None; without it that is a ModelError, in the first backward on
        every rank, and where it happens later on the ranks concerned, before the optimizer steps. Parameters may be
        frozen and unfrozen later, by the next forward and alike on every rank; where they are not, that is a ModelError
        too. `compression` is rule 7; a backend may refuse those other than "none" with UnsupportedError. Raises
        ModelError, on every rank, for a model without trainable parameters, and for an embedding with `max_norm`, whose
        forward changes weights on each rank differently (`torch.nn.functional.embedding` with `max_norm` does so too,
        but cannot be detected).
        """

    @abstractmethod
    def distributed_optimizer(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        """Check that `optimizer` holds parameters of `model`, make its state rank 0's, and return that same object.

        From then on a step whose gradients are not those of all ranks raises ModelError before it updates anything:
        after a last backward inside `no_sync`, after a backward of the model that was passed to `distributed_model`
        instead of the one that it returned, and for parameters of no distributed model. All ranks call it. Raises
        ModelError when the optimizer holds parameters that are not the model's.
        """

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Inside it, `backward` adds to the local gradients only; the first one outside reduces all that was added."""

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `distributed_model`, whose `state_dict` keys carry no prefix."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the group; the backend cannot be used afterwards. Called by all ranks, a second call does nothing."""

    @contextmanager
    def on_rank_zero(self) -> Iterator[bool]:
        """Whether this is rank 0, for what one rank does alone, such as writing a file: `with ... as alone: if alone:`.

        The other ranks may be anywhere meanwhile, so a collective inside it, which would wait for them in vain, raises
        CollectiveMismatchError at once, at any size. Any rank may use it.
        """
        self._alone += 1
        try:
            yield self.rank == 0
        finally:
            self._alone -= 1

    def refuse_alone(self, operation: str) -> None:
        """Raise CollectiveMismatchError inside of `on_rank_zero`, ConfigError after `shutdown`; every collective begins
        with it."""
        self.check_running(operation)
        if self._alone:
            raise CollectiveMismatchError(
                f"{operation} was called inside of on_rank_zero, at {call_site(sys._getframe())}, where the other "
                "ranks do not come. Move it out of the block, and let every rank call it."
            )

    def check_running(self, operation: str) -> None:
        """Raise ConfigError after `shutdown`."""
        if self._is_shut_down:
            raise ConfigError(
                f"{operation} was called after the backend was shut down. Call it inside of the block "
                "`with unitrain.init() as backend:`, or start another backend: backend = unitrain.init()"
            )

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends with `error`: they end within seconds too. Any rank may call it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        exits = isinstance(error, SystemExit) and error.code in (None, 0)  # sys.exit() ends a program in order, too
        if error is None or exits or isinstance(error, Preempted):
            self.shutdown()
        else:
            self.abandon(error)


class CompressionState(ABC):
    """What the compression of a model's gradients keeps from one reduction to the next, for a checkpoint.

    `loss_scale` returns what the losses of the running backward are multiplied by, or None where they are not: what is
    still to be sent has another loss scale by the time that it is. It must be the same on every rank.
    """

    loss_scale: Callable[[], Tensor | None]

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, in plain types and on the CPU; whole on rank 0 only. All ranks call it, between steps."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from rank 0's `state`; what the other ranks pass is ignored. All ranks call it.

        On as many ranks as it is of, each gets its own back. On another number each gets the mean over those: then what
        is still owed to the mean gradient stays the same. Raises CheckpointError, on every rank, for a state of another
        model.
        """


class SupportsPowerSGD(ABC):
    """A backend that compresses by PowerSGD, whose memory a checkpoint must keep."""

    @abstractmethod
    def compression_state(self, model: nn.Module) -> CompressionState:
        """Return the memory of the compression of `model`, which `distributed_model` returned. Raises ModelError where
        it has none."""


def raise_on_all_ranks(communicator: Communicator, error: UnitrainError | None) -> None:
    """Raise on every rank when any rank passes an error: the lowest such rank's, so that all ranks say the same.

    All ranks call it, with None where nothing is wrong. It is for what only some ranks can see, such as a folder.
    """
    # A sum, because it takes one exchange of any number of ranks.
    if not communicator.allreduce(torch.tensor(float(error is not None)), "sum"):
        return
    for rank, found in enumerate(communicator.allgather_object(error)):
        if found is not None:
            # A copy that travelled has lost its cause and traceback: where the error arose, the original is raised.
            raise error if error is not None and rank == communicator.rank else found


def values_if_different(communicator: Communicator, value: Any) -> list[Any] | None:
    """Return None if all ranks pass the same picklable `value`, and otherwise every rank's, in rank order.

    All ranks call it. Equal values cost one small allreduce. Values that are equal, but pickled differently, such as
    dictionaries in another order, count as different.
    """
    try:
        content = pickle.dumps(value)
    except Exception:  # allgather_object raises the error on every rank
        fingerprint, refused = 0, 1
    else:
        fingerprint, refused = int.from_bytes(blake2b(content, digest_size=8).digest(), "little") >> 2, 0
    most, least, any_refused = communicator.allreduce(
        torch.tensor([fingerprint, -fingerprint, refused]), "max"
    ).tolist()
    if most == -least and not any_refused:
        return None
    return communicator.allgather_object(value)


def together(communicator: Communicator, make: Callable[[], ResultT]) -> ResultT:
    """Return what `make` returns here, or raise on every rank the UnitrainError that it raises on any. All ranks call
    it."""
    problem: UnitrainError | None = None
    try:
        made = make()
    except UnitrainError as error:
        problem = error
    raise_on_all_ranks(communicator, problem)
    return made


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of `tensor` as uint8 [bytes], a view where its memory allows that."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.numel() == 1 and flat.stride(0) != 1:  # contiguous at any stride, but viewed as bytes at stride 1 only
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def broadcast_into(communicator: Communicator, tensors: Sequence[Tensor]) -> None:
    """Set `tensors`, of any dtypes, to rank 0's in place, in one broadcast. All ranks call it."""
    if not tensors:
        return
    # As bytes, one broadcast serves every dtype, and none is rounded or refused on the way.
    pieces = [as_bytes(tensor).to(communicator.device) for tensor in tensors]
    shared = communicator.broadcast(torch.cat(pieces))
    if communicator.rank == 0:
        return
    for tensor, piece in zip(tensors, torch.split(shared, [piece.numel() for piece in pieces]), strict=True):
        # A copy starts at an address that every dtype can be read from.
        tensor.detach().copy_(piece.clone().view(tensor.dtype).reshape(tensor.shape))


def require(backend: Communicator, capability: type[CapabilityT], feature: str) -> CapabilityT:
    """Return `backend` as a `capability`, or raise UnsupportedError naming the feature. Ask before anything
    communicates.

    Capabilities that only some backends have are small ABCs called `Supports...`; a backend has one by subclassing it.
    """
    if not isinstance(backend, capability):
        name = getattr(backend, "name", type(backend).__name__)
        raise UnsupportedError(
            f"{feature} needs {capability.__name__}, which backend {name!r} does not provide. "
            f"Choose another backend with --backend, or leave {feature} out."
        )
    return backend
