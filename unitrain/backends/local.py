"""One process without communication: the reference for the other backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from typing_extensions import Self

from unitrain import validation
from unitrain.backends import checks
from unitrain.backends.base import Backend, ReduceOp, ShardingMode, StartOptions
from unitrain.backends.capabilities import (
    CompressionState,
    SupportsAllToAll,
    SupportsPowerSGD,
    SupportsShardedParameters,
)
from unitrain.backends.compression_setting import Compression
from unitrain.backends.gradients.compression import CompressionStates, compress_each_backward
from unitrain.backends.gradients.ddp_wrapper import read_bucket_mebibytes
from unitrain.backends.gradients.interleaved_ranks_model import create_logical_ranks_model
from unitrain.backends.gradients.local_gradients import LocalGradientTracker, register_step_check
from unitrain.backends.gradients.logical_ranks_model import (
    LogicalRanksModel,
    check_logical_ranks_arguments,
    check_logical_ranks_optimizer,
)
from unitrain.backends.gradients.unused_parameters import register_first_backward_check
from unitrain.backends.lifecycle import is_successful_exit
from unitrain.backends.logical_ranks import check_no_logical_rank
from unitrain.backends.sharding.checks import check_shard_blocks, check_sharded_parameters
from unitrain.backends.sharding.optimizer_checks import check_sharded_optimizer
from unitrain.bootstrap.devices import choose_device
from unitrain.errors import ConfigError, LauncherMismatchError
from unitrain.torch_compat import unwrap_compiled


class LocalBackend(Backend, SupportsAllToAll, SupportsPowerSGD, SupportsShardedParameters):
    """A group with one rank."""

    name = "local"
    transport = "none"
    rank, size = 0, 1
    local_rank, local_size = 0, 1
    node_rank, num_nodes = 0, 1
    _running_backends: ClassVar[WeakSet[LocalBackend]] = WeakSet()

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._accumulating_model_ids: set[int] = set()  # ids of the models that are inside no_sync
        self._has_accumulated = False
        self._compression_states = CompressionStates()
        # By model: functions that remove the hooks that `distributed_model` has registered.
        self._compression_removers: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()
        self._first_check_removers: WeakKeyDictionary[nn.Module, Callable[[], None]] = WeakKeyDictionary()
        self._gradient_trackers: WeakKeyDictionary[nn.Module, LocalGradientTracker] = WeakKeyDictionary()
        self._sharding_modes: WeakKeyDictionary[nn.Module, ShardingMode] = WeakKeyDictionary()
        self._logical_rank_models: WeakSet[LogicalRanksModel] = WeakSet()

    @classmethod
    def start(cls, options: StartOptions) -> Self:
        """Return the backend. Raises LauncherMismatchError if a launcher started more than one process, and ConfigError
        if a transport other than "none" is requested or an earlier backend is in use.
        """
        rank_info = options.rank_info
        if rank_info.size > 1:
            raise LauncherMismatchError(
                f"Backend 'local' runs in one process, but {rank_info.source} started {rank_info.size}. "
                "Use --backend ddp or --backend horovod, or start it with: python script.py"
            )
        if options.transport not in (None, cls.transport):
            raise ConfigError(
                f"Transport {options.transport!r} was requested, but backend {cls.name!r} runs in one process and "
                "does not communicate. Leave transport out, or use --backend ddp."
            )
        if LocalBackend._running_backends:
            raise ConfigError(
                "This process already has a backend, from an earlier unitrain.init(). "
                "Use that backend, or shut it down first: backend.shutdown()"
            )
        backend = cls(choose_device(options.device, local_rank=0, communicates=False))
        LocalBackend._running_backends.add(backend)
        return backend

    def allreduce(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        self.check_collective_allowed("allreduce")
        checks.check_reduction(tensor, op)
        return tensor.detach().clone()

    def allgather(self, tensor: Tensor) -> Tensor:
        self.check_collective_allowed("allgather")
        checks.check_tensor(tensor)
        return tensor.detach().reshape(tensor.shape or (1,)).clone()

    def reducescatter(self, tensor: Tensor, op: ReduceOp = "mean") -> Tensor:
        self.check_collective_allowed("reducescatter")
        checks.check_reduction(tensor, op)
        checks.check_divisible(tensor, self.size)
        return tensor.detach().clone()

    def alltoall(self, tensor: Tensor) -> Tensor:
        self.check_collective_allowed("alltoall")
        checks.check_tensor(tensor)
        checks.check_divisible(tensor, self.size, "alltoall")
        return tensor.detach().clone()

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        self.check_collective_allowed("broadcast")
        checks.check_tensor(tensor)
        checks.check_root(root, self.size)
        return tensor.detach().clone()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        self.check_collective_allowed("broadcast_object")
        checks.check_root(root, self.size)
        return obj

    def allgather_object(self, obj: Any) -> list[Any]:
        self.check_collective_allowed("allgather_object")
        return [obj]

    def barrier(self) -> None:
        self.check_collective_allowed("barrier")

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
        self.check_running("distributed_model")
        checks.check_trainable_model(model, compression, self.device)
        checks.check_shard("distributed_model", shard)
        checks.check_shard_compression(shard, compression)
        validation.check_boolean("distributed_model(find_unused_parameters=...)", find_unused_parameters)
        validation.check_boolean("distributed_model(broadcast_buffers=...)", broadcast_buffers)
        check_shard_blocks(shard, shard_blocks, "distributed_model(shard_blocks=...)")
        inner = self.unwrap(model)
        if logical_ranks is not None:
            check_logical_ranks_arguments(model, logical_ranks, self, shard=shard, compression=compression)
            checks.forbid_embedding_renorm(model)
            self._remove_hooks(inner)
            distributed = create_logical_ranks_model(
                model,
                self,
                logical_ranks,
                find_unused_parameters=find_unused_parameters,
                bucket_bytes=read_bucket_mebibytes()[1] * 2**20,
                buffer_broadcaster=None,
                reducer_group=None,
            )
            self._logical_rank_models.add(distributed)
            return distributed
        if shard == "parameters":
            check_sharded_parameters(
                model, shard_blocks, find_unused_parameters=find_unused_parameters, compression=compression
            )
        checks.forbid_embedding_renorm(model)
        self._remove_hooks(inner)
        model_id = id(inner)  # the functions below must not keep the model in memory
        if not find_unused_parameters:
            self._first_check_removers[inner] = register_first_backward_check(
                model,
                model,
                self.allgather_object,
                lambda: model_id not in self._accumulating_model_ids and not self._is_shut_down,
                reduces_zeros=False,
            )
        compressor = self._compression_states.create(compression, inner, self)
        if compressor != "none":
            self._compression_removers[inner] = compress_each_backward(
                model, compressor, lambda: model_id not in self._accumulating_model_ids
            )
        tracker = LocalGradientTracker(
            inner, lambda: model_id in self._accumulating_model_ids, completes_before_hooks=True
        )
        self._gradient_trackers[inner] = tracker
        self._sharding_modes[inner] = shard
        if self._has_accumulated:
            tracker.track()
        return model

    def _remove_hooks(self, inner: nn.Module) -> None:
        """Remove the hooks that an earlier call of `distributed_model` has registered for the same model."""
        for remove_functions in (self._first_check_removers, self._compression_removers):
            if (remove := remove_functions.pop(inner, None)) is not None:
                remove()
        if (tracker := self._gradient_trackers.pop(inner, None)) is not None:
            tracker.stop()

    def shard_copy(self, copy: nn.Module, model: nn.Module) -> None:
        pass  # one rank holds all parameters

    def compression_state(self, model: nn.Module) -> CompressionState:
        return self._compression_states.get(self.unwrap(model))

    def distributed_optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, *, shard: ShardingMode = "none"
    ) -> torch.optim.Optimizer:
        self.check_running("distributed_optimizer")
        check_sharded_optimizer(optimizer, self.unwrap(model) if isinstance(model, nn.Module) else model, shard)
        distributed = unwrap_compiled(model)
        if isinstance(distributed, LogicalRanksModel):
            check_logical_ranks_optimizer(distributed, shard)
            register_step_check(optimizer, self.unwrap(model), distributed.check_reduced, self)
            return optimizer
        checks.check_matching_shard(self._sharding_modes.get(self.unwrap(model)), shard)
        if (tracker := self._gradient_trackers.get(self.unwrap(model))) is not None:

            def check(optimizer: torch.optim.Optimizer) -> None:
                check_no_logical_rank(self)
                tracker.check(optimizer)

            register_step_check(optimizer, self.unwrap(model), check, self)
        return optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        distributed = unwrap_compiled(model) if isinstance(model, nn.Module) else model
        if isinstance(distributed, LogicalRanksModel):
            return distributed.no_sync()
        is_distributed = isinstance(model, nn.Module) and distributed in self._gradient_trackers
        checks.check_argument_of_no_sync(model, is_distributed)
        return self._accumulate(distributed)

    @contextmanager
    def _accumulate(self, inner: nn.Module) -> Iterator[None]:
        if not self._has_accumulated:
            self._has_accumulated = True
            for tracker in self._gradient_trackers.values():
                tracker.track()
        was_accumulating = id(inner) in self._accumulating_model_ids
        self._accumulating_model_ids.add(id(inner))
        try:
            yield
        finally:
            if not was_accumulating:
                self._accumulating_model_ids.discard(id(inner))

    def unwrap(self, model: nn.Module) -> nn.Module:
        checks.check_is_module("unwrap(model)", model)
        model = unwrap_compiled(model)
        return unwrap_compiled(model.module if isinstance(model, LogicalRanksModel) else model)

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        try:
            if is_successful_exit(error):
                self._call_exit_functions()
        finally:
            # Other backends do not shut down after an exception, so that the launcher reports the rank that failed
            # first. With one rank, this is not needed.
            self.shutdown()

    def shutdown(self) -> None:
        LocalBackend._running_backends.discard(self)
        self._is_shut_down = True
        for remove_compression in self._compression_removers.values():
            remove_compression()
        for tracker in self._gradient_trackers.values():
            tracker.stop()
        for model in self._logical_rank_models:
            model.leave_group()
