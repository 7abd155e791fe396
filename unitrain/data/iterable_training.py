"""Training on iterable datasets, with steps synchronized across ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from unitrain.backends.base import Communicator
from unitrain.data.batch_size import BatchSizes, accumulation_setting
from unitrain.data.dummy_batches import StepAligner, reduce_prefetch_count
from unitrain.data.iterable import StreamSource, open_stream
from unitrain.data.loading import Data, check_same_data, format_call
from unitrain.data.order import MicroBatch
from unitrain.data.stream_state import StreamState
from unitrain.data.training_data import DEFAULT_SHARD_SETTINGS, ShardSettings, TrainingData
from unitrain.errors import DataError
from unitrain.output import get_logger
from unitrain.randomness import capture_generators, restore_generators

_log = get_logger(__name__)


class TrainingStream(TrainingData):
    """This rank's shard of an iterable dataset, or of a dataset that yields batches. All ranks create it.

    The length of an epoch is unknown until the epoch ends; `__len__` of the dataset is not used. With stream="shared",
    a position counts items, so a run can resume with a different number of ranks or workers or a different batch size.
    Otherwise, it counts micro-batches. A run that resumes within an epoch reads and discards the items before the
    position. If the stream depends only on the seed, the run then continues with the same items as an uninterrupted
    run. A stateful dataset resumes from its state instead, without reading these items.

    Raises on all ranks: DataError if the data cannot be sharded, raises an error or ends before its first step;
    ConfigError for a missing or contradictory batch size.
    """

    def __init__(
        self, data: Data, communicator: Communicator, settings: ShardSettings = DEFAULT_SHARD_SETTINGS
    ) -> None:
        self._class_name, uneven = settings.class_name, settings.uneven
        self._batch_sizes = settings.resolve_batch_sizes(data, communicator, full_batches_only=True)
        self._source = source = open_stream(
            data,
            communicator,
            batch_size=self._batch_sizes[0].batch_size,
            num_workers=settings.num_workers,
            stream_kind=settings.stream,
            seed=settings.seed,
            batch_size_name="batch_size",
            class_name=settings.class_name,
            subject="The training data",
            drop_last=settings.drop_last,
        )
        check_same_data(
            "The training data",
            communicator,
            None,
            {"uneven": uneven, "gradient_accumulation_steps": accumulation_setting(self._batch_sizes)},
        )
        source_properties = communicator.allgather_object((source.batch_size, source.is_stateful))
        sizes: list[int | None] = [batch_size for batch_size, _ in source_properties]
        self._is_stateful = all(is_stateful for _, is_stateful in source_properties)
        self._resume_state: Mapping[str, Any] | None = None
        self.batch_size = source.batch_size
        # Number of samples in one micro-batch, summed over ranks; None if unknown.
        self._micro_batch_samples = sum(size or 0 for size in sizes) if all(sizes) else None
        self._communicator = communicator
        self._aligner = StepAligner(
            communicator,
            gradient_accumulation_steps=self._batch_sizes[0].gradient_accumulation_steps,
            uneven=uneven,
            max_batches_ahead=reduce_prefetch_count(source.prefetch_count, communicator),
            min_step_items=None,
            copies_batches=source.may_reuse_memory,
        )
        self.begin_epoch(0)
        requested = self._batch_sizes[0].global_batch_size
        if requested not in (None, self.global_batch_size) and communicator.rank == 0:
            _log.warning(
                "This job started with a global batch size of %d, but with %d ranks it is %d: every rank needs full "
                "batches of an iterable dataset. The size remains the same if it is a multiple of the number of ranks "
                "times the batch size of a rank, %d.",
                *(requested, communicator.size, self.global_batch_size, self.batch_size),
            )
        self._current_epoch = _EpochMicroBatches(source, self._aligner, communicator, 0, 0, None, self._class_name)

    def _use_batch_sizes(self, batch_sizes: BatchSizes) -> None:
        """Use `batch_sizes` for the next steps."""
        steps, samples = batch_sizes.gradient_accumulation_steps, self._micro_batch_samples
        self.global_batch_size = None if samples is None else samples * steps
        drops_last = self._source.drop_last and self._source.stream_kind == "shared"
        self._aligner.set_accumulation(steps, min_step_items=self.global_batch_size if drops_last else None)

    @property
    def order_settings(self) -> dict[str, Any]:
        """The settings that, with the seed, determine which sample is at a position of an epoch."""
        if self._source.stream_kind == "shared":
            return {"stream": "shared", "of batches": self._source.batch_size is None}
        return {"stream": "own", "ranks": self._communicator.size, "workers": self._source.num_workers}

    @property
    def can_prefetch(self) -> bool:
        """Whether a batch may be loaded before it is requested, without side effects."""
        return self._source.can_prefetch

    @property
    def can_overlap_prefetch(self) -> bool:
        """Return False, because loading the batches of a step calls collectives."""
        return False

    def steps_in_epoch(self, start: int = 0, *, is_exact: bool = False) -> int | None:
        """Return None, because `__len__` of an IterableDataset may be wrong."""
        return None

    def samples_in_epoch(self) -> int | None:
        """Return None, like `steps_in_epoch`."""
        return None

    def count_batches(self) -> int | None:
        """Return None, like `steps_in_epoch`."""
        return None

    def micro_batches(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, MicroBatch]]:
        """Yield (batch, micro-batch) for each of this rank's micro-batches in one epoch, from position `start`."""
        state = self._take_resume_state(epoch, start)
        self._current_epoch = _EpochMicroBatches(
            self._source, self._aligner, self._communicator, epoch, start, state, self._class_name
        )
        return self._current_epoch

    @property
    def is_stateful(self) -> bool:
        """Whether the data is stateful on all ranks."""
        return self._is_stateful

    def state_to_save(self, state: StreamState | None, epoch: int, position: int) -> dict[str, Any] | None:
        """Return the part of this rank's `state` that a checkpoint contains; see TrainingData."""
        if not (self._is_stateful and position):
            return None
        stream_kind, rank = self._source.stream_kind, self._communicator.rank
        if stream_kind == "shared":
            # In the last step of an epoch, a rank without a batch has an older state.
            if state is None or state.repeats or state.position != position:
                return None
            rank = 0  # the state is the same on all ranks
        if state is None:
            return None
        expected = self._state_properties(epoch, position)
        return {**expected, "ranks": {rank: state.to_dict()}}

    def gather_state(self, state: StreamState | None, epoch: int, position: int) -> dict[str, Any] | None:
        """Return the merged results of `state_to_save` of all ranks. All ranks must call this method."""
        local_state = self.state_to_save(state, epoch, position)
        if self._source.stream_kind == "shared":
            # Rank 0 has a batch in each step. Its state is broadcast, so that the result is the same on all ranks.
            state_of_rank_zero: dict[str, Any] | None = self._communicator.broadcast_object(local_state)
            return state_of_rank_zero
        states = [state for state in self._communicator.allgather_object(local_state) if state is not None]
        ranks = {rank: rank_state for state in states for rank, rank_state in state["ranks"].items()}
        return {**states[0], "ranks": ranks} if states else None

    def _state_properties(self, epoch: int, position: int) -> dict[str, Any]:
        """Return the properties that must be equal in a resumed run."""
        return {"epoch": epoch, "position": position, "stream": self._source.stream_kind, "dataset": self._source.name}

    def resume_from(self, state: Mapping[str, Any] | None) -> None:
        """Let the next `micro_batches` call start from `state`; see TrainingData."""
        self._resume_state = state

    def _take_resume_state(self, epoch: int, position: int) -> StreamState | None:
        """Remove the state that `resume_from` stored, and return this rank's part of it; None if this rank must instead
        skip the items before `position`."""
        state, self._resume_state = self._resume_state, None
        stream_kind, expected = self._source.stream_kind, self._state_properties(epoch, position)
        if not position or not self._is_stateful or state is None:
            return None
        if any(state.get(name) != value for name, value in expected.items()):
            return None
        rank_state = state["ranks"].get(self._communicator.rank if stream_kind == "own" else 0)
        return None if rank_state is None else StreamState.from_dict(rank_state)

    def close_and_check_epoch_end(self, position: int) -> bool:
        """Close the iterator, and return whether `position` is the end of the epoch; see TrainingData.

        If the next step is not loaded yet, this method tries to load it. A resumed run loads that step again, so the
        RNG state of this process is restored afterwards.
        """
        is_exhausted = False
        if self._current_epoch.position <= position:
            device = self._communicator.device
            generators = capture_generators(device)
            is_exhausted = next(self._current_epoch, None) is None
            if not is_exhausted:
                restore_generators(generators, device)
        self.end_epoch()
        return is_exhausted

    def end_epoch(self) -> None:
        """Close the iterator, and terminate its workers unless they are persistent; see TrainingData."""
        self._current_epoch.close()


