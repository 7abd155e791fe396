"""The cost of collectives in the alpha-beta-gamma model, and the calibration of its parameters with measurements.

A message of n bytes between two ranks takes alpha + n beta seconds, and the reduction of n bytes takes n gamma seconds.
A rank sends and receives at most one message at a time. p is the number of ranks, n the message size in bytes, and lg
the logarithm to base 2. The cost functions do not include the overhead per operation, which `operation_seconds` adds.
Sources:

[T] Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 19(1), 2005
[P] Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 69(2), 2009
[S] Sergeev, Del Balso: Horovod: fast and easy distributed deep learning in TensorFlow, arXiv 1802.05799, 2018
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from unitrain.bench.results import quartiles, row_name
from unitrain.errors import ConfigError, ReportError, did_you_mean

# Points whose time differs by a larger factor from the time of the best candidate network are excluded from the fit.
_MAX_DEVIATION = 1.25


@dataclass(frozen=True, kw_only=True)
class Network:
    """Seconds per message (`alpha`), per byte sent (`beta`), and per byte reduced (`gamma`). `overhead_seconds` is the
    time that an operation takes before its first message, for example for the negotiation of Horovod. `max_in_flight`
    is the number of collectives that a rank executes at the same time."""

    alpha: float
    beta: float
    gamma: float = 0.0
    overhead_seconds: float = 0.0
    max_in_flight: int = 1


Cost = Callable[[int, float, Network], float]


def ring_reducescatter(num_ranks: int, size: float, network: Network) -> float:
    """(p-1) alpha + (p-1)/p n beta + (p-1)/p n gamma: each of p-1 steps sends n/p bytes. [P], [T]."""
    part = size / num_ranks
    return (num_ranks - 1) * (network.alpha + part * (network.beta + network.gamma))


def ring_allgather(num_ranks: int, size: float, network: Network) -> float:
    """(p-1) alpha + (p-1)/p n beta. [T], section on allgather."""
    return (num_ranks - 1) * (network.alpha + size / num_ranks * network.beta)


def ring_allreduce(num_ranks: int, size: float, network: Network) -> float:
    """2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma: a reducescatter and an allgather.

    No algorithm sends fewer bytes [P]. Horovod uses this algorithm [S].
    """
    return ring_reducescatter(num_ranks, size, network) + ring_allgather(num_ranks, size, network)


def recursive_doubling_allreduce(num_ranks: int, size: float, network: Network) -> float:
    """lg p (alpha + n beta + n gamma): ranks exchange the complete tensor at distance 1, 2, 4, ... [T].

    If p is not a power of two, the surplus ranks first send their tensor to a partner and receive the result at the
    end. This adds 2 alpha + 2n beta + n gamma.
    """
    exchange = network.alpha + size * (network.beta + network.gamma)
    return (num_ranks.bit_length() - 1) * exchange + _surplus_cost(num_ranks, size, network)


def halving_doubling_allreduce(num_ranks: int, size: float, network: Network) -> float:
    """2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma: Rabenseifner's algorithm [T].

    Halves, quarters, ... of the tensor are reduced and then gathered. Surplus ranks are handled as in
    `recursive_doubling_allreduce`.
    """
    steps = num_ranks.bit_length() - 1
    sent_bytes = size - size / (1 << steps)
    return (
        2 * steps * network.alpha
        + sent_bytes * (2 * network.beta + network.gamma)
        + _surplus_cost(num_ranks, size, network)
    )


def tree_allreduce(num_ranks: int, size: float, network: Network) -> float:
    """2 ceil(lg p) (alpha + n beta) + ceil(lg p) n gamma: a reduce and a broadcast along a binomial tree [T]."""
    return tree_broadcast(num_ranks, size, network) + _tree_levels(num_ranks) * (
        network.alpha + size * (network.beta + network.gamma)
    )


def tree_broadcast(num_ranks: int, size: float, network: Network) -> float:
    """ceil(lg p) (alpha + n beta): in each step, the number of ranks with the tensor doubles [T]."""
    return _tree_levels(num_ranks) * (network.alpha + size * network.beta)


def parameter_server(num_ranks: int, size: float, network: Network, servers: int = 1) -> float:
    """2p (alpha + n/s beta) + p n/s gamma for s <= p servers.

    Every rank sends n/s bytes to each server and receives the result. The link of a server serializes the messages of
    all ranks; [S] describes this bottleneck. Messages are counted as in [T]. With p servers, the cost is 2p alpha + 2n
    beta + n gamma, with nearly the same number of bytes as a ring.
    """
    part = size / servers
    return num_ranks * (2 * network.alpha + part * (2 * network.beta + network.gamma)) if num_ranks > 1 else 0.0


def hierarchical_allreduce(
    num_ranks: int, size: float, network: Network, ranks_per_host: int, host_network: Network
) -> float:
    """Return the cost of Horovod's hierarchical allreduce (HOROVOD_HIERARCHICAL_ALLREDUCE).

    The algorithm is a ring reducescatter within each host, ring allreduces between hosts, and a ring allgather within
    each host. With g ranks on each of N hosts, the ring allreduces cost 2(N-1) (alpha + n/N beta) + (N-1)/N n/g gamma:
    each of the g ranks reduces n/g bytes with the corresponding ranks of the other hosts, and the g ranks share the
    link of their host. Ranks that fit on one host use a ring within the host. Raises ConfigError if `num_ranks` is
    larger than `ranks_per_host` and not a multiple of it.
    """
    if num_ranks <= ranks_per_host:
        return ring_allreduce(num_ranks, size, host_network)
    if num_ranks % ranks_per_host:
        raise ConfigError(
            f"{num_ranks} ranks are not a multiple of {ranks_per_host} ranks per host. "
            "Use multiples of --ranks-per-host for --ranks."
        )
    shared = Network(alpha=network.alpha, beta=ranks_per_host * network.beta, gamma=network.gamma)
    return (
        ring_reducescatter(ranks_per_host, size, host_network)
        + ring_allreduce(num_ranks // ranks_per_host, size / ranks_per_host, shared)
        + ring_allgather(ranks_per_host, size, host_network)
    )


def operation_seconds(cost: Cost, num_ranks: int, size: float, network: Network) -> float:
    """Return the duration of one operation: its overhead plus its `cost`. The duration is 0.0 for one rank."""
    return network.overhead_seconds + cost(num_ranks, size, network) if num_ranks > 1 else 0.0


ALGORITHMS: dict[str, Cost] = {
    "ring": ring_allreduce,
    "recursive-doubling": recursive_doubling_allreduce,
    "halving-doubling": halving_doubling_allreduce,
    "tree": tree_allreduce,
    "parameter-server": parameter_server,
}
HIERARCHICAL = "hierarchical"


def check_algorithms(names: list[str]) -> None:
    """Raise ConfigError for unknown algorithm names."""
    for name in names:
        if name not in (known_algorithms := [*ALGORITHMS, HIERARCHICAL]):
            raise ConfigError(
                f"Unknown algorithm {name!r}. {did_you_mean(name, known_algorithms)}Available: "
                f"{', '.join(known_algorithms)}."
            )


def _tree_levels(num_ranks: int) -> int:
    return (num_ranks - 1).bit_length()


def _surplus_cost(num_ranks: int, size: float, network: Network) -> float:
    if num_ranks & (num_ranks - 1) == 0:
        return 0.0
    return 2 * network.alpha + size * (2 * network.beta + network.gamma)


@dataclass(frozen=True)
class FittedPoint:
    """The measured and the predicted time of an operation on `size` bytes."""

    size: int
    measured: float
    predicted: float

    @property
    def relative_error(self) -> float:
        """The relative error of the prediction; positive if the predicted time is too long."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Calibration:
    """A network fitted to measured points."""

    network: Network
    points: Sequence[FittedPoint]

    @property
    def median_error(self) -> float:
        """The median of the absolute relative errors."""
        return median(abs(point.relative_error) for point in self.points)

    @property
    def max_error(self) -> float:
        """The largest absolute relative error."""
        return max(abs(point.relative_error) for point in self.points)


