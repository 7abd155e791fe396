"""The number of optimizer steps, epochs and scheduler steps of a run, from its configuration and its data."""

from __future__ import annotations

from unitrain.accumulation import epochs_by_accumulation
from unitrain.config import TrainConfig
from unitrain.data.training_data import TrainingData
from unitrain.progress.training_progress import TrainingProgress


def remaining_steps(config: TrainConfig, progress: TrainingProgress, data: TrainingData) -> int | None:
    """Return the number of remaining optimizer steps; None if the length of the data is unknown."""
    if config.max_steps is not None:
        return max(0, config.max_steps - progress.step)
    start_epoch, stop_epoch = progress.epoch, config.max_epochs or 0
    total = 0
    try:
        for epochs in epochs_by_accumulation(config.gradient_accumulation_steps, start_epoch, stop_epoch):
            steps = _steps_in_epochs(config, progress, data, epochs)
            if steps is None:
                return None
            in_first, in_each = steps
            total += in_first + (epochs.stop - epochs.start - 1) * in_each
    finally:
        data.begin_epoch(start_epoch)
    return total


def total_scheduler_steps(config: TrainConfig, progress: TrainingProgress, data: TrainingData) -> int | None:
    """Return the number of scheduler steps in the complete run; None if the length of the data is unknown.

    With `scheduler_interval="epoch"`, an incomplete last epoch also counts.
    """
    if config.scheduler_interval == "epoch":
        return _total_epochs(config, progress, data)
    remaining = remaining_steps(config, progress, data)
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
        for epochs in epochs_by_accumulation(
            config.gradient_accumulation_steps, start_epoch, start_epoch + 1 + remaining
        ):
            steps = _steps_in_epochs(config, progress, data, epochs)
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


def _steps_in_epochs(
    config: TrainConfig, progress: TrainingProgress, data: TrainingData, epochs: range
) -> tuple[int, int] | None:
    """Return two numbers: the remaining steps in the first of `epochs`, and the steps in each other epoch. The number
    of micro-batches per step must be the same in all `epochs`. Return None if the length of the data is unknown.
    Changes the current epoch of `data`."""
    limit, is_current = config.limit_train_steps, epochs[0] == progress.epoch
    data.begin_epoch(epochs[0])
    in_each = data.steps_in_epoch()
    in_first = data.steps_in_epoch(progress.position) if is_current else in_each
    if in_first is None or in_each is None:
        return None
    if limit is not None:
        in_first = min(in_first, max(0, limit - (progress.step_in_epoch if is_current else 0)))
        in_each = min(in_each, limit)
    return in_first, in_each
