"""Backward pass and optimizer update of a training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unitrain.backends.gradients.local_gradients import register_gradient_hook
from unitrain.backends.sharding.optimizer_checks import has_modes
from unitrain.errors import ModelError
from unitrain.optim.ema import WeightAverage
from unitrain.optim.learning_rate import LearningRateFactor
from unitrain.optim.precision import Precision
from unitrain.optim.schedulers import PlannedScheduler, step_scheduler
from unitrain.torch_compat import queue_backward_callback

_MAX_INSPECTED_OBJECTS = 1000  # a loss function may refer to many other objects of the program


def backward(loss: Tensor, *overlapped: Callable[[], None]) -> None:
    """Run the backward pass of `loss`, and call the `overlapped` functions while gradients are reduced.

    The functions may call collectives if all ranks pass the same functions. They are not called if `loss` does not
    require grad; torch then raises an error.
    """

    def queue_calls(gradient: Tensor) -> None:
        # The autograd engine runs callbacks in the order in which they are queued. The callback that waits for the
        # gradients is queued after `overlapped`.
        for call in overlapped:
            queue_backward_callback(call)

    if overlapped and loss.requires_grad:  # without requires_grad, the backward pass below raises an error
        loss.register_hook(queue_calls)
    torch.autograd.backward(loss)


def block_gradients(loss: Tensor) -> Tensor:
    """Return `loss` with a backward pass that traverses the graph but changes no gradient.

    The backward pass of a dummy batch with weight 0 would create zero gradients for parameters that no sample of the
    step uses. Optimizers with weight decay or momentum change parameters with a zero gradient, but skip parameters
    without a gradient.
    """
    stopped: Tensor = _BlockGradients.apply(loss)
    return stopped


class _BlockGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


def optimizer_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the current parameters of `optimizer`, including parameters added by `add_param_group`."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class OptimizerMode:
    """The train and eval mode of optimizers such as those of schedulefree, which evaluate the model with other weights
    than those that they train, and exchange them in `optimizer.eval()` and `optimizer.train()`.

    The methods do nothing for an optimizer without modes.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._is_training = optimizer, False
        self._has_modes = has_modes(optimizer)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Context manager in which the optimizer is in train mode. Afterwards, it is in eval mode."""
        self._set_training(True)
        try:
            yield
        finally:
            self._set_training(False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager in which the optimizer is in eval mode."""
        was_training = self._is_training
        self._set_training(False)
        try:
            yield
        finally:
            self._set_training(was_training)

    def _set_training(self, is_training: bool) -> None:
        self._is_training = is_training
        if self._has_modes:
            optimizer: Any = self._optimizer
            (optimizer.train if is_training else optimizer.eval)()


class UntrainedParameters:
    """Finds trainable parameters that receive gradients although neither `model` nor `optimizer` contains them, among
    those to which `loss_fn` refers: in closures, global variables, attributes, or arguments of functools.partial."""

    def __init__(self, loss_fn: Any, model: nn.Module, optimizer: Optimizer) -> None:
        known_ids = set(map(id, chain(model.parameters(), optimizer_parameters(optimizer))))
        self._names: list[str] = []
        self._handles = [
            register_gradient_hook(parameter, lambda _, name=name: self._names.append(name))  # type: ignore[misc]
            for name, parameter in _referenced_parameters(loss_fn)
            if parameter.requires_grad and id(parameter) not in known_ids
        ]

    def check(self) -> None:
        """Raise ModelError if such a parameter has received a gradient."""
        self.stop()
        if self._names:
            raise untrained_loss_error(f"Trainer(loss_fn) uses {self._names[0]!r}")

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def untrained_loss_error(found: str) -> ModelError:
    """Return the error for trainable parameters of the loss function. `found` states a parameter."""
    return ModelError(
        f"{found}, a trainable parameter outside of the model, which the Trainer does not train. Make the loss a "
        "submodule of the model, and pass all parameters to the optimizer: model.criterion = loss_fn; "
        "Trainer(model, SGD(model.parameters(), ...), model.criterion). If the parameters are not to be trained, "
        "freeze them: loss_fn.requires_grad_(False)."
    )


