"""Goodput: the fraction of a run's wall-clock time, over all attempts, spent on training steps that were not lost.

Rank 0 divides the time of an attempt into CATEGORIES, and writes the seconds of each category to `goodput.json` in the
output folder at sync points (see `stopping.RankSynchronizer`) and after validations and checkpoints, at most once per
second. If the attempt is killed, the time after its last record counts as `restart` or, while the next attempt waits
for hosts, as `hosts`. An attempt of `unitrain launch` that failed before `fit` has no record; the next attempt adds
one, with the category `startup`. The categories of all attempts therefore add up to the wall-clock time of the run.
This time begins with the first attempt, or with the wait for hosts that preceded it, and ends at the last record. This
module does not import torch, because `unitrain report` also uses it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from unitrain.output import get_logger
from unitrain.regular_files import read_regular_file, replace_file

Category = Literal[
    "training", "replayed", "data", "checkpoint", "validation", "startup", "hosts", "restart", "other"
]  # fmt: skip
CATEGORIES: dict[str, str] = {
    "training": "steps, without waiting for data",
    "replayed": "steps trained again, because they were not in a checkpoint when the run was interrupted",
    "data": "waiting for data",
    "checkpoint": "waiting for checkpoints to be copied or written",
    "validation": "validation",
    "startup": "start of the processes, imports, rendezvous, and loading of checkpoints",
    "hosts": "waiting for hosts of an elastic job",
    "restart": "from the last record of an attempt to the start of the next one",
    "other": "the rest, such as callbacks between epochs",
}
GOODPUT_FILE = "goodput.json"
Status = Literal["running", "finished", "stopped", "failed"]

_MAX_FILE_BYTES = 1 << 26
_MIN_RECORD_SECONDS = 1.0

_log = get_logger(__name__)


@dataclass(kw_only=True)
class AttemptRecord:
    """The time of one attempt. `started` and `ended` are Unix timestamps in seconds, and `seconds` maps each category
    to its seconds.

    `seconds` also contains the time between the preceding attempt and this one. `ended` is the time of the last record.
    """

    started: float
    ended: float
    first_step: int
    last_step: int
    ranks: int
    replayed_steps: int = 0
    status: Status = "running"
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GoodputSummary:
    """The times of all attempts of a run: seconds by category, and numbers of attempts, steps and replayed steps."""

    seconds: dict[str, float]
    attempts: int
    steps: int
    replayed_steps: int

    @classmethod
    def of(cls, attempts: Sequence[AttemptRecord]) -> GoodputSummary:
        """Return the summary of `attempts`, all attempts of a run: `steps` is the highest step reached; the other
        values are sums."""
        summary = cls(dict.fromkeys(CATEGORIES, 0.0), 0, 0, 0)
        for attempt in attempts:
            summary = summary.with_attempt(attempt)
        return summary

    def with_attempt(self, attempt: AttemptRecord) -> GoodputSummary:
        """Return a summary that also includes `attempt`."""
        seconds = {name: value + attempt.seconds.get(name, 0.0) for name, value in self.seconds.items()}
        replayed_steps = self.replayed_steps + attempt.replayed_steps
        return GoodputSummary(seconds, self.attempts + 1, max(self.steps, attempt.last_step), replayed_steps)

    @property
    def total_seconds(self) -> float:
        """The wall-clock time of the run."""
        return sum(self.seconds.values())

    @property
    def goodput(self) -> float:
        """The fraction of the wall-clock time in the category "training"."""
        return self.seconds["training"] / (self.total_seconds or 1.0)

    def __str__(self) -> str:
        sorted_seconds = sorted(self.seconds.items(), key=lambda item: -item[1])
        parts = [f"{name} {seconds:,.1f} s" for name, seconds in sorted_seconds if seconds >= 0.05]
        restarts = (
            "" if self.attempts < 2 else ", 1 restart" if self.attempts == 2 else f", {self.attempts - 1} restarts"
        )
        return f"goodput {100 * self.goodput:.1f} % of {self.total_seconds:,.1f} s{restarts}: {', '.join(parts)}"


@dataclass(frozen=True)
class AttemptStart:
    """The start of an attempt: the seconds since then, and the seconds for which the job waited for hosts before it."""

    age_seconds: float = 0.0
    waiting_seconds: float = 0.0


def unrecorded_attempt(
    previous: AttemptRecord | None, started: float, ended: float, waiting_seconds: float, ranks: int
) -> AttemptRecord | None:
    """Return a record for an attempt that ended without one, or None if the attempt is that of `previous` (the newest
    record) or an earlier one. `started` and `ended` are Unix timestamps in seconds, according to the supervisor.

    Before the attempt, the job waited for hosts for `waiting_seconds`. The number of ranks is that of `previous`, or
    else `ranks`.
    """
    if previous is not None and started < (previous.started + previous.ended) / 2:
        return None
    step = 0 if previous is None else previous.last_step
    seconds = {**_downtime_seconds(previous, started, waiting_seconds), "startup": ended - started}
    return AttemptRecord(
        started=started,
        ended=ended,
        first_step=step,
        last_step=step,
        ranks=ranks if previous is None else previous.ranks,
        status="failed",
        seconds={name: round(value, 3) for name, value in seconds.items()},
    )


def _downtime_seconds(previous: AttemptRecord | None, started: float, waiting_seconds: float) -> dict[str, float]:
    """Return the seconds by category between the attempt `previous` and the next one. The time after an attempt that
    finished the run is not part of the run."""
    if previous is None:
        return {"hosts": waiting_seconds}
    if previous.status == "finished":
        return {}
    gap = max(0.0, started - previous.ended)
    return {"hosts": min(gap, waiting_seconds), "restart": max(0.0, gap - waiting_seconds)}


class GoodputMeter:
    """Divides the time of one attempt of a run into CATEGORIES. Used on rank 0; other ranks need not create it.

    `begin_category` and `measure` switch the category. In the category "training", `count_steps` divides the time since
    its last call into steps, replayed steps and waiting for data, so individual steps are not timed.
    """

    def __init__(self, start: AttemptStart) -> None:
        # The thread that serves the metrics may call `seconds`.
        self._lock = threading.Lock()
        now = time.perf_counter()
        self._clock_offset = time.time() - now
        self._start, self._attempt_start_time = start, now - start.age_seconds
        self._seconds: dict[str, float] = dict.fromkeys(CATEGORIES, 0.0)
        self._category: Category = "startup"
        self._category_start_time = self._attempt_start_time
        self._counted_seconds = 0.0  # training seconds that `count_steps` has already divided
        self._step = self._max_earlier_step = 0
        self.replayed_steps = 0

    @property
    def started(self) -> float:
        """The start of the attempt, as a Unix timestamp in seconds."""
        return self._attempt_start_time + self._clock_offset

    def continue_run(self, earlier_attempts: Sequence[AttemptRecord], step: int) -> None:
        """Continue the run of `earlier_attempts` at `step`, and count the time since the last of them. A new run has no
        earlier attempts.
        """
        with self._lock:
            self._step = step
            self._max_earlier_step = max((attempt.last_step for attempt in earlier_attempts), default=0)
            previous = earlier_attempts[-1] if earlier_attempts else None
            for category, seconds in _downtime_seconds(previous, self.started, self._start.waiting_seconds).items():
                self._seconds[category] += seconds

    def begin_category(self, category: Category) -> Category:
        """Count the time from now on in `category`, and return the preceding category."""
        with self._lock:
            self._count_elapsed_time()
            previous, self._category = self._category, category
            return previous

    @contextmanager
    def measure(self, category: Category) -> Iterator[None]:
        """Context manager that adds its duration to `category`."""
        previous = self.begin_category(category)
        try:
            yield
        finally:
            self.begin_category(previous)

    def count_steps(self, step: int, data_seconds: float) -> None:
        """Divide the training time since the last call into steps, replayed steps and waiting for data. Since the last
        call, the run has reached `step` and waited for data for `data_seconds`."""
        with self._lock:
            self._count_elapsed_time()
            before, self._step = self._step, step
            pending_seconds = self._seconds["training"] - self._counted_seconds
            data_seconds = min(data_seconds, pending_seconds)
            replayed_steps = max(0, min(step, self._max_earlier_step) - before)
            trained_seconds = pending_seconds - data_seconds
            replayed_seconds = trained_seconds * replayed_steps / (step - before) if step > before else 0.0
            self.replayed_steps += replayed_steps
            self._seconds["data"] += data_seconds
            self._seconds["replayed"] += replayed_seconds
            self._counted_seconds += max(0.0, trained_seconds - replayed_seconds)
            self._seconds["training"] = self._counted_seconds

    def seconds(self) -> dict[str, float]:
        """Return the seconds by category until now. Any thread may call it."""
        with self._lock:
            self._count_elapsed_time()
            return dict(self._seconds)

    def loop_seconds(self) -> float:
        """Return the seconds in the training loop until now, excluding checkpoints and validation."""
        seconds = self.seconds()
        return seconds["training"] + seconds["replayed"] + seconds["data"]

    def attempt_record(self, first_step: int, ranks: int, status: Status) -> AttemptRecord:
        """Return the record of the attempt until now."""
        seconds = self.seconds()
        return AttemptRecord(
            started=self.started,
            ended=self._category_start_time + self._clock_offset,
            first_step=first_step,
            last_step=self._step,
            ranks=ranks,
            replayed_steps=self.replayed_steps,
            status=status,
            seconds={name: round(value, 3) for name, value in seconds.items()},
        )

    def without_pending_time(self, record: AttemptRecord) -> AttemptRecord:
        """Return a result of `attempt_record` without the training time since the last call of `count_steps`, which
        will be divided between categories. The seconds of each category therefore never decrease from one such
        record to the next."""
        return replace(record, seconds={**record.seconds, "training": round(self._counted_seconds, 3)})

    def _count_elapsed_time(self) -> None:
        now = time.perf_counter()
        self._seconds[self._category] += now - self._category_start_time
        self._category_start_time = now


class GoodputFile:
    """Reads and writes the attempts of a run in GOODPUT_FILE in `folder`; does nothing if `folder` is None.

    If the file cannot be written, a warning is logged once, and the run continues.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._next_write_at, self._has_failed = folder, 0.0, False
        self.earlier_attempts: list[AttemptRecord] = []

    def load(self) -> None:
        """Read the earlier attempts of the run. A corrupt or unreadable file is ignored with a warning."""
        if self._folder is None:
            return
        try:
            self.earlier_attempts = read_attempts(self._folder)
        except (OSError, ValueError) as error:
            _log.warning("'%s' is ignored: %s", self._folder / GOODPUT_FILE, error)

    def write(self, attempt: AttemptRecord) -> None:
        """Write the earlier attempts and `attempt`, the current one."""
        self._next_write_at = time.monotonic() + _MIN_RECORD_SECONDS
        if self._folder is None:
            return
        try:
            text = json.dumps({"attempts": [asdict(record) for record in (*self.earlier_attempts, attempt)]})
            replace_file(self._folder / GOODPUT_FILE, text)
        except OSError as error:
            if not self._has_failed:
                _log.warning("'%s' cannot be written: %s. The run continues.", self._folder / GOODPUT_FILE, error)
            self._has_failed = True

    @property
    def is_due(self) -> bool:
        """Whether the last call of `write`, if any, was more than a second ago."""
        return time.monotonic() >= self._next_write_at


def read_attempts(folder: Path) -> list[AttemptRecord]:
    """Return the attempts of the run in `folder`, oldest first; an empty list if there is no file.

    Raises OSError if the file cannot be read, and ValueError if it is corrupt.
    """
    try:
        contents = json.loads(read_regular_file(folder / GOODPUT_FILE, _MAX_FILE_BYTES))
        return [_parse_attempt(attempt) for attempt in contents["attempts"]]
    except FileNotFoundError:
        return []
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"it has an unexpected format ({type(error).__name__}: {error})") from None


def _parse_attempt(attempt_fields: Mapping[str, Any]) -> AttemptRecord:
    names = [field.name for field in fields(AttemptRecord)]
    attempt = AttemptRecord(**{name: attempt_fields[name] for name in names})
    numbers = [attempt.started, attempt.ended, attempt.last_step, attempt.replayed_steps, *attempt.seconds.values()]
    if not all(isinstance(number, int | float) for number in numbers):
        raise TypeError("a value is not a number")
    return attempt
