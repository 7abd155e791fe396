"""Detection of ranks that wait for different operations of one process group.

Horovod executes an operation when all ranks have started it under the same name, which contains the dtype, the
number of elements, and the reduction or root. If these differ, or if ranks call different collectives, every rank waits
for an operation that the others never start. Without this module, such a mismatch would be reported as a timeout.

A rank that has waited for a few seconds writes its pending operations to the group's store, and compares them with
those of rank 0. When an operation times out, the ranks that have not written it are reported as missing. Steps without
long waits write nothing.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from unitrain.bootstrap.responsive_store import ResponsiveStore
from unitrain.errors import CollectiveMismatchError

_MAX_REPORTED = 16  # pending operations per report; only the oldest one can be a mismatch
_STORE_TIMEOUT_SECONDS = 2.0  # for a response of the store, so that a stopped rank 0 does not delay the timeout
_OPERATIONS_ON_ROWS = ("alltoall", "sparse_allreduce")  # the number of rows may differ between ranks


class Operation(NamedTuple):
    """An operation that a rank has started.

    `position` is its index in the sequence of the rank's operations. `name` is the collective with its reduction or
    root, such as "allreduce.SUM" or "broadcast.from_rank_0". `size` is the number of elements, or the number of bytes
    per row for operations on rows. Name, dtype and size must be equal on all ranks.
    """

    position: int
    name: str
    dtype: str
    size: int

    def describe(self) -> str:
        name = self.name.replace(".", " ").replace("_rank_", " rank ")
        if self.name in _OPERATIONS_ON_ROWS:
            return f"{name} with {self.size:,} bytes per row"
        return f"{name} of {self.size:,} {self.dtype} elements"

    def matches(self, other: Operation) -> bool:
        """Return whether the operations differ only in their positions, so that Horovod can execute them together."""
        return self[1:] == other[1:]


class MismatchDetector:
    """Compares the pending operations of this rank with those of rank 0, and finds the ranks that have not started an
    operation."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        ranks: Sequence[int],
        get_pending_operations: Callable[[], Sequence[Operation]],
        is_main_thread_waiting: Callable[[], bool],
    ) -> None:
        """`rank` is the index of this rank in `ranks`, the ranks of the group. `is_main_thread_waiting` returns whether
        the main thread waits for the oldest pending operation, and therefore starts no other operation."""
        self._group_store, self._generation = store, 0
        self._store_to_clone: ResponsiveStore | None = None  # created by `_connect`, and kept until it is cloned
        self._store: ResponsiveStore | None = None
        self._rank, self._ranks, self._get_pending_operations = rank, ranks, get_pending_operations
        self._is_main_thread_waiting = is_main_thread_waiting
        self._suspected_mismatch: tuple[Operation, Operation] | None = None
        self._message: str | None = None

    def restart(self) -> None:
        """Ignore earlier reports, because the positions of operations start at 0 again. All ranks must call this
        method."""
        self._generation += 1
        self._store = self._suspected_mismatch = self._message = None

    def check_usable(self) -> None:
        """Raise CollectiveMismatchError if a mismatch was found earlier. Its operations remain pending in Horovod, and
        could be executed together with later operations of other ranks."""
        if self._message is not None:
            raise CollectiveMismatchError(
                "This group cannot start operations after an earlier error, because Horovod cannot cancel operations. "
                "Call torch.distributed.destroy_process_group() and init_process_group() on every rank. The earlier "
                f"error: {self._message}"
            )

    def compare_with_rank_0(self) -> CollectiveMismatchError | None:
        """Write the pending operations of this rank to the store, and compare them with those of rank 0.

        Return an error if this rank and rank 0 wait for different operations, or if another rank has found such a
        mismatch, otherwise None. Rank 0 does not compare its operations.

        Call it repeatedly while the oldest operation is pending. A mismatch is returned only if the main threads of
        both ranks wait, because a thread that computes may start the other rank's operation later. Two consecutive
        calls must find it, because an operation may complete after rank 0 has written it.
        """
        with contextlib.suppress(RuntimeError):  # rank 0 has exited or does not respond; the watchdog reports this
            store = self._store = self._store or self._connect()
            if store.check(["error"]):
                return self._become_unusable(store.get("error").decode())
            is_waiting, own = self._is_main_thread_waiting(), self._get_pending_operations()[:_MAX_REPORTED]
            store.set(str(self._rank), json.dumps([is_waiting, own]))
            if self._rank == 0 or not own or not store.check(["0"]):
                return None
            is_rank_0_waiting, root_operations = _read_report(store, 0)
            difference = _first_difference(root_operations, own) if is_waiting and is_rank_0_waiting else None
            confirmed, self._suspected_mismatch = (
                difference is not None and difference == self._suspected_mismatch,
                difference,
            )
            if difference is not None and confirmed:
                root_operation, own_operation = difference
                message = (
                    f"Ranks called different collectives: rank {self._ranks[0]} waits for {root_operation.describe()}, "
                    f"and rank {self._ranks[self._rank]} for {own_operation.describe()} (operation "
                    f"{own_operation.position + 1} of this group). Call the same collectives in the same order, with "
                    "the same reductions, roots, dtypes and sizes, on every rank."
                )
                store.set("error", message)
                return self._become_unusable(message)
        return None

    def find_missing_ranks(self, operation: Operation) -> list[int] | None:
        """Return the other ranks of the group that have not written that they wait for `operation`. Return None if this
        cannot be determined within a few seconds.

        A rank that has started the operation in the last seconds may be included.
        """
        deadline, missing = time.monotonic() + _STORE_TIMEOUT_SECONDS, list[int]()
        with contextlib.suppress(RuntimeError):
            store = self._store = self._store or self._connect()
            for index, rank in enumerate(self._ranks):
                if time.monotonic() > deadline:
                    return None
                has_written = index == self._rank or store.check([str(index)])
                if not has_written or (index != self._rank and operation not in _read_report(store, index)[1]):
                    missing.append(rank)
            return missing
        return None

    def find_reported_mismatch(self) -> CollectiveMismatchError | None:
        """Return the mismatch that another rank has found, or None."""
        with contextlib.suppress(RuntimeError):
            store = self._store = self._store or self._connect()
            if store.check(["error"]):
                return self._become_unusable(store.get("error").decode())
        return None

    def _become_unusable(self, message: str) -> CollectiveMismatchError:
        """Return the error with `message`, and make `check_usable` raise an error from now on."""
        self._message = message
        return CollectiveMismatchError(message)

    def _connect(self) -> ResponsiveStore:
        # This is a second connection, because a store serves one call at a time, and another thread may be waiting in a
        # call.
        self._store_to_clone = self._store_to_clone or ResponsiveStore(self._group_store, _STORE_TIMEOUT_SECONDS)
        clone, self._store_to_clone = self._store_to_clone.open_connection(), None
        return ResponsiveStore(dist.PrefixStore(f"mismatches.{self._generation}", clone), _STORE_TIMEOUT_SECONDS)


def _read_report(store: ResponsiveStore, rank: int) -> tuple[bool, list[Operation]]:
    """Return whether the main thread of a rank waits, and the pending operations, as the rank has written them."""
    is_waiting, operations = json.loads(store.get(str(rank)))
    return is_waiting, [Operation(*fields) for fields in operations]


def _first_difference(
    root_operations: Sequence[Operation], own_operations: Sequence[Operation]
) -> tuple[Operation, Operation] | None:
    """Return the oldest pending operations of rank 0 and of this rank if they have the same position, and neither rank
    has started the oldest operation of the other rank. Otherwise, return None."""
    if not root_operations or not own_operations:
        return None
    root, own = root_operations[0], own_operations[0]
    if root.position != own.position:
        return None
    if any(own.matches(operation) for operation in root_operations):
        return None
    return None if any(root.matches(operation) for operation in own_operations) else (root, own)
