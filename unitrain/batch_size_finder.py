"""Search for the largest batch size per rank that fits in the memory of every rank."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.utils.data import DataLoader

from unitrain import validation
from unitrain.backends.checks import check_same_settings
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.data.loading import Data
from unitrain.errors import ConfigError
from unitrain.memory.process_memory import ProcessMemory, process_memory
from unitrain.trial_steps import TrialSteps, check_trial, preserved_state

if TYPE_CHECKING:
    from unitrain.trainer import Trainer

SearchMode = Literal["power", "binary"]

_NAME = "find_batch_size"
# A batch size is not tried if its extrapolated memory is above this multiple of the limit, because the system could
# kill the process.
_MAX_LIMIT_MULTIPLE = 2.0
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")


@dataclass(frozen=True)
class BatchSizeTrial:
    """A tested batch size: whether it fits on all ranks, and the highest peak memory of any rank.

    For a batch size whose extrapolated memory is far above the limit, no pass is run, and `peak_bytes` is the
    extrapolated memory.
    """

    batch_size: int
    fits: bool
    peak_bytes: int


@dataclass(frozen=True)
class BatchSizeSearch:
    """The result of `find_batch_size`, equal on all ranks.

    `batch_size` is the largest tested number of samples per rank and micro-batch that fits, and `global_batch_size` is
    this number multiplied by the number of ranks or logical ranks. `reason` states why larger batches were not
    selected.
    """

    batch_size: int
    global_batch_size: int
    reason: str
    trials: tuple[BatchSizeTrial, ...]

    def __str__(self) -> str:
        """Return a table of the trials."""
        rows = [
            f"{trial.batch_size:>10}  {trial.peak_bytes / 2**20:>10.1f} MiB  {'fits' if trial.fits else 'too large'}"
            for trial in self.trials
        ]
        first = (
            f"Largest batch size: {self.batch_size} per rank, {self.global_batch_size} over all ranks ({self.reason})."
        )
        return "\n".join([first, "batch size     peak memory", *rows])


def find_batch_size(
    trainer: Trainer,
    data: Data,
    *,
    initial: int = 2,
    max_batch_size: int | None = None,
    memory_limit_bytes: int | None = None,
    mode: SearchMode = "power",
) -> BatchSizeSearch:
    """Return the largest batch size per rank and micro-batch with which a training step fits in memory on every rank.
    All ranks must call this function.

    The batch size is doubled from `initial` (2, because BatchNorm rejects single samples) until a rank runs out of
    memory or exceeds `memory_limit_bytes`, or the data or `max_batch_size` is exhausted. With mode "binary", a binary
    search then finds the largest batch size that fits. `memory_limit_bytes` limits the memory of each rank: on a GPU,
    the memory of its tensors; on a CPU, the memory of its process. On a CPU, the limit is required. The tested batches
    contain the first samples of an epoch. If the sizes of the samples differ, later batches may need more memory.

    Forward and backward passes of the trials do not communicate, so that no rank waits for one that runs out of memory.
    After the first trial, one optimizer step with `initial` samples per rank creates the optimizer state. At the end,
    the model, its buffers, the optimizer and the random number generators are restored.

    This optimizer step reduces gradients over ranks and, with a sharded optimizer (`shard="state"`), also communicates
    in the update. If a rank runs out of memory while the step communicates, that rank raises ConfigError, and the other
    ranks raise an error that reports the failed rank. If it runs out of memory elsewhere in the step, every rank raises
    ConfigError.

    Raises ConfigError on every rank for invalid arguments, for a Trainer whose forward or backward pass communicates
    (`sync_batch_norm`, or `shard` "gradients" or "parameters"), for a Trainer that uses `local_sgd` or PowerSGD, and if
    even `initial` samples do not fit. Raises UnsupportedError on every rank if the memory of the device cannot be
    measured.
    """
    check_trial(trainer, _NAME)
    backend = trainer.backend
    call_on_all_ranks(
        backend, lambda: _check_arguments(trainer, data, initial, max_batch_size, memory_limit_bytes, mode)
    )
    check_same_settings(
        backend, _NAME, initial=initial, max_batch_size=max_batch_size, memory_limit_bytes=memory_limit_bytes, mode=mode
    )
    search = _Search(trainer, data, memory_limit_bytes)
    with preserved_state(trainer, data):
        if not search.try_size(initial):
            if not search.trials:
                raise ConfigError(f"{_NAME}: {search.reason}. Use initial=1, or pass more data.")
            raise ConfigError(
                f"{_NAME}: a batch of {initial} samples per rank does not fit: {search.reason}. Use initial=1, "
                'TrainConfig(precision="bf16"), checkpoint_activations or shard="state".'
            )
        search.create_optimizer_state(initial)
        fitting, too_large = initial, None
        while too_large is None:
            size = 2 * fitting if max_batch_size is None else min(2 * fitting, max_batch_size)
            if size == fitting:
                search.reason = f"max_batch_size is {max_batch_size}"
                break
            if search.try_size(size):
                fitting = size
            else:
                too_large = size
        while mode == "binary" and too_large is not None and too_large - fitting > 1:
            middle = (fitting + too_large) // 2
            if search.try_size(middle):
                fitting = middle
            else:
                too_large = middle
    return BatchSizeSearch(
        fitting, fitting * (trainer.config.logical_ranks or backend.size), search.reason, tuple(search.trials)
    )


class _Search:
    """Tries batch sizes. All ranks make the same calls. `reason` states why `try_size` last returned False."""

    def __init__(self, trainer: Trainer, data: Data, limit_bytes: int | None) -> None:
        self.trials: list[BatchSizeTrial] = []
        self.reason = ""
        self._trainer, self._data, self._limit_bytes = trainer, data, limit_bytes
        self._memory: ProcessMemory = call_on_all_ranks(trainer.backend, lambda: process_memory(trainer.backend.device))

    def try_size(self, batch_size: int) -> bool:
        """Run a forward and backward pass, and return whether it fits in memory on all ranks.

        Return False without a pass if the extrapolated memory is far above the limit. Return False and add no trial if
        the data has too few samples. If a rank fails for any other reason, all ranks raise an error.
        """
        backend, limit = self._trainer.backend, self._limit_bytes
        if (expected := self._extrapolate(batch_size)) and limit and expected > _MAX_LIMIT_MULTIPLE * limit:
            self.reason = f"{batch_size} samples would need about {expected / 2**20:.0f} MiB"
            self.trials.append(BatchSizeTrial(batch_size, False, int(expected)))
            return False
        self._memory.reset_peak()
        samples, is_out_of_memory, error = self._run_forward_backward(batch_size)
        peak = self._memory.peak()
        _release_memory(backend.device)
        failed, too_small, memory_exceeded, highest = backend.allreduce(
            torch.tensor(
                [error is not None, samples is not None and samples < batch_size, is_out_of_memory, peak], device="cpu"
            ),
            "max",
        ).tolist()
        if error is not None:
            raise error
        if failed:
            raise ConfigError(f"{_NAME} failed on another rank, whose error states the reason.")
        if too_small:
            self.reason = f"the data has fewer than {batch_size} samples per rank"
            return False
        is_above_limit = limit is not None and highest > limit
        fits = not (memory_exceeded or is_above_limit)
        self.trials.append(BatchSizeTrial(batch_size, fits, highest))
        if memory_exceeded:
            ranks = [
                rank
                for rank, is_rank_out_of_memory in enumerate(backend.allgather_object(is_out_of_memory))
                if is_rank_out_of_memory
            ]
            ranks_text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
            self.reason = f"{batch_size} samples exceed the memory of {ranks_text}"
        elif is_above_limit and limit is not None:
            self.reason = (
                f"{batch_size} samples need {highest / 2**20:.0f} MiB, above the limit of {limit / 2**20:.0f} MiB"
            )
        return fits

    def create_optimizer_state(self, batch_size: int) -> None:
        """Create the optimizer state: take one optimizer step with the gradients of all ranks. See `find_batch_size`
        for the errors if a rank runs out of memory."""
        error: ConfigError | None = None
        communicates = True
        try:
            with self._with_batch_size(batch_size) as (data, trainer):
                trial, epoch = TrialSteps(trainer, data, _NAME), trainer.progress.epoch
                for batch, micro_batch in trial.batches(epoch):
                    trial.forward_backward(batch, micro_batch, epoch)
                    if micro_batch.ends_step:
                        communicates = trainer.config.shard == "state"
                        trial.update(0, micro_batch)
                        break
                trial.shard.end_epoch()
        except Exception as caught:
            if not _is_out_of_memory(caught):
                raise
            is_sharded = self._trainer.config.shard == "state"
            fix = "a smaller model" if is_sharded else 'TrainConfig(shard="state"), or a smaller model'
            error = ConfigError(
                f"{_NAME}: the optimizer state does not fit in memory with {batch_size} samples per rank. Use {fix}."
            )
            if communicates:  # the others wait in a collective, which reports this rank
                raise error from caught

        def check() -> None:
            if error is not None:
                raise error

        call_on_all_ranks(self._trainer.backend, check)
        self._trainer.backend.unwrap(self._trainer.model).zero_grad(set_to_none=True)

    def _run_forward_backward(self, batch_size: int) -> tuple[int | None, bool, Exception | None]:
        """Run a forward and backward pass on a batch of `batch_size` samples, if the data has that many. Return the
        number of samples in the batch (None if no batch was loaded), whether this rank ran out of memory, and any other
        error."""
        samples: int | None = None
        with self._with_batch_size(batch_size) as (data, trainer):
            trial = TrialSteps(trainer, data, _NAME)  # raises the same error on every rank
            try:
                for batch, micro_batch in trial.batches(trainer.progress.epoch):
                    samples = micro_batch.samples
                    if samples == batch_size:
                        trial.forward_backward_locally(batch, micro_batch)
                    break
                return samples, False, None
            except Exception as error:
                is_out_of_memory = _is_out_of_memory(error)
                return samples, is_out_of_memory, None if is_out_of_memory else error
            finally:
                trainer.backend.unwrap(trainer.model).zero_grad(set_to_none=True)

    @contextmanager
    def _with_batch_size(self, batch_size: int) -> Iterator[tuple[Data, Trainer]]:
        """Context manager in which the Trainer has this batch size, without gradient accumulation. Yields the data and
        the Trainer; a DataLoader is replaced by one with this batch size and without a sampler."""
        trainer, data = self._trainer, self._data
        config = trainer.config
        resized_data: Any = data
        if isinstance(data, DataLoader):
            resized_data = DataLoader(data.dataset, batch_size, collate_fn=data.collate_fn)
        trainer.config = replace(
            config,
            batch_size=None if isinstance(data, DataLoader) else batch_size,
            global_batch_size=None,
            gradient_accumulation_steps=None,
        )
        try:
            yield resized_data, trainer
        finally:
            trainer.config = config

    def _extrapolate(self, batch_size: int) -> float | None:
        """Return the peak memory in bytes, extrapolated linearly from the trials with the two largest batch sizes; None
        if there are fewer than two trials."""
        if len(self.trials) < 2:
            return None
        first, second = sorted(self.trials, key=lambda trial: trial.batch_size)[-2:]
        slope = (second.peak_bytes - first.peak_bytes) / (second.batch_size - first.batch_size)
        return second.peak_bytes + slope * (batch_size - second.batch_size)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def _release_memory(device: torch.device) -> None:
    gc.collect()  # reference cycles of exceptions and their tracebacks keep tensors alive
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _check_arguments(
    trainer: Trainer, data: Any, initial: Any, max_batch_size: Any, memory_limit_bytes: Any, mode: Any
) -> None:
    validation.check_integer(f"{_NAME}(initial=...)", initial, 1, "Use initial=2")
    fix = "Leave it out to search up to the memory limit"
    validation.check_integer(f"{_NAME}(max_batch_size=...)", max_batch_size, 1, fix, optional=True)
    fix = "Use memory_limit_bytes=8 * 2**30 for 8 GiB"
    validation.check_integer(f"{_NAME}(memory_limit_bytes=...)", memory_limit_bytes, 1, fix, optional=True)
    validation.check_choice(f"{_NAME}(mode=...)", mode, get_args(SearchMode))
    if max_batch_size is not None and max_batch_size < initial:
        raise ConfigError(
            f"{_NAME}(max_batch_size={max_batch_size}) is below initial={initial}. Use initial=1, or a larger "
            "max_batch_size."
        )
    if memory_limit_bytes is None and trainer.backend.device.type == "cpu":
        raise ConfigError(
            f"{_NAME} needs memory_limit_bytes on a CPU, where a process that runs out of memory is killed. {fix}."
        )
    config = trainer.config
    if config.sync_batch_norm or config.shard in ("gradients", "parameters"):
        name = "sync_batch_norm" if config.sync_batch_norm else "shard"
        raise ConfigError(
            f"{_NAME} does not support TrainConfig.{name}={getattr(config, name)!r}, which communicates in the forward "
            f"or backward pass, so the other ranks would wait for a rank that runs out of memory. Leave {name} out, or "
            "use unitrain memory."
        )
    if isinstance(data, DataLoader) and data.batch_size is None:
        raise ConfigError(
            f"{_NAME} cannot change the batch size of a DataLoader whose dataset or batch_sampler creates the batches. "
            "Pass a DataLoader with batch_size, or the dataset."
        )
