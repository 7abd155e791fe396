"""What a forward returned, looked at for the tensors that a backward can start from."""

from __future__ import annotations

from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_MOST_OBJECTS = 100  # an output may refer to a whole program
_OPAQUE = (
    str, bytes, int, float, complex, type(None), type, nn.Module, ModuleType, FunctionType, BuiltinFunctionType,
    MethodType,
)  # fmt: skip


def gradient_tensors(output: Any) -> list[Tensor]:
    """Return the tensors in `output` that require gradients.

    It looks into tuples, lists and dicts, and into the attributes of any other object, at most 100 of these.
    """
    if isinstance(output, Tensor):
        return [output] if output.requires_grad else []
    found: list[Tensor] = []
    _collect(output, found, set())
    return found


def _collect(output: Any, found: list[Tensor], seen: set[int]) -> None:
    if isinstance(output, Tensor):
        if output.requires_grad:
            found.append(output)
        return
    if isinstance(output, _OPAQUE) or id(output) in seen:
        return
    parts: Iterable[Any]
    if isinstance(output, list | tuple):
        parts = output
    elif len(seen) >= _MOST_OBJECTS:
        return
    else:
        seen.add(id(output))
        parts = _attributes(output)
        if isinstance(output, dict):
            parts = [*output.values(), *parts]
    for part in parts:
        _collect(part, found, seen)


def _attributes(output: object) -> list[Any]:
    slots = (name for kind in type(output).__mro__ for name in vars(kind).get("__slots__", ()))
    values = [getattr(output, name) for name in slots if name != "__dict__" and hasattr(output, name)]
    return [*values, *getattr(output, "__dict__", {}).values()]
