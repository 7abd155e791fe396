"""The training loop, on any backend: fit -> epoch -> step, readable from top to bottom."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from unitrain import checkpoint, randomness
from unitrain.backends.base import Backend
from unitrain.buffers import share_buffers
from unitrain.config import TrainConfig, check_alike
from unitrain.data import Cursor, EvaluationShare, Slice, TrainingShare, input_and_target, to_device
from unitrain.errors import CheckpointError, ConfigError, ModelError
from unitrain.history import History
from unitrain.loading import Data
from unitrain.metrics import Means
from unitrain.progress import Progress, choose_progress
from unitrain.running_loss import RunningLoss

LossFunction = Callable[[Any, Any], Tensor]
Metric = Callable[[Any, Any], Tensor | float]


class Trainer:
    """Trains `model` on all ranks of `backend` as one process would with the whole batch. All ranks use it alike.

    The optimizer and the scheduler are the user's own, built on `model`'s parameters. `loss_fn(output, target)` returns
    the mean loss over the batch; each of `metrics` returns its mean over the batch, or one value per sample. Batches
    are (inputs, targets) pairs, and `model` is called with the inputs. With `config.resume` the state is restored here.
    Raises ConfigError, ModelError or CheckpointError, on every rank alike.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        *,
        backend: Backend,
        config: TrainConfig,
        scheduler: LRScheduler | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> None:
        check_alike(config, backend)
        if isinstance(scheduler, ReduceLROnPlateau) and config.scheduler_every != "epoch":
            raise ConfigError(
                'ReduceLROnPlateau needs the results of an epoch, and TrainConfig.scheduler_every is "step". '
                'Use TrainConfig(scheduler_every="epoch").'
            )
        self.backend, self.config = backend, config
        self.loss_fn, self.scheduler, self.metrics = loss_fn, scheduler, dict(metrics or {})
        self.cursor = Cursor()
        self._generators: dict[str, Any] | None = None
        self._order: dict[str, Any] | None = None
        self._train_batch_size = config.batch_size
        self._folder = None if config.output_dir is None else Path(config.output_dir)
        self._seeded = False
        self._progress = Progress()
        self._loss = RunningLoss(backend, config.show_every)

        model.to(backend.device)
        if optimizer.state:  # loaded before the model moved: loading it once more moves it too
            optimizer.load_state_dict(optimizer.state_dict())
        if self._folder is not None:
            own = config.resume is True or (config.resume and Path(config.resume).resolve() == self._folder.resolve())
            checkpoint.prepare_folder(self._folder, backend, resume=bool(own))
        if config.resume:
            self._restore(model, optimizer)
        # A run that ended before its first checkpoint has left rows too, so this is not for a restored one only.
        self._write_history(lambda history: history.rewind(self.cursor.step))
        self.model = backend.distributed_model(
            model, unused_parameters=config.unused_parameters, compression=config.compression
        )
        self.optimizer = backend.distributed_optimizer(optimizer, self.model)
        self._parameters = list(model.parameters())

    def fit(self, train_data: Data, val_data: Data | None = None) -> dict[str, float]:
        """Train until `config.epochs` or `config.steps` are done, counted from the very first; return the last results.

        These are the train_loss of the last epoch and, with `val_data`, what `evaluate` found after it, as val_loss and
        so on: all exact means over the samples of all ranks. When nothing was left to do, `val_data` is evaluated and
        there is no train_loss. Raises DataError, ConfigError, CheckpointError or NonFiniteLossError, on every rank.
        """
        config = self.config
        share = TrainingShare(
            train_data,
            self.backend,
            batch_size=config.batch_size,
            accumulate=config.accumulate,
            seed=config.seed,
            shuffle=config.shuffle,
            num_workers=config.num_workers,
        )
        self._train_batch_size = share.batch_size
        validation = None if val_data is None else self._evaluation_share(val_data)
        self._check_order(share)
        self._seed_generators()
        self.model.train()
        results: dict[str, float] | None = None
        with choose_progress(config.progress, self.backend.rank) as self._progress:
            self._progress.start(self._steps_left(share), config.epochs)
            while not self._finished():
                results = self._train_epoch(share, validation)
        return self._validate(validation) if results is None else results

    def evaluate(self, data: Data) -> dict[str, float]:
        """Return "loss" and every metric, each the exact mean over all samples of `data`, with the model in eval mode.

        Every rank evaluates its own part with rank 0's buffers, and every rank returns the same. All ranks call it.
        """
        return self._evaluate(self._evaluation_share(data))

    def _train_epoch(self, share: TrainingShare, validation: EvaluationShare | None) -> dict[str, float]:
        """Train to the end of the epoch, or of the run; then validate, step an epoch's scheduler, record and save."""
        config, cursor = self.config, self.cursor
        epoch, started, first_sample = cursor.epoch + 1, time.perf_counter(), cursor.sample
        self._loss.start(cursor.step)
        for batch, part in share.epoch(cursor.epoch, cursor.sample):
            self._micro_step(batch, part)
            if not part.closes_step:
                continue
            self._optimizer_step()
            cursor.step += 1
            cursor.sample = part.step_end
            self._progress.step(epoch, part.step_samples)
            if self._loss.due(cursor.step):
                self._progress.loss(self._loss.look(epoch, cursor.step))
            if cursor.step == config.steps:
                break
        trained = cursor.sample - first_sample
        # With drop_last and another global batch, a resumed epoch may end before the sample that it had come to.
        losses = {"train_loss": self._loss.finish(epoch, cursor.step)} if trained else {}
        seconds = time.perf_counter() - started
        if cursor.sample >= share.samples_per_epoch:
            cursor.epoch, cursor.sample = cursor.epoch + 1, 0

        learning_rate = float(self.optimizer.param_groups[0]["lr"])
        results = {**losses, **self._validate(validation)}
        if config.scheduler_every == "epoch" and cursor.sample == 0:
            self._step_scheduler(results)
        self._progress.epoch(epoch, results)
        speed = {"learning_rate": learning_rate, "seconds": seconds, "samples_per_second": trained / seconds}
        row = {"epoch": epoch, "step": cursor.step, **results, **speed}
        self._write_history(lambda history: history.append(row))
        if cursor.epoch % config.checkpoint_every == 0 or self._finished():
            self._save()
        return results

    def _micro_step(self, batch: Any, part: Slice) -> None:
        """Run forward and backward on this rank's samples, and add to the gradients what these are worth."""
        inputs, targets = input_and_target(to_device(batch, self.backend.device))
        with nullcontext() if part.closes_step else self.backend.no_sync(self.model):
            loss = self.loss_fn(self.model(inputs), targets)
            if loss.dim() != 0:
                raise ModelError(
                    f"The loss must be one number, got shape {list(loss.shape)}. "
                    "Let loss_fn return the mean over the batch: loss.mean()."
                )
            # Backends give the mean over ranks of the sum over micro-steps. With these weights it is the mean over all
            # samples of the step, however unevenly they are shared; a stand-in for an empty share weighs nothing.
            weight = part.samples * self.backend.size / part.step_samples
            torch.autograd.backward(loss if weight == 1.0 else loss * weight)
        self._loss.add(loss, part.samples)

    def _optimizer_step(self) -> None:
        """Update the parameters; the gradients are already those of the global batch, so clipping is plain torch."""
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None and self.config.scheduler_every == "step":
            self.scheduler.step()

    def _validate(self, validation: EvaluationShare | None) -> dict[str, float]:
        if validation is None:
            return {}
        return {f"val_{name}": value for name, value in self._evaluate(validation).items()}

    def _evaluate(self, share: EvaluationShare) -> dict[str, float]:
        model, device = self.backend.unwrap(self.model), self.backend.device
        share_buffers(model, self.backend)
        means = Means(("loss", *self.metrics), device)
        functions = (self.loss_fn, *self.metrics.values())
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            with torch.no_grad():
                for batch, samples in share:
                    inputs, targets = input_and_target(to_device(batch, device))
                    output = model(inputs)
                    means.add([function(output, targets) for function in functions], samples)
        finally:
            for module, training in modes:  # one by one: the user may keep a part in eval mode while training
                module.training = training
        return means.reduce(self.backend)

    def _evaluation_share(self, data: Data) -> EvaluationShare:
        config = self.config
        # A DataLoader has its own; anything else is evaluated in batches as large as those that it is trained with.
        batch_size = config.eval_batch_size or (None if isinstance(data, DataLoader) else self._train_batch_size)
        return EvaluationShare(data, self.backend, batch_size=batch_size, num_workers=config.num_workers)

    def _step_scheduler(self, results: dict[str, float]) -> None:
        if isinstance(self.scheduler, ReduceLROnPlateau):
            if (loss := results.get("val_loss", results.get("train_loss"))) is not None:
                self.scheduler.step(loss)
        elif self.scheduler is not None:
            self.scheduler.step()

    def _finished(self) -> bool:
        epochs, steps = self.config.epochs, self.config.steps
        return (epochs is not None and self.cursor.epoch >= epochs) or (steps is not None and self.cursor.step >= steps)

    def _steps_left(self, share: TrainingShare) -> int:
        if self.config.steps is not None:
            return max(0, self.config.steps - self.cursor.step)
        epochs = (self.config.epochs or 0) - self.cursor.epoch
        return 0 if epochs <= 0 else share.steps_in_epoch(self.cursor.sample) + (epochs - 1) * share.steps_in_epoch()

    def _check_order(self, share: TrainingShare) -> None:
        """Raise CheckpointError, on all ranks, where the cursor is inside an epoch of data in another order.

        From one epoch to the next the data may change.
        """
        order, self._order = self._order or share.order, share.order
        for name in share.order if self.cursor.sample else ():
            if order[name] != share.order[name]:
                raise CheckpointError(
                    f"The run is {self.cursor.sample} samples into epoch {self.cursor.epoch + 1} of training data with "
                    f"{name}={order[name]}, but this data has {name}={share.order[name]}: samples would repeat or be "
                    "missed. Go on with the same data, or from a checkpoint at the end of an epoch."
                )

    def _seed_generators(self) -> None:
        """Give every rank random numbers of its own that repeat with the seed, or go on with the checkpoint's."""
        if self._generators is not None:
            randomness.restore_generators(self._generators, self.backend.device)
        elif not self._seeded:
            path = (self.cursor.step, self.backend.rank)
            randomness.seed_generators(randomness.derive_seed(self.config.seed, randomness.Stream.RANK, *path))
        self._generators, self._seeded = None, True

    def _write_history(self, change: Callable[[History], None]) -> None:
        if self._folder is not None:
            history = History(self._folder)
            task = f"write '{history.path}'"
            checkpoint.on_rank_zero(self.backend, task, checkpoint.WRITABLE, lambda: change(history))

    def _save(self) -> None:
        if self._folder is None:
            return
        model = self.backend.unwrap(self.model)
        share_buffers(model, self.backend)
        training = {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "cursor": asdict(self.cursor),
            "seed": self.config.seed,
            "order": self._order,
            "generators": self.backend.allgather_object(randomness.capture_generators(self.backend.device)),
        }
        checkpoint.save(self._folder, self.cursor.step, model, training, self.backend)

    def _restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Load the state of an earlier run before the model is wrapped, which passes rank 0's on to the other ranks."""
        config = self.config
        newest = config.resume is True
        where = Path(config.output_dir or "") if newest else Path(str(config.resume))
        training = checkpoint.restore(where, model, optimizer, self.scheduler, self.backend, required=not newest)
        if training is None:
            return
        if training["seed"] != config.seed:
            raise CheckpointError(
                f"The run in '{where}' has seed {training['seed']}, but TrainConfig.seed is {config.seed}: the data "
                f"would come in another order. Use TrainConfig(seed={training['seed']})."
            )
        self.cursor, self._order = Cursor(**training["cursor"]), training.get("order")
        states = training["generators"]
        self._generators = states[self.backend.rank] if len(states) == self.backend.size else None
