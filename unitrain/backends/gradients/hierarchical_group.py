"""Hierarchical allreduce of gradients on CPUs: first within each host, then between the hosts.

In a ring allreduce over n ranks, each host sends 2(n - 1)/n times the size of the gradients to another host, even if
several ranks run on each host. In a hierarchical allreduce over h hosts, it sends 2(h - 1)/h times this size, which is
faster if the network between the hosts is slow. On GPUs, NCCL selects such algorithms itself.
"""

# torch's stubs declare each collective by several overloads with different argument names; torch passes arguments by
# position.
# mypy: disable-error-code="override, call-arg"

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.backends.capabilities import Tunable
from unitrain.backends.rank_groups import Subgroup
from unitrain.bootstrap import environment
from unitrain.errors import EnvironmentVariableError
from unitrain.threads import start_thread
from unitrain.torch_compat import Work

HIERARCHICAL = Tunable(
    "UNITRAIN_HIERARCHICAL_ALLREDUCE",
    "whether gradients are reduced within each host first (1), or over all ranks at once (0)",
    "0",
    ("1",),
    needs_ranks_on_several_hosts=True,
)
_EXIT_SECONDS = 5.0

# Creates groups of ranks, and returns those that contain this rank; see `SupportsPointToPoint.create_rank_groups`.
CreateGroups = Callable[[Sequence[Sequence[int]]], list[Subgroup]]


def selects_hierarchical_allreduce(device: torch.device) -> bool:
    """Return whether the environment selects the hierarchical allreduce. Raises EnvironmentVariableError for an invalid
    value, and if the allreduce is selected for a GPU."""
    text = environment.get_variable(HIERARCHICAL.variable) or HIERARCHICAL.default
    if text not in ("0", "1"):
        raise EnvironmentVariableError(
            f"{HIERARCHICAL.variable} must be 1 or 0, got {text!r}. Use {HIERARCHICAL.variable}=1"
        )
    if text == "1" and device.type != "cpu":
        raise EnvironmentVariableError(
            f"{HIERARCHICAL.variable}=1 requires ranks that compute on CPUs, but this rank uses {device}. NCCL selects "
            f"its algorithms itself. Use {HIERARCHICAL.variable}=0"
        )
    return text == "1"


class HierarchicalGroup(dist.ProcessGroup):
    """A process group whose allreduce sums CPU tensors on the first rank of each host, then over these first ranks, and
    broadcasts the sum within each host.

    Other collectives run in `group`, which contains all ranks. `ranks_by_host` contains the ranks of each host in
    ascending order. All ranks create the group. The allreduces run in a separate thread, one at a time and in the order
    in which they start, which must be the same on all ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, ranks_by_host: Sequence[Sequence[int]], create_groups: CreateGroups
    ) -> None:
        super().__init__(group.rank(), group.size())
        self._group = group
        first_ranks = [ranks[0] for ranks in ranks_by_host]
        groups = create_groups([*(ranks for ranks in ranks_by_host if len(ranks) > 1), first_ranks])
        own_ranks = next(tuple(ranks) for ranks in ranks_by_host if group.rank() in ranks)
        self._first_rank = own_ranks[0]
        self._host_group = groups[0] if len(own_ranks) > 1 else None
        self._first_ranks_group = groups[-1] if group.rank() == self._first_rank else None
        self._started: SimpleQueue[_HierarchicalWork | None] = SimpleQueue()
        self._thread = start_thread(self._run, name="unitrain hierarchical allreduce", restarts=True)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Start to sum each of `tensors` in place over all ranks."""
        work = _HierarchicalWork(tensors)
        self._started.put(work)
        return work

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._group.broadcast(tensors, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self._group.allgather(outputs, inputs, opts)

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return "unitrain hierarchical"

    def leave(self) -> None:
        """End the thread."""
        self._started.put(None)
        self._thread.join(_EXIT_SECONDS)  # after a failure, a collective may still be waiting

    def _run(self) -> None:
        while (work := self._started.get()) is not None:
            work.run(self._sum)

    def _sum(self, tensor: Tensor) -> None:
        if self._host_group is not None:
            dist.reduce(tensor, self._first_rank, group=self._host_group.process_group)
        if self._first_ranks_group is not None:
            dist.all_reduce(tensor, group=self._first_ranks_group.process_group)
        if self._host_group is not None:
            dist.broadcast(tensor, self._first_rank, group=self._host_group.process_group)


class _HierarchicalWork(Work):
    """An allreduce of `tensors` that the thread of a HierarchicalGroup runs."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._future: Any = torch.futures.Future()

    def run(self, sum_over_ranks: Callable[[Tensor], None]) -> None:
        """Sum the tensors, and complete the future with them or with the error."""
        try:
            for tensor in self._tensors:
                sum_over_ranks(tensor)
        except Exception as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(self._tensors)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        done: bool = self._future.done()
        return done

    def get_future(self) -> Any:
        return self._future

    def result(self) -> list[Tensor]:
        return self._tensors
