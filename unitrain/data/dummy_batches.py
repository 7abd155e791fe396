"""Ranks whose numbers of batches are unequal, or unknown, kept in the same steps."""

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
from unitrain.errors import DataError
from unitrain.randomness import IsolatedGenerators

# How many batches a rank holds at most while the ranks agree on their sizes, if its workers have prepared so many.
_AHEAD = 8
# What a rank says of a batch that it does not have, instead of its items.
NO_BATCH = -1
# What it says of the batch that it could stand in with.
_NO_SPARE, _SPARE, _FAILED = range(3)


def common_prefetch_count(prepared: int, communicator: Communicator) -> int:
    """Return `ahead` for StepAligner where the workers of each rank prepare so many batches. All ranks call it.

    Batches that workers have prepared anyway are held no longer for that; without workers none is made early.
    """
    everywhere: list[int] = communicator.allgather_object(prepared)
    return min(_AHEAD, *everywhere)


class StepAligner:
    """Lets all ranks take the same steps over the batches that each of them has. All ranks use it alike.

    A batch weighs as much as the samples that it holds, which may be fewer than the items that it was made of.
    The ranks tell each other the sizes of their next batches, for at most `ahead` micro-steps at a time, but for one
    step at least, and hold these batches meanwhile: copies of them, with `copies`, where the next batch may overwrite
    the memory of the one before. With `full`, a step of fewer items ends the epoch.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        accumulate: int,
        uneven: Uneven,
        ahead: int,
        full: int | None,
        copies: bool,
    ) -> None:
        self._communicator, self._accumulate, self._uneven, self._full = communicator, accumulate, uneven, full
        self._steps = max(1, ahead // accumulate)
        self._copies = copies and self._steps * accumulate > 1
        self.ended = False
        # A batch that was trained on, here or on another rank: it stands in for those that this rank does not have.
        self._spare: CountedBatch | None = None
        self._error: DataError | None = None

    def micro_batches(
        self, batches: Callable[[], Generator[CountedBatch]], *, start: int, stride: int, passed: int
    ) -> Generator[tuple[Any, MicroBatch]]:
        """Yield (batch, its slice) for each of this rank's micro-steps, until the epoch ends for all ranks.

        `batches` begins this rank's batches, of which as many as `passed` micro-steps took are passed over. `start` is
        the position after these, and `stride` how far a micro-step goes. Raises DataError on every rank when the
        batches of any cannot be had.
        """
        # An error of another rank leaves its traceback, and with it what is iterated over, to the garbage collector.
        with closing(batches()) as own, closing(_endless(batches)) as again:
            self._error = None
            self._pass_over(own, again, passed)
            window, per_step = self._steps * self._accumulate, self._accumulate * stride
            over = False
            while not over:
                held: list[CountedBatch | None] = [None] * window
                self._fill(held, range(window), own)
                items, samples = self._agree(held)
                steps, over = plan_steps(items, self._accumulate, self._uneven, self._full)
                lacking = [at for step in steps for at in step if any(counts[at] == NO_BATCH for counts in items)]
                if self._uneven == "pad" and lacking:
                    self._fill(held, [at for at in lacking if held[at] is None], again)
                    items, samples = self._agree(held)
                for step in steps:
                    end = start + per_step
                    slices = [MicroBatch(slice(start, end), 0, 0, end, False) for _ in step]
                    yield from self._step(held, step, slices, samples)
                    start = end

    def planned(
        self, batches: Callable[[], Generator[CountedBatch]], slices: Iterator[MicroBatch], *, begun: bool
    ) -> Generator[tuple[Any, MicroBatch]]:
        """Yield (batch, its slice) for each of this rank's micro-steps, which were planned by the number of items.

        A slice has the samples that the batches hold. Micro-steps in which no rank has a sample are left out, and
        `ended` is true when none is left. Raises DataError on every rank when the batches of any cannot be had, or when
        none of an epoch, unless it was `begun` before, holds a sample.
        """
        with closing(batches()) as own:
            self._error, self.ended = None, False
            while places := list(_whole_steps(slices, self._steps)):
                held: list[CountedBatch | None] = [None] * len(places)
                self._fill(held, range(len(places)), own)
                for at, (part, taken) in enumerate(zip(places, held, strict=True)):
                    if taken is not None and not part.samples:  # another rank trains on the sample of this one
                        held[at] = taken._replace(samples=0)
                _, samples = self._agree(held)
                ends = [0, *(at + 1 for at, part in enumerate(places) if part.ends_step)]
                for first, after in pairwise(ends):
                    for taken_step in self._step(held, range(first, after), places[first:after], samples):
                        begun = True
                        yield taken_step
        if not begun:
            raise DataError(
                "The training data has no sample in a whole epoch: collate_fn returned nothing but empty batches. "
                "Let it keep at least one sample."
            )
        self.ended = True

    def _step(
        self,
        held: list[CountedBatch | None],
        step: Sequence[int],
        slices: Sequence[MicroBatch],
        samples: list[list[int]],
    ) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield the micro-steps of one step, for which this rank has `held[at]` for each place `at` of `step`."""
        live = [at for at in step if any(counts[at] > 0 for counts in samples)]
        total = sum(max(0, counts[at]) for counts in samples for at in live)
        for at, part in zip(step, slices, strict=True):
            if at not in live:
                held[at] = None
                continue
            _, own, batch = held[at] or CountedBatch(0, 0, None)
            held[at] = None  # from now on only the loop holds it
            if not own and self._spare is not None:
                batch = self._spare.batch
            yield batch, part._replace(samples=own, step_samples=total, ends_step=at == live[-1])

    def _pass_over(self, own: Iterator[CountedBatch], again: Iterator[CountedBatch], passed: int) -> None:
        """Pass over what an interrupted run has trained on, and what it has repeated."""
        # What is drawn in this process meanwhile was drawn before the interruption, and is not drawn once more.
        with IsolatedGenerators(0):
            done = self._fill([None] * passed, range(passed), own, keep=False)
            if self._uneven == "pad":
                self._fill([None] * passed, range(passed - done), again, keep=False)

    def _fill(
        self,
        held: list[CountedBatch | None],
        places: Iterable[int],
        batches: Iterator[CountedBatch],
        *,
        keep: bool = True,
    ) -> int:
        """Put the next batches into `places` and return how many there were; what goes wrong is told by `_agree`."""
        done = 0
        try:
            for at, taken in zip(places, batches, strict=False):
                if keep:
                    held[at] = taken = taken._replace(batch=copy_batch(taken.batch)) if self._copies else taken
                done += 1
                if taken.samples:
                    self._spare = taken
        except DataError as error:
            self._error = error
        except Exception as error:  # whatever it is, the other ranks would wait for this one
            self._error = DataError(
                f"The training data failed on rank {self._communicator.rank}: {type(error).__name__}: {error}. "
                "Mend the dataset, or what makes batches of it."
            )
            self._error.__cause__ = error
        return done

    def _agree(self, held: list[CountedBatch | None]) -> tuple[list[list[int]], list[list[int]]]:
        """Return the items of the batches of every rank, and their samples; OUT where it has none."""
        state = _FAILED if self._error is not None else _NO_SPARE if self._spare is None else _SPARE
        items = [NO_BATCH if taken is None else taken.items for taken in held]
        samples = [NO_BATCH if taken is None else taken.samples for taken in held]
        here = [state, *items, *samples]
        # On the CPU, where every backend gathers too: on a GPU the host would wait for all that is queued there.
        gathered = self._communicator.allgather(torch.tensor(here))
        table: list[list[int]] = gathered.view(self._communicator.size, len(here)).tolist()
        states = [counts.pop(0) for counts in table]
        if _FAILED in states:
            error, self._error = self._error, None
            raise_on_all_ranks(self._communicator, error)
        if _NO_SPARE in states and _SPARE in states:
            # Seldom, and once in a run: for a rank that has had no batch of its own to stand in with.
            lent = self._communicator.broadcast_object(self._spare, root=states.index(_SPARE))
            self._spare = self._spare or lent
        return [counts[: len(held)] for counts in table], [counts[len(held) :] for counts in table]


