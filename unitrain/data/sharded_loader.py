"""ShardedLoader, the public loader for training and evaluation loops without the Trainer."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from unitrain import validation
from unitrain.backends.base import Backend, Communicator
from unitrain.backends.lifecycle import Lifecycle
from unitrain.backends.pipeline.replicas import Replicas
from unitrain.backends.synchronized_errors import call_on_all_ranks, gather_if_different
from unitrain.config import StreamKind, Uneven
from unitrain.data.evaluation_shard import EvaluationShard
from unitrain.data.loading import Data, check_is_dataset
from unitrain.data.order import current_micro_batch
from unitrain.data.prefetch import Prefetcher
from unitrain.data.seeded_batches import seed_batches
from unitrain.data.sharding import open_training_data
from unitrain.data.stream_state import StreamState
from unitrain.data.training_data import ShardSettings, TrainingData, describe_order_fix
from unitrain.data.workers import close_at_exit
from unitrain.errors import CheckpointError, ConfigError

_CLASS_NAME = "ShardedLoader"


class ShardedLoader:
    """Iterable over this rank's shard of the data, in batches on the rank's device.

        loader = unitrain.ShardedLoader(dataset, backend, batch_size=32)
        for epoch in range(3):
            for inputs, targets in loader:
                loss = loss_fn(model(inputs), targets) * loader.loss_weight
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    Each loop over the loader is one epoch. With the default arguments, every sample is in exactly one batch on one
    rank. All ranks yield the same number of batches, for any length of the data. Multiply the mean loss of a batch by
    `loss_weight`, so that the gradient averaged over ranks is the gradient of the mean loss over the samples of all
    ranks. A rank without samples for a batch yields a dummy batch with loss weight 0, which `sync_batch_norm` layers
    ignore. If several loaders are iterated over at the same time, these layers need to know to which batch the inputs
    of their model belong: pass the tensors that the loader yielded to the model.

    Use `shuffle=False` for evaluation: the loader then yields every sample once, in order and without dummy batches.
    The number of batches may differ between ranks and may be 0. Iterating then calls no collectives.

    All ranks must create the loader with the same arguments and iterate over it. With the same `seed` and epoch, N
    ranks with batches of B samples train on the same samples in each step as one rank with batches of N * B samples.

    Args:
        data: A Dataset, an IterableDataset or a DataLoader. A DataLoader's batch size, sampler, `collate_fn`,
            `drop_last` (only in training) and workers are used. If it was created with shuffle=False, its order is
            kept.
        backend: The backend that `unitrain.init` returned, or the `replicas` of a Pipeline.
        batch_size: Samples per rank and batch. Required unless `data` is a DataLoader.
        shuffle: True to train in a new order in each epoch; False to evaluate in the order of the data.
        seed: Seed of the sample order, combined with the epoch.
        drop_last: Whether to drop the last step if it has fewer samples than a global batch.
        num_workers: Worker processes that load batches, per rank; 0 to load them in the training process.
        gradient_accumulation_steps: Batches per optimizer step. `loss_weight` refers to the samples of all these
            batches; `ends_step` is True for the last of them.
        stream: Whether an IterableDataset yields the same items on every rank and worker ("shared"), which the loader
            then shards, or different items ("own").
        uneven: How to handle different numbers of batches per rank from an IterableDataset or a batch_sampler: "weight"
            (dummy batches), "drop" (end the epoch), or "pad" (repeat batches).
        logical_ranks: Divide the data among this number of logical ranks, for a model that was distributed with the
            same `logical_ranks`. `batch_size` then applies to each logical rank. In each step, the loader yields the
            batches of the logical ranks of this process, and `ends_step` is True for the last of them.

    With `logical_ranks`, the loader seeds the global random number generators of torch, numpy and Python for each
    batch. In training, random numbers, such as those of dropout, then depend only on the seed, the epoch, the step, the
    logical rank and the index of the batch in the step.

    Raises, on every rank: ConfigError for arguments that are invalid, contradict each other or differ between ranks;
    DataError for data that is empty, cannot be sharded or differs between ranks.
    """

    def __init__(
        self,
        data: Data,
        backend: Communicator,
        *,
        batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        num_workers: int = 0,
        gradient_accumulation_steps: int = 1,
        stream: StreamKind = "shared",
        uneven: Uneven = "weight",
        logical_ranks: int | None = None,
    ) -> None:
        fix = "Use the backend that unitrain.init() returned: with unitrain.init() as backend"
        validation.check_instance(f"{_CLASS_NAME}(backend)", backend, Communicator, "a backend", fix)
        if logical_ranks is not None and not isinstance(backend, Backend):
            raise ConfigError(
                f"ShardedLoader(logical_ranks={logical_ranks}) needs the backend that unitrain.init() returned, got an "
                f"object of class {type(backend).__name__}. Pipelines do not support logical ranks: leave "
                "logical_ranks out."
            )
        if isinstance(backend, Lifecycle):
            backend.check_running(_CLASS_NAME)
        settings: dict[str, Any] = {
            "shuffle": shuffle,
            "seed": seed,
            "drop_last": drop_last,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "stream": stream,
            "uneven": uneven,
            "logical_ranks": logical_ranks,
        }
        call_on_all_ranks(backend, lambda: _check_arguments(data, batch_size, num_workers, settings))
        _check_same_on_all_ranks(backend, settings)
        self._backend = backend
        self._prefetcher = Prefetcher(backend.device)
        self._seed, self._logical_ranks = seed, logical_ranks
        self._epoch, self._position = 0, 0
        self._is_within_epoch = False
        self._data_state: StreamState | None = None  # after the last complete step
        # Properties of the last yielded batch: number of samples, loss weight, and whether it ends a step.
        self._num_samples, self._loss_weight, self._ends_step = 0, 0.0, True
        self._shard: TrainingData | EvaluationShard
        if not shuffle:
            self._shard = EvaluationShard(
                data,
                backend,
                batch_size=batch_size,
                num_workers=num_workers,
                stream=stream,
                logical_ranks=logical_ranks,
                class_name=_CLASS_NAME,
            )
            return
        if batch_size is not None and isinstance(backend, Replicas):
            batch_size *= backend.replicas_per_rank
        shard_settings = ShardSettings(
            batch_size=batch_size,
            gradient_accumulation_steps=gradient_accumulation_steps,
            seed=seed,
            drop_last=drop_last,
            num_workers=num_workers,
            stream=stream,
            uneven=uneven,
            logical_ranks=logical_ranks,
            allow_empty_ranks=True,
            class_name=_CLASS_NAME,
        )
        self._shard = open_training_data(data, backend, shard_settings)

    @property
    def batch_size(self) -> int | None:
        """Samples per rank and batch; None if the data or a batch_sampler determines it."""
        return self._shard.batch_size

    @property
    def epoch(self) -> int:
        """The epoch of the current loop over the loader or, after a complete loop, of the next loop. The first epoch is
        0. Set it to start at a different epoch. It does not change in evaluation. If a loop over the loader ends early
        (`break`), `epoch` does not change, and the next loop starts the following epoch.
        """
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        validation.check_integer(f"{_CLASS_NAME}.epoch", epoch, 0, "Use loader.epoch = 0")
        self._set_position(epoch, 0)

    @property
    def num_samples(self) -> int:
        """The number of samples in the last yielded batch; 0 for a dummy batch."""
        return self._num_samples

    @property
    def loss_weight(self) -> float:
        """The factor for the mean loss of the last yielded batch: its samples * number of ranks / samples of the step.

        With logical ranks, the number of ranks in this formula is the number of logical ranks. A step consists of
        `gradient_accumulation_steps` batches (1 by default) on every rank or logical rank; the last step of an epoch
        may have fewer.
        """
        self._check_is_for_training("loss_weight")
        return self._loss_weight

    @property
    def ends_step(self) -> bool:
        """Whether the last yielded batch ends its optimizer step; always True without gradient accumulation and without
        logical ranks."""
        self._check_is_for_training("ends_step")
        return self._ends_step

    def __len__(self) -> int:
        """Return the number of this rank's batches in an epoch, which in training is the same on every rank.

        Raises TypeError if it is unknown, as for an IterableDataset.
        """
        batches = self._shard.count_batches()
        if batches is None:
            raise TypeError("This ShardedLoader has no len(): its data or sampler does not have a length.")
        return batches

    def __iter__(self) -> Iterator[Any]:
        """Yield this rank's batches of the next epoch, or of the remainder of the epoch that `load_state_dict`
        restored.
        """
        return close_at_exit(self._iterate())

    def _iterate(self) -> Generator[Any]:
        if isinstance(self._shard, EvaluationShard):
            batches = self._prefetcher(self._shard, ahead=self._shard.can_prefetch)
            if self._shard.needs_batch_seeds:
                batches = seed_batches(batches)
            for batch, info in batches:
                self._num_samples = info.samples
                yield batch
            return
        if not torch.is_grad_enabled():
            raise ConfigError(
                "A ShardedLoader for training was iterated under torch.no_grad(), where its dummy batches would be "
                "evaluated like samples. Use ShardedLoader(data, backend, shuffle=False) for evaluation."
            )
        if self._is_within_epoch:  # the last loop ended within its epoch
            self._set_position(self._epoch + 1, 0)
        self._check_same_position()
        try:
            # Do not assign the iterator to a variable, so that its workers terminate as soon as this generator is
            # closed.
            for batch, micro_batch in self._prefetcher(
                self._shard.micro_batches(self._epoch, self._position), ahead=self._shard.can_prefetch
            ):
                self._is_within_epoch = True
                self._num_samples = micro_batch.samples
                self._loss_weight = micro_batch.samples * self._num_ranks / micro_batch.step_samples
                self._ends_step = micro_batch.ends_step
                if micro_batch.ends_step:
                    self._position, self._data_state = micro_batch.step_end, micro_batch.data_state
                with current_micro_batch(
                    self._backend,
                    batch,
                    micro_batch,
                    seed=self._seed,
                    epoch=self._epoch,
                    logical_ranks=self._logical_ranks,
                ):
                    yield batch
        finally:
            self._shard.end_epoch()
        self._set_position(self._epoch + 1, 0)

    def state_dict(self, *, all_ranks: bool = False) -> dict[str, Any]:
        """Return the position after the last complete step. Any number of ranks can load it with `load_state_dict`,
        except within an epoch with stream="own", where the numbers of ranks and workers must be the same.

        Call it after `optimizer.step()`, on any rank. The state is the same on all ranks, except for the state of a
        stateful dataset.

        With `all_ranks`, the state also contains the states of a stateful dataset on all ranks; every rank must call
        the method. Use it with stream="own", so that a resumed run does not read the items that were already used. With
        stream="shared", the state of one rank is sufficient.
        """
        self._check_is_for_training("state_dict()")
        assert isinstance(self._shard, TrainingData)
        get_state = self._shard.gather_state if all_ranks else self._shard.state_to_save
        data = get_state(self._data_state, self._epoch, self._position)
        state = {"epoch": self._epoch, "position": self._position, "order": self._order_settings()}
        return state if data is None else {**state, "data": data}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`: the next loop over the loader yields the remainder of its epoch. All ranks must call
        this method.

        Within an epoch, the remaining samples and their order are the same for any number of ranks and any batch size.
        Raises CheckpointError if `state` is not a result of `state_dict`, or if it is within an epoch and the order of
        the data differs. With stream="own", the order depends on the numbers of ranks and workers.
        """
        self._check_is_for_training("load_state_dict()")
        problem = _describe_invalid_state(state)
        if problem is not None:
            raise CheckpointError(
                f"ShardedLoader.load_state_dict takes a state that state_dict() returned, got {problem}. "
                'Use loader.load_state_dict(checkpoint["loader"]) with the state saved by loader.state_dict().'
            )
        epoch, position, saved = state["epoch"], state["position"], state["order"]
        order = self._order_settings()
        for name in {**saved, **order} if position else ():
            if saved.get(name) != order.get(name):
                raise CheckpointError(
                    f"The state of the ShardedLoader is within epoch {epoch} of data with {name}={saved.get(name)}, "
                    f"but this loader has {name}={order.get(name)}: samples would be repeated or left out. "
                    f"{describe_order_fix(name, saved.get(name))} Or start the next epoch: loader.epoch = {epoch + 1}."
                )
        self._set_position(epoch, position)
        assert isinstance(self._shard, TrainingData)
        self._shard.resume_from(state.get("data"))

    def _set_position(self, epoch: int, position: int) -> None:
        self._epoch, self._position, self._is_within_epoch, self._data_state = epoch, position, False, None

    def _check_same_position(self) -> None:
        """Raise ConfigError on every rank if the positions differ between ranks, because batches would then overlap.
        All ranks must call this method."""
        positions_by_rank = gather_if_different(self._backend, (self._epoch, self._position)) or []
        if positions_by_rank:
            raise ConfigError(
                "The ranks iterate over a ShardedLoader at different positions, as (epoch, sample): "
                f"{', '.join(f'{position} on rank {rank}' for rank, position in enumerate(positions_by_rank))}. Call "
                "loader.load_state_dict(state) or set loader.epoch on every rank, and iterate on every rank."
            )

    def _order_settings(self) -> dict[str, Any]:
        assert isinstance(self._shard, TrainingData)
        order = {"seed": self._seed, **self._shard.order_settings}
        return order if self._logical_ranks is None else {**order, "logical_ranks": self._logical_ranks}

    @property
    def _num_ranks(self) -> int:
        """The number of ranks, or of logical ranks."""
        return self._logical_ranks or self._backend.size

    def _check_is_for_training(self, name: str) -> None:
        if isinstance(self._shard, EvaluationShard):
            raise ConfigError(
                f"ShardedLoader.{name} is for training, but this loader was created with shuffle=False, for "
                "evaluation. Leave shuffle out; to train without shuffling, use "
                "ShardedLoader(DataLoader(dataset, batch_size=32), backend)."
            )


