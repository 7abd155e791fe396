"""Histograms of parameters and gradients for the loggers, similar to `wandb.watch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unitrain.backends.sharding.state_format import gather_complete_tensor
from unitrain.callbacks.callback import Callback, RunningTrainer
from unitrain.errors import ConfigError


class Histograms(Callback):
    """Logs a histogram of each parameter and of its gradient in every `every`-th step, on rank 0.

    Gradients are the reduced gradients of the global batch, before clipping and without the fp16 loss scale, whereas
    `wandb.watch` logs the gradients of one rank. With `local_sgd`, the parameters and gradients of rank 0 are logged.
    Sharded gradients are gathered one at a time. The names are "parameters/NAME" and "gradients/NAME". The CSV logger
    ignores histograms. Non-finite values are omitted. Each logged step copies all logged parameters and gradients to
    the host.
    """

    def __init__(self, *, every: int = 1000, parameters: bool = True, gradients: bool = True) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigError(f"Histograms.every must be an integer of at least 1, got {every!r}. Use 1000.")
        if not (parameters or gradients):
            raise ConfigError(
                "Histograms(parameters=False, gradients=False) has nothing to log. Use Histograms(parameters=False)."
            )
        self.every, self.parameters, self.gradients = every, parameters, gradients

    def on_before_optimizer_step(self, trainer: RunningTrainer) -> None:
        """Log the gradients, and the parameters before the update."""
        if (trainer.progress.step + 1) % self.every:
            return
        scale, is_logging_rank = trainer.loss_scale, trainer.backend.rank == 0
        for name, parameter in trainer.backend.unwrap(trainer.model).named_parameters():
            if self.parameters:
                complete = gather_complete_tensor(parameter, trainer.backend)
                if is_logging_rank:
                    trainer.log_histogram(f"parameters/{name}", complete)
            gradient: Any = parameter.grad
            if not self.gradients or gradient is None:
                continue
            if hasattr(gradient, "full_tensor"):  # only sharded gradients have this method, which all ranks must call
                gradient = gradient.full_tensor()
            if is_logging_rank:
                trainer.log_histogram(f"gradients/{name}", _unscale(gradient, scale))


def _unscale(gradient: Tensor, scale: Tensor | None) -> Tensor:
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    with torch.no_grad():
        return gradient if scale is None else gradient / scale
