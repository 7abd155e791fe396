"""Groups of ranks for `local_sgd`: ranks that train synchronously, and ranks that communicate outer gradients.

The ranks of a synchronous group have equal weights, so only the first rank of each group communicates with the other
groups. It then broadcasts the result in its group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from torch import Tensor

from unitrain.backends.base import Backend, Communicator
from unitrain.backends.capabilities import SupportsAllToAll, SupportsPointToPoint, require_capability
from unitrain.backends.local_sgd_config import LocalSGDConfig
from unitrain.backends.rank_groups import Subgroup
from unitrain.backends.synchronized_errors import call_on_all_ranks
from unitrain.errors import ConfigError
from unitrain.monitoring.flight_recorder import GradientPhase

_phase_numbers = count()


class BlockingGroup:
    """All ranks of `communicator`. The group has the asynchronous collectives of Subgroup, but starting a collective
    blocks until the collective is complete."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.size, self.index = communicator.size, communicator.rank

    def start_mean(self, tensor: Tensor, phase: GradientPhase) -> Callable[[], Tensor]:
        mean = self._communicator.allreduce(tensor)
        return lambda: mean

    def start_alltoall(self, rows: Tensor, phase: GradientPhase) -> Callable[[], Tensor]:
        if isinstance(self._communicator, SupportsAllToAll):
            received = self._communicator.alltoall(rows)
        else:
            received = self._communicator.allgather(rows.unsqueeze(0))[:, self.index].contiguous()
        return lambda: received

    def start_allgather(self, row: Tensor, phase: GradientPhase) -> Callable[[], Tensor]:
        gathered = self._communicator.allgather(row)
        return lambda: gathered


OuterGroup = Subgroup | BlockingGroup


class OuterGroups:
    """The groups of ranks that `settings` selects. All ranks create this object.

    `ranks_by_group` contains the ranks of each synchronous group, and `index` is the index of this rank's group.
    `synchronous` is that group, or None if this rank trains independently. `outer` is the group of the first ranks of
    all groups, or None on other ranks. `weight` is the size of this rank's group, divided by the mean size of the
    groups.

    Raises ConfigError or UnsupportedError on every rank for groups that the job or the backend does not support.
    """

    def __init__(self, backend: Backend, settings: LocalSGDConfig) -> None:
        node_ranks = backend.allgather_object(backend.node_rank) if settings.synchronous_ranks == "host" else []
        self.ranks_by_group = call_on_all_ranks(backend, lambda: _divide_ranks(settings, backend.size, node_ranks))
        self.index = next(index for index, ranks in enumerate(self.ranks_by_group) if backend.rank in ranks)
        self.weight = outer_weight(self.ranks_by_group[self.index], self.ranks_by_group)
        self.synchronous: Subgroup | None = None
        self.outer: OuterGroup | None = BlockingGroup(backend)
        is_grouped = len(self.ranks_by_group) < backend.size
        if is_grouped:
            require_capability(
                backend, SupportsPointToPoint, f"LocalSGDConfig.synchronous_ranks={settings.synchronous_ranks!r}"
            )
        overlaps = settings.overlap_steps > 0 and backend.size > 1
        if not (is_grouped or overlaps) or not isinstance(backend, SupportsPointToPoint):
            return
        # Overlapped transfers in the default group would delay collectives of the training loop.
        first_ranks = [ranks[0] for ranks in self.ranks_by_group]
        groups = backend.create_rank_groups([first_ranks, *(ranks for ranks in self.ranks_by_group if len(ranks) > 1)])
        self.outer = groups.pop(0) if backend.rank in first_ranks else None
        self.synchronous = groups.pop() if groups else None

    def are_within(self, groups: Sequence[Sequence[int]]) -> bool:
        """Return whether all ranks of each synchronous group belong to one group in `groups`. The weights of a
        synchronous group are then equal if the weights within each group of `groups` are equal."""
        return all(any(set(ranks) <= set(group) for group in groups) for ranks in self.ranks_by_group)

    def record_phase(self) -> GradientPhase:
        """Record and return the phase of an outer-gradient transfer that starts now. All ranks must call this
        method."""
        phase = GradientPhase("outer gradient", next(_phase_numbers))
        group = self.synchronous or self.outer
        # Ranks that do not communicate in this transfer also record it, because all ranks must record the same phases.
        if isinstance(group, Subgroup):
            group.monitor.record(phase)
        return phase


def outer_weight(group: Sequence[int], groups: Sequence[Sequence[int]]) -> float:
    """Return the factor of the outer gradient of `group`: its number of ranks, divided by the mean number of ranks of
    `groups`. The compression error of the group contains the same factor."""
    return len(group) * len(groups) / sum(map(len, groups))


def _divide_ranks(settings: LocalSGDConfig, size: int, node_ranks: list[int]) -> list[list[int]]:
    """Return the ranks of each synchronous group, in ascending order of the first ranks.

    `node_ranks` contains the node rank of each rank if ranks are grouped by host.
    """
    synchronous_ranks: Any = settings.synchronous_ranks
    if synchronous_ranks == "host":
        groups: dict[int, list[int]] = {}
        for rank, node_rank in enumerate(node_ranks):
            groups.setdefault(node_rank, []).append(rank)
        return list(groups.values())
    if isinstance(synchronous_ranks, int):
        return [list(range(first, min(first + synchronous_ranks, size))) for first in range(0, size, synchronous_ranks)]
    if sum(synchronous_ranks) != size:
        raise ConfigError(
            f"LocalSGDConfig.synchronous_ranks={synchronous_ranks} divides {sum(synchronous_ranks)} ranks into groups, "
            f"but the job has {size}. Use synchronous_ranks='host' for a group per host, or sizes whose sum is the "
            "number of ranks."
        )
    firsts = [sum(synchronous_ranks[:index]) for index in range(len(synchronous_ranks))]
    return [list(range(first, first + count)) for first, count in zip(firsts, synchronous_ranks, strict=True)]
