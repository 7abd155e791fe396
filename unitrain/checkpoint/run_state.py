"""How far a run has come, and what it leaves in its folder: checkpoints that it goes on from, and a history."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from unitrain import randomness
from unitrain.backends.base import Backend
from unitrain.backends.capabilities import SupportsPowerSGD, require
from unitrain.backends.compression_setting import PowerSGD, read_compression
from unitrain.bootstrap import environment
from unitrain.checkpoint import checkpointer, files, job
from unitrain.checkpoint.description import describe_parts, describe_start
from unitrain.checkpoint.folder_lock import FolderLock
from unitrain.checkpoint.retention import Retention
from unitrain.checkpoint.writer import CheckpointWriter, wait_for_earlier_writer
from unitrain.config import TrainConfig
from unitrain.data.batch_size import ElasticBatchSize
from unitrain.data.training_data import TrainingData
from unitrain.errors import CheckpointError, ConfigError
from unitrain.modules.buffers import share_buffers
from unitrain.progress.history import EPOCHS, STARTS, STEPS, History
from unitrain.progress.stopping import Stopping
from unitrain.progress.training_progress import TrainingProgress


class Stateful(Protocol):
    """A part of the run with a state that checkpoints keep; in types that `torch.load(weights_only=True)` takes.

    All ranks call both, so that they may communicate; what rank 0 returns is kept.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Run:
    """The state of a run beside model and optimizer. All ranks use it alike; without an output folder nothing is kept.

    `parts` are what else has a state. `stopping` is how the run ends before its time, `description` what it is,
    `elastic` whether it may go on with another number of ranks when it is started again.
    Raises CheckpointError, on every rank alike, when the folder cannot be written to, holds another run, or holds one
    that this cannot go on from.
    """

    def __init__(self, config: TrainConfig, backend: Backend, parts: Mapping[str, Stateful]) -> None:
        self.progress = TrainingProgress()
        self.stopping = Stopping(
            backend,
            max_seconds=config.max_seconds,
            signals=() if config.output_dir is None else config.preemption_signals,
        )
        self._parts = parts
        self._config, self._backend = config, backend
        self._folder = None if config.output_dir is None else Path(config.output_dir)
        self._writer: CheckpointWriter | None = None
        self._lock: FolderLock | None = None
        if self._folder is not None:
            self._lock = FolderLock(self._folder)
            retention = Retention(config.keep_last, config.keep_every, config.keep_best, config.keep_best_mode)
            self._writer = CheckpointWriter(self._folder, backend, retention, asynchronous=config.async_checkpoints)
        self._restored: dict[str, Any] | None = None
        self._generators: dict[str, Any] | None = None
        self._order: dict[str, Any] | None = None
        self._row: dict[str, Any] | None = None
        self._row_is_own = self._rewound = False
        self._seeded = False
        self._share: TrainingData | None = None
        self.description: dict[str, Any] = {}
        self.elastic = environment.is_elastic()
        self._kept_batches: list[ElasticBatchSize] = []
        self._fits = 0
        self._saved = time.monotonic()
        self._unwritten: OSError | None = None

    def keep_gradients(self, model: nn.Module, loss_scale: Callable[[], Tensor | None]) -> None:
        """Keep what compression remembers of the gradients of the wrapped `model` too; restored here if the run was.

        `loss_scale` is that of GradientMemory. All ranks call it. Raises UnsupportedError where the backend remembers
        nothing, CheckpointError where the state does not fit.
        """
        if not isinstance(read_compression(self._config.compression), PowerSGD):
            return
        feature = f"TrainConfig.compression {self._config.compression!r}"
        memory = require(self._backend, SupportsPowerSGD, feature).compression_state(model)
        memory.loss_scale = loss_scale
        self._parts = {**self._parts, checkpointer.GRADIENTS: memory}
        if self._restored is not None:
            memory.load_state_dict(self._restored.pop(checkpointer.GRADIENTS, {}))

    def finished(self) -> bool:
        """Whether all epochs or steps that the configuration asks for are done, or the run was stopped before."""
        return self.stopping.reason is not None or self._complete()

    def steps_left(self, share: TrainingData) -> int | None:
        """Return how many optimizer steps are left to do, None where the length of the data is unknown."""
        if self._config.max_steps is not None:
            return max(0, self._config.max_steps - self.progress.step)
        epochs = (self._config.max_epochs or 0) - self.progress.epoch
        here, whole = share.steps_in_epoch(self.progress.position), share.steps_in_epoch()
        if here is None or whole is None:
            return None
        if (limit := self._config.limit_train_steps) is not None:
            here, whole = min(here, limit - self.progress.step_in_epoch), min(whole, limit)
        return 0 if epochs <= 0 else here + (epochs - 1) * whole

    def prepare(self, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        """Make the folder, and restore what an earlier run left where the configuration says so; change nothing there.

        It is before the model is wrapped, which passes rank 0's parameters on to the other ranks. Where the job is
        another attempt at one that has failed, what that one has left comes before what the configuration says.
        """
        resume, folder, parts = self._config.resume, self._folder, (model, optimizer, scheduler)
        restored = False
        if folder is not None:
            wait_for_earlier_writer(folder, self._backend)
            own = resume is True or (resume and Path(resume).resolve() == folder.resolve())
            goes_on, self._kept_batches = checkpointer.prepare_folder(folder, self._backend, resume=bool(own))
            if goes_on:
                restored = self._restore(folder, *parts, required=False)
        if not restored and not isinstance(resume, bool):
            self._restore(Path(resume), *parts, required=True)
        self._row_is_own, self._rewound = restored, False
        self.description = describe_parts(model, optimizer, scheduler)

    @property
    def kept_batch(self) -> ElasticBatchSize | None:
        """How large the steps of this call of `fit` were when an elastic job began; None where it begins here."""
        return self._kept_batches[self._fits] if self._fits < len(self._kept_batches) else None

    def begin(self, share: TrainingData) -> None:
        """Go on in `share`'s data with this rank's random numbers, which repeat with the seed or are the checkpoint's.

        From here on to the end of `holding_folder` no other job can write to the folder. Raises CheckpointError, on all
        ranks, where another job does, or where the progress is inside an epoch of data in another order. From one epoch
        to the next the data may change.
        """
        order = self._order or share.order_settings
        for name in {**share.order_settings, **order} if self.progress.sample else ():
            had, has = order.get(name), share.order_settings.get(name)
            if had != has:
                raise CheckpointError(
                    f"The run is {self.progress.sample} samples into epoch {self.progress.epoch + 1} of training data "
                    f"with {name}={had}, but this data has {name}={has}: samples would repeat or be "
                    "missed. Go on with the same data, or from a checkpoint at the end of an epoch."
                )
        if self._folder is not None and self._lock is not None:
            checkpointer.take_folder(self._folder, self._lock, self._backend)
        try:
            self._start(share)
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise

    def _start(self, share: TrainingData) -> None:
        if not self._rewound:
            # A run that ended before its first checkpoint has left rows too, so this is not for a restored one only.
            self._write_history("", self._rewind)
            self._rewound = True
        self._order = share.order_settings
        if self._generators is not None:
            randomness.restore_generators(self._generators, self._backend.device)
        elif not self._seeded:
            path = (self.progress.step, self._backend.rank)
            seed = randomness.derive_seed(self._config.seed, randomness.Stream.RANK, *path)
            randomness.seed_generators(seed)
        self._generators, self._seeded = None, True
        self._share, self._unwritten = share, None
        self._keep_batch(share)
        if not self._complete():
            self.description |= describe_start(self._config, self._backend, share)
            self._record(STARTS, {"step": self.progress.step, **self.description})

    @contextmanager
    def holding_folder(self) -> Iterator[None]:
        """Release the folder at the end, so that another job may write to it."""
        try:
            yield
        finally:
            if self._lock is not None and self._writer is not None:
                self._writer.when_written(self._lock.release)

    def record(self, row: dict[str, Any]) -> None:
        """Add the `row` of an epoch to the history."""
        self._record(EPOCHS, row)

    def record_step(self, row: dict[str, Any]) -> None:
        """Add a `row` to the history of steps. The ranks do not wait for it: if it fails, the next `record` does."""
        if self._folder is not None and self._backend.rank == 0 and self._unwritten is None:
            try:
                History(self._folder).append(STEPS, self._placed(row))
            except OSError as error:
                self._unwritten = error

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scheduler: Any,
        results: Mapping[str, float],
        row: dict[str, Any] | None,
    ) -> None:
        """Write a checkpoint, or begin to; `model` is the user's own, `results` are those of the epoch so far.

        At the end of an epoch `row` is what is known of its row in the history, which is written after the checkpoint:
        a run that was killed in between has it from there.
        """
        if self._writer is None:
            return
        self._saved = time.monotonic()
        share_buffers(model, self._backend)
        training = {
            **{name: part.state_dict() for name, part in self._parts.items()},
            "optimizer": optimizer.state_dict(),
            "scheduler": None if scheduler is None else scheduler.state_dict(),
            "classes": files.classes(optimizer, scheduler),
            "progress": self.progress.state_dict(),
            "seed": self._config.seed,
            "learning_rate": self._learning_rate(),
            "order": self._order,
            "row": None if row is None else self._placed(row),
            "generators": self._backend.allgather_object(randomness.capture_generators(self._backend.device)),
        }
        about = {
            **self.progress.state_dict(),
            "results": {name: value if math.isfinite(value) else None for name, value in results.items()},
            "config": {
                name: str(value) if isinstance(value, Path) else value for name, value in asdict(self._config).items()
            },
        }
        self._writer.save(self.progress.step, model, training, about)

    def checkpoint_is_due(self) -> bool:
        """Whether `checkpoint_every_minutes` have passed since the last checkpoint, by the clock of this rank."""
        minutes = self._config.checkpoint_every_minutes
        return self._writer is not None and minutes is not None and time.monotonic() - self._saved >= 60 * minutes

    def best(self) -> Path:
        """Return the checkpoint that `keep_best` names as the best, when it is written. All ranks call it.

        Raises ConfigError without `keep_best` or an output folder, and CheckpointError if no checkpoint has the result.
        """
        name, folder = self._config.keep_best, self._folder
        if name is None or folder is None:
            raise ConfigError(
                "The best checkpoint is known to runs that keep it. Use "
                'TrainConfig(output_dir="runs/first", keep_best="val_loss").'
            )
        self.finish()
        retention = Retention(self._config.keep_last, best=name, mode=self._config.keep_best_mode)

        def find() -> Path:
            found = retention.best_in(folder)
            if found is None:
                raise CheckpointError(
                    f"No checkpoint in '{folder}' has a finite result {name!r}. Train an epoch first: trainer.fit(...)."
                )
            return found

        fix = "Check that the folder is readable."
        path: Path = self._backend.broadcast_object(
            checkpointer.on_rank_zero(self._backend, f"look for the best checkpoint in '{folder}'", fix, find)
        )
        return path

    def finish(self) -> None:
        """Wait until the last checkpoint is written. Raises CheckpointError, on every rank, if one was not."""
        if self._writer is not None:
            self._writer.wait()

    def _keep_batch(self, share: TrainingData) -> None:
        """Keep how large steps are, for attempts of the job that have other numbers of ranks."""
        folder, whole, number = self._folder, share.global_batch_size, self._fits
        self._fits += 1
        if self.elastic and folder is not None and share.batch_size and whole and number == len(self._kept_batches):
            self._kept_batches.append(batch := ElasticBatchSize(share.batch_size, whole))
            task = f"write to output folder '{folder}'"
            checkpointer.on_rank_zero(
                self._backend, task, checkpointer.WRITABLE, lambda: job.keep_batch(folder, number, batch)
            )

    def _complete(self) -> bool:
        epochs, steps = self._config.max_epochs, self._config.max_steps
        return (epochs is not None and self.progress.epoch >= epochs) or (
            steps is not None and self.progress.step >= steps
        )

    def _restore(self, where: Path, model: nn.Module, optimizer: Optimizer, scheduler: Any, *, required: bool) -> bool:
        """Restore what `where` holds, and tell whether there was anything."""
        config = self._config
        training = checkpointer.restore(where, model, optimizer, scheduler, self._backend, required=required)
        if training is None:
            return False
        if training.get("seed", config.seed) != config.seed:
            raise CheckpointError(
                f"The run in '{where}' has seed {training['seed']}, but TrainConfig.seed is {config.seed}: the data "
                f"would come in another order. Use TrainConfig(seed={training['seed']})."
            )
        for name, value in training.get("learning_rate", {}).items():
            if value != getattr(config, name):
                raise CheckpointError(
                    f"The run in '{where}' has {name}={value!r}, but TrainConfig.{name} is {getattr(config, name)!r}: "
                    f"its learning rates would change. Use TrainConfig({name}={value!r})."
                )
        self.progress.load_state_dict(training["progress"])
        self._order = training.get("order")
        self._row = training.get("row")
        for name, part in self._parts.items():
            part.load_state_dict(training.get(name, {}))
        self._restored = training
        states = training.get("generators", [])
        self._generators = states[self._backend.rank] if len(states) == self._backend.size else None
        return True

    def _rewind(self, history: History) -> None:
        history.rewind(self.progress.step)
        if self._row_is_own and self._row is not None:  # the rows of another folder stay there
            history.append(EPOCHS, self._row)

    def _learning_rate(self) -> dict[str, Any]:
        return {name: getattr(self._config, name) for name in ("lr_scaling", "reference_batch_size", "warmup_steps")}

    def _record(self, name: str, row: dict[str, Any]) -> None:
        def append(history: History) -> None:
            if self._unwritten is not None:
                raise self._unwritten
            history.append(name, self._placed(row))

        self._write_history(name, append)

    def _placed(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return `row` with how many passes over the data are done."""
        assert self._share is not None
        epochs: float | None = self.progress.epoch
        if self.progress.sample:
            length = self._share.samples_in_epoch()
            epochs = None if length is None else self.progress.epoch + self.progress.sample / length
        return {**row, "epochs": epochs}

    def _write_history(self, name: str, change: Callable[[History], None]) -> None:
        if self._folder is not None:
            history, task = History(self._folder), f"write '{self._folder / name}'"
            checkpointer.on_rank_zero(self._backend, task, checkpointer.WRITABLE, lambda: change(history))