def _describe_invalid_state(state: Any) -> str | None:
    """Return a description of the invalid part of a loader's state, or None if the state is valid."""
    if not isinstance(state, Mapping):
        return validation.describe_value(state)
    for name in ("epoch", "position"):
        value = state.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            return f"{name}={validation.describe_value(value)}"
    return None if isinstance(state.get("order"), Mapping) else f"order={validation.describe_value(state.get('order'))}"


def _check_arguments(data: Any, batch_size: Any, num_workers: Any, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for an invalid argument, and DataError for data that is not a dataset."""
    check_is_dataset(f"{_CLASS_NAME}(data)", data)
    fix = "Use batch_size=32 to start with"
    validation.check_integer(f"{_CLASS_NAME}(batch_size=...)", batch_size, 1, fix, optional=True)
    validation.check_integer(f"{_CLASS_NAME}(seed=...)", settings["seed"], 0, "Use seed=0", is_limited=False)
    fix = "Use 0 to load the data in the training process"
    validation.check_integer(f"{_CLASS_NAME}(num_workers=...)", num_workers, 0, fix)
    name = f"{_CLASS_NAME}(gradient_accumulation_steps=...)"
    validation.check_integer(name, settings["gradient_accumulation_steps"], 1, "Use 1 to step after every batch")
    validation.check_boolean(f"{_CLASS_NAME}.shuffle", settings["shuffle"])
    validation.check_boolean(f"{_CLASS_NAME}.drop_last", settings["drop_last"])
    validation.check_choice(f"{_CLASS_NAME} argument stream", settings["stream"], ("shared", "own"))
    validation.check_choice(f"{_CLASS_NAME} argument uneven", settings["uneven"], ("weight", "drop", "pad"))
    if isinstance(data, DataLoader):
        for argument, value in (("num_workers", num_workers), ("drop_last", settings["drop_last"])):
            if value:
                raise ConfigError(
                    f"ShardedLoader got a DataLoader and {argument}={value}, but a DataLoader keeps its own settings. "
                    f"Use DataLoader(dataset, ..., {argument}={value})."
                )
    if not settings["shuffle"]:
        for argument, default in (("drop_last", False), ("gradient_accumulation_steps", 1)):
            if settings[argument] != default:
                raise ConfigError(
                    f"ShardedLoader({argument}={settings[argument]}) is for training, but shuffle=False evaluates "
                    f"every sample once. Leave {argument} out."
                )


def _check_same_on_all_ranks(backend: Communicator, settings: dict[str, Any]) -> None:
    settings_by_rank = gather_if_different(backend, settings) or []
    for name in settings:
        values = [rank_settings[name] for rank_settings in settings_by_rank]
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"ShardedLoader({name}=...) differs between ranks: {values}. Use the same arguments on every rank."
            )
