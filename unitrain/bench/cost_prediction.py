"""Predict the step time on more ranks with the cost model, and compare predictions with measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from unitrain import __version__
from unitrain.bench.cost_model import (
    ALGORITHMS,
    HIERARCHICAL,
    Calibration,
    Cost,
    Network,
    calibrate,
    hierarchical_allreduce,
    operation_seconds,
    parameter_server,
)
from unitrain.bench.results import quartiles, row_name, row_names
from unitrain.errors import ConfigError, ReportError

# Bucket sizes of DistributedDataParallel in bytes. The first bucket is small, so that communication starts early.
FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20

FittedNetwork = tuple[Network, Calibration | None]
_MAX_BUCKETS = 1_000_000


@dataclass(frozen=True)
class Layer:
    """The gradient `size` of a layer in bytes, and the duration of its backward pass."""

    size: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The computation of one rank per step: seconds before and after the backward pass, and the layers in backward
    order.
    """

    before: float
    layers: Sequence[Layer]
    after: float = 0.0

    @property
    def seconds(self) -> float:
        """The duration of a step on one rank."""
        return self.before + sum(layer.seconds for layer in self.layers) + self.after


@dataclass(frozen=True)
class PredictedStep:
    """The duration of a step, and its exposed communication, which does not overlap with the backward pass."""

    seconds: float
    exposed_seconds: float

    @property
    def efficiency(self) -> float:
        """The throughput per rank relative to one rank."""
        return 1 - self.exposed_seconds / self.seconds


def uniform_work(
    step_seconds: float,
    gradient_bytes: float,
    backward_share: float = 2 / 3,
    layers: int = 100,
    largest_layer_bytes: float = FIRST_BUCKET_BYTES,
) -> StepWork:
    """Return the work of a step whose gradients are spread evenly over the backward pass.

    `backward_share` is the fraction of the step time spent in the backward pass. The default of 2/3 assumes that the
    backward pass computes two matrix products per product in the forward pass. There are at least `layers` layers of at
    most `largest_layer_bytes` bytes. Buckets contain complete layers, so larger layers would determine the bucket size.
    """
    layers = max(layers, math.ceil(gradient_bytes / largest_layer_bytes))
    backward = backward_share * step_seconds
    even = [Layer(gradient_bytes / layers, backward / layers)] * layers
    return StepWork(before=step_seconds - backward, layers=even)


