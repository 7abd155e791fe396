"""Position of a training run, which checkpoints store so that a run resumes from the same sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields


@dataclass
class TrainingProgress:
    """Completed epochs, optimizer steps and samples of a training run. Equal on all ranks after every step."""

    epoch: int = 0
    """Completed epochs."""
    step: int = 0
    """Completed optimizer steps since the start of the run."""
    sample: int = 0
    """Samples trained on in the current epoch, over all ranks; 0 between two epochs."""
    position: int = 0
    """Position in the current epoch: an index into the sample order or, for an iterable dataset, a number of items of
    all ranks; with stream="own", a number of micro-batches per rank."""
    step_in_epoch: int = 0
    """Completed optimizer steps of the current epoch."""

    def advance(self, samples: int, position: int) -> None:
        """Count an optimizer step that trained on `samples` samples. The next step starts at `position`."""
        self.step += 1
        self.step_in_epoch += 1
        self.sample += samples
        self.position = position

    def end_epoch(self) -> None:
        """Count the current epoch as completed."""
        self.epoch += 1
        self.sample = self.position = self.step_in_epoch = 0

    def reset(self, step: int = 0) -> None:
        """Return to the start of the first epoch, with `step` optimizer steps completed."""
        self.load_state_dict({"step": step})

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the values in `state`; missing values become 0."""
        for field in fields(self):
            setattr(self, field.name, state.get(field.name, 0))


@dataclass
class EpochEnd:
    """The end of an epoch whose steps are counted in TrainingProgress: validation, the step of an epoch scheduler,
    callbacks, checkpoint and history.

    Checkpoints store it. After an interruption, the next `fit`, in this process or another one, completes it.
    """

    epoch: int
    """The number of the epoch, starting at 1."""
    results: dict[str, float]
    """The training loss and, if `is_validated`, the results of the validation."""
    speed: dict[str, float]
    """Learning rate, seconds and samples per second, for the history."""
    is_validated: bool = False
    """Whether the validation and the step of an epoch scheduler are complete."""
