"""Overrides of Trainer arguments by tools, without changes to the user's script.

`unitrain verify`, `unitrain tune` and `unitrain memory` run a script with the environment variable UNITRAIN_OVERRIDES,
which names a function of the tool and its argument. The Trainer calls this function to create a TrainerOverrides
object, and trains with the arguments that the object returns. The Trainer therefore does not depend on the tools.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unitrain.bootstrap import environment

if TYPE_CHECKING:
    from torch import nn

    from unitrain.backends.base import Backend
    from unitrain.callbacks.callback import Callback
    from unitrain.config import TrainConfig

OVERRIDES_VARIABLE = "UNITRAIN_OVERRIDES"


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


def overrides_setting(factory: str, argument: str) -> str:
    """Return a value of UNITRAIN_OVERRIDES: the Trainer calls `factory`, "module:function", with `argument`."""
    return f"{factory} {argument}"


def load_overrides() -> TrainerOverrides | None:
    """Return the overrides of the tool that started this process, or None."""
    setting = environment.get_variable(OVERRIDES_VARIABLE)
    if setting is None:
        return None
    factory, _, argument = setting.partition(" ")
    module, _, function = factory.partition(":")
    overrides: TrainerOverrides = getattr(importlib.import_module(module), function)(argument)
    return overrides
