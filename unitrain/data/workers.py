"""What the workers of a DataLoader do before they begin, and how they report what they are doing."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import torch
from torch import Tensor

from unitrain.monitoring.stack_inspection import call_site
from unitrain.processes import end_with_parent

# What schedulers send to every process of a job before they take its machine.
_NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
_EXIT_SECONDS, _EXIT_INTERVAL_SECONDS = 5.0, 0.1
_REPORT_SECONDS = 1.0
_REPORT_BYTES = 512


@dataclass(frozen=True)
class WorkerInit:
    """A `worker_init_fn`: leaves what a scheduler sends to the whole job to the rank, then calls the user's own.

    Without it such a signal would end the workers, and with them the epoch, before the ranks have agreed on a step to
    stop at. A second SIGTERM ends a worker: the rank sends them to workers that are stuck.

    A worker ends with its rank, however that ends. A thread in each of `workers` workers reports what the worker is
    doing once a second, for the message about a rank that waits for a batch.
    """

    own: Callable[[int], None] | None = None
    workers: int = 0
    _reports: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        reports = torch.zeros(self.workers, _REPORT_BYTES, dtype=torch.uint8)
        object.__setattr__(self, "_reports", reports.share_memory_() if self.workers else reports)
        _end_workers_at_exit()

    def __call__(self, worker: int) -> None:
        end_with_parent()
        for notice in _NOTICES:
            if signal.getsignal(notice) == signal.SIG_DFL:
                signal.signal(notice, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _first_notice)
        if worker < self.workers:
            report = self._reports[worker]
            report.zero_()
            threading.Thread(target=_report, args=(report,), name="unitrain worker report", daemon=True).start()
        if self.own is not None:
            self.own(worker)

    def doing(self, worker: int) -> str:
        """Return what `worker` was doing at most a second ago, as the rest of "worker 1 ..."; "" if that is unknown."""
        if worker >= self.workers:
            return ""
        return bytes(self._reports[worker].tolist()).rstrip(b"\0").decode(errors="replace")


def _report(report: Tensor) -> None:
    """Write what this worker is doing into `report`, again and again."""
    since: tuple[int, str, float] | None = None
    while True:
        since, text = _doing(since)
        content = text.encode()[:_REPORT_BYTES].ljust(_REPORT_BYTES, b"\0")
        report.copy_(torch.tensor(list(content), dtype=torch.uint8))
        time.sleep(_REPORT_SECONDS)


def _doing(since: tuple[int, str, float] | None) -> tuple[tuple[int, str, float] | None, str]:
    """Return what this worker loads, in which call and since when, and that in words; `since` is the result before."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    fetched = None if frame is None else _fetched(frame)
    if frame is None or fetched is None:
        return None, ""
    call, what = id(fetched[0]), fetched[1]
    if since is None or since[:2] != (call, what):
        since = call, what, time.monotonic()
    return since, f"has been loading {what} for {time.monotonic() - since[2]:.0f} s ({call_site(frame)})"


def _fetched(frame: FrameType) -> tuple[FrameType, str] | None:
    """Return the frame in which the worker fetches a batch, and what it fetches; None if it does not."""
    inner: FrameType | None = None
    current: FrameType | None = frame
    while current is not None:
        code = current.f_code
        if code.co_name == "fetch" and code.co_filename.endswith("torch/utils/data/_utils/fetch.py"):
            listed = inner if inner is not None and inner.f_code.co_name == "<listcomp>" else current
            if (item := listed.f_locals.get("idx")) is not None:
                return current, f"item {item}"
            items = current.f_locals.get("possibly_batched_index")
            if isinstance(items, list) and any(one is not None for one in items):
                return current, f"a batch of items {', '.join(map(str, items[:8]))}{', ...' * (len(items) > 8)}"
            return current, "the next batch"
        inner, current = current, current.f_back
    return None


def _first_notice(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)


@functools.cache
def _end_workers_at_exit() -> None:
    atexit.register(_end_workers)


def _end_workers() -> None:
    """Send SIGTERM to the daemon processes of this one until they have ended, and SIGKILL after a while.

    At exit, multiprocessing sends it once and then waits without a limit, which is too little for a worker. One that
    hangs in C code does not handle it at all.
    """
    # torch's handler raises an error in this process when a worker ends by a signal.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    deadline = time.monotonic() + _EXIT_SECONDS
    while time.monotonic() < deadline:
        living = [process for process in multiprocessing.active_children() if process.daemon]
        if not living:
            return
        for process in living:
            process.terminate()
        time.sleep(_EXIT_INTERVAL_SECONDS)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
