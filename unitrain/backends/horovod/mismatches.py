"""Detection of ranks that wait for different operations of one process group.

Horovod executes an operation when all ranks have started it under the same name, which contains the dtype, the
number of elements, and the reduction or root. If these differ, or if ranks call different collectives, every rank waits
for an operation that the others never start. Without this module, such a mismatch would be reported as a timeout.

A rank that has waited for some seconds compares its pending operations with those of rank 0, which also writes its
pending operations to the group's store when it waits. Steps without long waits write nothing.
"""

from __future__ import annotations

import contextlib
import json
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
        """Return whether Horovod executes both operations as one, apart from their positions."""
        return self[1:] == other[1:]


class MismatchDetector:
    """Compares the pending operations of this rank with those of rank 0."""

    def __init__(self, store: dist.Store, rank: int, get_pending_operations: Callable[[], Sequence[Operation]]) -> None:
        self._group_store, self._generation = store, 0
        self._cloning: ResponsiveStore | None = None  # `store`, until it is cloned
        self._store: ResponsiveStore | None = None
        self._rank, self._get_pending_operations = rank, get_pending_operations
        self._suspected_mismatch: tuple[Operation, Operation] | None = None
        self._message: str | None = None

    def restart(self) -> None:
        """Ignore earlier reports, because the positions of operations start at 0 again. All ranks call it."""
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

    def find(self) -> CollectiveMismatchError | None:
        """Return an error if this rank and rank 0 wait for different operations, or if another rank has found such a
        mismatch, otherwise None. Rank 0 does not compare operations, but writes its pending operations to the store.

        Call it repeatedly while the oldest operation is pending. A mismatch is returned only if two consecutive calls
        find it, because an operation may complete after rank 0 has written it.
        """
        with contextlib.suppress(RuntimeError):  # rank 0 has exited or does not respond; the watchdog reports this
            store = self._store = self._store or self._connect()
            if store.check(["error"]):
                return self._become_unusable(store.get("error").decode())
            own = self._get_pending_operations()[:_MAX_REPORTED]
            if self._rank == 0:
                store.set("0", json.dumps(own))
                return None
            if not own or not store.check(["0"]):
                return None
            difference = _first_difference([Operation(*fields) for fields in json.loads(store.get("0"))], own)
            confirmed, self._suspected_mismatch = (
                difference is not None and difference == self._suspected_mismatch,
                difference,
            )
            if difference is not None and confirmed:
                message = (
                    f"Ranks called different collectives: rank 0 waits for {difference[0].describe()}, and rank "
                    f"{self._rank} for {difference[1].describe()} (operation {difference[1].position + 1} of this "
                    "group). Call the same collectives in the same order, with the same reductions, roots, dtypes and "
                    "sizes, on every rank."
                )
                store.set("error", message)
                return self._become_unusable(message)
        return None

    def find_reported(self) -> CollectiveMismatchError | None:
        """Return the mismatch that another rank has found, or None."""
        with contextlib.suppress(RuntimeError):
            store = self._store = self._store or self._connect()
            if store.check(["error"]):
                return self._become_unusable(store.get("error").decode())
        return None

    def _become_unusable(self, message: str) -> CollectiveMismatchError:
        """Return the error, which `check_usable` will also raise."""
        self._message = message
        return CollectiveMismatchError(message)

    def _connect(self) -> ResponsiveStore:
        # This is a second connection, because a store serves one call at a time, and another thread may be waiting in a
        # call.
        self._cloning = self._cloning or ResponsiveStore(self._group_store, _STORE_TIMEOUT_SECONDS)
        clone, self._cloning = self._cloning.clone(), None
        return ResponsiveStore(dist.PrefixStore(f"mismatches.{self._generation}", clone), _STORE_TIMEOUT_SECONDS)


def _first_difference(root: Sequence[Operation], own: Sequence[Operation]) -> tuple[Operation, Operation] | None:
    """Return the oldest pending operations of two ranks if they are in the same position, and neither rank has started
    the other's operation."""
    if not root or not own or root[0].position != own[0].position:
        return None
    if any(own[0].matches(operation) for operation in root) or any(root[0].matches(operation) for operation in own):
        return None
    return root[0], own[0]
