"""What collectives cost on paper: the alpha-beta-gamma model, one formula for each algorithm.

A message of n bytes takes alpha + n beta seconds, whoever sends it to whom; adding up n bytes takes n gamma. A rank
sends one message and receives one at a time. p is the number of ranks, n the bytes of the whole array, lg to the base
of 2. The sources:

[T] Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, IJHPCA 19(1), 2005
[P] Patarasuk, Yuan: Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations, JPDC 69(2), 2009
[S] Sergeev, Del Balso: Horovod: fast and easy distributed deep learning in TensorFlow, arXiv 1802.05799, 2018
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unitrain.errors import ConfigError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Network:
    """Seconds per message (`alpha`), and per byte that is sent (`beta`) or added up (`gamma`)."""

    alpha: float
    beta: float
    gamma: float = 0.0


Cost = Callable[[int, float, Network], float]


def ring_reducescatter(ranks: int, size: float, network: Network) -> float:
    """(p-1) alpha + (p-1)/p n beta + (p-1)/p n gamma: every step passes an array's p-th part on. [P], [T]."""
    part = size / ranks
    return (ranks - 1) * (network.alpha + part * (network.beta + network.gamma))


def ring_allgather(ranks: int, size: float, network: Network) -> float:
    """(p-1) alpha + (p-1)/p n beta. [T], on allgather."""
    return (ranks - 1) * (network.alpha + size / ranks * network.beta)


def ring_allreduce(ranks: int, size: float, network: Network) -> float:
    """2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma, a reducescatter and an allgather. No algorithm sends fewer
    bytes: [P]. It is Horovod's: [S]."""
    return ring_reducescatter(ranks, size, network) + ring_allgather(ranks, size, network)


def recursive_doubling_allreduce(ranks: int, size: float, network: Network) -> float:
    """lg p (alpha + n beta + n gamma), [T], on allreduce: whole arrays, exchanged with ranks 1, 2, 4 ... away.

    Ranks beyond the last power of two give their array to a partner first and get the result at the end, which adds
    2 alpha + 2n beta + n gamma.
    """
    exchange = network.alpha + size * (network.beta + network.gamma)
    return (ranks.bit_length() - 1) * exchange + _beyond_a_power_of_two(ranks, size, network)


def halving_doubling_allreduce(ranks: int, size: float, network: Network) -> float:
    """2 lg p alpha + 2(p-1)/p n beta + (p-1)/p n gamma, [T], on allreduce (Rabenseifner's): halves, quarters ... are
    reduced, then gathered.

    Ranks beyond the last power of two as in `recursive_doubling_allreduce`.
    """
    steps = ranks.bit_length() - 1
    moved = size - size / (1 << steps)
    return (
        2 * steps * network.alpha
        + moved * (2 * network.beta + network.gamma)
        + _beyond_a_power_of_two(ranks, size, network)
    )


def tree_allreduce(ranks: int, size: float, network: Network) -> float:
    """2 ceil(lg p) (alpha + n beta) + ceil(lg p) n gamma: reduced down a binomial tree, and broadcast up it. [T], on
    reduce and broadcast."""
    return tree_broadcast(ranks, size, network) + _levels(ranks) * (
        network.alpha + size * (network.beta + network.gamma)
    )


def tree_broadcast(ranks: int, size: float, network: Network) -> float:
    """ceil(lg p) (alpha + n beta): who has the array sends it on to one that has not. [T], on broadcast."""
    return _levels(ranks) * (network.alpha + size * network.beta)


def parameter_server(ranks: int, size: float, network: Network, servers: int = 1) -> float:
    """2p (alpha + n/s beta) + p n/s gamma, for s servers, at most p: every rank sends each server its part of the array
    and gets it back, and a server's link carries the parts of all ranks, one after the other.

    The bottleneck that [S] describes; a count of messages as in [T]. With as many servers as ranks it costs
    2p alpha + 2n beta + n gamma, nearly the bytes of a ring.
    """
    part = size / servers
    return ranks * (2 * network.alpha + part * (2 * network.beta + network.gamma)) if ranks > 1 else 0.0


def hierarchical_allreduce(ranks: int, size: float, network: Network, per_host: int, host: Network) -> float:
    """A ring reducescatter inside each host, ring allreduces between the hosts, and an allgather inside: of g ranks on
    each of N hosts, that costs inside as `ring_reducescatter` and `ring_allgather` of g, and between hosts
    2(N-1) (alpha + n/N beta) + (N-1)/N n/g gamma.

    Each of the g ranks of a host reduces its own n/g bytes with its like on the other hosts, and all g share the host's
    link. It is Horovod's hierarchical allreduce (HOROVOD_HIERARCHICAL_ALLREDUCE).
    """
    if ranks <= per_host:
        return ring_allreduce(ranks, size, host)
    if ranks % per_host:
        raise ConfigError(
            f"{ranks} ranks do not fill hosts of {per_host}. Use multiples of --ranks-per-host for --ranks."
        )
    shared = Network(alpha=network.alpha, beta=per_host * network.beta, gamma=network.gamma)
    return (
        ring_reducescatter(per_host, size, host)
        + ring_allreduce(ranks // per_host, size / per_host, shared)
        + ring_allgather(per_host, size, host)
    )


ALGORITHMS: dict[str, Cost] = {
    "ring": ring_allreduce,
    "recursive-doubling": recursive_doubling_allreduce,
    "halving-doubling": halving_doubling_allreduce,
    "tree": tree_allreduce,
    "parameter-server": parameter_server,
}
HIERARCHICAL = "hierarchical"


def check_algorithms(names: list[str]) -> None:
    """Raise ConfigError for a name of no algorithm."""
    for name in names:
        if name not in (known := [*ALGORITHMS, HIERARCHICAL]):
            raise ConfigError(f"Unknown algorithm {name!r}. {did_you_mean(name, known)}Available: {', '.join(known)}.")


def _levels(ranks: int) -> int:
    return (ranks - 1).bit_length()


def _beyond_a_power_of_two(ranks: int, size: float, network: Network) -> float:
    if ranks & (ranks - 1) == 0:
        return 0.0
    return 2 * network.alpha + size * (2 * network.beta + network.gamma)
