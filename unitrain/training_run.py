"""The state of a training run without the model and the optimizer, and its history on disk."""

from __future__ import annotations

import math
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unitrain import randomness
from unitrain.backends.base import Backend
from unitrain.backends.capabilities import SupportsPowerSGD, require_capability
from unitrain.backends.checks import check_same_weights
from unitrain.backends.compression_setting import PowerSGD, resolve_compression
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.bootstrap import environment
from unitrain.checkpoint import files, loading
from unitrain.checkpoint.checkpointer import AVERAGE, COMPRESSION_STATE, CheckpointContents, Checkpointer
from unitrain.checkpoint.output_folder import CHECK_WRITABLE, run_on_rank_zero
from unitrain.config import TrainConfig
from unitrain.data.batch_size import InitialBatchSizes
from unitrain.data.stream_state import StreamState
from unitrain.data.training_data import TrainingData, describe_order_fix
from unitrain.errors import CheckpointError, UnitrainError
from unitrain.metrics.running_loss import RunningLoss
from unitrain.modules.buffers import broadcast_buffers
from unitrain.optim.ema import WeightAverage
from unitrain.optim.local_sgd import LocalSGD
from unitrain.optim.scheduler_settings import Settings, check_settings, read_settings, unchanged_settings
from unitrain.output import get_logger
from unitrain.progress.history import EPOCHS, STARTS, STEPS, History
from unitrain.progress.reproducibility_settings import (
    reproducibility_settings,
    warn_of_differences,
    warn_of_different_processes,
)
from unitrain.progress.training_progress import EpochEnd, TrainingProgress
from unitrain.regular_files import replace_file

_LEARNING_RATE_SETTINGS = ("lr_scaling", "reference_batch_size", "warmup_steps")
_LOSS, _RUN, _VERSIONS = "loss", "run", "versions"  # keys in the training state
# Versions of the parts of the training state; _RUN stands for the fields that `TrainingRun.save` adds. Increase the
# version if the structure of a part changes, and let its `load_state_dict` accept the earlier structures, of which
# `tests/support/stored_runs` contains checkpoints. A missing version is 1.
STATE_VERSIONS = {
    _RUN: 2, _LOSS: 1, "precision": 1, "callbacks": 1, "weighting": 1, AVERAGE: 1, COMPRESSION_STATE: 1,
    loading.LOCAL_SGD: 1,
}  # fmt: skip
_log = get_logger(__name__)
_PACKAGES = ("unitrain", "horovod", "numpy")


