"""Broadcast, from rank 0, the buffers that a training forward pass reads, such as codebooks.

A training forward pass is a forward pass with grad mode enabled, even if the model is in eval mode.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.backends.objects import broadcast_tensors
from unitrain.output import get_logger
from unitrain.torch_compat import BatchNormBase, InstanceNormBase, buffers_by_name, disable_compile

_LOGGER = get_logger(__name__)
_LARGE_BYTES = 2**24  # broadcasting more bytes prolongs each step noticeably on CPUs


class ForwardBufferBroadcaster:
    """Broadcasts the buffers that a training forward pass reads, like DDP with broadcast_buffers=True.

    Running statistics of torch's normalization layers are not read in training mode. These statistics differ between
    ranks while a layer is in training mode. After a layer was switched to eval mode, its statistics are broadcast
    from rank 0 before the next forward pass with grad mode enabled. Later changes of the statistics, between two such
    forward passes in eval mode, are not detected, because ranks without a change would have to take part in the
    broadcast. Before an evaluation, `modules.buffers.broadcast_buffers` broadcasts the running statistics. All other
    buffers are broadcast in each call of `broadcast`, or only in the first call if `every_pass` is False. Buffers that
    no rank has modified are broadcast too, because a write to `buffer.data` can be detected only by comparing all
    values. `broadcast` is used instead of `communicator.broadcast`.
    """

    def __init__(
        self,
        model: nn.Module,
        communicator: Communicator,
        *,
        every_pass: bool = True,
        broadcast: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._communicator, self._broadcast = communicator, broadcast
        self._every_pass = every_pass
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
        self._is_first_call = True
        size = sum(buffer.numel() * buffer.element_size() for buffer in self._buffers())
        if every_pass and communicator.size > 1 and communicator.rank == 0 and size > _LARGE_BYTES:
            _LOGGER.warning(
                "The buffers of %s (%.0f MB) are broadcast in each training step, as in DDP. If no training step "
                "modifies them, use: backend.distributed_model(model, broadcast_buffers=False), or "
                "TrainConfig(broadcast_buffers=False).",
                type(model).__name__,
                size / 1e6,
            )

    @property
    def is_needed(self) -> bool:
        """Whether there is more than one rank and the model has buffers."""
        return self._communicator.size > 1 and bool(self._statistics_layers or self._buffer_locations)

    @disable_compile
    def broadcast(self) -> None:
        """Broadcast, from rank 0, the buffers that the next forward pass reads. All ranks must call this method in the
        same steps."""
        to_broadcast = self._statistics_of_layers_switched_to_eval()
        if self._every_pass or self._is_first_call:
            to_broadcast += self._buffers()
        self._is_first_call = False
        if to_broadcast:
            broadcast_tensors(self._communicator, to_broadcast, self._broadcast)

    def _buffers(self) -> list[Tensor]:
        # The buffers are looked up each time, because a forward pass may assign different tensors. Writes to
        # `buffer.data` do not invalidate an earlier forward pass whose backward pass has not run yet.
        return [buffer.data for buffers, name in self._buffer_locations if (buffer := buffers[name]) is not None]

    def _statistics_of_layers_switched_to_eval(self) -> list[Tensor]:
        """Return the running statistics of the layers that were in training mode at the last call and are in eval mode
        now."""
        modes = [module.training for module in self._statistics_layers]
        if modes == self._last_modes:
            return []
        last_modes, self._last_modes = self._last_modes or [True] * len(modes), modes
        switched_layers = [
            module
            for module, was_training, is_training in zip(self._statistics_layers, last_modes, modes, strict=True)
            if was_training and not is_training
        ]
        return [
            buffer for module in switched_layers for buffer in buffers_by_name(module).values() if buffer is not None
        ]


def split_running_statistics(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Return the running statistics of `model`, which its layers read in eval mode only, and its other buffers."""
    statistics: dict[int, Tensor] = {}
    others: dict[int, Tensor] = {}
    for module in model.modules():
        buffers = statistics if _reads_buffers_in_eval_only(module) else others
        for buffer in buffers_by_name(module).values():
            if buffer is not None:
                buffers[id(buffer)] = buffer.data
    return list(statistics.values()), list(others.values())


def _reads_buffers_in_eval_only(module: nn.Module) -> bool:
    """Return whether the buffers of `module` are statistics that its forward pass reads in eval mode only."""
    module_class: Any = type(module)
    return isinstance(module, BatchNormBase | InstanceNormBase) and (
        module_class.forward in (BatchNormBase.forward, nn.SyncBatchNorm.forward, InstanceNormBase.forward)
        or getattr(module_class, "keeps_statistics", False)
    )
