"""Evidence of the causes of slow ranks, read on each rank at the sync points (the periodic exchanges of
`stopping.RankSynchronizer`)."""

from __future__ import annotations

import math
import socket
import time
from typing import NamedTuple

from unitrain.progress import slow_causes
from unitrain.progress.cpu_evidence import CpuReader, CpuSeconds, ProcessTimes
from unitrain.progress.network_evidence import ConnectionCounters, ConnectionReader
from unitrain.progress.slow_causes import RankFigures
from unitrain.progress.stragglers import (
    EVIDENCE,
    TRAINING,
    RankBaseline,
    Straggler,
    is_observation_ending,
    pack_evidence,
)
from unitrain.progress.timing import LoopTimer

# Minimum intervals between two readings. A reading takes about 0.2 ms, so it is skipped at sync points that follow the
# last reading closely. The second interval applies at the end of an observation, so that the evidence covers the whole
# observation.
_INTERVAL_SECONDS, _INTERVAL_SECONDS_AT_END = 1.0, 0.1


class RankDetails(NamedTuple):
    """The host of a rank, and the evidence of a cause as text."""

    host: str
    evidence_text: str


class RankEvidence:
    """Collects the evidence of this rank since the last observation of the StragglerDetector, and this rank's figures
    in earlier observations. Does not communicate.
    """

    def __init__(self, timer: LoopTimer) -> None:
        self._timer = timer
        self._cpu, self._connections = CpuReader(), ConnectionReader()
        self._baseline = RankBaseline()
        self._processes: ProcessTimes | None = None
        self._slowest_connection: ConnectionCounters | None = None
        self._figures = RankFigures()
        self._phase_seconds, self._evidence_seconds = [0.0] * len(TRAINING), dict.fromkeys(EVIDENCE, 0.0)
        self._elapsed_seconds = 0.0
        # Since the last reading.
        self._unexplained_seconds = self._copy_seconds = 0.0
        self._last_reading_time = -math.inf

    def start(self) -> None:
        """Ignore the time before this call, such as the time of a validation. If the last reading is recent, the
        counters are not read again, because the ignored time is short."""
        if self._is_reading_due():
            self._read_counters()
        self._unexplained_seconds = self._copy_seconds = 0.0

    def take_recent_measurements(self) -> tuple[list[float], int, list[float]]:
        """Return this rank's seconds per phase of TRAINING and its number of steps since the last call, and its row of
        evidence for `find_stragglers` since the last observation.

        The seconds are those of `LoopTimer.take_recent_seconds`. Except for `data`, they are extrapolated from a few
        steps, so they do not include stalls in other steps. Stalls that a CPU quota explains are added to `compute`,
        and stalls that copies explain are added to `data`.
        """
        seconds, steps = self._timer.take_recent_seconds()
        recent = self._timer.recent
        self._evidence_seconds["forward"] += recent.forward
        self._evidence_seconds["copy"] += recent.copy
        self._unexplained_seconds += recent.unexplained
        self._copy_seconds += recent.copy
        self._elapsed_seconds += recent.elapsed
        if self._is_reading_due(self._elapsed_seconds):
            cpu_seconds = self._read_counters()
            self._evidence_seconds["cpu_wait"] += max(0.0, cpu_seconds.run_queue - cpu_seconds.throttled)
            self._evidence_seconds["worker_wait"] += max(0.0, cpu_seconds.worker_run_queue - cpu_seconds.throttled)
            self._evidence_seconds["throttled"] += cpu_seconds.throttled
            self._evidence_seconds["cpu"] += cpu_seconds.used
            self._evidence_seconds["network"] += (
                0.0 if self._slowest_connection is None else self._slowest_connection.network_limited_seconds
            )
            stalled = min(self._unexplained_seconds, cpu_seconds.throttled)
            copied = min(self._unexplained_seconds - stalled, self._copy_seconds)
            seconds[TRAINING.index("compute")] += stalled
            seconds[TRAINING.index("data")] += copied
            self._unexplained_seconds = self._copy_seconds = 0.0
        self._phase_seconds = [earlier + added for earlier, added in zip(self._phase_seconds, seconds, strict=True)]
        return seconds, steps, pack_evidence(self._evidence_seconds, self._baseline.median())

    def discard(self) -> None:
        """Discard the evidence since the last observation."""
        self._phase_seconds, self._evidence_seconds = [0.0] * len(TRAINING), dict.fromkeys(EVIDENCE, 0.0)
        self._elapsed_seconds = 0.0

    def end_observation(self, steps: int, *, is_any_suspected: bool, is_suspected: bool) -> None:
        """Store the figures of an observation of `steps` steps, for comparison with later observations.

        `is_any_suspected` states whether any rank is suspected to be slow, and `is_suspected` whether this rank is
        suspected.
        """
        seconds = (*self._phase_seconds, *self._evidence_seconds.values())
        self._figures = RankFigures(*(value / steps for value in seconds))
        self._baseline.add(self._figures, is_any_rank_slow=is_any_suspected)
        self.discard()
        if not is_suspected:
            self._processes = None
        elif self._processes is None:
            self._processes = ProcessTimes.read()

    def describe(self, straggler: Straggler) -> RankDetails:
        """Return this rank's host, and its evidence for the cause of `straggler`, a report about this rank."""
        figures, cause = self._figures, straggler.cause or ""
        step_seconds = figures.work + figures.wait
        parts = [slow_causes.describe_figures(cause, figures, step_seconds)]
        if cause == "cpu_quota" and (cores := self._cpu.quota_cores()) is not None:
            parts.append(f"the quota is {cores:g} cores")
        if cause == "other_processes" and self._processes is not None:
            parts.append(ProcessTimes.read().describe_since(self._processes))
        if cause == "network" and self._slowest_connection is not None:
            parts.append(str(self._slowest_connection))
        return RankDetails(socket.gethostname(), "; ".join(filter(None, parts)))

    def _is_reading_due(self, elapsed_seconds: float = 0.0) -> bool:
        # The phases of every rank are at most as long as the steps took, which all ranks complete together. So the
        # elapsed time of this rank shows whether the observation ends, although the phases of another rank end it.
        interval = _INTERVAL_SECONDS_AT_END if is_observation_ending(elapsed_seconds) else _INTERVAL_SECONDS
        return time.perf_counter() - self._last_reading_time >= interval

    def _read_counters(self) -> CpuSeconds:
        self._last_reading_time = time.perf_counter()
        self._slowest_connection = self._connections.read()
        return self._cpu.read()
