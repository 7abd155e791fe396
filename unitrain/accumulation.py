"""Number of micro-batches per optimizer step: one number, or a schedule by epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from unitrain import validation
from unitrain.errors import ConfigError

# One number for all epochs, or a schedule that maps an epoch (the first is 0) to the number that applies from that
# epoch on.
Accumulation = int | Mapping[int, int]

_FIX = "Use gradient_accumulation_steps={0: 1, 4: 4} for 1 micro-batch per step, and 4 from the fifth epoch on"


def parse_accumulation(name: str, value: Any, global_batch_size: Any) -> int | dict[int, int] | None:
    """Validate and return `value`, the value of setting `name`. A schedule is returned as a dictionary that is sorted
    by epoch and contains epoch 0.

    A schedule without epoch 0 starts with 1 micro-batch per step. Raises ConfigError unless `value` is None, an integer
    of at least 1, or a non-empty schedule of such integers. A schedule also raises ConfigError if `global_batch_size`
    is not None.
    """
    if not isinstance(value, Mapping):
        validation.check_integer(name, value, 1, "Use 1 to step after every batch", optional=True)
        steps: int | None = value
        return steps
    if not value:
        raise ConfigError(f"{name} is an empty schedule. {_FIX}.")
    for epoch, steps_from_epoch in value.items():
        validation.check_integer(f"An epoch in {name}", epoch, 0, _FIX)
        validation.check_integer(f"{name}[{epoch}]", steps_from_epoch, 1, _FIX)
    if global_batch_size is not None:
        raise ConfigError(
            f"{name} is the schedule {validation.describe_value(value)}, which changes the global batch size, but "
            f"global_batch_size is {validation.describe_value(global_batch_size)}. Set batch_size instead of "
            "global_batch_size."
        )
    return {0: 1, **dict(sorted(value.items()))}


def accumulation_by_first_epoch(accumulation: Accumulation | None) -> dict[int, int | None]:
    """Return the number of micro-batches per step by the first epoch to which it applies. None means that the number
    follows from the batch sizes."""
    return dict(accumulation) if isinstance(accumulation, Mapping) else {0: accumulation}


def schedule_key(schedule: Mapping[int, Any], epoch: int) -> int:
    """Return the key of `schedule` whose value applies to `epoch`. The keys must contain 0."""
    return max(first_epoch for first_epoch in schedule if first_epoch <= epoch)


def epochs_by_accumulation(accumulation: Accumulation | None, start_epoch: int, stop_epoch: int) -> Iterator[range]:
    """Yield the epochs in [`start_epoch`, `stop_epoch`) as ranges with the same number of micro-batches per step."""
    bounds = [
        start_epoch,
        *(epoch for epoch in accumulation_by_first_epoch(accumulation) if start_epoch < epoch < stop_epoch),
        stop_epoch,
    ]
    for start, stop in pairwise(bounds):
        if start < stop:
            yield range(start, stop)


def scale_accumulation(accumulation: Accumulation | None, factor: int, divisor: int = 1) -> int | dict[int, int]:
    """Return `accumulation` (None counts as 1) multiplied by `factor` and divided by `divisor`, rounded down."""
    if isinstance(accumulation, Mapping):
        return {epoch: steps * factor // divisor for epoch, steps in accumulation.items()}
    return (accumulation or 1) * factor // divisor
