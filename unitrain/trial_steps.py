"""Training steps outside of `fit`, and a context manager that restores the model, the optimizer and the random number
generators after them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from unitrain import trainer_arguments
from unitrain.backends.compression_setting import PowerSGD, resolve_compression
from unitrain.backends.gradients.interleaved_ranks_model import InterleavedRanksModel
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.data.loading import Data
from unitrain.data.order import MicroBatch, current_micro_batch
from unitrain.data.sharding import open_training_data
from unitrain.data.training_data import ShardSettings
from unitrain.errors import ConfigError
from unitrain.modules.sync_batch_norm import exclude_from_statistics
from unitrain.optim.learning_rate import LearningRateFactor
from unitrain.optim.loss_weighting import LossWeighting, read_training_loss
from unitrain.optim.step import OptimizerMode, ParameterUpdate, backward, block_gradients
from unitrain.randomness import SeedPurpose, derive_seed, preserve_generators, seed_generators
from unitrain.torch_compat import local_shard
from unitrain.trainer import Trainer


def check_trial(trainer: Any, function_name: str) -> None:
    """Raise ConfigError on every rank if `trainer` does not support trial steps, or if its `fit` is running. All ranks
    must call this function.

    `function_name` is the name of the public function for error messages.
    """
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"{function_name} takes a unitrain.Trainer, got {type(trainer).__name__}. Use "
            f"{function_name}(trainer, data)."
        )
    trainer.backend.check_running(function_name)

    def check() -> None:
        if trainer.step_components.stopping.is_active:
            raise ConfigError(f"{function_name} was called by a callback during fit. Call it before trainer.fit.")
        for name, is_set in (
            ("local_sgd", trainer.config.local_sgd is not None),
            ("compression", isinstance(resolve_compression(trainer.config.compression), PowerSGD)),
        ):
            if is_set:
                raise ConfigError(
                    f"{function_name} does not support TrainConfig.{name}={getattr(trainer.config, name)!r}, whose "
                    f"state it could not restore. Call it with a Trainer without {name}."
                )

        if isinstance(trainer.model, InterleavedRanksModel):
            raise ConfigError(
                f"{function_name} does not support sync_batch_norm with logical_ranks. Call it with a Trainer without "
                "logical_ranks."
            )

    call_on_all_ranks(trainer.backend, check)


class TrialSteps:
    """Runs training steps of `trainer` on `data`, with the settings of the Trainer, but without its callbacks, loggers,
    scheduler and weight average.

    Use it in `preserved_state`. All ranks make the same calls.
    """

    def __init__(self, trainer: Trainer, data: Data, function_name: str) -> None:
        trainer_arguments.check_data(trainer.backend, function_name, data=data)
        self.trainer = trainer
        config, backend = trainer.config, trainer.backend
        settings = ShardSettings.from_config(config, is_elastic=False, initial_batch_sizes=None)
        self.shard = open_training_data(data, backend, settings)
        self.shard.begin_epoch(trainer.progress.epoch)
        # The factor of `lr_scaling`, without warm-up.
        factor = LearningRateFactor.from_config(config, self.shard.global_batch_size)
        self._lr_factor = None if factor is None else replace(factor, warmup_steps=0)
        self._weighting = LossWeighting(backend, config.logical_ranks)
        self._update = ParameterUpdate(
            trainer.optimizer,
            backend.unwrap(trainer.model),
            trainer.step_components.precision,
            loss_fn=trainer.loss_fn,
            max_grad_norm=config.max_grad_norm,
            scheduler=None,
        )
        # Sum of the losses of a step, and number of samples or tokens in it.
        self._sums = torch.zeros(2, dtype=torch.float64, device=backend.device)

    def run(self, steps: int, before_update: Callable[[int], None], after_step: Callable[[int, float], bool]) -> None:
        """Train for at most `steps` steps, over several epochs if necessary.

        `before_update(step)` is called before each optimizer update. `after_step(step, loss)` is called after the
        update, and returns whether to continue; `loss` is the mean loss of the step's forward passes over all ranks.
        """
        with OptimizerMode(self.trainer.optimizer).training():
            self._run(steps, before_update, after_step)

    def _run(self, steps: int, before_update: Callable[[int], None], after_step: Callable[[int, float], bool]) -> None:
        step = 0
        for epoch in count(self.trainer.progress.epoch):
            # Do not assign the iterator to a variable, so that its workers terminate immediately.
            for batch, micro_batch in self.batches(epoch):
                self.forward_backward(batch, micro_batch, epoch)
                if not micro_batch.ends_step:
                    continue
                before_update(step)
                self.update(step, micro_batch)
                step += 1
                if not after_step(step - 1, self._mean_loss()) or step == steps:
                    self.shard.end_epoch()
                    return
            self.shard.end_epoch()

    def batches(self, epoch: int) -> Iterable[tuple[Any, MicroBatch]]:
        """Return the batches of this rank in an epoch, on its device."""
        return self.trainer.step_components.prefetcher(self.shard.micro_batches(epoch), ahead=self.shard.can_prefetch)

    def forward_backward_locally(self, batch: Any, micro_batch: MicroBatch) -> None:
        """Run the forward and backward pass of a micro-batch on this rank only, without communication. The loss is not
        weighted."""
        trainer = self.trainer
        with self._current(batch, micro_batch, trainer.progress.epoch), trainer.backend.no_sync(trainer.model):
            model = trainer.backend.unwrap(trainer.model)
            with trainer.step_components.precision.autocast():
                loss = read_training_loss(trainer.loss_fn(*trainer.step_components.forward(model, batch)))
            backward(trainer.step_components.precision.scale(loss.value))

    def forward_backward(self, batch: Any, micro_batch: MicroBatch, epoch: int) -> None:
        """Run the forward and backward pass of a micro-batch, as the Trainer does."""
        trainer, config = self.trainer, self.trainer.config
        is_dummy, ends_step = not micro_batch.samples, micro_batch.ends_step
        is_excluded = is_dummy and config.logical_ranks is None
        with (
            self._current(batch, micro_batch, epoch),
            exclude_from_statistics(trainer.model) if is_excluded else nullcontext(),
            nullcontext() if ends_step else trainer.backend.no_sync(trainer.model),
        ):
            with trainer.step_components.precision.autocast():
                loss = read_training_loss(trainer.loss_fn(*trainer.step_components.forward(trainer.model, batch)))
            weighted = self._weighting.weight_loss(loss, micro_batch)
            if config.find_unused_parameters and is_dummy:
                weighted = block_gradients(weighted)
            backward(
                trainer.step_components.precision.scale(weighted),
                *(self._weighting.overlapped_work() if ends_step else ()),
            )
        if not is_dummy:
            value = loss.value.detach().double()
            if loss.tokens is None:  # then the value is the mean over the samples, not the sum over the tokens
                value, weight = value * micro_batch.samples, torch.full_like(value, micro_batch.samples)
            else:
                weight = torch.as_tensor(loss.tokens, device=value.device).double()
            self._sums += torch.stack([value, weight])

    def _current(self, batch: Any, micro_batch: MicroBatch, epoch: int) -> AbstractContextManager[None]:
        config = self.trainer.config
        return current_micro_batch(
            self.trainer.backend, batch, micro_batch, seed=config.seed, epoch=epoch, logical_ranks=config.logical_ranks
        )

    def update(self, step: int, micro_batch: MicroBatch) -> None:
        """Update the parameters at the end of the step of `micro_batch`, after `step` completed steps."""
        self._weighting.finish_step(self.trainer.optimizer, micro_batch)
        self._update(step, self._lr_factor)

    def _mean_loss(self) -> float:
        """Return the mean loss of the step over the samples or tokens of all ranks; 0 if there were no tokens."""
        total, weight = self.trainer.backend.allreduce(self._sums, "sum").tolist()
        self._sums.zero_()
        return float(total / weight) if weight else 0.0


@contextmanager
def preserved_state(trainer: Trainer, data: Data) -> Iterator[None]:
    """Context manager that restores the state of `trainer` bit for bit: the model with its buffers and modes, the
    optimizer, the loss scale, and the random number generators of this process and of a DataLoader.

    In the context, the model is in training mode, and the generators are seeded as at the start of `fit`. The state is
    copied to host memory.
    """
    model, optimizer = trainer.backend.unwrap(trainer.model), trainer.optimizer
    tensors = [local_shard(tensor) for tensor in (*model.parameters(), *model.buffers())]
    buffers = [(module, *item) for module in model.modules() for item in module.named_buffers(recurse=False)]
    copies = [_copy_to_host(tensor) for tensor in tensors]
    modes = [(module, module.training) for module in model.modules()]
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    state = {parameter: _copy_parameter_state(entry) for parameter, entry in optimizer.state.items()}
    scale = copy.deepcopy(trainer.step_components.precision.state_dict())
    generators = [(generator, generator.get_state()) for generator in _generators_of(data)]
    try:
        with preserve_generators(trainer.backend.device):
            path = (trainer.progress.step, trainer.backend.rank)
            seed_generators(derive_seed(trainer.config.seed, SeedPurpose.RANK, *path))
            trainer.model.train()
            yield
    finally:
        model.zero_grad(set_to_none=True)
        trainer.step_components.precision.discard_step()
        for module, name, buffer in buffers:  # a forward pass may have assigned another tensor to the buffer
            setattr(module, name, buffer)
        with torch.no_grad():
            for tensor, saved in zip(tensors, copies, strict=True):
                tensor.copy_(saved)
        for module, training in modes:
            module.training = training
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update(settings)
        _restore_optimizer_state(optimizer, state)
        trainer.step_components.precision.load_state_dict(scale)
        for generator, generator_state in generators:
            generator.set_state(generator_state)


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor, and a copy of its values in host memory."""

    tensor: Tensor
    saved: Tensor


