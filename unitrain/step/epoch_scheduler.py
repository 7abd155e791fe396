"""Learning rate schedulers that go by epochs, and the one that follows a result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unitrain.config import TrainConfig
from unitrain.errors import ConfigError, did_you_mean
from unitrain.step.planned_scheduler import PlannedScheduler


class EpochScheduler:
    """Steps `scheduler` between epochs, if it goes by them. Every rank does so on the same results.

    ReduceLROnPlateau follows `config.monitor`, without it val_loss, else train_loss; a result that an epoch does not
    have leaves it where it is. Raises ConfigError where it cannot, or where nothing follows what is to be followed.
    """

    def __init__(self, scheduler: LRScheduler | PlannedScheduler | None, config: TrainConfig) -> None:
        follows = isinstance(scheduler, ReduceLROnPlateau)
        if follows and config.scheduler_every != "epoch":
            raise ConfigError(
                'ReduceLROnPlateau needs the results of an epoch, and TrainConfig.scheduler_every is "step". '
                'Use TrainConfig(scheduler_every="epoch").'
            )
        if config.monitor is not None and not follows:
            raise ConfigError(
                f"TrainConfig.monitor {config.monitor!r} is what ReduceLROnPlateau follows, and this run has none. "
                "Leave monitor out, or give the Trainer a ReduceLROnPlateau."
            )
        self._follows = follows
        self._scheduler = scheduler if config.scheduler_every == "epoch" else None
        self._monitor = config.monitor

    def check(self, names: Sequence[str]) -> None:
        """Raise ConfigError unless what is to be followed is among `names`, the results that the run will have."""
        if self._monitor not in (None, *names):
            raise ConfigError(
                f"TrainConfig.monitor {self._monitor!r} is not a result of this run. "
                f"{did_you_mean(str(self._monitor), names)}Available: {', '.join(names)}."
            )

        if self._follows and self._monitor is None and "val_loss" not in names and len(names) > 1:
            raise ConfigError(
                "ReduceLROnPlateau follows one result, and this run validates on several data sets. Name the result: "
                f"TrainConfig(monitor={names[1]!r}). Available: {', '.join(names)}."
            )

    def step(self, results: Mapping[str, float]) -> None:
        """An epoch is over, with these results."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            followed = self._monitor or ("val_loss" if "val_loss" in results else "train_loss")
            if followed in results:
                self._scheduler.step(results[followed])
        elif self._scheduler is not None:
            self._scheduler.step()
