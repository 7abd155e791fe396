"""Distributed models and optimizers over torch.distributed's default process group, for any transport.

The ddp and horovod backends share this code, and therefore compute the same results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unitrain import validation
from unitrain.backends import checks, slow_network_exchange
from unitrain.backends.base import Backend, ShardingMode
from unitrain.backends.broadcasts import Broadcasts
from unitrain.backends.capabilities import (
    CompressionState,
    SupportsAsyncBroadcasts,
    SupportsPointToPoint,
    SupportsPowerSGD,
    SupportsShardedParameters,
    Tunable,
)
from unitrain.backends.compression_setting import Compression
from unitrain.backends.consistency import ConsistencyCheck
from unitrain.backends.fork_safety import make_forks_safe
from unitrain.backends.gradients.compression import DTYPE_BY_COMPRESSION, CompressionStates
from unitrain.backends.gradients.ddp_wrapper import BUCKET_VIEW, BUCKETS, DistributedModel, read_bucket_mebibytes
from unitrain.backends.gradients.forward_buffers import ForwardBufferBroadcaster
from unitrain.backends.gradients.hierarchical_group import (
    HIERARCHICAL,
    HierarchicalGroup,
    selects_hierarchical_allreduce,
)
from unitrain.backends.gradients.interleaved_ranks_model import create_logical_ranks_model
from unitrain.backends.gradients.local_gradients import register_step_check
from unitrain.backends.gradients.logical_ranks_model import (
    LogicalRanksModel,
    check_logical_ranks_arguments,
    check_logical_ranks_optimizer,
)
from unitrain.backends.gradients.model_groups import ModelGroup, ModelGroups
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.backends.gradients.wrapped_model import WrappedModel
from unitrain.backends.logical_ranks import check_no_logical_rank
from unitrain.backends.message_exchange import MessageExchange
from unitrain.backends.objects import broadcast_in_parts, broadcast_with_tensors
from unitrain.backends.optimizer_loading import load_optimizer_state
from unitrain.backends.process_group_collectives import ProcessGroupCollectives
from unitrain.backends.rank_groups import Subgroup, create_rank_groups
from unitrain.backends.sharding.checks import check_shard_blocks, check_sharded_parameters
from unitrain.backends.sharding.distributed_model import ShardedGradientModel
from unitrain.backends.sharding.gradient_reducer import TransferSettings
from unitrain.backends.sharding.optimizer_checks import check_sharded_optimizer
from unitrain.backends.sharding.optimizer_state import shard_optimizer_state
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.bootstrap import environment
from unitrain.bootstrap.rendezvous import Rendezvous, check_free_descriptors
from unitrain.errors import ConfigError
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.torch_compat import (
    default_process_group,
    set_transport_timeout,
    unwrap_compiled,
)

if TYPE_CHECKING:
    from unitrain.backends.sharding.parameters import ShardedParameters

# When NCCL's timeout expires, NCCL aborts the process without naming missing ranks. NCCL's timeout is therefore longer,
# by this margin, than the timeout of the backend, after which unitrain's watchdog reports the missing ranks.
NCCL_TIMEOUT_MARGIN = timedelta(seconds=30)


class ProcessGroupBackend(
    ProcessGroupCollectives,
    Backend,
    SupportsAsyncBroadcasts,
    SupportsPointToPoint,
    SupportsPowerSGD,
    SupportsShardedParameters,
):
    """A backend over torch.distributed's default process group, which a subclass has initialized."""

    tunables: tuple[Tunable, ...] = (BUCKETS, BUCKET_VIEW, HIERARCHICAL)
    _uses_all_to_all = True  # whether a reducescatter is faster with an all-to-all than with an allreduce
    _waits_on_stream = False  # whether a GPU stream, rather than the host, waits for gradients

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        transport: str,
        control_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`control_group` is the group for consistency checks and small tensors; None is the default group."""
        make_forks_safe()
        self.device = device
        self.transport = transport
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._rendezvous = rendezvous
        self._is_group_destroyed = False
        self._pid = os.getpid()
        self._models: WeakSet[Any] = WeakSet()  # of WrappedModel
        self._rank_groups: WeakSet[Subgroup] = WeakSet()
        self._mesh: Any = None  # of all ranks, for sharded parameters
        self._model_numbers = count()  # equal on all ranks, because all ranks distribute the same models
        self._model_groups = ModelGroups(self, default_process_group(), self._create_model_group)
        self._compression_states = CompressionStates()
        own = rendezvous.node_positions[self.rank]
        self.local_rank, self.local_size = own.local_rank, own.local_size
        self.node_rank, self.num_nodes = own.node_rank, own.num_nodes
        # NCCL can deadlock if ranks use several groups in different orders.
        self._needs_group_order = transport == "nccl"
        self._monitor = FailureMonitor(rendezvous, polls=device.type == "cpu")
        # Only CPU ranks exchange small messages over the direct connections of `MessageExchange`. A rank with a GPU
        # uses Gloo: it usually has several CPU cores, so Gloo's threads do not compete with the waiting thread for a
        # core.
        message_exchange = MessageExchange.connect(
            rendezvous,
            is_wanted=device.type == "cpu",
            max_polling_seconds=environment.max_polling_seconds(self.local_size),
        )
        self._check_consistency = ConsistencyCheck(self, self._monitor, control_group, message_exchange)
        self._broadcasts = Broadcasts(self._monitor, self.rank, waits_on_stream=self._waits_on_stream)

    def start_broadcasts(self, pieces: Iterable[tuple[Tensor, int]]) -> Callable[[], None]:
        """Start to broadcast each piece in place, and return a function that waits for all broadcasts. A piece is a
        pair of a contiguous tensor, [elements], and the rank of its root. See `Broadcasts.start`."""
        self.check_collective_allowed("start_broadcasts")
        if self.size == 1:
            return lambda: None
        return self._broadcasts.start(pieces)

    def _start_broadcasts_in(self, group: ModelGroup, pieces: Iterable[tuple[Tensor, int]]) -> Callable[[], None]:
        """Start broadcasts like `start_broadcasts`, in the process group of a model."""
        self.check_collective_allowed("start_broadcasts")
        return self._broadcasts.start(pieces, group.process_group)

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
        def check() -> None:
            checks.check_trainable_model(model, compression, self.device)
            checks.check_shard("distributed_model", shard)
            checks.check_shard_compression(shard, compression)
            if shard == "gradients":
                ShardedGradientModel.check_no_shared_parameters(model)
            validation.check_boolean("distributed_model(find_unused_parameters=...)", find_unused_parameters)
            validation.check_boolean("distributed_model(broadcast_buffers=...)", broadcast_buffers)
            check_shard_blocks(shard, shard_blocks, "distributed_model(shard_blocks=...)")
            if logical_ranks is not None:
                check_logical_ranks_arguments(model, logical_ranks, self, shard=shard, compression=compression)
            if shard == "parameters":
                check_sharded_parameters(
                    model, shard_blocks, find_unused_parameters=find_unused_parameters, compression=compression
                )

        self.check_running("distributed_model")
        call_on_all_ranks(self, check)
        is_debugging = call_on_all_ranks(self, environment.is_debug_enabled)
        bucket_mebibytes = call_on_all_ranks(self, read_bucket_mebibytes)
        hierarchical = call_on_all_ranks(self, partial(selects_hierarchical_allreduce, self.device))
        checks.check_same_settings(
            self,
            "distributed_model",
            shard=shard,
            shard_blocks=shard_blocks if isinstance(shard_blocks, int) else tuple(map(str, shard_blocks)),
            find_unused_parameters=find_unused_parameters,
            broadcast_buffers=broadcast_buffers,
            compression=compression,
            logical_ranks=logical_ranks,
            **{
                environment.DEBUG_VARIABLE: is_debugging,
                BUCKETS.variable: bucket_mebibytes,
                HIERARCHICAL.variable: hierarchical,
            },
        )
        checks.check_same_model(self, model)
        checks.forbid_embedding_renorm(model)
        # A rank that skips a parameter starts the buckets at other times relative to collectives of the user.
        group = self._model_groups.acquire(may_be_default=not find_unused_parameters)
        model_number = next(self._model_numbers)
        identity = f"model {model_number}, {type(self.unwrap(model)).__name__}"
        check_bucket = partial(self._check_bucket, identity) if is_debugging else None
        broadcaster = ForwardBufferBroadcaster(
            model, self, every_pass=broadcast_buffers, broadcast=lambda tensor: self.broadcast(tensor, caller=identity)
        )
        buffer_broadcaster = broadcaster if broadcaster.is_needed else None
        if shard == "parameters":
            return self._shard_model(model, shard_blocks, buffer_broadcaster, check_bucket, group, model_number)
        # DDP would broadcast tensors by dtype, and Gloo does not support all dtypes.
        if self.size > 1:
            broadcast_in_parts(self, [*model.parameters(), *model.buffers()])
        if logical_ranks is not None:
            reducer_group = ReducerGroup(
                group.process_group, model_number, self._monitor, check_bucket, waits_on_stream=self._waits_on_stream
            )
            with_logical_ranks = create_logical_ranks_model(
                model,
                self,
                logical_ranks,
                find_unused_parameters=find_unused_parameters,
                bucket_bytes=read_bucket_mebibytes()[1] * 2**20,
                buffer_broadcaster=buffer_broadcaster,
                reducer_group=reducer_group,
            )
            self._add_model(with_logical_ranks, group)
            return with_logical_ranks
        compressor = self._compression_states.create(compression, self.unwrap(model), self)
        uses_hierarchical_group = hierarchical and shard != "gradients" and compressor == "none"
        hierarchical_group = (
            group.get_hierarchical_group(self._create_hierarchical_group) if uses_hierarchical_group else None
        )
        reducer_group = ReducerGroup(
            hierarchical_group or group.process_group,
            model_number,
            self._monitor,
            check_bucket,
            waits_on_stream=self._waits_on_stream,
            defers_allreduces=find_unused_parameters and self._needs_group_order,
        )
        distributed: DistributedModel | ShardedGradientModel
        if shard == "gradients" and self.size > 1:
            first_mebibytes, other_mebibytes = read_bucket_mebibytes()
            distributed = ShardedGradientModel(
                model,
                self,
                self._rendezvous,
                find_unused_parameters=find_unused_parameters,
                buffer_broadcaster=buffer_broadcaster,
                reducer_group=reducer_group,
                transfer_settings=TransferSettings(
                    group.process_group,
                    first_mebibytes * 2**20,
                    other_mebibytes * 2**20,
                    half_dtype=DTYPE_BY_COMPRESSION.get(str(compressor)),
                    uses_all_to_all=self._uses_all_to_all,
                ),
            )
        else:
            distributed = DistributedModel(
                model,
                self,
                self._rendezvous,
                find_unused_parameters=find_unused_parameters,
                compressor=compressor,
                group=group.process_group,
                buffer_broadcaster=buffer_broadcaster,
                reducer_group=reducer_group,
            )
            distributed.sharding_mode = shard
        self._add_model(distributed, group)
        return distributed

    def _check_bucket(self, caller: str, bucket: Tensor) -> None:
        self._check_consistency("gradients", bucket, caller=caller)

    def _add_model(self, distributed: nn.Module, group: ModelGroup) -> None:
        group.assign(distributed)
        self._models.add(distributed)

    def _create_model_group(self) -> dist.ProcessGroup:
        """Return a new group of all ranks, which must all call this method."""
        call_on_all_ranks(self, lambda: check_free_descriptors(self.size - 1))
        group: dist.ProcessGroup = dist.new_group(timeout=self._rendezvous.timeout)  # type: ignore[assignment]
        if self._waits_on_stream:
            set_transport_timeout(group, self.device, self._rendezvous.timeout + NCCL_TIMEOUT_MARGIN)
        return group

    def _create_hierarchical_group(self, process_group: dist.ProcessGroup) -> HierarchicalGroup | None:
        """Return a group for hierarchical allreduces, or None if there is only one host, or one rank per host. All
        ranks must call this method."""
        if not 1 < self.num_nodes < self.size:
            return None
        positions = self._rendezvous.node_positions
        ranks_by_host = [
            [rank for rank, position in enumerate(positions) if position.node_rank == node_rank]
            for node_rank in range(self.num_nodes)
        ]
        return HierarchicalGroup(process_group, ranks_by_host, self.create_rank_groups)

    def _shard_model(
        self,
        model: nn.Module,
        blocks: Sequence[type[nn.Module] | str] | int,
        buffer_broadcaster: ForwardBufferBroadcaster | None,
        check: Callable[[Tensor], object] | None,
        group: ModelGroup,
        model_number: int,
    ) -> nn.Module:
        from unitrain.backends.sharding.parameters import ShardedModel

        sharded_parameters = self._shard_parameters(model, blocks, check, group.process_group, model_number)
        distributed = ShardedModel(
            sharded_parameters, self._rendezvous, self._monitor, buffer_broadcaster, model_number
        )
        self._add_model(distributed, group)
        return distributed

    def _shard_parameters(
        self,
        model: nn.Module,
        blocks: Sequence[type[nn.Module] | str] | int,
        check: Callable[[Tensor], object] | None,
        process_group: dist.ProcessGroup,
        model_number: int,
    ) -> ShardedParameters:
        from torch.distributed.device_mesh import DeviceMesh

        from unitrain.backends.sharding.parameter_collectives import ParameterCollectives
        from unitrain.backends.sharding.parameters import ShardedParameters

        if self._mesh is None:
            self._mesh = DeviceMesh.from_group(default_process_group(), self.device.type)
        collectives = ParameterCollectives(
            process_group,
            model_number,
            self._monitor,
            waits_on_stream=self._waits_on_stream,
            check=check,
        )
        return ShardedParameters(model, blocks, self, self._mesh, collectives)

    def shard_copy(self, copy: nn.Module, model: nn.Module) -> None:
        distributed: Any = unwrap_compiled(model)
        original: ShardedParameters = distributed.sharded_parameters
        blocks, check = original.block_choice, original.collectives.check
        group = original.collectives.process_group
        distributed.add_copy(self._shard_parameters(copy, blocks, check, group, next(self._model_numbers)))

    def compression_state(self, model: nn.Module) -> CompressionState:
        return self._compression_states.get(self.unwrap(model))

    def distributed_optimizer(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, *, shard: ShardingMode = "none"
    ) -> torch.optim.Optimizer:
        self.check_running("distributed_optimizer")
        inner = self.unwrap(model) if isinstance(model, nn.Module) else model  # the check rejects other objects
        distributed = unwrap_compiled(model) if isinstance(model, nn.Module) else model

        def check() -> None:
            check_logical_ranks_optimizer(distributed, shard)
            model_shard = distributed.sharding_mode if isinstance(distributed, WrappedModel) else None
            if "parameters" in (model_shard, shard):
                checks.check_single_optimizer(optimizer)
                checks.check_is_optimizer("distributed_optimizer(optimizer)", optimizer)
                checks.check_shard("distributed_optimizer", shard)
                checks.check_matching_shard(model_shard, shard)
                _replace_parameters_with_shards(optimizer, distributed)
            check_sharded_optimizer(optimizer, inner, shard)
            checks.check_matching_shard(model_shard, shard)

        call_on_all_ranks(self, check)
        checks.check_same_settings(
            self,
            "distributed_optimizer",
            shard=shard,
            optimizer=type(optimizer).__name__,
            parameters_by_group=[len(group["params"]) for group in optimizer.param_groups],
        )
        checks.check_same_parameter_order(self, optimizer, inner)
        has_logical_ranks = isinstance(distributed, LogicalRanksModel)
        if isinstance(distributed, WrappedModel):

            def check_step(optimizer: torch.optim.Optimizer) -> None:
                if not has_logical_ranks:
                    check_no_logical_rank(self)
                distributed.check_reduced(optimizer)

            register_step_check(optimizer, inner, check_step, self)
        if shard == "parameters":
            from unitrain.backends.sharding.optimizer_shards import shard_optimizer

            shard_optimizer(optimizer, self)
            return optimizer
        state = broadcast_with_tensors(self, optimizer.state_dict())
        if self.rank != 0:
            defaults = dict(optimizer.defaults)
            load_optimizer_state(optimizer, state, keeps_dtypes=True)
            # load_state_dict adds entries to `defaults`. Groups that are added later would have them on this rank only.
            optimizer.defaults = defaults
        if shard != "none":
            reducer = distributed.reducer if isinstance(distributed, ShardedGradientModel) else None
            start_broadcasts = partial(self._start_broadcasts_in, self._model_groups.group_of(distributed))
            shard_optimizer_state(optimizer, self, shard=shard, reducer=reducer, start_broadcasts=start_broadcasts)
        return optimizer

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        distributed = unwrap_compiled(model)
        checks.check_argument_of_no_sync(model, isinstance(distributed, WrappedModel))
        assert isinstance(distributed, WrappedModel)
        return distributed.no_sync()

    def unwrap(self, model: nn.Module) -> nn.Module:
        checks.check_is_module("unwrap(model)", model)
        model = unwrap_compiled(model)
        return unwrap_compiled(model.module if isinstance(model, WrappedModel) else model)

    def report_failure(self, error: BaseException) -> None:
        self._monitor.report_failure(error)

    def check_running(self, operation: str) -> None:
        """Raise ConfigError after `shutdown`, and in a process that was forked from this rank."""
        super().check_running(operation)
        if self._is_forked:
            # The forked process would share the rank's connections, so its messages would be mixed with the messages of
            # the rank's collectives.
            raise ConfigError(
                f"{operation} was called in a process that was forked from rank {self.rank} and is not a rank. Call "
                "it in the rank's own process, and end the forked process with os._exit(0)."
            )

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def create_rank_groups(self, groups: Sequence[Sequence[int]]) -> list[Subgroup]:
        self.check_collective_allowed("create_rank_groups")
        created = create_rank_groups(groups, self.rank, self._monitor, self._rendezvous.timeout)
        self._rank_groups.update(created)
        return created

    def default_group(self) -> Subgroup:
        group = Subgroup(default_process_group(), range(self.size), self.rank, self._monitor)
        self._rank_groups.add(group)
        return group

    def shutdown(self) -> None:
        if self._is_forked:
            return
        self._monitor.stop()
        # Gloo's threads terminate when the last reference to a group is released. Threads that still run when the
        # interpreter exits occasionally abort the process (pytorch#179291).
        for model in self._models:
            model.leave_group()
        self._model_groups.leave()
        for group in self._rank_groups:
            group.leave()
        self._mesh = None
        self._check_consistency.leave_group()
        if not self._is_group_destroyed and dist.is_initialized():
            dist.destroy_process_group()
        slow_network_exchange.discard_unfinished()
        self._is_shut_down = True
        self._is_group_destroyed = True  # a second call must not destroy the group of a later backend


@contextmanager
def destroying_default_group_on_error() -> Iterator[None]:
    """Destroy the default process group if the block raises an exception, so that `unitrain.init` can be called
    again."""
    try:
        yield
    except BaseException:
        dist.destroy_process_group()
        raise


def _replace_parameters_with_shards(optimizer: Any, model: Any) -> None:
    """Replace the parameters of `optimizer` with their shards if it was built before `distributed_model`."""
    from unitrain.backends.sharding.optimizer_shards import replace_parameters

    replace_parameters(optimizer, model.sharded_parameters)
