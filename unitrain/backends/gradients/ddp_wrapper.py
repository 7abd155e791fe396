"""Subclass of DistributedDataParallel whose gradients are reduced over ranks when `backward` returns.

DDP assigns gradients to buckets and reduces them during the backward pass, on any process group. This module adds:

- an error on every rank that names the parameters, if models differ or parameters are unused. From the second backward
  pass on, unused parameters raise an error on the affected ranks only, and this error does not name the parameters;
- gradient reduction also in a second backward pass through a retained graph; otherwise, replicas would diverge;
- an error for an optimizer step on unreduced gradients;
- support for freezing and unfreezing parameters during training.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from unitrain.backends.base import Communicator, ShardingMode
from unitrain.backends.capabilities import Tunable
from unitrain.backends.gradients.compression import Compressor, register_compression_hook
from unitrain.backends.gradients.end_of_backward import BackwardStage, end_of_backward, tensors_requiring_grad
from unitrain.backends.gradients.forward_buffers import ForwardBufferBroadcaster
from unitrain.backends.gradients.half_precision import Float32Reduction, has_half_precision
from unitrain.backends.gradients.local_gradients import LocalGradientTracker
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.backends.gradients.unused_parameters import gather_unused, register_first_backward_check
from unitrain.backends.gradients.wrapped_model import WrappedModel, check_requires_grad_changes
from unitrain.bootstrap import environment
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import EnvironmentVariableError, ModelError
from unitrain.monitoring.loop_counters import CountedForward
from unitrain.torch_compat import (
    ReducerDDP,
    current_backward,
    ddp_finds_all,
    disable_compile,
    gradient_hooks_disabled,
    has_torch,
    is_reached_by_backward,
    require_torch,
    unwrap_compiled,
)

BUCKETS = Tunable(
    "UNITRAIN_BUCKETS_MB",
    "sizes in MiB of the first gradient bucket and of the others",
    "1,25",
    ("25,25", "1,5", "5,5", "1,100", "100,100"),
)
BUCKET_VIEW = Tunable("UNITRAIN_BUCKET_VIEW", "gradients are views of the buckets (1), or copies (0)", "1", ("0",))

# `hook(state, bucket)` returns a future with the reduced buffer of the bucket.
CommHook = Callable[[Any, dist.GradBucket], Any]


@dataclass(slots=True)
class _PendingForwards:
    """Numbers of forward passes with grad mode enabled since the last backward pass, and the ID of that backward pass.

    `num_reducing` counts the forward passes outside `no_sync`. `num_prepared` counts the forward passes after which
    DDP's reducer is prepared correctly for a backward pass. With `find_unused_parameters`, DDP searches the output for
    the tensors from which a backward pass can start, and the reducer is prepared correctly only if DDP finds all of
    them. The counts are in a separate object, because setting an attribute of a module takes microseconds.
    """

    num_forwards: int = 0
    num_reducing: int = 0
    num_prepared: int = 0
    last_backward: int = -1
    broadcasts_buffers: bool = True  # whether the next forward pass broadcasts buffers first


class _MonitoredHook:
    """Calls the user's communication hook, and waits for its futures at the end of the backward pass.

    The watchdog monitors this wait. Without this class, DDP would wait in C++, and an error after a timeout would not
    name the missing ranks.
    """

    def __init__(self, hook: CommHook, model: DistributedModel) -> None:
        self._hook, self._futures = hook, list[Any]()
        self._model = weakref.ref(model)  # a strong reference would keep the process groups alive

    def __call__(self, state: object, bucket: dist.GradBucket) -> Any:
        if bucket.index() == 0:  # an exception may have interrupted the previous backward pass
            self._futures.clear()
        self._get_reducer_group().begin_bucket(bucket.buffer())
        future = self._hook(state, bucket)
        self._futures.append(future)
        if bucket.is_last():
            end_of_backward.add(BackwardStage.COMPRESS, self._wait, self._get_reducer_group().model_number)
        return future

    def _wait(self) -> None:
        group = self._get_reducer_group()
        try:
            with group.monitored_wait():
                for future in self._futures:
                    future.wait()
        except RuntimeError as error:
            group.raise_cause_of(error)
            raise
        finally:
            self._futures.clear()

    def _get_reducer_group(self) -> ReducerGroup:
        model = self._model()
        assert model is not None, "the graph of the running backward pass keeps the model alive"
        return model._reducer_group


class DistributedModel(ReducerDDP, WrappedModel):
    """The module that `distributed_model` returns, a subclass of DDP. `module` is the user's model.

    The reducer uses `reducer_group`, which communicates through `group`, the model's process group.
    `buffer_broadcaster` broadcasts buffers before the first training forward pass of each accumulation cycle. Unlike
    DDP, it does not broadcast them before a forward pass under torch.no_grad().
    """

    sharding_mode: ShardingMode = "none"  # or "state", which changes only the optimizer, or "gradients" on one rank
    _instances: ClassVar[WeakSet[DistributedModel]] = WeakSet()
    _has_shared_parameters: bool
    _reducer_group: ReducerGroup

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        rendezvous: Rendezvous,
        *,
        find_unused_parameters: bool,
        compressor: Compressor,
        reducer_group: ReducerGroup,
        buffer_broadcaster: ForwardBufferBroadcaster | None,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(
            model,
            reducer_group,
            device_ids=[communicator.device] if communicator.device.type == "cuda" else None,
            process_group=group,
            find_unused_parameters=find_unused_parameters,
            **read_bucket_settings(),
        )
        self._buffer_broadcaster = buffer_broadcaster
        self._sums_in_float32 = compressor == "none" and reducer_group.size() > 1 and has_half_precision(model)
        if compressor != "none":
            register_compression_hook(self, compressor, reducer_group)
        elif self._sums_in_float32:
            reduction = Float32Reduction(reducer_group, find_unused_parameters=find_unused_parameters)
            # DDP rejects a hook whose annotations are strings, as all annotations of this module are.
            super().register_comm_hook(None, lambda state, bucket: reduction(state, bucket))
        self._all_parameters = list(model.parameters())
        self._last_requires_grad = [parameter.requires_grad for parameter in self._all_parameters]
        self._pending = _PendingForwards()
        self._rebuilds_buckets = not find_unused_parameters  # at the end of the next backward pass
        self._has_left_group = False
        self._gradient_tracker = LocalGradientTracker(unwrap_compiled(model))
        self._gradient_tracker.set_reduced_parameters(self._trainable_parameters())
        reducer_group.on_reduced = self._gradient_tracker.mark_reduced
        self._communicator: Communicator | None = communicator
        self._find_models_with_shared_parameters()
        self._double_backward_hooks: list[RemovableHandle] = []
        # The names are exchanged through the store, because collectives of this backward pass are in flight on ranks
        # that wait for a gradient.
        gather = partial(gather_unused, rendezvous, f"model/{reducer_group.model_number}")
        register_first_backward_check(
            self,
            model,
            None if find_unused_parameters else gather,
            lambda: self.require_backward_grad_sync and not self._has_left_group,
            model_number=reducer_group.model_number,
        )

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduce gradients with `hook` instead of an allreduce, as in DistributedDataParallel. All ranks must call this
        method once, before the first backward pass.

        `hook(state, bucket)` starts to reduce `bucket.buffer()`, which contains gradients that are not divided by the
        number of ranks, and returns a future with the reduced buffer. The optimizer treats the gradients as the mean
        over ranks. Raises ModelError if there is a hook already, if gradients are compressed, or if the backend has
        been shut down.
        """
        if self._has_left_group:
            raise ModelError(
                "register_comm_hook was called after the backend was shut down. Call it before the first backward pass."
            )
        if self._sums_in_float32:  # the user's hook replaces this hook; DDP accepts one hook per reducer
            self._sums_in_float32 = False
            self._comm_hooks.clear()
            self.rebuild_reducer()
        if self.has_comm_hook():
            raise ModelError(
                "The gradients of this model already have a communication hook. Leave compression out of "
                "distributed_model, and register only one hook."
            )
        monitored = _MonitoredHook(hook, self)
        # DDP rejects a hook whose annotations are strings, as all annotations of this module are. A lambda has none.
        super().register_comm_hook(state, lambda state, bucket: monitored(state, bucket))

    def leave_group(self) -> None:
        """Release the process group. Afterwards, this module calls the user's model without reducing gradients."""
        if not self._has_left_group:
            self._has_left_group = True
            self._gradient_tracker.stop()
            self._remove_double_backward_hooks()
            self.release_groups()
            self._communicator = None
            del self._buffer_broadcaster

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._has_left_group:
            return self.module(*inputs, **kwargs)
        is_grad_enabled, reduces, pending = torch.is_grad_enabled(), self.require_backward_grad_sync, self._pending
        if is_grad_enabled and reduces:
            requires_grad = [parameter.requires_grad for parameter in self._all_parameters]
            if requires_grad != self._last_requires_grad and any(requires_grad):  # a frozen model has nothing to reduce
                self._update_trainable_parameters(requires_grad)
        if is_grad_enabled and self._buffer_broadcaster is not None:
            if pending.broadcasts_buffers:  # otherwise an earlier forward pass of this step has broadcast them
                self._buffer_broadcaster.broadcast()
            pending.broadcasts_buffers = reduces
        try:
            output = super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self._raise_if_unused(error)
            raise
        if is_grad_enabled:
            tensors, reducer_group = tensors_requiring_grad(output), self._reducer_group
            pending.num_forwards += 1
            if reduces:
                pending.num_reducing += 1
                pending.num_prepared += not self.find_unused_parameters or ddp_finds_all(tensors, output)
                reducer_group.expect_backward()
            if tensors:
                prepare = partial(
                    self._prepare_backward, reducer_group.loop_counters.count_forward(is_training=self.module.training)
                )
                for tensor in tensors:
                    tensor.register_hook(prepare)
        return output

    def check_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError unless the gradients of all parameters of `optimizer` are reduced.

        Re-raises another rank's ModelError if the report of that error has arrived. Does not communicate.
        """
        if not self._has_left_group:
            self._reducer_group.raise_reported_model_error()
            self._reducer_group.loop_counters.count_step()
            try:
                self.check_reducer_finished()
            except RuntimeError as error:
                self._raise_if_unused(error)
                raise
            self._gradient_tracker.check(optimizer)

    def _find_models_with_shared_parameters(self) -> None:
        """Find the distributed models that share parameters with this one."""
        own = {id(parameter) for parameter in self._all_parameters}
        self._models_with_shared_parameters: WeakSet[DistributedModel] = WeakSet(
            instance
            for instance in DistributedModel._instances
            if not instance._has_left_group and any(id(parameter) in own for parameter in instance._all_parameters)
        )
        for instance in self._models_with_shared_parameters:
            instance._models_with_shared_parameters.add(self)
            instance._has_shared_parameters = True
        # A separate attribute, because iterating over a WeakSet takes a microsecond.
        self._has_shared_parameters = len(self._models_with_shared_parameters) > 0
        DistributedModel._instances.add(self)

    def _check_no_shared_backward(self, backward_id: int) -> None:
        """Raise ModelError if this backward pass also reduces the gradients of another distributed model that shares
        trainable parameters with this one."""
        if not self.require_backward_grad_sync:
            return
        own = {id(parameter): name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        for model in self._models_with_shared_parameters:
            if (
                model._has_left_group
                or model._pending.last_backward != backward_id
                or not model.require_backward_grad_sync
            ):
                continue
            shared = [own[id(parameter)] for parameter in model._all_parameters if id(parameter) in own]
            if shared:
                raise ModelError(
                    f"Two distributed models share the parameter {shared[0]!r}, and one backward pass runs through "
                    "both, so its gradient would be reduced twice. Put both models into one module, and call "
                    "backend.distributed_model once, or run a separate backward pass for each loss."
                )

    @disable_compile
    def _update_trainable_parameters(self, requires_grad: list[bool]) -> None:
        """Update the set of trainable parameters, so that exactly the gradients of parameters that require grad are
        reduced.

        DDP reduces the parameters that required grad when it was constructed. It would not reduce the gradients of
        parameters that are unfrozen later, and would wait for the gradients of frozen parameters. All ranks call this
        method. It raises ModelError on all ranks if their frozen parameters differ. With `find_unused_parameters`, it
        does nothing, and does not communicate, unless a parameter was unfrozen.
        """
        if self.find_unused_parameters and not any(
            now and not before for now, before in zip(requires_grad, self._last_requires_grad, strict=True)
        ):
            return  # parameters were only frozen, and a frozen parameter counts as unused
        names = [name for name, _ in self.module.named_parameters()]
        assert self._communicator is not None
        check_requires_grad_changes(self._communicator, names, self._last_requires_grad, requires_grad)
        self._last_requires_grad = requires_grad
        self._gradient_tracker.set_reduced_parameters(self._trainable_parameters())
        self._remove_double_backward_hooks()  # for the former parameters
        self.rebuild_reducer()
        self._rebuilds_buckets = not self.find_unused_parameters
        if self.find_unused_parameters:
            self._mark_parameters_used()

    def _mark_parameters_used(self) -> None:
        """Mark the parameters with local gradients as used in the new reducer.

        In backward passes inside `no_sync`, the reducer records which parameters are used, and it does not reduce the
        gradients of parameters that no rank has used. A new reducer has no such record, and only a backward pass can
        create one. This function therefore runs a backward pass that adds zeros to the local gradients. It does not
        call the user's hooks.
        """
        for parameter in self._gradient_tracker.parameters_with_local_gradients():
            if parameter.requires_grad and parameter.grad is not None:
                with gradient_hooks_disabled(parameter):
                    torch.autograd.backward([parameter], [torch.zeros_like(parameter.grad)])

    def _prepare_backward(self, forward: CountedForward, gradient: Tensor) -> None:
        """Prepare the reducer for the current backward pass if DDP has not done so. Called for each output that the
        pass reaches.

        DDP prepares the reducer in a forward pass outside `no_sync`, for one backward pass that uses the same
        parameters. However, a retained graph allows another backward pass without a forward pass, several forward
        passes may share one backward pass, and a backward pass outside `no_sync` may follow a forward pass inside it.
        """
        forward.mark_used()
        self._begin_backward()

    def _begin_backward(self) -> None:
        pending, backward_id = self._pending, current_backward()
        if backward_id == pending.last_backward or self._has_left_group:
            return
        if torch.is_grad_enabled():  # with create_graph=True
            if self._reached_parameters():
                raise ModelError(
                    "backward(create_graph=True) was called on the output of a distributed model, but reduced "
                    "gradients have no history, so gradients of gradients would be those of this rank. Compute them "
                    "with torch.autograd.grad(loss, parameters, create_graph=True), and call backward() on a loss of "
                    "them."
                )
            self._add_double_backward_hooks()
        forwards, reducing, prepared = pending.num_forwards, pending.num_reducing, pending.num_prepared
        pending.num_forwards = pending.num_reducing = pending.num_prepared = 0
        pending.last_backward = backward_id
        if self._has_shared_parameters:
            self._check_no_shared_backward(backward_id)
        if not (reducing or self.require_backward_grad_sync):
            return
        self._reducer_group.expect_backward()
        if self._rebuilds_buckets:
            end_of_backward.add(
                BackwardStage.REBUILD_BUCKETS, self._rebuild_after_backward, self._reducer_group.model_number
            )
        if prepared == 0:
            self.rebuild_buckets()
        if self.find_unused_parameters and not forwards == prepared == 1:
            if reached := self._reached_parameters():
                self.prepare_reducer(reached)
        elif prepared == 0:
            self.prepare_reducer([])

    @disable_compile
    def _rebuild_after_backward(self) -> None:
        try:
            self.check_reducer_finished()
        except RuntimeError:  # parameters are unused; the next forward pass or step raises the error
            return
        self._rebuilds_buckets = not self.rebuild_buckets()

    def _add_double_backward_hooks(self) -> None:
        """Prepare the reducer also in backward passes that reach parameters, but no output, such as those of a gradient
        penalty."""
        if not self._double_backward_hooks:
            weak_self = weakref.ref(self)  # parameters can outlive the distributed model

            def begin(_gradient: Tensor) -> None:
                if (model := weak_self()) is not None:
                    model._begin_backward()

            self._double_backward_hooks += [
                parameter.register_hook(begin) for parameter in self._all_parameters if parameter.requires_grad
            ]

    def _remove_double_backward_hooks(self) -> None:
        for handle in self._double_backward_hooks:
            handle.remove()
        self._double_backward_hooks.clear()

    def _raise_if_unused(self, error: RuntimeError) -> None:
        """Raise ModelError if `error` is DDP's error after a backward pass that did not complete all buckets."""
        if "Expected to have finished reduction in the prior iteration" in str(error):
            fix = (
                "although find_unused_parameters=True. Add all parameters with a factor of 0 to the loss: loss + 0 * "
                "sum(parameter.sum() for parameter in model.parameters())."
                if self.find_unused_parameters
                else "so the gradients of this rank differ from those of the other ranks. Use all parameters in every "
                "loss, or allow unused parameters: backend.distributed_model(model, find_unused_parameters=True)."
            )
            raise ModelError(
                f"Some parameters received no gradient on this rank in the last backward pass, {fix}"
            ) from error

    def _trainable_parameters(self) -> list[Tensor]:
        return [parameter for parameter in self._all_parameters if parameter.requires_grad]

    def _reached_parameters(self) -> list[Tensor]:
        """Return a view of each parameter that the current backward pass reaches. The list is empty in
        torch.autograd.grad, which accumulates no gradients."""
        try:
            with torch.enable_grad():
                return [
                    parameter.view_as(parameter)
                    for parameter in self._all_parameters
                    if parameter.requires_grad and is_reached_by_backward(parameter)
                ]
        except RuntimeError:  # torch.autograd.grad with respect to parameters
            return []