def _whole_steps(slices: Iterator[MicroBatch], steps: int) -> Iterator[MicroBatch]:
    """Yield the slices of the next `steps` steps, fewer at the end."""
    for part in slices:
        yield part
        steps -= part.ends_step
        if not steps:
            return


def plan_steps(
    table: list[list[int]], accumulate: int, uneven: Uneven, full: int | None
) -> tuple[list[list[int]], bool]:
    """Return the places in `table` that each step takes, and whether the epoch ends with these steps.

    `table` has the items of the next batches of each rank, OUT where it has none. A place is taken where any rank has
    items, so a step may have fewer places than micro-steps, even none.
    """
    steps: list[list[int]] = []
    for first in range(0, len(table[0]), accumulate):
        places = range(first, first + accumulate)
        total = sum(max(0, counts[at]) for counts in table for at in places)
        if uneven == "drop" and any(counts[at] == NO_BATCH for counts in table for at in places):
            return steps, True
        if full is not None and total < full:
            return steps, True
        steps.append([at for at in places if any(counts[at] > 0 for counts in table)])
        if all(counts[places[-1]] == NO_BATCH for counts in table):
            return steps, True
    return steps, False


def _endless(batches: Callable[[], Generator[CountedBatch]]) -> Generator[CountedBatch]:
    """Yield what `batches` begins, over and over, as long as that is anything."""
    found = True
    while found:
        found = False
        for taken in batches():
            found = True
            yield taken
