"""Copies of state for checkpoints: in host memory, and in types that `torch.load(..., weights_only=True)` accepts.

An unsupported value raises an error when the state is saved, rather than when a run is resumed.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from unitrain.errors import CheckpointError

StateT = TypeVar("StateT")

_MAPPINGS = (dict, OrderedDict, Counter)


def copy_to_host(state: StateT) -> StateT:
    """Return `state` with every tensor, including those in nested dictionaries, lists and tuples, copied to host
    memory.

    Containers keep their types; a mapping of a type other than dict, OrderedDict and Counter becomes a dict. Values of
    other types are not copied, because `plain_state` has already copied them. Tensors that share a storage also share
    it in the copy, so tied parameters remain tied and are copied once. Exceptions: a view of less than half of its
    storage, or a view with the conjugate or negative bit, shares its copy only with identical views. Subclasses of
    Tensor and sparse tensors are copied separately.
    """
    copied: dict[Any, Any] = {}
    result: StateT = _copy(state, copied)
    return result


def _copy(value: Any, copied: dict[Any, Any]) -> Any:
    value_type = type(value)
    if isinstance(value, Tensor):
        return _copy_tensor(value, copied) if value.layout == torch.strided else value.detach().cpu().clone()
    if isinstance(value, dict):
        # Pass a dict, because Counter would count the elements of a list of pairs.
        inner = {key: _copy(item, copied) for key, item in value.items()}
        return value_type(inner) if value_type in _MAPPINGS else inner
    if value_type in (list, tuple):
        return value_type(_copy(inner, copied) for inner in value)
    return value


def _copy_tensor(tensor: Tensor, copied: dict[Any, Any]) -> Tensor:
    """Return a copy of `tensor`. `copied` maps storages and views that are already copied to their copies."""
    storage = tensor.untyped_storage()
    if type(tensor) not in (Tensor, torch.nn.Parameter) or not tensor.numel():
        return tensor.detach().to("cpu", copy=True)
    flags = tensor.is_conj(), tensor.is_neg()
    # Only `to` keeps these flags. A small view of a large tensor is copied without the rest of the tensor.
    if any(flags) or storage.nbytes() > 2 * tensor.nbytes:
        view = (storage.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), *flags)
        if view not in copied:
            copied[view] = tensor.detach().to("cpu", copy=True)
        copy: Tensor = copied[view]
        return copy
    key = (storage.device, storage.data_ptr())
    if key not in copied:
        copied[key] = storage.cpu() if storage.device.type != "cpu" else storage.clone()
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(copied[key], tensor.storage_offset(), tensor.shape, tensor.stride())


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` in new containers, with numpy numbers converted to Python numbers, and with the same tensors.

    Values of other types are copied by saving and loading them with `torch.load(..., weights_only=True)`, so that later
    changes do not affect the result. Raises a CheckpointError that names the first value that cannot be loaded.
    """
    return {name: _to_plain_value(value, name) for name, value in state.items()}


def _to_plain_value(value: Any, path: str) -> Any:
    value_type = type(value)
    if value_type in _PLAIN or (value_type is Tensor and not vars(value)):
        return value
    if value_type in _MAPPINGS:
        # Pass a dict, because Counter would count the elements of a list of pairs.
        return value_type(
            {
                _to_plain_value(key, f"{path}.keys()"): _to_plain_value(inner, f"{path}[{key!r}]")
                for key, inner in value.items()
            }
        )
    if value_type in (list, tuple):
        return value_type(_to_plain_value(inner, f"{path}[{index}]") for index, inner in enumerate(value))
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0):
        element = value.item()
        if type(element) is not value_type:  # a long double has no equivalent in Python
            return _to_plain_value(element, path)
    loaded = _save_and_load(value, path)
    # Subclasses of Tensor are not replaced by their copy, because they may share memory with other tensors.
    return value if isinstance(value, Tensor) else loaded


def _save_and_load(value: Any, path: str) -> Any:
    """Return the copy of a value that results from saving and loading it. Raises CheckpointError if this fails.

    It also supports types such as subclasses of Tensor and classes that the user has allowed with
    torch.serialization.add_safe_globals.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=True)
    except Exception as error:  # methods of the value may raise any exception
        name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise CheckpointError(
            f"{path} is of class {name}, which torch.load(weights_only=True) cannot load from a checkpoint. "
            "Store only tensors, numbers, strings and containers of these in the state of optimizers, schedulers and "
            "callbacks: torch.from_numpy(array) instead of an array, dict(mapping) instead of a defaultdict."
        ) from error
