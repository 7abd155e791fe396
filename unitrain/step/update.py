"""The optimizer step, once the gradients are those of the global batch: plain torch, in the one right order."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unitrain.modules.averaging import WeightAverage
from unitrain.step.learning_rate import LearningRateFactor
from unitrain.step.planned_scheduler import PlannedScheduler
from unitrain.step.precision import Precision


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
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        # Those of the model that it does not hold have gradients too, which nobody else would drop.
        held = set(map(id, self._parameters))
        self._others = [parameter for parameter in model.parameters() if id(parameter) not in held]
        self._clip_norm, self._scheduler, self._average = clip_norm, scheduler, average
        self._gradient_norm: Tensor | None = None

    def __call__(self, step: int, rates: LearningRateFactor | None) -> None:
        """Update the parameters, with `step` steps done before, at the optimizer's learning rates times `rates`."""
        if self._clip_norm is not None:
            self._precision.unscale(self._optimizer)
            self._gradient_norm = nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        if rates is None:
            stepped = self._precision.step(self._optimizer)
        else:
            with rates.applied(self._optimizer, step):
                stepped = self._precision.step(self._optimizer)
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._others:
            parameter.grad = None
        if stepped and self._scheduler is not None:
            self._scheduler.step()
        if stepped and self._average is not None:
            self._average.follow()

    def known(self) -> dict[str, float]:
        """Return the "gradient_norm" of the last step, before it was clipped, where it is; waits for the device."""
        return {} if self._gradient_norm is None else {"gradient_norm": self._gradient_norm.item()}
