"""Training steps on more ranks than there are, by the cost model, beside those that were measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from unitrain import __version__
from unitrain.bench.cost_calibration import Calibration, calibrate
from unitrain.bench.cost_model import ALGORITHMS, HIERARCHICAL, Cost, Network, hierarchical_allreduce, parameter_server
from unitrain.bench.cost_step import BUCKET, FIRST_BUCKET, Work, even_work, predict_step
from unitrain.bench.results import middle, name_of, names
from unitrain.errors import ConfigError, ReportError

Fit = tuple[Network, Calibration | None]
_MOST_BUCKETS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained: its parameters, their bytes as they travel, and a step of one rank without communication."""

    parameters: float
    bytes_per_parameter: float
    step_seconds: float
    backward_share: float

    def work(self, bucket: float = BUCKET) -> Work:
        """Return its work, with the gradients spread evenly over backward. Raises ConfigError if they fill more than a
        million buckets."""
        gradient_bytes = self.parameters * self.bytes_per_parameter
        if gradient_bytes / bucket > _MOST_BUCKETS:
            raise ConfigError(
                f"Buckets of {bucket:,.0f} bytes cut {gradient_bytes:,.0f} bytes of gradients into more than "
                f"{_MOST_BUCKETS:,}. Use --bucket-bytes 25MB"
            )
        layer = min(bucket, FIRST_BUCKET)
        return even_work(self.step_seconds, gradient_bytes, self.backward_share, largest_layer=layer)


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts of several ranks, for the hierarchical algorithm: how many, and the network inside."""

    ranks: int
    network: Network


def costs(algorithms: Sequence[str], hosts: Hosts | None, servers: int) -> dict[str, Cost]:
    """Return the cost of an allreduce by each of the algorithms."""

    def hierarchical(ranks: int, size: float, network: Network) -> float:
        assert hosts is not None
        return hierarchical_allreduce(ranks, size, network, hosts.ranks, hosts.network)

    def served(ranks: int, size: float, network: Network) -> float:
        return parameter_server(ranks, size, network, min(servers, ranks))

    known = {**ALGORITHMS, HIERARCHICAL: hierarchical, "parameter-server": served}
    return {name: known[name] for name in algorithms}


def networks_of(
    result: dict[str, Any] | None, given: Network | None, wanted: Mapping[str, Cost]
) -> dict[tuple[str, str], Fit]:
    """Return the network of each (who, algorithm): the `given` one, or one fitted to the allreduces in `result`.

    The hierarchical algorithm is fitted as the ring that it is between hosts.
    """
    if result is None:
        assert given is not None
        return {("", algorithm): (given, None) for algorithm in wanted}
    found: dict[tuple[str, str], Fit] = {}
    for who in names(result):
        for algorithm, cost in wanted.items():
            fitted = calibrate(result, who, ALGORITHMS["ring"] if algorithm == HIERARCHICAL else cost)
            found[who, algorithm] = (fitted.network, fitted)
    return found


def predict(
    model: Model,
    networks: Mapping[tuple[str, str], Fit],
    wanted: Mapping[str, Cost],
    ranks: Sequence[int],
    bucket: float = BUCKET,
) -> dict[str, Any]:
    """Return the step of every (who, algorithm) on every number of ranks, as plain data."""
    work = model.work(bucket)
    rows, fits = [], []
    for (who, algorithm), (network, fitted) in networks.items():
        for size in ranks:
            step = predict_step(
                work,
                _allreduce(wanted[algorithm], size, network),
                bucket=bucket,
                first_bucket=min(bucket, FIRST_BUCKET),
            )
            rows.append(
                {
                    "who": who,
                    "algorithm": algorithm,
                    "ranks": size,
                    "step_seconds": step.seconds,
                    "exposed_seconds": step.exposed,
                    "efficiency": step.efficiency,
                }
            )
        fits.append(
            {
                "who": who,
                "algorithm": algorithm,
                "alpha": network.alpha,
                "beta": network.beta,
                "typically_off": None if fitted is None else fitted.typically_off,
                "most_off": None if fitted is None else fitted.most_off,
                "points": []
                if fitted is None
                else [[point.size, point.measured, point.predicted] for point in fitted.points],
            }
        )
    return {"kind": "prediction", "unitrain": __version__, "model": vars(model), "networks": fits, "rows": rows}


def _allreduce(cost: Cost, ranks: int, network: Network) -> Callable[[float], float]:
    return lambda size: cost(ranks, size, network)


def model_of(trained: dict[str, Any], bytes_per_parameter: float) -> Model:
    """Return the model of a result of `bench train`, by its steps on one rank. Raises ReportError where there are
    none."""
    alone = [row for row in trained["rows"] if row["ranks"] == 1 and row["setting"] is None]
    if not alone:
        raise ReportError(
            "What a step costs without communication follows from one rank, and none was measured. "
            "Measure with: unitrain bench train --ranks 1,2 --json FILE"
        )
    row = alone[0]
    parts = {part: fmean(seconds) for part, seconds in row["parts"].items()}
    seconds = middle(row["seconds"])[1]
    return Model(
        parameters=trained["parameters"],
        bytes_per_parameter=bytes_per_parameter,
        step_seconds=seconds,
        backward_share=min(1.0, parts["backward"] / seconds),
    )


def measured_beside(
    model: Model,
    trained: dict[str, Any],
    networks: Mapping[tuple[str, str], Fit],
    wanted: Mapping[str, Cost],
) -> list[dict[str, Any]]:
    """Return for each measured (who, ranks) of more than one rank what was measured, and what is predicted.

    Settings are left out: most change what is computed, or what travels, in ways that the model does not know.
    """
    found = []
    for row in trained["rows"]:
        if row["setting"] is not None:
            continue
        for (who, algorithm), (network, _) in networks.items():
            if row["ranks"] == 1 or who not in ("", name_of(row)):
                continue
            step = predict_step(model.work(), _allreduce(wanted[algorithm], row["ranks"], network))
            measured = middle(row["seconds"])[1]
            found.append(
                {
                    "who": name_of(row),
                    "algorithm": algorithm,
                    "ranks": row["ranks"],
                    "measured": measured,
                    "predicted": step.seconds,
                    "off": step.seconds / measured - 1,
                }
            )
    return found
