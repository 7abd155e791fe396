"""The process groups in which distributed models communicate, one for each model that exists.

A process group matches the operations of the ranks by their order, or, as in Horovod, by their names, order and size.
Ranks may reach several models in different orders: a rank skips a layer, or chooses the order of the models from its
data. In one group, the gradients of different models could then be summed without an error. As each model has its own
group, the operations of one model are only matched with each other.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from unitrain.backends.base import Communicator
from unitrain.backends.gradients.hierarchical_group import HierarchicalGroup


class ModelGroup:
    """The process group of one model at a time, and its group for hierarchical allreduces if that is used."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self.process_group = process_group
        self._hierarchical_group: HierarchicalGroup | None = None
        self._get_model: Callable[[], Any] = lambda: None

    @property
    def is_free(self) -> bool:
        """Whether no model uses the group on this rank, because the model was deleted."""
        return self._get_model() is None

    def is_used_by(self, model: object) -> bool:
        """Return whether `model` uses the group."""
        return self._get_model() is model

    def assign(self, model: object) -> None:
        """Reserve the group for `model` until `model` is deleted."""
        self._get_model = weakref.ref(model)

    def get_hierarchical_group(
        self, create: Callable[[dist.ProcessGroup], HierarchicalGroup | None]
    ) -> HierarchicalGroup | None:
        """Return the group for hierarchical allreduces. The first call creates it with `create`, so all ranks must call
        this method."""
        if self._hierarchical_group is None:
            self._hierarchical_group = create(self.process_group)
        return self._hierarchical_group

    def leave(self) -> None:
        """Release the process group, and end the thread of the hierarchical group."""
        if self._hierarchical_group is not None:
            self._hierarchical_group.leave()
        del self.process_group, self._hierarchical_group


class ModelGroups:
    """Selects the group of each new model of a backend.

    The groups of deleted models are used again, so their number is limited by the number of models that exist at the
    same time. A single model uses `default_group`, unless ranks may use different parameters of it: the order of its
    buckets relative to collectives of the user, in the same backward pass, then depends on the rank.
    """

    def __init__(
        self, communicator: Communicator, default_group: dist.ProcessGroup, create: Callable[[], dist.ProcessGroup]
    ) -> None:
        """`create` returns a new group of all ranks, which all call it."""
        self._communicator, self._create = communicator, create
        self._groups = [ModelGroup(default_group)]

    def acquire(self, *, may_be_default: bool) -> ModelGroup:
        """Return a group that no model uses on any rank. All ranks must call this method.

        Python deletes objects in reference cycles at different times on different ranks, so the ranks compare which
        groups are free. They delete such objects before they create another group.
        """
        group = self._find_free_group(may_be_default)
        if group is None and len(self._groups) > 1:
            gc.collect()
            group = self._find_free_group(may_be_default)
        if group is None:
            group = ModelGroup(self._create())
            self._groups.append(group)
        return group

    def _find_free_group(self, may_be_default: bool) -> ModelGroup | None:
        is_free = torch.tensor(
            [group.is_free for group in self._groups], dtype=torch.int32, device=self._communicator.device
        )
        free_on_all_ranks = self._communicator.allreduce(is_free, "min").tolist()
        for index, group in enumerate(self._groups):
            if free_on_all_ranks[index] and (index > 0 or may_be_default):
                return group
        return None

    def group_of(self, model: object) -> ModelGroup:
        """Return the group of the distributed `model`, or the default group for a model that is not distributed."""
        return next((group for group in self._groups if group.is_used_by(model)), self._groups[0])

    def leave(self) -> None:
        """Release all groups."""
        for group in self._groups:
            group.leave()
        self._groups.clear()
