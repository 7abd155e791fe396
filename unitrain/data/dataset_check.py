"""Whether every rank was given the same data, asked before any of it is trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import gather_if_different
from unitrain.errors import DataError


def check_alike(what: str, communicator: Communicator, length: int | None, settings: Mapping[str, Any]) -> None:
    """Raise DataError on every rank where `length` or one of `settings` is not the same on all, or length is 0.

    `what` is the subject of the sentence, and `length` None for data without one. All ranks call it.
    """
    own = (length, dict(settings))
    everywhere: list[tuple[int | None, dict[str, Any]]] = gather_if_different(communicator, own) or [own]
    lengths = [length for length, _ in everywhere]
    if None in lengths and any(length is not None for length in lengths):
        ranks = [rank for rank, length in enumerate(lengths) if length is None]
        raise DataError(
            f"{what} has a length on some ranks, but comes in turn on ranks {ranks}. Give every rank the same data."
        )
    if len(set(lengths)) > 1:
        raise DataError(
            f"{what} has not the same number of samples on every rank: {lengths}. "
            "Give every rank the whole dataset; it is shared out here."
        )
    for name, value in everywhere[0][1].items():
        values = [found[name] for _, found in everywhere]
        if any(other != value for other in values):
            raise DataError(
                f"{what} differs between ranks in {name}: {values}. Use {name}={value} on every rank, in the "
                "DataLoader if there is one."
            )
    if length == 0:
        raise DataError(f"{what} is empty. Give a dataset with at least one sample.")
