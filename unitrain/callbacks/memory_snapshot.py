"""Record the allocations of GPU memory during a few steps, on every rank."""

from __future__ import annotations

from pathlib import Path

import torch

from unitrain import validation
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.callbacks.callback import Callback, RunningTrainer
from unitrain.callbacks.profiler import create_folder
from unitrain.output import get_logger

_log = get_logger(__name__)


class MemorySnapshot(Callback):
    """Records the allocations of GPU memory in `steps` optimizer steps, after the first `skip` steps of `fit`.

    The snapshot of rank 3 is `rank-3.pickle` in `folder`, by default `memory` in the output folder. Open it in
    https://pytorch.org/memory_viz, which shows each allocation with its Python stack. A snapshot contains at most the
    last `max_entries` events. The snapshot is also written if an exception, such as torch.OutOfMemoryError, ends the
    run during the recording.

    torch records no history for CPUs: on CPUs, rank 0 logs a warning, and nothing is written. Use
    `Profiler(profile_memory=True)` or `unitrain memory` instead. Raises ConfigError if no folder is set or the folder
    cannot be created.
    """

    def __init__(
        self, *, skip: int = 2, steps: int = 3, folder: str | Path | None = None, max_entries: int = 100_000
    ) -> None:
        validation.check_integer("MemorySnapshot.skip", skip, 0, "Use 2")
        validation.check_integer("MemorySnapshot.steps", steps, 1, "Use 3")
        validation.check_integer("MemorySnapshot.max_entries", max_entries, 1, "Use 100_000")
        fix = 'Use MemorySnapshot(folder="runs/memory")'
        folder = validation.check_path("MemorySnapshot(folder=...)", folder, fix, optional=True)
        self.skip, self.steps, self.folder, self.max_entries = skip, steps, folder, max_entries
        self._folder: Path | None = None
        self._steps_done = 0
        self._is_recording = False

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Create the folder, and start recording if no step is skipped."""
        self._folder, self._steps_done = None, 0
        if trainer.backend.device.type != "cuda":
            if trainer.backend.rank == 0:
                _log.warning(
                    "MemorySnapshot records GPU memory, but this run computes on %s, so it writes nothing. Use "
                    "unitrain.Profiler(profile_memory=True), or unitrain memory.",
                    trainer.backend.device.type,
                )
            return
        output_dir = trainer.config.output_dir
        self._folder = call_on_all_ranks(
            trainer.backend, lambda: create_folder("MemorySnapshot", self.folder, output_dir, "memory")
        )
        if self.skip == 0:
            self._start()

    def on_step_end(self, trainer: RunningTrainer) -> None:
        """Start recording after the skipped steps, and write the snapshot after the recorded steps."""
        self._steps_done += 1
        if self._folder is None:
            return
        if self._steps_done == self.skip:
            self._start()
        elif self._steps_done == self.skip + self.steps:
            self._write(trainer)

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """Write the snapshot if `fit` ended before all steps were recorded, even after an exception."""
        self._write(trainer)

    def _start(self) -> None:
        # The documentation of torch describes these functions, although their names begin with an underscore.
        torch.cuda.memory._record_memory_history(max_entries=self.max_entries, stacks="python")
        self._is_recording = True

    def _write(self, trainer: RunningTrainer) -> None:
        if self._is_recording and self._folder is not None:
            self._is_recording = False
            torch.cuda.memory._dump_snapshot(str(self._folder / f"rank-{trainer.backend.rank}.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
