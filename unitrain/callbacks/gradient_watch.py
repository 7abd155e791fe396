"""Raise an error at the first gradient that is not finite. The error names the parameter, and the ranks whose loss is
not finite."""

from __future__ import annotations

import torch
from torch import nn

from unitrain.callbacks.callback import Callback, RunningTrainer
from unitrain.errors import ConfigError, NonFiniteGradientError
from unitrain.torch_compat import foreach_norm, local_shard

# fp16 starts with a loss scale of 2**16 and halves it at each overflow. After this many consecutive overflows, the loss
# scale cannot be the cause.
_MAX_OVERFLOWS = 20


class GradientWatch(Callback):
    """Raises NonFiniteGradientError at the first gradient with nan or inf, before the optimizer step, on every rank.

    The error names the parameter. With `local_sgd`, only the ranks with a nan or inf in their gradients raise the
    error. Every `every`-th step is checked. A check reads all gradients and, on GPUs, synchronizes the host with the
    device. With fp16, occasional overflows are normal while the loss scale adapts, so only many consecutive overflows
    are an error.
    """

    def __init__(self, *, every: int = 1) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigError(f"GradientWatch.every must be an integer of at least 1, got {every!r}. Use 1.")
        self.every = every
        self._overflows = 0

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Reset the count of consecutive overflows."""
        self._overflows = 0

    def on_before_optimizer_step(self, trainer: RunningTrainer) -> None:
        """Check the gradients. They are equal on every rank, except with `local_sgd` and with sharded parameters."""
        if (trainer.progress.step + 1) % self.every:
            return
        is_sharded = trainer.config.shard == "parameters"
        gradients = {
            name: local_shard(parameter.grad)
            for name, parameter in _named_parameters(trainer)
            if parameter.requires_grad and parameter.grad is not None
        }
        # An empty gradient has no norm. If parameters are sharded, a rank may have no rows of a gradient.
        gradients = {name: rows if rows.numel() else rows.new_zeros(1) for name, rows in gradients.items()}
        norms = (
            torch.stack(foreach_norm(list(gradients.values()), float("inf")))
            if gradients
            else torch.ones(1, device="cpu")
        )
        if is_sharded:
            norms = trainer.backend.allreduce(norms, "max")
        if bool(norms.isfinite().all()):
            self._overflows = 0
            return
        self._overflows += 1
        if trainer.config.precision == "fp16" and self._overflows < _MAX_OVERFLOWS:
            return
        non_finite = {
            name: norm for name, norm in zip(gradients, norms.tolist(), strict=True) if not abs(norm) < float("inf")
        }
        first, value = next(iter(non_finite.items()))
        losses = _gather_and_describe_losses(trainer)
        raise NonFiniteGradientError(
            f"The gradient of {first!r} is {value} in step {trainer.progress.step + 1}. {len(non_finite)} of "
            f"{len(gradients)} parameters have gradients that are not finite, and {losses}. Check "
            "the data of that step, lower the learning rate, or find the operation with "
            "torch.autograd.set_detect_anomaly(True)."
        )


def _named_parameters(trainer: RunningTrainer) -> list[tuple[str, nn.Parameter]]:
    return list(trainer.backend.unwrap(trainer.model).named_parameters())


def _gather_and_describe_losses(trainer: RunningTrainer) -> str:
    """Describe on which ranks the loss of the last micro-batch was not finite. All ranks must call this function,
    except with `local_sgd`, where it does not communicate."""
    if trainer.config.local_sgd is not None:  # the gradients of the other ranks may be finite
        is_finite = bool(trainer.last_loss.isfinite())
        return f"the loss was {'finite' if is_finite else 'not finite'} on rank {trainer.backend.rank}"
    losses = trainer.backend.allgather(trainer.last_loss.detach().double()).tolist()
    ranks = [str(rank) for rank, loss in enumerate(losses) if not abs(loss) < float("inf")]
    if not ranks:
        return "the loss was finite on every rank"
    return f"the loss was not finite on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
