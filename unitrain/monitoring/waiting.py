"""Wait for other ranks, never longer than the timeout, and name the missing ranks."""

from __future__ import annotations

import os
import time
from datetime import timedelta

import torch.distributed as dist

from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import CollectiveTimeoutError
from unitrain.monitoring.flight_recorder import FlightRecorder, GradientWork, differences, not_begun
from unitrain.monitoring.rank_status import name_ranks
from unitrain.monitoring.watchdog import Watchdog

_STRAGGLER_PATIENCE = timedelta(seconds=2)
# A thread that blocks lets its core fall asleep, and waking it takes longer than a small collective: with polling, an
# exchange of 1 KB between two ranks takes 0.3 ms instead of 0.9. Longer waits block, which leaves the core to others.
_POLL_SECONDS = 0.005


class Waiting:
    """Waits for works of the group, and raises CollectiveTimeoutError for those that do not end in time."""

    def __init__(
        self, rendezvous: Rendezvous, flight_recorder: FlightRecorder, watchdog: Watchdog | None, *, polls: bool
    ) -> None:
        self._rendezvous, self._flight_recorder, self._watchdog, self._polls = (
            rendezvous,
            flight_recorder,
            watchdog,
            polls,
        )

    def wait_for_ranks(self, work: dist.Work | None, *, polls: bool | None = None) -> None:
        """Wait for `work`, which belongs to the ledger's latest entry; under NCCL, let the stream wait for it.

        With `polls`, by default that of the constructor, the thread polls for a few milliseconds before it blocks,
        which only works of CPU tensors allow.
        """
        if work is None:
            return
        try:
            if self._polls if polls is None else polls:
                _poll(work)
            work.wait()
        except (RuntimeError, CollectiveTimeoutError) as error:
            if "imed out" not in str(error) and "imeout" not in str(error):
                if self._watchdog is not None and (cause := self._watchdog.cause_of(error)) is not None:
                    raise cause from error
                raise
            raise CollectiveTimeoutError(self.who_is_missing()) from None  # the transport names no rank

    def who_is_missing(self, work: GradientWork | None = None) -> str:
        """Ask over the store, which works while the group is stuck, who waits in the same collective or backward.

        That is the latest one, or `work`, where the host has begun more since then.
        """
        point = self._flight_recorder.meeting_point if work is None else work.key
        key, rank = f"stuck/{point}", self._rendezvous.rank_info.rank
        seconds = self._rendezvous.timeout.total_seconds()
        told = (
            f"Rank {rank} {self._flight_recorder.sentence if work is None else work} and waited {seconds:g} s in vain"
        )
        try:
            self._rendezvous.post(key)
            missing = self._rendezvous.wait_for(key, _STRAGGLER_PATIENCE)
        except RuntimeError:  # the store went with rank 0's process
            return f"{told}: rank 0 is gone. Look at the first error that rank 0 logged."
        answers = self._watchdog.ask(missing) if self._watchdog is not None and missing else {}
        missing = not_begun(work, missing, {rank: answer.flight_recorder for rank, answer in answers.items()})
        names = ", ".join(map(str, missing)) or "none, all came but too late"
        advice = "Look at what those ranks do"
        if loading := [one for one, answer in answers.items() if answer.loads_data]:
            advice = f"{name_ranks(loading).capitalize()} waits for data: look at its dataset"
        ledgers = {
            rank: self._flight_recorder.lines(),
            **{one: answer.flight_recorder for one, answer in answers.items()},
        }
        return "\n".join(
            [
                f"{told}; ranks that have not come: {names}. "
                f"{advice}, or allow more time: unitrain.init(timeout_seconds=...).",
                *(f"Rank {one} {answer.doing}" for one, answer in answers.items()),
                *differences(ledgers),
            ]
        )


def _poll(work: dist.Work) -> None:
    """Return when `work` has ended, or after a few milliseconds."""
    # Works written in Python poll in their own `wait`.
    if type(work) is not dist.Work or work.is_completed():
        return
    deadline = time.monotonic() + _POLL_SECONDS
    while not work.is_completed() and time.monotonic() < deadline:
        os.sched_yield()
