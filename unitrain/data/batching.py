"""Batch sizes in one language: global_batch_size = batch_size x ranks x accumulate."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from torch.utils.data import DataLoader

from unitrain.backends.base import Communicator, together
from unitrain.data.loading import Data
from unitrain.errors import ConfigError


class Batching(NamedTuple):
    """Samples per rank and micro-step (None where nothing says how many), and micro-steps per step.

    `whole` is the global batch size where it is not their product: the ranks then share it out as evenly as they can.
    """

    batch_size: int | None
    accumulate: int
    whole: int | None = None


def batching_of(
    data: Data,
    communicator: Communicator,
    *,
    batch_size: int | None,
    accumulate: int | None,
    whole: int | None,
    first_size: int | None = None,
    whole_batches: bool = False,
) -> Batching:
    """Return `derive_batching` for `data`, of which a DataLoader has a batch size of its own. All ranks call it.

    The batch size is the one to ask of the data: for a DataLoader what the user asked for beside. A job that is elastic
    and began with `first_size` ranks keeps its global batch, with `whole_batches` as nearly as these allow. Raises
    ConfigError, on all ranks, also for a `whole` where the data makes batches of its own sizes.
    """

    def derive() -> Batching:
        size = communicator.size
        own = data.batch_size if isinstance(data, DataLoader) else None
        if isinstance(data, DataLoader) and own is None and whole is not None:
            maker = data.dataset if data.batch_sampler is None else data.batch_sampler
            raise ConfigError(
                f"TrainConfig.global_batch_size {whole} cannot be kept, because {type(maker).__name__} decides how "
                "large a batch is. Leave it out, and use accumulate for larger steps."
            )
        asked = {"batch_size": own or batch_size, "accumulate": accumulate, "whole": whole}
        if first_size is None:
            derived = derive_batching(size, **asked)
        else:
            derived = keep_batching(size, first_size, **asked, whole_batches=whole_batches)
        return derived._replace(batch_size=batch_size) if isinstance(data, DataLoader) else derived

    return together(communicator, derive)


def keep_batching(
    size: int,
    first_size: int,
    *,
    batch_size: int | None,
    accumulate: int | None,
    whole: int | None,
    whole_batches: bool = False,
) -> Batching:
    """Return the batching on `size` ranks whose global batch is that on `first_size` ranks, whatever it divides by.

    No rank has more samples in a micro-step than it would have there. With `whole_batches` all have as many, and the
    global batch is as near as they allow; so it is counted in batches where nothing says how large these are.
    """
    if whole is None and batch_size is None:
        return Batching(None, max(1, round(first_size * (accumulate or 1) / size)))
    if batch_size is None:
        batch_size = -(-(whole or 0) // (first_size * (accumulate or 1)))
    whole = whole or first_size * batch_size * (accumulate or 1)
    if whole_batches:
        return Batching(batch_size, max(1, round(whole / (size * batch_size))), whole)
    return Batching(batch_size, -(-whole // (size * batch_size)), whole)


def derive_batching(size: int, *, batch_size: int | None, accumulate: int | None, whole: int | None) -> Batching:
    """Return the batching on `size` ranks; `whole` is the global batch size.

    Two of the three give the third; `whole` alone is split over the ranks, and `batch_size` alone is not accumulated.
    Raises ConfigError where they do not fit together.
    """
    if whole is None:
        return Batching(batch_size, accumulate or 1)
    if batch_size is None:
        parts = size * (accumulate or 1)
        if whole % parts:
            _refuse(whole, parts, f"{size} ranks x accumulate {accumulate or 1}")
        return Batching(whole // parts, accumulate or 1)
    if whole % (size * batch_size):
        _refuse(whole, size * batch_size, f"{size} ranks x batch_size {batch_size}")
    needed = whole // (size * batch_size)
    if accumulate not in (None, needed):
        raise ConfigError(
            f"TrainConfig.global_batch_size {whole} is not {size} ranks x batch_size {batch_size} x accumulate "
            f"{accumulate}. Leave out accumulate, which is then {needed}, or global_batch_size."
        )
    return Batching(batch_size, needed)


def _refuse(whole: int, parts: int, product: str) -> NoReturn:
    below = whole // parts * parts
    choices = f"{below} or {below + parts}" if below else str(parts)
    raise ConfigError(
        f"TrainConfig.global_batch_size {whole} does not divide by {product} = {parts}. "
        f"Use global_batch_size={choices}."
    )
