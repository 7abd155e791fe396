"""The module that `distributed_model(model, shard="gradients")` returns on several ranks (ZeRO-2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn

from unitrain.backends.base import Communicator, ShardingMode
from unitrain.backends.gradients.end_of_backward import tensors_requiring_grad
from unitrain.backends.gradients.forward_buffers import ForwardBufferBroadcaster
from unitrain.backends.gradients.local_gradients import LocalGradientTracker
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.backends.gradients.unused_parameters import gather_unused, register_first_backward_check, unused_error
from unitrain.backends.gradients.wrapped_model import WrappedModel, check_requires_grad_changes
from unitrain.backends.sharding.gradient_reducer import GradientReducer, TransferSettings
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import ModelError
from unitrain.monitoring.loop_counters import CountedForward
from unitrain.torch_compat import current_backward, disable_compile, unwrap_compiled


@dataclass(slots=True)
class _PendingForwards:
    """`num_reducing` counts the forward passes outside `no_sync` since the last backward pass, whose ID is
    `last_backward`."""

    num_reducing: int = 0
    last_backward: int = -1
    broadcasts_buffers: bool = True  # whether the next forward pass broadcasts buffers first


class ShardedGradientModel(nn.Module, WrappedModel):
    """A module that reduces each gradient to the ranks that own it. `module` is the user's model.

    Without compression, the gradients of every backward pass are reduced, even inside `no_sync`, so that a rank never
    stores all gradients. With compression, gradients are accumulated locally inside `no_sync`, and compressed once.
    """

    sharding_mode: ShardingMode = "gradients"
    _instances: ClassVar[WeakSet[ShardedGradientModel]] = WeakSet()

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        rendezvous: Rendezvous,
        *,
        find_unused_parameters: bool,
        reducer_group: ReducerGroup,
        buffer_broadcaster: ForwardBufferBroadcaster | None,
        transfer_settings: TransferSettings,
    ) -> None:
        super().__init__()
        self.module = model
        self._device = communicator.device
        self._reducer_group, self._buffer_broadcaster = reducer_group, buffer_broadcaster
        self._requires_sync, self._has_left_group = True, False
        self._reduces_always = transfer_settings.half_dtype is None
        self._pending = _PendingForwards()
        self._all_parameters = list(model.parameters())
        self._last_requires_grad = [parameter.requires_grad for parameter in self._all_parameters]
        self._gradient_tracker = LocalGradientTracker(unwrap_compiled(model), lambda: False)
        self._communicator = communicator
        self.reducer = GradientReducer(
            dict(model.named_parameters()),
            communicator,
            reducer_group,
            transfer_settings,
            find_unused_parameters=find_unused_parameters,
            on_local=self._gradient_tracker.mark_local,
            on_reduced=self._gradient_tracker.mark_reduced,
        )
        self._gradient_tracker.set_reduced_parameters(self._trainable_parameters())
        ShardedGradientModel._instances.add(self)
        if not find_unused_parameters:
            register_first_backward_check(
                self,
                model,
                partial(gather_unused, rendezvous, f"model/{reducer_group.model_number}"),
                lambda: self._requires_sync and not self._has_left_group,
                model_number=reducer_group.model_number,
                reduces_zeros=False,
            )

    @classmethod
    def check_no_shared_parameters(cls, model: nn.Module) -> None:
        """Raise ModelError if another distributed model with sharded gradients shares parameters with `model`."""
        own = {id(parameter): name for name, parameter in model.named_parameters()}
        for instance in cls._instances:
            shared = [own[id(parameter)] for parameter in instance._all_parameters if id(parameter) in own]
            if shared and not instance._has_left_group:
                raise ModelError(
                    f"Parameter {shared[0]!r} belongs to another distributed model with sharded gradients, and only "
                    "one model can divide its gradient among ranks. Put both models into one module, and call "
                    'backend.distributed_model once, or use shard="state".'
                )

    def leave_group(self) -> None:
        """Release the process group. Afterwards, this module calls the user's model without reducing gradients."""
        if not self._has_left_group:
            self._has_left_group = True
            self._gradient_tracker.stop()
            self.reducer.stop()
            del self._reducer_group, self._buffer_broadcaster

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager for the backward passes of a step except the last one."""
        previous, self._requires_sync = self._requires_sync, False
        try:
            yield
        finally:
            self._requires_sync = previous

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._has_left_group:
            return self.module(*inputs, **kwargs)
        if self._device.type == "cuda":  # like DistributedDataParallel
            inputs, kwargs = _to_device(inputs, self._device), _to_device(kwargs, self._device)
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        self._before_forward()
        output = self.module(*inputs, **kwargs)
        self._after_forward(output)
        return output

    def check_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError unless the gradients of all parameters of `optimizer` are reduced.

        Re-raises another rank's ModelError if the report of that error has arrived. Does not communicate.
        """
        if self._has_left_group:
            return
        self._reducer_group.raise_reported_model_error()
        self._reducer_group.loop_counters.count_step()
        if missing_names := self.reducer.missing_names:
            raise unused_error(missing_names, "this rank in the last backward pass")
        self._gradient_tracker.check(optimizer)

    @disable_compile
    def _before_forward(self) -> None:
        if current_backward() == -1:  # not in a nested forward pass, such as that of activation checkpointing
            self.reducer.discard_interrupted()
        reduces, pending = self._requires_sync, self._pending
        if reduces or self._reduces_always:
            requires_grad = [parameter.requires_grad for parameter in self._all_parameters]
            if requires_grad != self._last_requires_grad and any(requires_grad):  # a frozen model has nothing to reduce
                self._update_trainable_parameters(requires_grad)
        if self._buffer_broadcaster is not None:
            if pending.broadcasts_buffers:  # otherwise an earlier forward pass of this step has broadcast them
                self._buffer_broadcaster.broadcast()
            pending.broadcasts_buffers = reduces

    @disable_compile
    def _after_forward(self, output: Any) -> None:
        reduces = self._requires_sync
        self._pending.num_reducing += reduces
        tensors = tensors_requiring_grad(output)
        if not tensors and (reduces or self._reduces_always):
            self.reducer.reduce_next_backward(accumulates=not reduces)
        if tensors:
            forward = self._reducer_group.loop_counters.count_forward(is_training=self.module.training)
            for tensor in tensors:
                # A strong reference to the tensor would create a reference cycle that Python cannot detect.
                tensor.register_hook(partial(self._prepare_backward, forward, ref(tensor)))

    @disable_compile
    def _prepare_backward(self, forward: CountedForward, output: ref[Tensor], gradient: Tensor) -> None:
        """Start to reduce the gradients of the current backward pass, unless they are accumulated locally. Called for
        each `output` that the pass reaches."""
        forward.mark_used()
        pending, backward = self._pending, current_backward()
        if backward == pending.last_backward or self._has_left_group:
            return
        completes = pending.num_reducing > 0 or self._requires_sync
        pending.num_reducing, pending.last_backward = 0, backward
        if completes or self._reduces_always:
            self.reducer.begin(accumulates=not completes, output=output())

    def _update_trainable_parameters(self, requires_grad: list[bool]) -> None:
        """Update the set of trainable parameters, so that exactly the gradients of parameters that require grad are
        reduced.

        All ranks must call this method. Raises ModelError on all ranks if their frozen parameters differ.
        """
        names = [name for name, _ in self.module.named_parameters()]
        check_requires_grad_changes(self._communicator, names, self._last_requires_grad, requires_grad)
        self._last_requires_grad = requires_grad
        self._gradient_tracker.set_reduced_parameters(self._trainable_parameters())
        self.reducer.select_trained_parameters()

    def _trainable_parameters(self) -> list[Tensor]:
        return [parameter for parameter in self._all_parameters if parameter.requires_grad]


def _to_device(inputs: Any, device: torch.device) -> Any:
    """Return `inputs` with all tensors, including those in lists, tuples and dictionaries, moved to `device`."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    if type(inputs) in (list, tuple):
        return type(inputs)(_to_device(value, device) for value in inputs)
    if type(inputs) is dict:
        return {key: _to_device(value, device) for key, value in inputs.items()}
    return inputs
