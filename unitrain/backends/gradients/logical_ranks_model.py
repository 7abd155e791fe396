"""The module that `distributed_model(model, logical_ranks=V)` returns."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unitrain.backends.base import Communicator, ShardingMode
from unitrain.backends.compression_setting import Compression
from unitrain.backends.gradients.end_of_backward import BackwardStage, end_of_backward, tensors_requiring_grad
from unitrain.backends.gradients.exact_reduction import ExactReduction, StartAllreduce
from unitrain.backends.gradients.forward_buffers import ForwardBufferBroadcaster
from unitrain.backends.gradients.local_gradients import LocalGradientTracker, register_gradient_hook
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.backends.gradients.wrapped_model import WrappedModel
from unitrain.backends.logical_ranks import check_logical_ranks, local_logical_ranks
from unitrain.backends.tensors import copy_into
from unitrain.errors import ConfigError, ModelError
from unitrain.monitoring.loop_counters import CountedForward
from unitrain.torch_compat import (
    current_backward,
    disable_compile,
    is_compiled,
    is_reached_by_backward,
    unwrap_compiled,
)

_OPS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


class LogicalRanksModel(nn.Module, WrappedModel):
    """A module that accumulates the gradients of each logical rank separately, and reduces them exactly.

    In each step, the process runs its logical ranks one after the other, each with all its micro-batches. All backward
    passes but the last run inside `no_sync`. The last one leaves the mean over all logical ranks in every `.grad`, plus
    the gradients that `.grad` contained before the step.

    All logical ranks of a process start a step with the same buffers. Buffers that a training forward pass reads are
    those of logical rank 0. At the end of a step, process 0 has the buffers that logical rank 0 has written;
    `broadcast_buffers` and evaluation distribute them.
    """

    sharding_mode: ShardingMode = "none"

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        logical_ranks: int,
        *,
        find_unused_parameters: bool,
        bucket_bytes: int,
        buffer_broadcaster: ForwardBufferBroadcaster | None,
        reducer_group: ReducerGroup | None,
    ) -> None:
        super().__init__()
        self.module, self._communicator = model, communicator
        self._logical_ranks = logical_ranks
        self._local_logical_ranks = local_logical_ranks(logical_ranks, communicator.rank, communicator.size)
        self._buffer_broadcaster, self._reducer_group = buffer_broadcaster, reducer_group
        self._model_number = 0 if reducer_group is None else reducer_group.model_number
        self._requires_sync, self._has_left_group = True, False
        self._all_parameters = list(model.parameters())
        self._gradient_tracker = LocalGradientTracker(unwrap_compiled(model))
        self._reduction = ExactReduction(
            [name for name, _ in model.named_parameters()],
            self._all_parameters,
            logical_ranks=logical_ranks,
            bucket_bytes=bucket_bytes,
            start_allreduce=None if reducer_group is None else _create_start_allreduce(reducer_group),
            allows_unused=find_unused_parameters,
        )
        self._gradient_hooks = [
            register_gradient_hook(parameter, _create_gradient_hook(index, weakref.ref(self)))
            for index, parameter in enumerate(self._all_parameters)
            if parameter.is_floating_point() or parameter.is_complex()
        ]
        self._last_backward = -1
        self._num_reducing_forwards = 0  # outside no_sync, since the last backward pass
        self._discard_step()

    def _discard_step(self) -> None:
        self._reduction.discard()
        self._active_rank: int | None = None  # the logical rank whose gradients are in `.grad`
        self._has_backward_started = False  # whether a backward pass of the step has started
        # The gradients of the logical ranks that have run their backward passes.
        self._gradients_by_rank: dict[int, list[Tensor | None]] = {}
        # The gradients in `.grad` before the step, such as reduced gradients of an earlier step that were not zeroed.
        self._gradients_before_step: list[Tensor | None] = []
        self._buffers_at_start: list[Tensor] = []
        self._buffers_of_rank_0: list[Tensor] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes accumulate the gradients of the current logical rank."""
        previous, self._requires_sync = self._requires_sync, False
        try:
            yield
        finally:
            self._requires_sync = previous

    def leave_group(self) -> None:
        """Release the process group. Afterwards, this module only calls the user's model."""
        if not self._has_left_group:
            self._has_left_group = True
            self._gradient_tracker.stop()
            for hook in self._gradient_hooks:
                hook.remove()
            del self._reduction, self._reducer_group, self._buffer_broadcaster

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._has_left_group or not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        self._before_forward((inputs, kwargs))
        output = self.module(*inputs, **kwargs)
        self._after_forward(output)
        return output

    def check_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError unless the gradients of all parameters of `optimizer` are reduced. Does not communicate."""
        if self._has_left_group:
            return
        if self._reducer_group is not None:
            self._reducer_group.raise_reported_model_error()
            self._reducer_group.loop_counters.count_step()
        if self._gradients_by_rank:
            raise ModelError(
                "optimizer.step() was called before the gradients of all logical ranks were reduced. Step only if "
                "loader.ends_step, and run the other backward passes inside backend.no_sync(model)."
            )
        self._gradient_tracker.check(optimizer)

    @disable_compile
    def _before_forward(self, inputs: Any) -> None:
        batch = self._communicator.current_batches.find(inputs)
        current = None if batch is None else batch.logical_rank
        if current is None or current.count != self._logical_ranks:
            description = "no logical rank" if current is None else f"one of {current.count} logical ranks"
            raise ModelError(
                f"The model was distributed with logical_ranks={self._logical_ranks}, but the batch belongs to "
                f"{description}. Use unitrain.ShardedLoader(data, backend, logical_ranks={self._logical_ranks}, ...), "
                "or call the model under torch.no_grad()."
            )
        logical_rank = current.index
        self._num_reducing_forwards += self._requires_sync
        if logical_rank == self._active_rank:
            return
        if self._active_rank is not None and logical_rank == self._local_logical_ranks[0]:
            # An exception interrupted the last step.
            self._discard_step()
        if self._active_rank is None:
            if self._buffer_broadcaster is not None:
                self._buffer_broadcaster.broadcast()
            if len(self._local_logical_ranks) > 1:
                self._buffers_at_start = self._copy_buffers()
        else:
            self._store_active_rank()
            self._restore_buffers(self._buffers_at_start)
        self._active_rank = logical_rank

    def _store_active_rank(self) -> None:
        """Store the gradients of the active logical rank, and its buffers if it is logical rank 0 and the process has
        more than one logical rank."""
        assert self._active_rank is not None
        self._gradients_by_rank[self._active_rank] = self._take_gradients()
        if self._active_rank == 0 and len(self._local_logical_ranks) > 1:
            self._buffers_of_rank_0 = self._copy_buffers()

    @disable_compile
    def _after_forward(self, output: Any) -> None:
        forward = (
            None
            if self._reducer_group is None
            else self._reducer_group.loop_counters.count_forward(is_training=self.module.training)
        )
        prepare = partial(self._prepare_backward, forward)
        for tensor in tensors_requiring_grad(output):
            tensor.register_hook(prepare)

    @disable_compile
    def _prepare_backward(self, forward: CountedForward | None, gradient: Tensor) -> None:
        """Prepare for the end of the current backward pass. Called for each output that the pass reaches."""
        if forward is not None:
            forward.mark_used()
        backward = current_backward()
        if backward == self._last_backward or self._has_left_group or not self._is_any_parameter_reached():
            return
        reduces = self._num_reducing_forwards > 0 or self._requires_sync
        self._last_backward, self._num_reducing_forwards = backward, 0
        if self._active_rank is None:  # another backward pass through a retained graph
            self._active_rank = self._local_logical_ranks[0]
        if not self._has_backward_started:
            self._has_backward_started, self._gradients_before_step = True, self._take_gradients()
        self._reduction.discard()  # a reduction that an exception in an earlier backward pass interrupted
        if reduces:
            if self._reducer_group is not None:
                self._reducer_group.expect_backward()
            other_gradients = [
                self._gradients_by_rank[rank] for rank in self._local_logical_ranks if rank in self._gradients_by_rank
            ]
            all_ranks_have_run = len({*self._gradients_by_rank, self._active_rank}) == len(self._local_logical_ranks)
            self._reduction.begin(other_gradients, all_ranks_have_run=all_ranks_have_run)
            end_of_backward.add(BackwardStage.REDUCE_BUCKETS, self._reduce, self._model_number)

    def _is_any_parameter_reached(self) -> bool:
        """Return whether the current backward pass accumulates gradients, unlike torch.autograd.grad."""
        try:
            with torch.enable_grad():
                return any(
                    parameter.requires_grad and is_reached_by_backward(parameter) for parameter in self._all_parameters
                )
        except RuntimeError:  # torch.autograd.grad with respect to parameters
            return False

    @disable_compile
    def add_gradient(self, parameter_index: int, parameter: Tensor) -> None:
        """Add the gradient of a parameter to the reduction of the current backward pass, if it reduces gradients.

        Called after each accumulation of a gradient.
        """
        if not self._has_left_group and self._reduction.is_active and parameter.grad is not None:
            self._reduction.add(parameter_index, parameter.grad)

    @torch.no_grad()
    def _reduce(self) -> None:
        try:
            assert self._active_rank is not None
            self._store_active_rank()
            means = self._reduction.finish(self._gradients_by_rank[self._active_rank])
            for parameter, mean, earlier in zip(self._all_parameters, means, self._gradients_before_step, strict=True):
                if mean is not None and earlier is not None:
                    mean += earlier
                parameter.grad = earlier if mean is None else mean
            if self._buffers_of_rank_0:
                self._restore_buffers(self._buffers_of_rank_0)
            self._gradient_tracker.mark_reduced()
        finally:
            self._discard_step()

    def _take_gradients(self) -> list[Tensor | None]:
        """Return the `.grad` of each parameter, and set it to None."""
        gradients = [parameter.grad for parameter in self._all_parameters]
        for parameter in self._all_parameters:
            parameter.grad = None
        return gradients

    def _copy_buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for buffer in self.module.buffers()]

    def _restore_buffers(self, values: list[Tensor]) -> None:
        for buffer, value in zip(self.module.buffers(), values, strict=True):
            copy_into(buffer.data, value)


def check_logical_ranks_arguments(
    model: nn.Module, logical_ranks: Any, communicator: Communicator, *, shard: ShardingMode, compression: Compression
) -> None:
    """Raise ConfigError for settings that `distributed_model` does not support with `logical_ranks`, and ModelError for
    models that it does not support: with torch.nn.SyncBatchNorm, or compiled with sync_batch_norm."""
    check_logical_ranks("distributed_model(logical_ranks=...)", logical_ranks, communicator)
    for name, value in (("shard", shard), ("compression", compression)):
        if value != "none":
            raise ConfigError(
                f"distributed_model({name}={value!r}) is not supported with logical_ranks. Leave {name} out, or leave "
                "logical_ranks out."
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise ModelError(
                f"{name or 'The model'} is a torch.nn.SyncBatchNorm, which is not supported with logical_ranks. Use "
                "unitrain.sync_batch_norm(model, backend), which also converts SyncBatchNorm."
            )
    if has_synchronized_layers(model) and any(map(is_compiled, model.modules())):
        raise ModelError(
            "A compiled model with sync_batch_norm is not supported with logical_ranks, because the logical ranks of a "
            "process take turns. Leave compile out, or leave sync_batch_norm out."
        )


def has_synchronized_layers(model: nn.Module) -> bool:
    """Return whether `sync_batch_norm` has synchronized layers of `model`."""
    return any(hasattr(module, "shared_statistics") for module in model.modules())


def check_logical_ranks_optimizer(model: Any, shard: ShardingMode) -> None:
    """Raise ConfigError for a sharded optimizer of a LogicalRanksModel."""
    if isinstance(model, LogicalRanksModel) and shard != "none":
        raise ConfigError(
            f"distributed_optimizer(shard={shard!r}) is not supported for a model with logical_ranks. Leave shard out."
        )


def _create_gradient_hook(parameter_index: int, weak_model: weakref.ref[LogicalRanksModel]) -> Callable[[Tensor], None]:
    """Return the hook of a parameter. The reference to the model is weak, because parameters can outlive the model."""

    def hook(parameter: Tensor) -> None:
        if (wrapper := weak_model()) is not None:
            wrapper.add_gradient(parameter_index, parameter)

    return hook


def _create_start_allreduce(group: ReducerGroup) -> StartAllreduce:
    def start(tensor: Tensor, op: str) -> Callable[[], None]:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        work = group.allreduce([tensor], options)
        if group.waits_on_stream:
            return lambda: _wait_on_stream(work)
        return lambda: group.wait_for_ranks(work)

    return start


def _wait_on_stream(work: dist.Work) -> None:
    work.wait()
