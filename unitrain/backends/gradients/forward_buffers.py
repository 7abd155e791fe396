"""Buffers that a training forward reads, such as codebooks, kept equal to rank 0's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from unitrain.backends.base import Communicator
from unitrain.backends.objects import broadcast_tensors

# Writes are looked for at the forwards 1, 2, 4, 8 and so on, and then once in so many.
_LOOK_FORWARDS = 1024


class ForwardBuffers:
    """Keeps the buffers that a training forward reads equal to rank 0's, as DDP does with broadcast_buffers=True.

    Running statistics of torch's normalization layers are not read in training mode: they stay each rank's own while
    their layer trains, and become rank 0's when the layer changes to eval mode. All other buffers become rank 0's at
    the first `share`; from then on those that a forward on any rank has written, such as a codebook, do at each call,
    in one broadcast. The ranks find out which these are at a few calls, at the same ones on every rank; the other calls
    communicate nothing for buffers that are never written.
    """

    def __init__(self, model: nn.Module, communicator: Communicator) -> None:
        self._communicator = communicator
        self._statistics: list[nn.Module] = []
        self._places: list[tuple[dict[str, Tensor | None], str]] = []
        seen: set[int] = set()
        for module in model.modules():
            held = [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]
            if held and _keeps_statistics(module):
                self._statistics.append(module)
                continue
            self._places += [(module._buffers, name) for name, buffer in held if id(buffer) not in seen]
            seen.update(id(buffer) for _, buffer in held)
        self._modes: list[bool] | None = None
        self._known: list[tuple[Tensor | None, int]] = []
        self._written: list[int] = []
        self._calls = 0

    def __bool__(self) -> bool:
        """Return whether the model has buffers at all, on more than one rank."""
        return self._communicator.size > 1 and bool(self._statistics or self._places)

    @_disable_dynamo
    def share(self) -> None:
        """Set the buffers that the coming forward reads to rank 0's. All ranks call it, before the same forwards."""
        shared = self._changed_to_eval()
        if self._places:
            if self._calls == 0:
                shared += [buffer for buffer in self._buffers(range(len(self._places))) if buffer is not None]
            elif (
                self._calls & (self._calls - 1) == 0
                if self._calls < _LOOK_FORWARDS
                else not (self._calls % _LOOK_FORWARDS)
            ):
                self._look_for_writes()
            shared += [buffer for buffer in self._buffers(self._written) if buffer is not None]
            self._calls += 1
        if shared:
            broadcast_tensors(self._communicator, shared)
        if self._calls == 1 and not self._known:
            self._known = self._versions()

    def _changed_to_eval(self) -> list[Tensor]:
        """Return the running statistics of the layers that were trained before and are in eval mode now."""
        modes = [module.training for module in self._statistics]
        if modes == self._modes:
            return []
        before, self._modes = self._modes or [True] * len(modes), modes
        changed = [module for module, was, now in zip(self._statistics, before, modes, strict=True) if was and not now]
        return [buffer for module in changed for buffer in module._buffers.values() if buffer is not None]

    def _look_for_writes(self) -> None:
        """Add the buffers that any rank has written to those that are shared at each call. All ranks call it."""
        here = [
            known is not buffer or version != before
            for (known, before), (buffer, version) in zip(self._known, self._versions(), strict=True)
        ]
        flags = torch.tensor(here, dtype=torch.uint8, device=self._communicator.device)
        anywhere = self._communicator.allreduce(flags, "max").tolist()
        self._written = [index for index, written in enumerate(anywhere) if written or index in self._written]

    def _buffers(self, indices: Sequence[int]) -> list[Tensor | None]:
        # Looked up each time: a forward may assign another tensor.
        return [buffers[name] for buffers, name in (self._places[index] for index in indices)]

    def _versions(self) -> list[tuple[Tensor | None, int]]:
        buffers = self._buffers(range(len(self._places)))
        return [(buffer, -1 if buffer is None else buffer._version) for buffer in buffers]


def _keeps_statistics(module: nn.Module) -> bool:
    """Return whether the buffers of `module` are statistics that its forward reads in eval mode only."""
    kind: Any = type(module)
    return isinstance(module, _BatchNorm | _InstanceNorm) and (
        kind.forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward, _InstanceNorm.forward)
        or getattr(kind, "keeps_statistics", False)
    )
