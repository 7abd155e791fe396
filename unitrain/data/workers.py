"""DataLoader workers: signal handling, termination when their rank terminates, and activity reports. Also closes
iterators over data when the interpreter exits."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from unitrain.monitoring.stack_inspection import call_site
from unitrain.processes import preemption_signals, terminate_with_parent
from unitrain.threads import start_thread

_EXIT_TIMEOUT_SECONDS, _EXIT_INTERVAL_SECONDS = 5.0, 0.1
_REPORT_INTERVAL_SECONDS = 1.0
_REPORT_BYTES = 512

ItemT = TypeVar("ItemT")
_generators: weakref.WeakSet[Generator[Any]] = weakref.WeakSet()


def close_at_exit(generator: Generator[ItemT]) -> Generator[ItemT]:
    """Return `generator`, and close it when the interpreter exits. Otherwise, its `finally` block would run when the
    interpreter has already deleted the functions that it calls."""
    _generators.add(generator)
    return generator


# Registered when this module is imported, so that `_terminate_workers`, which is registered later, runs before it.
@atexit.register
def _close_generators() -> None:
    for generator in list(_generators):
        with suppress(ValueError):  # another thread executes the generator
            generator.close()


@dataclass(frozen=True)
class WorkerInit:
    """A `worker_init_fn` that makes the worker ignore a scheduler's signals, which the rank handles, and then calls the
    user's function.

    Schedulers send signals to every process of a job. If a worker terminated immediately, the rank could not continue
    to the step at which all ranks stop. A second SIGTERM terminates the worker, so that the rank can terminate hung
    workers.

    A worker also terminates when its rank terminates for any reason. In each of the `num_workers` workers, a thread
    reports the worker's activity once per second. If a rank times out while waiting for a batch, the error message
    contains this activity.
    """

    user_init: Callable[[int], None] | None = None
    num_workers: int = 0
    _reports: Tensor = field(init=False, repr=False, compare=False)
    _signals: frozenset[signal.Signals] = field(init=False, repr=False, compare=False, default=frozenset())

    def __post_init__(self) -> None:
        reports = torch.zeros(self.num_workers, _REPORT_BYTES, dtype=torch.uint8, device="cpu")
        object.__setattr__(self, "_reports", reports.share_memory_() if self.num_workers else reports)
        _terminate_workers_at_exit()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker, which does not inherit the signals that this process handles."""
        return {**vars(self), "_signals": frozenset(preemption_signals)}

    def __call__(self, worker: int) -> None:
        terminate_with_parent()
        for signum in self._signals | preemption_signals:
            if signal.getsignal(signum) == signal.SIG_DFL:
                signal.signal(signum, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _ignore_first_signal)
        if worker < self.num_workers:
            report = self._reports[worker]
            report.zero_()
            start_thread(_write_reports, report, name="unitrain worker report", restarts=True)
        if self.user_init is not None:
            self.user_init(worker)

    def describe_activity(self, worker: int) -> str:
        """Return the activity of `worker` as the predicate of a sentence, or "" if it is unknown. The activity is at
        most about one second old, unless code in the worker holds the GIL for longer."""
        if worker >= self.num_workers:
            return ""
        return bytes(self._reports[worker].tolist()).rstrip(b"\0").decode(errors="replace")


def _write_reports(report: Tensor) -> None:
    """Write this worker's activity into `report` once per second."""
    fetch: _Fetch | None = None
    while True:
        fetch, text = _describe_activity(fetch)
        content = text.encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES, b"\0")
        report.copy_(torch.tensor(list(content), dtype=torch.uint8, device="cpu"))
        time.sleep(_REPORT_INTERVAL_SECONDS)


class _Fetch(NamedTuple):
    """A fetch of a batch that is in progress: the ID of its frame, a description of the items, and the start time."""

    frame_id: int
    items: str
    start_time: float


def _describe_activity(previous: _Fetch | None) -> tuple[_Fetch | None, str]:
    """Return this worker's current fetch, and a description of it; (None, "") if the worker is not fetching.

    `previous` is the fetch that the preceding call returned. If it is still in progress, its start time is kept.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    found = None if frame is None else _find_fetch(frame)
    if frame is None or found is None:
        return None, ""
    fetch_frame, items = found
    fetch = previous
    if fetch is None or (fetch.frame_id, fetch.items) != (id(fetch_frame), items):
        fetch = _Fetch(id(fetch_frame), items, time.monotonic())
    return fetch, f"has been loading {items} for {time.monotonic() - fetch.start_time:.0f} s ({call_site(frame)})"


def _find_fetch(frame: FrameType) -> tuple[FrameType, str] | None:
    """Return the frame that fetches a batch, and a description of the items; None if the worker is not fetching."""
    inner: FrameType | None = None
    current: FrameType | None = frame
    while current is not None:
        code = current.f_code
        if code.co_name == "fetch" and code.co_filename.endswith("torch/utils/data/_utils/fetch.py"):
            comprehension_frame = inner if inner is not None and inner.f_code.co_name == "<listcomp>" else current
            if (item := comprehension_frame.f_locals.get("idx")) is not None:
                return current, f"item {item}"
            items = current.f_locals.get("possibly_batched_index")
            if isinstance(items, list) and any(item is not None for item in items):
                return current, f"a batch of items {', '.join(map(str, items[:8]))}{', ...' * (len(items) > 8)}"
            return current, "the next batch"
        inner, current = current, current.f_back
    return None


def _ignore_first_signal(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)


@functools.cache
def _terminate_workers_at_exit() -> None:
    atexit.register(_terminate_workers)


def _terminate_workers() -> None:
    """Send SIGTERM to the daemon child processes until they have terminated, and SIGKILL after five seconds.

    multiprocessing sends SIGTERM once at exit and then waits without a timeout. The first SIGTERM does not terminate a
    worker, and a worker that hangs in C code does not handle signals.
    """
    # torch's handler raises an error in this process if a signal terminates a worker.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    deadline = time.monotonic() + _EXIT_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        running_workers = [process for process in multiprocessing.active_children() if process.daemon]
        if not running_workers:
            return
        for process in running_workers:
            process.terminate()
        time.sleep(_EXIT_INTERVAL_SECONDS)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
