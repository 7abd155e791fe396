"""The Trainer and its training loop: fit, epoch, step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from unitrain import trainer_arguments, trainer_model
from unitrain.backends.base import Backend
from unitrain.backends.checks import check_same_settings
from unitrain.backends.gradients.interleaved_ranks_model import InterleavedRanksModel
from unitrain.backends.logical_ranks import check_logical_ranks
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.callbacks.callback import Callback, Callbacks
from unitrain.checkpoint.checkpointer import Checkpointer, load_weights
from unitrain.config import TrainConfig, check_same_config
from unitrain.data.evaluation_shard import EvaluationShard
from unitrain.data.loading import Data
from unitrain.data.order import MicroBatch, current_micro_batch
from unitrain.data.prefetch import Prefetcher
from unitrain.data.sharding import open_training_data
from unitrain.data.training_data import ShardSettings, TrainingData
from unitrain.errors import ConfigError, Preempted
from unitrain.evaluation import Evaluation, LossFunction
from unitrain.loggers.logger import Logger
from unitrain.metrics.running_loss import RunningLoss
from unitrain.metrics.user_metrics import Metric
from unitrain.modules.sync_batch_norm import exclude_from_statistics
from unitrain.optim.forward import Forward, ForwardFunction
from unitrain.optim.learning_rate import (
    LearningRateFactor,
    check_same_learning_rates,
    learning_rate_checksum,
    next_learning_rate,
)
from unitrain.optim.local_sgd import LocalSGD
from unitrain.optim.loss_weighting import Loss, LossWeighting, read_training_loss
from unitrain.optim.model_loss import ModelLoss, agree_on_shifted_labels
from unitrain.optim.precision import Precision
from unitrain.optim.schedulers import EpochScheduler, PlannedScheduler, SchedulerFactory, wrap_scheduler_function
from unitrain.optim.step import OptimizerMode, ParameterUpdate, backward, block_gradients
from unitrain.planned_steps import SchedulePlan, remaining_steps
from unitrain.prediction_writer import PredictionWriter
from unitrain.progress.reporter import LoggingMethods, RunReporter
from unitrain.progress.run_metrics import RunMetrics
from unitrain.progress.stopping import LoopInterruption, RankSynchronizer, StopCoordinator
from unitrain.progress.timing import LoopTimer
from unitrain.progress.training_progress import EpochEnd
from unitrain.randomness import seed_after_step
from unitrain.trainer_arguments import TrainerArguments, dry_run_config, load_overrides
from unitrain.training_run import Stateful, TrainingRun
from unitrain.validation import check_result_name, check_text


class Trainer(LoggingMethods):
    """Trains `model` on all ranks of `backend`, with the same results as a single process with the same global batch
    size.

    All ranks must pass the same arguments and call the same methods.

    `optimizer` contains the parameters of `model`, and `scheduler` changes the learning rates of `optimizer`.
    `scheduler` may also be a function `scheduler(optimizer, total_steps)`, which `fit` calls when the number of steps
    is known. `loss_fn(output, target)` returns the mean loss over the batch, or a pair (sum, count) for a mean over
    tokens or pixels; without `loss_fn`, the model returns the loss (see ModelLoss). `metrics` maps names to functions
    of (output, target) that return the mean over the batch or one value per sample, or to torchmetrics objects, whose
    states are merged exactly over ranks; it may also be a MetricCollection of torchmetrics. By default, a batch is a
    pair (inputs, targets), and the model is called with the inputs. A batch may also be a mapping, such as a
    dictionary. The model is then called with its items as keyword arguments, and the target is the batch. For other
    batch structures, pass a function `forward(model, batch)` that calls `model` and returns (output, target). `loggers`
    are Logger objects or the names "csv", "jsonl", "tensorboard", "wandb" and "mlflow"; rank 0 logs. `config_text`,
    such as the configuration file of the script, is stored as config.yaml in `config.output_dir` and in each
    checkpoint.

    With `config.resume`, the constructor restores the state. With `config.ema_decay`, `averaged_model` contains the
    averaged weights and is used for evaluation. For callbacks, `progress` counts epochs, steps and samples,
    `result_names` are the names of the results of `fit`, and `last_loss` is the loss of this rank's last micro-batch:
    the mean, or the sum if `loss_fn` returns a pair.

    Raises ConfigError, ModelError, UnsupportedError, CheckpointError or MissingDependencyError (for a logger) on every
    rank.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction | None = None,
        *,
        backend: Backend,
        config: TrainConfig,
        scheduler: LRScheduler | SchedulerFactory | None = None,
        metrics: Mapping[str, Metric] | nn.Module | None = None,
        forward: ForwardFunction | None = None,
        callbacks: Sequence[Callback] = (),
        loggers: Sequence[Logger | str] = (),
        config_text: str | None = None,
    ) -> None:
        trainer_arguments.check_backend("Trainer(backend=...)", backend)
        backend.check_running("Trainer")
        call_on_all_ranks(backend, lambda: trainer_arguments.check_trainer_arguments(
            model, optimizer, loss_fn, config, scheduler, metrics, callbacks, config_text
        ))  # fmt: skip
        check_same_config(config, backend, config_text)
        check_logical_ranks("TrainConfig.logical_ranks", config.logical_ranks, backend)
        if config.dry_run:
            config, loggers = dry_run_config(config), ()
        loss_fn = ModelLoss() if loss_fn is None else loss_fn
        arguments = TrainerArguments(model=model, loss_fn=loss_fn, config=config, callbacks=callbacks, forward=forward)
        if (overrides := load_overrides()) is not None:  # started by `unitrain verify` or another tool
            arguments, loggers = overrides.override(arguments, backend), ()
        config, callbacks, forward = arguments.config, arguments.callbacks, arguments.forward
        self.backend, self.config, self.loss_fn = backend, config, arguments.loss_fn
        self._scheduler = wrap_scheduler_function(scheduler, optimizer)
        self._epoch_scheduler = call_on_all_ranks(backend, lambda: EpochScheduler(self._scheduler, config))
        self._precision = call_on_all_ranks(backend, lambda: Precision(config.precision, backend.device))
        self._callbacks = call_on_all_ranks(backend, lambda: Callbacks(callbacks))
        self._forward = call_on_all_ranks(backend, lambda: Forward(forward, model))
        self._learning_rate_factor: LearningRateFactor | None = None
        self._train_batch_size = config.batch_size
        self._reporter = RunReporter(config, backend, loggers)
        self._timer = LoopTimer(backend)
        self._run_metrics = RunMetrics(
            config, backend, model, self._reporter, self._timer, has_endpoint=overrides is None
        )
        self._prefetcher = Prefetcher(backend.device, self._timer.measure_fetching, self._timer.measure_copying)
        self.result_names: tuple[str, ...] = ()
        self.last_loss: Tensor
        has_logical_ranks = config.logical_ranks is not None
        self._running_loss = RunningLoss(backend, exact=has_logical_ranks)
        self._loss_weighting = LossWeighting(backend, config.logical_ranks)

        self._weight_average = trainer_model.prepare_model(model, optimizer, config, backend)
        self.averaged_model = None if self._weight_average is None else self._weight_average.model
        evaluated_model = model if self.averaged_model is None else self.averaged_model
        self._evaluation = call_on_all_ranks(backend, lambda: Evaluation(
            evaluated_model, self._forward, self.loss_fn, metrics or {}, self._precision, self._prefetcher, backend,
            exact=has_logical_ranks,
        ))  # fmt: skip

        stateful_objects: dict[str, Stateful] = {
            "precision": self._precision, "callbacks": self._callbacks, "weighting": self._loss_weighting,
        }  # fmt: skip
        call_on_all_ranks(backend, lambda: trainer_arguments.check_metric_names(self._evaluation.names[1:]))
        check_same_settings(backend, "Trainer", metrics=list(self._evaluation.names[1:]))
        if self._weight_average is not None:
            stateful_objects["average"] = self._weight_average
        self.checkpointer = Checkpointer(config, backend, self._run_metrics.record_checkpoint)
        self._run = TrainingRun(config, backend, self.checkpointer, self._running_loss, stateful_objects, config_text)
        self.progress = self._run.progress
        self._check_mode = trainer_model.ModeCheck(backend)
        self._schedule_plan = SchedulePlan(self._scheduler, config, self.progress, backend)
        self._run_metrics.progress = self.progress
        signals = config.preemption_signals if self.checkpointer.is_enabled else ()
        self._stopping = StopCoordinator(backend, max_seconds=config.max_seconds, signals=signals)
        self.step_components = trainer_model.StepComponents(
            self._precision, self._forward, self._prefetcher, self._stopping
        )
        self._synchronizer = RankSynchronizer(backend, self._stopping, self._timer, self._reporter)
        self._run.restore(backend.unwrap(model), optimizer, self._scheduler)
        self.model, self.optimizer = model, optimizer
        self._local_sgd: LocalSGD | None = None
        if config.local_sgd is None:
            self.model = trainer_model.distribute_model(model, config, backend)
        else:
            self._local_sgd = LocalSGD(
                model, optimizer, backend, config.local_sgd, broadcast_buffers=config.broadcast_buffers
            )
            self._run.track_local_sgd(self._local_sgd)
        if self._weight_average is not None:
            trainer_model.start_average(self._weight_average, self.model, config, backend)
        self._run.track_compression_state(
            self.model, lambda: self._precision.loss_scale(self._loss_weighting.loss_scale())
        )
        if self._local_sgd is None:
            self.optimizer = backend.distributed_optimizer(optimizer, self.model, shard=config.shard)
            self._run.restore_optimizer_state(self.optimizer)
        self._optimizer_mode = OptimizerMode(self.optimizer)
        self._update = ParameterUpdate(
            self.optimizer, model, self._precision, loss_fn=self.loss_fn, max_grad_norm=config.max_grad_norm,
            average=self._weight_average if self._local_sgd is None else None,
            scheduler=self._scheduler if config.scheduler_interval == "step" else None,
        )  # fmt: skip

    @property
    def scheduler(self) -> LRScheduler | None:
        """The scheduler; None without one, or before `fit` if the argument was a function."""
        return self._scheduler.scheduler if isinstance(self._scheduler, PlannedScheduler) else self._scheduler

    @property
    def is_finished(self) -> bool:
        """Whether the run has reached `max_epochs` or `max_steps`, or was stopped."""
        return self._stopping.reason is not None or self._run.has_reached_limit

    @property
    def stop_reason(self) -> str | None:
        """Why the last `fit` stopped early, or None if it did not. The same on every rank."""
        return self._stopping.reason

    def fit(self, train_data: Data, val_data: Data | Mapping[str, Data] | None = None) -> dict[str, float]:
        """Train until `config.max_epochs` or `config.max_steps` is reached, and return the results of the last epoch.

        The results are train_loss and, with `val_data`, val_loss and the metrics with the prefix val_: exact means over
        the samples of all ranks. For several datasets, pass a mapping such as {"clean": ..., "noisy": ...}; the results
        are then named val_clean_loss and so on. If the run is already complete, `fit` only evaluates `val_data`, so the
        results do not include train_loss.

        Raises DataError (also for validation data without samples), ConfigError, CheckpointError or NonFiniteLossError
        on every rank. A call within a callback of the same Trainer raises ConfigError. If any rank receives one of
        `config.preemption_signals`, `fit` saves a checkpoint and raises Preempted, which exits with code 75.
        """
        config = self.config
        if self._stopping.is_active:
            raise ConfigError(
                "Trainer.fit was called by a callback or metric during fit of the same Trainer. Call "
                "trainer.evaluate in the callback, or call fit again after fit has returned."
            )
        val_data_by_argument = trainer_arguments.validation_data_by_argument(val_data)
        trainer_arguments.check_data(self.backend, "Trainer.fit", train_data=train_data, **val_data_by_argument)
        settings = ShardSettings.from_config(
            config, is_elastic=self._run.is_elastic, initial_batch_sizes=self._run.stored_batch_size,
            interleaves_logical_ranks=isinstance(self.model, InterleavedRanksModel),
        )  # fmt: skip
        shard = open_training_data(train_data, self.backend, settings)
        self._train_batch_size = shard.batch_size
        data_by_prefix = call_on_all_ranks(
            self.backend, lambda: trainer_arguments.validation_data_by_prefix(val_data, self._evaluation.names)
        )
        check_same_settings(self.backend, "Trainer.fit", val_data=list(data_by_prefix))
        names = self._evaluation.names
        self.result_names = ("train_loss", *(prefix + name for prefix in data_by_prefix for name in names))
        if config.keep_best is not None:
            check_result_name("TrainConfig.keep_best", config.keep_best, self.result_names)
        self._begin_epoch(shard)
        limit = config.limit_val_batches
        validation = {prefix: self._evaluation_shard(data, limit) for prefix, data in data_by_prefix.items()}
        if not self._run.has_reached_limit or self.scheduler is None:
            self._schedule_plan.begin_fit(shard)
        self._epoch_scheduler.check_monitor(self.result_names)
        self._run.start(shard)
        self._discard_partial_step()
        if self._local_sgd is not None:
            self._loss_weighting.synchronous_ranks = self._local_sgd.synchronous_ranks
        self.model.train()
        results: dict[str, float] | None = None
        run, stopping = self._run, self._stopping
        with (
            self.checkpointer.release_folder_at_end(),
            stopping,
            self._reporter.report_run(
                self.progress.step,
                remaining_steps(self.config, self.progress, shard),
                run.description,
                is_complete=run.is_complete,
            ),
            self._run_metrics.report_fit(run.description, is_new_run=not run.continues_in_folder),
        ):
            if self._learning_rate_factor is not None:
                self._reporter.show_message(str(self._learning_rate_factor))
            with self._callbacks.call_at_fit_end(self), self._optimizer_mode.training():
                self._callbacks.call("on_fit_start", self)
                self._synchronize()
                while self.stop_reason is None and not run.is_complete:
                    if run.epoch_end is None:
                        self._train_epoch(shard, validation)
                    results = self._complete_epoch(validation)
                if self._local_sgd is not None and not stopping.is_preempted:
                    self._local_sgd.synchronize()
                with self._run_metrics.measure("checkpoint"):
                    self.checkpointer.wait()
            if stopping.is_preempted:
                raise Preempted(stopping.reason)
        return self._validate(validation) if results is None else results

    def evaluate(self, data: Data) -> dict[str, float]:
        """Return "loss" and each metric of the model in eval mode: exact means over the samples of `data`. All ranks
        must call this method.

        Every rank evaluates its shard with the buffers of rank 0, and returns the same results. Raises DataError on
        every rank for data without samples.
        """
        trainer_arguments.check_data(self.backend, "Trainer.evaluate", data=data)
        with self._weights_for_evaluation():
            return self._evaluation.evaluate(self._evaluation_shard(data))

    def predict(self, data: Data, *, writer: PredictionWriter | None = None) -> Any:
        """Return the outputs of the model in eval mode for all samples of `data`, in the order of `data`, on the CPU.

        All ranks must call this method. Each rank receives all outputs, so each host needs enough memory for one copy
        per rank. The result has the structure of the model's (or `forward`'s) output: lists, tuples, mappings and
        dataclasses of tensors whose first dimension indexes the samples. Targets are ignored, and may be missing if the
        Trainer has no `forward` function. If a batch is a mapping, the loss and the key-value cache that a language
        model returns are omitted. Every rank evaluates its shard with the buffers of rank 0. With `stream="own"`, the
        outputs are ordered by rank. Raises DataError, ConfigError, or ModelError for outputs that cannot be
        concatenated, on every rank.

        With `writer`, each rank writes its outputs to files as it computes them, and `predict` returns the folder.
        """
        trainer_arguments.check_data(self.backend, "Trainer.predict", data=data)
        trainer_arguments.check_writer(self.backend, writer)
        with self._weights_for_evaluation():
            return self._evaluation.predict(self._evaluation_shard(data), writer)

    def load_weights(self, checkpoint: str | Path) -> None:
        """Load the weights of a checkpoint, of the newest checkpoint in a run folder, or, with "best", of the best
        checkpoint according to `keep_best`.

        Replaces the model's weights on every rank and, with `config.ema_decay`, their average. The optimizer, the
        scheduler and the progress do not change. All ranks must call this method. For a final evaluation, call
        `trainer.load_weights("best")`, then `trainer.evaluate(test_data)`. Raises on every rank: CheckpointError if
        there is no such checkpoint, if it does not match the model, or if it has no average; and ConfigError if the run
        does not keep its best checkpoint.
        """
        checkpoint = trainer_arguments.check_checkpoint(self.backend, checkpoint)
        path = self.checkpointer.find_best() if checkpoint == "best" else Path(checkpoint)
        average = self._weight_average
        stored_average = None if average is None else average.stored_model
        load_weights(path, self.backend.unwrap(self.model), stored_average, self.backend)
        self._run.discard_results()
        if self._local_sgd is not None:
            self._local_sgd.restart()
        if average is not None:
            average.round_averages()
            average.discard_counted_steps()

    def stop(self, reason: str) -> None:
        """Request that `fit` stop, and display `reason`. Any rank may call it at any time.

        All ranks stop at the next sync point (about every two seconds, and at the end of an epoch). `fit` then
        validates and saves a checkpoint, even within an epoch, from which the run can be resumed.
        """
        check_text("Trainer.stop(reason)", reason, 'Use trainer.stop("the loss is low enough")')
        self._stopping.request(reason)

    @property
    def loss_scale(self) -> Tensor | None:
        """The fp16 loss scale; None without fp16. In `on_before_optimizer_step`, gradients are multiplied by it."""
        return self._precision.loss_scale()

    def _train_epoch(self, shard: TrainingData, validation: Mapping[str, EvaluationShard]) -> None:
        """Train to the end of the epoch or the run, and count the epoch if it is complete."""
        config, progress = self.config, self.progress
        epoch, first_sample = progress.epoch + 1, progress.sample
        self._begin_epoch(shard)
        self._timer.start()
        self._run_metrics.begin_category("training")
        self._synchronizer.start_timing(progress.step)
        run_micro_batch = trainer_model.MicroBatchRunner(self.model, self._forward_backward, self._run_metrics.flops)
        # Do not assign the iterator to a variable, so that its workers terminate immediately after an exception.
        for batch, micro_batch in self._timer.iterate(self._prefetched_batches(shard)):
            run_micro_batch(batch, micro_batch)
            if not micro_batch.ends_step:
                continue
            if self._local_sgd is not None:
                self._local_sgd.reduce_gradients()  # over the ranks that train synchronously
            # Divide the gradients by the number of tokens, if tokens are counted.
            self._loss_weighting.finish_step(self.optimizer, micro_batch)
            self._callbacks.call("on_before_optimizer_step", self)
            if self.checkpointer.is_memory_enabled:  # so that a restart repeats at most the steps of one interval
                with self._run_metrics.measure("checkpoint"):
                    self.checkpointer.wait_for_memory()
            with self._stopping.committing:
                # Unscale, clip, step the optimizer, update the average, step the scheduler.
                self._update(progress.step, self._learning_rate_factor)
                if self._local_sgd is not None:
                    self._end_local_step(self._local_sgd)
                self._running_loss.finish_step()  # counted after the update, so that an interrupted step is repeated
                self._timer.end_step(micro_batch.step_samples)
                progress.advance(micro_batch.step_samples, micro_batch.step_end)
                self._run.data_state = micro_batch.data_state
            self._reporter.count_step(epoch, micro_batch.step_samples)
            self._run.is_checkpoint_due |= _is_multiple(progress.step, config.checkpoint_every_steps)
            self._callbacks.call("on_step_end", self)
            if _is_multiple(progress.step, config.memory_checkpoint_every_steps):
                self._save(in_memory=True)
            is_last = self._run.is_epoch_at_limit or progress.step == config.max_steps  # `_complete_epoch` saves
            if self._run.is_checkpoint_due and not is_last and not shard.ends_epoch(progress.position):
                self._save()
            if self._is_loss_due():
                self._report_loss(epoch)
            elif self._stopping.is_due(progress.step):
                self._synchronize()
            if config.dry_run:
                self.stop("TrainConfig.dry_run trains one step")
                self._synchronize()
            if is_last or self.stop_reason is not None:
                break
            if _is_multiple(progress.step, config.validate_every_steps) and not shard.ends_epoch(progress.position):
                results = self._validate_in_fit(validation)
                if validation and not results:  # after a preemption signal
                    break
                self._reporter.report_validation(epoch, progress.step, results)
        samples = progress.sample - first_sample
        # A converted checkpoint does not contain loss sums, so a run resumed from it at the end of an epoch has no
        # train_loss.
        running_loss = self._running_loss
        losses = {"train_loss": running_loss.reduce_epoch_mean(epoch, progress.step)} if running_loss.steps else {}
        seconds = self._timer.stop()
        self._run_metrics.begin_category("other")
        rate = next_learning_rate(self.optimizer, self._learning_rate_factor, progress.step)
        speed = {**rate, "seconds": seconds, "samples_per_second": samples / seconds}
        end = EpochEnd(epoch, losses, speed)
        with self._stopping.committing:
            if self._run.end_epoch_if_complete(shard):
                running_loss.start_epoch()
            self._run.epoch_end = end

    def _complete_epoch(self, validation: Mapping[str, EvaluationShard]) -> dict[str, float]:
        """Complete the end of an epoch, or of a run that stops within an epoch: validate, step an epoch scheduler, call
        callbacks, save a checkpoint, and write the history. Return the results.

        The trained epoch is saved before the validation, because the validation may take long and may fail. After a
        preemption signal, the resumed run validates the epoch.
        """
        end, progress = self._run.epoch_end, self.progress
        assert end is not None
        if not end.is_validated:
            # After a preemption signal within an epoch, the resumed run first trains the remaining steps.
            has_ended = progress.sample == 0 or self._run.has_reached_limit
            if validation and (has_ended or not self._stopping.is_preempted):
                if self._run.is_epoch_checkpoint_due or self.stop_reason is not None:
                    self._save()
                results = {} if self._stopping.is_preempted else self._validate_in_fit(validation)
                if not results:
                    if not self._run.is_saved:
                        self._save()
                    return end.results
                end.results |= results
            with self._stopping.committing:
                if progress.sample == 0:
                    self._epoch_scheduler.step(end.results)
                end.is_validated = True
        goodput = self._run_metrics.goodput_seconds()
        self._reporter.report_epoch(end.epoch, progress.step, end.results, end.speed["samples_per_second"], goodput)
        self._callbacks.call("on_epoch_end", self, end.results)
        self._synchronize()
        self._run.check_weights(self.backend.unwrap(self.model))
        with self._run.completing_epoch(self._timer.gather()):
            # After a preemption signal within an epoch, a saved step is not saved again, because little time remains.
            is_sufficient = self._stopping.is_preempted and self._run.is_saved and progress.sample > 0
            if not is_sufficient and (self._run.is_epoch_checkpoint_due or self.stop_reason is not None):
                self._save()
        return end.results

    def _begin_epoch(self, shard: TrainingData) -> None:
        """Apply the gradient-accumulation schedule to the current epoch, and compute the learning-rate factor for its
        global batch size."""
        shard.begin_epoch(self.progress.epoch)
        self._learning_rate_factor = LearningRateFactor.from_config(self.config, shard.global_batch_size)

    def _prefetched_batches(self, shard: TrainingData) -> Iterable[tuple[Any, MicroBatch]]:
        """Return the batches of this rank from the current position to the end of the epoch."""
        if self._run.is_epoch_at_limit or self._run.has_reached_limit:  # interrupted after the last step
            return ()
        micro_batches = self._schedule_plan.check_epoch(
            shard, shard.micro_batches(self.progress.epoch, self.progress.position)
        )
        return self._prefetcher(micro_batches, ahead=shard.can_prefetch, overlapped=shard.can_overlap_prefetch)

    def _save(self, *, in_memory: bool = False) -> None:
        with self._run_metrics.measure("checkpoint"), self._weights_for_evaluation():
            model = self.backend.unwrap(self.model)
            self._run.save(model, self.optimizer, self._scheduler, in_memory=in_memory)

    def _forward_backward(self, batch: Any, micro_batch: MicroBatch, *, is_measured: bool = True) -> Loss:
        """Run the forward and backward pass of a micro-batch, and accumulate its weighted gradients. Return its
        loss."""
        self._forward.check_same_keys(self.backend, batch)
        is_dummy, ends_step = not micro_batch.samples, micro_batch.ends_step
        # With logical ranks, only the buffers of logical rank 0 are kept, and logical rank 0 never has a dummy batch.
        is_excluded = is_dummy and self.config.logical_ranks is None
        current = current_micro_batch(
            self.backend,
            batch,
            micro_batch,
            seed=self.config.seed,
            epoch=self.progress.epoch,
            logical_ranks=self.config.logical_ranks,
        )
        with (
            current,
            exclude_from_statistics(self.model) if is_excluded else nullcontext(),
            nullcontext() if ends_step or self._local_sgd is not None else self.backend.no_sync(self.model),
        ):
            with self._precision.autocast():
                output, target = self._forward(self.model, batch)
                loss = read_training_loss(self.loss_fn(output, target))
                if agree_on_shifted_labels(self.loss_fn, self.backend, self.progress.step):
                    loss = read_training_loss(self.loss_fn(output, target))
            weighted = self._loss_weighting.weight_loss(loss, micro_batch)
            if self.config.find_unused_parameters and is_dummy:
                weighted = block_gradients(weighted)  # otherwise a dummy batch would create zero gradients
            scaled = self._precision.scale(weighted)
            backward(
                self._timer.measure_backward(scaled) if is_measured else scaled,
                *(self._loss_weighting.overlapped_work() + self._prefetcher.overlapped_work() if ends_step else ()),
            )
        if ends_step and self.config.logical_ranks is not None:
            seed_after_step(self.config.seed, self.progress.step + 1)
        self.last_loss = loss.value
        self._running_loss.add(loss.value, micro_batch.samples, loss.tokens)
        self._callbacks.call("on_micro_batch_end", self, batch, micro_batch, loss)
        return loss

    def _end_local_step(self, local_sgd: LocalSGD) -> None:
        """Synchronize the weights if a synchronization of local SGD is due. After a synchronization, update the weight
        average."""
        is_synchronized, average = local_sgd.step() > 0, self._weight_average
        if average is not None and is_synchronized:
            with local_sgd.synchronized_weights():
                average.update()
        elif average is not None:
            average.count_step()
        self._loss_weighting.synchronous_ranks = local_sgd.synchronous_ranks

    @contextmanager
    def _weights_for_evaluation(self) -> Iterator[None]:
        """Context manager in which the optimizer is in eval mode, if it has modes, and in which, with local SGD, the
        model has the mean of the ranks' weights."""
        averaged = nullcontext() if self._local_sgd is None else self._local_sgd.averaged_weights()
        with self._optimizer_mode.evaluating(), averaged:
            yield

    def _validate(
        self, validation: Mapping[str, EvaluationShard], interruption: LoopInterruption | None = None
    ) -> dict[str, float]:
        """Return the results of `validation`; an empty dictionary if `interruption` ended it."""
        if not validation:
            return {}
        results: dict[str, float] = {}
        with self._weights_for_evaluation():
            for prefix, shard in validation.items():
                results_of_shard = self._evaluation.evaluate(shard, interruption)
                if not results_of_shard:
                    return {}
                results |= {prefix + name: value for name, value in results_of_shard.items()}
        return results

    def _validate_in_fit(self, validation: Mapping[str, EvaluationShard]) -> dict[str, float]:
        """Return the results of `validation`. After a preemption signal on any rank, set `stop_reason`, and return an
        empty dictionary."""
        with self._run_metrics.measure("validation"):
            results = self._validate(validation, self._stopping.loop_interruption)
        self._run_metrics.record_validation(results)
        if validation and not results:
            self._synchronize()
        return results

    def _evaluation_shard(self, data: Data, limit_batches: int | None = None) -> EvaluationShard:
        return EvaluationShard.from_config(data, self.backend, self.config, self._train_batch_size, limit_batches)

    def _synchronize(self, numbers: Sequence[float] = ()) -> list[list[float]]:
        """Exchange stop requests and whether a checkpoint is due, and return the `numbers` of every rank. Raises
        ConfigError or ModelError on every rank if the learning rates or the mode of the model differ between ranks."""
        memory, checksum = self._run_metrics.memory_bytes(), learning_rate_checksum(self.optimizer)
        rows = self._synchronizer.exchange(
            self.progress.step, [self.checkpointer.is_due, checksum, memory, self.model.training, *numbers]
        )
        is_due, checksums, memory_by_rank, modes = ([row[index] for row in rows] for index in range(4))
        check_same_learning_rates(checksums, self.progress.step)
        self._check_mode(modes, self.progress.step)
        self._run_metrics.update_at_sync_point(self._synchronizer, memory_by_rank)
        self._run.is_checkpoint_due |= bool(is_due[0])  # according to rank 0's clock
        return [row[4:] for row in rows]

    def _report_loss(self, epoch: int) -> None:
        """Synchronize the ranks (a sync point), and show, log and record the mean loss since the last call."""
        step = self.progress.step
        sums = self._synchronize(self._running_loss.local_sums())
        values = {"loss": self._running_loss.pop_mean_since_sync(sums, epoch, step), **self._update.gradient_norm()}
        tokens = self._running_loss.count_since_sync if self._loss_weighting.counts_tokens else None
        values |= next_learning_rate(self.optimizer, self._learning_rate_factor, step)
        values |= self._run_metrics.take_logger_metrics(self._timer.take_samples(), tokens)
        self._reporter.report_sync_point(step, values)
        memory = self._run_metrics.record_sync_point(values)
        self._run.record_steps({"step": step, **values, **memory, **self._synchronizer.slow_ranks()})

    def _is_loss_due(self) -> bool:
        step, interval = self.progress.step, self.config.log_every_n_steps
        return self._stopping.is_due(step) if interval is None else step % interval == 0

    def _discard_partial_step(self) -> None:
        """Discard the gradients of a step that an exception interrupted in an earlier `fit`. The step is repeated."""
        self.backend.unwrap(self.model).zero_grad(set_to_none=True)
        self._running_loss.discard_step()
        self._loss_weighting.discard_step()
        self._precision.discard_step()
        self._update.begin_fit()


def _is_multiple(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0
