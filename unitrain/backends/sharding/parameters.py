"""Sharded parameters (ZeRO-3): torch's `fully_shard` (FSDP2) on the process group of any backend.

Each rank stores a shard of every parameter, its gradient and its optimizer state. The parameters of a block are
all-gathered before its forward and backward pass and freed afterwards; its gradients are reduced in its backward pass.
Between a forward pass with gradients and its backward pass, only the parameters of the root block remain in memory, or
none if some parameters already have gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from unitrain.backends.base import Communicator
from unitrain.backends.blocks import BlockChoice
from unitrain.backends.gradients.end_of_backward import BackwardStage, end_of_backward, tensors_requiring_grad
from unitrain.backends.gradients.forward_buffers import ForwardBufferBroadcaster
from unitrain.backends.gradients.local_gradients import LocalGradientTracker
from unitrain.backends.gradients.unused_parameters import gather_unused, raise_unused
from unitrain.backends.gradients.wrapped_model import WrappedModel, check_requires_grad_changes
from unitrain.backends.objects import broadcast_tensors
from unitrain.backends.sharding.checks import choose_blocks
from unitrain.backends.sharding.forward_passes import register_participant
from unitrain.backends.sharding.fsdp_compat import (
    count_post_forward_groups,
    fsdp_parameter_records,
    is_fsdp_initialized,
    release_fsdp_groups,
    support_norms_of_any_order,
    truncate_post_forward_order,
    unsharded_parameter,
    was_fsdp_interrupted,
)
from unitrain.backends.sharding.parameter_collectives import GatherParameters, ParameterCollectives, ReduceGradients
from unitrain.backends.sharding.shards import make_state_dicts_complete
from unitrain.backends.tensors import HALF_DTYPES
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import ConfigError, ModelError
from unitrain.monitoring.loop_counters import CountedForward
from unitrain.monitoring.monitor import FailureMonitor
from unitrain.torch_compat import (
    current_backward,
    disable_compile,
    has_torch,
    is_view,
    require_torch,
    tree_map_only,
    unwrap_compiled,
)


class ShardedParameters:
    """Applies `fully_shard` to `model` in place, and controls its collectives. All ranks must create it.

    The constructor first broadcasts the parameters and buffers from rank 0, one at a time. `blocks` selects the modules
    whose parameters are gathered together; see `choose_blocks`. All other parameters form one additional block.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: BlockChoice,
        communicator: Communicator,
        mesh: DeviceMesh,
        collectives: ParameterCollectives,
    ) -> None:
        require_torch('shard="parameters"')
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                broadcast_tensors(communicator, [tensor])
        self.model, self.collectives, self.block_choice = model, collectives, blocks
        self.communicator, self._announces_next_forward = communicator, False
        before = dict(model.named_parameters())
        modules = [*choose_blocks(model, blocks).values(), model]
        for module in modules:
            fully_shard(module, mesh=mesh, mp_policy=_precision_policy(module))
        self.blocks: list[FSDPModule] = modules  # type: ignore[assignment]
        for index, block in enumerate(self.blocks):
            block.set_force_sum_reduction_for_comms(True)
            block.set_custom_all_gather(GatherParameters(collectives, index))  # type: ignore[arg-type]
            block.set_custom_reduce_scatter(ReduceGradients(collectives))  # type: ignore[arg-type]
        if has_torch("2.13"):  # all ranks then reduce tensors of the same size, even if they use different parameters
            self.root.set_reduce_scatter_unused_params(True)
        after = dict(model.named_parameters())
        # (weak reference to the original parameter, sharded parameter) by the id of the original parameter, to look up
        # parameters of an optimizer that was built before sharding.
        self.replaced_parameters = {id(before[name]): (ref(before[name]), after[name]) for name in before}
        make_state_dicts_complete(model, communicator)
        support_norms_of_any_order()
        # `prepend`: fully_shard's pre-hook, which gathers the parameters of the root block, must run after this one.
        model.register_forward_pre_hook(lambda module, inputs: self._before_forward(), prepend=True)
        # `prepend`: fully_shard's hook, which lets the backward pass gather these parameters, must run after this one.
        model.register_forward_hook(self._copy_views, prepend=True)
        model.register_forward_hook(self._free_after_forward)
        # The indices of the blocks, in the order in which a forward pass gathered their parameters. The list is empty
        # before the first forward pass, and shared by the copies of the model.
        self._gather_order: list[int] = []
        self._num_blocks_before_forward = 0  # number of blocks recorded by FSDP when the current forward pass started
        register_participant(model, self)

    @property
    def root(self) -> FSDPModule:
        """The user's module."""
        return self.blocks[-1]

    def parameter_after_sharding(self, parameter: Tensor) -> Tensor:
        """Return the sharded parameter that has replaced `parameter`, or `parameter` itself."""
        former, current = self.replaced_parameters.get(id(parameter), (None, parameter))
        return current if former is not None and former() is parameter else parameter

    def share_gather_order(self, original: ShardedParameters) -> None:
        """Share the recorded order of the blocks with `original`, whose model is the original of this copy."""
        self._gather_order = original._gather_order

    def free_complete_parameters(self) -> None:
        """Free the complete parameters of the root block, which remain in memory after a forward pass with gradients.

        A backward pass frees them. Without one, the next forward pass after an optimizer step would use outdated
        values.
        """
        self.root.reshard()

    @property
    def has_gather_order(self) -> bool:
        """Whether a forward pass has recorded the order in which it gathered the blocks."""
        return bool(self._gather_order)

    def announce_next_forward(self) -> None:
        """In the next forward pass, announce each block before it is gathered, to the ranks that follow its order."""
        self._announces_next_forward = True

    @disable_compile
    def take_part_in_forward(self, *, is_announced: bool) -> None:
        """Gather and free the parameters of all blocks, as a forward pass without gradients does.

        The order is that of the last forward pass or, if `is_announced`, the order that the other ranks announce.
        """
        order = self._announced_blocks() if is_announced else iter(list(self._gather_order))
        gathered = []
        for index in order:
            self.blocks[index].unshard()
            self.blocks[index].reshard()
            gathered.append(index)
        self._gather_order[:] = gathered

    def _announced_blocks(self) -> Iterator[int]:
        """Yield the indices of the blocks that other ranks announce in their forward pass."""
        while (index := self._announce(-1)) < len(self.blocks):
            yield index

    def reset_after_exception(self) -> None:
        """Discard the state of the last forward or backward pass if it raised an exception."""
        if is_fsdp_initialized(self.model) and was_fsdp_interrupted(self.model):
            self.root.reset_iter_state()

    def release_groups(self) -> None:
        """Delete the references to process groups. The model cannot be used afterwards."""
        for block in self.blocks:
            release_fsdp_groups(block)  # type: ignore[arg-type]

    def _has_gradients(self) -> bool:
        return any(after.grad is not None for _, after in self.replaced_parameters.values())

    def _copy_views(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        """Return `output`. If the parameters of the root block are freed after this forward pass with gradients,
        replace views with copies.

        An in-place operation on a view would discard the hook that gathers the parameters for the backward pass.
        """
        if not torch.is_grad_enabled() or not self._has_gradients():
            return output
        return tree_map_only(Tensor, lambda tensor: tensor.clone() if is_view(tensor) else tensor, output)

    def _announce(self, index: int) -> int:
        """Exchange and return the index of the block that is gathered next, or the number of blocks at the end of a
        forward pass. All ranks must call this method: the ranks that run the forward pass with this value, the others
        with -1."""
        return int(self.communicator.allreduce(torch.tensor(index, device="cpu"), "max"))

    @disable_compile
    def _before_forward(self) -> None:
        announce = self._announce if self._announces_next_forward else None
        self._announces_next_forward = False
        self.collectives.start_recording(announce)
        self._num_blocks_before_forward = count_post_forward_groups(self.model)

    def _free_after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self.free_complete_parameters()
            # Otherwise, the next backward pass would gather different blocks on the ranks that only took part in this
            # forward pass.
            truncate_post_forward_order(self.model, self._num_blocks_before_forward)
            self._gather_order[:] = self.collectives.gathered_blocks
            if self.collectives.on_gather is not None:
                self.collectives.on_gather(len(self.blocks))
                self.collectives.on_gather = None
            return
        if not self._gather_order:
            self._gather_order[:] = self.collectives.gathered_blocks
        if self._has_gradients():
            # Otherwise, model.parameters() would return the complete parameters of the root block, which have no
            # gradient, so clipping and model.zero_grad() before the backward pass would omit these gradients.
            self.free_complete_parameters()


class ShardedModel(nn.Module, WrappedModel):
    """The module that `distributed_model(shard="parameters")` returns. `module` is the user's model."""

    sharding_mode = "parameters"

    def __init__(
        self,
        sharded_parameters: ShardedParameters,
        rendezvous: Rendezvous,
        monitor: FailureMonitor,
        buffer_broadcaster: ForwardBufferBroadcaster | None,
        model_number: int,
    ) -> None:
        super().__init__()
        model = sharded_parameters.model
        self.module = model
        self.sharded_parameters = sharded_parameters
        self._monitor, self._rendezvous, self._buffer_broadcaster = monitor, rendezvous, buffer_broadcaster
        self._is_accumulating = self._has_left_group = False
        self._broadcasts_buffers = True
        self._last_backward = -1
        self._names, self._all_parameters = map(list, zip(*model.named_parameters(), strict=True))
        self._last_requires_grad = [parameter.requires_grad for parameter in self._all_parameters]
        self._gradient_tracker = LocalGradientTracker(
            unwrap_compiled(model),
            lambda: self._is_accumulating,
            completes_before_hooks=True,
            find_replacement=sharded_parameters.parameter_after_sharding,
        )
        self._model_number = model_number
        self._used_names: set[str] | None = set()  # None after the first backward pass has been checked
        self._handles: list[Any] = []
        self._copies: list[ShardedParameters] = []

    def add_copy(self, sharded_parameters: ShardedParameters) -> None:
        """Register `sharded_parameters`, whose model is a copy of the user's model. `leave_group` also releases the
        process groups of the copy."""
        sharded_parameters.share_gather_order(self.sharded_parameters)
        self._copies.append(sharded_parameters)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._has_left_group:
            raise ConfigError(
                "The model was called after backend.shutdown(), but its parameters are sharded across the ranks. Call "
                "the model before the shutdown, or load the saved weights into a new model."
            )
        has_gradients = torch.is_grad_enabled()
        self.sharded_parameters.reset_after_exception()
        if has_gradients:
            self._check_trainable_parameters()
            if self._buffer_broadcaster is not None:
                if self._broadcasts_buffers:  # otherwise an earlier forward pass of this step has broadcast them
                    self._buffer_broadcaster.broadcast()
                self._broadcasts_buffers = not self._is_accumulating
        output = self.module(*inputs, **kwargs)
        if has_gradients and (tensors := tensors_requiring_grad(output)):
            if self._used_names is not None and not self._handles:
                self._register_usage_hooks()
            forward = self._monitor.loop_counters.count_forward(is_training=self.module.training)
            for tensor in tensors:
                tensor.register_hook(lambda gradient: self._begin_backward(forward))
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backward passes accumulate gradients. Each pass also reduces its gradients, so each
        rank stores only its shard.
        """
        was_accumulating, self._is_accumulating = self._is_accumulating, True
        self._gradient_tracker.track()
        try:
            yield
        finally:
            self._is_accumulating = was_accumulating

    def check_reduced(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError if the last backward pass before the step was inside `no_sync`, or if a parameter of
        `optimizer` has a gradient and belongs to no distributed model.

        Re-raises another rank's ModelError if the report of that error has arrived. Also frees the complete parameters
        of the root block. Does not communicate.
        """
        if not self._has_left_group:
            self._monitor.raise_reported_model_error()
            self._monitor.loop_counters.count_step()
            self.sharded_parameters.free_complete_parameters()
            self._gradient_tracker.check(optimizer)

    def leave_group(self) -> None:
        """Release the process group. The model cannot be used afterwards."""
        if not self._has_left_group:
            self._has_left_group = True
            self._gradient_tracker.stop()
            for sharded_parameters in (self.sharded_parameters, *self._copies):
                sharded_parameters.release_groups()
            self._buffer_broadcaster = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise ModelError(
            f"The distributed {_class_name(self.module)} cannot be copied, because its parameters are sharded "
            "across the ranks. Copy the model before backend.distributed_model, or load "
            "backend.unwrap(model).state_dict() into a new model."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ModelError(
            f"The distributed {_class_name(self.module)} cannot be pickled, because its parameters are sharded "
            "across the ranks. Save its state: torch.save(backend.unwrap(model).state_dict(), path)."
        )

    def _check_trainable_parameters(self) -> None:
        """Raise ModelError if parameters were frozen or unfrozen differently across ranks.

        Only ranks on which parameters were frozen or unfrozen since the last call communicate.
        """
        requires_grad = [parameter.requires_grad for parameter in self._all_parameters]
        if requires_grad == self._last_requires_grad:
            return
        communicator = self.sharded_parameters.communicator
        check_requires_grad_changes(communicator, self._names, self._last_requires_grad, requires_grad)
        self._last_requires_grad = requires_grad

    @disable_compile
    def _begin_backward(self, forward: CountedForward) -> None:
        """Add functions that run at the end of the current backward pass. Called for each output that the pass
        reaches."""
        forward.mark_used()
        backward = current_backward()
        if backward == self._last_backward:
            return
        self._last_backward = backward
        if not self._is_accumulating:
            end_of_backward.add(BackwardStage.MARK_REDUCED, self._monitor.loop_counters.count_backward)
            if self._used_names is not None:
                end_of_backward.add(
                    BackwardStage.FIND_UNUSED_PARAMETERS, self._check_first_backward, self._model_number
                )

    def _register_usage_hooks(self) -> None:
        """Register hooks that record the names of the parameters that receive a gradient.

        Call it after the first forward pass, because the complete parameters do not exist before.
        """
        # Not `named_parameters()`: the parameters of the root block are currently the complete ones.
        names = {id(parameter): name for name, parameter in zip(self._names, self._all_parameters, strict=True)}
        for block in self.sharded_parameters.blocks:
            for record in fsdp_parameter_records(block):  # type: ignore[arg-type]
                complete, name = unsharded_parameter(record), names.get(id(record.sharded_param))
                if complete is not None and complete.requires_grad and name is not None:
                    hook = _create_recorder(name, self._used_names)
                    self._handles.append(complete.register_post_accumulate_grad_hook(hook))

    def _check_first_backward(self) -> None:
        """Raise ModelError on every rank if the first backward pass left a parameter unused on any rank.

        A rank calls it at the end of each reducing backward pass until a pass has used parameters.
        """
        if self._used_names is None:
            return
        pairs = zip(self._names, self._all_parameters, strict=True)
        names = [name for name, parameter in pairs if parameter.requires_grad]
        unused = [name for name in names if name not in self._used_names]
        if len(unused) == len(names):
            return  # this pass computed only gradients of the inputs, or of a model whose output is this model's input
        self._used_names = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        unused_by_rank = gather_unused(self._rendezvous, f"model/{self._model_number}", unused)
        if any(unused_by_rank):
            end_of_backward.add(
                BackwardStage.RAISE_ERRORS, lambda: raise_unused(unused_by_rank, suggests_find_unused=False)
            )


def _create_recorder(name: str, used_names: set[str] | None) -> Callable[[Tensor], None]:
    def record(_: Tensor) -> None:
        if used_names is not None:
            used_names.add(name)

    return record


def _class_name(model: nn.Module) -> str:
    model_class = type(model)
    return model_class.__mro__[2].__name__ if issubclass(model_class, FSDPModule) else model_class.__name__


def _precision_policy(module: nn.Module) -> MixedPrecisionPolicy:
    """Return the policy that makes the results equal to the results with replicated parameters.

    Parameters are gathered in their dtype, and autocast applies in the forward pass as without sharding. Gradients in
    half precision are summed in float32.
    """
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    reduce_dtype = torch.float32 if dtypes & set(HALF_DTYPES) else None
    return MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
