"""Batches one ahead: copied to a GPU while the current one is computed with, or fetched while gradients travel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from unitrain.data.batch import to_device

PartT = TypeVar("PartT")
ItemT = TypeVar("ItemT")
Item = tuple[Any, PartT]


class Prefetcher:
    """Brings batches to `device`: on a GPU one ahead, elsewhere as they are asked for, or while gradients travel.

    One ahead means one batch more in memory. Copies are asynchronous from pinned memory only. What is fetched while
    gradients travel is fetched inside of `fetching`.
    """

    def __init__(
        self, device: torch.device, fetching: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._device, self._fetching = device, fetching
        # Weakly: whoever iterates holds it, and where that ends with an error, workers are to end at once.
        self._latest: weakref.ref[PrefetchedIterator[Any]] | None = None
        # One for all epochs: memory that was allocated on a stream is reused on that stream only.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, items: Iterable[Item[PartT]], *, ahead: bool, overlapped: bool = False) -> Iterator[Item[PartT]]:
        """Yield each of `items`, pairs of a batch and what belongs to it, with its batch on the device.

        Without `ahead` none is fetched before it is asked for; but with `overlapped`, on the CPU, `overlapped_work`
        fetches the next one.
        """
        if self._device.type == "cpu":
            if not overlapped:
                return iter(items)
            coming = PrefetchedIterator(iter(items))
            self._latest = weakref.ref(coming)
            return coming
        if self._stream is None or not ahead:
            return ((to_device(batch, self._device), part) for batch, part in items)
        return prefetch_one(iter(items), self._begin_copy, self._await_copy)

    def overlapped_work(self) -> tuple[Callable[[], None], ...]:
        """Return what fetches the next batch, to be called when all gradients are on their way; nothing where that is
        not asked for."""
        return () if self._latest is None else (self._fetch,)

    def _fetch(self) -> None:
        coming = None if self._latest is None else self._latest()
        if coming is not None:
            with self._fetching():
                coming.fetch()

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


class PrefetchedIterator(Iterator[ItemT], Generic[ItemT]):
    """`items`, of which the next one can be fetched before it is asked for. What that raises is raised in its turn."""

    def __init__(self, items: Iterator[ItemT]) -> None:
        self._items = items
        self._fetched: list[ItemT] = []
        self._problem: Exception | None = None

    def fetch(self) -> None:
        """Fetch the next one, unless it is there already."""
        if not self._fetched and self._problem is None:
            try:
                self._fetched = _first(self._items)
            except Exception as error:
                self._problem = error

    def __next__(self) -> ItemT:
        if self._fetched:
            return self._fetched.pop()  # no reference stays here while it is in use
        if self._problem is not None:
            raise self._problem
        return next(self._items)


def prefetch_one(
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


def _first(items: Iterator[ItemT]) -> list[ItemT]:
    """Return the next of `items` in a list, which is empty at the end."""
    for item in items:
        return [item]
    return []
