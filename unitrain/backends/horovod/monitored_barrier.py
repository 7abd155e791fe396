"""torch.distributed.monitored_barrier over the store of a process group.

It communicates through the store instead of Horovod, so it also reports missing ranks while Horovod waits for an
operation that some ranks have not started.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

_NO_ERROR = "passed"


class MonitoredBarrier:
    """A barrier in which rank 0 reports the missing ranks."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store = dist.PrefixStore("monitored_barrier", store)
        self._rank, self._size = rank, size
        self._barrier_index = 0

    def wait(self, timeout: timedelta, wait_all_ranks: bool) -> None:
        """Block until all ranks have called this method.

        Raises DistBackendError on rank 0 if ranks are missing after `timeout`. The error names the first missing rank,
        or all missing ranks with `wait_all_ranks`. The other ranks that reached the barrier raise a DistBackendError
        that contains rank 0's error. They also raise DistBackendError if rank 0 does not report a result within twice
        the timeout plus one second.
        """
        self._barrier_index += 1
        prefix = str(self._barrier_index)
        if self._rank != 0:
            self._store.set(f"{prefix}/{self._rank}", _NO_ERROR)
            self._wait_for_rank_0(prefix, timeout)
            return
        error = self._wait_for_other_ranks(prefix, timeout, wait_all_ranks)
        self._store.set(prefix, error or _NO_ERROR)
        if error:
            raise dist.DistBackendError(error)
        if self._barrier_index > 1:  # all ranks have called `wait` again, so they have read the previous result
            self._store.delete_key(str(self._barrier_index - 1))
        for rank in range(1, self._size):
            self._store.delete_key(f"{prefix}/{rank}")

    def _wait_for_other_ranks(self, prefix: str, timeout: timedelta, wait_all_ranks: bool) -> str | None:
        """Wait until all other ranks have arrived, and return None. Return an error message if ranks are missing after
        `timeout`."""
        milliseconds = round(timeout.total_seconds() * 1000)
        deadline = time.monotonic() + timeout.total_seconds()
        if milliseconds <= 0:
            return f"Rank 0 timed out in monitoredBarrier after {milliseconds} ms. Use a longer timeout."
        missing_ranks = []
        for rank in range(1, self._size):
            remaining_time = max(timedelta(seconds=deadline - time.monotonic()), timedelta(milliseconds=1))
            try:
                self._store.wait([f"{prefix}/{rank}"], remaining_time)
            except RuntimeError:  # a FileStore does not raise DistStoreError
                missing_ranks.append(rank)
                if not wait_all_ranks:
                    break
        if not missing_ranks:
            return None
        ranks = f"Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, missing_ranks))}"
        return f"{ranks} failed to pass monitoredBarrier in {milliseconds} ms. Check what these ranks do."

    def _wait_for_rank_0(self, prefix: str, timeout: timedelta) -> None:
        # Rank 0 reports after its own timeout, which may have started later.
        limit = 2 * timeout + timedelta(seconds=1)
        try:
            self._store.wait([prefix], limit)
            error = self._store.get(prefix).decode()
        except RuntimeError:  # a FileStore does not raise DistStoreError
            error = f"rank 0 did not respond within {limit.total_seconds():g} s"
        if error != _NO_ERROR:
            raise dist.DistBackendError(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0: {error}"
            )