class Stateful(Protocol):
    """An object of the run whose state is saved in checkpoints, in types that `torch.load(weights_only=True)` accepts.

    All ranks call both methods, so the methods may communicate. The state of rank 0 is stored.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class TrainingRun:
    """The state of a training run without the model and the optimizer. All ranks must call every method.

    Saves and restores `progress`, the RNG state, `running_loss` and `stateful_objects` with the Checkpointer, and
    writes the history. `epoch_end` is the end of the current epoch while it is incomplete, otherwise None.
    `data_state` is the state of a stateful dataset on this rank after the last step. `config_text` is stored in the
    output folder and in checkpoints. `description` contains class names, settings and versions, for the history and the
    loggers. `is_elastic` states whether the job may be restarted with a different number of ranks.
    `continues_in_folder` states whether the run continues a run in the output folder, because of `TrainConfig.resume`
    or because an earlier attempt of this job started that run. Raises CheckpointError on every rank if the folder is
    not writable, or contains a run that cannot be resumed.
    """

    def __init__(
        self,
        config: TrainConfig,
        backend: Backend,
        checkpointer: Checkpointer,
        running_loss: RunningLoss,
        stateful_objects: Mapping[str, Stateful],
        config_text: str | None = None,
    ) -> None:
        self.progress = TrainingProgress()
        self.epoch_end: EpochEnd | None = None
        self.is_checkpoint_due = False
        """Whether a checkpoint on disk is due at the next opportunity: after a step, or at the end of the epoch."""
        self.data_state: StreamState | None = None
        self.description: dict[str, Any] = {}
        self.is_elastic = environment.is_elastic()
        self.continues_in_folder = False
        self._config, self._backend, self._checkpointer = config, backend, checkpointer
        self._running_loss, self._stateful_objects = running_loss, {_LOSS: running_loss, **stateful_objects}
        self._config_text = config_text
        self._id = secrets.token_hex(8)
        self._restored_training: dict[str, Any] | None = None
        self._rng_states: dict[str, Any] | None = None
        self._data_order: dict[str, Any] | None = None
        self._saved_data_state: dict[str, Any] | None = None
        # The results of the weights after `_completed_step` steps, at the end of an epoch or of a run that stopped
        # within an epoch, and their row in the history.
        self._results: dict[str, float] = {}
        self._row: dict[str, Any] | None = None
        self._completed_step = self._saved_step = -1
        self._scheduler_settings: Settings = {}  # with which a scheduler object was built
        self._is_row_from_this_run = self._is_history_rewound = False
        self._is_seeded = self._has_rounding_differences = False
        self._data: TrainingData | None = None
        self._fit_count = 0
        self._has_history_failed = False

    def restore(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        """Prepare the output folder, and restore the run from a checkpoint if the configuration requests it.

        Call it before the model is wrapped, because wrapping broadcasts the parameters from rank 0. If the job was
        restarted after a failure, checkpoints of earlier attempts take precedence over `TrainConfig.resume`.
        """
        resume, parts = self._config.resume, (model, optimizer, scheduler)
        self._scheduler_settings = call_on_all_ranks(
            self._backend, lambda: read_settings(scheduler) if isinstance(scheduler, LRScheduler) else {}
        )
        if self._config.logical_ranks is not None:
            warn_of_different_processes(self._backend)
        resume_path = self._checkpointer.prepare()
        restored = resume_path is not None and self._restore(resume_path, *parts, required=False)
        if restored and self._restored_training is not None:
            self._id = self._restored_training.get(files.RUN_ID) or self._id
        if not restored and not isinstance(resume, bool):
            self._restore(Path(resume), *parts, required=True)
        self.continues_in_folder = resume_path is not None
        self._is_row_from_this_run, self._is_history_rewound = restored, False
        self.description = _describe_objects(model, optimizer, scheduler)

    def restore_optimizer_state(self, optimizer: Optimizer) -> None:
        """Restore this rank's shard of the optimizer state. Call it after `distributed_optimizer`.

        Without sharding, `restore` loads the state on rank 0, and `distributed_optimizer` broadcasts it.
        """
        sharded_checkpoint = None if self._restored_training is None else self._restored_training.get(loading.SHARDED)
        if sharded_checkpoint is not None and self._config.shard != "none":
            self._checkpointer.load_optimizer_state(Path(sharded_checkpoint), optimizer)

    def track_compression_state(self, model: nn.Module, get_loss_scale: Callable[[], Tensor | None]) -> None:
        """Also save the PowerSGD state of the wrapped `model` in checkpoints, and restore it.

        `get_loss_scale` returns the scale of the gradients, see CompressionState. Raises UnsupportedError if the
        backend does not support PowerSGD, and CheckpointError if the saved state does not match the model.
        """
        if not isinstance(resolve_compression(self._config.compression), PowerSGD):
            return
        feature = f"TrainConfig.compression {self._config.compression!r}"
        state = require_capability(self._backend, SupportsPowerSGD, feature).compression_state(model)
        state.get_loss_scale = get_loss_scale
        self._stateful_objects = {**self._stateful_objects, COMPRESSION_STATE: state}
        if self._restored_training is not None:
            _load_part(COMPRESSION_STATE, state, self._restored_training.pop(COMPRESSION_STATE, {}))

    def track_local_sgd(self, local_sgd: LocalSGD) -> None:
        """Also save the state of `local_sgd` in checkpoints, and restore it. Raises CheckpointError if the state does
        not match."""
        self._stateful_objects = {**self._stateful_objects, loading.LOCAL_SGD: local_sgd}
        if self._restored_training is not None:
            _load_part(loading.LOCAL_SGD, local_sgd, self._restored_training.pop(loading.LOCAL_SGD, {}))

    @property
    def is_complete(self) -> bool:
        """Whether the configured number of epochs or steps is trained, and the end of the last epoch is complete."""
        is_end_complete = self.epoch_end is None and self._completed_step == self.progress.step
        return self.has_reached_limit and (is_end_complete if self.progress.sample else self.epoch_end is None)

    @property
    def has_reached_limit(self) -> bool:
        """Whether the configured number of epochs or steps is trained."""
        epochs, steps, progress = self._config.max_epochs, self._config.max_steps, self.progress
        return (epochs is not None and progress.epoch >= epochs) or (steps is not None and progress.step >= steps)

    @property
    def is_epoch_checkpoint_due(self) -> bool:
        """Whether a checkpoint is due at the end of the current epoch. A checkpoint of this step without results is
        completed."""
        is_due = self.progress.epoch % self._config.checkpoint_every_epochs == 0
        return is_due or self.is_checkpoint_due or self.has_reached_limit or self.is_saved

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of the current step on disk, possibly without results."""
        return self._saved_step == self.progress.step

    @property
    def is_epoch_at_limit(self) -> bool:
        """Whether `limit_train_steps` steps of the current epoch are completed."""
        limit = self._config.limit_train_steps
        return limit is not None and self.progress.step_in_epoch >= limit

    def end_epoch_if_complete(self, data: TrainingData) -> bool:
        """End the current epoch if all its steps are completed, and return whether it has ended."""
        if self.is_epoch_at_limit:
            data.end_epoch()
        elif not data.close_and_check_epoch_end(self.progress.position):
            return False
        self.progress.end_epoch()
        return True

    @property
    def stored_batch_size(self) -> InitialBatchSizes | None:
        """The batch size that an earlier attempt of an elastic job stored for this `fit` call; None if there is
        none."""
        stored = self._checkpointer.stored_batch_sizes
        return stored[self._fit_count] if self._fit_count < len(stored) else None

    def start(self, data: TrainingData) -> None:
        """Lock the folder, and start or resume training on `data`, with the RNG state of the checkpoint or the seed.

        The folder remains locked until `Checkpointer.release_folder_at_end`. Raises CheckpointError on every rank if
        another job holds the lock, or if the run resumes within an epoch and the order settings of `data` differ from
        those of the checkpoint. A run that resumes at the start of an epoch may use different data.
        """
        # A callback may have changed the length of the data between the epochs of an earlier `fit`.
        order = (self._data_order if self._data is None else self._data.order_settings) or data.order_settings
        for name in {**data.order_settings, **order} if self.progress.sample else ():
            saved, current = order.get(name), data.order_settings.get(name)
            if saved != current:
                raise CheckpointError(
                    f"The run is {self.progress.sample} samples into epoch {self.progress.epoch + 1} of training data "
                    f"with {name}={saved}, but this data has {name}={current}: samples would be repeated or skipped. "
                    f"{describe_order_fix(name, saved)} Or continue from a checkpoint at the end of an epoch."
                )
        if self.progress.sample and not self.has_reached_limit:
            self.epoch_end = None  # an interrupted stop within an epoch, which continues
        self._checkpointer.lock_folder()
        try:
            self._start(data)
        except BaseException:
            self._checkpointer.release_folder()
            raise

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        *,
        in_memory: bool = False,
    ) -> None:
        """Save a checkpoint of the run, with the results of its weights if they are known. `model` is the user's
        module.

        With `in_memory`, the checkpoint is written to the memory of this host instead of the disk. If a restarted job
        could not read the checkpoint there, no checkpoint is written. A checkpoint of the same step is replaced. Raises
        NonFiniteLossError on every rank if a loss of the epoch is not finite.
        """
        if not (self._checkpointer.is_memory_enabled if in_memory else self._checkpointer.is_enabled):
            return
        if not in_memory:
            self._saved_step, self.is_checkpoint_due = self.progress.step, False
        is_complete = self._completed_step == self.progress.step
        results, row = (self._results, self._row) if is_complete else ({}, None)
        # The weights were already checked at the end of an epoch. Frequent checkpoints in memory skip the check.
        if row is None and not in_memory:
            self.check_weights(model)
        broadcast_buffers(model, self._backend)
        with self._checkpointer.state_format():
            parts = {name: part.state_dict() for name, part in self._stateful_objects.items()}
        # Weights after a loss that is not finite must not replace earlier ones. The losses are already gathered.
        self._running_loss.check_finite(parts[_LOSS], self.progress.epoch + 1, self.progress.step)
        average = parts.pop(AVERAGE, None)
        training = {
            **parts,
            _VERSIONS: STATE_VERSIONS,
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "scheduler_settings": self._unchanged_scheduler_settings(scheduler),
            "classes": loading.class_names(optimizer, scheduler),
            "progress": self.progress.state_dict(),
            "epoch_end": None if self.epoch_end is None else asdict(self.epoch_end),
            "seed": self._config.seed,
            "learning_rate": {name: getattr(self._config, name) for name in _LEARNING_RATE_SETTINGS},
            "order": self._data_order if self._data is None else self._data.order_settings,
            **self._gather_data_state(),
            "row": row,
            "logical_ranks": self._config.logical_ranks,
            **self._gather_random_state(),
        }
        manifest = {
            files.RUN_ID: self._id,
            **self.progress.state_dict(),
            "results": {name: value if math.isfinite(value) else None for name, value in results.items()},
            "config": {
                name: str(value) if isinstance(value, Path) else value for name, value in asdict(self._config).items()
            },
        }
        if self._config_text is not None:
            manifest[files.CONFIG] = self._config_text
        state = CheckpointContents(
            step=self.progress.step,
            model=model,
            optimizer=optimizer,
            average=average,
            training=training,
            manifest=manifest,
        )
        self._checkpointer.save(state, in_memory=in_memory)

    def _unchanged_scheduler_settings(self, scheduler: Any) -> Settings:
        is_object = isinstance(scheduler, LRScheduler)  # a PlannedScheduler saves its own settings
        return unchanged_settings(self._scheduler_settings, scheduler) if is_object else {}

    def _gather_random_state(self) -> dict[str, Any]:
        """Return the RNG states of all ranks or, with logical ranks, the settings on which bit-identical results
        depend. All ranks must call this method.
        """
        if self._config.logical_ranks is not None:
            return {"preconditions": reproducibility_settings(self._backend.device)}
        return {"generators": self._backend.allgather_object(randomness.capture_generators(self._backend.device))}

    def _gather_data_state(self) -> dict[str, Any]:
        """Return {"data": state} with the gathered state of the data, or {} if there is no state to save. All ranks
        must call this method."""
        epoch, position = self.progress.epoch, self.progress.position
        data = self._data
        if data is None or not (data.is_stateful and position):
            return {}
        state = data.gather_state(self.data_state, epoch, position)
        if state is None:  # no step since the run was restored
            saved = self._saved_data_state or {}
            return {"data": saved} if (saved.get("epoch"), saved.get("position")) == (epoch, position) else {}
        return {"data": state}

    def check_weights(self, model: nn.Module) -> None:
        """Raise ModelError on every rank if the weights of `model`, the user's module, differ between ranks. All ranks
        must call this method. With local SGD, nothing is compared, because the ranks train different weights.

        If the weights differ by rounding errors only, this method logs a warning once, and later calls compare nothing.
        """
        if not self._config.check_weights or self._config.local_sgd is not None or self._has_rounding_differences:
            return
        self._has_rounding_differences = not check_same_weights(self._backend, model)
        if self._has_rounding_differences and self._backend.rank == 0:
            _log.warning(
                "The weights of the ranks differ by rounding errors, probably because the ranks compute on different "
                "processors. They are not compared again. To disable the comparison: TrainConfig(check_weights=False)."
            )

    @contextmanager
    def completing_epoch(self, phase_seconds: Mapping[str, Any]) -> Iterator[None]:
        """Context manager that completes `epoch_end`: the block saves a checkpoint if one is due, and the row of the
        epoch, with `phase_seconds`, is then appended to the history.

        The checkpoint also contains the row. If the run is killed before the row is written, the resumed run writes it.
        After an exception, `epoch_end` remains incomplete.
        """
        end = self.epoch_end
        assert end is not None
        row = {"epoch": end.epoch, "step": self.progress.step, **end.results, **end.speed}
        self._results, self._row, self._completed_step = end.results, self._with_epoch_count(row), self.progress.step
        self.epoch_end = None
        try:
            yield
            self._change_history(EPOCHS, lambda history: self._record(history, EPOCHS, {**row, **phase_seconds}))
        except BaseException:
            self.epoch_end = end
            raise

    def discard_results(self) -> None:
        """Discard the results of the current weights. Call it when the weights have been replaced."""
        self._results, self._row = {}, None

    def record_steps(self, row: dict[str, Any]) -> None:
        """Record the metrics of a logging interval.

        Does not communicate. If the row cannot be written, a warning is logged once.
        """
        if self._checkpointer.folder is not None and self._backend.rank == 0:
            self._record(History(self._checkpointer.folder), STEPS, row)

    def _record(self, history: History, file_name: str, row: dict[str, Any]) -> None:
        """Append a row on rank 0. The history only reports on the run, so an error does not end it: only a checkpoint
        that cannot be written does."""
        try:
            history.append(file_name, self._with_epoch_count(row))
        except OSError as error:
            if not self._has_history_failed:
                _log.warning("'%s' cannot be written: %s. The run continues.", history.folder / file_name, error)
            self._has_history_failed = True

    def _start(self, data: TrainingData) -> None:
        if not self._is_history_rewound:
            # Rewind even if no checkpoint was restored, because an attempt that failed before its first checkpoint may
            # have written rows.
            self._change_history("", self._rewind)
            self._is_history_rewound = True
        if self._config.logical_ranks is not None:
            randomness.seed_after_step(self._config.seed, self.progress.step)
        elif self._rng_states is not None:
            randomness.restore_generators(self._rng_states, self._backend.device)
        elif not self._is_seeded:
            path = (self.progress.step, self._backend.rank)
            randomness.seed_generators(randomness.derive_seed(self._config.seed, randomness.SeedPurpose.RANK, *path))
        self._rng_states, self._is_seeded = None, True
        if self._data is not None:  # an earlier `fit` of this run
            state = self._data.state_to_save(self.data_state, self.progress.epoch, self.progress.position)
            self._saved_data_state = state or self._saved_data_state
        data.resume_from(self._saved_data_state)
        self._data, self.data_state = data, None
        self._store_batch_size(data)
        if not self.is_complete:
            self._store_config_text()
            self.description |= _describe_start(self._config, self._backend, data)
            row = {"step": self.progress.step, **self.description}
            self._change_history(STARTS, lambda history: history.append(STARTS, self._with_epoch_count(row)))

    def _store_config_text(self) -> None:
        folder, text = self._checkpointer.folder, self._config_text
        if folder is not None and text is not None:
            path = folder / files.CONFIG
            task = f"write '{path}'"
            run_on_rank_zero(self._backend, task, CHECK_WRITABLE, lambda: replace_file(path, text, is_durable=True))

    def _store_batch_size(self, data: TrainingData) -> None:
        data.begin_epoch(0)
        fit_index, batch_size, global_batch_size = self._fit_count, data.batch_size, data.global_batch_size
        data.begin_epoch(self.progress.epoch)
        self._fit_count += 1
        if self.is_elastic and batch_size and global_batch_size:
            self._checkpointer.store_batch_size(fit_index, InitialBatchSizes(batch_size, global_batch_size))

    def _restore(self, path: Path, model: nn.Module, optimizer: Optimizer, scheduler: Any, *, required: bool) -> bool:
        """Restore the run from `path`, and return whether `path` contains a checkpoint."""
        config = self._config
        training = self._checkpointer.load(path, model, optimizer, scheduler, required=required)
        if training is None:
            return False
        if not isinstance(training.get("progress"), dict):
            raise CheckpointError(
                f"The checkpoint in '{path}' contains no training progress, so unitrain did not write it during "
                f"training. Start a new run from its weights: trainer.load_weights('{path}')."
            )
        for name, saved_version in training.get(_VERSIONS, {}).items():
            if saved_version > STATE_VERSIONS.get(name, saved_version):
                raise CheckpointError(
                    f"The state {name!r} in '{path}' has version {saved_version}, from a newer unitrain; this one "
                    f"reads versions up to {STATE_VERSIONS[name]}. Update unitrain, or start a new run from its "
                    f"weights: trainer.load_weights('{path}')."
                )
        if training.get("seed", config.seed) != config.seed:
            raise CheckpointError(
                f"The run in '{path}' has seed {training['seed']}, but TrainConfig.seed is {config.seed}: the data "
                f"order would change. Use TrainConfig(seed={training['seed']})."
            )
        if training.get("logical_ranks") != config.logical_ranks:
            raise CheckpointError(
                f"The run in '{path}' has logical_ranks={training.get('logical_ranks')}, but TrainConfig.logical_ranks "
                f"is {config.logical_ranks}: its results would change. Use "
                f"TrainConfig(logical_ranks={training.get('logical_ranks')}), or start a new run from its weights: "
                f"trainer.load_weights('{path}')."
            )
        for name, value in training.get("learning_rate", {}).items():
            if value != getattr(config, name):
                raise CheckpointError(
                    f"The run in '{path}' has {name}={value!r}, but TrainConfig.{name} is {getattr(config, name)!r}: "
                    f"its learning rates would change. Use TrainConfig({name}={value!r})."
                )
        saved_settings, settings = training.get("scheduler_settings", {}), self._scheduler_settings
        call_on_all_ranks(self._backend, lambda: check_settings(saved_settings, settings, scheduler))
        self.progress.load_state_dict(training["progress"])
        end = training.get("epoch_end")
        self.epoch_end = None if end is None else EpochEnd(**end)
        self._data_order = training.get("order")
        self._results, self._row = training[loading.RESULTS], training.get("row")
        self._completed_step = -1 if self._row is None else self.progress.step
        self._saved_step = self.progress.step
        self._saved_data_state = training.get("data")
        for name, part in self._stateful_objects.items():
            _load_part(name, part, training.get(name, {}))
        sharded_checkpoint, average = training.get(loading.SHARDED), self._stateful_objects.get(AVERAGE)
        if sharded_checkpoint is not None and isinstance(average, WeightAverage) and AVERAGE in training:
            self._checkpointer.load_average(Path(sharded_checkpoint), average.stored_model)
            average.round_averages()
        if config.logical_ranks is not None:
            warn_of_differences(training.get("preconditions", {}), self._backend, str(path))
        self._restored_training = training
        states = training.get("generators", [])
        self._rng_states = states[self._backend.rank] if len(states) == self._backend.size else None
        return True

    def _rewind(self, history: History) -> None:
        history.rewind(self.progress.step)
        if self._is_row_from_this_run and self._row is not None:
            history.append(EPOCHS, self._row)

    def _with_epoch_count(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return `row` with the number of epochs trained so far. Within an epoch, the number is fractional, or None if
        the length of the data is unknown."""
        assert self._data is not None
        epochs: float | None = self.progress.epoch
        if self.progress.sample:
            length = self._data.samples_in_epoch()
            epochs = self.progress.epoch + self.progress.sample / length if length else None
        return {**row, "epochs": epochs}

    def _change_history(self, file_name: str, change: Callable[[History], None]) -> None:
        folder = self._checkpointer.folder
        if folder is not None:
            history, task = History(folder), f"write '{folder / file_name}'"
            run_on_rank_zero(self._backend, task, CHECK_WRITABLE, lambda: change(history))


def _load_part(name: str, part: Stateful, state: dict[str, Any]) -> None:
    """Call `part.load_state_dict(state)`. Raises CheckpointError if the state does not have the expected structure. All
    ranks must call this function."""
    try:
        part.load_state_dict(state)
    except UnitrainError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"The state {name!r} in the checkpoint cannot be restored: {type(error).__name__}: {error}. Resume with "
            "the unitrain and the callbacks that wrote it, or start from its weights: trainer.load_weights(...)."
        ) from error


def _describe_objects(model: nn.Module, optimizer: Optimizer, scheduler: Any) -> dict[str, Any]:
    """Return the class names of the model, optimizer and scheduler, and the number of parameters."""
    return {
        "model": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "optimizer": type(optimizer).__name__,
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }


def _describe_start(config: TrainConfig, backend: Backend, data: TrainingData) -> dict[str, Any]:
    """Describe the start of a run: time, backend, data, settings and versions."""
    on_gpu = backend.device.type == "cuda"
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "backend": backend.name,
        "transport": backend.transport,
        "size": backend.size,
        "num_nodes": backend.num_nodes,
        "device": torch.cuda.get_device_name(backend.device) if on_gpu else backend.device.type,
        "samples_per_epoch": data.samples_in_epoch(),
        "steps_per_epoch": data.steps_in_epoch(),
        "batch_size": data.batch_size,
        "global_batch_size": data.global_batch_size,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, **_package_versions()},
        "config": {name: value for name, value in asdict(config).items() if value is not None},
    }


def _package_versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # unitrain is not installed, or Horovod is missing
            continue
    return versions
