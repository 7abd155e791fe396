"""Validation of the arguments for sharded parameters, and selection of the blocks, without communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unitrain.backends.blocks import BlockChoice, find_blocks, find_large_blocks, find_repeated_blocks
from unitrain.backends.checks import check_no_shared_memory, named_tensors
from unitrain.backends.compression_setting import Compression
from unitrain.errors import ConfigError, ModelError
from unitrain.torch_compat import has_gradient_hooks, is_compiled
from unitrain.validation import describe_value, is_positive_integer

_SETTING = "shard_blocks"
_ALTERNATIVE = 'or use shard="state"'


def check_shard_blocks(shard: str, blocks: Any, argument: str) -> None:
    """Raise ConfigError unless `blocks` is a list, a tuple or a positive integer, and is supported with `shard`.

    `argument` is the argument as the user writes it, for error messages.
    """
    if not isinstance(blocks, list | tuple) and not is_positive_integer(blocks):
        raise ConfigError(
            f"{argument} must be a tuple of classes or class names, or a positive number of parameters, got "
            f'{describe_value(blocks)}. Use shard_blocks=("TransformerEncoderLayer",) or shard_blocks=1_000_000.'
        )
    if blocks and shard != "parameters":
        raise ConfigError(
            f'{argument} selects the blocks of sharded parameters, but shard is {shard!r}. Use shard="parameters", or '
            "leave shard_blocks out."
        )


def check_sharded_parameters(
    model: nn.Module, blocks: BlockChoice, *, find_unused_parameters: bool, compression: Compression
) -> None:
    """Raise an error unless the parameters of `model` can be sharded with these arguments of `distributed_model`.

    Raises ConfigError for incompatible arguments, and ModelError for parameters that cannot be sharded.
    """
    if compression != "none":
        raise ConfigError(
            f'distributed_model(shard="parameters") does not compress gradients, got compression={compression!r}. '
            f"Leave compression out, {_ALTERNATIVE}."
        )
    if find_unused_parameters:
        raise ConfigError(
            'distributed_model(shard="parameters") reduces the gradients of whole blocks and does not support '
            "find_unused_parameters=True. Use every parameter in every loss, for example with a factor of 0, "
            f"{_ALTERNATIVE}."
        )
    if compiled := [name or type(model).__name__ for name, module in model.named_modules() if is_compiled(module)]:
        raise ModelError(
            f'Module {compiled[0]!r} is compiled, which distributed_model(shard="parameters") does not support. Leave '
            f"torch.compile out, {_ALTERNATIVE}."
        )
    _check_parameters(model)
    check_no_shared_memory(dict(named_tensors(model)), 'shard="parameters"')
    chosen = choose_blocks(model, blocks)
    for name, module in [*chosen.items(), (type(model).__name__, model)]:
        _check_dtypes(name, module)


def choose_blocks(model: nn.Module, blocks: BlockChoice) -> dict[str, nn.Module]:
    """Return the blocks inside `model` by name. The parameters of a block are gathered in one operation.

    All other parameters form the block of `model` itself, which is not returned. The blocks are the outermost modules
    of the classes `blocks` or, if `blocks` is a number, the innermost modules with at least that many parameter
    elements. If `blocks` is empty, they are the outermost modules whose class occurs more than once, such as the layers
    of a transformer. If `blocks` lists classes, raises ModelError for a block that shares parameters with other
    modules. In the other cases, modules that share parameters are not selected. Also raises ModelError if `blocks` is a
    number and no module has that many elements.
    """
    selects_by_class = bool(blocks) and not isinstance(blocks, int)
    if isinstance(blocks, int):
        chosen_blocks = find_large_blocks(model, blocks)
        _check_blocks_found(model, blocks, chosen_blocks)
    else:
        chosen_blocks = find_blocks(model, blocks, _SETTING) if blocks else find_repeated_blocks(model)
    chosen_blocks.pop("", None)  # the model itself is always a block
    owners = _parameter_owners(model, chosen_blocks)
    for name, parameter in model.named_parameters():
        sharing = owners[id(parameter)]
        if len(sharing) > 1 and selects_by_class:
            inside = " and ".join(repr(block) if block else "other modules" for block in sorted(sharing))
            raise ModelError(
                f"Parameter {name!r} is shared by {inside}, but the parameters of each block are gathered separately. "
                "Pass a class in shard_blocks whose modules contain all uses of the parameter, or leave shard_blocks "
                "out."
            )
        for block in sharing if len(sharing) > 1 else ():
            chosen_blocks.pop(block, None)
    return {name: module for name, module in chosen_blocks.items() if any(True for _ in module.parameters())}


def _parameter_owners(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[int, set[str]]:
    """Return the names of the `blocks` that contain each parameter, by its id. The name is "" for other modules.

    A module may occur in several places in the model, both inside and outside blocks.
    """
    owners: dict[int, set[str]] = {}
    for name, block in blocks.items():
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(name)
    visited = {id(block) for block in blocks.values()}
    modules = [model]
    while modules:
        module = modules.pop()
        if id(module) not in visited:
            visited.add(id(module))
            modules += module.children()
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add("")
    return owners


def _check_blocks_found(model: nn.Module, min_elements: int, chosen_blocks: dict[str, nn.Module]) -> None:
    if chosen_blocks:
        return
    total = sum(parameter.numel() for parameter in model.parameters())
    raise ModelError(
        f"{_SETTING}={min_elements} selects modules with at least {min_elements:,} parameters, but "
        f"{type(model).__name__} has only {total:,}. Use a smaller number, such as {_SETTING}={max(1, total // 4)}, or "
        f"leave {_SETTING} out."
    )


def _check_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise ModelError(
                f"Parameter {name!r} is already sharded. Call distributed_model only once for each model, and train "
                "the module that it returns."
            )
        if parameter.dim() == 0:
            raise ModelError(
                f"Parameter {name!r} has 0 dimensions, so it cannot be sharded. Create it with one dimension: "
                f"nn.Parameter(torch.tensor([1.0])), {_ALTERNATIVE}."
            )
        if parameter.numel() == 0:
            raise ModelError(
                f"Parameter {name!r} of shape {list(parameter.shape)} has no elements, so it cannot be sharded. Remove "
                f"it, {_ALTERNATIVE}."
            )
        if not parameter.is_contiguous():
            raise ModelError(
                f"Parameter {name!r} of shape {list(parameter.shape)} is not contiguous, so it cannot be sharded. "
                "Build it from a contiguous tensor, nn.Parameter(tensor.contiguous()), and leave channels_last out, "
                f"{_ALTERNATIVE}."
            )
        # Gradients are computed for complete parameters, which exist only during a forward and backward pass.
        if has_gradient_hooks(parameter):
            raise ModelError(
                f"Parameter {name!r} has a gradient hook, which would not be called, because the parameter is replaced "
                f"by its shard. Register post-accumulate hooks after distributed_model, {_ALTERNATIVE}."
            )


def _check_dtypes(name: str, module: nn.Module) -> None:
    dtypes: dict[torch.dtype, str] = {}
    for parameter_name, parameter in module.named_parameters():
        if parameter.requires_grad:
            dtypes.setdefault(parameter.dtype, parameter_name)
    if len(dtypes) > 1:
        description = ", ".join(
            f"{parameter} has {str(dtype).removeprefix('torch.')}" for dtype, parameter in dtypes.items()
        )
        raise ModelError(
            f"The trainable parameters of block {name!r} have different dtypes: {description}. Their gradients are "
            f"reduced in one tensor, which has one dtype. Convert the parameters to one dtype, {_ALTERNATIVE}."
        )
