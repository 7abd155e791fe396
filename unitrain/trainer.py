"""The training loop, on any backend: fit -> epoch -> step, readable from top to bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from unitrain import trainer_arguments
from unitrain.backends.base import Backend
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.callbacks.callback import Callback, Callbacks
from unitrain.checkpoint.checkpointer import load_weights
from unitrain.checkpoint.run_state import Run, Stateful
from unitrain.config import TrainConfig, check_alike, for_dry_run
from unitrain.data.loading import Data, check_is_dataset
from unitrain.data.order import MicroBatch
from unitrain.data.prefetch import Prefetcher
from unitrain.data.sharding import EvaluationShard, open_training_data
from unitrain.data.training_data import TrainingData
from unitrain.errors import ConfigError, Preempted
from unitrain.evaluation import Evaluation, LossFunction
from unitrain.loggers.logger import Logger
from unitrain.metrics.running_loss import RunningLoss
from unitrain.metrics.user_metrics import Metric
from unitrain.modules.compiled import compile_forward
from unitrain.modules.memory_format import use_channels_last
from unitrain.modules.sync_batch_norm import exclude_from_statistics, sync_batch_norm
from unitrain.optim.ema import WeightAverage
from unitrain.optim.learning_rate import LearningRateFactor
from unitrain.optim.loss_weighting import GlobalMean, read_training_loss
from unitrain.optim.precision import Precision, allow_tf32
from unitrain.optim.schedulers import BuildScheduler, EpochScheduler, PlannedScheduler
from unitrain.optim.step import Forward, ForwardFunction, Update, backward, without_gradients
from unitrain.progress.sync_point import SyncPoint
from unitrain.progress.timing import Times
from unitrain.progress.tracker import Tracker
from unitrain.trainer_overrides import TrainerArguments, load_overrides
from unitrain.validation import check_result_name, check_text


class Trainer:
    """Trains `model` on all ranks of `backend` as one process would with the whole batch. All ranks use it alike.

    The optimizer and the scheduler are the user's own, built on `model`'s parameters; a function
    `scheduler(optimizer, total_steps)` builds the scheduler when `fit` knows the number of steps. `loss_fn(output,
    target)` returns the mean loss over the batch; or, where it is tokens or pixels that count, a pair of the sum
    over them and their number, on every rank alike. Each of `metrics` returns its mean over the batch, or one value
    per sample; or it is a torchmetrics object, merged over ranks exactly. Batches are (inputs, targets) pairs, and
    `model` is called with the inputs; where they are something else, or the model takes something else,
    `forward(model, batch)` calls it and returns (output, target). The model that it is given is the one to call: in
    training the wrapped one. With `config.resume` the state is restored here.
    `averaged_model` has the averaged weights, with `config.ema_decay`; whatever evaluates then uses it.
    `loggers` are Logger objects, or names: "csv", "jsonl", "tensorboard", "wandb", "mlflow"; rank 0's are used.
    For callbacks: `progress` is how far the run has come, `result_names` what `fit` will return, and `last_loss` what
    the loss function returned last on this rank.
    Raises ConfigError, ModelError, CheckpointError or, for a logger, MissingDependencyError, on every rank alike.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        *,
        backend: Backend,
        config: TrainConfig,
        scheduler: LRScheduler | BuildScheduler | None = None,
        metrics: Mapping[str, Metric] | nn.Module | None = None,
        forward: ForwardFunction | None = None,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger | str] = (),
    ) -> None:
        trainer_arguments.check_backend("Trainer(backend=...)", backend)
        backend.check_running("Trainer")
        call_on_all_ranks(
            backend,
            lambda: trainer_arguments.check_trainer(model, optimizer, loss_fn, config, scheduler, metrics, callbacks),
        )
        check_alike(config, backend)
        if config.dry_run:
            config, loggers = for_dry_run(config), ()
        if (overrides := load_overrides()) is not None:  # `unitrain verify` or `unitrain tune` runs this script
            given = TrainerArguments(model=model, loss_fn=loss_fn, config=config, callbacks=callbacks, forward=forward)
            used = overrides.override(given, backend)
            loss_fn, config, callbacks, forward, loggers = used.loss_fn, used.config, used.callbacks, used.forward, ()
        self.backend, self.config = backend, config
        self.loss_fn = loss_fn
        self._scheduler: LRScheduler | PlannedScheduler | None
        if scheduler is None or isinstance(scheduler, LRScheduler) or not callable(scheduler):
            self._scheduler = scheduler
        else:
            self._scheduler = PlannedScheduler(scheduler, optimizer)
        self._epoch_scheduler = EpochScheduler(self._scheduler, config)
        self._precision = call_on_all_ranks(backend, lambda: Precision(config.precision, backend.device))
        self._callbacks = call_on_all_ranks(backend, lambda: Callbacks(callbacks))
        self._forward = call_on_all_ranks(backend, lambda: Forward(forward))
        self._rates: LearningRateFactor | None = None
        self._train_batch_size = config.batch_size
        self._tracker = Tracker(config, backend, loggers)
        self._times = Times(backend)
        self._prefetch = Prefetcher(backend.device, self._times.fetching)
        self.result_names: tuple[str, ...] = ()
        self.last_loss: Tensor
        self._loss = RunningLoss(backend)
        self._mean = GlobalMean(backend)

        allow_tf32(config.tf32)
        model.to(backend.device)
        if optimizer.state:  # loaded before the model moved: loading it once more moves it too
            optimizer.load_state_dict(optimizer.state_dict())
        if config.channels_last:
            use_channels_last(model)
        if config.sync_batch_norm:
            call_on_all_ranks(backend, lambda: sync_batch_norm(model, backend))
        self._average = call_on_all_ranks(backend, lambda: WeightAverage.of(backend.unwrap(model), config.ema_decay))
        self.averaged_model = None if self._average is None else self._average.model
        if config.compile:
            compile_forward(model, self.averaged_model, mode=config.compile)
        evaluated = model if self.averaged_model is None else self.averaged_model
        self._evaluation = call_on_all_ranks(
            backend,
            lambda: Evaluation(
                evaluated, self._forward, loss_fn, metrics or {}, self._precision, self._prefetch, backend
            ),
        )

        parts: dict[str, Stateful] = {
            "precision": self._precision, "callbacks": self._callbacks, "loss": self._loss, "weighting": self._mean,
        }  # fmt: skip
        call_on_all_ranks(backend, lambda: trainer_arguments.check_results(self._evaluation.names[1:]))
        self.run = Run(config, backend, parts if self._average is None else {**parts, "average": self._average})
        self.progress = self.run.progress
        self._roll_call = SyncPoint(self.run, self._times, self._tracker)
        self.run.prepare(backend.unwrap(model), optimizer, self._scheduler)
        self.model = backend.distributed_model(
            model, find_unused_parameters=config.find_unused_parameters, compression=config.compression
        )
        if self._average is not None:
            self._average.begin()
        self.run.keep_gradients(self.model, lambda: self._precision.loss_scale(self._mean.loss_scale()))
        self.optimizer = backend.distributed_optimizer(optimizer, self.model)
        self._update = Update(
            self.optimizer,
            model,
            self._precision,
            clip_norm=config.max_grad_norm,
            average=self._average,
            scheduler=self._scheduler if config.scheduler_interval == "step" else None,
        )

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler; None without one, and before `fit` for one that is built from the number of steps."""
        return self._scheduler.scheduler if isinstance(self._scheduler, PlannedScheduler) else self._scheduler

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached `max_epochs` or `max_steps`, or was stopped."""
        return self.run.finished()

    @property
    def stop_reason(self) -> str | None:
        """Why the last `fit` stopped before the end, None if it did not. It is the same on every rank."""
        return self.run.stopping.reason

    def fit(self, train_data: Data, val_data: Data | Mapping[str, Data] | None = None) -> dict[str, float]:
        """Train until `config.max_epochs` or `config.max_steps` are done; return the last results.

        These are the train_loss of the last epoch and, with `val_data`, what `evaluate` found after it, as val_loss and
        so on: all exact means over the samples of all ranks. Several named data sets, as {"clean": ..., "noisy": ...},
        are validated on one after the other, with results such as val_clean_loss. When nothing was left to do,
        `val_data` is evaluated and there is no train_loss. Raises DataError, ConfigError, CheckpointError or
        NonFiniteLossError, on every rank; and Preempted, which ends the program with exit code 75, where one of
        `config.preemption_signals` came to any rank, after a checkpoint.
        """
        config = self.config
        self._check_data("fit", train_data=train_data, **_by_argument(val_data))
        share = open_training_data(train_data, self.backend, config, elastic=self.run.elastic, kept=self.run.kept_batch)
        self._train_batch_size = share.batch_size
        named = _validation_sets(val_data)
        self.result_names = ("train_loss", *(prefix + name for prefix in named for name in self._evaluation.names))
        self._epoch_scheduler.check(self.result_names)
        if config.keep_best is not None:
            check_result_name("TrainConfig.keep_best", config.keep_best, self.result_names)
        self._rates = LearningRateFactor.asked_for(config, share.global_batch_size)
        limit = config.limit_val_batches
        validation = {prefix: self._evaluation_share(data, limit) for prefix, data in named.items()}
        self._plan_scheduler(share)
        self.run.begin(share)
        self._forget_partial_step()
        self.model.train()
        results: dict[str, float] | None = None
        run = self.run
        with (
            run.holding_folder(),
            run.stopping as stopping,
            self._tracker.run(self.progress.step, run.steps_left(share), run.description, over=run.finished()),
        ):
            if self._rates is not None:
                self._tracker.note(str(self._rates))
            try:
                self._callbacks.call("on_fit_start", self)
                self._sync()
                while not self.run.finished():
                    results = self._train_epoch(share, validation)
                self.run.finish()
            finally:
                self._callbacks.call("on_fit_end", self)
            if stopping.preempted:
                raise Preempted(stopping.reason)
        return self._validate(validation) if results is None else results

    def evaluate(self, data: Data) -> dict[str, float]:
        """Return "loss" and every metric, each the exact mean over all samples of `data`, with the model in eval mode.

        Every rank evaluates its own part with rank 0's buffers, and every rank returns the same. All ranks call it.
        """
        self._check_data("evaluate", data=data)
        return self._evaluation.evaluate(self._evaluation_share(data))

    def predict(self, data: Data) -> Any:
        """Return the model's outputs for all samples of `data` in its own order, in eval mode, on every rank's CPU.

        They are nested as the model, or `forward`, returns them: tensors whose first dimension is the sample, in lists,
        tuples, mappings and dataclasses. Targets are not looked at, and without `forward` may be missing. Every rank
        computes its own part with rank 0's buffers, keeps it on the CPU, and gets the others' at the end: the outputs
        of the whole data must fit into the memory of the host once per rank on it. Outputs for streams that are each
        rank's own are in the order of ranks. All ranks call it.
        Raises DataError, ConfigError or, for outputs that cannot be put together, ModelError, on every rank.
        """
        self._check_data("predict", data=data)
        return self._evaluation.predict(self._evaluation_share(data))

    def load_weights(self, checkpoint: str | Path) -> None:
        """Load the weights of a checkpoint, or of the newest of a run folder, or the "best" by `keep_best`.

        The weights of the model and, with `config.ema_decay`, their average are replaced on every rank; the optimizer,
        the schedule and the progress of the run are not. All ranks call it. For a final evaluation:
        `trainer.load_weights("best")`, then `trainer.evaluate(test_data)`. Raises CheckpointError, and ConfigError if
        the run keeps no best checkpoint, on every rank.
        """
        path = self.run.best() if checkpoint == "best" else Path(checkpoint)
        load_weights(path, self.backend.unwrap(self.model), self.averaged_model, self.backend)

    def stop(self, reason: str) -> None:
        """Ask for the end of `fit`, for a `reason` that is shown. One rank is enough; it may be called at any time.

        The ranks agree on it when they next work out the loss, at least about every two seconds, and at the end of the
        epoch. Then the run is validated and saved as it is, in the middle of an epoch too, and can be resumed there.
        """
        check_text("Trainer.stop(reason)", reason, 'Use trainer.stop("the loss is low enough")')
        self.run.stopping.request(reason)

    def log(self, **values: float | Tensor) -> None:
        """Log numbers of your own, at the step that the run has come to. Rank 0's are logged; any rank may call it."""
        self._tracker.log(values, self.progress.step)

    def log_image(self, name: str, image: Tensor, caption: str | None = None) -> None:
        """Log an image: [height, width], or with 1, 3 or 4 channels first or last; uint8, or floating from 0 to 1."""
        self._tracker.log_image(name, image, self.progress.step, caption)

    def log_histogram(self, name: str, values: Tensor) -> None:
        """Log a histogram of a tensor's values to W&B and TensorBoard. Rank 0's is logged; any rank may call it."""
        self._tracker.log_histogram(name, values, self.progress.step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table of numbers and strings to W&B and TensorBoard. Rank 0's is logged; any rank may call it."""
        self._tracker.log_table(name, columns, rows, self.progress.step)

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss scale of fp16, by which gradients are multiplied in `on_before_optimizer_step`; None otherwise."""
        return self._precision.loss_scale()

    def _check_data(self, method: str, **data: Any) -> None:
        """Raise DataError, on every rank, for an argument of `method` that is no dataset."""
        self.backend.check_running(f"Trainer.{method}")

        def check() -> None:
            for name, value in data.items():
                check_is_dataset(f"Trainer.{method}({name})", value)

        call_on_all_ranks(self.backend, check)

    def _train_epoch(self, share: TrainingData, validation: Mapping[str, EvaluationShard]) -> dict[str, float]:
        """Train to the end of the epoch, or of the run; then validate, step an epoch's scheduler, record and save."""
        config, progress = self.config, self.progress
        epoch, first_sample = progress.epoch + 1, progress.sample
        self._times.start()
        self.run.stopping.begin(progress.step)
        # No name holds what is iterated over: where an error leaves the loop, its workers end at once.
        for batch, part in self._times.batches(
            # A run may be resumed from the checkpoint of the last step of an epoch.
            ()
            if self._epoch_reached_limit()
            else self._prefetch(
                share.micro_batches(progress.epoch, progress.position),
                ahead=share.can_prefetch,
                overlapped=share.can_overlap_prefetch,
            )
        ):
            self._micro_step(batch, part)
            if not part.ends_step:
                continue
            self._mean.finish_step(self.optimizer, part)
            self._callbacks.call("on_before_optimizer_step", self)
            self._update(progress.step, self._rates)
            self._loss.finish_step()  # only now: `fit` runs a step again that an exception has ended before its update
            self._times.step(part.step_samples)
            progress.advance(part.step_samples, part.step_end)
            self._tracker.step(epoch, part.step_samples)
            self._callbacks.call("on_step_end", self)
            if config.checkpoint_every_steps and progress.step % config.checkpoint_every_steps == 0:
                self._save({}, None)
            if self._look_is_due(progress.step):
                self._look(epoch)
            elif self.run.stopping.due(progress.step):
                self._sync()
            if config.dry_run:
                self.stop("TrainConfig.dry_run trains one step")
                self._sync()
            if self._epoch_reached_limit() or progress.step == config.max_steps or self.run.stopping.reason is not None:
                break
            if config.validate_every_steps and progress.step % config.validate_every_steps == 0:
                with self._times.spent_on("validation"):
                    self._tracker.validated(epoch, progress.step, self._validate(validation))
        trained = progress.sample - first_sample
        # Checkpoints of earlier versions have no sums: a run resumed from one at the end of an epoch has no train_loss.
        losses = {"train_loss": self._loss.epoch_mean(epoch, progress.step)} if self._loss.steps else {}
        seconds = self._times.stop()
        at_limit = self._epoch_reached_limit()
        if at_limit:
            share.end_epoch()
        if at_limit or share.is_epoch_finished(progress.position):
            progress.end_epoch()
            self._loss.start_epoch()

        speed = {"learning_rate": self._learning_rate(), "seconds": seconds, "samples_per_second": trained / seconds}
        # A machine that is about to be taken away leaves no time for a validation in the middle of an epoch.
        hurries = self.run.stopping.preempted and progress.sample > 0
        with self._times.spent_on("validation"):
            results = {**losses, **({} if hurries else self._validate(validation))}
        if progress.sample == 0:
            self._epoch_scheduler.step(results)
        self._tracker.epoch(epoch, progress.step, results, trained / seconds)
        self._callbacks.call("on_epoch_end", self, results)
        self._sync()
        row = {"epoch": epoch, "step": progress.step, **results, **speed}
        if progress.epoch % config.checkpoint_every_epochs == 0 or self.run.finished():
            self._save(results, row)
        self.run.record({**row, **self._times.gather()})
        return results

    def _epoch_reached_limit(self) -> bool:
        limit = self.config.limit_train_steps
        return limit is not None and self.progress.step_in_epoch >= limit

    def _save(self, results: dict[str, float], row: dict[str, Any] | None) -> None:
        with self._times.spent_on("checkpoint"):
            self.run.save(self.backend.unwrap(self.model), self.optimizer, self._scheduler, results, row)

    def _micro_step(self, batch: Any, part: MicroBatch) -> None:
        """Run forward and backward on this rank's samples, and add to the gradients what these are worth."""
        stands_in = nullcontext() if part.samples else exclude_from_statistics(self.model)
        with stands_in, nullcontext() if part.ends_step else self.backend.no_sync(self.model):
            with self._precision.autocast():
                loss = read_training_loss(self.loss_fn(*self._forward(self.model, batch)))
            weighted = self._mean.weighted(loss, part)
            if self.config.find_unused_parameters and not part.samples:
                weighted = without_gradients(weighted)  # else each parameter is reached by every rank anyway
            start = self._times.watched(self._precision.scale(weighted))
            backward(
                start, *(self._mean.overlapped_work() + self._prefetch.overlapped_work() if part.ends_step else ())
            )
        self.last_loss = loss.value
        self._loss.add(loss.value, part.samples, loss.tokens)
        self._callbacks.call("on_micro_batch_end", self, batch, part, loss)

    def _validate(self, validation: Mapping[str, EvaluationShard]) -> dict[str, float]:
        return {
            prefix + name: value
            for prefix, share in validation.items()
            for name, value in self._evaluation.evaluate(share).items()
        }

    def _evaluation_share(self, data: Data, limit_batches: int | None = None) -> EvaluationShard:
        config = self.config
        # A DataLoader has its own batch size; anything else is evaluated in batches as large as those of training.
        batch_size = None if isinstance(data, DataLoader) else config.eval_batch_size or self._train_batch_size
        return EvaluationShard(
            data,
            self.backend,
            batch_size=batch_size,
            num_workers=config.num_workers,
            stream=config.stream,
            limit_batches=limit_batches,
        )

    def _plan_scheduler(self, share: TrainingData) -> None:
        """Build a scheduler that depends on the length of the run."""
        if isinstance(self._scheduler, PlannedScheduler):
            steps = self.run.steps_left(share)
            total = None if steps is None else self.progress.step + steps
            if self.config.scheduler_interval == "epoch" and self.config.max_epochs is not None:
                total = self.config.max_epochs
            self._scheduler.plan(total, self.backend)

    def _sync(self, numbers: Sequence[float] = ()) -> list[list[float]]:
        """Let the ranks agree on whether to stop and to save; return the `numbers` of each, as many everywhere."""
        ranks = self._roll_call.hold(beside=[self.run.checkpoint_is_due(), *numbers])
        if ranks[0][0]:  # by rank 0's clock
            self._save({}, None)
        return [told[1:] for told in ranks]

    def _look(self, epoch: int) -> None:
        """Work out the loss when the ranks meet, and show, log and record how it goes."""
        step = self.progress.step
        losses = self._sync(self._loss.local_sums())
        looked = {"loss": self._loss.mean_since_sync(losses, epoch, step), **self._update.known()}
        speed = {"learning_rate": self._learning_rate(), "samples_per_second": self._times.samples_per_second()}
        self._tracker.look(step, {**looked, **speed})
        self.run.record_step({"step": step, **looked, **speed, **self._roll_call.slow()})

    def _look_is_due(self, step: int) -> bool:
        every = self.config.log_every_n_steps
        return self.run.stopping.due(step) if every is None else step % every == 0

    def _learning_rate(self) -> float:
        """Return the first of the learning rates that the steps now take."""
        rate = float(self.optimizer.param_groups[0]["lr"])
        return rate if self._rates is None else rate * self._rates.at(self.progress.step)

    def _forget_partial_step(self) -> None:
        """Drop what an earlier `fit`, ended by an exception or Ctrl-C, has left of a step: it is done again."""
        self.backend.unwrap(self.model).zero_grad(set_to_none=True)
        self._loss.discard_step()
        self._mean.discard_step()
        self._precision.discard_step()


def _validation_sets(data: Data | Mapping[str, Data] | None) -> dict[str, Data]:
    """Return the data to validate on by the prefix of its results: "val_", or "val_NAME_" for named data.

    Raises ConfigError for names that are not strings, or an empty mapping.
    """
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        return {"val_": data}
    if not data or not all(isinstance(name, str) and name for name in data):
        raise ConfigError(
            f"val_data takes data, or several by name, got {list(data)} as names. "
            'Use trainer.fit(train_data, {"clean": clean_data, "noisy": noisy_data}).'
        )
    return {f"val_{name}_": one for name, one in data.items()}


def _by_argument(val_data: Data | Mapping[str, Data] | None) -> dict[str, Any]:
    """Return the validation sets by the argument that a message names."""
    if isinstance(val_data, Mapping):
        return {f"val_data[{name!r}]": data for name, data in val_data.items()}
    return {} if val_data is None else {"val_data": val_data}
