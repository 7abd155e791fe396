"""Saving and loading the checkpoints of a run, on any backend and any number of ranks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unitrain.backends.base import Communicator
from unitrain.backends.objects import broadcast_tensors, broadcast_with_tensors
from unitrain.backends.sharding.state_chunks import load_own_state, parameter_groups
from unitrain.backends.sharding.state_format import state_dicts_of_shards, state_dicts_on_rank
from unitrain.backends.sharding.tensor_chunks import is_distributed_tensor
from unitrain.backends.synchronized_errors import call_on_all_ranks, raise_on_all_ranks
from unitrain.checkpoint import files, loading, output_folder
from unitrain.checkpoint.folder_lock import FolderLock
from unitrain.checkpoint.memory import MemoryCheckpoints
from unitrain.checkpoint.output_folder import CHECK_WRITABLE, find_on_rank_zero, run_on_all_ranks, run_on_rank_zero
from unitrain.checkpoint.sharded_files import AVERAGE_FOLDER, StoredOptimizerState, collect_shard, load_module
from unitrain.checkpoint.writer import (
    MAX_WAIT_PER_COLLECTIVE_SECONDS,
    CheckpointWriter,
    Retention,
    wait_for_earlier_writer,
)
from unitrain.config import TrainConfig
from unitrain.data.batch_size import InitialBatchSizes
from unitrain.errors import CheckpointError, ConfigError
from unitrain.output import get_logger

COMPRESSION_STATE, AVERAGE = "gradients", "average"
# Entries of the training state that `load_checkpoint` returns on rank 0 only, because they may be much larger than the
# model.
_RANK_ZERO_PARTS = (COMPRESSION_STATE, loading.LOCAL_SGD)
_FIX = "Read it with the versions of torch and unitrain that wrote it."

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class CheckpointContents:
    """State of a run after `step` optimizer steps, which `Checkpointer.save` writes without modifying it.

    `average` is the state of the averaged weights, or None. Only rank 0's `training` state and `manifest` values are
    saved, except that a sharded checkpoint contains the local SGD state of every rank.
    """

    step: int
    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: dict[str, Any] | None
    training: dict[str, Any]
    manifest: dict[str, Any]


class Checkpointer:
    """Saves and loads the checkpoints of a run. All ranks must call every method, except those that do not communicate.

    Only rank 0 accesses the files, except those of sharded checkpoints, which all ranks access. The Checkpointer
    manages the output folder: its lock, the background writer, and the retention of checkpoints. Without an output
    folder, nothing is saved. `on_written(step, path, seconds)` is called on rank 0, in the thread of the writer, when a
    checkpoint has been written to disk. The methods that communicate raise CheckpointError on every rank if a file
    access fails, except for checkpoints in memory, where a failure is logged.
    """

    def __init__(
        self,
        config: TrainConfig,
        communicator: Communicator,
        on_written: Callable[[int, Path, float], None] | None = None,
    ) -> None:
        self._config, self._communicator = config, communicator
        self.folder = None if config.output_dir is None else Path(config.output_dir)
        self.stored_batch_sizes: list[InitialBatchSizes] = []
        """Batch sizes of an elastic job, stored by earlier attempts or this one, one per call of `fit`."""
        self._retention = Retention(config.keep_last, config.keep_every_epochs, config.keep_best, config.keep_best_mode)
        self._lock: FolderLock | None = None
        # On rank 0: the checkpoints in the folder when the run selected one of them, or when it last released the lock.
        self._known_checkpoints: dict[Path, tuple[int, int]] = {}
        self._writer: CheckpointWriter | None = None
        if self.folder is not None:
            self._lock = FolderLock(self.folder)
            self._writer = CheckpointWriter(
                self.folder,
                communicator,
                self._retention,
                asynchronous=config.async_checkpoints,
                on_written=on_written,
            )
        self._memory = MemoryCheckpoints.create(config, communicator, is_sharded=self.is_sharded)
        self._last_save_time = time.monotonic()

    def prepare(self) -> Path | None:
        """Create the output folder. If the run resumes from this folder, return its path, or the path of a newer
        checkpoint in memory; otherwise return None.

        The run resumes if `TrainConfig.resume` selects this folder, or if an earlier attempt of this job wrote to it.
        """
        resume, folder = self._config.resume, self.folder
        if folder is None:
            return None
        wait_for_earlier_writer(folder, self._communicator)
        self._identify_checkpoints()
        selects_this_folder = resume is True or (resume and files.real_path(Path(resume)) == files.real_path(folder))
        continues, self.stored_batch_sizes = output_folder.prepare_folder(
            folder, self._communicator, resume=bool(selects_this_folder)
        )
        in_memory = None if self._memory is None else self._memory.prepare_and_find_newer(folder, continues=continues)
        return (in_memory or folder) if continues else None

    def load(
        self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, *, required: bool
    ) -> dict[str, Any] | None:
        """Call `load_checkpoint`. If both the run and the checkpoint are sharded, the optimizer state is not loaded;
        the caller loads it later with `load_optimizer_state`.
        """
        defers_optimizer_state = self._config.shard != "none"
        return load_checkpoint(
            path,
            model,
            optimizer,
            scheduler,
            self._communicator,
            required=required,
            defers_optimizer_state=defers_optimizer_state,
        )

    def load_optimizer_state(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's shard of the optimizer state from sharded checkpoint `path`."""
        communicator, task_description = self._communicator, f"restore the optimizer state from '{path}'"
        fix = "Use the same optimizer as the run that wrote it."
        # Only rank 0 reads the positions of the tensors, so that the other ranks open only the files that they need.
        stored_state = run_on_rank_zero(communicator, task_description, fix, lambda: StoredOptimizerState.open(path))
        stored: StoredOptimizerState = communicator.broadcast_object(stored_state)
        with state_dicts_of_shards():
            run_on_all_ranks(communicator, task_description, fix, lambda: load_own_state(optimizer, stored))

    def load_average(self, path: Path, average: nn.Module) -> None:
        """Load the averaged weights of sharded checkpoint `path` into `average` on every rank."""
        task_description = f"restore the averaged weights from '{path}'"
        _load_modules(
            self._communicator, [average], task_description, lambda: load_module(path, AVERAGE_FOLDER, average)
        )

    def save(self, state: CheckpointContents, *, in_memory: bool = False) -> None:
        """Save a checkpoint of `state` to disk, or to host memory if `in_memory` is True.

        In the sharded format, every rank writes a portion of the state. With `async_checkpoints`, this method returns
        as soon as the previous checkpoint is written and the state is copied to host memory. Raises CheckpointError on
        every rank if writing the previous checkpoint failed or, without `async_checkpoints`, if writing this one fails.
        """
        if self._writer is None:
            return
        if in_memory:
            assert self._memory is not None
            self._memory.call_with_writer(lambda writer: self._save(writer, state))
            return
        self._last_save_time = time.monotonic()
        self._save(self._writer, state)

    def _save(self, writer: CheckpointWriter, state: CheckpointContents) -> None:
        model, optimizer, average, training = state.model, state.optimizer, state.average, dict(state.training)
        if not self.is_sharded:
            with self.state_format():
                training["optimizer"] = optimizer.state_dict()
                if average is not None:
                    training[AVERAGE] = average
                writer.save(state.step, model, training, state.manifest)
            return
        communicator = self._communicator
        weights = None
        if average is not None:
            weights = average["model"]
            training[AVERAGE] = {name: value for name, value in average.items() if name != "model"}
        with self.state_format():
            training["optimizer"] = {"param_groups": parameter_groups(optimizer)}
            shard = call_on_all_ranks(
                communicator, lambda: collect_shard(model, optimizer, weights, communicator.rank, communicator.size)
            )
        if loading.LOCAL_SGD in training:
            local = dict(training[loading.LOCAL_SGD])
            shard = replace(shard, local_state=local.pop("own"))
            training[loading.LOCAL_SGD] = local
        writer.save_sharded(state.step, shard, training, state.manifest)

    def state_format(self) -> AbstractContextManager[None]:
        """Return the context manager in which sharded models and optimizers return state dicts for saving.

        For the sharded format, these contain the shards; for the full format, they contain complete tensors on rank 0,
        which are gathered one at a time.
        """
        return state_dicts_of_shards() if self.is_sharded else state_dicts_on_rank(0)

    def wait(self) -> None:
        """Wait until the last checkpoints on disk and in memory are written.

        Raises CheckpointError on every rank if writing to disk failed.
        """
        if self._writer is not None:
            self._writer.wait()
        self.wait_for_memory()

    def wait_for_memory(self) -> None:
        """Wait until the last checkpoint in memory is written, without waiting for the disk.

        The Trainer calls this method before each optimizer step. Therefore, when a rank completes a step, the previous
        checkpoint in memory is complete, and a restart repeats at most the steps of one interval.
        """
        if self._memory is not None:
            self._memory.wait()

    @property
    def is_enabled(self) -> bool:
        """Whether the run has an output folder."""
        return self._writer is not None

    @property
    def is_memory_enabled(self) -> bool:
        """Whether the run also keeps checkpoints in memory. The same on every rank."""
        return self._memory is not None and self._memory.is_enabled

    @property
    def is_sharded(self) -> bool:
        """Whether all ranks write checkpoints in parallel."""
        checkpoint_format = self._config.checkpoint_format
        return checkpoint_format == "sharded" or (checkpoint_format == "auto" and self._config.shard != "none")

    @property
    def is_due(self) -> bool:
        """Whether `checkpoint_every_minutes` have elapsed on this rank since the last checkpoint on disk, or since this
        object was created.
        """
        minutes = self._config.checkpoint_every_minutes
        return self.is_enabled and minutes is not None and time.monotonic() - self._last_save_time >= 60 * minutes

    def lock_folder(self) -> None:
        """Lock the folder, record this job as its owner, and remove incomplete files of killed runs.

        Raises CheckpointError on every rank if another process still holds the lock when the timeout of FolderLock
        expires, or if another process has written a checkpoint since `prepare` or since the lock was last released.
        """
        folder, lock = self.folder, self._lock
        if folder is None or lock is None:
            return
        # After an exception in an earlier `fit`, this process may still be writing its last checkpoint.
        wait_for_earlier_writer(folder, self._communicator)

        def try_to_lock() -> bool:
            if not lock.acquire(MAX_WAIT_PER_COLLECTIVE_SECONDS):
                return False
            try:
                self._check_no_new_checkpoints(folder)
                files.remove_unfinished(folder)
                output_folder.record_job(folder)
            except BaseException:
                lock.release()
                raise
            return True

        # Rank 0 may wait for the lock longer than the collective timeout, so it broadcasts periodically whether it
        # holds the lock.
        task_description = f"write to output folder '{folder}'"
        while not self._communicator.broadcast_object(
            run_on_rank_zero(self._communicator, task_description, CHECK_WRITABLE, try_to_lock)
        ):
            pass

    @contextmanager
    def release_folder_at_end(self) -> Iterator[None]:
        """Context manager that releases the lock on exit or, if a checkpoint is still being written, later in a
        thread. Does not communicate.
        """
        try:
            yield
        finally:
            if self._lock is not None and self._writer is not None:
                self._writer.call_when_written(self.release_folder)

    def release_folder(self) -> None:
        """Release the lock immediately. Does not communicate."""
        if self._lock is not None:
            self._identify_checkpoints()
            self._lock.release()

    def _identify_checkpoints(self) -> None:
        """On rank 0, store which checkpoints are in the folder. Raises no error: `prepare_folder` reports a folder that
        cannot be read."""
        if self.folder is not None and self._communicator.rank == 0:
            with suppress(OSError):
                self._known_checkpoints = files.identify_checkpoints(self.folder)

    def _check_no_new_checkpoints(self, folder: Path) -> None:
        """Raise CheckpointError if another process has written a checkpoint after this run selected one, or after this
        run last released the lock. Only rank 0 calls it, while it holds the lock.

        The run would otherwise repeat steps, and write checkpoints of earlier steps to the same folder.
        """
        found = files.identify_checkpoints(folder)
        new = next((path for path, identity in found.items() if self._known_checkpoints.get(path) != identity), None)
        if new is not None:
            raise CheckpointError(
                f"Another process wrote checkpoint '{new}' after this run had read the output folder. Start the run "
                "again with TrainConfig(resume=True) to continue from this checkpoint, or choose another output_dir."
            )

    def store_batch_size(self, fit_index: int, batch_size: InitialBatchSizes) -> None:
        """Store the batch size of the `fit` call with index `fit_index`, for later attempts with different numbers of
        ranks."""
        if self.folder is None or fit_index != len(self.stored_batch_sizes):
            return
        folder = self.folder
        self.stored_batch_sizes.append(batch_size)
        task_description = f"write to output folder '{folder}'"
        run_on_rank_zero(
            self._communicator,
            task_description,
            CHECK_WRITABLE,
            lambda: output_folder.store_batch_size(folder, fit_index, batch_size),
        )

    def find_best(self) -> Path:
        """Wait until the last checkpoint is written, and return the best checkpoint according to `keep_best`.

        Raises ConfigError if `keep_best` or the output folder is not set, and CheckpointError if no valid checkpoint
        has a finite value of this result.
        """
        name, folder = self._config.keep_best, self.folder
        if name is None or folder is None:
            raise ConfigError(
                "The best checkpoint is unknown, because the run does not keep it. Use "
                'TrainConfig(output_dir="runs/first", keep_best="val_loss").'
            )
        self.wait()

        def find(check: Callable[[Path], str | None]) -> Path:
            reasons: list[str] = []
            # Stop at the first valid checkpoint, because verifying all of them may take minutes.
            for path in self._retention.sort_by_result(files.list_checkpoints(folder)):
                if (reason := check(path)) is None:
                    return path
                reasons.append(reason)
                _log.warning("Checkpoint '%s' is skipped: %s.", path, reason)
            if reasons:
                raise CheckpointError(
                    f"No checkpoint in '{folder}' with a result {name!r} is valid (checked: {len(reasons)}); in the "
                    f"best one, {reasons[0]}. Restore the files from a copy, or train another epoch: trainer.fit(...)."
                )
            raise CheckpointError(
                f"No checkpoint in '{folder}' has a finite result {name!r}. Train an epoch first: trainer.fit(...)."
            )

        fix = "Check that the folder is readable."
        return find_on_rank_zero(self._communicator, f"look for the best checkpoint in '{folder}'", fix, find)


