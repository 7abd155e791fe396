"""Batch sizes in one language: global_batch_size = batch_size x ranks x accumulate."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from torch.utils.data import DataLoader

from unitrain.backends.base import Communicator, together
from unitrain.data.loading import Data
from unitrain.errors import ConfigError


class Batching(NamedTuple):
    """Samples per rank and micro-step (None where nothing says how many), and micro-steps per step."""

    batch_size: int | None
    accumulate: int


def batching_of(
    data: Data, communicator: Communicator, *, batch_size: int | None, accumulate: int | None, whole: int | None
) -> Batching:
    """Return `derive_batching` for `data`, of which a DataLoader has a batch size of its own. All ranks call it.

    The batch size is the one to ask of the data: for a DataLoader what the user asked for beside. Raises ConfigError,
    on all ranks, also for a `whole` where the data makes batches of its own sizes.
    """

    def derive() -> Batching:
        if not isinstance(data, DataLoader):
            return derive_batching(communicator.size, batch_size=batch_size, accumulate=accumulate, whole=whole)
        if data.batch_size is None and whole is not None:
            maker = data.dataset if data.batch_sampler is None else data.batch_sampler
            raise ConfigError(
                f"TrainConfig.global_batch_size {whole} cannot be kept, because {type(maker).__name__} decides how "
                "large a batch is. Leave it out, and use accumulate for larger steps."
            )
        derived = derive_batching(
            communicator.size, batch_size=data.batch_size or batch_size, accumulate=accumulate, whole=whole
        )
        return Batching(batch_size, derived.accumulate)

    return together(communicator, derive)


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
