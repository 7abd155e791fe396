"""Events of a run as JSON lines: `events.jsonl` in the output folder, for monitoring systems.

Each line is one JSON object with the keys `time` (UTC, ISO 8601), `event`, `attempt` (from 1) and `step` (completed
optimizer steps), and the keys of the event:

    start        a `fit` call starts: ranks, nodes, backend, transport, device
    restart      the first `fit` call of an attempt continues a run: the keys of start, and reason, downtime_seconds
    resize       an attempt has a different number of ranks than the preceding one: ranks, previous_ranks
    checkpoint   a checkpoint has been written: path, write_seconds
    validation   a validation has finished: epochs (completed), seconds, results
    straggler    the slow ranks have changed: ranks, a list that is empty if there are none
    failure      an attempt has failed: reason. If rank 0 was killed, the next attempt writes this event
    end          a `fit` call has finished or stopped: status, reason, goodput, seconds

Within a run, lines are appended and never removed, so the steps that an attempt repeats may have several lines. A new
run in the same folder removes the file. A line that was being written when the process was killed may be incomplete.
"""

from __future__ import annotations

import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from unitrain.loggers.json_lines import append_row
from unitrain.output import get_logger

EVENTS_FILE = "events.jsonl"

_log = get_logger(__name__)


class EventLog:
    """Appends events to EVENTS_FILE in `folder`; does nothing if `folder` is None. Any thread may call `append`.

    If the file cannot be written, a warning is logged once, and the run continues.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / EVENTS_FILE
        self._lock = threading.Lock()
        self._has_failed = False
        self.attempt = 1

    def open(self, *, is_new_run: bool) -> None:
        """Remove the events of an earlier run if `is_new_run` is True. Otherwise, if an attempt was killed while it
        wrote a line, add the missing newline."""
        if self._path is None:
            return
        try:
            if is_new_run:
                self._path.unlink(missing_ok=True)
            elif self._path.is_file():
                with self._path.open("rb+") as file:
                    if file.seek(0, 2) and file.seek(-1, 2) >= 0 and file.read(1) != b"\n":
                        file.write(b"\n")
        except OSError as error:
            self._warn_once(error)

    def append(self, event: str, step: int, /, attempt: int | None = None, **values: Any) -> None:
        """Append an event of attempt number `attempt`, by default the current attempt.

        `values` are the keys of the event.
        """
        if self._path is None:
            return
        now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
        row = {"time": now, "event": event, "attempt": attempt or self.attempt, "step": step, **values}
        try:
            with self._lock:
                append_row(row, self._path)
        except OSError as error:
            self._warn_once(error)

    def _warn_once(self, error: OSError) -> None:
        if not self._has_failed:
            _log.warning("'%s' cannot be written: %s. The run continues.", self._path, error)
        self._has_failed = True
