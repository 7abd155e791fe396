"""Ending a run whose results no longer become better."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from unitrain import validation
from unitrain.callbacks.callback import Callback
from unitrain.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from unitrain.trainer import Trainer

Mode = Literal["min", "max"]


class EarlyStopping(Callback):
    """Stops the run when `monitor` has not become better for `patience` epochs in a row.

    Better is lower with `mode` "min" and higher with "max", by more than `min_delta`; nan never is. `best` and
    `waited`, the number of epochs since, are kept in checkpoints: a run that was stopped is stopped again when it is
    resumed, unless `patience` is larger by then. The results are exact over ranks, so all of them decide alike.
    Raises ConfigError, on every rank, for a `monitor` that is not a result of the run.
    """

    def __init__(
        self, monitor: str = "val_loss", *, patience: int = 3, mode: Mode = "min", min_delta: float = 0.0
    ) -> None:
        if not isinstance(mode, str) or mode not in get_args(Mode):
            raise ConfigError(f"EarlyStopping.mode must be 'min' or 'max', got {mode!r}. Use 'min' for a loss.")
        validation.text("EarlyStopping(monitor)", monitor, "Use EarlyStopping('val_loss')")
        if not isinstance(patience, int) or isinstance(patience, bool) or patience < 1:
            raise ConfigError(f"EarlyStopping.patience must be a number of epochs from 1 on, got {patience!r}. Use 3.")
        if not isinstance(min_delta, int | float) or isinstance(min_delta, bool) or not 0 <= min_delta < math.inf:
            raise ConfigError(f"EarlyStopping.min_delta must be at least 0, got {min_delta!r}. Use 0.0.")
        self.monitor, self.patience, self.mode, self.min_delta = monitor, patience, mode, min_delta
        self.best: float | None = None
        self.waited = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Check `monitor`, and stop a run that was stopped before."""
        if self.monitor not in trainer.result_names:
            raise ConfigError(
                f"EarlyStopping.monitor {self.monitor!r} is not a result of this run. "
                f"{did_you_mean(self.monitor, trainer.result_names)}Available: {', '.join(trainer.result_names)}."
            )
        self._stop_after_patience(trainer)

    def on_epoch_end(self, trainer: Trainer, results: dict[str, float]) -> None:
        """Compare with the best so far, at the end of a whole epoch: an interrupted one ends after the resume."""
        found = results.get(self.monitor)
        if found is None or trainer.progress.sample:
            return
        if self._is_better(found):
            self.best, self.waited = found, 0
        else:
            self.waited += 1
        self._stop_after_patience(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the best result and how many epochs ago that was."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on waiting."""
        self.best, self.waited = state["best"], state["waited"]

    def _is_better(self, found: float) -> bool:
        if math.isnan(found) or self.best is None:
            return not math.isnan(found)
        gain = self.best - found if self.mode == "min" else found - self.best
        return gain > self.min_delta

    def _stop_after_patience(self, trainer: Trainer) -> None:
        if self.waited >= self.patience:
            best = "it never was a number" if self.best is None else f"the best was {self.best:.4g}"
            trainer.stop(f"{self.monitor} has not become better for {self.waited} epochs; {best}")
