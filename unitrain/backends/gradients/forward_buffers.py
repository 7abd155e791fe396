"""Broadcast, from rank 0, the buffers that a training forward pass reads, such as codebooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.backends.objects import broadcast_tensors
from unitrain.torch_compat import BatchNormBase, InstanceNormBase, buffers_by_name, disable_compile, tensor_version

# The search for modified buffers runs in calls 1, 2, 4, 8, ... of `broadcast` (the first call is 0), and then every
# 1024 calls.
_MAX_SEARCH_INTERVAL = 1024


class ForwardBufferBroadcaster:
    """Broadcasts the buffers that a training forward pass reads, like DDP with broadcast_buffers=True.

    Running statistics of torch's normalization layers are not read in training mode. They differ between ranks while
    the layer is in training mode, and are broadcast from rank 0 when it is switched to eval mode. All other buffers are
    broadcast in the first call of `broadcast`. Afterwards, each call broadcasts the buffers that a forward pass on any
    rank has modified. The ranks search for modified buffers in only a few calls, which are the same on every rank.
    After the first call, buffers that were never modified are not broadcast.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        self._statistics_layers: list[nn.Module] = []
        self._buffer_locations: list[tuple[dict[str, Tensor | None], str]] = []
        seen: set[int] = set()
        for module in model.modules():
            named_buffers = [(name, buffer) for name, buffer in buffers_by_name(module).items() if buffer is not None]
            if named_buffers and _reads_buffers_in_eval_only(module):
                self._statistics_layers.append(module)
                continue
            self._buffer_locations += [
                (buffers_by_name(module), name) for name, buffer in named_buffers if id(buffer) not in seen
            ]
            seen.update(id(buffer) for _, buffer in named_buffers)
        self._last_modes: list[bool] | None = None
        self._initial_versions: list[tuple[Tensor | None, int]] = []
        self._changed_indices: list[int] = []
        self._num_calls = 0

    @property
    def is_needed(self) -> bool:
        """Whether there is more than one rank and the model has buffers."""
        return self._communicator.size > 1 and bool(self._statistics_layers or self._buffer_locations)

    @disable_compile
    def broadcast(self) -> None:
        """Broadcast, from rank 0, the buffers that the next forward pass reads. All ranks call it in the same steps."""
        shared = self._statistics_of_layers_switched_to_eval()
        if self._buffer_locations:
            if self._num_calls == 0:
                shared += [
                    buffer for buffer in self._get_buffers(range(len(self._buffer_locations))) if buffer is not None
                ]
            elif (
                self._num_calls & (self._num_calls - 1) == 0
                if self._num_calls < _MAX_SEARCH_INTERVAL
                else not (self._num_calls % _MAX_SEARCH_INTERVAL)
            ):
                self._find_changed_buffers()
            shared += [buffer for buffer in self._get_buffers(self._changed_indices) if buffer is not None]
            self._num_calls += 1
        if shared:
            broadcast_tensors(self._communicator, shared)
        if self._num_calls == 1 and not self._initial_versions:
            self._initial_versions = self._buffer_versions()

    def _statistics_of_layers_switched_to_eval(self) -> list[Tensor]:
        """Return the running statistics of the layers that changed from training to eval mode since the last call."""
        modes = [module.training for module in self._statistics_layers]
        if modes == self._last_modes:
            return []
        before, self._last_modes = self._last_modes or [True] * len(modes), modes
        changed = [
            module
            for module, trained, trains in zip(self._statistics_layers, before, modes, strict=True)
            if trained and not trains
        ]
        return [buffer for module in changed for buffer in buffers_by_name(module).values() if buffer is not None]

    def _find_changed_buffers(self) -> None:
        """Add to `_changed_indices` the buffers that a forward pass on any rank has modified. All ranks call it."""
        is_written = [
            initial is not buffer or version != initial_version
            for (initial, initial_version), (buffer, version) in zip(
                self._initial_versions, self._buffer_versions(), strict=True
            )
        ]
        flags = torch.tensor(is_written, dtype=torch.uint8, device=self._communicator.device)
        on_any_rank = self._communicator.allreduce(flags, "max").tolist()
        self._changed_indices = [
            index for index, written in enumerate(on_any_rank) if written or index in self._changed_indices
        ]

    def _get_buffers(self, indices: Sequence[int]) -> list[Tensor | None]:
        # The buffer is looked up each time, because a forward pass may assign a different tensor.
        return [buffers[name] for buffers, name in (self._buffer_locations[index] for index in indices)]

    def _buffer_versions(self) -> list[tuple[Tensor | None, int]]:
        buffers = self._get_buffers(range(len(self._buffer_locations)))
        return [(buffer, -1 if buffer is None else tensor_version(buffer)) for buffer in buffers]


def _reads_buffers_in_eval_only(module: nn.Module) -> bool:
    """Return whether the buffers of `module` are statistics that its forward pass reads in eval mode only."""
    kind: Any = type(module)
    return isinstance(module, BatchNormBase | InstanceNormBase) and (
        kind.forward in (BatchNormBase.forward, nn.SyncBatchNorm.forward, InstanceNormBase.forward)
        or getattr(kind, "keeps_statistics", False)
    )
