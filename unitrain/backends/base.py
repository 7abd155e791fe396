"""The interface that every backend implements. The training loop uses only this interface and the optional
capabilities of `capabilities.py`.

The contract is the same for every backend; `unitrain.testing` tests each rule:

1. Collectives return new tensors and leave their input unchanged, for float64/32/16, bfloat16, int64/32, uint8 and
   bool. The mean of integers or booleans and the sum of booleans raise an error. A minimum or maximum is NaN if any
   rank passes NaN. Half-precision sums are accumulated in float32; all other sums in the dtype of the input. Exception:
   with more than 64 ranks, sums and means of floating-point CPU tensors with at most 128 elements are accumulated in
   float64. A mean is the sum divided by the number of ranks, as in torch.distributed, so it overflows if the sum does.
   Collectives are not differentiable, so they reject a tensor that requires grad, except under torch.no_grad().
2. After `loss.backward()` outside `no_sync`, every `.grad` is the mean over ranks, so clipping, loss scaling, logging
   and `optimizer.step()` are plain torch code. An optimizer step on unreduced gradients raises ModelError. A `.grad`
   may be a view of a bucket, as with DDP's gradient_as_bucket_view; clone it to keep it after `zero_grad`. With
   `shard="gradients"`, a `.grad` is a `ShardedGradient`: each rank stores a shard, norms are computed for the complete
   gradient, and other operations that need the complete gradient raise ModelError.
3. `distributed_model` broadcasts parameters and buffers from rank 0. Wrapping the model and the optimizer neither steps
   the optimizer nor changes the learning rate. As in DDP, buffers that a training forward pass reads, such as a
   codebook, are broadcast from rank 0 once per accumulation cycle, before its first forward pass. A training forward
   pass is a forward pass with grad mode enabled, even if `module.training` is False. Running statistics, which
   normalization layers read in eval mode only, differ between ranks until `broadcast_buffers` is called. The first
   training forward pass after a layer was switched to eval mode also broadcasts the statistics of this layer. A layer
   that is in training mode only between two training forward passes, for example to recalculate its statistics under
   `torch.no_grad()`, is not detected: call `broadcast_buffers` afterwards.
4. The optimizer remains the user's object, and any backend can load its `state_dict`.
5. Invalid arguments of a collective raise the same error on every rank, and no result is returned on any rank.
6. The same run produces the same parameters on every backend and, with logical ranks, bit-identical parameters for any
   number of processes.
7. Compression uses the same formula for every number of ranks. `compression_setting.py` specifies this formula.

All ranks must call the methods of `Communicator`, and the methods of `Backend` marked "All ranks must call this
method", in the same order. Calls during a backward pass, while gradients are being reduced, are allowed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Self

from unitrain.backends.capabilities import Tunable
from unitrain.backends.compression_setting import Compression
from unitrain.backends.current_batches import CurrentBatches
from unitrain.backends.lifecycle import Lifecycle
from unitrain.bootstrap.environment import RankInfo

ReduceOp = Literal["mean", "sum", "min", "max", "product"]
ShardingMode = Literal["none", "state", "gradients", "parameters"]


@dataclass(frozen=True)
class StartOptions:
    """Arguments of `Backend.start`. If `device` or `transport` is None, the backend chooses it."""

    rank_info: RankInfo
    device: str | torch.device | None = None
    transport: str | None = None
    timeout: timedelta = timedelta(minutes=5)


class Communicator(ABC):
    """A fixed group of ranks. `rank` is in [0, size); `device` is the device of this rank's tensors."""

    rank: int
    size: int
    device: torch.device

    @cached_property
    def current_batches(self) -> CurrentBatches:
        """The current batches of the loaders that are iterated over with this communicator."""
        return CurrentBatches()

    @cached_property
    def layer_numbers(self) -> Iterator[int]:
        """The numbers of new layers that communicate, equal on ranks that create these layers in the same order."""
        return count()

    @abstractmethod
    def allreduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        """Reduce `tensor` over ranks element by element, and return the result in the dtype of the input.

        For booleans, "min" and "product" compute the logical AND, and "max" the logical OR. Raises TensorError for the
        mean of integers or booleans and for the sum of booleans, and CollectiveMismatchError if shapes, dtypes or
        operations differ between ranks.
        """

    @abstractmethod
    def allgather(self, tensor: Tensor) -> Tensor:
        """Concatenate every rank's `tensor` along dim 0, in rank order.

        The size of dim 0 may differ between ranks and may be 0. A zero-dimensional tensor counts as one element, so
        the result has shape [size].
        """

    @abstractmethod
    def reducescatter(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        """Reduce `tensor` over ranks, and return this rank's slice of dim 0, with `tensor.shape[0] / size` rows.

        Raises TensorError if dim 0 is not divisible by `size`.
        """

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Return a copy of the root's `tensor`. The other ranks pass a tensor of the same shape and dtype."""

    @abstractmethod
    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return the root's picklable `obj` on every rank. The objects of other ranks are ignored."""

    @abstractmethod
    def allgather_object(self, obj: Any) -> list[Any]:
        """Return every rank's picklable `obj`, in rank order."""

    @abstractmethod
    def barrier(self) -> None:
        """Block until every rank has called this method."""


class Backend(Lifecycle, Communicator):
    """A communicator that also distributes models and optimizers, and provides the local rank and node rank.

    `transport` is the library that transfers the bytes ("gloo", "nccl", "mpi", or "none"). `local_rank` is the index of
    this rank on its host, and `node_rank` is the index of the host. `tunables` are the settings that `unitrain tune`
    may change. `transports` lists the values that `StartOptions.transport` accepts. It is empty if the backend selects
    its transport itself and accepts only this transport. `max_in_flight` is the number of collectives that run at the
    same time. The first `num_slow_operations` operations of each size take longer than later ones; `unitrain bench`
    does not measure them.

    Use a backend as a context manager. It shuts down if the block exits without an exception, or with SystemExit(0) or
    Preempted. After any other exception, it instead reports the failure to the other ranks. The backend "local" shuts
    down in both cases.
    """

    name: str
    transport: str
    rank: int
    local_rank: int
    local_size: int
    node_rank: int
    num_nodes: int
    tunables: tuple[Tunable, ...] = ()
    transports: ClassVar[tuple[str, ...]] = ()
    max_in_flight: int = 1
    num_slow_operations: int = 0

    @classmethod
    @abstractmethod
    def start(cls, options: StartOptions) -> Self:
        """Join the other ranks and return the backend. All ranks must call this method.

        Waiting for other ranks times out after `options.timeout`.
        """

    @abstractmethod
    def distributed_model(
        self,
        model: nn.Module,
        *,
        shard: ShardingMode = "none",
        shard_blocks: Sequence[type[nn.Module] | str] | int = (),
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        compression: Compression = "none",
        logical_ranks: int | None = None,
    ) -> nn.Module:
        """Return a module that calls `model`. A backward pass through the returned module sets each `.grad` to the mean
        of the gradients over ranks.

        All ranks must call this method. Inputs must be on the backend's `device`; a ShardedLoader moves its batches
        there. Whether the returned module moves inputs from other devices depends on the arguments and the backend.

        With `find_unused_parameters`, a rank that does not use a parameter contributes a zero gradient; if no rank uses
        the parameter, its `grad` remains None. Without `find_unused_parameters`, an unused parameter raises ModelError.
        In the first backward pass, every rank raises the error. In later ones, only the affected ranks raise it, before
        the optimizer step. Parameters may be frozen and unfrozen later if all ranks do so before the same forward pass.
        If ranks freeze different parameters, ModelError is raised. If only some ranks freeze or unfreeze parameters,
        those ranks time out. With `find_unused_parameters`, the ranks compare their frozen parameters only when a
        parameter is unfrozen. A backend may reject any `compression` other than "none" with UnsupportedError.

        With `broadcast_buffers=False`, buffers other than running statistics are broadcast in the first training
        forward pass only (rule 3). Use this value for large buffers that no training step modifies, such as attention
        masks.

        Pass the same `shard` as to `distributed_optimizer`. "none" and "state" do not change the model. With
        "gradients" (ZeRO-2), each rank keeps its shard of the mean gradients, and frees other gradients during the
        backward pass. Each `.grad` is then a `ShardedGradient`, which supports clipping and loss scaling like a
        complete gradient. Gradients are also reduced in backward passes inside `no_sync`, unless they are compressed. A
        single rank does not shard. Raises ModelError on every rank for PowerSGD, and for a model that shares parameters
        with another model whose gradients are sharded.

        With "parameters" (ZeRO-3), `model` is changed in place: its parameters, and later their gradients, are DTensors
        that contain the rows of this rank. The parameters of a block are all-gathered for its forward and backward
        pass. All ranks must call the model the same number of times, including calls under `torch.no_grad()`, and each
        call must run the same blocks on every rank. `model.state_dict()`, which all ranks must call, returns complete
        tensors. `shard_blocks` is a list of module classes or of class names ("TransformerLayer"), or a number N. With
        a number, the blocks are the innermost modules with at least N parameters. By default, blocks are the outermost
        modules whose class occurs more than once; containers such as torch.nn.Sequential and modules without submodules
        are not blocks. Gradients are also reduced in backward passes inside `no_sync`. `find_unused_parameters` and
        `compression` are not supported. After the first backward pass outside `no_sync`, the gradient of an unused
        parameter is zero.

        With `logical_ranks`, each step is computed as if that number of ranks (logical ranks) trained, whatever the
        number of processes. Each process runs at least one of them. The results are bit-identical for any number of
        processes. Iterate over a ShardedLoader with the same `logical_ranks`: a process runs the micro-batches of its
        logical ranks one after the other. `.grad` is then the mean over logical ranks, with rounding that does not
        depend on the number of processes. Unless `find_unused_parameters` is True, a parameter that any logical rank
        does not use raises ModelError on every rank, in any step. `shard`, `compression` and torch.nn.SyncBatchNorm are
        not supported. Only the Trainer supports layers that `unitrain.sync_batch_norm` has synchronized.

        Raises ModelError on every rank for a model without trainable parameters, and for an embedding with `max_norm`,
        because its forward pass changes the weights differently on each rank. For the same reason,
        `torch.nn.functional.embedding` with `max_norm` raises ModelError for a parameter of `model` after this call.
        """

    @abstractmethod
    def distributed_optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, *, shard: ShardingMode = "none"
    ) -> torch.optim.Optimizer:
        """Broadcast the state of `optimizer` from rank 0, and return the same object. All ranks must call this method.

        With `shard="state"` (ZeRO-1), each rank stores a shard of the optimizer state, updates the corresponding
        parameters, and broadcasts them. The results are the same as without sharding. All ranks must call
        `optimizer.state_dict()`, which gathers the complete state. Elementwise optimizers of torch.optim are sharded by
        element, others by tensor. With `shard="gradients"`, each rank also stores only the gradients of its shard;
        `model` must be distributed with the same setting, otherwise ModelError is raised on every rank.

        With `shard="parameters"`, each rank updates its shards. If the optimizer was built before `distributed_model`,
        the parameters in its groups are replaced by the shards. Only elementwise optimizers of torch.optim are
        supported.

        Afterwards, a step on unreduced gradients raises ModelError before it updates a parameter. Gradients are
        unreduced if the last backward pass was inside `no_sync`, if it used the module that was passed to
        `distributed_model` instead of the returned one, or if the parameters do not belong to a distributed model.
        Raises ModelError if the optimizer has parameters that do not belong to the model, or if its state cannot be
        sharded (LBFGS).
        """

    @abstractmethod
    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context manager in which backward passes accumulate gradients locally. The next backward pass
        outside it reduces the accumulated gradients. With sharded gradients or parameters, gradients are also reduced
        in each backward pass inside it; see `distributed_model` for the exception.
        """

    @abstractmethod
    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was passed to `distributed_model`, or, if that module is compiled by torch.compile,
        the original module. The keys of its `state_dict` have no prefix. A module that is not distributed is returned
        unchanged."""

    @abstractmethod
    def shutdown(self) -> None:
        """Leave the group. The backend cannot be used afterwards. All ranks must call this method; further calls do
        nothing."""
