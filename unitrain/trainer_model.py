"""Preparation of the Trainer's model: conversion, averaged weights, distribution to ranks, and micro-batches of
interleaved logical ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from unitrain.backends.base import Backend
from unitrain.backends.capabilities import SupportsShardedParameters, require_capability
from unitrain.backends.gradients.interleaved_ranks_model import InterleavedRanksModel
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.config import TrainConfig
from unitrain.data.order import MicroBatch
from unitrain.data.prefetch import Prefetcher
from unitrain.errors import ModelError
from unitrain.modules.acceleration import compile_forward, use_channels_last
from unitrain.modules.activation_checkpointing import checkpoint_activations
from unitrain.modules.sync_batch_norm import sync_batch_norm
from unitrain.monitoring.rank_status import format_ranks
from unitrain.optim.ema import WeightAverage
from unitrain.optim.forward import Forward
from unitrain.optim.loss_weighting import Loss
from unitrain.optim.precision import Precision, allow_tf32
from unitrain.output import get_logger
from unitrain.progress.flops import FlopsMeasurement
from unitrain.progress.stopping import StopCoordinator

_log = get_logger(__name__)


class StepComponents(NamedTuple):
    """The objects of a Trainer that compute its steps, for functions that train outside of `fit`."""

    precision: Precision
    forward: Forward
    prefetcher: Prefetcher
    stopping: StopCoordinator


def prepare_model(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: TrainConfig, backend: Backend
) -> WeightAverage | None:
    """Move `model` to the device, convert it in place as `config` requests, and return a WeightAverage of it.

    The result is None without `ema_decay`. All ranks must call this function. Raises ConfigError or ModelError on
    every rank.
    """
    allow_tf32(config.tf32)
    model.to(backend.device)
    if optimizer.state:  # moves state that was loaded before the model was moved to the device
        optimizer.load_state_dict(optimizer.state_dict())
    if config.channels_last:
        use_channels_last(model)
    if config.checkpoint_activations:
        call_on_all_ranks(backend, lambda: checkpoint_activations(model, config.checkpoint_activations))
    if config.sync_batch_norm:
        call_on_all_ranks(backend, lambda: sync_batch_norm(model, backend))
    average = call_on_all_ranks(backend, lambda: WeightAverage.create(backend.unwrap(model), config.ema_decay))
    if config.compile:
        compile_forward(model, None if average is None else average.model, mode=config.compile)
    return average


def distribute_model(model: nn.Module, config: TrainConfig, backend: Backend) -> nn.Module:
    """Return the result of `backend.distributed_model` for the settings in `config`. All ranks must call this
    function."""
    logical_ranks = {} if config.logical_ranks is None else {"logical_ranks": config.logical_ranks}
    return backend.distributed_model(
        model,
        shard=config.shard,
        shard_blocks=config.shard_blocks,
        find_unused_parameters=config.find_unused_parameters,
        broadcast_buffers=config.broadcast_buffers,
        compression=config.compression,
        **logical_ranks,
    )


class MicroBatchRunner:
    """Calls `forward_backward(batch, micro_batch)`, and counts its FLOPs with `flops` if a measurement is due.

    If the model is an InterleavedRanksModel, the runner collects one micro-batch of each logical rank of this process,
    and then calls `forward_backward` for all of them, interleaved. Only the call for the last logical rank has
    is_measured=True.
    """

    def __init__(self, model: nn.Module, forward_backward: Callable[..., Loss], flops: FlopsMeasurement) -> None:
        self._forward_backward, self._flops = forward_backward, flops
        self._interleaved_model = model if isinstance(model, InterleavedRanksModel) else None
        self._collected_functions: list[Callable[[], Loss]] = []

    def __call__(self, batch: Any, micro_batch: MicroBatch) -> None:
        if self._interleaved_model is None:
            self._flops.with_counting(self._forward_backward)(batch, micro_batch)
        elif micro_batch.logical_rank != self._interleaved_model.last_logical_rank:
            self._collected_functions.append(partial(self._forward_backward, batch, micro_batch, is_measured=False))
        else:
            self._flops.with_counting(partial(self._run_interleaved, self._interleaved_model))(batch, micro_batch)

    def _run_interleaved(self, model: InterleavedRanksModel, batch: Any, micro_batch: MicroBatch) -> Loss:
        """Run the collected micro-batches and `micro_batch`, which belongs to the last logical rank. Return the loss of
        `micro_batch`."""
        functions, self._collected_functions = self._collected_functions, []
        functions.append(partial(self._forward_backward, batch, micro_batch))
        begins_step, ends_step = micro_batch.index_in_step == 0, micro_batch.ends_step
        return model.run_in_turns(functions, begins_step=begins_step, ends_step=ends_step)[-1]


def start_average(average: WeightAverage, distributed_model: nn.Module, config: TrainConfig, backend: Backend) -> None:
    """Start averaging the weights of `distributed_model`; if its parameters are sharded, also shard their average.

    All ranks must call this function.
    """
    if config.shard == "parameters":
        feature = "TrainConfig.shard 'parameters'"
        capability = require_capability(backend, SupportsShardedParameters, feature)
        capability.shard_copy(average.model, distributed_model)
        if average.stored_model is not average.model:
            capability.shard_copy(average.stored_model, distributed_model)
    average.start()


class ModeCheck:
    """Compares the modes of the model on all ranks, and warns once if the model is left in eval mode."""

    def __init__(self, backend: Backend) -> None:
        self._may_warn = backend.rank == 0

    def __call__(self, is_training_by_rank: Sequence[float], step: int) -> None:
        """Raise ModelError if, after `step` steps, the model is in training mode on some ranks only.
        `is_training_by_rank` states, for each rank, whether its model is in training mode."""
        evaluating = [rank for rank, is_training in enumerate(is_training_by_rank) if not is_training]
        if evaluating and any(is_training_by_rank):
            training = [rank for rank, is_training in enumerate(is_training_by_rank) if is_training]
            raise ModelError(
                f"After step {step}, the model is in eval mode on {format_ranks(evaluating)} and in training mode on "
                f"{format_ranks(training)}. Call model.eval() and model.train() on every rank."
            )
        if evaluating and self._may_warn:
            self._may_warn = False
            _log.warning(
                "After step %d, the model is in eval mode, so dropout is inactive and BatchNorm does not update its "
                "statistics. If a callback calls model.eval() for an evaluation, let it call model.train() afterwards.",
                step,
            )
