"""Record a few steps with torch.profiler, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from unitrain import validation
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.callbacks.callback import Callback, RunningTrainer
from unitrain.errors import ConfigError
from unitrain.output import get_logger, print_to_stderr

_log = get_logger(__name__)


class Profiler(Callback):
    """Records `steps` optimizer steps, after the first `skip` steps of `fit`, in one trace per rank.

    The trace of rank 3 is `rank-3.json.gz` in `folder`, by default `profile` in the output folder. Open it in
    https://ui.perfetto.dev or chrome://tracing. Timestamps are from the clock of each rank's host. `rank-3.txt`
    contains a table of the `table_rows` operators with the longest self time on the GPU or, without a GPU, on the CPU;
    `table_rows=0` omits the file. With `print_table`, rank 0 also prints its table to standard error. `options` are
    passed to torch.profiler.profile, for example `with_stack` and `profile_memory`. Raises ConfigError if no folder is
    set or the folder cannot be created.
    """

    def __init__(
        self,
        *,
        skip: int = 10,
        steps: int = 5,
        folder: str | Path | None = None,
        table_rows: int = 20,
        print_table: bool = False,
        **options: Any,
    ) -> None:
        for name, value, minimum in (("skip", skip, 0), ("steps", steps, 1), ("table_rows", table_rows, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ConfigError(f"Profiler.{name} must be an integer of at least {minimum}, got {value!r}. Use 5.")
        fix = 'Use Profiler(folder="runs/profile")'
        folder = validation.check_path("Profiler(folder=...)", folder, fix, optional=True)
        validation.check_boolean("Profiler.print_table", print_table)
        self.skip, self.steps, self.folder, self.options = skip, steps, folder, options
        self.table_rows, self.print_table = table_rows, print_table
        self._profile: torch.profiler.profile | None = None
        self._steps_done = 0

    def on_fit_start(self, trainer: RunningTrainer) -> None:
        """Create the folder, and start the profiler if no step is skipped."""
        output_dir = trainer.config.output_dir
        self._folder = call_on_all_ranks(
            trainer.backend, lambda: create_folder("Profiler", self.folder, output_dir, "profile")
        )
        self._steps_done = 0
        if self.skip == 0:
            self._start(trainer)

    def on_step_end(self, trainer: RunningTrainer) -> None:
        """Start the profiler after the skipped steps, and stop it after the recorded steps."""
        self._steps_done += 1
        if self._steps_done == self.skip:
            self._start(trainer)
        elif self._profile is not None:
            if self._steps_done == self.skip + self.steps:
                self._stop(trainer)
            else:
                self._profile.step()

    def on_fit_end(self, trainer: RunningTrainer) -> None:
        """Write the trace if `fit` ended before all steps were recorded, even after an exception."""
        if self._profile is not None:
            self._stop(trainer)

    def _start(self, trainer: RunningTrainer) -> None:
        activities = [ProfilerActivity.CPU]
        if trainer.backend.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(**{"activities": activities, **self.options})
        self._profile.start()

    def _stop(self, trainer: RunningTrainer) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            rank = trainer.backend.rank
            try:
                self._write(profile, rank, trainer.backend.device.type)
            except (OSError, RuntimeError) as error:  # for example a full disk, which must not end training
                _log.warning(
                    "Profiler cannot write to '%s' on rank %d: %s. The run continues.", *(self._folder, rank), error
                )

    def _write(self, profile: torch.profiler.profile, rank: int, device_type: str) -> None:
        profile.export_chrome_trace(str(self._folder / f"rank-{rank}.json.gz"))
        if self.table_rows:
            averages = profile.key_averages()
            device = "cuda" if device_type == "cuda" else "cpu"
            table = averages.table(sort_by=f"self_{device}_time_total", row_limit=self.table_rows)
            (self._folder / f"rank-{rank}.txt").write_text(table)
            if self.print_table and rank == 0:
                print_to_stderr([table])


def create_folder(callback_name: str, folder: str | Path | None, output_dir: str | Path | None, default: str) -> Path:
    """Create and return the folder of a callback: `folder`, or else `default` in the output folder.

    Raises ConfigError if both folders are None, or if the folder cannot be created.
    """
    if folder is None and output_dir is None:
        raise ConfigError(
            f"{callback_name} has no folder to write to, and TrainConfig.output_dir is not set. "
            f'Use {callback_name}(folder="runs/{default}").'
        )
    path = Path(folder) if folder is not None else Path(str(output_dir)) / default
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{callback_name} cannot write to '{path}': {error}. Choose another folder.") from error
    return path
