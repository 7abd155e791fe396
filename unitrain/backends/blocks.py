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
    block_classes = [classes] if isinstance(classes, type | str) else list(classes)
    for block_class in block_classes:
        _check_block_class(model, block_class, setting)
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not _is_inside(name, blocks) and any(is_of_class(module, block_class) for block_class in block_classes):
            _check_has_forward(module, setting)
            blocks[name] = module
    return blocks


def find_repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules of `model` whose class occurs more than once in it, by name.

    Modules without submodules, and nn.Sequential, nn.ModuleList and nn.ModuleDict, are not blocks.
    """
    counts = Counter(type(module) for module in model.modules() if _is_composite(module))
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _is_composite(module) and counts[type(module)] > 1 and not _is_inside(name, blocks):
            blocks[name] = module
    return blocks


def find_large_blocks(model: nn.Module, min_elements: int) -> dict[str, nn.Module]:
    """Return the innermost modules of `model` whose parameters have at least `min_elements` elements, by name.

    Containers without a forward method, such as ModuleList, are not blocks. Modules in an nn.MultiheadAttention are not
    blocks either, because nn.MultiheadAttention reads their parameters without calling them.
    """
    blocks: dict[str, nn.Module] = {}
    has_block: dict[nn.Module, bool] = {}

    def add_blocks(name: str, module: nn.Module) -> bool:
        """Add the blocks inside `module` or, if there are none, `module` itself if it is large enough. Return whether
        `module` is or contains a block. A module that occurs several times is added only once."""
        if module not in has_block:
            has_block[module] = visit(name, module)
        return has_block[module]

    def visit(name: str, module: nn.Module) -> bool:
        children = [] if isinstance(module, nn.MultiheadAttention) else list(module.named_children())
        inside = [add_blocks(f"{name}.{child_name}".removeprefix("."), child) for child_name, child in children]
        if any(inside):
            return True
        num_elements = sum(parameter.numel() for parameter in module.parameters())
        if _lacks_forward(module) or num_elements < min_elements:
            return False
        blocks[name] = module
        return True

    add_blocks("", model)
    return blocks


def is_of_class(module: nn.Module, block_class: BlockClass) -> bool:
    """Return whether `module` is an instance of `block_class`, which is a class or the name of a class. Instances of
    subclasses count."""
    if isinstance(block_class, str):
        return any(base.__name__ == block_class for base in type(module).__mro__ if issubclass(base, nn.Module))
    return isinstance(module, block_class)


def _is_composite(module: nn.Module) -> bool:
    """Return whether `module` has submodules and is not an nn.Sequential, nn.ModuleList or nn.ModuleDict."""
    is_container = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    return not is_container and any(True for _ in module.children())


def _lacks_forward(module: nn.Module) -> bool:
    """Return whether `module` is a container without a forward method, such as ModuleList."""
    return type(module).forward is nn.Module.forward


def _is_inside(name: str, outer_names: dict[str, nn.Module]) -> bool:
    return any(name.startswith(f"{outer}.") or outer == "" for outer in outer_names)


def _check_block_class(model: nn.Module, block_class: Any, setting: str) -> None:
    is_name = isinstance(block_class, str)
    if not is_name and not (isinstance(block_class, type) and issubclass(block_class, nn.Module)):
        raise ModelError(
            f"{setting} takes module classes or class names, got {block_class!r}. "
            "Name the class of the repeated blocks, such as nn.TransformerEncoderLayer."
        )
    if not any(is_of_class(module, block_class) for module in model.modules()):
        name = block_class if is_name else block_class.__name__
        names = list(dict.fromkeys(type(module).__name__ for module in model.modules()))
        names_text = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
        raise ModelError(
            f"{type(model).__name__} has no module of class {name!r}, which {setting} names. "
            f"{did_you_mean(name, names) if is_name else ''}Classes of its modules: {names_text}."
        )


def _check_has_forward(module: nn.Module, setting: str) -> None:
    if _lacks_forward(module):
        inner = next((type(child).__name__ for child in module.children()), None)
        fix = (
            "It is empty. Name the class of the repeated blocks, such as nn.TransformerEncoderLayer."
            if inner is None
            else f"Name the class of the modules in it: {inner!r}."
        )
        raise ModelError(f"{setting} names {type(module).__name__}, a container without a forward method. {fix}")