def load_checkpoint(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    communicator: Communicator,
    *,
    required: bool,
    defers_optimizer_state: bool = False,
) -> dict[str, Any] | None:
    """Load the checkpoint `path`, or the newest valid one in folder `path`; return its `training` state.

    All ranks must call this function. The result is None if there is no checkpoint and `required` is False. It is equal
    on all ranks, except that only rank 0 returns the state of gradient compression and of local SGD, because this state
    may be much larger than the model. Only rank 0 reads the files and loads `model` and `optimizer`;
    `distributed_model` and `distributed_optimizer` broadcast them later. With `defers_optimizer_state`, only the
    hyperparameters of the optimizer are loaded from a sharded checkpoint. Every rank loads `scheduler`. Raises
    CheckpointError on every rank if all checkpoints are corrupt, if there is none and `required` is True, or if the
    checkpoint does not match the model, optimizer or scheduler.
    """
    checkpoint = find_checkpoint(path, communicator, required=required)
    if checkpoint is None:
        return None
    training: dict[str, Any] | None = run_on_rank_zero(
        communicator,
        f"restore from '{path}'",
        _FIX,
        lambda: loading.load(checkpoint, model, optimizer, scheduler, defers_optimizer_state=defers_optimizer_state),
    )
    rank_zero_parts: dict[str, Any] = {}
    if training is not None:
        rank_zero_parts = {name: training.pop(name) for name in _RANK_ZERO_PARTS if name in training}
    training = broadcast_with_tensors(communicator, training)  # averaged weights are as large as the model
    assert training is not None
    training |= rank_zero_parts
    problem: CheckpointError | None = None
    if "scheduler" in training and scheduler is not None and communicator.rank != 0:
        try:
            scheduler.load_state_dict(copy.deepcopy(training["scheduler"]))
        except Exception as error:  # if only this rank raised the error, the other ranks would hang
            name, error_text = type(scheduler).__name__, f"{type(error).__name__}: {error}"
            problem = CheckpointError(
                f"Cannot restore from '{path}': {name}.load_state_dict raised {error_text} on rank "
                f"{communicator.rank}. Use the same scheduler on every rank as the run that wrote it."
            )
            problem.__cause__ = error
    raise_on_all_ranks(communicator, problem)
    return training


