"""Checkpoints in the memory of rank 0's host. A job resumes from them if `unitrain launch` restarts it on this host.

With asynchronous writing, the checkpoint of a step is written during the next step, and is complete before the
optimizer step of that next step. Therefore, with an interval of n steps, a restart repeats at most n completed steps.

Checkpoints in memory have the format of checkpoints on disk, and are written to a folder in shared memory, which
remains when the processes of an attempt end (`bootstrap.memory_folder`). Only the newest one is kept. If a checkpoint
in memory cannot be written or is corrupt, the run uses its checkpoints on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from unitrain.backends.base import Backend, Communicator
from unitrain.bootstrap import environment
from unitrain.checkpoint import files
from unitrain.checkpoint.output_folder import find_on_rank_zero
from unitrain.checkpoint.writer import CheckpointWriter, Retention, wait_for_earlier_writer
from unitrain.config import TrainConfig
from unitrain.errors import CheckpointError
from unitrain.output import get_logger

_FIX = "Leave TrainConfig.memory_checkpoint_every_steps out, or start ranks that share /dev/shm."

_log = get_logger(__name__)


class MemoryCheckpoints:
    """The newest checkpoint of a run, stored in `folder` in shared memory. All ranks must call every method."""

    def __init__(self, folder: Path, communicator: Communicator, *, asynchronous: bool) -> None:
        self._folder, self._communicator = folder, communicator
        self._writer: CheckpointWriter | None = CheckpointWriter(
            folder, communicator, Retention(1), asynchronous=asynchronous
        )

    @classmethod
    def create(cls, config: TrainConfig, communicator: Communicator, *, is_sharded: bool) -> MemoryCheckpoints | None:
        """Return the MemoryCheckpoints of a run, or None. Does not communicate.

        Return None if the run keeps no checkpoints in memory, if the launcher does not restart its job on this host, if
        /dev/shm is not usable (with a warning), or if ranks on several hosts, which do not share memory, would write
        portions of the same checkpoint (`is_sharded`). In the first attempt of the job, the folder is empty, unless an
        earlier Trainer of this job had the same output folder.
        """
        root = environment.get_variable(environment.SHARED_MEMORY_FOLDER_VARIABLE)
        if config.memory_checkpoint_every_steps is None or config.output_dir is None:
            return None
        if root is None:
            error = environment.get_variable(environment.SHARED_MEMORY_ERROR_VARIABLE)
            if error is not None and communicator.rank == 0:
                _log.warning(
                    "The run keeps no checkpoints in memory, because /dev/shm is not usable: %s. A restart repeats the "
                    "steps after the last checkpoint on disk. Make /dev/shm writable (in a container: docker run "
                    "--shm-size=8g ...), or leave TrainConfig.memory_checkpoint_every_steps out.",
                    error,
                )
            return None
        if is_sharded and isinstance(communicator, Backend) and communicator.num_nodes > 1:
            if communicator.rank == 0:
                _log.warning(
                    "The run keeps no checkpoints in memory, because its checkpoints are sharded over %d hosts. Use "
                    "TrainConfig(checkpoint_format='full').",
                    communicator.num_nodes,
                )
            return None
        output_folder = str(files.real_path(Path(config.output_dir)))
        folder = Path(root) / hashlib.sha256(output_folder.encode()).hexdigest()[:16]
        return cls(folder, communicator, asynchronous=config.async_checkpoints)

    def prepare_and_find_newer(self, disk_folder: Path, *, continues: bool) -> Path | None:
        """Prepare the folder, and return the newest valid checkpoint in memory if it is newer than the valid ones in
        `disk_folder`, else None. All ranks must call this method.

        If `continues` is False, a new run starts: remove the checkpoints of an earlier run with the same output folder,
        which would otherwise remain the newest ones. Checkpoints in memory that belong to a different run than the
        checkpoints in `disk_folder` are ignored. The result of rank 0 is returned on every rank, so that all ranks
        resume at the same step.
        """
        wait_for_earlier_writer(self._folder, self._communicator)

        def find(check: Callable[[Path], str | None]) -> Path | None:
            self._folder.mkdir(exist_ok=True)
            files.remove_unfinished(self._folder)
            on_disk = files.list_checkpoints(disk_folder)
            run_ids = {files.read_manifest(path).get(files.RUN_ID) for path in on_disk}
            for path in files.finite_first(files.list_checkpoints(self._folder)):
                if not continues:
                    files.remove(path)
                    continue
                # A checkpoint on disk is verified only if it would take precedence over this checkpoint.
                if any(check(other) is None for other in on_disk if _precedence(other) >= _precedence(path)):
                    return None
                skip_reason = check(path)
                if skip_reason is None and run_ids and files.read_manifest(path).get(files.RUN_ID) not in run_ids:
                    skip_reason = f"it was written by a different run than the checkpoints in '{disk_folder}'"
                if skip_reason is None:
                    return path
                _log.warning("Checkpoint '%s' is skipped: %s.", path, skip_reason)
            return None

        try:
            return find_on_rank_zero(self._communicator, "read checkpoints in memory", _FIX, find)
        except CheckpointError as error:  # raised on every rank
            self._disable(error)
        return None

    def call_with_writer(self, function: Callable[[CheckpointWriter], None]) -> None:
        """Call `function` with the writer of these checkpoints. After a CheckpointError, which is logged, no more
        checkpoints are written to memory."""
        if self._writer is None:
            return
        try:
            function(self._writer)
        except CheckpointError as error:  # raised on every rank
            self._disable(error)

    @property
    def is_enabled(self) -> bool:
        """Whether checkpoints can be written. The same on every rank."""
        return self._writer is not None

    def wait(self) -> None:
        """Wait until the last checkpoint is written."""
        self.call_with_writer(CheckpointWriter.wait)

    def _disable(self, error: CheckpointError) -> None:
        self._writer = None
        if self._communicator.rank == 0:
            files.remove_unfinished(self._folder)  # DataLoader workers and NCCL also use /dev/shm
            _log.warning(
                "The run keeps no checkpoints in memory, so a restart repeats the steps after the last checkpoint on "
                "disk. %s",
                error,
            )


def _precedence(checkpoint: Path) -> tuple[bool, int]:
    """Return a key that is larger for checkpoints from which a run resumes in preference to others."""
    return files.is_finite(checkpoint), files.step_of(checkpoint)
