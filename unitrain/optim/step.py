"""A backward, what can be done at its end while gradients travel, and the backward of a dummy batch.

From a batch to what the loss and the metrics are given: the output of the model, and the target.

The optimizer step, once the gradients are those of the global batch: plain torch, in the one right order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unitrain.errors import ConfigError, DataError, ModelError
from unitrain.optim.ema import WeightAverage
from unitrain.optim.learning_rate import LearningRateFactor
from unitrain.optim.precision import Precision
from unitrain.optim.schedulers import PlannedScheduler


def backward(loss: Tensor, *beside: Callable[[], None]) -> None:
    """Run the backward from `loss`, and call each of `beside` when it is over on this rank: all gradients are on their
    way, and nobody waits for them yet. They may talk to the other ranks, where all ranks pass alike."""

    def ask(gradient: Tensor) -> None:
        # What waits for the gradients asks the engine later than this, and is called back in that order.
        for call in beside:
            Variable._execution_engine.queue_callback(call)

    if beside and loss.requires_grad:  # where it does not, torch says so
        loss.register_hook(ask)
    torch.autograd.backward(loss)


def without_gradients(loss: Tensor) -> Tensor:
    """Return `loss`, whose backward runs through the whole graph and leaves every gradient as it is.

    A dummy batch with weight 0 would give zeros to parameters that no sample of the step has reached, and an optimizer
    with weight decay or momentum changes a parameter whose gradient is zero, but not one without a gradient.
    """
    stopped: Tensor = _WithoutGradients.apply(loss)
    return stopped


class _WithoutGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


# (model, batch) -> (output, target), both whatever the loss and the metrics take.
ForwardFunction = Callable[[nn.Module, Any], tuple[Any, Any]]


class Forward:
    """Calls a model on a batch, by the user's own function where there is one.

    Without one a batch is a pair (inputs, targets), and the model is called with the inputs. Raises ConfigError for
    what is not a function, DataError for a batch that is no pair, ModelError where the function returns none.
    """

    def __init__(self, function: ForwardFunction | None) -> None:
        if function is not None and (not callable(function) or isinstance(function, type)):
            raise ConfigError(
                f"Trainer(forward=...) takes a function, got {function!r}. "
                "Use forward=lambda model, batch: (model(batch[0]), batch[1])."
            )
        self._function = function

    def __call__(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """Return (output, target)."""
        if self._function is None:
            inputs, target = input_and_target(batch)
            return model(inputs), target
        result = self._function(model, batch)
        if isinstance(result, tuple) and len(result) == 2:
            return result
        raise ModelError(
            f"forward must return a pair (output, target), got {_described(result)}. End it with: return output, target"
        )

    def output(self, model: nn.Module, batch: Any) -> Any:
        """Return the output alone; without a function, also of a batch that has inputs and no targets."""
        if self._function is None:
            if isinstance(batch, (list, tuple)) and len(batch) == 1:
                return model(batch[0])
            if not isinstance(batch, (list, tuple)):
                return model(batch)
        return self(model, batch)[0]


def input_and_target(batch: Any) -> tuple[Any, Any]:
    """Take a batch apart. Raises DataError unless it is a pair."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(
        f"A batch must be a pair (inputs, targets), got {_described(batch)}. Tell the Trainer what to do with another: "
        f"Trainer(..., forward=lambda model, batch: {_example(batch)})."
    )


def _described(found: Any) -> str:
    kind = type(found).__name__
    if isinstance(found, Tensor):
        return f"a {kind} of shape {list(found.shape)}"
    if isinstance(found, Mapping):
        return f"a {kind} with {', '.join(map(repr, found)) or 'nothing in it'}"
    return f"a {kind} of {len(found)}" if isinstance(found, (list, tuple)) else f"a {kind}"


def _example(batch: Any) -> str:
    """Return what `forward` could be for such a batch."""
    if isinstance(batch, Mapping) and len(batch) > 1:
        first, *_, last = batch
        return f"(model(batch[{first!r}]), batch[{last!r}])"
    if isinstance(batch, (list, tuple)) and len(batch) > 2:
        return "(model(*batch[:-1]), batch[-1])"
    if isinstance(batch, (list, tuple, Mapping)) and batch:
        part = f"batch[{next(iter(batch))!r}]" if isinstance(batch, Mapping) else "batch[0]"
        return f"(model({part}), {part})"
    return "(model(batch), batch)" if isinstance(batch, Tensor) else "(model(batch.x), batch.y)"


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return the parameters that `optimizer` holds now: `add_param_group` may have added some during the run."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Update:
    """Unscale, clip, step, zero, schedule, average. Ranks do the same on equal numbers, so nothing is communicated.

    What is clipped is the gradient of what `optimizer` holds. `scheduler` is one that follows steps, or None, and
    `average` follows the weights. A step that fp16 skips moves neither.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        precision: Precision,
        *,
        clip_norm: float | None,
        scheduler: LRScheduler | PlannedScheduler | None,
        average: WeightAverage | None = None,
    ) -> None:
        self._optimizer, self._precision = optimizer, precision
        # The optimizer may not hold all of them; nobody else would drop the gradients of the others.
        self._model, self._others = model, list[nn.Parameter]()
        self._held = -1
        self._clip_norm, self._scheduler, self._average = clip_norm, scheduler, average
        self._gradient_norm: Tensor | None = None

    def __call__(self, step: int, rates: LearningRateFactor | None) -> None:
        """Update the parameters, with `step` steps done before, at the optimizer's learning rates times `rates`."""
        if self._clip_norm is not None:
            self._precision.unscale(self._optimizer)
            self._gradient_norm = nn.utils.clip_grad_norm_(parameters_of(self._optimizer), self._clip_norm)
        if rates is None:
            stepped = self._precision.step(self._optimizer)
        else:
            with rates.applied(self._optimizer, step):
                stepped = self._precision.step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._not_held():
            parameter.grad = None
        if stepped and self._scheduler is not None:
            self._scheduler.step()
        if stepped and self._average is not None:
            self._average.follow()

    def _not_held(self) -> list[nn.Parameter]:
        """Return the parameters of the model that the optimizer does not hold."""
        held = 0
        for group in self._optimizer.param_groups:
            held += len(group["params"])
        if held != self._held:  # the first step, or the user has added some
            known = set(map(id, parameters_of(self._optimizer)))
            self._held = held
            self._others = [parameter for parameter in self._model.parameters() if id(parameter) not in known]
        return self._others

    def known(self) -> dict[str, float]:
        """Return the "gradient_norm" of the last step, before it was clipped, where it is; waits for the device."""
        return {} if self._gradient_norm is None else {"gradient_norm": self._gradient_norm.item()}
