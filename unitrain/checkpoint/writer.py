"""Writing of checkpoints in a background thread, and removal of old ones.

Training waits for the copy of the state to host memory, but not for the disk.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import raise_on_all_ranks
from unitrain.checkpoint import files
from unitrain.checkpoint.output_folder import CHECK_WRITABLE
from unitrain.checkpoint.state_copy import host_copy, plain_state
from unitrain.errors import CheckpointError

# Maximum duration of one collective on the other ranks while rank 0 waits for a lock or a writer.
MAX_WAIT_PER_COLLECTIVE_SECONDS = 1.0
# Time of the first warning about a wait for a checkpoint; each further warning follows after twice the time.
_WARN_AFTER_SECONDS = 60.0

_log = logging.getLogger(__name__)

Mode = Literal["min", "max"]


@dataclass(frozen=True)
class Retention:
    """The checkpoints to keep: the newest `last` ones, one per `every` epochs, and the one with the best result `best`.

    If `last` is None, all checkpoints are kept.
    """

    last: int | None
    every: int | None = None
    best: str | None = None
    mode: Mode = "min"

    def obsolete_checkpoints(self, newest: Path) -> list[Path]:
        """Return the checkpoints to remove, oldest first; `newest` was written last.

        Corrupt checkpoints are ignored. Checkpoints of later steps are also ignored: if they were valid, the run would
        have resumed from them.
        """
        if self.last is None:
            return []
        valid = [path for path in files.list_checkpoints(newest.parent) if path <= newest and files.read_manifest(path)]
        kept = {*valid[: self.last], *self._milestones(valid), *self._best(valid)}
        return [path for path in reversed(valid) if path not in kept]

    def find_best_checkpoint(self, folder: Path) -> Path | None:
        """Return the checkpoint in `folder` with the best result, and the newest one of equal results.

        Return None if no checkpoint has a finite result.
        """
        return next(
            iter(self._best([path for path in files.list_checkpoints(folder) if not files.find_corruption(path)])), None
        )

    def apply(self, newest: Path) -> None:
        """Remove obsolete checkpoints. They are renamed first, so a partly removed one is never loaded."""
        for path in self.obsolete_checkpoints(newest):
            removed = path.with_name(f".{path.name}.unfinished")
            files.remove(removed)
            path.rename(removed)
            files.remove(removed)

    def _milestones(self, checkpoints: list[Path]) -> list[Path]:
        if self.every is None:
            return []
        places = [(path, files.read_manifest(path)) for path in checkpoints]
        return [path for path, place in places if not place.get("sample") and self._is_milestone(place.get("epoch", 1))]

    def _is_milestone(self, epoch: Any) -> bool:
        return self.every is not None and isinstance(epoch, int) and epoch % self.every == 0

    def _best(self, checkpoints: list[Path]) -> list[Path]:
        results = {path: files.read_manifest(path).get("results") for path in checkpoints}
        found = {path: kept.get(self.best) for path, kept in results.items() if isinstance(kept, dict)}
        numbers = {path: one for path, one in found.items() if isinstance(one, int | float) and math.isfinite(one)}
        if not numbers:
            return []
        # `min` and `max` return the first of equal values, which is the newest checkpoint.
        return [(min if self.mode == "min" else max)(numbers, key=lambda path: numbers[path])]


# The writing threads of this process, by folder.
_writing: dict[Path, threading.Thread] = {}


def wait_for_earlier_writer(folder: Path, communicator: Communicator) -> None:
    """Wait until no earlier Trainer in rank 0's process is writing to `folder`, as after an exception in `fit`.

    All ranks call it.
    """
    thread = _writing.get(files.real_path(folder)) if communicator.rank == 0 else None
    _wait_until_written(folder, thread, communicator)


def _wait_until_written(folder: Path, thread: threading.Thread | None, communicator: Communicator) -> None:
    """Wait until rank 0's `thread`, which writes to `folder`, has finished. All ranks call it.

    The wait has no timeout, because a large model may take long, but a long wait is logged.
    """
    began, warn_after_seconds = time.monotonic(), _WARN_AFTER_SECONDS
    # Writing may take longer than the collective timeout, so rank 0 broadcasts its state periodically.
    while communicator.broadcast_object(_is_running_after_wait(thread)):
        seconds = time.monotonic() - began
        if thread is not None and seconds >= warn_after_seconds:
            _log.warning(
                "All ranks have waited for %.0f s for a checkpoint that is being written to '%s'. Check that its file "
                "system responds and has free space: df -h '%s'",
                *(seconds, folder, folder),
            )
            warn_after_seconds = 2 * seconds


def _is_running_after_wait(thread: threading.Thread | None) -> bool:
    """Wait at most MAX_WAIT_PER_COLLECTIVE_SECONDS for `thread` to finish, and return whether it is still running."""
    if thread is None:
        return False
    thread.join(MAX_WAIT_PER_COLLECTIVE_SECONDS)
    return thread.is_alive()


class CheckpointWriter:
    """Writes one checkpoint at a time on rank 0, then removes obsolete ones. All ranks call `save` and `wait`."""

    def __init__(self, folder: Path, communicator: Communicator, retention: Retention, *, asynchronous: bool) -> None:
        self._folder, self._communicator = folder, communicator
        self._retention, self._asynchronous = retention, asynchronous
        self._is_busy = False
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None

    def save(self, step: int, model: nn.Module, training: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Wait for the previous checkpoint, and start to write that of `step`. Rank 0's arguments are used.

        Raises CheckpointError on every rank if writing the previous checkpoint failed, or, without asynchronous
        writing, this one.
        """
        self.wait()
        self._is_busy = True
        if self._communicator.rank == 0:
            self._start(files.checkpoint_path(self._folder, step), (model.state_dict(), training), manifest)
        if not self._asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises CheckpointError on every rank if writing failed."""
        if not self._is_busy:
            return
        _wait_until_written(self._folder, self._thread, self._communicator)
        self._is_busy, error, self._error = False, self._error, None
        raise_on_all_ranks(self._communicator, error)

    def call_when_written(self, function: Callable[[], None]) -> None:
        """Call `function` when this process has finished writing: now, or later in a thread.

        Writing may be unfinished after an exception in `fit`. This method does not communicate.
        """
        thread = self._thread
        if thread is None or not thread.is_alive():
            function()
            return

        def wait() -> None:
            thread.join()
            function()

        threading.Thread(target=wait, name="unitrain checkpoint end", daemon=True).start()

    def _start(self, target: Path, state: tuple[dict[str, Any], dict[str, Any]], manifest: dict[str, Any]) -> None:
        self._thread = None
        if self._asynchronous:
            try:
                # Convert and check the state before training changes it.
                state = host_copy((state[0], plain_state(state[1])))
            except CheckpointError as error:
                self._error = error  # `wait` raises it on every rank
                return
        # Not a daemon thread, so that the interpreter completes the checkpoint before it exits.
        self._thread = threading.Thread(target=self._write, args=(target, *state, manifest), name="unitrain checkpoint")
        self._thread.start()
        _writing[files.real_path(self._folder)] = self._thread

    def _write(self, target: Path, model: dict[str, Any], training: dict[str, Any], manifest: dict[str, Any]) -> None:
        try:
            files.write(target, model, training, manifest)
            self._retention.apply(target)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # stored for `wait`; an exception lost in the thread would make the other ranks hang
            self._error = CheckpointError(f"Cannot write checkpoint '{target}': {error}. {CHECK_WRITABLE}")
            self._error.__cause__ = error
