"""HTTP endpoint of rank 0 for Prometheus, with the metrics of the latest run in this process."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unitrain.errors import ConfigError, MissingDependencyError
from unitrain.output import get_logger
from unitrain.progress.goodput import GoodputSummary
from unitrain.progress.stragglers import TRAINING
from unitrain.threads import start_thread

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

_log = get_logger(__name__)
_RETRY_SECONDS = 1.0

# Gauges of the run, with their descriptions. All names have the prefix "unitrain_".
GAUGES = {
    "step": "Completed optimizer steps",
    "epoch": "Completed epochs",
    "ranks": "Number of ranks",
    "loss": "Mean training loss over the last logging interval (about two seconds, or log_every_n_steps)",
    "learning_rate": "Learning rate of the first parameter group",
    "samples_per_second": "Training throughput of all ranks in samples per second",
    "tokens_per_second": "Training throughput of all ranks in tokens per second, if loss_fn counts tokens",
    "mfu": "Model FLOPs utilization, from 0 to 1",
    "gradient_norm": "Gradient norm, if max_grad_norm is set",
    "goodput_ratio": "Fraction of the wall-clock time of the run spent in training steps that were kept",
}
# Gauges with labels, and counters: the description and the names of the labels.
LABELED = {
    "result": ("Result of the last validation", ("name",)),
    "memory_bytes": ("Resident memory of the process of a rank, or peak memory of the tensors on its GPU", ("rank",)),
    "slow_rank": ("1 if other ranks wait for this rank, otherwise 0", ("rank",)),
}
COUNTERS = {
    "phase_seconds": ("Time of a rank in a phase of training since the start of the attempt", ("rank", "phase")),
    "goodput_seconds": ("Wall-clock time of the run by category, over all attempts", ("category",)),
    "restarts": ("Number of restarts of the run", ()),
    "replayed_steps": ("Steps trained again after restarts", ()),
}
CHECKPOINT_SECONDS = "checkpoint_write_seconds"


def exported_names() -> set[str]:
    """Return the names of all exported time series."""
    names = [*GAUGES, *LABELED, *(f"{name}_total" for name in COUNTERS)]
    return {f"unitrain_{name}" for name in [*names, f"{CHECKPOINT_SECONDS}_count", f"{CHECKPOINT_SECONDS}_sum"]}


@dataclass
class RunValues:
    """The current metrics of a run. The training thread updates them, except `checkpoint_count_and_seconds`, which the
    thread that writes checkpoints updates. Threads of the endpoint read them.

    `gauges` maps names in GAUGES to their current values. `memory` has one value per rank, and `phase_seconds` one list
    per rank, in the order of TRAINING. `checkpoint_count_and_seconds` contains the number of written checkpoints and
    the total duration of writing them. `goodput` is a function that returns the current times of all attempts.
    `recorded_goodput` contains only times that the output folder also contains and that will not move to another
    category. Counters therefore do not decrease, even if the run is killed and restarted.
    """

    gauges: dict[str, float] = field(default_factory=dict)
    results: dict[str, float] = field(default_factory=dict)
    memory: Sequence[float] = ()
    phase_seconds: Sequence[Sequence[float]] = ()
    slow_ranks: frozenset[int] = frozenset()
    checkpoint_count_and_seconds: tuple[int, float] = (0, 0.0)
    goodput: Callable[[], GoodputSummary] | None = None
    recorded_goodput: GoodputSummary | None = None

    def add_phase_seconds(self, seconds: Sequence[Sequence[float]]) -> None:
        """Add `seconds`, which has one row per rank and one column per phase of TRAINING, to the totals."""
        if not self.phase_seconds:
            self.phase_seconds = seconds
        elif seconds:
            self.phase_seconds = [
                [a + b for a, b in zip(*rows, strict=True)] for rows in zip(self.phase_seconds, seconds, strict=True)
            ]


class _Collector:
    """Collector of prometheus_client: converts RunValues to its metrics."""

    def __init__(self, values: RunValues) -> None:
        self.values = values

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        values = self.values
        summary = None if values.goodput is None else values.goodput()
        gauges = dict(values.gauges)
        if summary is not None:
            gauges["goodput_ratio"] = summary.goodput
        for name, value in gauges.items():
            if name in GAUGES:
                yield GaugeMetricFamily(f"unitrain_{name}", GAUGES[name], value=value)
        slow = [float(rank in values.slow_ranks) for rank in range(len(values.memory))]
        samples: dict[str, Iterable[tuple[list[str], float]]] = {
            "result": [([name], value) for name, value in dict(values.results).items()],
            "memory_bytes": [([str(rank)], value) for rank, value in enumerate(values.memory)],
            "slow_rank": [([str(rank)], value) for rank, value in enumerate(slow)],
            "phase_seconds": [
                ([str(rank), phase], seconds)
                for rank, row in enumerate(values.phase_seconds)
                for phase, seconds in zip(TRAINING, row, strict=True)
            ],
        }
        if (recorded := values.recorded_goodput) is not None:
            samples["goodput_seconds"] = [([category], seconds) for category, seconds in recorded.seconds.items()]
            samples["restarts"] = [([], recorded.attempts - 1)]
            samples["replayed_steps"] = [([], recorded.replayed_steps)]
        for family, metrics in ((GaugeMetricFamily, LABELED), (CounterMetricFamily, COUNTERS)):
            for name, (description, labels) in metrics.items():
                metric = family(f"unitrain_{name}", description, labels=labels)
                for label_values, value in samples.get(name, ()):
                    metric.add_metric(label_values, value)
                yield metric
        count, seconds = values.checkpoint_count_and_seconds
        yield SummaryMetricFamily(
            f"unitrain_{CHECKPOINT_SECONDS}", "Duration of writing a checkpoint", count_value=count, sum_value=seconds
        )


class MetricsEndpoint:
    """HTTP server for Prometheus on `port` of `address`, in threads of this process, until `close`.

    If it cannot listen on the port, raises ConfigError, or, with `keep_trying`, logs a warning and retries in a thread.
    Raises MissingDependencyError if prometheus_client is not installed.
    """

    def __init__(self, address: str, port: int, *, keep_trying: bool) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingDependencyError(
                f"The metrics endpoint on port {port} needs a package that is missing: {error}. Install it, in the "
                'source folder of unitrain, with: pip install ".[prometheus]"'
            ) from error
        self._address, self._port = address, port
        self._server: WSGIServer | None = None
        self._registry = prometheus_client.CollectorRegistry()
        self._collector = _Collector(RunValues())
        self._registry.register(self._collector)
        self._closed_event = threading.Event()
        self._start_lock = threading.Lock()  # so that no server starts after `close`
        try:
            self._start()
        except OSError as error:
            if not keep_trying:
                is_privileged = error.errno == errno.EACCES  # usually because the port is below 1024
                other_port = 9400 if is_privileged or port == 65535 else port + 1
                fix = (
                    f"Use another port: unitrain launch --metrics-port {other_port}, or TrainConfig(metrics_port=...)."
                    if error.errno in (errno.EADDRINUSE, errno.EACCES)
                    else "Use an address of the host of rank 0: unitrain launch --metrics-address 127.0.0.1, or "
                    'TrainConfig(metrics_address="127.0.0.1").'
                )
                raise ConfigError(
                    f"The metrics endpoint cannot listen on {address}:{port}: {error.strerror or error}. {fix}"
                ) from error
            _log.warning("The metrics endpoint cannot listen on %s:%d yet: %s", address, port, error.strerror or error)
            start_thread(self._keep_trying, name="unitrain metrics", restarts=True)
        _endpoints_to_close_in_forks.add(self)

    def set_values(self, values: RunValues) -> None:
        """Serve the metrics of a run, which replace those of an earlier run."""
        self._collector.values = values

    def close(self) -> None:
        """Stop the server, or the attempts to start it."""
        with self._start_lock:
            self._closed_event.set()
        _endpoints.pop((self._address, self._port), None)
        if self._server is not None:
            self._server.shutdown()
            self.close_socket()

    def _start(self) -> None:
        from prometheus_client import make_wsgi_app

        from unitrain.progress.metrics_server import MetricsServer

        server = MetricsServer(self._address, self._port, make_wsgi_app(self._registry))
        server.start()
        self._server = server

    def _keep_trying(self) -> None:
        while not self._closed_event.wait(_RETRY_SECONDS):
            with suppress(OSError), self._start_lock:
                if not self._closed_event.is_set():
                    self._start()
                return

    def close_socket(self) -> None:
        """Close the socket of the server, if it runs."""
        if self._server is not None:
            self._server.socket.close()
            self._server = None


# Endpoints whose sockets are closed in forked processes, such as DataLoader workers. Otherwise, these processes could
# keep the ports in use after this process has ended.
_endpoints_to_close_in_forks: weakref.WeakSet[MetricsEndpoint] = weakref.WeakSet()


def _close_sockets() -> None:
    for endpoint in list(_endpoints_to_close_in_forks):
        endpoint.close_socket()


os.register_at_fork(after_in_child=_close_sockets)

# The endpoints of this process, by address and port. Trainers with the same settings share one.
_endpoints: dict[tuple[str, int], MetricsEndpoint] = {}


def open_endpoint(address: str, port: int, *, keep_trying: bool) -> MetricsEndpoint:
    """Return the endpoint of this process on `port` of `address`, and create it if necessary. Raises the errors of
    MetricsEndpoint."""
    if (address, port) not in _endpoints:
        _endpoints[address, port] = MetricsEndpoint(address, port, keep_trying=keep_trying)
    return _endpoints[address, port]
