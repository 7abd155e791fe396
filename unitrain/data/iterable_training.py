"""Training data that comes in turn, as steps that all ranks take together."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from unitrain.backends.base import Communicator
from unitrain.config import StreamKind, Uneven
from unitrain.data.batch_size import ElasticBatchSize, resolve_batch_sizes
from unitrain.data.dummy_batches import StepAligner, common_prefetch_count
from unitrain.data.iterable import StreamSource, open_stream
from unitrain.data.loading import Data, call_of, check_same_data
from unitrain.data.order import MicroBatch
from unitrain.data.training_data import TrainingData
from unitrain.errors import DataError
from unitrain.randomness import capture_generators, restore_generators

_log = logging.getLogger(__name__)


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
        drop_last: bool = False,
        elastic: bool = False,
        kept: ElasticBatchSize | None = None,
        owner: str = "TrainConfig",
    ) -> None:
        self._owner = owner
        batching = resolve_batch_sizes(
            data,
            communicator,
            batch_size=batch_size,
            accumulate=accumulate,
            whole=global_batch_size,
            elastic=elastic,
            kept=kept,
            whole_batches=True,
        )
        self._source = source = open_stream(
            data,
            communicator,
            batch_size=batching.batch_size,
            num_workers=num_workers,
            kind=stream,
            seed=seed,
            setting="batch_size",
            owner=owner,
            what="The training data",
            drop_last=drop_last,
        )
        check_same_data("The training data", communicator, None, {"uneven": uneven, "accumulate": batching.accumulate})
        sizes: list[int | None] = communicator.allgather_object(source.batch_size)
        self.batch_size = source.batch_size
        self.global_batch_size = None
        if all(sizes):
            self.global_batch_size = sum(size or 0 for size in sizes) * batching.accumulate
        if batching.whole not in (None, self.global_batch_size) and communicator.rank == 0:
            _log.warning(
                "The steps of this job are to be of %d samples, but on %d ranks they are of %d: whole batches of a "
                "stream come no nearer. Use numbers of ranks that divide it.",
                *(batching.whole, communicator.size, self.global_batch_size),
            )
        self._communicator = communicator
        full = self.global_batch_size if source.drop_last and source.kind == "shared" else None
        self._aligner = StepAligner(
            communicator,
            accumulate=batching.accumulate,
            uneven=uneven,
            ahead=common_prefetch_count(source.prepared, communicator),
            full=full,
            copies=source.may_reuse_memory,
        )
        self._steps = _Steps(source, self._aligner, communicator, 0, 0, owner)

    @property
    def order_settings(self) -> dict[str, Any]:
        """What decides, beside the seed, which sample is at a position of an epoch."""
        if self._source.kind == "shared":
            return {"stream": "shared", "of batches": self._source.batch_size is None}
        return {"stream": "own", "ranks": self._communicator.size, "workers": self._source.workers}

    @property
    def can_prefetch(self) -> bool:
        """Whether a batch may be fetched before it is asked for: nothing else would change."""
        return self._source.can_prefetch

    @property
    def can_overlap_prefetch(self) -> bool:
        """Return False: the ranks agree on what comes in turn."""
        return False

    def steps_in_epoch(self, start: int = 0) -> int | None:
        """Return None: an IterableDataset's `__len__` need not be true, least of all of one rank."""
        return None

    def samples_in_epoch(self) -> int | None:
        """Return None, for the same reason."""
        return None

    def count_batches(self) -> int | None:
        """Return None, for the same reason."""
        return None

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield (batch, its slice) for each of this rank's micro-steps in one epoch, from position `start` on."""
        self._steps = _Steps(self._source, self._aligner, self._communicator, epoch, start, self._owner)
        return self._steps

    def is_epoch_finished(self, position: int) -> bool:
        """Whether no step follows after `position`; it ends the epoch's iteration, and the workers of that.

        To find out, the next step is fetched. If there is one, a resumed run fetches it again, so the random numbers
        that were drawn for it in this process are given back.
        """
        over = False
        if self._steps.position <= position:
            device = self._communicator.device
            generators = capture_generators(device)
            over = next(self._steps, None) is None
            if not over:
                restore_generators(generators, device)
        self.end_epoch()
        return over

    def end_epoch(self) -> None:
        self._steps.close()


class _Steps(Iterator[tuple[Any, MicroBatch]]):
    """The micro-steps of one epoch; `position` is where those that were taken end.

    It does not hold itself: where it is left by an error, its workers end with the last reference to it, and not when
    the garbage collector comes by, in the middle of something else.
    """

    def __init__(
        self, source: StreamSource, aligner: StepAligner, communicator: Communicator, epoch: int, start: int, owner: str
    ) -> None:
        self._source, self._communicator, self._epoch, self._owner = source, communicator, epoch, owner
        shared = source.kind == "shared"
        self._begun, self._looks, self.position = start > 0, shared and epoch == 0, start
        self._steps = aligner.micro_batches(
            lambda: source.batches(epoch, start if shared else 0),
            start=start,
            stride=source.stride,
            passed=0 if shared else start,
        )

    def __next__(self) -> tuple[Any, MicroBatch]:
        taken = next(self._steps, None)
        if taken is None and not self._begun:
            raise DataError(
                f"{self._source.name} ended before the first step of epoch {self._epoch + 1}: it yielded nothing, or "
                "too little for a step that is to be whole. Let its __iter__ begin anew each time it is called, and "
                "give it more items, or use a smaller batch_size."
            )
        if taken is None:
            raise StopIteration
        if self._looks:
            self._looks = False
            self._look_at_first_items()
        self._begun, self.position = True, taken[1].step_end
        return taken

    def close(self) -> None:
        """Let go of what is held, and end the workers."""
        self._steps.close()

    def _look_at_first_items(self) -> None:
        """Warn of a stream that is not the same everywhere, when every rank that has a batch has its first."""
        first_items = set(self._communicator.allgather_object(self._source.first_item)) - {None}
        if len(first_items) > 1 and self._communicator.rank == 0:
            _log.warning(
                "%s does not begin alike on every rank, but %s.stream 'shared' deals out one stream: unless "
                "only an augmentation differs, samples are lost or taken twice. "
                "Use %s for a dataset that shards itself.",
                *(self._source.name, self._owner, call_of(self._owner, "stream='own'")),
            )