class _EpochMicroBatches(Iterator[tuple[Any, MicroBatch]]):
    """Iterator over the micro-batches of one epoch; `position` is the end of the step of the last yielded micro-batch.

    It has no reference cycle, so its workers terminate immediately after an error, without a garbage collection.
    """

    def __init__(
        self,
        source: StreamSource,
        aligner: StepAligner,
        communicator: Communicator,
        epoch: int,
        start: int,
        state: StreamState | None,
        class_name: str,
    ) -> None:
        self._source, self._communicator, self._epoch, self._class_name = source, communicator, epoch, class_name
        is_shared = source.stream_kind == "shared"
        is_repeating = state is not None and state.repeats
        self._has_started, self._checks_first_items, self.position = start > 0, is_shared and epoch == 0, start
        self._micro_batches = aligner.micro_batches(
            lambda: source.batches(epoch, start if is_shared else 0, state, is_repeating=is_repeating),
            start=start,
            stride=source.stride,
            num_skipped=0 if is_shared or state is not None else start,
            batches_to_repeat=lambda: source.batches(epoch, is_repeating=True),
            # With start 0, a rank without batches has the state before the first batch.
            data_state=StreamState({}) if state is None and start == 0 and source.is_stateful else state,
        )

    def __next__(self) -> tuple[Any, MicroBatch]:
        item = next(self._micro_batches, None)
        if item is None and not self._has_started:
            raise DataError(
                f"{self._source.name} ended before the first step of epoch {self._epoch + 1}: it yielded no item or, "
                "with drop_last, fewer items than a global batch. Its __iter__ must return a new iterator in each "
                "call. Yield more items, or use a smaller batch_size."
            )
        if item is None:
            raise StopIteration
        if self._checks_first_items:
            self._checks_first_items = False
            self._check_first_items()
        self._has_started, self.position = True, item[1].step_end
        return item

    def close(self) -> None:
        """Release the batches, and terminate the workers unless they are persistent."""
        self._micro_batches.close()

    def _check_first_items(self) -> None:
        """Log a warning on rank 0 if a shared stream does not start with the same item on every rank. All ranks must
        call this method."""
        fingerprints = set(self._communicator.allgather_object(self._source.first_item_fingerprint)) - {None}
        if len(fingerprints) > 1 and self._communicator.rank == 0:
            _log.warning(
                "%s does not start with the same item on every rank, but %s.stream 'shared' shards one common stream. "
                "If the items differ by more than a random augmentation, samples are lost or repeated. Use %s for a "
                "dataset that shards itself.",
                *(self._source.name, self._class_name, format_call(self._class_name, "stream='own'")),
            )
