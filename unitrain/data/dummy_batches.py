"""The same number of steps on all ranks, for data with different or unknown numbers of batches per rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

import torch

from unitrain.backends.base import Communicator
from unitrain.backends.synchronized_errors import raise_on_all_ranks
from unitrain.config import Uneven
from unitrain.data.batch import CountedBatch, copy_batch
from unitrain.data.order import MicroBatch
from unitrain.data.stream_state import StreamState
from unitrain.errors import DataError
from unitrain.randomness import IsolatedGenerators

# Maximum number of batches per rank that are loaded before an exchange of batch sizes, if the workers prefetch that
# many.
_MAX_BATCHES_AHEAD = 8
# Exchanged instead of the numbers of items and samples if a rank has no batch.
NO_BATCH = -1
# Exchanged to state whether a rank has a batch that can be used as a dummy batch, or has failed to load a batch.
_HAS_NO_DUMMY, _HAS_DUMMY, _HAS_FAILED = range(3)


def reduce_prefetch_count(prefetch_count: int, communicator: Communicator) -> int:
    """Return the minimum of `prefetch_count` over ranks, at most 8, for the argument `max_batches_ahead` of
    StepAligner. All ranks must call this function.

    StepAligner may load as many batches in advance as the workers prefetch. Without workers, it loads none in advance.
    """
    counts_by_rank: list[int] = communicator.allgather_object(prefetch_count)
    return min(_MAX_BATCHES_AHEAD, *counts_by_rank)


class StepAligner:
    """Gives all ranks the same number of steps, even if some ranks run out of batches earlier than others.

    With `uneven` "weight", a rank without a batch gets a dummy batch; with "pad", it repeats its batches; with "drop",
    the epoch ends before the first incomplete step. Batch sizes count samples, which may be fewer than the items passed
    to the `collate_fn`. The ranks load up to `max_batches_ahead` batches (but at least the batches of one step), and
    exchange the sizes of these batches in one collective. With `copies_batches`, loaded batches are copied, for
    datasets that reuse a batch's memory for the next batch. With `min_step_items`, the epoch ends before a step with
    fewer items over all ranks. All ranks must make the same calls.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        gradient_accumulation_steps: int,
        uneven: Uneven,
        max_batches_ahead: int,
        min_step_items: int | None,
        copies_batches: bool,
    ) -> None:
        self._communicator, self._uneven, self._min_step_items = communicator, uneven, min_step_items
        self._max_batches_ahead, self._may_copy_batches = max_batches_ahead, copies_batches
        self.set_accumulation(gradient_accumulation_steps)
        self.has_ended = False
        # A batch of this rank or of another rank, with at least one sample.
        self._dummy_batch: CountedBatch | None = None
        self._error: DataError | None = None
        # State of a stateful dataset after this rank's last batch.
        self._data_state: StreamState | None = None

    def set_accumulation(self, gradient_accumulation_steps: int, min_step_items: int | None = None) -> None:
        """Set the number of micro-batches per step. Call it between epochs. `min_step_items`, unless None, replaces the
        argument of the constructor."""
        self._gradient_accumulation_steps = gradient_accumulation_steps
        self._steps_per_window = max(1, self._max_batches_ahead // gradient_accumulation_steps)
        self._copies_batches = self._may_copy_batches and self._steps_per_window * gradient_accumulation_steps > 1
        if min_step_items is not None:
            self._min_step_items = min_step_items

    def micro_batches(
        self,
        batches: Callable[[], Generator[CountedBatch]],
        *,
        start: int,
        stride: int,
        num_skipped: int,
        batches_to_repeat: Callable[[], Generator[CountedBatch]] | None = None,
        data_state: StreamState | None = None,
    ) -> Generator[tuple[Any, MicroBatch]]:
        """Yield (batch, micro-batch) for each micro-batch of this rank until the epoch ends on all ranks.

        `batches` starts this rank's iteration; the batches of the first `num_skipped` micro-batches are skipped.
        `start` is the position after the skipped micro-batches, and `stride` the number of positions per micro-batch.
        `batches_to_repeat` starts the iteration over the batches to repeat (default: `batches`). `data_state` is the
        state from which `batches` resumes. If the interrupted run was already repeating batches, `batches` yields the
        rest of that repetition. Raises DataError on every rank if any rank cannot load its batches.
        """
        is_repeating = data_state is not None and data_state.repeats
        self._data_state = data_state
        # Without `closing`, the traceback of an error would keep the iterators and their workers alive until a garbage
        # collection.
        with (
            closing(_no_batches() if is_repeating else batches()) as batches_here,
            closing(
                _repeat_endlessly(batches_to_repeat or batches, batches if is_repeating else None)
            ) as repeated_batches,
        ):
            self._error = None
            self._skip_batches(batches_here, repeated_batches, num_skipped)
            window_length = self._steps_per_window * self._gradient_accumulation_steps
            positions_per_step = self._gradient_accumulation_steps * stride
            is_finished = False
            while not is_finished:
                window: list[CountedBatch | None] = [None] * window_length
                self._fetch(window, range(window_length), batches_here)
                items, samples = self._exchange_counts(window)
                steps, is_finished = plan_steps(
                    items, self._gradient_accumulation_steps, self._uneven, self._min_step_items
                )
                incomplete_indices = [
                    index for step in steps for index in step if any(counts[index] == NO_BATCH for counts in items)
                ]
                if self._uneven == "pad" and incomplete_indices:
                    missing_here = [index for index in incomplete_indices if window[index] is None]
                    self._fetch(window, missing_here, repeated_batches)
                    items, samples = self._exchange_counts(window)
                for step in steps:
                    end = start + positions_per_step
                    micro_batches = [MicroBatch(slice(start, end), 0, 0, end, False) for _ in step]
                    yield from self._micro_batches_of_step(window, step, micro_batches, samples)
                    start = end

    def align_planned_micro_batches(
        self, batches: Callable[[], Generator[CountedBatch]], micro_batches: Iterator[MicroBatch], *, has_started: bool
    ) -> Generator[tuple[Any, MicroBatch]]:
        """Yield (batch, micro-batch) for each of `micro_batches`, whose sizes are planned in items.

        The yielded micro-batches have the actual numbers of samples. Micro-batches in which no rank has a sample are
        skipped; `has_ended` becomes True at the end. `has_started` is True if the run resumes after the first step of
        the epoch. Raises DataError on every rank if any rank cannot load its batches, or if an epoch has no sample and
        `has_started` is False.
        """
        with closing(batches()) as batches_here:
            self._error, self.has_ended = None, False
            while planned := list(_take_steps(micro_batches, self._steps_per_window)):
                window: list[CountedBatch | None] = [None] * len(planned)
                self._fetch(window, range(len(planned)), batches_here)
                for index, (micro_batch, counted_batch) in enumerate(zip(planned, window, strict=True)):
                    if counted_batch is not None and not micro_batch.samples:
                        # A dummy batch, whose samples another rank trains on.
                        window[index] = counted_batch._replace(sample_count=0)
                _, samples = self._exchange_counts(window)
                ends = [0, *(index + 1 for index, micro_batch in enumerate(planned) if micro_batch.ends_step)]
                for begin, end in pairwise(ends):
                    for item in self._micro_batches_of_step(window, range(begin, end), planned[begin:end], samples):
                        has_started = True
                        yield item
        if not has_started:
            raise DataError(
                "The training data has no sample in an entire epoch: collate_fn returned only empty batches. "
                "It must keep at least one sample."
            )
        self.has_ended = True

    def _micro_batches_of_step(
        self,
        window: list[CountedBatch | None],
        indices: Sequence[int],
        micro_batches: Sequence[MicroBatch],
        sample_counts: list[list[int]],
    ) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield the micro-batches of one step. This rank's batches are `window[index]` for each index in `indices`;
        `sample_counts` is the second result of `_exchange_counts`."""
        nonempty = [index for index in indices if any(counts[index] > 0 for counts in sample_counts)]
        total = sum(max(0, counts[index]) for counts in sample_counts for index in nonempty)
        for index in indices:
            if (counted_batch := window[index]) is not None and counted_batch.state is not None:
                self._data_state = counted_batch.state
        for index, micro_batch in zip(indices, micro_batches, strict=True):
            if index not in nonempty:
                window[index] = None
                continue
            _, samples_here, batch, _ = window[index] or CountedBatch(0, 0, None)
            window[index] = None  # so that only the training loop holds a reference to the batch
            if not samples_here and self._dummy_batch is not None:
                batch = self._dummy_batch.batch
            ends_step = index == nonempty[-1]
            state = self._data_state if ends_step else None
            yield (
                batch,
                micro_batch._replace(samples=samples_here, step_samples=total, ends_step=ends_step, data_state=state),
            )

    def _skip_batches(
        self, batches_here: Iterator[CountedBatch], repeated_batches: Iterator[CountedBatch], num_skipped: int
    ) -> None:
        """Skip the batches that an interrupted run has already used, including repeated batches."""
        # The restored RNG states were saved after these batches, so loading the batches again must not advance the
        # global generators.
        with IsolatedGenerators(0):
            fetched = self._fetch([None] * num_skipped, range(num_skipped), batches_here, keep=False)
            if self._uneven == "pad":
                self._fetch([None] * num_skipped, range(num_skipped - fetched), repeated_batches, keep=False)

    def _fetch(
        self,
        window: list[CountedBatch | None],
        indices: Iterable[int],
        batches: Iterator[CountedBatch],
        *,
        keep: bool = True,
    ) -> int:
        """Load the next batches into `indices` of `window`, and return the number of loaded batches. An error is
        stored, and raised by `_exchange_counts` on all ranks."""
        fetched = 0
        try:
            for index, counted_batch in zip(indices, batches, strict=False):
                if keep:
                    if self._copies_batches:
                        counted_batch = counted_batch._replace(batch=copy_batch(counted_batch.batch))
                    window[index] = counted_batch
                fetched += 1
                if counted_batch.sample_count:
                    self._dummy_batch = counted_batch._replace(state=None)
        except DataError as error:
            self._error = error
        except Exception as error:
            self._error = DataError(
                f"The training data failed on rank {self._communicator.rank}: {type(error).__name__}: {error}. "
                "Fix the dataset, or its collate_fn."
            )
            self._error.__cause__ = error
        return fetched

    def _exchange_counts(self, window: list[CountedBatch | None]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the numbers of items, and the numbers of samples, of each batch of each rank, both as [ranks][indices
        of the window]. NO_BATCH stands for a missing batch.

        Raises DataError on every rank if `_fetch` has stored an error on any rank. All ranks must call this method.
        """
        state = _HAS_FAILED if self._error is not None else _HAS_NO_DUMMY if self._dummy_batch is None else _HAS_DUMMY
        items = [NO_BATCH if counted_batch is None else counted_batch.item_count for counted_batch in window]
        samples = [NO_BATCH if counted_batch is None else counted_batch.sample_count for counted_batch in window]
        counts = [state, *items, *samples]
        # On the CPU, because reading a result from a GPU would wait for all work queued there.
        gathered = self._communicator.allgather(torch.tensor(counts, device="cpu"))
        counts_of_ranks: list[list[int]] = gathered.view(self._communicator.size, len(counts)).tolist()
        states = [counts.pop(0) for counts in counts_of_ranks]
        if _HAS_FAILED in states:
            error, self._error = self._error, None
            raise_on_all_ranks(self._communicator, error)
        if _HAS_NO_DUMMY in states and _HAS_DUMMY in states:
            # At most once per run: ranks that have not loaded a batch with samples yet receive one from another rank.
            received = self._communicator.broadcast_object(self._dummy_batch, root=states.index(_HAS_DUMMY))
            self._dummy_batch = self._dummy_batch or received
        return [counts[: len(window)] for counts in counts_of_ranks], [
            counts[len(window) :] for counts in counts_of_ranks
        ]


def _take_steps(micro_batches: Iterator[MicroBatch], num_steps: int) -> Iterator[MicroBatch]:
    """Yield the micro-batches of the next `num_steps` steps, or of the remaining steps if there are fewer."""
    for micro_batch in micro_batches:
        yield micro_batch
        num_steps -= micro_batch.ends_step
        if not num_steps:
            return


def plan_steps(
    counts_of_ranks: list[list[int]], gradient_accumulation_steps: int, uneven: Uneven, min_step_items: int | None
) -> tuple[list[list[int]], bool]:
    """Return the indices of the window that each step uses, and whether the epoch ends with these steps.

    `counts_of_ranks[rank]` lists the numbers of items in the next batches of that rank, NO_BATCH for a missing batch.
    An index is used if any rank has items at it, so a step may use fewer than `gradient_accumulation_steps` indices, or
    none.
    """
    steps: list[list[int]] = []
    for begin in range(0, len(counts_of_ranks[0]), gradient_accumulation_steps):
        indices = range(begin, begin + gradient_accumulation_steps)
        total = sum(max(0, counts[index]) for counts in counts_of_ranks for index in indices)
        if uneven == "drop" and any(counts[index] == NO_BATCH for counts in counts_of_ranks for index in indices):
            return steps, True
        if min_step_items is not None and total < min_step_items:
            return steps, True
        steps.append([index for index in indices if any(counts[index] > 0 for counts in counts_of_ranks)])
        if all(counts[indices[-1]] == NO_BATCH for counts in counts_of_ranks):
            return steps, True
    return steps, False


def _no_batches() -> Generator[CountedBatch]:
    yield from ()


def _repeat_endlessly(
    batches: Callable[[], Generator[CountedBatch]], first: Callable[[], Generator[CountedBatch]] | None = None
) -> Generator[CountedBatch]:
    """Yield the batches of `first`, then the batches of `batches`, which is restarted at its end until it yields no
    batch."""
    if first is not None:
        yield from first()
    has_batches = True
    while has_batches:
        has_batches = False
        for counted_batch in batches():
            has_batches = True
            yield counted_batch
