"""RunMetrics: throughput, MFU, memory and goodput of a run, its events, and the endpoint for Prometheus."""

from __future__ import annotations

import math
import mmap
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from unitrain.backends.base import Backend
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.bootstrap import environment
from unitrain.config import TrainConfig
from unitrain.errors import ConfigError, Preempted
from unitrain.monitoring import supervisor_client
from unitrain.processes import process_age_seconds
from unitrain.progress.events import EventLog
from unitrain.progress.flops import FlopsMeasurement, device_peak_flops
from unitrain.progress.goodput import (
    AttemptRecord,
    AttemptStart,
    Category,
    GoodputFile,
    GoodputMeter,
    GoodputSummary,
    Status,
    unrecorded_attempt,
)
from unitrain.progress.prometheus import MetricsEndpoint, RunValues, open_endpoint
from unitrain.progress.reporter import RunReporter
from unitrain.progress.stopping import RankSynchronizer
from unitrain.progress.timing import LoopTimer
from unitrain.progress.training_progress import TrainingProgress

# The interval between two measurements of the memory of this rank, and the relative change above which the memory of
# all ranks is recorded again.
_MEMORY_INTERVAL_SECONDS = 1.0
_MIN_MEMORY_CHANGE = 0.01
_STATM = Path("/proc/self/statm")

_is_first_in_process = True


