"""Batch sizes of a run: global_batch_size = batch_size x ranks x gradient_accumulation_steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from torch.utils.data import DataLoader

from unitrain.accumulation import Accumulation
from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.data.loading import Data
from unitrain.errors import ConfigError


class BatchSizes(NamedTuple):
    """Batch size per rank and micro-batch (None if the data determines it), and number of micro-batches per step.

    `global_batch_size` is set only for an elastic job, in which it may differ from batch_size * ranks *
    gradient_accumulation_steps. Each step of map-style data is then sharded as evenly as possible.
    """

    batch_size: int | None
    gradient_accumulation_steps: int
    global_batch_size: int | None = None


class InitialBatchSizes(NamedTuple):
    """Initial batch sizes of an elastic job: batch size per rank and micro-batch, and global batch size."""

    batch_size: int
    global_batch_size: int


def accumulation_setting(batch_sizes: Mapping[int, BatchSizes]) -> int | dict[int, int]:
    """Return the number of micro-batches per step or, if it changes between epochs, a dictionary from the first epoch
    of each number to that number."""
    steps = {epoch: sizes.gradient_accumulation_steps for epoch, sizes in batch_sizes.items()}
    return steps[0] if len(steps) == 1 else steps


def resolve_batch_sizes(
    data: Data,
    communicator: Communicator,
    *,
    batch_size: int | None,
    gradient_accumulation_steps: int | None,
    global_batch_size: int | None,
    is_elastic: bool = False,
    initial_batch_sizes: InitialBatchSizes | None = None,
    full_batches_only: bool = False,
    logical_ranks: int | None = None,
) -> BatchSizes:
    """Return the batch sizes of training on `data`. All ranks must call this function.

    With `logical_ranks`, the batch size per rank applies to each logical rank.

    For a DataLoader, `batch_size` of the result is the argument `batch_size`, which must be None or the DataLoader's
    batch size. If an elastic job was restarted, `initial_batch_sizes` contains the batch sizes of its first attempt.
    Raises ConfigError, on all ranks, if the sizes contradict each other, or if `global_batch_size` is set although the
    data determines the size of its batches.
    """
    num_ranks = logical_ranks or communicator.size

    def derive() -> BatchSizes:
        fixed_batch_size = data.batch_size if isinstance(data, DataLoader) else batch_size
        if isinstance(data, DataLoader) and fixed_batch_size is None and global_batch_size is not None:
            source = data.dataset if data.batch_sampler is None else data.batch_sampler
            raise ConfigError(
                f"TrainConfig.global_batch_size {global_batch_size} is not possible, because {type(source).__name__} "
                "determines the size of each batch. Leave global_batch_size out, and use gradient_accumulation_steps "
                "for larger steps."
            )
        settings = {
            "batch_size": fixed_batch_size or batch_size,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "global_batch_size": global_batch_size,
        }
        if is_elastic and (fixed_batch_size or global_batch_size):
            batch_sizes = elastic_batch_sizes(
                num_ranks, initial_batch_sizes, **settings, full_batches_only=full_batches_only
            )
        else:
            ranks_name = "ranks" if logical_ranks is None else "logical ranks"
            batch_sizes = derive_batch_sizes(num_ranks, **settings, ranks_name=ranks_name)
        return batch_sizes._replace(batch_size=batch_size) if isinstance(data, DataLoader) else batch_sizes

    return call_on_all_ranks(communicator, derive)


def elastic_batch_sizes(
    num_ranks: int,
    initial_batch_sizes: InitialBatchSizes | None,
    *,
    batch_size: int | None,
    gradient_accumulation_steps: int | None,
    global_batch_size: int | None,
    full_batches_only: bool = False,
) -> BatchSizes:
    """Return the batch sizes of an elastic job on `num_ranks` ranks, with the global batch size of the first attempt.

    `initial_batch_sizes` is None in the first attempt; at least one of `batch_size` and `global_batch_size` is then
    set. The maximum number of samples per rank and micro-batch is `batch_size` or, if `batch_size` is None, the maximum
    of the first attempt. With `full_batches_only`, every rank has exactly the maximum number of samples in each
    micro-batch, so the actual global batch size only approximates that of the first attempt.
    """
    micro_batches = num_ranks * (gradient_accumulation_steps or 1)
    if initial_batch_sizes is None:
        initial_batch_sizes = InitialBatchSizes(
            batch_size or -(-(global_batch_size or 1) // micro_batches),
            global_batch_size or micro_batches * (batch_size or 1),
        )
    max_batch_size = batch_size or initial_batch_sizes.batch_size
    if full_batches_only:
        return BatchSizes(
            max_batch_size,
            max(1, round(initial_batch_sizes.global_batch_size / (num_ranks * max_batch_size))),
            initial_batch_sizes.global_batch_size,
        )
    return BatchSizes(
        max_batch_size,
        -(-initial_batch_sizes.global_batch_size // (num_ranks * max_batch_size)),
        initial_batch_sizes.global_batch_size,
    )


def derive_batch_sizes(
    num_ranks: int,
    *,
    batch_size: int | None,
    gradient_accumulation_steps: int | None,
    global_batch_size: int | None,
    ranks_name: str = "ranks",
) -> BatchSizes:
    """Return the batch sizes on `num_ranks` ranks. Error messages call the ranks `ranks_name`, such as "logical ranks".

    Any two of `batch_size`, `gradient_accumulation_steps` and `global_batch_size` determine the third. If only
    `global_batch_size` is set, it is divided by the number of ranks; if only `batch_size` is set, gradients are not
    accumulated. Raises ConfigError if the arguments contradict each other, or if `global_batch_size` cannot be divided
    without a remainder.
    """
    if global_batch_size is None:
        return BatchSizes(batch_size, gradient_accumulation_steps or 1)
    if batch_size is None:
        micro_batches = num_ranks * (gradient_accumulation_steps or 1)
        if global_batch_size % micro_batches:
            _raise_not_divisible(
                global_batch_size,
                micro_batches,
                f"{num_ranks} {ranks_name} x gradient_accumulation_steps {gradient_accumulation_steps or 1}",
            )
        return BatchSizes(global_batch_size // micro_batches, gradient_accumulation_steps or 1)
    if global_batch_size % (num_ranks * batch_size):
        _raise_not_divisible(
            global_batch_size, num_ranks * batch_size, f"{num_ranks} {ranks_name} x batch_size {batch_size}"
        )
    needed_accumulation = global_batch_size // (num_ranks * batch_size)
    if gradient_accumulation_steps not in (None, needed_accumulation):
        raise ConfigError(
            f"TrainConfig.global_batch_size {global_batch_size} is not {num_ranks} {ranks_name} x "
            f"batch_size {batch_size} x gradient_accumulation_steps {gradient_accumulation_steps}. Leave out "
            f"gradient_accumulation_steps, which is then {needed_accumulation}, or global_batch_size."
        )
    return BatchSizes(batch_size, needed_accumulation)


def evaluation_batch_sizes(
    batch_size: int | None,
    global_batch_size: int | None,
    gradient_accumulation_steps: Accumulation | None,
    train_batch_size: int | None,
    num_ranks: int,
) -> tuple[int | None, int | None]:
    """Return the evaluation batch size per rank (None if it is unknown), and the size of the batches that
    `limit_batches` counts (None for the batch size per rank).

    `batch_size` is the user's setting. Without it, evaluation uses the batch size of training: `train_batch_size` if it
    is known, otherwise `global_batch_size` divided by the micro-batches per step and the number of ranks. If the user
    has set only `global_batch_size`, `limit_batches` counts batches of all ranks together. The evaluated samples
    therefore never depend on the number of ranks.
    """
    if batch_size is not None or global_batch_size is None:
        return batch_size or train_batch_size, None
    # TrainConfig rejects a schedule together with global_batch_size.
    assert not isinstance(gradient_accumulation_steps, Mapping)
    batch_size_over_ranks = -(-global_batch_size // (gradient_accumulation_steps or 1))
    return train_batch_size or -(-batch_size_over_ranks // num_ranks), batch_size_over_ranks


def _raise_not_divisible(global_batch_size: int, divisor: int, product: str) -> NoReturn:
    below = global_batch_size // divisor * divisor
    choices = f"{below} or {below + divisor}" if below else str(divisor)
    raise ConfigError(
        f"TrainConfig.global_batch_size {global_batch_size} is not divisible by {product} = {divisor}. "
        f"Use global_batch_size={choices}."
    )
