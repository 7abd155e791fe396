"""A copy of state in host memory, which training may go on changing meanwhile."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any, TypeVar

import torch
from torch import Tensor

StateT = TypeVar("StateT")

_MAPPINGS = (dict, OrderedDict, Counter)


def host_copy(state: StateT) -> StateT:
    """Return `state` with every tensor copied to host memory, through dictionaries, lists and tuples.

    Containers keep their types; a mapping of a type other than dict, OrderedDict and Counter becomes a dict. Values of
    other types are not copied: `plain_state` makes sure that nothing else refers to them. Tensors that share memory
    share it in the copy too, so tied parameters stay tied and are copied once.
    """
    copied: dict[tuple[torch.device, int], torch.UntypedStorage] = {}
    result: StateT = _copy(state, copied)
    return result


def _copy(value: Any, copied: dict[tuple[torch.device, int], torch.UntypedStorage]) -> Any:
    kind = type(value)
    if isinstance(value, Tensor):
        return _copy_tensor(value, copied) if value.layout == torch.strided else value.detach().cpu().clone()
    if isinstance(value, dict):
        # From a dict, not from pairs: Counter(pairs) would count the pairs.
        inner = {key: _copy(one, copied) for key, one in value.items()}
        return kind(inner) if kind in _MAPPINGS else inner
    if kind in (list, tuple):
        return kind(_copy(inner, copied) for inner in value)
    return value


def _copy_tensor(tensor: Tensor, copied: dict[tuple[torch.device, int], torch.UntypedStorage]) -> Tensor:
    storage = tensor.untyped_storage()
    if type(tensor) not in (Tensor, torch.nn.Parameter) or storage.nbytes() > 2 * tensor.nbytes:
        return tensor.detach().to("cpu", copy=True)  # a view of little of something large
    key = (storage.device, storage.data_ptr())
    if key not in copied:
        copied[key] = storage.cpu() if storage.device.type != "cpu" else storage.clone()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(copied[key], tensor.storage_offset(), tensor.shape, tensor.stride())