def calibrate(result: dict[str, Any], name: str, cost: Cost) -> Calibration:
    """Fit a network to the collectives that a `bench collectives` result contains for `name`. `cost` is the cost of an
    allreduce.

    The fit uses the collectives of gradients if the result contains them, and otherwise the public allreduces, which
    include a consistency check. It minimizes squared relative errors, so that large messages do not dominate.
    Allreduces whose time differs by a factor of more than 1.25 from the time of the best network through the largest
    message are ignored, together with the allgathers of the same size: for example, small messages are faster than the
    bandwidth if the network permits bursts.

    All parameters are >= 0. beta includes the cost of the reduction, because the measurements do not separate the two.
    The overhead per operation is 0 without allgathers, and for algorithms whose allreduce sends as many messages as an
    allgather, because only operations with different numbers of messages separate it from alpha. Raises ReportError for
    fewer than two sizes of allreduces.
    """
    rows = [row for row in result.get("gradients", ()) if row_name(row) == name]
    if not rows:
        rows = [row for row in result["rows"] if row_name(row) == name and row["operation"] == "allreduce"]
    num_ranks = result["ranks"]
    allreduces = {row["bytes"]: quartiles(row["seconds"])[1] for row in rows if row["operation"] == "allreduce"}
    if len(allreduces) < 2:
        raise ReportError(
            f"Fitting alpha and beta takes allreduces of at least two sizes, and {name} has {len(allreduces)}. "
            "Measure with: unitrain bench collectives --operations allreduce --json FILE"
        )
    sizes = list(allreduces)
    measured_seconds = np.array(list(allreduces.values()))
    # relative @ (alpha, beta, overhead) is predicted / measured
    relative = _coefficients(cost, num_ranks, sizes) / measured_seconds[:, None]
    consistent = _mask_of_consistent_points(relative[:, :2], sizes.index(max(sizes)))
    consistent_sizes = {size for size, is_consistent in zip(sizes, consistent, strict=True) if is_consistent}
    allgathers = {
        row["bytes"]: quartiles(row["seconds"])[1]
        for row in rows
        if row["operation"] == "allgather" and row["bytes"] in consistent_sizes
    }
    fitted, num_parameters = relative[consistent], 2
    if allgathers:
        coefficients = _coefficients(ring_allgather, num_ranks, list(allgathers))
        both = np.concatenate([fitted, coefficients / np.array(list(allgathers.values()))[:, None]])
        if np.linalg.matrix_rank(both) == both.shape[1]:
            fitted, num_parameters = both, 3
    alpha, beta, overhead = [*map(float, _positive_least_squares(fitted[:, :num_parameters])), 0.0][:3]
    network = Network(alpha=alpha, beta=beta, overhead_seconds=overhead, max_in_flight=rows[0].get("max_in_flight", 1))
    points = [
        FittedPoint(size, seconds, operation_seconds(operation_cost, num_ranks, size, network))
        for operation_cost, seconds_by_size in ((cost, allreduces), (ring_allgather, allgathers))
        for size, seconds in seconds_by_size.items()
    ]
    return Calibration(network, points)


