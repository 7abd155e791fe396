"""Track unreduced gradients, so that no optimizer step uses them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from unitrain.backends.base import Communicator
from unitrain.backends.sharding.gradient import ShardedGradient
from unitrain.errors import ModelError
from unitrain.torch_compat import current_backward, local_shard
from unitrain.validation import describe_value

_MAX_SHOWN = 5
# The hooks of `register_step_check` by optimizer and model.
_step_check_handles: WeakKeyDictionary[torch.optim.Optimizer, WeakKeyDictionary[nn.Module, RemovableHandle]] = (
    WeakKeyDictionary()
)


class LocalGradientTracker:
    """Tracks the parameters of `model` that have a local gradient: a `.grad` with values that are not reduced over
    ranks.

    By default, a hook on each parameter marks the gradient as local in every backward pass that adds to the gradient,
    regardless of how the forward pass is called and of the type of its output. The reducer calls `mark_reduced`.

    With `is_accumulating`, hooks are registered only by `track`. This is for two cases:

    - If every backward pass outside `no_sync` leaves all gradients reduced, as on a single rank, call `track` at the
      first `no_sync`, because no gradient is local before then. The hooks call `is_accumulating`, which returns whether
      the model is inside `no_sync`. A backward pass outside `no_sync` leaves no local gradient.
    - A reducer that determines itself which gradients are local calls `mark_local` and `mark_reduced` instead of
      `track`.

    `completes_before_hooks` states that a gradient is reduced before its post-accumulate hooks run, so that an
    optimizer may step in such a hook. `find_replacement` returns the parameter of `model` that has replaced a
    parameter, or the parameter itself.
    """

    _instances: ClassVar[WeakSet[LocalGradientTracker]] = WeakSet()
    # The optimizers that were not passed to `distributed_optimizer`, after their first step.
    _other_optimizers: ClassVar[WeakKeyDictionary[torch.optim.Optimizer, _OutsideParameters]] = WeakKeyDictionary()

    def __init__(
        self,
        model: nn.Module,
        is_accumulating: Callable[[], bool] | None = None,
        *,
        completes_before_hooks: bool = False,
        find_replacement: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        _install_check_of_all_optimizers()
        self._completes_before_hooks, self._find_replacement = completes_before_hooks, find_replacement
        self._parameters = list(model.parameters())
        self._names_by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        self._parameter_ids = frozenset(self._names_by_id)
        # A set of ids, not of tensors: the hooks refer to this set, and a hook that refers to parameters would keep a
        # deleted model in memory.
        self._local_ids: set[int] = set()
        self._ids_outside_reducer = frozenset[int]()
        # If two models share a parameter, its gradient counts as reduced in both as soon as one of them has reduced it.
        self._trackers_with_shared_parameters: WeakSet[LocalGradientTracker] = WeakSet(
            other
            for other in LocalGradientTracker._instances
            if not self._names_by_id.keys().isdisjoint(other._names_by_id)
        )
        for other in self._trackers_with_shared_parameters:
            other._trackers_with_shared_parameters.add(self)
            other._has_shared_parameters = True
        self._has_shared_parameters: bool = len(self._trackers_with_shared_parameters) > 0
        LocalGradientTracker._instances.add(self)
        self._is_accumulating = is_accumulating
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove_hooks, self._handles).atexit = False
        self._last_reducing_backward = -1
        if is_accumulating is None:
            self.track()

    def track(self) -> None:
        """Register the hooks. Further calls do nothing."""
        if not self._handles:
            self._handles += [
                register_gradient_hook(parameter, self._create_hook(id(parameter)))
                for parameter in self._parameters
                if parameter.is_floating_point() or parameter.is_complex()
            ]

    def _create_hook(self, parameter_id: int) -> Callable[[Tensor], None]:
        """Return the hook of the parameter with this id. The hook has a weak reference to this tracker, because
        parameters can outlive the tracker."""
        local, weak_self = self._local_ids, weakref.ref(self)
        if self._is_accumulating is None:
            return lambda _: local.add(parameter_id)

        def on_gradient(_: Tensor) -> None:
            if (tracker := weak_self()) is not None and tracker._record_backward(parameter_id):
                local.add(parameter_id)
            else:
                local.clear()

        return on_gradient

    def _record_backward(self, parameter_id: int) -> bool:
        """Record whether the current backward pass reduces gradients, and return whether it accumulates the gradient of
        the parameter with this id without reducing this gradient.

        If several models share the parameter and only some of them are inside `no_sync`, the pass reduces the gradient
        if it has already reached a parameter that belongs only to models outside `no_sync`.
        """
        trackers = [self]
        if self._has_shared_parameters:
            trackers += [other for other in self._trackers_with_shared_parameters if parameter_id in other._names_by_id]
        reducing = [tracker for tracker in trackers if not (tracker._is_accumulating and tracker._is_accumulating())]
        backward = current_backward()
        if len(reducing) == len(trackers):
            self._last_reducing_backward = backward
            return False
        return all(tracker._last_reducing_backward != backward for tracker in reducing)

    def set_reduced_parameters(self, reduced: Iterable[Tensor]) -> None:
        """Restrict `mark_reduced` to the parameters in `reduced`, whose gradients the reducer reduces."""
        self._ids_outside_reducer = frozenset(self._names_by_id.keys() - set(map(id, reduced)))

    def mark_local(self, parameter: Tensor) -> None:
        """Mark the gradient of `parameter` as local."""
        self._local_ids.add(id(parameter))

    def mark_reduced(self) -> None:
        """Mark the gradients of the reduced parameters as reduced, also in other trackers that share these parameters.
        Every rank calls this at the end of a backward pass that reduces them."""
        self._last_reducing_backward = current_backward()
        local = self._local_ids
        if self._ids_outside_reducer:
            local &= self._ids_outside_reducer
        else:
            local.clear()
        if not self._has_shared_parameters:  # iterating over a WeakSet takes a microsecond
            return
        for tracker in self._trackers_with_shared_parameters:
            tracker._local_ids -= self._names_by_id.keys() - self._ids_outside_reducer

    def parameters_with_local_gradients(self) -> list[Tensor]:
        """Return the parameters with local values in `.grad`, including those whose `.grad` was set to None later."""
        return [parameter for parameter in self._parameters if id(parameter) in self._local_ids]

    def stop(self) -> None:
        """Remove the hooks from the parameters, and end the tracking."""
        _remove_hooks(self._handles)
        self._local_ids.clear()
        LocalGradientTracker._instances.discard(self)

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError if a parameter of `optimizer` has a local gradient that is not zero, or has a gradient and
        belongs to no distributed model."""
        if not all(self._parameter_ids.issuperset(map(id, group["params"])) for group in optimizer.param_groups):
            self._check_unknown_parameters(optimizer)
        if self._local_ids:
            self._check_local_gradients(optimizer)

    def _check_local_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        by_id = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
        # A gradient that was set to None or zero after the backward pass contains no local values.
        names = [
            self._names_by_id[key]
            for key in self._names_by_id
            if key in self._local_ids and key in by_id and _may_be_nonzero(by_id[key].grad)
        ]
        if names:
            raise ModelError(
                f"optimizer.step() was called on gradients that are not reduced over ranks: {_summarize(names)}. Call "
                "the model that backend.distributed_model returned, and run the last backward pass before each step "
                "outside backend.no_sync. To add the gradient of another loss, such as a penalty, run its backward "
                "pass before the last one."
            )

    def _check_unknown_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        if unknown := _parameters_outside_all_models(optimizer):
            raise _error_for_parameters_outside_all_models(unknown)

    def check_not_replaced(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError if `optimizer` has parameters that shards have replaced in the model."""
        if self._find_replacement is None:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (replacement := self._find_replacement(parameter)) is not parameter:
                    raise ModelError(
                        "optimizer.step() was called on parameters that backend.distributed_model(model, "
                        f"shard='parameters') has replaced, such as {self._names_by_id.get(id(replacement))!r}, so it "
                        "would not change the model. Distribute the optimizer before its first step: optimizer = "
                        'backend.distributed_optimizer(optimizer, model, shard="parameters").'
                    )

    def check_not_in_backward(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ModelError if a hook steps `optimizer` in a backward pass that has not yet reduced the gradients of its
        parameters."""
        if self._completes_before_hooks or self._last_reducing_backward == current_backward():
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and (name := self._names_by_id.get(id(parameter))) is not None:
                    raise ModelError(
                        f"optimizer.step() was called in a hook during the backward pass, in which the gradient of "
                        f"parameter {name!r} is not yet reduced over ranks. Call optimizer.step() after backward() has "
                        'returned, or use shard="parameters", which reduces each gradient before it calls hooks.'
                    )


@functools.cache
def _install_check_of_all_optimizers() -> None:
    register_optimizer_step_pre_hook(step_pre_hook(_check_any_optimizer))


def _check_any_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ModelError if `optimizer`, which may not have been passed to `distributed_optimizer`, would update
    parameters with gradients that are not reduced. Called before each step of all optimizers."""
    trackers, others = list(LocalGradientTracker._instances), LocalGradientTracker._other_optimizers
    if current_backward() != -1:
        for tracker in trackers:
            tracker.check_not_in_backward(optimizer)
    elif trackers and optimizer not in _step_check_handles:
        for tracker in trackers:
            if tracker._local_ids:
                tracker._check_local_gradients(optimizer)
        if optimizer in others:
            others[optimizer].check()
        else:
            for tracker in trackers:
                tracker.check_not_replaced(optimizer)
            others[optimizer] = _OutsideParameters(_parameters_outside_all_models(optimizer))


class _OutsideParameters:
    """Finds out whether backward passes that reduce the gradients of distributed models also compute gradients of
    `parameters`, which belong to no distributed model, such as the weights of a loss function.

    It is created in the first step of an optimizer that was not passed to `distributed_optimizer`, and observes the
    backward passes until its second step. Parameters with separate backward passes may be trained on each rank
    separately.
    """

    def __init__(self, parameters: list[Tensor]) -> None:
        self._parameters = parameters
        self._last_backward, self._has_distributed_backward = -1, False
        self._handles = [register_gradient_hook(parameter, self._on_gradient) for parameter in parameters]

    def _on_gradient(self, _: Tensor) -> None:
        if (backward := current_backward()) != self._last_backward:
            self._end_backward()
            self._last_backward = backward

    def _end_backward(self) -> None:
        trackers = [tracker for tracker in LocalGradientTracker._instances if not tracker._completes_before_hooks]
        if any(tracker._last_reducing_backward == self._last_backward != -1 for tracker in trackers):
            self._has_distributed_backward = True

    def check(self) -> None:
        """Raise ModelError if a backward pass of a distributed model has computed a gradient. End the observation."""
        if not self._handles:
            return
        self._end_backward()
        if self._has_distributed_backward:
            raise _error_for_parameters_outside_all_models(self._parameters)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._parameters.clear()


def _parameters_outside_all_models(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the parameters of `optimizer` that have a gradient and belong to no distributed model."""
    known_ids = {key for instance in LocalGradientTracker._instances for key in instance._names_by_id}
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return [parameter for parameter in parameters if id(parameter) not in known_ids and parameter.grad is not None]


def _error_for_parameters_outside_all_models(parameters: list[Tensor]) -> ModelError:
    shapes = [str(list(parameter.shape)) for parameter in parameters]
    count, noun = ("1 parameter", "shape") if len(shapes) == 1 else (f"{len(shapes)} parameters", "shapes")
    more = ", ..." if len(shapes) > _MAX_SHOWN else ""
    return ModelError(
        f"The optimizer holds {count} outside of all distributed models, with {noun} "
        f"{', '.join(shapes[:_MAX_SHOWN])}{more}. The gradients of such parameters are never reduced "
        "over ranks. Add the parameters to the model before backend.distributed_model, or also pass their "
        "module to backend.distributed_model."
    )


def register_step_check(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    check: Callable[[torch.optim.Optimizer], None],
    communicator: Communicator | None = None,
) -> None:
    """Register a hook that calls `check` in each step of `optimizer` before parameters are updated. If the step has a
    closure, the hook calls `check` after each call of the closure.

    With a `communicator`, if the optimizer may base decisions on the value of the closure, such as the number of calls
    in a line search of LBFGS, the closure returns the mean over ranks, so that all ranks make the same decisions.

    `check` replaces the check of an earlier call for the same optimizer and `model`, the user's module. Otherwise, the
    hook would keep the module that an earlier call of `distributed_model` returned, with its buckets, in memory.
    """
    uses_value = isinstance(optimizer, torch.optim.LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")
    average = partial(_mean_of_closure_values, communicator) if communicator is not None and uses_value else None
    handles = _step_check_handles.setdefault(optimizer, WeakKeyDictionary())
    if (handle := handles.pop(model, None)) is not None:
        handle.remove()
    handles[model] = optimizer.register_step_pre_hook(step_pre_hook(check, average))


def step_pre_hook(
    check: Callable[[torch.optim.Optimizer], None], convert_value: Callable[[Any], Any] | None = None
) -> Callable[..., Any]:
    """Return a step pre-hook that calls `check`. If the step has a closure, the hook calls `check` after each call of
    the closure, and the closure returns the result of `convert_value` for its value."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            check(optimizer)
            return None

        def closure_with_check() -> Any:
            value = closure()
            check(optimizer)
            return value if convert_value is None else convert_value(value)

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closure_with_check}
        return (args[0], closure_with_check, *args[2:]), kwargs

    return before_step  # type: ignore[no-any-return]


def _mean_of_closure_values(communicator: Communicator, value: Any) -> Any:
    """Return the mean over ranks of `value`, a number or a tensor with one element, in the type of `value`. The result
    is None if the value is None on every rank. Raises ModelError on every rank for other values."""
    is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    is_number = is_number or (isinstance(value, int | float) and not isinstance(value, bool))
    number = torch.zeros((), dtype=torch.float64, device=communicator.device)
    if is_number:
        number = torch.as_tensor(value, device=communicator.device).detach().reshape(()).double()
    kinds = torch.tensor([float(is_number), float(value is None)], dtype=torch.float64, device=communicator.device)
    # One collective per call. The float64 mean of equal numbers is exact, apart from the rounding of the division.
    total, num_numbers, num_missing = communicator.allreduce(torch.stack([number, *kinds]), "sum").unbind()
    if num_missing == communicator.size:
        return None
    if num_numbers != communicator.size:
        raise ModelError(
            f"The closure of an optimizer step returned {describe_value(value)} on rank {communicator.rank}, but the "
            "optimizer may base decisions on this value, so the ranks exchange it. Return the loss on every rank: a "
            "number, or a tensor with one element."
        )
    mean = total / communicator.size
    return mean.to(value.device, value.dtype).reshape(value.shape) if isinstance(value, Tensor) else mean.item()


def register_gradient_hook(parameter: Tensor, hook: Callable[[Tensor], None]) -> Any:
    """Register `hook` as a post-accumulate-grad hook, even on a frozen parameter that may be unfrozen later."""
    requires_grad = parameter.requires_grad
    try:
        return parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        parameter.requires_grad_(requires_grad)


def _remove_hooks(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _may_be_nonzero(gradient: Tensor | None) -> bool:
    if isinstance(gradient, ShardedGradient):
        return not gradient.is_zero
    # A shard counts as nonzero: it may be zero on some ranks only, and all ranks must raise the same error.
    return gradient is not None and (local_shard(gradient) is not gradient or bool(gradient.any()))


def _summarize(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_SHOWN} more" if len(names) > _MAX_SHOWN else ""
    count = "1 parameter" if len(names) == 1 else f"{len(names)} parameters"
    return f"{count}, {', '.join(names[:_MAX_SHOWN])}{more}"
