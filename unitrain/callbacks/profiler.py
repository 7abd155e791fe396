"""A window of a few steps through torch's profiler, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity

from unitrain import validation
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.callbacks.callback import Callback
from unitrain.errors import ConfigError

if TYPE_CHECKING:
    from unitrain.trainer import Trainer


class Profiler(Callback):
    """Records `steps` optimizer steps, after the first `skip` of a call of `fit`, in a trace for every rank.

    Rank 3's is `rank-3.json.gz` in `folder`, by default `profile` in the output folder; https://ui.perfetto.dev and
    chrome://tracing show it. The ranks' clocks are their hosts'. Further arguments are torch.profiler.profile's, such
    as `with_stack` and `profile_memory`. Raises ConfigError where no folder is known or one cannot be made.
    """

    def __init__(self, *, skip: int = 10, steps: int = 5, folder: str | Path | None = None, **options: Any) -> None:
        for name, value, least in (("skip", skip, 0), ("steps", steps, 1)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ConfigError(f"Profiler.{name} must be a number of steps from {least} on, got {value!r}. Use 5.")
        validation.folder("Profiler(folder=...)", folder, 'Use Profiler(folder="runs/profile")', optional=True)
        self.skip, self.steps, self.folder, self.options = skip, steps, folder, options
        self._profile: torch.profiler.profile | None = None
        self._done = 0

    def on_fit_start(self, trainer: Trainer) -> None:
        """Make the folder, and begin at once where nothing is to be skipped."""
        self._folder = call_on_all_ranks(trainer.backend, lambda: self._make_folder(trainer.config.output_dir))
        self._done = 0
        if self.skip == 0:
            self._begin(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        """Begin or end the window after this step."""
        self._done += 1
        if self._done == self.skip:
            self._begin(trainer)
        elif self._profile is not None:
            if self._done == self.skip + self.steps:
                self._end(trainer)
            else:
                self._profile.step()

    def on_fit_end(self, trainer: Trainer) -> None:
        """Keep what a run that was shorter than the window has done of it."""
        if self._profile is not None:
            self._end(trainer)

    def _make_folder(self, output_dir: str | Path | None) -> Path:
        if self.folder is None and output_dir is None:
            raise ConfigError(
                "Profiler has no folder to write its traces to, and TrainConfig.output_dir is not set. "
                'Use Profiler(folder="runs/profile").'
            )
        folder = Path(self.folder) if self.folder is not None else Path(str(output_dir)) / "profile"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"Profiler cannot write to '{folder}': {error}. Choose another folder.") from error
        return folder

    def _begin(self, trainer: Trainer) -> None:
        activities = [ProfilerActivity.CPU]
        if trainer.backend.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, **self.options)
        self._profile.start()

    def _end(self, trainer: Trainer) -> None:
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()
            profile.export_chrome_trace(str(self._folder / f"rank-{trainer.backend.rank}.json.gz"))
