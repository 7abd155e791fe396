"""Learning-rate range test (Smith, Cyclical Learning Rates, arXiv 1506.01186) on all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from unitrain import validation
from unitrain.backends.checks import check_same_settings
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.data.loading import Data
from unitrain.errors import ConfigError, MissingDependencyError, NonFiniteLossError
from unitrain.trial_steps import TrialSteps, check_trial, preserved_state

if TYPE_CHECKING:
    from unitrain.trainer import Trainer

_NAME = "find_learning_rate"
_SMOOTHING = 0.98  # decay of the moving average of the loss
_SKIPPED_AT_START, _SKIPPED_AT_END = 10, 1  # points at the ends of the curve that are never suggested
_MIN_POINTS = _SKIPPED_AT_START + _SKIPPED_AT_END + 2
# Slopes that differ by less than this fraction count as equal, so that rounding errors do not change the suggestion.
_SLOPE_TOLERANCE = 1e-3
_CHART_ROWS, _CHART_COLUMNS = 10, 60


@dataclass(frozen=True)
class LearningRateCurve:
    """The result of `find_learning_rate`, equal on all ranks.

    `losses[i]` is the mean loss over the global batch of step i, before the update with `learning_rates[i]`.
    `smoothed_losses` is the moving average of `losses`. `suggestion` is the learning rate at which the moving average
    decreases fastest, or None if it never decreases. `stop_reason` states why the test ended early, or is None.
    """

    learning_rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed_losses: tuple[float, ...]
    suggestion: float | None
    stop_reason: str | None = None

    def __str__(self) -> str:
        """Return a chart of the smoothed loss and the suggestion, for a terminal."""
        rates, ends = self.learning_rates, f"tested {self.learning_rates[0]:.3g} to {self.learning_rates[-1]:.3g}"
        stopped = "" if self.stop_reason is None else f"; {self.stop_reason}"
        if self.suggestion is None:
            first = f"No suggestion: the loss never decreased ({ends}{stopped})."
        else:
            first = f"Suggested learning rate: {self.suggestion:.3g} ({ends}{stopped})."
        low, high = min(self.smoothed_losses), max(self.smoothed_losses)
        columns = min(_CHART_COLUMNS, len(rates))
        grid = [[" "] * columns for _ in range(_CHART_ROWS)]
        for index, loss in enumerate(self.smoothed_losses):
            row = round((_CHART_ROWS - 1) * (high - loss) / (high - low)) if high > low else 0
            is_suggestion = rates[index] == self.suggestion
            column = index * columns // len(rates)
            if grid[row][column] != "o":
                grid[row][column] = "o" if is_suggestion else "*"
        labels = [f"{high:10.4g}", *[" " * 10] * (_CHART_ROWS - 2), f"{low:10.4g}"]
        lines = [f"{label} |{''.join(row)}".rstrip() for label, row in zip(labels, grid, strict=True)]
        return "\n".join([first, *lines, f"{'':10} +{'-' * columns}", f"{'':12}smoothed loss by learning rate (log)"])

    def plot(self, path: str | Path) -> None:
        """Write a plot of the losses to `path`, such as "curve.png". Requires matplotlib, from the extra "report"."""
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingDependencyError(
                f"LearningRateCurve.plot needs a package that is missing: {error}. "
                'Install it, in the source folder of unitrain, with: pip install ".[report]"'
            ) from error
        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(self.learning_rates, self.losses, alpha=0.4, label="loss")
        axes.plot(self.learning_rates, self.smoothed_losses, label="smoothed loss")
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle="--", color="gray", label=f"suggestion {self.suggestion:.3g}")
        axes.set(xscale="log", xlabel="learning rate", ylabel="loss")
        axes.legend()
        figure.savefig(path)


def find_learning_rate(
    trainer: Trainer,
    data: Data,
    *,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    steps: int = 100,
    divergence_factor: float | None = 4.0,
) -> LearningRateCurve:
    """Train for up to `steps` steps on `data` while the learning rate increases from `min_lr` to `max_lr`, and return
    the losses and a suggested learning rate. All ranks must call this function.

    The learning rate increases by a constant factor per step. It applies to the first parameter group; the learning
    rates of other groups keep their ratio to it (if the first group has learning rate 0, it applies to all groups).
    `lr_scaling` applies as in `fit`, at its full factor. The test ends early if the smoothed loss exceeds
    `divergence_factor` times its minimum, or if the loss is not finite. For equal global batches, the result depends on
    neither the backend nor the number of ranks, except for rounding errors and layers such as dropout and BatchNorm.

    Afterwards, the model, its buffers, the optimizer with its learning rates, and the random number generators are
    restored; the scheduler and the training progress do not change. The suggestion is not applied. Callbacks and
    loggers are not called.

    Raises on every rank: ConfigError for invalid arguments, or if the loss diverges before the 13 steps that a
    suggestion requires; and NonFiniteLossError if the loss becomes NaN or infinite before that.
    """
    check_trial(trainer, _NAME)
    backend = trainer.backend
    call_on_all_ranks(backend, lambda: _check_arguments(min_lr, max_lr, steps, divergence_factor))
    check_same_settings(backend, _NAME, min_lr=min_lr, max_lr=max_lr, steps=steps, divergence_factor=divergence_factor)
    rates = [min_lr * (max_lr / min_lr) ** (step / (steps - 1)) for step in range(steps)]
    losses: list[float] = []
    smoothed: list[float] = []
    stop_reason: str | None = None
    average = 0.0
    trial = TrialSteps(trainer, data, _NAME)

    def set_learning_rate(step: int) -> None:
        _set_learning_rates(trainer.optimizer, initial_rates, rates[step])

    def record(step: int, loss: float) -> bool:
        nonlocal average, stop_reason
        if not math.isfinite(loss):
            stop_reason = f"the loss became {loss} after a step with learning rate {rates[max(0, step - 1)]:.3g}"
            return False
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        losses.append(loss)
        smoothed.append(average / (1 - _SMOOTHING ** (step + 1)))
        if divergence_factor is not None and smoothed[-1] > divergence_factor * min(smoothed) > 0:
            stop_reason = f"the loss diverged at {rates[step]:.3g}"
            return False
        return True

    with preserved_state(trainer, data):
        initial_rates = [float(group["lr"]) for group in trainer.optimizer.param_groups]
        trial.run(steps, set_learning_rate, record)
    _check_enough_losses(losses, rates, stop_reason)
    return LearningRateCurve(
        tuple(rates[: len(losses)]), tuple(losses), tuple(smoothed), suggest_learning_rate(rates, smoothed), stop_reason
    )


def suggest_learning_rate(rates: Sequence[float], smoothed_losses: Sequence[float]) -> float | None:
    """Return the learning rate at which the smoothed loss decreases fastest per step; None if it never decreases. The
    first ten points and the last one are ignored."""
    slopes = np.gradient(np.asarray(smoothed_losses[_SKIPPED_AT_START : len(smoothed_losses) - _SKIPPED_AT_END]))
    steepest = float(slopes.min())
    if not steepest < 0:
        return None
    first = int(np.flatnonzero(slopes <= steepest * (1 - _SLOPE_TOLERANCE))[0])
    return rates[_SKIPPED_AT_START + first]


def _set_learning_rates(optimizer: torch.optim.Optimizer, initial_rates: Sequence[float], rate: float) -> None:
    for group, initial_rate in zip(optimizer.param_groups, initial_rates, strict=True):
        value = rate * (initial_rate / initial_rates[0] if initial_rates[0] else 1.0)
        current: Any = group["lr"]
        group["lr"] = torch.full_like(current, value) if isinstance(current, torch.Tensor) else value


def _check_arguments(min_lr: Any, max_lr: Any, steps: Any, divergence_factor: Any) -> None:
    for name, value in (("min_lr", min_lr), ("max_lr", max_lr)):
        validation.check_positive(f"{_NAME}({name}=...)", value, "Use min_lr=1e-8 and max_lr=1.0")
    if min_lr >= max_lr:
        raise ConfigError(
            f"{_NAME}: min_lr must be less than max_lr, got min_lr={min_lr:g} and max_lr={max_lr:g}. "
            "Use min_lr=1e-8 and max_lr=1.0."
        )
    fix = f"Use steps=100; at least {_MIN_POINTS} steps are needed for a suggestion"
    validation.check_integer(f"{_NAME}(steps=...)", steps, _MIN_POINTS, fix)
    name = f"{_NAME}(divergence_factor=...)"
    validation.check_positive(name, divergence_factor, "Use 4.0, or None to disable early stopping", optional=True)
    if divergence_factor is not None and divergence_factor <= 1:
        raise ConfigError(
            f"{name} must be above 1, got {divergence_factor:g}. Use 4.0, or None to disable early stopping."
        )


def _check_enough_losses(losses: Sequence[float], rates: Sequence[float], reason: str | None) -> None:
    if len(losses) >= _MIN_POINTS:
        return
    tested = f"{_NAME} needs {_MIN_POINTS} steps for a suggestion, but after {len(losses)} steps {reason}."
    if reason is not None and "became" in reason:
        if not losses:
            raise NonFiniteLossError(
                f"{_NAME}: the loss of the first batch is not finite, before any update. Check the data and the model."
            )
        raise NonFiniteLossError(f"{tested} Use a min_lr below {rates[0]:g}, or check the data.")
    raise ConfigError(f"{tested} Use a smaller min_lr than {rates[0]:g}, such as min_lr={rates[0] / 1000:g}.")
