"""The optimizer step, once the gradients are those of the global batch: plain torch, in the one right order."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unitrain.modules.averaging import WeightAverage
from unitrain.step.learning_rate import LearningRateFactor
from unitrain.step.planned_scheduler import PlannedScheduler
from unitrain.step.precision import Precision


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
