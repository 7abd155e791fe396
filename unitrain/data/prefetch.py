"""Prefetching of one batch: copy it to the GPU during the current step, or load it while gradients are reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

import torch

from unitrain.data.batch import to_device

InfoT = TypeVar("InfoT")
ItemT = TypeVar("ItemT")
Item = tuple[Any, InfoT]


class Prefetcher:
    """Moves batches to `device`, with one batch prefetched if possible.

    On a GPU, the copy of the next batch overlaps with the computation of the current step. This requires GPU memory for
    one additional batch. Only copies from pinned memory are asynchronous. On the CPU, the next batch can be loaded
    while gradients are reduced. `measure_fetching` returns the context manager in which the next batch is loaded, and
    `measure_copying` the context manager in which each batch is copied to a device other than the CPU.
    """

    def __init__(
        self,
        device: torch.device,
        measure_fetching: Callable[[], AbstractContextManager[object]] = nullcontext,
        measure_copying: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._device, self._measure_fetching, self._measure_copying = device, measure_fetching, measure_copying
        # The reference is weak, so that the iterator's workers terminate immediately if the training loop raises an
        # error.
        self._iterator_reference: weakref.ref[PrefetchedIterator[Any]] | None = None
        # All epochs use the same stream, because the allocator reuses memory only on the stream that allocated it.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, items: Iterable[Item[InfoT]], *, ahead: bool, overlapped: bool = False) -> Iterator[Item[InfoT]]:
        """Return an iterator over the pairs (batch, info) in `items`, with the batch on the device.

        `ahead` allows prefetching on a GPU. `overlapped` lets `overlapped_work` load the next batch on the CPU.
        """
        if self._device.type == "cpu":
            if not overlapped:
                return iter(items)
            prefetched = PrefetchedIterator(iter(items))
            self._iterator_reference = weakref.ref(prefetched)
            return prefetched
        if self._stream is None or not ahead:
            return ((self._copy(batch), info) for batch, info in items)
        return prefetch_one(iter(items), self._begin_copy, self._await_copy)

    def overlapped_work(self) -> tuple[Callable[[], None], ...]:
        """Return the functions to call while gradients are reduced: one that loads the next batch, or none."""
        return () if self._iterator_reference is None else (self._fetch_next,)

    def _fetch_next(self) -> None:
        prefetched = None if self._iterator_reference is None else self._iterator_reference()
        if prefetched is not None:
            with self._measure_fetching():
                prefetched.fetch()

    def _begin_copy(self, item: Item[InfoT]) -> Item[InfoT]:
        """Start to copy a batch on the side stream, concurrently with the current stream."""
        assert self._stream is not None
        batch, info = item
        # The allocator may reuse the memory of an earlier batch that queued kernels still read, so the copy waits for
        # these kernels. The alternative, record_stream, does not reach tensors inside objects with a `to` method, and
        # delays the reuse of memory while the host is ahead of the GPU.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            return self._copy(batch), info

    def _copy(self, batch: Any) -> Any:
        with self._measure_copying():
            return to_device(batch, self._device)

    def _await_copy(self) -> None:
        """Make the current stream, not the host, wait for the copies."""
        assert self._stream is not None
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class PrefetchedIterator(Iterator[ItemT], Generic[ItemT]):
    """Iterator over `items` that can prefetch the next item. An error while prefetching is raised when the item is
    requested."""

    def __init__(self, items: Iterator[ItemT]) -> None:
        self._items = items
        self._fetched_items: list[ItemT] = []
        self._error: Exception | None = None

    def fetch(self) -> None:
        """Load the next item, unless it is already loaded."""
        if not self._fetched_items and self._error is None:
            try:
                self._fetched_items = _take_next(self._items)
            except Exception as error:
                self._error = error

    def __next__(self) -> ItemT:
        if self._fetched_items:
            return self._fetched_items.pop()  # keep no reference while the batch is in use
        if self._error is not None:
            raise self._error
        return next(self._items)


def prefetch_one(
    items: Iterator[Item[InfoT]], begin_copy: Callable[[Item[InfoT]], Item[InfoT]], wait_for_copies: Callable[[], None]
) -> Iterator[Item[InfoT]]:
    """Yield `begin_copy(item)` for each of `items`, with one item copied ahead.

    `wait_for_copies` is called when only the copy of the current item is in progress. The copy of the next item then
    starts, and the current item is yielded. Errors of `items` or `begin_copy` are raised after the preceding item has
    been yielded.
    """
    error_to_raise: Exception | None = None
    prefetched = [begin_copy(item) for item in _take_next(items)]
    while prefetched:
        wait_for_copies()
        current, prefetched = prefetched, []
        try:
            prefetched = [begin_copy(item) for item in _take_next(items)]
        except Exception as error:
            error_to_raise = error
        yield current.pop()  # keep no reference while the batch is in use
    if error_to_raise is not None:
        raise error_to_raise


def _take_next(items: Iterator[ItemT]) -> list[ItemT]:
    """Return the next of `items` in a list, which is empty at the end."""
    for item in items:
        return [item]
    return []
