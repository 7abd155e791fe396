"""A moving average of a model's weights, which often generalises better than the weights themselves.

Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging (1992); the exponential form as in Tarvainen
and Valpola, Mean teachers (arXiv 1703.01780).
"""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from unitrain.errors import ModelError


class WeightAverage:
    """Follows the weights of `model`: after each step, average = decay * average + (1 - decay) * weight.

    The first step's average is the weights themselves, as with torch's AveragedModel; buffers are copied. `model` is a
    copy of the user's module, under the same names. Weights are the same on every rank, so nothing is communicated.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Raise ModelError for a model that cannot be copied."""
        self._followed, self.model = model, _copy(model)
        self._average = get_ema_multi_avg_fn(decay)
        self._weights, self._averaged = list(model.parameters()), list(self.model.parameters())
        # Frozen parameters may hold integers, as quantized ones do; these have no mean, and are copied.
        pairs = [pair for pair in zip(self._averaged, self._weights, strict=True) if _has_mean(pair[0])]
        self._moving, self._towards = [averaged for averaged, _ in pairs], [weight for _, weight in pairs]
        self._steps = 0

    @classmethod
    def of(cls, model: nn.Module, decay: float | None) -> Self | None:
        """Return what follows `model`, None without a decay."""
        return None if decay is None else cls(model, decay)

    def begin(self) -> None:
        """Take the weights over, now that they are rank 0's, unless an average was loaded."""
        if not self._steps:
            self._copy_weights()
            self._copy_buffers()

    @torch.no_grad()
    def follow(self) -> None:
        """Take in the weights after a step."""
        if self._steps:
            self._average(self._moving, self._towards, self._steps)
            self._copy_integers()
        else:
            self._copy_weights()
        self._copy_buffers()
        self._steps += 1

    def state_dict(self) -> dict[str, Any]:
        """The average, under the user's own names, and of how many steps it is."""
        return {"steps": self._steps, "model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's average; one that has none leaves it to `begin`."""
        if state:
            self.model.load_state_dict(state["model"])
            self._steps = state["steps"]

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for averaged, weight in zip(self._averaged, self._weights, strict=True):
            averaged.copy_(weight)

    def _copy_integers(self) -> None:
        for averaged, weight in zip(self._averaged, self._weights, strict=True):
            if not _has_mean(averaged):
                averaged.copy_(weight)

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        for copied, buffer in zip(self.model.buffers(), self._followed.buffers(), strict=True):
            copied.copy_(buffer)


def _has_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model).requires_grad_(False)
    except Exception as error:  # whatever the model's own parts raise
        raise ModelError(
            f"ema_decay averages into a copy of the model, and {type(model).__name__} cannot be copied: {error}. "
            "Let copy.deepcopy(model) work, or leave ema_decay out."
        ) from error
