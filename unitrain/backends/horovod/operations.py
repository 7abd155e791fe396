"""Start Horovod's operations for a process group: names, pieces, and conversions of tensors."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

import horovod.torch as hvd
import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.horovod.mismatches import MismatchDetector, Operation
from unitrain.backends.horovod.process_sets import join_process_set
from unitrain.backends.horovod.runtime import count_group, next_group_number
from unitrain.backends.horovod.tensors import (
    MAX_ALLTOALL_BYTES,
    Destination,
    combine_rows,
    dense_bytes,
    find_reduction,
    flatten_dense,
    is_mean_of_integers,
    piece_slices,
    reduction_name,
)
from unitrain.backends.horovod.work import CompletionQueue, HorovodWork
from unitrain.errors import CollectiveArgumentError, UnsupportedError
from unitrain.monitoring.flight_recorder import dtype_name

# To negotiate an operation whose name and shape are in its response cache, Horovod transfers one bit. Other operations
# require a message to rank 0 and a response. Names are therefore reused, in the same order on every rank, but not
# before the previous operation with the name has completed.
NAMES_PER_SHAPE = 16


class OperationStarter(dist.ProcessGroup):
    """Base class of Horovod's process group, with the operations that torch's collectives are composed of.

    The methods return the Work objects of the pieces in which a tensor is communicated; `_issue` and `_issue_rows`
    return a single Work. Every rank must call the same methods with tensors of the same size. Only the number of rows
    in `_alltoall` and `_issue_rows` may differ between ranks.
    """

    def __init__(self, store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, len(ranks))  # type: ignore[call-arg] # torch's stub describes another constructor
        self._ranks = ranks
        self._process_set = join_process_set(store, rank, ranks, timeout)
        self._is_shut_down = False
        self._pid = os.getpid()
        self._group_number, self._generation = next_group_number(ranks), 0
        count_group(ranks)
        self._prefix = f"unitrain.{self._group_number}.0"
        self._timeout = timeout
        self._completions = CompletionQueue()
        self._num_issued: defaultdict[str, int] = defaultdict(int)
        self._latest_works: WeakValueDictionary[str, HorovodWork] = WeakValueDictionary()
        self._sequence_number = self._position = 0  # operations started in total, and under the current names
        self._mismatches = MismatchDetector(
            store,
            rank,
            ranks,
            self._completions.pending_operations,
            lambda: self._completions.is_main_thread_waiting,
        )
        self._coalesced_works: list[HorovodWork] | None = None  # works since _start_coalescing

    def start_new_names(self) -> None:
        """Use new names from now on. All ranks must call this method after an error that has prevented some ranks from
        starting all operations under the current names.
        """
        self._generation += 1
        self._position = 0
        self._mismatches.restart()
        self._prefix = f"unitrain.{self._group_number}.{self._generation}"
        self._num_issued.clear()
        self._latest_works.clear()

    def _reduce(
        self,
        operation: str,
        source: Tensor,
        target: Tensor | None,
        op: Any,
        result: Any,
        on_complete: Callable[[], object] | None = None,
    ) -> list[HorovodWork]:
        """Start to reduce `source` into `target`, which is None if this rank does not need the result. `on_complete` is
        called after the last piece."""
        reduction_plan, operation = find_reduction(source.dtype, op), f"{operation}.{reduction_name(op)}"
        if reduction_plan.combine is not None:
            return self._reduce_gathered(
                operation, source, target, reduction_plan.combine, result, on_complete or (lambda: None)
            )
        values = flatten_dense(source)
        in_place = reduction_plan.encode is None and target is source and values.data_ptr() == source.data_ptr()
        destination = None if in_place or target is None else Destination(target)
        works = []
        bytes_per_element = 16 if is_mean_of_integers(source.dtype, op) else _encoded_bytes(source.dtype)
        for piece_range in piece_slices(len(values), bytes_per_element):
            converted = reduction_plan.to_horovod(values[piece_range])

            def finish(reduced: Tensor, piece_range: slice = piece_range) -> None:
                if destination is not None:
                    destination.elements[piece_range] = reduction_plan.from_horovod(reduced, source.dtype)
                    if piece_range.stop == len(values):
                        destination.finish()
                if on_complete is not None and piece_range.stop == len(values):
                    on_complete()

            # Values that are not encoded may share memory with the user's tensor.
            allreduce = hvd.allreduce_async_ if in_place or reduction_plan.encode is not None else hvd.allreduce_async
            works.append(
                self._issue(
                    operation,
                    converted,
                    functools.partial(allreduce, converted, op=reduction_plan.op),
                    result,
                    None if destination is None and on_complete is None else finish,
                    dtype=source.dtype,
                )
            )
        return works

    def _reduce_gathered(
        self,
        operation: str,
        source: Tensor,
        target: Tensor | None,
        combine: Callable[[Tensor, Tensor], Tensor],
        result: Any,
        on_complete: Callable[[], object] = lambda: None,
    ) -> list[HorovodWork]:
        destination = None if target is None else Destination(target)

        def finish(gathered: Tensor, piece_range: slice) -> None:
            if destination is not None:
                destination.bytes[piece_range] = combine_rows(
                    gathered.view(self.size(), -1), source.dtype, combine
                ).view(torch.uint8)
                if piece_range.stop == len(destination.bytes):
                    destination.finish()
                    on_complete()

        return self._gather_pieces(operation, source, result, finish)

    def _reduce_scatter(self, output: Tensor, source: Tensor, op: Any, result: Any) -> list[HorovodWork]:
        """Start to reduce `source`, which consists of one equal part per rank, and write this rank's part to
        `output`."""
        reduction_plan, size, destination = find_reduction(source.dtype, op), self.size(), Destination(output)
        operation = f"reducescatter.{reduction_name(op)}"
        _check_ratio("reduce_scatter", "input", source, "output", output, size)
        parts = flatten_dense(source).view(size, -1) if source.numel() else source.new_empty(size, 0)
        # For a mean of integers, reduce all parts on every rank, so that every rank raises the error if any mean is not
        # an integer. Reductions with `combine` gather all parts in any case.
        if (is_mean := is_mean_of_integers(source.dtype, op)) or reduction_plan.combine is not None:
            complete = torch.empty_like(parts)

            def take_local_part() -> None:
                destination.elements.copy_(complete[self.rank()])
                destination.finish()

            if is_mean:
                return self._reduce("reducescatter", parts, complete, op, result, take_local_part)
            assert reduction_plan.combine is not None
            return self._reduce_gathered(operation, source, complete, reduction_plan.combine, result, take_local_part)
        scatters = reduction_plan.op in (hvd.Sum, hvd.Average)  # the operations that Horovod's reducescatter supports
        works = []
        for piece_range in piece_slices(parts.shape[1], _encoded_bytes(source.dtype) * size):
            converted = reduction_plan.to_horovod(parts[:, piece_range].contiguous().view(-1))

            def finish(reduced: Tensor, piece_range: slice = piece_range) -> None:
                local_tensor = reduced if scatters else reduced.view(size, -1)[self.rank()]
                destination.elements[piece_range] = reduction_plan.from_horovod(local_tensor, source.dtype)
                if piece_range.stop == parts.shape[1]:
                    destination.finish()

            reduce = hvd.reducescatter_async if scatters else hvd.allreduce_async
            works.append(
                self._issue(
                    operation,
                    converted,
                    functools.partial(reduce, converted, op=reduction_plan.op),
                    result,
                    finish,
                    dtype=source.dtype,
                )
            )
        return works

    def _gather(
        self,
        local_tensor: Tensor,
        outputs: list[Tensor] | Tensor,
        result: Any,
        on_complete: Callable[[], object] | None = None,
        operation: str = "allgather",
    ) -> list[HorovodWork]:
        """Start to gather `local_tensor` of every rank into `outputs`: a list of tensors, one tensor, or an empty list
        if this rank does not need the result."""
        count = local_tensor.numel() * local_tensor.element_size()
        if isinstance(outputs, Tensor):
            _check_ratio("all_gather", "output", outputs, "input", local_tensor, self.size())
            targets = [Destination(outputs)]
            rows = [*targets[0].bytes.view(self.size(), count)] if count else []
        else:
            targets = [Destination(output) for output in outputs]
            rows = [target.bytes for target in targets]

        def finish(gathered: Tensor, piece_range: slice) -> None:
            # `rows` is empty if this rank needs no result.
            for row, part in zip(rows, gathered.view(self.size(), -1), strict=False):
                row[piece_range] = part
            if piece_range.stop == count:
                for target in targets:
                    target.finish()
                if on_complete is not None:
                    on_complete()

        return self._gather_pieces(operation, local_tensor, result, finish)

    def _gather_pieces(
        self, operation: str, local_tensor: Tensor, result: Any, process_output: Callable[..., None]
    ) -> list[HorovodWork]:
        """Start to gather the bytes of `local_tensor`.

        Each gathered piece, uint8 [ranks * bytes], is passed to `process_output(gathered, piece_range=...)`.
        """
        payload, size, element_bytes = dense_bytes(local_tensor), self.size(), local_tensor.element_size()
        works = []
        for elements in piece_slices(local_tensor.numel(), size * element_bytes):
            piece_range = slice(elements.start * element_bytes, elements.stop * element_bytes)
            piece = payload[piece_range]
            works.append(
                self._issue(
                    operation,
                    piece,
                    functools.partial(hvd.allgather_async, piece),
                    result,
                    functools.partial(process_output, piece_range=piece_range),
                    elements.stop - elements.start,
                    dtype=local_tensor.dtype,
                )
            )
        return works

    def _alltoall(
        self,
        payload: Tensor,
        splits: list[int],
        target: Destination,
        result: Any,
        on_complete: Callable[[], None] = lambda: None,
    ) -> list[HorovodWork]:
        """Start an alltoall of `payload`, uint8 [rows, bytes], that sends `splits[rank]` rows to each rank.

        The Work raises UnsupportedError on every rank if a rank sends or receives more than Horovod supports.
        """
        refusal = UnsupportedError(
            "A rank exchanges too many bytes in an alltoall with splits: Horovod supports at most "
            f"{MAX_ALLTOALL_BYTES:,}. Exchange fewer rows, or parts of each row, per call: tensor[:, :half]"
        )
        is_refused = max(payload.numel(), len(target.bytes)) > MAX_ALLTOALL_BYTES

        def finish(received: tuple[Tensor, Tensor]) -> None:
            target.bytes.copy_(received[0].view(-1))
            target.finish()
            on_complete()

        if not payload.shape[1]:
            return []
        counts = torch.tensor([0] * len(splits) if is_refused else splits, dtype=torch.int32, device="cpu")
        start = functools.partial(hvd.alltoall_async, splits=counts)
        return [self._issue_rows("alltoall", payload, start, result, finish, refusal, is_refused=is_refused)]

    def _issue_rows(
        self,
        operation: str,
        rows: Tensor,
        start: Callable[..., int],
        result: Any,
        process_output: Callable[[Any], object],
        refusal: UnsupportedError,
        *,
        is_refused: bool,
    ) -> HorovodWork:
        """Start an operation on `rows`, uint8 [rows, bytes]. The number of rows may differ between ranks. If
        `is_refused` is true on any rank, the Work raises `refusal` on every rank.

        If a rank did not start the operation, the other ranks would wait for it. A rank that refuses the operation
        therefore starts it with another dtype, for which Horovod returns an error to all ranks before it transfers
        data.
        """
        if not is_refused:
            return self._issue(
                operation, rows, functools.partial(start, rows), result, process_output, rows.shape[1], refusal
            )
        other = rows.new_empty((0, rows.shape[1]), dtype=torch.float64)

        def refuse(_: Any) -> None:  # called if all ranks refuse
            raise refusal

        return self._issue(operation, rows, functools.partial(start, other), result, refuse, rows.shape[1], refusal)

    def _issue(
        self,
        operation: str,
        tensor: Tensor,
        start: Callable[..., int],
        result: Any,
        process_output: Callable[[Any], Any] | None = None,
        size: int | None = None,
        mismatch_error: UnsupportedError | None = None,
        dtype: torch.dtype | None = None,
    ) -> HorovodWork:
        """Start an operation on `tensor` under the next name. `process_output` copies Horovod's output to torch's
        result.

        `operation` contains the reduction or root. `size` must be equal on all ranks, and is the number of elements by
        default. `dtype` is the dtype of the user's tensor, from which `tensor` may have been converted. The Work raises
        `mismatch_error` if ranks start the operation with different dtypes. This method blocks until the previous
        operation with the same name is complete. Raises CollectiveMismatchError if ranks of this group have called
        different collectives before, and UnsupportedError in a forked process.
        """
        self._mismatches.check_usable()
        if os.getpid() != self._pid:
            raise UnsupportedError(
                "A collective was called in a process that was forked from a rank, such as a DataLoader worker, but "
                "only the rank itself can communicate. Call collectives in the main process of the rank."
            )
        device = tensor.device
        size = tensor.numel() if size is None else size
        own_dtype = dtype_name(tensor.dtype if dtype is None else dtype)
        base_name = f"{self._prefix}.{operation}.{own_dtype}.{size}"
        name = f"{base_name}.{self._num_issued[base_name] % NAMES_PER_SHAPE}"
        self._num_issued[base_name] += 1
        if (previous := self._latest_works.get(name)) is not None:
            with contextlib.suppress(UnsupportedError):  # the caller of that operation receives this error
                previous.wait()
        pending_operation = Operation(self._position, operation, own_dtype, size)
        with torch.inference_mode(False):  # Horovod's thread cannot resize a tensor that is created in inference mode
            handle = start(name=name, process_set=self._process_set)
        work = HorovodWork(
            operation.partition(".")[0], handle, result, device, process_output, self._timeout, self._completions,
            pending_operation,
            self._mismatches, mismatch_error,
        )  # fmt: skip
        self._latest_works[name] = work
        self._sequence_number += 1
        self._position += 1
        if self._coalesced_works is not None:
            self._coalesced_works.append(work)
        self._completions.add(work)
        return work


def _check_ratio(
    operation: str, larger: str, larger_tensor: Tensor, smaller: str, smaller_tensor: Tensor, size: int
) -> None:
    """Raise CollectiveArgumentError, on every rank, unless `larger_tensor` has `size` times as many elements as
    `smaller_tensor`."""
    if larger_tensor.numel() != size * smaller_tensor.numel():
        raise CollectiveArgumentError(
            f"Horovod's {operation} got {larger} {tuple(larger_tensor.shape)} and {smaller} "
            f"{tuple(smaller_tensor.shape)} on {size} ranks. The {larger} must have {size} times the elements of the "
            f"{smaller}: {size * smaller_tensor.numel():,}."
        )


def _encoded_bytes(dtype: torch.dtype) -> int:
    # Smaller dtypes are encoded in 32 bits. uint32 may be encoded in 64 bits, and its pieces may then have
    # 2 * MAX_PIECE_BYTES.
    return max(dtype.itemsize, 4)
