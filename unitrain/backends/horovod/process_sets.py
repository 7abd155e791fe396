"""Horovod process sets that are created and removed at run time by calls of their members alone.

In unpatched Horovod, all ranks must call `hvd.add_process_set`, and HOROVOD_DYNAMIC_PROCESS_SETS=1 adds an allgather to
every cycle of the background thread. With the patch `process-sets` of unitrain's Horovod, the ranks exchange requests
for process sets only in a cycle in which a rank has a new request. Ranks that are not members take part in this
exchange in Horovod's background thread.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import horovod.torch as hvd
import torch.distributed as dist
from horovod.torch.mpi_ops import _basics

from unitrain.backends.horovod.work import GroupTimeoutError
from unitrain.errors import UnsupportedError

_PENDING = -7  # HOROVOD_PROCESS_SET_PENDING of the patch
_POLL_SECONDS = 0.0005
_RELEASE_TIMEOUT_SECONDS = 5.0  # a release waits while another process set is created
_library: Any = _basics.MPI_LIB_CTYPES
_num_uses: Counter[tuple[int, ...]] = Counter()  # number of open process groups of each process set
_lock = threading.Lock()


def join_process_set(store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> hvd.ProcessSet:
    """Return the process set of a new group of the global `ranks`, in ascending order.

    All members of the group must call this function. The members share `store`, and `rank` is this rank's position in
    the group. Raises the errors of `add_process_set`.
    """
    store.set(f"joined/{rank}", "")

    def find_missing_ranks() -> list[int]:
        return [member for position, member in enumerate(ranks) if not store.check([f"joined/{position}"])]

    try:
        return add_process_set(ranks, timeout, find_missing_ranks)
    except BaseException:
        store.delete_key(f"joined/{rank}")  # the next group of these ranks uses the same store
        raise


def add_process_set(
    ranks: Sequence[int], timeout: timedelta, find_missing_ranks: Callable[[], Sequence[int]]
) -> hvd.ProcessSet:
    """Return the process set of the global `ranks`, in ascending order. These ranks must call this function, and no
    other ranks.

    Calls with the same ranks refer to the same process set. Raises UnsupportedError if the installed Horovod lacks the
    patch, RuntimeError if Horovod has been shut down, and GroupTimeoutError after `timeout`. The message of
    GroupTimeoutError contains the ranks that `find_missing_ranks` returns.
    """
    if len(ranks) == hvd.size():
        return hvd.global_process_set
    check_subgroup_support(ranks)
    key = tuple(ranks)
    with _lock:
        _num_uses[key] += 1
    deadline = time.monotonic() + timeout.total_seconds()
    process_set_id = _PENDING
    try:
        while (process_set_id := _library.horovod_request_process_set(_as_array(ranks), len(ranks))) == _PENDING:
            if time.monotonic() > deadline:
                raise GroupTimeoutError(_describe_timeout(ranks, timeout, find_missing_ranks()))
            time.sleep(_POLL_SECONDS)
        if process_set_id < 0:
            raise RuntimeError(
                f"Horovod could not create a group of the ranks {list(ranks)}, because it has been shut down. "
                "Check whether a rank has failed or called hvd.shutdown()."
            )
    except BaseException:
        release_process_set(ranks)
        raise
    process_set = hvd.ProcessSet(list(ranks))
    process_set.process_set_id = process_set_id
    return process_set


def release_process_set(ranks: Sequence[int]) -> None:
    """Release one use of the process set of `ranks`. Call this once per successful call of `add_process_set`.

    Horovod removes the process set when all its members have released it. This function does not wait for them, but it
    waits for a limited time while another process set is created. After Horovod has been shut down, which removes all
    process sets, this function does not access Horovod.
    """
    if not hvd.is_initialized():
        forget_process_sets()
        return
    key = tuple(ranks)
    with _lock:
        if key not in _num_uses:  # the global process set, or one that Horovod removed when it was shut down
            return
        _num_uses[key] -= 1
        if _num_uses[key] > 0:
            return
        del _num_uses[key]
        deadline = time.monotonic() + _RELEASE_TIMEOUT_SECONDS
        while (
            _library.horovod_release_process_set(_as_array(ranks), len(ranks)) == _PENDING
            and time.monotonic() < deadline
        ):
            time.sleep(_POLL_SECONDS)


def forget_process_sets() -> None:
    """Forget all process sets, after Horovod has been shut down."""
    with _lock:
        _num_uses.clear()


def check_subgroup_support(ranks: Sequence[int]) -> None:
    """Raise UnsupportedError, which mentions `ranks`, if the installed Horovod supports groups of all ranks only."""
    if not hasattr(_library, "horovod_request_process_set"):
        raise UnsupportedError(
            f"A group of the ranks {list(ranks)} was requested, but the installed Horovod supports groups of all "
            "ranks only. Build it with unitrain's patches: unitrain horovod build --force"
        )


def _as_array(ranks: Sequence[int]) -> Any:
    return (ctypes.c_int * len(ranks))(*ranks)


def _describe_timeout(ranks: Sequence[int], timeout: timedelta, missing_ranks: Sequence[int]) -> str:
    names = f"{'rank' if len(missing_ranks) == 1 else 'ranks'} {', '.join(map(str, missing_ranks))}"
    cause = f"Missing: {names}." if missing_ranks else "All of them have called new_group."
    return (
        f"The creation of a group of the ranks {list(ranks)} timed out after {timeout.total_seconds():g} s. {cause} "
        "Every rank of the group must call new_group, and all ranks must create their groups in the same order. Check "
        "the first error in the logs of the ranks."
    )
