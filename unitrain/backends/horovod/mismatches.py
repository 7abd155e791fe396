"""Detection of ranks that wait for different operations of one process group.

Horovod executes an operation when all ranks have started it under the same name, which contains the dtype and the
number of elements. If ranks pass tensors of different sizes or call different collectives, every rank waits for an
operation that the others never start. Without this module, such a mismatch would be reported as a timeout.

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

    `position` is its index in the sequence of the rank's operations. `kind` must be equal on all ranks, such as
    "allreduce.torch.float32.5", which ends with the number of elements, or with the number of bytes per row for
    operations on rows.
    """

    position: int
    kind: str

    def describe(self) -> str:
        operation, _, dtype, size = self.kind.split(".")
        if operation in _OPERATIONS_ON_ROWS:
            return f"{operation} with {int(size):,} bytes per row"
        return f"{operation} of {int(size):,} {'bytes' if dtype == 'uint8' else f'{dtype} elements'}"


class MismatchDetector:
    """Compares the pending operations of this rank with those of rank 0."""

    def __init__(self, store: dist.Store, rank: int, pending: Callable[[], Sequence[Operation]]) -> None:
        self._group_store, self._generation = store, 0
        self._cloning: ResponsiveStore | None = None  # `store`, until it is cloned
        self._store: ResponsiveStore | None = None
        self._rank, self._pending = rank, pending
        self._suspected_mismatch: tuple[Operation, Operation] | None = None

    def restart(self) -> None:
        """Ignore earlier reports, because the positions of operations start at 0 again. All ranks call it."""
        self._generation += 1
        self._store = self._suspected_mismatch = None

    def find(self) -> CollectiveMismatchError | None:
        """Return an error if this rank and rank 0 wait for different operations, or if another rank has found such a
        mismatch, otherwise None. Rank 0 does not compare operations, but writes its pending operations to the store.

        Call it repeatedly while the oldest operation is pending. A mismatch is returned only if two consecutive calls
        find it, because an operation may complete after rank 0 has written it.
        """
        with contextlib.suppress(RuntimeError):  # rank 0 has exited or does not respond; the watchdog reports this
            if self._store is None:
                # This is a second connection, because a store serves one call at a time, and another thread may be
                # waiting in a call.
                self._cloning = self._cloning or ResponsiveStore(self._group_store, _STORE_TIMEOUT_SECONDS)
                clone, self._cloning = self._cloning.clone(), None
                prefix = f"mismatches.{self._generation}"
                self._store = ResponsiveStore(dist.PrefixStore(prefix, clone), _STORE_TIMEOUT_SECONDS)
            if self._store.check(["error"]):
                return CollectiveMismatchError(self._store.get("error").decode())
            own = self._pending()[:_MAX_REPORTED]
            if self._rank == 0:
                self._store.set("0", json.dumps(own))
                return None
            if not own or not self._store.check(["0"]):
                return None
            difference = _first_difference([Operation(*fields) for fields in json.loads(self._store.get("0"))], own)
            confirmed, self._suspected_mismatch = (
                difference is not None and difference == self._suspected_mismatch,
                difference,
            )
            if difference is not None and confirmed:
                message = (
                    f"Ranks called different collectives: rank 0 waits for {difference[0].describe()}, and rank "
                    f"{self._rank} for {difference[1].describe()} (operation {difference[1].position + 1} of this "
                    "group). Call the same collectives in the same order, with tensors of the same dtype and size, on "
                    "every rank."
                )
                self._store.set("error", message)
                return CollectiveMismatchError(message)
        return None


def _first_difference(root: Sequence[Operation], own: Sequence[Operation]) -> tuple[Operation, Operation] | None:
    """Return the oldest pending operations of two ranks if they are in the same position, and neither rank has started
    the other's operation."""
    if not root or not own or root[0].position != own[0].position:
        return None
    if own[0].kind in {operation.kind for operation in root} or root[0].kind in {operation.kind for operation in own}:
        return None
    return root[0], own[0]
