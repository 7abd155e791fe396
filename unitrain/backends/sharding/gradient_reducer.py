"""ZeRO-2: reduction of gradients to the ranks that own them, bucket by bucket, during the backward pass.

A bucket of gradients is sent with one all-to-all: each rank receives the other ranks' values of the elements that it
owns, and sums them in rank order. This transfers half as many bytes as an allreduce, for any partition of the elements.
Horovod's all-to-all is slower than its allreduce, so the horovod backend uses an allreduce and keeps only this rank's
shard of the result. The complete gradients of a bucket are freed as soon as they have been copied into a send buffer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.backends.gradients.end_of_backward import BackwardStage, end_of_backward
from unitrain.backends.gradients.local_gradients import register_gradient_hook
from unitrain.backends.gradients.reducer_group import ReducerGroup
from unitrain.backends.sharding.gradient import GradientGroup, ShardedGradient
from unitrain.backends.sharding.partition import ParameterShard, divide_runs, divide_tensors, flatten_like
from unitrain.backends.tensors import HALF_DTYPES
from unitrain.errors import ModelError
from unitrain.torch_compat import accumulates_into_others_only, current_backward, is_reached_by_backward

# Maximum number of buckets in flight. Further buckets wait, which bounds the memory. With `find_unused_parameters`, the
# number is not limited.
_MAX_IN_FLIGHT = 2


@dataclass(frozen=True)
class TransferSettings:
    """How buckets are transferred.

    group: the process group.
    first_bytes, other_bytes: approximate sizes of the first bucket, which is usually smaller so that its reduction
        starts early, and of the other buckets.
    half_dtype: the half-precision dtype in which gradients are sent with compression, or None.
    uses_all_to_all: whether to use an all-to-all instead of an allreduce. Half-precision values always use an
        all-to-all, because they are summed in float32.
    """

    group: dist.ProcessGroup
    first_bytes: int
    other_bytes: int
    half_dtype: torch.dtype | None
    uses_all_to_all: bool


@dataclass
class _Bucket:
    """The trainable parameters with `parameter_indices`, whose gradients have the same dtype and are reduced together.

    `shards` are ordered by owner, and their `index` is the index of the parameter. Rank r owns `splits[r]` elements.
    `mean` contains the mean over ranks of this rank's elements. `num_missing` is the number of gradients that the
    current backward pass has not computed yet.
    """

    index: int
    parameter_indices: list[int]
    shards: list[ParameterShard]
    splits: list[int]
    mean: Tensor
    num_missing: int = 0


@dataclass
class _BucketTransfer:
    bucket: _Bucket
    work: dist.Work | None
    sent: Tensor  # the transport reads it until the work is complete
    received: Tensor | None  # the values of all ranks after an all-to-all, as bytes; an allreduce overwrites `sent`
    # Of the parameters whose `.grad` is already the sharded gradient, to which the mean is added.
    attached_indices: set[int] = field(default_factory=set)


class GradientReducer:
    """Reduces the gradients of `parameters`. Each rank stores the elements that it owns.

    Args:
        parameters: all parameters of the model, by name.
        communicator: the backend.
        reducer_group: records the buckets for the watchdog and the consistency check.
        find_unused_parameters: whether a backward pass may leave parameters unused.
        on_local: called with each parameter whose gradient a backward pass has changed without completing it.
        on_reduced: called at the end of each backward pass that completes the gradients.

    After a backward pass for which `begin` was called, the `.grad` of every trainable parameter is a ShardedGradient:
    the mean over ranks, plus the earlier `.grad`. With `find_unused_parameters`, parameters that no rank has used keep
    their `.grad`. A sharded optimizer calls `assign` before the first backward pass. Each parameter without an
    optimizer is assigned to a single rank.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        communicator: Communicator,
        reducer_group: ReducerGroup,
        settings: TransferSettings,
        *,
        find_unused_parameters: bool,
        on_local: Callable[[nn.Parameter], None],
        on_reduced: Callable[[], None],
    ) -> None:
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._index_by_id = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._communicator, self._reducer_group, self._group = communicator, reducer_group, settings.group
        self._settings, self._half_dtype, self._finds_unused = settings, settings.half_dtype, find_unused_parameters
        self._on_local, self._on_reduced = on_local, on_reduced
        self._gradient_group = GradientGroup(communicator)
        self._gradients: dict[int, ShardedGradient] = {}
        self._shards: dict[int, list[ParameterShard]] = {}
        self._trainable_indices: list[int] = []
        self._gradient_order: list[int] | None = None  # of the gradients in a backward pass of rank 0
        self._has_buckets = False
        self._buckets: list[_Bucket] = []
        self._bucket_by_index: dict[int, _Bucket] = {}
        self._in_flight: deque[_BucketTransfer] = deque()
        self._next_bucket = 0
        self._backward_id = -1  # ID of the backward pass whose gradients are reduced
        self._is_active = self._reduces_next_backward = self._accumulates = False
        self._computed_order: list[int] = []
        self._computed_indices: set[int] = set()
        self._used_indices: set[int] = set()
        # The trainable parameters that received no gradient on this rank in the last reduced backward pass. Empty if
        # that pass was allowed to leave parameters unused.
        self.missing_names: list[str] = []
        self._handles = [
            register_gradient_hook(parameter, _create_gradient_hook(weakref.ref(self), index))
            for index, parameter in enumerate(self._parameters)
            if parameter.is_floating_point() or parameter.is_complex()
        ]
        self.select_trained_parameters()

    # --- ownership ---

    def select_trained_parameters(self) -> None:
        """Select, for reduction, the parameters that currently require grad. All ranks must call this method."""
        self._trainable_indices = [index for index, parameter in enumerate(self._parameters) if parameter.requires_grad]
        self._gradient_order, self._has_buckets = None, False

    def shards_of(self, parameter: nn.Parameter) -> list[ParameterShard] | None:
        """Return the shards of `parameter`, or None if it has not been assigned."""
        index = self._index_by_id.get(id(parameter))
        return None if index is None else self._shards.get(index)

    def divide(self, parameters: Sequence[nn.Parameter]) -> list[ParameterShard]:
        """Return shards of `parameters` such that each rank owns about the same number of elements in each bucket."""
        sizes = [parameter.numel() for parameter in parameters]
        largest = max((parameter.element_size() for parameter in parameters), default=1)
        return divide_runs(sizes, self._communicator.size, self._settings.other_bytes // largest)

    def assign(self, parameter: nn.Parameter, shards: list[ParameterShard]) -> None:
        """Set the owners of the elements of `parameter`. All ranks must call this method with the same shards.

        Raises ModelError if `parameter` does not belong to the model, or if its gradient is already sharded.
        """
        index = self._index_by_id.get(id(parameter))
        if index is None:
            raise ModelError(
                f"The optimizer got a new parameter of shape {list(parameter.shape)} that does not belong to the "
                'distributed model, so shard="gradients" cannot reduce its gradient. Add parameters of the model only: '
                'optimizer.add_param_group({"params": layer.parameters()}).'
            )
        if isinstance(parameter.grad, ShardedGradient):
            raise ModelError(
                f"Gradient {self._names[index]!r} is already sharded by elements, which this optimizer does not "
                "support. Call optimizer.zero_grad() before backend.distributed_optimizer."
            )
        self._shards[index] = shards
        self._has_buckets = False
        own_shard = next((shard for shard in shards if shard.owner == self._communicator.rank), None)
        gradient = self._gradients.get(index)
        if gradient is None:
            with torch.no_grad():
                gradient = self._gradients[index] = ShardedGradient(parameter.detach(), self._gradient_group)
            self._gradient_group.gradients.append(gradient)
        gradient.local = parameter.detach().new_empty(0)
        gradient.start, gradient.stop = (own_shard.start, own_shard.stop) if own_shard is not None else (0, 0)

    def _create_buckets(self) -> None:
        """Assign the trainable parameters to buckets in the order in which their gradients are computed."""
        unassigned = [index for index in self._trainable_indices if index not in self._shards]
        sizes = [self._parameters[index].numel() for index in unassigned]
        for shard in divide_tensors(sizes, self._communicator.size):
            self.assign(self._parameters[unassigned[shard.index]], [shard])
        trainable = set(self._trainable_indices)
        order = [index for index in self._gradient_order or () if index in trainable]
        ordered = set(order)
        order += [index for index in reversed(self._trainable_indices) if index not in ordered]
        self._buckets = []
        open_buckets: dict[torch.dtype, tuple[list[int], int]] = {}

        def close(dtype: torch.dtype) -> None:
            parameter_indices, _ = open_buckets.pop(dtype)
            self._buckets.append(self._create_bucket(len(self._buckets), parameter_indices))

        for index in order:
            parameter = self._parameters[index]
            members, size = open_buckets.get(parameter.dtype, ([], 0))
            size += parameter.numel() * parameter.element_size()
            open_buckets[parameter.dtype] = ([*members, index], size)
            if size >= (self._settings.other_bytes if self._buckets else self._settings.first_bytes):
                close(parameter.dtype)
        for dtype in list(open_buckets):
            close(dtype)
        self._bucket_by_index = {index: bucket for bucket in self._buckets for index in bucket.parameter_indices}
        self._has_buckets = True

    def _create_bucket(self, bucket_index: int, parameter_indices: list[int]) -> _Bucket:
        size, rank = self._communicator.size, self._communicator.rank
        shards = [
            replace(shard, index=parameter_index)
            for parameter_index in parameter_indices
            for shard in self._shards[parameter_index]
            if shard.stop > shard.start
        ]
        shards.sort(key=lambda shard: shard.owner)
        splits = [0] * size
        for shard in shards:
            splits[shard.owner] += shard.stop - shard.start
        first = self._parameters[parameter_indices[0]]
        bucket = _Bucket(bucket_index, parameter_indices, shards, splits, first.detach().new_empty(splits[rank]))
        for parameter_index, own_elements in self._own_shards(bucket, bucket.mean):
            gradient = self._gradients[parameter_index]
            if gradient.local.numel() == own_elements.numel() and self._is_attached(parameter_index):
                own_elements.copy_(gradient.local)
            gradient.local = own_elements
        return bucket

    def _own_shards(self, bucket: _Bucket, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the parameter, elements in `values`) of each shard that this rank owns."""
        start = 0
        for shard in bucket.shards:
            if shard.owner == self._communicator.rank:
                count = shard.stop - shard.start
                yield shard.index, values[start : start + count]
                start += count

    def _is_attached(self, index: int) -> bool:
        return self._parameters[index].grad is self._gradients.get(index)

    # --- a backward pass ---

    def reduce_next_backward(self, *, accumulates: bool) -> None:
        """Reduce the gradients of the next backward pass that reaches a parameter, regardless of the tensor from which
        it starts."""
        self._reduces_next_backward, self._accumulates = True, accumulates

    def discard_interrupted(self) -> None:
        """Discard the reduction of a backward pass that an exception has interrupted. Call it only outside of backward
        passes."""
        self._is_active = False
        self._in_flight.clear()

    def begin(self, *, accumulates: bool, output: Tensor | None = None) -> None:
        """Reduce the gradients of the current backward pass. All ranks must call this method in the same backward
        passes.

        With `accumulates`, as inside `no_sync`, the gradients remain marked as local, because a later backward pass
        completes them. The current pass may then leave parameters unused.

        `output` is an output of the model that the pass has reached, or None if it no longer exists. It is used if a
        pass with `find_unused_parameters` reaches no parameter. If `output` depends on no parameter and the pass
        accumulates the gradient of another leaf, the pass reduces zeros, because other ranks may use parameters.
        Otherwise, the pass reduces nothing, because it only computes gradients of the inputs.
        """
        self._reduces_next_backward, self._accumulates = False, accumulates
        reached: set[int] | None = None
        if self._finds_unused:
            try:
                with torch.enable_grad():
                    reached = {
                        index for index in self._trainable_indices if is_reached_by_backward(self._parameters[index])
                    }  # fmt: skip
            except RuntimeError:  # torch.autograd.grad with respect to parameters
                return
            if not reached and (output is None or not accumulates_into_others_only(output, self._parameters)):
                return
        if not self._has_buckets:
            self._create_buckets()
        self._backward_id, self._is_active, self._next_bucket = current_backward(), True, 0
        self._in_flight.clear()
        self._computed_order, self._computed_indices, self._used_indices = [], set(), set()
        self.missing_names = []
        for bucket in self._buckets:
            bucket.num_missing = (
                len(bucket.parameter_indices)
                if reached is None
                else len(reached.intersection(bucket.parameter_indices))
            )
        self._reducer_group.expect_backward()
        model_number = self._reducer_group.model_number
        end_of_backward.add(BackwardStage.REDUCE_BUCKETS, self._finish_backward, model_number)
        if reached and not self._reducer_group.defers_allreduces:
            self._send_complete_buckets()

    def add_gradient(self, index: int) -> None:
        """Count the gradient that a backward pass has computed for a parameter, and send its bucket if the bucket is
        complete."""
        if not self._is_active:
            if self._reduces_next_backward:
                self.begin(accumulates=self._accumulates)
            if not self._is_active:
                self._on_local(self._parameters[index])
                return
        bucket = self._bucket_by_index.get(index)
        if bucket is None:  # the parameter was frozen when the trainable parameters were selected
            self._on_local(self._parameters[index])
            return
        if index in self._computed_indices:
            self._raise_repeated(index)
        self._computed_indices.add(index)
        self._computed_order.append(index)
        bucket.num_missing -= 1
        if bucket.num_missing == 0 and bucket.index == self._next_bucket and not self._reducer_group.defers_allreduces:
            self._send_complete_buckets()

    def _raise_repeated(self, index: int) -> None:
        raise ModelError(
            f"Parameter {self._names[index]!r} received two gradients in one backward pass, for example because it is "
            "used in several blocks with reentrant activation checkpointing, so its gradient cannot be sharded. Use "
            "checkpoint(..., use_reentrant=False)."
        )

    def _send_complete_buckets(self) -> None:
        while self._next_bucket < len(self._buckets) and self._buckets[self._next_bucket].num_missing == 0:
            self._send(self._buckets[self._next_bucket])

    @torch.no_grad()  # also in a backward pass with create_graph=True
    def _send(self, bucket: _Bucket) -> None:
        """Start to reduce `bucket`, and free its gradients."""
        self._next_bucket = bucket.index + 1
        if self._finds_unused:
            # Other ranks may not have started the buckets in flight yet, so waiting for these buckets could deadlock.
            while self._in_flight and self._is_complete(self._in_flight[0]):
                self._finish(self._in_flight.popleft())
        else:
            while len(self._in_flight) >= _MAX_IN_FLIGHT:
                with self._reducer_group.monitored_wait():
                    self._finish(self._in_flight.popleft())
        values = self._take_values(bucket)
        parts = []
        for shard in bucket.shards:
            if shard.index in values:
                parts.append(values[shard.index][shard.start : shard.stop])
            else:
                parts.append(bucket.mean.new_zeros(shard.stop - shard.start))
        sent = torch.cat(parts) if parts else bucket.mean.new_empty(0)
        values.clear()
        parts.clear()
        size, rank = self._communicator.size, self._communicator.rank
        if sent.is_complex():
            sent = torch.view_as_real(sent).view(-1)
        if self._compresses(sent.dtype):
            sent = sent.div_(size).to(self._half_dtype)
        self._reducer_group.begin_bucket(sent)
        received: Tensor | None = None
        work: dist.Work | None = None
        try:
            if not sent.numel():
                pass
            elif self._settings.uses_all_to_all or sent.dtype in HALF_DTYPES:
                element_bytes = sent.numel() * sent.element_size() // max(1, sum(bucket.splits))
                split_bytes = [count * element_bytes for count in bucket.splits]
                received = torch.empty(split_bytes[rank] * size, dtype=torch.uint8, device=sent.device)
                work = dist.all_to_all_single(
                    received,
                    sent.view(torch.uint8),
                    [split_bytes[rank]] * size,
                    split_bytes,
                    group=self._group,
                    async_op=True,
                )
            else:
                work = dist.all_reduce(sent, group=self._group, async_op=True)
        except RuntimeError as error:  # Horovod rejects operations after another rank has terminated
            self._reducer_group.raise_cause_of(error)
            raise
        if self._reducer_group.waits_on_stream and work is not None:
            self._reducer_group.add_work(work)
        attached = {index for index in bucket.parameter_indices if self._is_attached(index)}
        self._in_flight.append(_BucketTransfer(bucket, work, sent, received, attached))

    def _compresses(self, dtype: torch.dtype) -> bool:
        """Return whether gradients of `dtype` are divided and rounded before they are sent."""
        return self._half_dtype is not None and dtype not in HALF_DTYPES

    def _take_values(self, bucket: _Bucket) -> dict[int, Tensor]:
        """Return the local gradients of `bucket` by parameter, as 1-D tensors, and remove them from `.grad`."""
        values = {}
        for index in bucket.parameter_indices:
            parameter, gradient = self._parameters[index], self._gradients[index]
            value, unreduced = parameter.grad, gradient.unreduced
            gradient.unreduced = None
            if value is gradient:
                value = unreduced
            else:
                parameter.grad = None
            if value is not None:
                values[index] = flatten_like(value, parameter)
        if self._finds_unused:
            self._used_indices.update(values)
        return values

    def _is_complete(self, transfer: _BucketTransfer) -> bool:
        """Return whether a bucket can be finished without waiting. Return False on GPUs, where this is unknown."""
        return not self._reducer_group.waits_on_stream and (transfer.work is None or transfer.work.is_completed())

    @torch.no_grad()
    def _finish(self, transfer: _BucketTransfer) -> None:
        """Wait for a bucket, and write the mean over ranks of this rank's elements to the sharded gradients, or add it
        to the gradients that `.grad` contained before."""
        self._reducer_group.wait_for_ranks(transfer.work)
        bucket, size = transfer.bucket, self._communicator.size
        width = 2 if bucket.mean.is_complex() else 1
        count = bucket.mean.numel() * width
        if transfer.received is not None:
            values_by_rank = transfer.received.view(transfer.sent.dtype).view(size, count)
        else:
            start = sum(bucket.splits[: self._communicator.rank]) * width
            values_by_rank = transfer.sent[start : start + count].view(1, count)
        is_new = not transfer.attached_indices
        target = bucket.mean if is_new else torch.empty_like(bucket.mean)
        elements = torch.view_as_real(target).view(-1) if target.is_complex() else target
        is_half = values_by_rank.dtype in HALF_DTYPES
        total = torch.empty_like(elements, dtype=torch.float32) if is_half else elements
        total.copy_(values_by_rank[0])
        _add_in_order(total, values_by_rank[1:])
        if self._compresses(elements.dtype):
            total = total.to(self._half_dtype)
        else:
            total /= size
        if total is not elements:
            elements.copy_(total)
        if is_new:
            return
        for index, own_elements in self._own_shards(bucket, target):
            local = self._gradients[index].local
            if index in transfer.attached_indices:
                local += own_elements
            else:
                local.copy_(own_elements)

    def _finish_backward(self) -> None:
        """Reduce the remaining buckets at the end of the backward pass, and set the `.grad` of the used parameters."""
        if not self._is_active or (current_backward() not in (-1, self._backward_id)):
            return
        self._is_active = False
        if not self._computed_order and not self._finds_unused:
            return  # torch.autograd.grad, which accumulates no gradients
        if not (self._finds_unused or self._accumulates):
            self.missing_names = [
                self._names[index] for index in self._trainable_indices if index not in self._computed_indices
            ]
        with self._reducer_group.monitored_wait():
            while self._next_bucket < len(self._buckets):
                self._send(self._buckets[self._next_bucket])
            while self._in_flight:
                self._finish(self._in_flight.popleft())
            used = self._exchange_used_indices()
        for index in self._trainable_indices:
            if index in used:
                gradient = self._gradients[index]
                gradient.is_zero = False
                gradient.clear_cached_norms()
                self._parameters[index].grad = gradient
        if self._gradient_order is None:
            self._gradient_order = self._communicator.broadcast_object(self._computed_order)
            self._has_buckets = False
        if self._accumulates:
            for index in used:
                self._on_local(self._parameters[index])
        else:
            end_of_backward.add(BackwardStage.MARK_REDUCED, self._on_reduced)

    def _exchange_used_indices(self) -> set[int]:
        """Return the indices of the parameters that received a gradient on any rank. Without `find_unused_parameters`,
        return the indices of all trainable parameters, and do not communicate."""
        if not self._finds_unused:
            return set(self._trainable_indices)
        flags = torch.tensor(
            [index in self._used_indices for index in self._trainable_indices],
            dtype=torch.int32,
            device=self._communicator.device,
        )
        work = dist.all_reduce(flags, group=self._group, async_op=True)
        self._reducer_group.wait_for_ranks(work)
        return {index for index, count in zip(self._trainable_indices, flags.tolist(), strict=True) if count}

    def stop(self) -> None:
        """Remove the hooks from the parameters, and release the process group."""
        for handle in self._handles:
            handle.remove()
        del self._group, self._settings, self._reducer_group


def _create_gradient_hook(weak_reducer: weakref.ref[GradientReducer], index: int) -> Callable[[Tensor], None]:
    """Return a hook without a reference to the parameter, which would keep a deleted model in memory."""

    def on_gradient(_: Tensor) -> None:
        if (reducer := weak_reducer()) is not None:
            reducer.add_gradient(index)

    return on_gradient


def _add_in_order(total: Tensor, rows: Tensor) -> None:
    """Add each of `rows`, [rows, elements], to `total`, [elements], in this order."""
    if rows.device.type == "cpu" and rows.dtype == total.dtype:
        # With 1,024 rows, this takes a quarter of the time of a loop in Python. On CPUs, the order is fixed.
        index = torch.zeros(len(rows), dtype=torch.int64, device="cpu")
        total.view(1, -1).index_add_(0, index, rows)
        return
    for row in rows:
        total += row
