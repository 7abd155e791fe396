"""Writing checkpoints in a background thread, and removing old ones.

With asynchronous writing, training waits until the previous checkpoint is written and the state is copied to host
memory, but does not wait until the new checkpoint is written.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import raise_on_all_ranks
from unitrain.checkpoint import files, sharded_files
from unitrain.checkpoint.output_folder import CHECK_WRITABLE, run_on_rank_zero
from unitrain.checkpoint.sharded_files import StateShard
from unitrain.checkpoint.state_copy import copy_to_host, plain_state
from unitrain.config import BestMode
from unitrain.errors import CheckpointError
from unitrain.output import get_logger
from unitrain.threads import start_thread

# Maximum time for which a rank waits for a lock or a writer before it takes part in the next collective.
MAX_WAIT_PER_COLLECTIVE_SECONDS = 1.0
# Time until the first warning about a wait for a checkpoint. The time doubles after each warning.
_WARN_AFTER_SECONDS = 60.0

_log = get_logger(__name__)

StateT = TypeVar("StateT")


@dataclass(frozen=True)
class Retention:
    """Selects the checkpoints to keep, with the settings of the same names in TrainConfig. If `keep_last` is None, all
    checkpoints are kept."""

    keep_last: int | None
    keep_every_epochs: int | None = None
    keep_best: str | None = None
    keep_best_mode: BestMode = "min"

    def obsolete_checkpoints(self, newest: Path) -> list[Path]:
        """Return the checkpoints to remove, oldest first; `newest` was written last.

        A checkpoint whose weights are not finite replaces only other such checkpoints. Checkpoints without a readable
        manifest are ignored. Checkpoints of later steps are also ignored: if they were valid, the run would have
        resumed from them.
        """
        if self.keep_last is None:
            return []
        newest_step = files.step_of(newest)
        valid = [
            path
            for path in files.list_checkpoints(newest.parent)
            if files.step_of(path) <= newest_step and files.read_manifest(path)
        ]
        usable = list(filter(files.is_finite, valid)) or valid
        kept_checkpoints = {
            newest, *usable[: self.keep_last], *self._milestones(usable), *self.sort_by_result(usable)[:1],
        }  # fmt: skip
        return [path for path in reversed(valid) if path not in kept_checkpoints]

    def sort_by_result(self, checkpoints: list[Path]) -> list[Path]:
        """Return the checkpoints with a finite result named `keep_best`, the best one first, and those whose weights
        are not finite last.

        `checkpoints` must be sorted, newest first. Among equal results, newer checkpoints come first.
        """
        results = {path: files.read_manifest(path).get("results") for path in checkpoints}
        value_by_path = {
            path: results_of_checkpoint.get(self.keep_best)
            for path, results_of_checkpoint in results.items()
            if isinstance(results_of_checkpoint, dict)
        }
        result_by_path = {
            path: result
            for path, result in value_by_path.items()
            if isinstance(result, int | float) and math.isfinite(result)
        }
        # `sorted` keeps the order of equal results.
        return files.finite_first(
            sorted(result_by_path, key=lambda path: result_by_path[path], reverse=self.keep_best_mode == "max")
        )

    def remove_obsolete(self, newest: Path) -> None:
        """Remove obsolete checkpoints. Each is renamed first, so a partially removed checkpoint is never loaded."""
        for path in self.obsolete_checkpoints(newest):
            removed = path.with_name(f".{path.name}.unfinished")
            files.remove(removed)
            path.rename(removed)
            files.remove(removed)

    def _milestones(self, checkpoints: list[Path]) -> list[Path]:
        if self.keep_every_epochs is None:
            return []
        manifests = [(path, files.read_manifest(path)) for path in checkpoints]
        return [
            path
            for path, manifest in manifests
            if not manifest.get("sample") and self._is_milestone(manifest.get("epoch", 1))
        ]

    def _is_milestone(self, epoch: Any) -> bool:
        return self.keep_every_epochs is not None and isinstance(epoch, int) and epoch % self.keep_every_epochs == 0


# The last writer in this process that wrote to a folder, by folder.
_writers: dict[Path, CheckpointWriter] = {}


def wait_for_earlier_writer(folder: Path, communicator: Communicator) -> None:
    """Wait until earlier Trainers have finished writing to `folder` on all ranks. All ranks must call this function.

    A Trainer may still be writing after an exception in its `fit`.
    """
    writer = _writers.get(files.real_path(folder))
    _wait_until_written(folder, _NO_PENDING_WRITE if writer is None else writer.current_write, communicator)


@dataclass
class _PendingWrite:
    """A checkpoint that this process is writing, or the error that occurred while writing it. If `abandoned_event` is
    set, rank 0 stops waiting for the files of other ranks."""

    thread: threading.Thread | None = None
    error: CheckpointError | None = None
    abandoned_event: threading.Event = field(default_factory=threading.Event)

    def is_running_after_wait(self) -> bool:
        """Wait at most MAX_WAIT_PER_COLLECTIVE_SECONDS for the thread to finish, and return whether it is still
        running."""
        if self.thread is None:
            return False
        self.thread.join(MAX_WAIT_PER_COLLECTIVE_SECONDS)
        return self.thread.is_alive()


_NO_PENDING_WRITE = _PendingWrite()


def _wait_until_written(folder: Path, pending_write: _PendingWrite, communicator: Communicator) -> None:
    """Wait until all ranks have finished writing a checkpoint to `folder`. All ranks must call this function.

    The wait has no timeout, because writing a large model may take long, but a long wait is logged.
    """
    start_time, warn_after_seconds = time.monotonic(), _WARN_AFTER_SECONDS
    while True:
        # Writing may take longer than the collective timeout, so the ranks exchange their state periodically.
        flags = [pending_write.is_running_after_wait(), pending_write.error is not None]
        is_running, has_failed = communicator.allreduce(
            torch.tensor(flags, dtype=torch.int32, device="cpu"), "max"
        ).tolist()
        if not is_running:
            return
        if has_failed:
            pending_write.abandoned_event.set()
        seconds = time.monotonic() - start_time
        if pending_write.thread is not None and seconds >= warn_after_seconds:
            _log.warning(
                "All ranks have waited for %.0f s for a checkpoint that is being written to '%s'. Check that its file "
                "system responds and has free space: df -h '%s'",
                *(seconds, folder, folder),
            )
            warn_after_seconds = 2 * seconds


class CheckpointWriter:
    """Writes one checkpoint at a time, then removes obsolete ones. All ranks call `save`, `save_sharded` and `wait`.

    `on_written(step, path, seconds)` is called on rank 0, in the thread of the writer, when a checkpoint has been
    written.
    """

    def __init__(
        self,
        folder: Path,
        communicator: Communicator,
        retention: Retention,
        *,
        asynchronous: bool,
        on_written: Callable[[int, Path, float], None] | None = None,
    ) -> None:
        self._folder, self._communicator = folder, communicator
        self._retention, self._asynchronous, self._on_written = retention, asynchronous, on_written
        self._has_unawaited_write = False
        self.current_write = _NO_PENDING_WRITE
        """The last checkpoint that this process started to write."""

    def save(self, step: int, model: nn.Module, training: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Wait for the previous checkpoint, and start to write the checkpoint of `step` on rank 0, with rank 0's
        arguments.

        Raises CheckpointError on every rank if writing the previous checkpoint failed, or, without asynchronous
        writing, this one.
        """
        self.wait()
        self.current_write = _PendingWrite()
        target = files.checkpoint_path(self._folder, step)
        weights = model.state_dict()  # called on all ranks, because it gathers sharded parameters
        trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if self._communicator.rank == 0:
            state = weights, training

            def copy_state() -> tuple[dict[str, Any], dict[str, Any]]:
                return copy_to_host((state[0], plain_state(state[1])))

            def write(state: tuple[dict[str, Any], dict[str, Any]]) -> None:
                start_time = time.monotonic()
                is_finite = files.are_finite(value for name, value in state[0].items() if name in trainable)
                files.write(target, *state, {**manifest, files.FINITE: is_finite})
                self._report_written(step, target, start_time)
                self._retention.remove_obsolete(target)

            self._start_writing(target, state, copy_state, write)
        self._wait_if_synchronous()

    def save_sharded(self, step: int, shard: StateShard, training: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Wait for the previous checkpoint, and start to write this rank's `shard` of the checkpoint of `step`.

        Rank 0's `training` and `manifest` are used. Raises CheckpointError like `save`, on every rank if writing fails
        on any rank.
        """
        self.wait()
        rank, size = self._communicator.rank, self._communicator.size
        target = files.checkpoint_path(self._folder, step)
        staging_folder = sharded_files.staging_path(target)

        def create_staging_folder() -> str:
            """Create an empty staging folder. Return a new token for the checkpoint."""
            files.remove(staging_folder)
            staging_folder.mkdir()
            return secrets.token_hex(8)

        task_description = f"write checkpoint '{target}'"
        token: str = self._communicator.broadcast_object(
            run_on_rank_zero(self._communicator, task_description, CHECK_WRITABLE, create_staging_folder)
        )
        self.current_write = pending_write = _PendingWrite()

        def copy_state() -> tuple[StateShard, dict[str, Any]]:
            return shard.copy_to_host(), copy_to_host(plain_state(training)) if rank == 0 else {}

        def write(state: tuple[StateShard, dict[str, Any]]) -> None:
            start_time = time.monotonic()
            sharded_files.write_shard(staging_folder, state[0], rank, token)
            if rank == 0:
                event = pending_write.abandoned_event
                if sharded_files.commit(target, *state, manifest, size=size, token=token, abandoned_event=event):
                    self._report_written(step, target, start_time)
                    self._retention.remove_obsolete(target)

        self._start_writing(target, (shard, training), copy_state, write)
        self._wait_if_synchronous()

    def wait(self) -> None:
        """Wait until the last checkpoint is written. Raises CheckpointError on every rank if writing failed."""
        if not self._has_unawaited_write:
            return
        pending_write, self._has_unawaited_write = self.current_write, False
        _wait_until_written(self._folder, pending_write, self._communicator)
        error, pending_write.error = pending_write.error, None
        raise_on_all_ranks(self._communicator, error)

    def call_when_written(self, function: Callable[[], None]) -> None:
        """Call `function` when this process has finished writing: immediately, or later in a thread.

        Writing may be unfinished after an exception in `fit`. Later waits for the write then also wait for `function`.
        This method does not communicate.
        """
        thread = self.current_write.thread
        if thread is None or not thread.is_alive():
            function()
            return

        def wait() -> None:
            thread.join()
            function()

        self.current_write.thread = start_thread(wait, name="unitrain checkpoint end")

    def _report_written(self, step: int, target: Path, start_time: float) -> None:
        """Report a checkpoint that has been written."""
        if self._on_written is not None:
            self._on_written(step, target, time.monotonic() - start_time)

    def _wait_if_synchronous(self) -> None:
        self._has_unawaited_write = True
        if not self._asynchronous:
            self.wait()

    def _start_writing(
        self, target: Path, state: StateT, copy_state: Callable[[], StateT], write: Callable[[StateT], None]
    ) -> None:
        """Call `write` in a thread, with `state` or, if writing is asynchronous, with the copy returned by
        `copy_state`."""
        pending_write = self.current_write
        if self._asynchronous:
            try:
                # Convert and check the state before training changes it.
                state = copy_state()
            except Exception as error:  # `wait` raises it on all ranks; otherwise the other ranks would hang
                fix = "To write the checkpoint without this copy, use TrainConfig(async_checkpoints=False)."
                pending_write.error = self._to_checkpoint_error(error, f"copy the state of '{target}'", fix)
                return

        def run() -> None:
            try:
                write(state)
            except BaseException as error:  # `wait` raises it on all ranks; otherwise the other ranks would hang
                pending_write.error = self._to_checkpoint_error(error, f"write checkpoint '{target}'", CHECK_WRITABLE)

        # Not a daemon thread, so that the interpreter completes the checkpoint before it exits.
        pending_write.thread = start_thread(run, name="unitrain checkpoint", daemon=False)
        _writers[files.real_path(self._folder)] = self

    def _to_checkpoint_error(self, error: BaseException, task_description: str, fix: str) -> CheckpointError:
        """Return `error` if it is a CheckpointError, otherwise a CheckpointError
        "Cannot `task_description`: ... `fix`" with this cause."""
        if isinstance(error, CheckpointError):
            return error
        where = f" on rank {self._communicator.rank}" if self._communicator.rank else ""
        problem = str(error) or type(error).__name__  # MemoryError has no text
        checkpoint_error = CheckpointError(f"Cannot {task_description}{where}: {problem}. {fix}")
        checkpoint_error.__cause__ = error
        return checkpoint_error