def _coefficients(cost: Cost, num_ranks: int, sizes: list[int]) -> np.ndarray[Any, Any]:
    """Return the coefficients of alpha, beta and the overhead, [sizes, 3]. Costs are linear in these parameters, so a
    coefficient is the cost with this parameter 1 and the others 0."""
    units = [Network(alpha=1, beta=0), Network(alpha=0, beta=1), Network(alpha=0, beta=0, overhead_seconds=1)]
    return np.array([[operation_seconds(cost, num_ranks, size, unit) for unit in units] for size in sizes])


def _mask_of_consistent_points(relative: np.ndarray[Any, Any], largest: int) -> np.ndarray[Any, Any]:
    """Return a boolean mask of the points that agree, within a factor of _MAX_DEVIATION, with the best candidate
    network. The candidates pass through the point with the `largest` message, and through another point or the origin
    (alpha = 0). The best candidate has the smallest sum of absolute logarithmic errors. The mask contains all points if
    the best candidate agrees with only one."""
    all_points = np.ones(len(relative), dtype=bool)
    if not relative.all():  # the allreduces of one rank cost nothing
        return all_points
    networks = [np.array([0.0, 1 / relative[largest, 1]])]
    for point in relative:
        with suppress(np.linalg.LinAlgError):
            networks.append(np.linalg.solve(np.array([relative[largest], point]), np.ones(2)))
    errors = [np.abs(np.log(relative @ network)) for network in networks if (network >= 0).all()]
    consistent = min(errors, key=lambda error: float(error.sum())) <= math.log(_MAX_DEVIATION)
    return consistent if consistent.sum() > 1 else all_points


def _positive_least_squares(columns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the x >= 0 that minimizes |columns x - 1|.

    At the minimum, some elements of x are 0 and the others are an unconstrained minimum, so each set of elements is
    tried.
    """
    num_columns = columns.shape[1]
    candidates = [np.zeros(num_columns)]
    for chosen in range(1, 1 << num_columns):
        indices = [index for index in range(num_columns) if chosen >> index & 1]
        x = np.zeros(num_columns)
        x[indices] = np.linalg.lstsq(columns[:, indices], np.ones(len(columns)), rcond=None)[0]
        if (x >= 0).all():
            candidates.append(x)
    return min(candidates, key=lambda x: float(((columns @ x - 1) ** 2).sum()))
