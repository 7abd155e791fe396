"""Training data that comes in turn, as steps that all ranks take together."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from typing import Any

from unitrain.backends.base import Communicator
from unitrain.config import StreamKind, Uneven
from unitrain.data.alike import check_alike
from unitrain.data.batching import batching_of
from unitrain.data.loading import Data
from unitrain.data.lockstep import Lockstep
from unitrain.data.order import Slice
from unitrain.data.stream import open_stream
from unitrain.data.training_data import TrainingData
from unitrain.errors import DataError

_log = logging.getLogger(__name__)

# How many batches a rank holds at most while the ranks agree on their sizes, if its workers have prepared so many.
_AHEAD = 8


class TrainingStream(TrainingData):
    """This rank's part of an iterable dataset, or of one that makes whole batches. All ranks make it together.

    `stream` and `uneven` are as in TrainConfig. How long an epoch is shows when it is over; a `__len__` is not asked.
    A position counts the items of a shared stream, so that a run can go on with another number of ranks, workers or
    samples per batch; of streams that are the ranks' own, micro-steps. What comes before it is passed over by count, so
    a run that goes on in the middle of an epoch waits for that, and repeats exactly what repeats with its seed.

    Raises, on all ranks, DataError where the data cannot be shared out, ends before its first step, or fails;
    ConfigError for a missing or contradicting batch size.
    """

    def __init__(
        self,
        data: Data,
        communicator: Communicator,
        *,
        batch_size: int | None = None,
        accumulate: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        stream: StreamKind = "shared",
        uneven: Uneven = "weight",
    ) -> None:
        batching = batching_of(
            data, communicator, batch_size=batch_size, accumulate=accumulate, whole=global_batch_size
        )
        self._source = source = open_stream(
            data,
            communicator,
            batch_size=batching.batch_size,
            num_workers=num_workers,
            kind=stream,
            seed=seed,
            setting="batch_size",
            what="The training data",
        )
        check_alike("The training data", communicator, None, {"uneven": uneven, "accumulate": batching.accumulate})
        sizes: list[int | None] = communicator.allgather_object(source.batch_size)
        self.batch_size = source.batch_size
        self.global_batch_size = None
        if all(sizes):
            self.global_batch_size = sum(size or 0 for size in sizes) * batching.accumulate
        self._communicator = communicator
        # Batches that workers have prepared anyway are held no longer for that; without workers none is made early.
        ahead = min(_AHEAD, *communicator.allgather_object(source.prepared))
        full = self.global_batch_size if source.drop_last and source.kind == "shared" else None
        self._lockstep = Lockstep(communicator, accumulate=batching.accumulate, uneven=uneven, ahead=ahead, full=full)
        self._steps = self._epoch(0, 0)
        self._reached = 0
        self._unseen = source.kind == "shared"

    @property
    def order(self) -> dict[str, Any]:
        """What decides, beside the seed, which sample is at a position of an epoch."""
        if self._source.kind == "shared":
            return {"stream": "shared", "of batches": self._source.batch_size is None}
        return {"stream": "own", "ranks": self._communicator.size, "workers": self._source.workers}

    @property
    def fetches_apart(self) -> bool:
        """Whether a batch may be fetched before it is asked for: nothing else would change."""
        return self._source.fetches_apart

    def steps_in_epoch(self, start: int = 0) -> int | None:
        """Return None: an IterableDataset's `__len__` need not be true, least of all of one rank."""
        return None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, Slice]]:
        """Yield (batch, its slice) for each of this rank's micro-steps in one epoch, from position `start` on."""
        self._steps, self._reached = self._epoch(epoch, start), start
        return self._steps

    def is_over(self, position: int) -> bool:
        """Whether no step follows after `position`; what has been fetched of one that does is lost: this ends the epoch's
        iteration, and its workers.
        """
        over = self._reached <= position and next(self._steps, None) is None
        self._steps.close()
        return over

    def _epoch(self, epoch: int, start: int) -> Generator[tuple[Any, Slice]]:
        source, shared = self._source, self._source.kind == "shared"
        found = start > 0
        for batch, part in self._lockstep.epoch(
            lambda: source.batches(epoch, start if shared else 0),
            start=start,
            stride=source.stride,
            passed=0 if shared else start,
        ):
            if self._unseen:
                self._unseen = False
                self._look_at_first_items()
            found, self._reached = True, part.step_end
            yield batch, part
        if not found:
            raise DataError(
                f"{source.name} ended before the first step of epoch {epoch + 1}: it yielded nothing, or too little "
                "for a step that is to be whole. Let its __iter__ begin anew each time it is called, and give it more "
                "items, or use a smaller batch_size."
            )

    def _look_at_first_items(self) -> None:
        """Warn of a stream that is not the same everywhere; once, when every rank that has a batch has its first."""
        first_items = {
            item for item in self._communicator.allgather_object(self._source.first_item) if item is not None
        }
        if len(first_items) > 1 and self._communicator.rank == 0:
            _log.warning(
                "%s does not begin alike on every rank, but TrainConfig.stream 'shared' deals out one stream: unless "
                "only an augmentation differs, samples are lost or taken twice. "
                "Use TrainConfig(stream='own') for a dataset that shards itself.",
                self._source.name,
            )