def predict_step(
    work: StepWork,
    allreduce: Callable[[float], float],
    *,
    second_collective: Callable[[float], float] | None = None,
    bucket_bytes: float = BUCKET_BYTES,
    first_bucket_bytes: float = FIRST_BUCKET_BYTES,
    max_in_flight: int = 1,
) -> PredictedStep:
    """Simulate a step. The allreduce of n bytes takes `allreduce(n)` seconds.

    The allreduce of a bucket starts when the backward pass has filled the bucket and fewer than `max_in_flight`
    allreduces are in progress. Of allreduces that are in progress at the same time, the bytes are transferred one after
    another, while the durations of empty allreduces, `allreduce(0)`, overlap. The optimizer waits for the last bucket.

    With `second_collective`, reducing a bucket of n bytes takes another collective of `second_collective(n)` seconds,
    which starts after the backward pass and after the first collectives of all buckets.
    """
    clock, filled_bytes, limit_bytes = work.before, 0.0, first_bucket_bytes
    reduced_at = [0.0] * max_in_flight  # the times at which the latest buckets are reduced
    latency = allreduce(0)
    seconds_after_backward = 0.0
    for number, layer in enumerate(work.layers, 1):
        clock += layer.seconds
        filled_bytes += layer.size
        if filled_bytes and (filled_bytes >= limit_bytes or number == len(work.layers)):
            earliest = max(reduced_at.pop(0), clock) + latency
            reduced_at.append(max([earliest, *reduced_at]) + allreduce(filled_bytes) - latency)
            if second_collective is not None:
                seconds_after_backward += second_collective(filled_bytes)
            filled_bytes, limit_bytes = 0.0, bucket_bytes
    exposed = max(0.0, reduced_at[-1] - clock) + seconds_after_backward
    return PredictedStep(work.seconds + exposed, exposed)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The number of parameters of a model, the bytes communicated per parameter, the step time on one rank, and the
    fraction of this time spent in the backward pass."""

    parameters: float
    bytes_per_parameter: float
    step_seconds: float
    backward_share: float

    def work(self, bucket_bytes: float = BUCKET_BYTES) -> StepWork:
        """Return the work of a step whose gradients are spread evenly over the backward pass.

        Raises ConfigError if the gradients fill more than a million buckets.
        """
        gradient_bytes = self.parameters * self.bytes_per_parameter
        if gradient_bytes / bucket_bytes > _MAX_BUCKETS:
            raise ConfigError(
                f"{gradient_bytes:,.0f} bytes of gradients fill more than {_MAX_BUCKETS:,} buckets of "
                f"{bucket_bytes:,.0f} bytes. Use --bucket-bytes 25MB"
            )
        layer_bytes = min(bucket_bytes, FIRST_BUCKET_BYTES)
        return uniform_work(self.step_seconds, gradient_bytes, self.backward_share, largest_layer_bytes=layer_bytes)


@dataclass(frozen=True, kw_only=True)
class HostLayout:
    """The number of ranks per host and the network within a host, which has no overhead per operation."""

    ranks_per_host: int
    network: Network


def cost_functions(algorithms: Sequence[str], hosts: HostLayout | None, servers: int) -> dict[str, Cost]:
    """Return the allreduce cost function per algorithm."""

    def hierarchical(ranks: int, size: float, network: Network) -> float:
        assert hosts is not None
        return hierarchical_allreduce(ranks, size, network, hosts.ranks_per_host, hosts.network)

    def with_servers(ranks: int, size: float, network: Network) -> float:
        return parameter_server(ranks, size, network, min(servers, ranks))

    function_by_algorithm = {**ALGORITHMS, HIERARCHICAL: hierarchical, "parameter-server": with_servers}
    return {name: function_by_algorithm[name] for name in algorithms}


def fit_networks(
    result: dict[str, Any] | None, known_network: Network | None, cost_by_algorithm: Mapping[str, Cost]
) -> dict[tuple[str, str], FittedNetwork]:
    """Return the network per (name, algorithm): `known_network`, or, for each name in `result`, a network that is
    fitted to the measurements with this name.

    `cost_by_algorithm` contains the requested algorithms. The hierarchical algorithm is fitted as a ring, because it
    uses a ring between hosts.
    """
    if result is None:
        assert known_network is not None
        return {("", algorithm): (known_network, None) for algorithm in cost_by_algorithm}
    networks: dict[tuple[str, str], FittedNetwork] = {}
    for name in row_names(result):
        for algorithm, cost in cost_by_algorithm.items():
            fitted = calibrate(result, name, ALGORITHMS["ring"] if algorithm == HIERARCHICAL else cost)
            networks[name, algorithm] = (fitted.network, fitted)
    return networks


def predict(
    model: Model,
    networks: Mapping[tuple[str, str], FittedNetwork],
    cost_by_algorithm: Mapping[str, Cost],
    ranks: Sequence[int],
    bucket_bytes: float = BUCKET_BYTES,
) -> dict[str, Any]:
    """Return the predicted step per (name, algorithm) and number of ranks, as plain data."""
    work = model.work(bucket_bytes)
    rows = []
    for (name, algorithm), (network, _) in networks.items():
        for size in ranks:
            step = predict_step(
                work,
                _bind_cost(cost_by_algorithm[algorithm], size, network),
                bucket_bytes=bucket_bytes,
                first_bucket_bytes=min(bucket_bytes, FIRST_BUCKET_BYTES),
                max_in_flight=network.max_in_flight,
            )
            rows.append(
                {
                    "name": name,
                    "algorithm": algorithm,
                    "ranks": size,
                    "step_seconds": step.seconds,
                    "exposed_seconds": step.exposed_seconds,
                    "efficiency": step.efficiency,
                }
            )
    return {
        "kind": "prediction",
        "unitrain": __version__,
        "model": vars(model),
        "networks": describe_networks(networks),
        "rows": rows,
    }


def describe_networks(networks: Mapping[tuple[str, str], FittedNetwork]) -> list[dict[str, Any]]:
    """Return the parameters of each network and the errors of its fit, as plain data."""
    return [
        {
            "name": name,
            "algorithm": algorithm,
            "alpha": network.alpha,
            "beta": network.beta,
            "overhead_seconds": network.overhead_seconds,
            "max_in_flight": network.max_in_flight,
            "median_error": None if fitted is None else fitted.median_error,
            "max_error": None if fitted is None else fitted.max_error,
            "points": []
            if fitted is None
            else [[point.size, point.measured, point.predicted] for point in fitted.points],
        }
        for (name, algorithm), (network, fitted) in networks.items()
    ]


def _bind_cost(cost: Cost, ranks: int, network: Network) -> Callable[[float], float]:
    return lambda size: operation_seconds(cost, ranks, size, network)


def model_from_result(training_result: dict[str, Any], bytes_per_parameter: float) -> Model:
    """Return the model from the single-rank steps in a result of `bench train`.

    Raises ReportError if the result has no measurement on one rank.
    """
    single = [row for row in training_result["rows"] if row["ranks"] == 1 and row["setting"] is None]
    if not single:
        raise ReportError(
            "The step time without communication is measured on one rank, but the result has no such measurement. "
            "Measure with: unitrain bench train --ranks 1,2 --json FILE"
        )
    row = single[0]
    phases = {phase: fmean(seconds) for phase, seconds in row["phases"].items()}
    seconds = quartiles(row["seconds"])[1]
    return Model(
        parameters=training_result["parameters"],
        bytes_per_parameter=bytes_per_parameter,
        step_seconds=seconds,
        backward_share=min(1.0, phases["backward"] / seconds),
    )


def compare_with_measured(
    model: Model,
    training_result: dict[str, Any],
    networks: Mapping[tuple[str, str], FittedNetwork],
    cost_by_algorithm: Mapping[str, Cost],
) -> list[dict[str, Any]]:
    """Return the measured and the predicted step time per measured backend, number of ranks (at least 2) and algorithm.

    The prediction uses the bucket sizes of DistributedDataParallel. Rows with settings are skipped, because the model
    does not include their effects on computation and communication.
    """
    differences = []
    for row in training_result["rows"]:
        if row["setting"] is not None:
            continue
        for (name, algorithm), (network, _) in networks.items():
            if row["ranks"] == 1 or name not in ("", row_name(row)):
                continue
            allreduce = _bind_cost(cost_by_algorithm[algorithm], row["ranks"], network)
            step = predict_step(model.work(), allreduce, max_in_flight=network.max_in_flight)
            measured_seconds = quartiles(row["seconds"])[1]
            differences.append(
                {
                    "name": row_name(row),
                    "algorithm": algorithm,
                    "ranks": row["ranks"],
                    "measured": measured_seconds,
                    "predicted": step.seconds,
                    "relative_error": step.seconds / measured_seconds - 1,
                }
            )
    return differences
