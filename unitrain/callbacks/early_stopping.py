"""Stop a run if its results no longer improve."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from unitrain import validation
from unitrain.callbacks.callback import Callback, RunningTrainer
from unitrain.errors import ConfigError, did_you_mean

Mode = Literal["min", "max"]


class EarlyStopping(Callback):
    """Stops the run when the result `monitor` has not improved for `patience` epochs in a row.

    With `mode` "min", a result is an improvement if it is lower than the best by more than `min_delta`. With "max", a
    result is an improvement if it is higher by more than `min_delta`. nan is never an improvement. Checkpoints contain
    `best` and `epochs_without_improvement`, so a run that was stopped also stops after it is resumed, unless `patience`
    is increased. All ranks make the same decision, because results are equal on all ranks. Raises ConfigError on every
    rank if `monitor` is not a result of the run.
    """

    def __init__(
        self, monitor: str = "val_loss", *, patience: int = 3, mode: Mode = "min", min_delta: float = 0.0
    ) -> None:
        if not isinstance(mode, str) or mode not in get_args(Mode):
            raise ConfigError(f"EarlyStopping.mode must be 'min' or 'max', got {mode!r}. Use 'min' for a loss.")
        validation.check_text("EarlyStopping(monitor)", monitor, "Use EarlyStopping('val_loss')")
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ConfigError(f"EarlyStopping.patience must be an integer of at least 1, got {patience!r}. Use 3.")
        if not isinstance(min_delta, int | float) or isinstance(min_delta, bool) or not 0 <= min_delta < math.inf:
            raise ConfigError(
                f"EarlyStopping.min_delta must be a finite number of at least 0, got {min_delta!r}. Use 0.0."
            )
        self.monitor, self.patience, self.mode, self.min_delta = monitor, patience, mode, min_delta
        self.best: float | None = None
        self.epochs_without_improvement = 0

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Check `monitor`, and stop a resumed run whose patience is already exhausted."""
        if self.monitor not in trainer.result_names:
            raise ConfigError(
                f"EarlyStopping.monitor {self.monitor!r} is not a result of this run. "
                f"{did_you_mean(self.monitor, trainer.result_names)}Available: {', '.join(trainer.result_names)}."
            )
        self._stop_if_patience_is_exhausted(trainer)

    def on_epoch_end(self, trainer: RunningTrainer, results: dict[str, float]) -> None:
        """Compare the result with the best so far. Incomplete epochs, and epochs without this result, are ignored."""
        result = results.get(self.monitor)
        if result is None or trainer.progress.sample:
            return
        if self._is_improvement(result):
            self.best, self.epochs_without_improvement = result, 0
        else:
            self.epochs_without_improvement += 1
        self._stop_if_patience_is_exhausted(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the best result and the number of epochs since it was reached."""
        return {"best": self.best, "waited": self.epochs_without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best result and the number of epochs since."""
        self.best, self.epochs_without_improvement = state["best"], state["waited"]

    def _is_improvement(self, result: float) -> bool:
        if math.isnan(result) or self.best is None:
            return not math.isnan(result)
        gain = self.best - result if self.mode == "min" else result - self.best
        return gain > self.min_delta

    def _stop_if_patience_is_exhausted(self, trainer: RunningTrainer) -> None:
        if self.epochs_without_improvement >= self.patience:
            best = "it was always nan" if self.best is None else f"the best was {self.best:.4g}"
            count = self.epochs_without_improvement
            epochs = "1 epoch" if count == 1 else f"{count} epochs"
            trainer.stop(f"{self.monitor} has not improved for {epochs}; {best}")
