"""Batch sizes in one language: global_batch_size = batch_size x ranks x gradient_accumulation_steps."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from torch.utils.data import DataLoader

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.data.loading import Data
from unitrain.errors import ConfigError


class BatchSizes(NamedTuple):
    """Samples per rank and micro-step (None where nothing says how many), and micro-steps per step.

    `whole` is the global batch size where it is not their product: the ranks then share it out as evenly as they can.
    """

    batch_size: int | None
    accumulate: int
    whole: int | None = None


class ElasticBatchSize(NamedTuple):
    """How large the steps of an elastic job were when it began: samples per rank and micro-step, and in all."""

    batch_size: int
    whole: int


def resolve_batch_sizes(
    data: Data,
    communicator: Communicator,
    *,
    batch_size: int | None,
    accumulate: int | None,
    whole: int | None,
    elastic: bool = False,
    kept: ElasticBatchSize | None = None,
    whole_batches: bool = False,
) -> BatchSizes:
    """Return `derive_batch_sizes` for `data`, of which a DataLoader has a batch size of its own. All ranks call it.

    The batch size is the one to ask of the data: for a DataLoader what the user asked for beside. For an elastic job it
    is `elastic_batch_sizes`, unless the data decides the size of its batches; then `whole` is a ConfigError on all
    ranks.
    """

    def derive() -> BatchSizes:
        own = data.batch_size if isinstance(data, DataLoader) else batch_size
        if isinstance(data, DataLoader) and own is None and whole is not None:
            maker = data.dataset if data.batch_sampler is None else data.batch_sampler
            raise ConfigError(
                f"TrainConfig.global_batch_size {whole} cannot be kept, because {type(maker).__name__} decides how "
                "large a batch is. Leave it out, and use gradient_accumulation_steps for larger steps."
            )
        asked = {"batch_size": own or batch_size, "accumulate": accumulate, "whole": whole}
        if elastic and (own or whole):
            derived = elastic_batch_sizes(communicator.size, kept, **asked, whole_batches=whole_batches)
        else:
            derived = derive_batch_sizes(communicator.size, **asked)
        return derived._replace(batch_size=batch_size) if isinstance(data, DataLoader) else derived

    return call_on_all_ranks(communicator, derive)


def elastic_batch_sizes(
    size: int,
    kept: ElasticBatchSize | None,
    *,
    batch_size: int | None,
    accumulate: int | None,
    whole: int | None,
    whole_batches: bool = False,
) -> BatchSizes:
    """Return the batching of an elastic job on `size` ranks: its global batch is the one `kept` since it began, or
    where this is its beginning what is asked for, whatever it divides by.

    No rank has more samples in a micro-step than `batch_size`, or than it had then. With `whole_batches` each has as
    many, and the global batch is as near as that allows. One of `batch_size` and `whole` is given.
    """
    parts = size * (accumulate or 1)
    if kept is None:
        kept = ElasticBatchSize(batch_size or -(-(whole or 1) // parts), whole or parts * (batch_size or 1))
    most = batch_size or kept.batch_size
    if whole_batches:
        return BatchSizes(most, max(1, round(kept.whole / (size * most))), kept.whole)
    return BatchSizes(most, -(-kept.whole // (size * most)), kept.whole)


def derive_batch_sizes(size: int, *, batch_size: int | None, accumulate: int | None, whole: int | None) -> BatchSizes:
    """Return the batching on `size` ranks; `whole` is the global batch size.

    Two of the three give the third; `whole` alone is split over the ranks, and `batch_size` alone is not accumulated.
    Raises ConfigError where they do not fit together.
    """
    if whole is None:
        return BatchSizes(batch_size, accumulate or 1)
    if batch_size is None:
        parts = size * (accumulate or 1)
        if whole % parts:
            _refuse(whole, parts, f"{size} ranks x gradient_accumulation_steps {accumulate or 1}")
        return BatchSizes(whole // parts, accumulate or 1)
    if whole % (size * batch_size):
        _refuse(whole, size * batch_size, f"{size} ranks x batch_size {batch_size}")
    needed = whole // (size * batch_size)
    if accumulate not in (None, needed):
        raise ConfigError(
            f"TrainConfig.global_batch_size {whole} is not {size} ranks x batch_size {batch_size} x "
            f"gradient_accumulation_steps "
            f"{accumulate}. Leave out gradient_accumulation_steps, which is then {needed}, or global_batch_size."
        )
    return BatchSizes(batch_size, needed)


def _refuse(whole: int, parts: int, product: str) -> NoReturn:
    below = whole // parts * parts
    choices = f"{below} or {below + parts}" if below else str(parts)
    raise ConfigError(
        f"TrainConfig.global_batch_size {whole} does not divide by {product} = {parts}. "
        f"Use global_batch_size={choices}."
    )