def _referenced_parameters(function: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter to which `function` refers, with a name."""
    pending, seen = [("loss_fn", function)], set[int]()
    while pending and len(seen) < _MAX_INSPECTED_OBJECTS:
        name, value = pending.pop()
        if id(value) in seen or (isinstance(value, type | ModuleType | Tensor) and not isinstance(value, nn.Parameter)):
            continue
        seen.add(id(value))
        if isinstance(value, nn.Parameter):
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{key}", parameter) for key, parameter in value.named_parameters())
        elif isinstance(value, partial):
            pending += [(name, part) for part in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, MethodType):
            pending += [(name, value.__self__), (name, value.__func__)]
        elif isinstance(value, FunctionType):
            pending += [(key, default) for key, default in (value.__kwdefaults__ or {}).items()]
            pending += [(name, default) for default in value.__defaults__ or ()]
            with suppress(ValueError):  # a variable of the closure is not assigned
                variables = inspect.getclosurevars(value)
                pending += [*variables.globals.items(), *variables.nonlocals.items()]
        elif isinstance(value, list | tuple):
            pending += [(f"{name}[{index}]", item) for index, item in enumerate(value)]
        else:
            items = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            pending += [(f"{name}.{key}", item) for key, item in items.items()]


class ParameterUpdate:
    """Updates the parameters: unscale, clip, optimizer step, zero_grad, scheduler, weight average.

    The gradients are already reduced, so only sharded optimizers and sharded gradients require communication. The
    gradient norm of the optimizer's parameters is clipped to `max_grad_norm`. `scheduler` steps after each update. If
    fp16 skips a step, `scheduler` and `average` do not change.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        precision: Precision,
        *,
        loss_fn: Any,
        max_grad_norm: float | None,
        scheduler: LRScheduler | PlannedScheduler | None,
        average: WeightAverage | None = None,
    ) -> None:
        self._optimizer, self._precision, self._loss_fn = optimizer, precision, loss_fn
        self._untrained: UntrainedParameters | None = None  # until the first step of `fit`
        # Gradients of parameters outside the optimizer must also be cleared.
        self._model, self._outside_parameters = model, list[nn.Parameter]()
        self._num_optimizer_parameters = -1
        self._max_grad_norm, self._scheduler, self._average = max_grad_norm, scheduler, average
        self._gradient_norm: Tensor | None = None

    def begin_fit(self) -> None:
        """Let the next update raise ModelError if `loss_fn` has parameters with gradients that are not trained."""
        if self._untrained is not None:
            self._untrained.stop()
        self._untrained = UntrainedParameters(self._loss_fn, self._model, self._optimizer)

    def __call__(self, step: int, factor: LearningRateFactor | None) -> None:
        """Update the parameters after `step` completed steps. Learning rates are multiplied by `factor`."""
        if self._untrained is not None:
            self._untrained.check()
            self._untrained = None
        if self._max_grad_norm is not None:
            self._precision.unscale(self._optimizer)
            self._gradient_norm = nn.utils.clip_grad_norm_(optimizer_parameters(self._optimizer), self._max_grad_norm)
        if factor is None:
            has_stepped = self._precision.step(self._optimizer)
        else:
            with factor.scaled_rates(self._optimizer, step):
                has_stepped = self._precision.step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters_outside_optimizer():
            parameter.grad = None
        if has_stepped and self._scheduler is not None:
            step_scheduler(self._scheduler)
        if has_stepped and self._average is not None:
            self._average.update()

    def _parameters_outside_optimizer(self) -> list[nn.Parameter]:
        """Return the parameters of the model that are not in the optimizer."""
        num_parameters = 0
        for group in self._optimizer.param_groups:
            num_parameters += len(group["params"])
        if num_parameters != self._num_optimizer_parameters:  # in the first step, or after add_param_group
            optimizer_parameter_ids = set(map(id, optimizer_parameters(self._optimizer)))
            self._num_optimizer_parameters = num_parameters
            self._outside_parameters = [
                parameter for parameter in self._model.parameters() if id(parameter) not in optimizer_parameter_ids
            ]
        return self._outside_parameters

    def gradient_norm(self) -> dict[str, float]:
        """Return {"gradient_norm": norm before clipping} of the last step; empty without clipping. Synchronizes with
        the device."""
        return {} if self._gradient_norm is None else {"gradient_norm": self._gradient_norm.item()}