def read_bucket_settings() -> dict[str, Any]:
    """Return DDP's bucket settings from the environment. They affect the speed, and change results only by rounding
    errors.
    """
    settings: dict[str, Any] = {"gradient_as_bucket_view": environment.get_variable(BUCKET_VIEW.variable) != "0"}
    if environment.get_variable(BUCKETS.variable) is None:
        return settings
    first_mebibytes, other_mebibytes = read_bucket_mebibytes()
    if has_torch("2.12"):
        return {**settings, "bucket_cap_mb_list": [first_mebibytes, other_mebibytes]}
    if first_mebibytes != 1:
        require_torch("the size of the first gradient bucket (UNITRAIN_BUCKETS_MB)")
    return {**settings, "bucket_cap_mb": other_mebibytes}


def read_bucket_mebibytes() -> tuple[int, int]:
    """Return the sizes in MiB of the first gradient bucket and of the others from the environment."""
    text = environment.get_variable(BUCKETS.variable) or BUCKETS.default
    try:
        first_mebibytes, other_mebibytes = (int(part) for part in text.split(","))
        if min(first_mebibytes, other_mebibytes) < 1:
            raise ValueError
    except ValueError:
        raise EnvironmentVariableError(
            f"UNITRAIN_BUCKETS_MB must be the sizes in MiB of the first gradient bucket and of the others, got "
            f"{text!r}. Use UNITRAIN_BUCKETS_MB=1,25"
        ) from None
    return first_mebibytes, other_mebibytes
