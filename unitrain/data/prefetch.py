"""Batches on the device one ahead: the next one is copied to a GPU while the current one is computed with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from unitrain.data.batch import to_device

PartT = TypeVar("PartT")
Item = tuple[Any, PartT]


class Prefetch:
    """Brings batches to `device`: on a GPU one ahead, elsewhere as they are asked for, and on the CPU at no cost.

    One ahead means one batch more in the GPU's memory. Copies are asynchronous from pinned memory only.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One for all epochs: memory that was allocated on a stream is reused on that stream only.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, items: Iterable[Item[PartT]], *, ahead: bool) -> Iterator[Item[PartT]]:
        """Yield each of `items`, pairs of a batch and what belongs to it, with its batch on the device.

        Without `ahead` none is fetched before it is asked for.
        """
        if self._device.type == "cpu":
            return iter(items)
        if self._stream is None or not ahead:
            return ((to_device(batch, self._device), part) for batch, part in items)
        return one_ahead(iter(items), self._begin_copy, self._await_copy)

    def _begin_copy(self, item: Item[PartT]) -> Item[PartT]:
        """Copy on the side stream, beside what the current stream goes on to compute."""
        assert self._stream is not None
        batch, part = item
        # The copy may get the memory of an earlier batch that is no longer referenced here but still read there: what
        # is computed so far must be done by then. So no tensor needs record_stream, which could not be called for those
        # in objects that move themselves, and would keep memory back for as long as the host is ahead of the GPU.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return to_device(batch, self._device), part

    def _await_copy(self) -> None:
        """Let the current stream, not the host, wait for the copies begun so far."""
        assert self._stream is not None
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def one_ahead(
    items: Iterator[Item[PartT]], begin: Callable[[Item[PartT]], Item[PartT]], arrive: Callable[[], None]
) -> Iterator[Item[PartT]]:
    """Yield what `begin` makes of each of `items`, begun when the one before it is about to be yielded.

    `arrive` is called between the two: all that was begun is then to be ready. An error of `items` or `begin` is raised
    in its turn, when what came before it has been yielded.
    """
    problem: Exception | None = None
    coming = [begin(item) for item in _first(items)]
    while coming:
        arrive()
        current, coming = coming, []
        try:
            coming = [begin(item) for item in _first(items)]
        except Exception as error:
            problem = error
        yield current.pop()  # no reference stays here while it is in use
    if problem is not None:
        raise problem


def _first(items: Iterator[Any]) -> list[Any]:
    """Return the next of `items` in a list, which is empty at the end."""
    for item in items:
        return [item]
    return []
