"""Exchange of failure, status and shutdown reports between ranks via the rendezvous store."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from unitrain.bootstrap.messages import MessageStore
from unitrain.bootstrap.responsive_store import ResponsiveStore
from unitrain.monitoring.rank_status import Failure, RankStatus
from unitrain.torch_compat import open_connection

_REQUESTS, _FAILURE, _SHUTDOWN, _PROCESS = "requests", "failure", "shutdown", "process"
_NEWS = "news"  # counter of failures and requests
# Number of calls of `has_news` after which the keys are read in any case, because any program can change the counter.
_CALLS_UNTIL_NEWS = 10
_FAILURE_STATUS, _REQUESTED_STATUS = "failure_status", "requested_status"
_STATUS_TIMEOUT_SECONDS = 3.0
_POLL_SECONDS = 0.02
# Maximum number of requests answered at a time. A limit is necessary, because any program that connects to the store
# can add requests.
_MAX_ANSWERED_REQUESTS = 100


class Shutdown(NamedTuple):
    """A rank that shut down without an error, and its `FlightRecorder.latest_numbers`, if known."""

    rank: int
    reason: str
    latest_numbers: dict[str, int] | None = None


class RankProcess(NamedTuple):
    """A process ID, and the host or container in which it is valid."""

    namespace: str
    pid: int


class FailureStore:
    """Access to the reports of all ranks.

    Each object has a separate connection to the store. Waiting for a response blocks other users of the connection, so
    a thread that must not be delayed needs a separate object. Every method raises dist.DistError if rank 0's process,
    which serves the store, has exited, or does not respond within `timeout_seconds`; a method that collects statuses
    returns the statuses received so far instead.
    """

    def __init__(self, store: dist.Store, rank: int, timeout_seconds: float) -> None:
        self._rank = rank
        self._responsive_store = ResponsiveStore(open_connection(dist.PrefixStore("failures", store)), timeout_seconds)
        self.messages = MessageStore(self._responsive_store, "failures", counters=[_REQUESTS, _NEWS])
        self._num_answered = 0
        self._latest_news, self._num_news_calls = -1, 0

    @property
    def is_responding(self) -> bool:
        """Whether the latest request was answered in time, or its late response has arrived."""
        return self._responsive_store.is_responding

    def has_news(self) -> bool:
        """Return whether a rank may have failed or requested statuses since the last call. Takes one request to the
        store, so that rank 0's process can serve thousands of ranks that poll it."""
        news = self.messages.add(_NEWS, 0)
        is_new = news != self._latest_news or self._num_news_calls % _CALLS_UNTIL_NEWS == 0
        self._latest_news, self._num_news_calls = news, self._num_news_calls + 1
        return is_new

    def report_failure(self, failure: Failure, reporter: str) -> tuple[Failure, str]:
        """Report `failure`, unless a failure has already been reported. Return the first failure and its reporter.

        `reporter` is unique among all threads of all ranks.
        """
        content = json.dumps([failure.rank, failure.error, reporter])
        rank, error, first_reporter = json.loads(self.messages.compare_set(_FAILURE, "", content))
        self.messages.add(_NEWS, 1)
        return Failure(rank, error), first_reporter

    def first_failure(self) -> Failure | None:
        """Return the first reported failure, or None if there is none."""
        if not self.messages.check([_FAILURE]):
            return None
        rank, error, _ = json.loads(self.messages.get(_FAILURE))
        return Failure(rank, error)

    def report_shutdown(self, reason: str, latest_numbers: dict[str, int]) -> None:
        """Report that this rank shuts down without an error."""
        content = json.dumps(Shutdown(self._rank, reason, latest_numbers))
        self.messages.set(f"{_SHUTDOWN}/{self._rank}", content)
        self.messages.compare_set(_SHUTDOWN, "", content)

    def first_shutdown(self) -> Shutdown | None:
        """Return the first reported shutdown, or None if there is none."""
        return Shutdown(*json.loads(self.messages.get(_SHUTDOWN))) if self.messages.check([_SHUTDOWN]) else None

    def get_shutdown(self, rank: int) -> Shutdown | None:
        """Return the shutdown of `rank`, or None if it has not shut down."""
        key = f"{_SHUTDOWN}/{rank}"
        return Shutdown(*json.loads(self.messages.get(key))) if self.messages.check([key]) else None

    def publish_process(self, process: RankProcess) -> None:
        """Publish this rank's process."""
        self.messages.set(f"{_PROCESS}/{self._rank}", json.dumps(process))

    def get_process(self, rank: int) -> RankProcess | None:
        """Return the process of `rank`, or None if `rank` has not published it."""
        key = f"{_PROCESS}/{rank}"
        return RankProcess(*json.loads(self.messages.get(key))) if self.messages.check([key]) else None

    def report_status(self, status: RankStatus) -> None:
        """Publish this rank's status after a failure."""
        self.messages.set(f"{_FAILURE_STATUS}/{self._rank}", status.to_json())

    def collect_statuses_after_failure(
        self, ranks: Sequence[int], while_waiting: Callable[[], object] | None = None
    ) -> dict[int, RankStatus]:
        """Return the statuses that `ranks` publish after a failure. Ranks that do not respond are omitted.

        `while_waiting` is called repeatedly until all ranks have responded.
        """
        return self._collect(_FAILURE_STATUS, ranks, while_waiting)

    def request_statuses(
        self, ranks: Sequence[int], while_waiting: Callable[[], object] | None = None
    ) -> dict[int, RankStatus]:
        """Request the current status of `ranks`, and return the statuses of the ranks that respond."""
        try:
            request = self.messages.add(_REQUESTS, 1)
            self.messages.add(_NEWS, 1)
        except dist.DistError:  # rank 0's process has exited or does not respond
            return {}
        return self._collect(f"{_REQUESTED_STATUS}/{request}", ranks, while_waiting)

    def answer_requests(self, get_status: Callable[[], RankStatus]) -> None:
        """Publish this rank's status for each request since the last call, but for at most the latest 100."""
        num_requests = self.messages.add(_REQUESTS, 0) if self.messages.check([_REQUESTS]) else 0
        self._num_answered = max(self._num_answered, num_requests - _MAX_ANSWERED_REQUESTS)
        while self._num_answered < num_requests:
            self._num_answered += 1
            self.messages.set(f"{_REQUESTED_STATUS}/{self._num_answered}/{self._rank}", get_status().to_json())

    def _collect(
        self, key: str, ranks: Sequence[int], while_waiting: Callable[[], object] | None
    ) -> dict[int, RankStatus]:
        deadline = time.monotonic() + _STATUS_TIMEOUT_SECONDS
        statuses: dict[int, RankStatus] = {}
        try:
            while len(statuses) < len(ranks) and time.monotonic() < deadline:
                for rank in ranks:
                    if rank not in statuses and self.messages.check([f"{key}/{rank}"]):
                        statuses[rank] = RankStatus.from_json(self.messages.get(f"{key}/{rank}"))
                if while_waiting is not None:
                    while_waiting()
                time.sleep(_POLL_SECONDS)
        except dist.DistError:  # rank 0's process has exited or does not respond: return the statuses received so far
            pass
        return statuses
