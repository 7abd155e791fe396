"""Batch sizes in one language: global_batch_size = batch_size x ranks x accumulate."""

from __future__ import annotations

from typing import NamedTuple, NoReturn

from unitrain.errors import ConfigError


class Batching(NamedTuple):
    """Samples per rank and micro-step (None where nothing says how many), and micro-steps per step."""

    batch_size: int | None
    accumulate: int


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