def _copy_to_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _copy_parameter_state(entry: Any) -> Any:
    """Return a copy of the optimizer's state of one parameter, with a _SavedTensor for each tensor."""
    if isinstance(entry, dict):
        return {name: _copy_parameter_state(value) for name, value in entry.items()}
    if isinstance(entry, Tensor):
        return _SavedTensor(entry, _copy_to_host(local_shard(entry)))
    return copy.deepcopy(entry)


def _restore_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[Any, Any]) -> None:
    for parameter in list(optimizer.state):
        if parameter not in state:
            del optimizer.state[parameter]
    for parameter, entry in state.items():
        optimizer.state[parameter] = _restore_parameter_state(entry)


def _restore_parameter_state(entry: Any) -> Any:
    """Restore and return the state that `_copy_parameter_state` copied. Tensors are restored in place."""
    if isinstance(entry, dict):
        return {name: _restore_parameter_state(value) for name, value in entry.items()}
    if isinstance(entry, _SavedTensor):
        with torch.no_grad():
            local_shard(entry.tensor).copy_(entry.saved)
        return entry.tensor
    return entry


def _generators_of(data: Any) -> list[torch.Generator]:
    """Return the random number generators of a DataLoader and its samplers."""
    if not isinstance(data, DataLoader):
        return []
    owners = (data, data.sampler, data.batch_sampler, getattr(data.batch_sampler, "sampler", None))
    generators = [getattr(owner, "generator", None) for owner in owners]
    return list(
        {id(generator): generator for generator in generators if isinstance(generator, torch.Generator)}.values()
    )
