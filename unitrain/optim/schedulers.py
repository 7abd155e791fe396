"""Learning-rate schedulers that step per epoch, and schedulers that require the total number of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.config import TrainConfig
from unitrain.errors import CheckpointError, ConfigError, did_you_mean
from unitrain.optim.scheduler_settings import Settings, check_settings, read_settings, unchanged_settings


class EpochScheduler:
    """Steps `scheduler` after each epoch if `scheduler_interval` is "epoch". All ranks make the same calls.

    ReduceLROnPlateau reads the result `config.monitor`, by default val_loss, or train_loss without validation. After an
    epoch without this result, ReduceLROnPlateau does not step. Raises ConfigError for contradictory settings; for a
    PlannedScheduler, `check_monitor` raises it.
    """

    def __init__(self, scheduler: LRScheduler | PlannedScheduler | None, config: TrainConfig) -> None:
        self._scheduler, self._is_stepped_per_epoch = scheduler, config.scheduler_interval == "epoch"
        self._monitor = config.monitor
        if not isinstance(scheduler, PlannedScheduler):
            self._check_settings()

    def _current_scheduler(self) -> LRScheduler | None:
        """Return the scheduler, or None if there is none, or if it is not built yet."""
        return self._scheduler.scheduler if isinstance(self._scheduler, PlannedScheduler) else self._scheduler

    def _check_settings(self) -> None:
        is_plateau = isinstance(self._current_scheduler(), ReduceLROnPlateau)
        if is_plateau and not self._is_stepped_per_epoch:
            raise ConfigError(
                'ReduceLROnPlateau needs the results of an epoch, but TrainConfig.scheduler_interval is "step". '
                'Use TrainConfig(scheduler_interval="epoch").'
            )
        if self._monitor is not None and not is_plateau:
            raise ConfigError(
                f"TrainConfig.monitor {self._monitor!r} is used only by ReduceLROnPlateau, which this run does not "
                "have. Leave monitor out, or give the Trainer a ReduceLROnPlateau."
            )

    def check_monitor(self, result_names: Sequence[str]) -> None:
        """Raise ConfigError unless the monitored result is among `result_names`, the results of the run. Also raise
        ConfigError if ReduceLROnPlateau would have to select one of several validation losses. Call this method after a
        PlannedScheduler is planned."""
        self._check_settings()
        if self._monitor not in (None, *result_names):
            raise ConfigError(
                f"TrainConfig.monitor {self._monitor!r} is not a result of this run. "
                f"{did_you_mean(str(self._monitor), result_names)}Available: {', '.join(result_names)}."
            )

        is_plateau = isinstance(self._current_scheduler(), ReduceLROnPlateau)
        if is_plateau and self._monitor is None and "val_loss" not in result_names and len(result_names) > 1:
            raise ConfigError(
                "ReduceLROnPlateau reads one result, but this run validates on several datasets. Select one: "
                f"TrainConfig(monitor={result_names[1]!r}). Available: {', '.join(result_names)}."
            )

    def step(self, results: Mapping[str, float]) -> None:
        """Step the scheduler after an epoch with `results`, if it steps after epochs."""
        scheduler = self._current_scheduler() if self._is_stepped_per_epoch else None
        if isinstance(scheduler, ReduceLROnPlateau):
            monitored = self._monitor or ("val_loss" if "val_loss" in results else "train_loss")
            if monitored in results:
                scheduler.step(results[monitored])
        elif scheduler is not None:
            step_scheduler(scheduler)


def step_scheduler(scheduler: LRScheduler | PlannedScheduler) -> None:
    """Step `scheduler`. Raises ConfigError if it refuses the step, as a OneCycleLR does after its last step."""
    if isinstance(scheduler, PlannedScheduler):
        assert scheduler.scheduler is not None
        scheduler = scheduler.scheduler
    try:
        scheduler.step()
    except ValueError as error:
        raise ConfigError(
            f"The scheduler {type(scheduler).__name__} failed in its step {scheduler.last_epoch}: {error}. Let the "
            "Trainer build it for the number of steps, scheduler=lambda optimizer, total_steps: ..., and limit the run "
            "with max_steps if the length of the data is unknown."
        ) from error


SchedulerFactory = Callable[[Optimizer, int], LRScheduler]


class PlannedScheduler:
    """Scheduler that `build(optimizer, total_steps)` creates as soon as the number of steps is known.

    `total_steps` is the number of scheduler steps in the complete run, including the part before a resume: optimizer
    steps, or epochs with TrainConfig.scheduler_interval="epoch". The scheduler starts from the learning rates that
    `optimizer` had when this object was created, before a checkpoint was restored.
    """

    def __init__(self, build: SchedulerFactory, optimizer: Optimizer) -> None:
        self._build, self._optimizer = build, optimizer
        self._initial_settings = [_group_settings(group) for group in optimizer.param_groups]
        self._restored_state: dict[str, Any] | None = None
        self._total_steps = 0
        self._run_length: str | None = None
        self._after_build: Callable[[], None] = lambda: None
        self._settings: Settings = {}
        self.scheduler: LRScheduler | None = None

    def plan(self, total_steps: int | None, communicator: Communicator, run_length: str | None = None) -> LRScheduler:
        """Build the scheduler for `total_steps` steps, and restore its state. All ranks must call this method.

        `run_length` is the setting of TrainConfig that limits the run, such as "max_epochs=10", for error messages.
        A later call returns the same scheduler. Raises, on every rank, ConfigError if the number of steps is unknown,
        or if `build` does not return a scheduler of this optimizer, and CheckpointError if the scheduler, or that of
        the checkpoint, was built for a different number of steps or with different settings.
        """
        if self.scheduler is None:
            self.scheduler = call_on_all_ranks(communicator, lambda: self._build_restored(total_steps, run_length))
        elif total_steps != self._total_steps:
            _raise_different_length(self._total_steps, self._run_length, total_steps, run_length)
        return self.scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state, and the number of steps and the `run_length` for which it was built."""
        assert self.scheduler is not None
        return {
            "total_steps": self._total_steps,
            "run_length": self._run_length,
            "scheduler": self.scheduler.state_dict(),
            "settings": unchanged_settings(self._settings, self.scheduler),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store the state until `plan` builds the scheduler. Raises ValueError for a state that is not a result of
        `state_dict`."""
        if "total_steps" not in state:
            raise ValueError("its scheduler was not built from the number of steps")
        self._restored_state = state

    def call_after_build(self, function: Callable[[], None]) -> None:
        """Let `plan` call `function` after it has built the scheduler, and before it restores the checkpoint's state.

        At this time, the optimizer has the initial learning rates that the new scheduler has set. `function` is not
        called if the checkpoint has no state of the scheduler.
        """
        self._after_build = function

    def _build_restored(self, total_steps: int | None, run_length: str | None) -> LRScheduler:
        if total_steps is None:
            raise ConfigError(
                "The scheduler is built from the number of steps, which is unknown for data without a length. "
                "Use TrainConfig(max_steps=10_000) instead of max_epochs."
            )
        if self._restored_state is not None and self._restored_state["total_steps"] != total_steps:
            state = self._restored_state
            _raise_different_length(state["total_steps"], state.get("run_length"), total_steps, run_length)
        groups = self._optimizer.param_groups
        current = [_group_settings(group) for group in groups]
        for group, initial in zip(groups, self._initial_settings, strict=False):
            group.update(initial)
            if "initial_lr" not in initial:
                group.pop("initial_lr", None)
        scheduler = self._build(self._optimizer, total_steps)
        if not isinstance(scheduler, LRScheduler) or scheduler.optimizer is not self._optimizer:
            raise ConfigError(
                f"The scheduler function returned {type(scheduler).__name__}, not a scheduler of its optimizer. "
                "Use scheduler=lambda optimizer, total_steps: CosineAnnealingLR(optimizer, total_steps)."
            )
        self._settings = read_settings(scheduler)
        if self._restored_state is not None:
            check_settings(self._restored_state.get("settings", {}), self._settings, scheduler)
            self._after_build()
            for group, settings in zip(groups, current, strict=True):
                group.update(settings)
            scheduler.load_state_dict(self._restored_state["scheduler"])
        self._total_steps, self._run_length = total_steps, run_length
        return scheduler


def _raise_different_length(
    planned_steps: int, planned_length: str | None, steps: int | None, run_length: str | None
) -> NoReturn:
    """Raise CheckpointError for a run of `steps` scheduler steps whose schedule was planned for `planned_steps`. The
    other arguments are the settings that limit the run, now and when the schedule was planned."""
    if planned_length is None:  # written by an older version
        fix = "Resume with the same max_epochs or max_steps, and the same TrainConfig.global_batch_size"
    elif planned_length != run_length:
        fix = f"It was planned for {planned_length}. Resume with TrainConfig({planned_length})"
    else:
        fix = (
            "Continue with the same data and global batch: TrainConfig(global_batch_size=...). For data whose length "
            "changes, limit the run with max_steps"
        )
    found = "an unknown number" if steps is None else str(steps)
    raise CheckpointError(
        f"The run's schedule was planned for {planned_steps} steps, but this run has {found}, which changes its "
        f"learning rates. {fix}."
    )


def _group_settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def wrap_scheduler_function(
    scheduler: LRScheduler | SchedulerFactory | None, optimizer: Optimizer
) -> LRScheduler | PlannedScheduler | None:
    """Return `scheduler`, or a PlannedScheduler if it is a function that builds one."""
    if scheduler is None or isinstance(scheduler, LRScheduler) or not callable(scheduler):
        return scheduler
    return PlannedScheduler(scheduler, optimizer)