class RunMetrics:
    """Measures a run at its sync points (see `stopping.RankSynchronizer`), and passes the metrics to the history, the
    loggers and the endpoint.

    All ranks create it and make the same calls. Only rank 0 writes, and only the constructor communicates. The metrics
    describe rank 0, except the metrics of all ranks that `update_at_sync_point` receives. `flops` counts the FLOPs of a
    micro-batch on rank 0, if the peak FLOP/s are known and the model is not compiled. If `has_endpoint` is False, no
    endpoint is opened. Raises ConfigError or MissingDependencyError on every rank if the endpoint cannot be opened.
    """

    def __init__(
        self,
        config: TrainConfig,
        backend: Backend,
        model: nn.Module,
        reporter: RunReporter,
        timer: LoopTimer,
        *,
        has_endpoint: bool,
    ) -> None:
        self._backend, self._reporter, self._timer = backend, reporter, timer
        self.progress = TrainingProgress()
        """The progress of the run. Set it before `report_fit`."""
        self._is_rank_zero = backend.rank == 0
        folder = None if config.output_dir is None or not self._is_rank_zero else Path(config.output_dir)
        self._has_folder = folder is not None
        info = supervisor_client.wait_for_attempt_info() if self._is_rank_zero else None
        self._restart_reason = None if info is None else info.reason
        is_first, start = _attempt_start(info)
        self._goodput = GoodputMeter(start)
        # Without an output folder, an attempt does not continue an earlier one.
        self._earlier_attempts = info.earlier_attempts if info is not None and is_first and folder is not None else ()
        self._goodput_file, self._events = GoodputFile(folder), EventLog(folder)
        self._peak_flops = device_peak_flops(backend.device, model, config) if self._is_rank_zero else None
        # While torch's FLOP counter is active, a compiled model would run uncompiled.
        self.flops = FlopsMeasurement(is_enabled=self._peak_flops is not None and not config.compile)
        self._run_values = RunValues()
        self._run_values.gauges["ranks"] = backend.size
        endpoint = call_on_all_ranks(backend, lambda: self._open_endpoint(config, info) if has_endpoint else None)
        if endpoint is not None:
            endpoint.set_values(self._run_values)
        self._has_endpoint = endpoint is not None
        self._has_started = False
        self._earlier_summary = GoodputSummary.of([])
        self._first_step = 0
        self._memory_bytes = self._memory_measured_at = 0.0
        self._recorded_memory: Sequence[float] = ()
        self._slow_ranks: frozenset[int] = frozenset()
        self._loop_seconds = self._measured_seconds = 0.0

    @contextmanager
    def report_fit(self, description: Mapping[str, Any], *, is_new_run: bool) -> Iterator[None]:
        """Context manager that records a `fit` call: its start, and its end or failure. At the end, it shows the
        goodput if the run has an output folder.

        `is_new_run` is False if the run continues one that is recorded in the output folder. Nothing is recorded if
        `description` has no entry "started", as for a run that was already complete.
        """
        if not (self._is_rank_zero and "started" in description):
            yield
            return
        self._record_start(description, is_new_run=is_new_run)
        self._run_values.goodput = self._summary
        status: Status = "failed"
        reason: str | None = None
        try:
            yield
            status = "finished" if self._reporter.stop_reason is None else "stopped"
        except Preempted as error:
            status, reason = "stopped", error.reason
            raise
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
            raise
        finally:
            self._goodput.begin_category("other")
            self._record_end(status, reason or self._reporter.stop_reason)

    def begin_category(self, category: Category) -> None:
        """Count the time from now on in the goodput category `category`."""
        self._goodput.begin_category(category)

    @contextmanager
    def measure(self, phase: Literal["validation", "checkpoint"]) -> Iterator[None]:
        """Context manager that adds its duration to `phase` of the timer and to the goodput category of this name."""
        start_time = time.perf_counter()
        with self._timer.measure(phase), self._goodput.measure(phase):
            yield
        self._measured_seconds = time.perf_counter() - start_time
        self._write_goodput_if_due()

    def memory_bytes(self) -> float:
        """Return the resident memory of this process, or the peak memory of the tensors on its GPU, in bytes.

        The memory is measured at most once per second; in between, the last value is returned.
        """
        if (now := time.monotonic()) - self._memory_measured_at >= _MEMORY_INTERVAL_SECONDS:
            self._memory_measured_at, self._memory_bytes = now, _read_memory_bytes(self._backend.device)
        return self._memory_bytes

    def update_at_sync_point(self, synchronizer: RankSynchronizer, memory_by_rank: Sequence[float]) -> None:
        """Update the metrics after a sync point, given the memory of all ranks in bytes."""
        if not self._is_rank_zero:
            return
        progress = self.progress
        self._goodput.count_steps(progress.step, synchronizer.phase_seconds[0][0])
        self._run_values.memory = memory_by_rank
        self._run_values.gauges |= {"step": progress.step, "epoch": progress.epoch}
        if self._has_endpoint:
            self._run_values.add_phase_seconds(synchronizer.phase_seconds)
        slow_ranks = synchronizer.slow_ranks().get("slow", [])
        slow = frozenset(int(slow_rank["rank"]) for slow_rank in slow_ranks)
        if slow != self._slow_ranks:
            self._slow_ranks = self._run_values.slow_ranks = slow
            self._events.append("straggler", progress.step, ranks=slow_ranks)
        self._write_goodput_if_due()

    def take_logger_metrics(self, samples: int, tokens: float | None) -> dict[str, float]:
        """Return the metrics for loggers; an empty dictionary on ranks other than 0.

        Throughput and MFU refer to the time in the training loop since the last call, excluding validation and
        checkpoints. `samples` and `tokens` are the numbers of samples and tokens of all ranks since the last call;
        `tokens` is None if loss_fn does not count tokens.
        """
        if not self._is_rank_zero:
            return {}
        before, self._loop_seconds = self._loop_seconds, self._goodput.loop_seconds()
        seconds = max(self._loop_seconds - before, sys.float_info.epsilon)
        units_per_second, flops = samples / seconds, self.flops.flops_per_sample
        values = {"samples_per_second": units_per_second}
        if tokens is not None:
            values["tokens_per_second"] = units_per_second = tokens / seconds
            flops = self.flops.flops_per_token
        if self._peak_flops is not None and flops is not None:
            values["mfu"] = flops * units_per_second / (self._peak_flops * self._backend.size)
        if self._run_values.memory:
            values["max_memory_bytes"] = max(self._run_values.memory)
        return {**values, "goodput": self._summary().goodput}

    def goodput_seconds(self) -> dict[str, float]:
        """Return the seconds of each category of the goodput over all attempts, for loggers; an empty dictionary on
        ranks other than 0."""
        if not self._is_rank_zero:
            return {}
        return {f"goodput_{name}_seconds": seconds for name, seconds in self._summary().seconds.items()}

    def record_sync_point(self, values: Mapping[str, float]) -> dict[str, list[float]]:
        """Pass the `values` of a sync point to the endpoint. Return the memory of all ranks for the history if the
        memory of any rank has changed by more than 1 %, otherwise an empty dictionary."""
        self._run_values.gauges |= values
        memory, recorded = self._run_values.memory, self._recorded_memory
        if not memory or (len(memory) == len(recorded) and not any(map(_has_changed, recorded, memory))):
            return {}
        self._recorded_memory = memory
        return {"memory_bytes": list(memory)}

    def record_validation(self, results: Mapping[str, float]) -> None:
        """Record the `results` of the last validation, whose duration `measure` has measured."""
        self._run_values.results |= results
        if results and self._is_rank_zero:
            seconds = round(self._measured_seconds, 6)
            step, epochs = self.progress.step, self.progress.epoch
            self._events.append("validation", step, epochs=epochs, seconds=seconds, results=_without_nan(results))

    def record_checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """Record that a checkpoint has been written. Called in the thread that writes the checkpoint."""
        if self._is_rank_zero:
            count, total = self._run_values.checkpoint_count_and_seconds
            self._run_values.checkpoint_count_and_seconds = count + 1, total + seconds
            self._events.append("checkpoint", step, path=str(path), write_seconds=round(seconds, 6))

    def _record_start(self, description: Mapping[str, Any], *, is_new_run: bool) -> None:
        names = {"ranks": "size", "nodes": "num_nodes", "backend": "backend", "transport": "transport"}
        environment_values = {key: description.get(name) for key, name in {**names, "device": "device"}.items()}
        if self._has_started:  # a second `fit` call of this Trainer
            self._events.append("start", self.progress.step, **environment_values)
            return
        self._has_started, self._first_step = True, self.progress.step
        if not is_new_run:
            self._goodput_file.load()
        self._events.open(is_new_run=is_new_run)
        earlier, num_recorded = self._goodput_file.earlier_attempts, len(self._goodput_file.earlier_attempts)
        self._add_unrecorded_attempts(earlier)
        self._goodput.continue_run(earlier, self._first_step)
        self._events.attempt = len(earlier) + 1
        self._earlier_summary = GoodputSummary.of(earlier)
        if earlier:
            previous, reason = earlier[-1], self._restart_reason
            for attempt_number, attempt in enumerate(earlier[max(0, num_recorded - 1) :], start=max(1, num_recorded)):
                if attempt.status == "running" or attempt_number > num_recorded:
                    unknown = "the attempt ended without a record of its end"
                    failure_reason = (reason if attempt is previous else None) or unknown
                    self._events.append("failure", attempt.last_step, attempt=attempt_number, reason=failure_reason)
            seconds = self._goodput.seconds()
            downtime_seconds = round(seconds["restart"] + seconds["hosts"], 3)
            self._events.append(
                "restart", self._first_step, reason=reason, downtime_seconds=downtime_seconds, **environment_values
            )
            if previous.ranks != self._backend.size:
                self._events.append("resize", self._first_step, ranks=self._backend.size, previous_ranks=previous.ranks)
        else:
            self._events.append("start", self._first_step, **environment_values)
        self._write_goodput("running")

    def _add_unrecorded_attempts(self, attempts: list[AttemptRecord]) -> None:
        """Append a record for each attempt of this job that followed the last of `attempts` and failed before `fit`."""
        for earlier in self._earlier_attempts:
            started = self._goodput.started - earlier.started_before_seconds
            ended = self._goodput.started - earlier.ended_before_seconds
            previous = attempts[-1] if attempts else None
            record = unrecorded_attempt(previous, started, ended, earlier.waiting_seconds, self._backend.size)
            if record is not None:
                attempts.append(record)

    def _record_end(self, status: Status, reason: str | None) -> None:
        progress = self.progress
        self._goodput.count_steps(progress.step, 0.0)
        attempt = self._write_goodput(status)
        summary = self._earlier_summary.with_attempt(attempt)
        self._run_values.goodput = lambda: summary  # the time after `fit` is not part of the run
        if status == "failed":
            self._events.append("failure", progress.step, reason=reason)
        else:
            self._events.append(
                "end", progress.step, status=status, reason=reason, goodput=summary.goodput, seconds=summary.seconds
            )
        if self._has_folder:
            self._reporter.show_message(str(summary))

    def _write_goodput_if_due(self) -> None:
        if self._has_started and self._goodput_file.is_due:
            self._write_goodput("running")

    def _write_goodput(self, status: Status) -> AttemptRecord:
        """Write the record of the attempt until now, and return it."""
        attempt = self._attempt_record(status)
        self._goodput_file.write(attempt)
        recorded = self._goodput.without_pending_time(attempt)
        self._run_values.recorded_goodput = self._earlier_summary.with_attempt(recorded)
        return attempt

    def _attempt_record(self, status: Status) -> AttemptRecord:
        return self._goodput.attempt_record(self._first_step, self._backend.size, status)

    def _summary(self) -> GoodputSummary:
        return self._earlier_summary.with_attempt(self._attempt_record("running"))

    def _open_endpoint(self, config: TrainConfig, info: supervisor_client.AttemptInfo | None) -> MetricsEndpoint | None:
        port, address = _endpoint_settings(config)
        if port is None or config.dry_run or not self._is_rank_zero:
            return None
        # Processes of an earlier attempt may still use the port.
        endpoint = open_endpoint(address, port, keep_trying=info is not None and info.number > 1)
        self._backend.call_before_exit(endpoint.close)
        return endpoint


