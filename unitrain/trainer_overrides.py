"""Overrides of Trainer arguments by tools, without changes to the user's script. See `unitrain.bootstrap.overrides`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unitrain.bootstrap.overrides import load_tool

if TYPE_CHECKING:
    from torch import nn

    from unitrain.backends.base import Backend
    from unitrain.callbacks.callback import Callback
    from unitrain.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """The arguments of the Trainer that a tool may replace. A tool may also change `model` in place."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    config: TrainConfig
    callbacks: Sequence[Callback]
    forward: Callable[..., Any] | None


class TrainerOverrides(Protocol):
    """The overrides of a tool. With overrides, loggers are always disabled."""

    def override(self, arguments: TrainerArguments, backend: Backend) -> TrainerArguments:
        """Return the arguments for training. Called on every rank, after the user's arguments are validated."""
        ...


def load_overrides() -> TrainerOverrides | None:
    """Return the overrides of the tool that started this process, or None."""
    overrides: TrainerOverrides | None = load_tool()
    return overrides
