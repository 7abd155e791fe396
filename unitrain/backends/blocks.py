"""Blocks of a model: the modules of given classes or sizes, such as the layers of a transformer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from unitrain.errors import ModelError, did_you_mean

_MAX_LISTED = 8
BlockClass = type[nn.Module] | str
# Classes, or the minimum number of elements in the parameters of a block.
BlockChoice = Sequence[BlockClass] | int


def find_blocks(model: nn.Module, classes: BlockClass | Sequence[BlockClass], setting: str) -> dict[str, nn.Module]:
    """Return the outermost modules of `model` that are instances of `classes` (classes or class names), by name.

    Raises ModelError, which names `setting`, if a class is not a module class, if the model has no module of that
    class, or if the class is a container without a forward method, such as ModuleList.
    """
    wanted = [classes] if isinstance(classes, type | str) else list(classes)
    for block in wanted:
        _check_class(model, block, setting)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not _is_inside(name, found) and any(is_of_class(module, block) for block in wanted):
            _check_has_forward(module, setting)
            found[name] = module
    return found


def find_repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules of `model` whose class occurs more than once in it, by name.

    Modules without submodules, and nn.Sequential, nn.ModuleList and nn.ModuleDict, are not blocks.
    """
    counts = Counter(type(module) for module in model.modules() if _is_composed(module))
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _is_composed(module) and counts[type(module)] > 1 and not _is_inside(name, found):
            found[name] = module
    return found


def find_large_blocks(model: nn.Module, elements: int) -> dict[str, nn.Module]:
    """Return the innermost modules of `model` whose parameters have at least `elements` elements, by name.

    Containers without a forward method, such as ModuleList, are not blocks. Modules in an nn.MultiheadAttention are not
    blocks either, because it does not call them.
    """
    found: dict[str, nn.Module] = {}
    has_block: dict[nn.Module, bool] = {}

    def search(name: str, module: nn.Module) -> bool:
        """Add the blocks inside `module`, or else `module` itself if it is one. Return whether a block was found."""
        if module not in has_block:
            has_block[module] = add(name, module)
        return has_block[module]

    def add(name: str, module: nn.Module) -> bool:
        children = [] if isinstance(module, nn.MultiheadAttention) else list(module.named_children())
        inside = [search(f"{name}.{child_name}".removeprefix("."), child) for child_name, child in children]
        if any(inside):
            return True
        is_container = type(module).forward is nn.Module.forward
        if is_container or sum(parameter.numel() for parameter in module.parameters()) < elements:
            return False
        found[name] = module
        return True

    search("", model)
    return found


def is_of_class(module: nn.Module, block: BlockClass) -> bool:
    """Return whether `module` is an instance of the class, or of the class name, `block`, including subclasses."""
    if isinstance(block, str):
        return any(kind.__name__ == block for kind in type(module).__mro__ if issubclass(kind, nn.Module))
    return isinstance(module, block)


def _is_composed(module: nn.Module) -> bool:
    is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return not is_container and any(True for _ in module.children())


def _is_inside(name: str, outer_names: dict[str, nn.Module]) -> bool:
    return any(name.startswith(f"{outer}.") or outer == "" for outer in outer_names)


def _check_class(model: nn.Module, block: Any, setting: str) -> None:
    names = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
    if isinstance(block, str):
        if block not in names and not any(is_of_class(module, block) for module in model.modules()):
            shown = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
            raise ModelError(
                f"{type(model).__name__} has no module of class {block!r}, which {setting} names. "
                f"{did_you_mean(block, names)}Classes of its modules: {shown}."
            )
    elif not (isinstance(block, type) and issubclass(block, nn.Module)):
        raise ModelError(
            f"{setting} takes module classes or class names, got {block!r}. "
            "Name the class of the repeated blocks, such as nn.TransformerEncoderLayer."
        )
    elif not any(isinstance(module, block) for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__} has no module of class {block.__name__!r}, which {setting} names. "
            f"Classes of its modules: {', '.join(names[:_MAX_LISTED])}."
        )


def _check_has_forward(module: nn.Module, setting: str) -> None:
    if type(module).forward is nn.Module.forward:
        inner = next((type(child).__name__ for child in module.children()), "Block")
        raise ModelError(
            f"{setting} names {type(module).__name__}, a container without a forward method. Name the class of the "
            f"modules in it: {inner!r}."
        )
