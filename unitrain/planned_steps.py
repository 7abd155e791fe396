"""The number of optimizer steps, epochs and scheduler steps of a run, from its configuration and its data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from unitrain.accumulation import epochs_by_accumulation
from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks, gather_if_different
from unitrain.config import TrainConfig
from unitrain.data.training_data import TrainingData
from unitrain.errors import ConfigError
from unitrain.optim.schedulers import PlannedScheduler
from unitrain.progress.training_progress import TrainingProgress

ItemT = TypeVar("ItemT")
# If the length of the data differs between epochs, at most this number of epochs is drawn from a sampler in advance.
_MAX_DRAWN_EPOCHS = 10_000


class SchedulePlan:
    """Builds a PlannedScheduler for the number of steps of the run, and checks that the run has the number of steps for
    which its scheduler was built. All ranks make the same calls."""

    def __init__(
        self,
        scheduler: LRScheduler | PlannedScheduler | None,
        config: TrainConfig,
        progress: TrainingProgress,
        communicator: Communicator,
    ) -> None:
        self._scheduler, self._config, self._progress = scheduler, config, progress
        self._communicator = communicator
        # The epoch that was planned last, and the number of optimizer steps before it and in it.
        self._epoch, self._steps_before, self._steps_in_epoch = -1, 0, 0

    def begin_fit(self, data: TrainingData) -> None:
        """Build the scheduler, or check the number of steps. Call it at the beginning of `fit`, unless the run is
        complete.

        Raises, on every rank, the errors of `PlannedScheduler.plan`, and ConfigError for a OneCycleLR that ends before
        the run.
        """
        config, progress, scheduler = self._config, self._progress, self._scheduler
        self._epoch = -1
        if isinstance(scheduler, PlannedScheduler):
            total_steps = total_scheduler_steps(config, progress, data)
            scheduler.plan(total_steps, self._communicator, self._run_length())
        elif gather_if_different(self._communicator, isinstance(scheduler, OneCycleLR)) is None and isinstance(
            scheduler, OneCycleLR
        ):
            total_steps = total_scheduler_steps(config, progress, data)
            completed = progress.epoch if config.scheduler_interval == "epoch" else progress.step
            more_steps = None if total_steps is None else total_steps - completed
            call_on_all_ranks(self._communicator, lambda: _check_one_cycle(scheduler, more_steps))

    def check_epoch(self, data: TrainingData, micro_batches: Iterator[ItemT]) -> Iterator[ItemT]:
        """Return `micro_batches`, those of the current epoch of `data`, whose order is known now. Raises the errors of
        `_check_length`."""
        try:
            self._check_length(data)
        except BaseException:
            del micro_batches  # so that its workers terminate
            raise
        return micro_batches

    def _check_length(self, data: TrainingData) -> None:
        """Raise CheckpointError on every rank if the length of `data` has changed, so that the run has a different
        number of steps than planned."""
        config, progress = self._config, self._progress
        is_planned = isinstance(self._scheduler, PlannedScheduler) and config.scheduler_interval == "step"
        if not is_planned or config.max_steps is not None:
            return
        # Steps may have been skipped in earlier epochs, because collate_fn dropped all their samples.
        self._steps_before += self._steps_in_epoch if self._epoch >= 0 else progress.step - self._steps_before
        remaining = remaining_steps(config, progress, data, is_exact=True)
        steps = _steps_in_epochs(config, progress, data, range(progress.epoch, progress.epoch + 1), is_exact=True)
        data.begin_epoch(progress.epoch)
        self._epoch, self._steps_in_epoch = progress.epoch, 0 if steps is None else steps[0]
        total_steps = None if remaining is None else self._steps_before + remaining
        assert isinstance(self._scheduler, PlannedScheduler)
        self._scheduler.plan(total_steps, self._communicator, self._run_length())

    def _run_length(self) -> str:
        name = "max_epochs" if self._config.max_steps is None else "max_steps"
        return f"{name}={getattr(self._config, name)}"


def _check_one_cycle(scheduler: Any, more_steps: int | None) -> None:
    """Raise ConfigError if a OneCycleLR ends before `more_steps` steps."""
    if more_steps is not None and scheduler.last_epoch + more_steps > scheduler.total_steps:
        raise ConfigError(
            f"OneCycleLR was built for {scheduler.total_steps} steps, of which {scheduler.last_epoch} are completed, "
            f"but this run has {more_steps} more steps. Let the Trainer build it for the number of steps: "
            "scheduler=lambda optimizer, total_steps: OneCycleLR(optimizer, max_lr, total_steps)."
        )


def remaining_steps(
    config: TrainConfig, progress: TrainingProgress, data: TrainingData, *, is_exact: bool = False
) -> int | None:
    """Return the number of remaining optimizer steps; None if the length of the data is unknown. See
    TrainingData.steps_in_epoch for `is_exact`."""
    if config.max_steps is not None:
        return max(0, config.max_steps - progress.step)
    start_epoch, stop_epoch = progress.epoch, config.max_epochs or 0
    total = 0
    try:
        for epochs in _epochs_of_equal_length(config, data, start_epoch, stop_epoch, is_exact=is_exact):
            steps = _steps_in_epochs(config, progress, data, epochs, is_exact=is_exact)
            if steps is None:
                return None
            in_first, in_each = steps
            total += in_first + (epochs.stop - epochs.start - 1) * in_each
    finally:
        data.begin_epoch(start_epoch)
    return total


def total_scheduler_steps(config: TrainConfig, progress: TrainingProgress, data: TrainingData) -> int | None:
    """Return the number of scheduler steps in the complete run; None if the length of the data is unknown. All ranks
    must call this function, because samplers may draw the orders of the remaining epochs.

    With `scheduler_interval="epoch"`, an incomplete last epoch also counts.
    """
    if config.scheduler_interval == "epoch":
        return _total_epochs(config, progress, data)
    remaining = remaining_steps(config, progress, data, is_exact=True)
    return None if remaining is None else progress.step + remaining


def _total_epochs(config: TrainConfig, progress: TrainingProgress, data: TrainingData) -> int | None:
    """Return the number of epochs in the complete run, including an incomplete last one."""
    if config.max_steps is None:
        return config.max_epochs
    remaining = config.max_steps - progress.step
    if remaining <= 0:
        return progress.epoch + (progress.step_in_epoch > 0)
    num_epochs = start_epoch = progress.epoch
    try:
        # Each epoch has at least one step, but the current epoch may have no remaining ones.
        for epochs in _epochs_of_equal_length(config, data, start_epoch, start_epoch + 1 + remaining, is_exact=True):
            steps = _steps_in_epochs(config, progress, data, epochs, is_exact=True)
            if steps is None:
                return None
            in_first, in_each = steps
            in_each = max(1, in_each)
            num_needed = 1 + -(-max(0, remaining - in_first) // in_each)
            num_epochs_in_range = epochs.stop - epochs.start  # len() does not support 2**63 and more
            if num_needed <= num_epochs_in_range:
                return num_epochs + num_needed
            num_epochs += num_epochs_in_range
            remaining -= in_first + (num_epochs_in_range - 1) * in_each
    finally:
        data.begin_epoch(start_epoch)
    return num_epochs


def _epochs_of_equal_length(
    config: TrainConfig, data: TrainingData, start_epoch: int, stop_epoch: int, *, is_exact: bool
) -> Iterator[range]:
    """Yield the epochs in [`start_epoch`, `stop_epoch`) as ranges with the same number of steps per epoch."""
    for epochs in epochs_by_accumulation(config.gradient_accumulation_steps, start_epoch, stop_epoch):
        if data.has_equal_epochs or not is_exact:
            yield epochs
        else:
            yield from (range(epoch, epoch + 1) for epoch in epochs)


def _steps_in_epochs(
    config: TrainConfig, progress: TrainingProgress, data: TrainingData, epochs: range, *, is_exact: bool
) -> tuple[int, int] | None:
    """Return two numbers: the remaining steps in the first of `epochs`, and the steps in each other epoch. The number
    of steps must be the same in all `epochs`. Return None if the length of the data is unknown. Changes the current
    epoch of `data`."""
    limit, is_current = config.limit_train_steps, epochs[0] == progress.epoch
    if is_exact and not data.has_equal_epochs and epochs[0] >= progress.epoch + _MAX_DRAWN_EPOCHS:
        return None
    data.begin_epoch(epochs[0])
    in_first = data.steps_in_epoch(progress.position if is_current else 0, is_exact=is_exact)
    in_each = data.steps_in_epoch(is_exact=is_exact) if is_current and epochs.stop > epochs[0] + 1 else in_first
    if in_first is None or in_each is None:
        return None
    if limit is not None:
        in_first = min(in_first, max(0, limit - (progress.step_in_epoch if is_current else 0)))
        in_each = min(in_each, limit)
    return in_first, in_each
