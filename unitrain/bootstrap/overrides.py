"""Loading of a tool's overrides in the ranks of a script that the tool has started.

`unitrain verify`, `unitrain tune` and `unitrain memory` run a script with the environment variable UNITRAIN_OVERRIDES,
which names a function of the tool and its argument. The Trainer and the Pipeline call this function and use the object
that it returns, so they do not depend on the tools.
"""

from __future__ import annotations

import importlib
from typing import Any

from unitrain.bootstrap import environment

OVERRIDES_VARIABLE = "UNITRAIN_OVERRIDES"


def overrides_setting(factory: str, argument: str) -> str:
    """Return a value for UNITRAIN_OVERRIDES. `factory` is a "module:function" that is called with `argument`."""
    return f"{factory} {argument}"


def load_tool_overrides() -> Any:
    """Return a new object with the overrides of the tool that started this process, or None."""
    setting = environment.get_variable(OVERRIDES_VARIABLE)
    if setting is None:
        return None
    factory, _, argument = setting.partition(" ")
    module, _, function = factory.partition(":")
    return getattr(importlib.import_module(module), function)(argument)
