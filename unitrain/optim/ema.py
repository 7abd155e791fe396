"""Exponential moving average of the weights of a model.

Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging (1992); the exponential form as in Tarvainen
and Valpola, Mean teachers (arXiv 1703.01780).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from typing_extensions import Self

from unitrain.backends.tensors import copy_into
from unitrain.errors import ModelError
from unitrain.modules.buffers import load_state
from unitrain.torch_compat import foreach_add_, foreach_copy_, foreach_mul_, local_shard

_WIDE_DTYPES = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class WeightAverage:
    """Averages the weights of a model: average = decay * average + (1 - decay) * weight after each step.

    After the first step the average is equal to the weights, as in torch's AveragedModel. Buffers are copied. The
    attribute `model` is a copy of the user's module with the averaged weights. The weights are equal on all ranks, so
    averaging requires no communication.

    Averages of weights in half precision have float32 precision, because the change in one step is smaller than the
    rounding errors of half precision. `stored_model`, which is saved in checkpoints, contains these averages, and
    `model` contains rounded copies. Without weights in half precision, both are the same object.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Copy `model`. Raises ModelError if it cannot be copied."""
        self._source_model, self.model = model, _copy_model(model)
        self.stored_model = self.model
        if any(parameter.dtype in _WIDE_DTYPES for parameter in model.parameters()):
            self.stored_model = _copy_model(model)
            for parameter in self.stored_model.parameters():
                parameter.data = parameter.data.to(_WIDE_DTYPES.get(parameter.dtype, parameter.dtype))
        self._decay, self._update_averages = decay, get_ema_multi_avg_fn(decay)
        self._store_weight_references()
        self._steps = self._pending_steps = 0

    @classmethod
    def create(cls, model: nn.Module, decay: float | None) -> Self | None:
        """Return an average of the weights of `model`, or None if `decay` is None."""
        return None if decay is None else cls(model, decay)

    def start(self) -> None:
        """Initialize the average with the weights, unless an average was loaded. Call it after the weights are
        broadcast and the parameters of both models are sharded.
        """
        self._store_weight_references()
        if not self._steps:
            self._copy_weights()
            self._copy_buffers()

    def count_step(self) -> None:
        """Count a step whose weights are not averaged, because the weights of the ranks differ."""
        self._pending_steps += 1

    def discard_counted_steps(self) -> None:
        """Discard the steps since the last update. Call it after loading other weights."""
        self._pending_steps = 0

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step. After n calls of `count_step`, the factor is decay**(n + 1). The first
        update copies the weights."""
        steps, self._pending_steps = self._pending_steps + 1, 0
        if self._steps:
            decay = self._decay**steps
            update = self._update_averages if steps == 1 else get_ema_multi_avg_fn(decay)
            if self._floating_averages:
                update(self._floating_averages, self._floating_weights, self._steps)
            if self._wide_averages:
                foreach_mul_(self._wide_averages, decay)
                foreach_add_(self._wide_averages, self._half_weights, alpha=1 - decay)
            self._copy_integers()
            self.round_averages()
        else:
            self._copy_weights()
        self._copy_buffers()
        self._steps += steps

    def state_dict(self) -> dict[str, Any]:
        """Return the averaged weights, the number of steps that they include, and the number of steps since then."""
        return {"steps": self._steps, "pending_steps": self._pending_steps, "model": self.stored_model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the average from a checkpoint. An empty state does not change the average.

        With a sharded checkpoint, which stores the averaged weights separately, the state has no "model". Averages in
        half precision, from an earlier version of unitrain, are converted.
        """
        if "model" in state:
            load_state(self.stored_model, state["model"])
            self.round_averages()
        self._steps = state.get("steps", self._steps)
        self._pending_steps = state.get("pending_steps", 0)

    def _store_weight_references(self) -> None:
        """Store references to the parameters of both models. If parameters are sharded, each rank averages its
        shards."""
        self._weights = [local_shard(parameter) for parameter in self._source_model.parameters()]
        self._averages = [local_shard(parameter) for parameter in self.stored_model.parameters()]
        # Frozen parameters may be integers, as in quantized models. They cannot be averaged and are copied.
        pairs = [pair for pair in zip(self._averages, self._weights, strict=True) if _can_be_averaged(pair[0])]
        self._floating_averages = [averaged for averaged, weight in pairs if averaged.dtype == weight.dtype]
        self._floating_weights = [weight for averaged, weight in pairs if averaged.dtype == weight.dtype]
        self._wide_averages = [averaged for averaged, weight in pairs if averaged.dtype != weight.dtype]
        self._half_weights = [weight for averaged, weight in pairs if averaged.dtype != weight.dtype]

    @torch.no_grad()
    def _copy_weights(self) -> None:
        for averaged, weight in zip(self._averages, self._weights, strict=True):
            averaged.copy_(weight)
        self.round_averages()

    @torch.no_grad()
    def round_averages(self) -> None:
        """Copy the averages from `stored_model` to `model`. Call it after loading weights into `stored_model`."""
        if self.stored_model is not self.model:
            foreach_copy_([local_shard(parameter) for parameter in self.model.parameters()], self._averages)

    def _copy_integers(self) -> None:
        for averaged, weight in zip(self._averages, self._weights, strict=True):
            if not _can_be_averaged(averaged):
                averaged.copy_(weight)

    @torch.no_grad()
    def _copy_buffers(self) -> None:
        for model in {id(model): model for model in (self.model, self.stored_model)}.values():
            for copied, buffer in zip(model.buffers(), self._source_model.buffers(), strict=True):
                copy_into(copied, buffer)


def _can_be_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _copy_model(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model).requires_grad_(False)
    except Exception as error:  # copying a module may raise any exception
        raise ModelError(
            f"ema_decay needs a copy of the model, but {type(model).__name__} cannot be copied: {error}. "
            "Make the model copyable by copy.deepcopy, or leave ema_decay out."
        ) from error