def load_weights(path: Path, model: nn.Module, average: nn.Module | None, communicator: Communicator) -> None:
    """Load the weights of checkpoint `path`, or of the newest one in folder `path`, into `model` on every rank.

    If `average` is not None, the averaged weights are loaded into it. All ranks must call this function. Rank 0 reads
    the files; if a module contains DTensors, every rank reads them. Raises CheckpointError on every rank if no
    checkpoint is valid, if it does not match the model, or if `average` is not None and it has no averaged weights.
    """
    checkpoint = find_checkpoint(path, communicator, required=True)
    assert checkpoint is not None
    modules = [model] if average is None else [model, average]
    task_description = f"load the weights of '{path}'"
    _load_modules(communicator, modules, task_description, lambda: loading.load_weights(checkpoint, model, average))


def find_checkpoint(path: Path, communicator: Communicator, *, required: bool) -> Path | None:
    """Return checkpoint `path`, or the newest valid one in folder `path`; None if there is none. All ranks must call
    this function.

    Each rank verifies some of the files of a sharded checkpoint. Raises CheckpointError on every rank if all
    checkpoints are corrupt, if there is none and `required` is True, or if a checked one has a newer format.
    """

    def find(check: Callable[[Path], str | None]) -> Path | None:
        return files.find_newest_valid(path, required=required, check=check)

    return find_on_rank_zero(communicator, f"restore from '{path}'", _FIX, find)


def _load_modules(
    communicator: Communicator, modules: Iterable[nn.Module], task_description: str, load: Callable[[], None]
) -> None:
    """Call `load`, which loads `modules`, on rank 0, and broadcast the tensors of the modules. If a module contains
    DTensors, every rank calls `load` instead. All ranks must call this function."""
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    fix = "Use the same model as the run that wrote it."
    if any(map(is_distributed_tensor, tensors)):
        with state_dicts_of_shards():
            run_on_all_ranks(communicator, task_description, fix, load)
        return
    run_on_rank_zero(communicator, task_description, fix, load)
    with torch.no_grad():
        for tensor in tensors:
            broadcast_tensors(communicator, [tensor])  # one at a time, so that the model is not in memory twice