def _endpoint_settings(config: TrainConfig) -> tuple[int | None, str]:
    """Return the port and the address of `unitrain launch --metrics-port`, or else the port and the address in the
    configuration. Raises ConfigError for an invalid environment variable."""
    port = environment.get_variable(environment.METRICS_PORT_VARIABLE)
    if port is None:
        return config.metrics_port, config.metrics_address
    if not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise ConfigError(
            f"{environment.METRICS_PORT_VARIABLE} must be a port from 1 to 65535, got {port!r}. Use: unitrain launch "
            "--metrics-port 9400"
        )
    return int(port), environment.get_variable(environment.METRICS_ADDRESS_VARIABLE) or config.metrics_address


def _attempt_start(info: supervisor_client.AttemptInfo | None) -> tuple[bool, AttemptStart]:
    """Return whether this is the first Trainer of the attempt, and the start of the attempt: the start of the launcher
    if it is known, or else of this process.

    For a second Trainer in this process, and in an interactive session, the attempt starts with this call.
    """
    global _is_first_in_process
    is_first, _is_first_in_process = _is_first_in_process, False
    if not is_first or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return False, AttemptStart()
    if info is None:
        return True, AttemptStart(process_age_seconds())
    return True, AttemptStart(info.age_seconds, info.waiting_seconds)


def _read_memory_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        return float(int(_STATM.read_text().split()[1]) * mmap.PAGESIZE)
    except (OSError, ValueError, IndexError):  # the system has no /proc
        return 0.0


def _without_nan(results: Mapping[str, float]) -> dict[str, float | None]:
    """Return `results` with None instead of nan and infinity, which JSON does not support."""
    return {name: value if math.isfinite(value) else None for name, value in results.items()}


def _has_changed(recorded: float, value: float) -> bool:
    return abs(value - recorded) > _MIN_MEMORY_CHANGE * recorded
