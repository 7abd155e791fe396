"""Learning rate schedulers that go by epochs, and the one that follows a result.

A learning rate scheduler that is built when the number of steps of the run is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.config import TrainConfig
from unitrain.errors import CheckpointError, ConfigError, did_you_mean


class EpochScheduler:
    """Steps `scheduler` between epochs, if it goes by them. Every rank does so on the same results.

    ReduceLROnPlateau follows `config.monitor`, without it val_loss, else train_loss; a result that an epoch does not
    have leaves it where it is. Raises ConfigError where it cannot, or where nothing follows what is to be followed.
    """

    def __init__(self, scheduler: LRScheduler | PlannedScheduler | None, config: TrainConfig) -> None:
        follows = isinstance(scheduler, ReduceLROnPlateau)
        if follows and config.scheduler_interval != "epoch":
            raise ConfigError(
                'ReduceLROnPlateau needs the results of an epoch, and TrainConfig.scheduler_interval is "step". '
                'Use TrainConfig(scheduler_interval="epoch").'
            )
        if config.monitor is not None and not follows:
            raise ConfigError(
                f"TrainConfig.monitor {config.monitor!r} is what ReduceLROnPlateau follows, and this run has none. "
                "Leave monitor out, or give the Trainer a ReduceLROnPlateau."
            )
        self._follows = follows
        self._scheduler = scheduler if config.scheduler_interval == "epoch" else None
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


BuildScheduler = Callable[[Optimizer, int], LRScheduler]


class PlannedScheduler:
    """The scheduler that `build(optimizer, total_steps)` returns, for schedules that need their length.

    `total_steps` counts the steps of the scheduler from the beginning of the run to its end: optimizer steps, or epochs
    with TrainConfig.scheduler_interval="epoch". It is the same in a resumed run. The scheduler is built on the learning
    rates that `optimizer` has when this object is made, before a checkpoint is restored.
    """

    def __init__(self, build: BuildScheduler, optimizer: Optimizer) -> None:
        self._build, self._optimizer = build, optimizer
        self._initial = [_settings(group) for group in optimizer.param_groups]
        self._restored: dict[str, Any] | None = None
        self._total_steps = 0
        self.scheduler: LRScheduler | None = None

    def plan(self, total_steps: int | None, communicator: Communicator) -> LRScheduler:
        """Build the scheduler for a run of so many steps, and restore its state. All ranks call it.

        A second call returns the same scheduler. Raises, on every rank, ConfigError if the length is unknown or if
        `build` does not return a scheduler of this optimizer, and CheckpointError if the checkpoint was planned for
        another length.
        """
        if self.scheduler is None:
            self.scheduler = call_on_all_ranks(communicator, lambda: self._planned(total_steps))
        return self.scheduler

    def step(self) -> None:
        """Step the scheduler."""
        assert self.scheduler is not None
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state and the length that it was built for."""
        assert self.scheduler is not None
        return {"total_steps": self._total_steps, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state for `plan`."""
        if "total_steps" not in state:
            raise ValueError("its scheduler was not built from the number of steps")
        self._restored = state

    def _planned(self, total_steps: int | None) -> LRScheduler:
        if total_steps is None:
            raise ConfigError(
                "The scheduler is built from the number of steps, which is unknown for data without a length. "
                "Use TrainConfig(max_steps=10_000) instead of epochs."
            )
        if self._restored is not None and self._restored["total_steps"] != total_steps:
            planned = self._restored["total_steps"]
            raise CheckpointError(
                f"The checkpoint's schedule was planned for {planned} steps, but this run has {total_steps}, which "
                "changes its learning rates. Resume with the same length and global batch: "
                "TrainConfig(global_batch_size=...)."
            )
        groups = self._optimizer.param_groups
        current = [_settings(group) for group in groups]
        for group, initial in zip(groups, self._initial, strict=False):
            group.update(initial)
            if "initial_lr" not in initial:
                group.pop("initial_lr", None)
        scheduler = self._build(self._optimizer, total_steps)
        if not isinstance(scheduler, LRScheduler) or scheduler.optimizer is not self._optimizer:
            raise ConfigError(
                f"The scheduler function returned {type(scheduler).__name__}, not a scheduler of its optimizer. "
                "Use scheduler=lambda optimizer, total_steps: CosineAnnealingLR(optimizer, total_steps)."
            )
        if self._restored is not None:
            for group, settings in zip(groups, current, strict=True):
                group.update(settings)
            scheduler.load_state_dict(self._restored["scheduler"])
        self._total_steps = total_steps
        return scheduler


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
