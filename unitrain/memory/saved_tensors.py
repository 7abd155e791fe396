"""The tensors that autograd saves for the backward pass: their bytes, and the modules that saved them.

When autograd saves a tensor, `SavedTensorTracker` adds its storage (`SavedStorage`) to the live storages, with the
stack of modules that are being called, and returns a `_PackedTensor` to the graph. When autograd deletes the last
packed tensor of a storage, the tracker removes the storage. Tensors that share a storage therefore count once.
Parameters and buffers do not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from unitrain.memory.tensor_bytes import local_tensor
from unitrain.modules.activation_checkpointing import CheckpointedForward
from unitrain.torch_compat import disable_compile


@dataclass(eq=False)
class ModuleCall:
    """A forward pass of `module`, with its tensor arguments. `saved_count_at_end` is the number of storages that had
    been saved when the forward pass ended.
    """

    module: nn.Module
    inputs: list[SavedStorage] = field(default_factory=list)
    saved_count_at_end: int = 0


@dataclass(eq=False)
class SavedStorage:
    """A storage that one or more saved tensors share.

    `index` is its position in the order of saving, from 1; for a module argument that was not saved, it is the number
    of storages that were saved before. `stacks` are the modules that saved it, from the outermost to the innermost, for
    each saved tensor. `holders` is the number of saved tensors that still exist.
    """

    storage: weakref.ref[torch.UntypedStorage]
    size_bytes: int
    is_float32: bool
    index: int
    stacks: set[tuple[ModuleCall, ...]] = field(default_factory=set)
    holders: int = 0


@dataclass(frozen=True)
class CheckpointingEffect:
    """The effect of `checkpoint_activations` on modules of class `name`, which were called `calls` times.

    `kept_bytes` are the activations that remain saved during the forward pass, and `peak_bytes` is the largest sum of
    saved and recomputed activations in the backward pass.
    """

    name: str
    calls: int
    kept_bytes: int
    peak_bytes: int


class SavedTensorTracker:
    """Tracks the saved tensors of the calling thread from `start` to `stop`.

    `before_release` is called at each local maximum of `total_bytes`: before a saved tensor is released, if
    another storage has been saved since the last release. `on_outermost_forward(module)` is called at the start of each
    outermost forward pass.
    """

    def __init__(self, before_release: Callable[[], None], on_outermost_forward: Callable[[nn.Module], None]) -> None:
        self.total_bytes = 0
        self.excluded_addresses: set[int] = set()  # addresses of parameters and buffers
        self._before_release, self._on_outermost_forward = before_release, on_outermost_forward
        # By the id of the storage object, which torch keeps as long as a tensor uses the storage. The address is not
        # unique: FSDP frees the memory of gathered parameters, and other tensors may then have the same address.
        self._live_storages: dict[int, SavedStorage] = {}
        self._stack: list[ModuleCall] = []
        self._count, self._is_growing = 0, False
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._handles: list[Any] = []

    def start(self) -> None:
        """Start tracking. Hooks of the user's code and of torch.utils.checkpoint take precedence in their contexts."""
        self._hooks.__enter__()
        self._handles = [
            register_module_forward_pre_hook(self._begin_call),
            register_module_forward_hook(self._end_call, with_kwargs=True, always_call=True),
        ]

    def stop(self) -> None:
        """Remove the hooks."""
        self._hooks.__exit__()
        for handle in self._handles:
            handle.remove()

    def update_sizes(self) -> list[SavedStorage]:
        """Update `total_bytes` and the sizes of the currently saved storages, and return these storages.

        FSDP frees gathered parameters by resizing them to zero bytes.
        """
        for saved in self._live_storages.values():
            storage = saved.storage()
            size_bytes = 0 if storage is None else storage.nbytes()
            self.total_bytes += size_bytes - saved.size_bytes
            saved.size_bytes = size_bytes
        return list(self._live_storages.values())

    def _begin_call(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():  # in a compiled graph, tensors are not saved by single modules
            return
        if not self._stack:
            self._on_outermost_forward(module)
        self._stack.append(ModuleCall(module))

    def _end_call(self, module: nn.Module, args: Any, *outputs: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # `outputs` are the keyword arguments and the output, or only the output if the forward raised an exception.
        kwargs = outputs[0] if len(outputs) == 2 else {}
        while self._stack:  # an exception may have skipped the ends of inner calls
            call = self._stack.pop()
            if call.module is module:
                break
        else:
            return
        call.saved_count_at_end = self._count
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and (saved := self._find_or_create(value)) is not None:
                call.inputs.append(saved)

    def _find_or_create(self, tensor: Tensor) -> SavedStorage | None:
        """Return the SavedStorage of an argument, or a new SavedStorage if the argument has not been saved. Return None
        for parameters, buffers and tensors without a storage."""
        storage = _untyped_storage(tensor)
        if storage is None or storage.data_ptr() in self.excluded_addresses:
            return None
        return self._live_storages.get(id(storage)) or _create_saved_storage(storage, tensor, self._count)

    @disable_compile
    def _pack(self, tensor: Tensor) -> Any:
        storage = _untyped_storage(tensor)
        # A saved output with its history would keep its own graph alive. Autograd restores the history.
        tensor = tensor.detach()
        if storage is None or storage.data_ptr() in self.excluded_addresses:
            return tensor
        key = id(storage)
        saved = self._live_storages.get(key)
        if saved is None:
            self._count += 1
            saved = self._live_storages[key] = _create_saved_storage(storage, tensor, self._count)
            self.total_bytes += saved.size_bytes
            self._is_growing = True
        saved.stacks.add(tuple(self._stack))
        saved.holders += 1
        return _PackedTensor(tensor, key, self._release)

    def _release(self, key: int) -> None:
        if self._is_growing:
            self._is_growing = False
            self._before_release()
        saved = self._live_storages[key]
        saved.holders -= 1
        if not saved.holders:
            del self._live_storages[key]
            self.total_bytes -= saved.size_bytes


def checkpointing_by_class(storages: Iterable[SavedStorage]) -> list[CheckpointingEffect]:
    """Return the effect of activation checkpointing for each class of modules that saved some of `storages`.

    Only classes that have submodules and were called at least twice are listed, because activations are recomputed one
    block at a time, which needs less memory only if there are several blocks. Blocks that are already checkpointed are
    not listed.
    """
    saved = list(storages)
    calls = {call for storage in saved for stack in storage.stacks for call in stack}
    classes = {type(call.module) for call in calls if not isinstance(call.module, CheckpointedForward)}
    results = []
    for module_class in sorted(classes, key=lambda module_class: module_class.__name__):
        blocks = {call for call in calls if type(call.module) is module_class}
        if any(any(True for _ in call.module.children()) for call in blocks):
            results.append(_checkpointing_effect(module_class.__name__, saved, blocks))
    return [block for block in results if block.calls > 1]


def _checkpointing_effect(name: str, saved: list[SavedStorage], blocks: set[ModuleCall]) -> CheckpointingEffect:
    """Return the effect if each outermost call in `blocks` saved only its inputs.

    In the backward pass, the activations of the blocks are recomputed one block at a time, last block first. Tensors
    that were saved only after a block are released before the block is recomputed.
    """
    kept_storages: dict[SavedStorage, None] = {}
    storages_by_block: dict[ModuleCall, list[SavedStorage]] = {}
    for storage in saved:
        for stack in storage.stacks:
            block = next((call for call in stack if call in blocks), None)
            if block is None:
                kept_storages[storage] = None
            else:
                storages_by_block.setdefault(block, []).append(storage)
    for block in storages_by_block:
        kept_storages.update(dict.fromkeys(block.inputs))
    kept_bytes = peak_bytes = sum(storage.size_bytes for storage in kept_storages)
    for block, storages in storages_by_block.items():
        alive = sum(storage.size_bytes for storage in kept_storages if storage.index <= block.saved_count_at_end)
        recomputed = sum(storage.size_bytes for storage in set(storages) if storage not in kept_storages)
        peak_bytes = max(peak_bytes, alive + recomputed)
    return CheckpointingEffect(name, len(storages_by_block), kept_bytes, peak_bytes)


class _PackedTensor:
    """A saved tensor in a graph. Autograd deletes it when the node is released."""

    __slots__ = ("_key", "_release", "tensor")

    def __init__(self, tensor: Tensor, key: int, release: Callable[[int], None]) -> None:
        self.tensor, self._key, self._release = tensor, key, release

    def __del__(self) -> None:
        self._release(self._key)


@disable_compile
def _unpack(packed: Any) -> Tensor:
    tensor: Tensor = packed.tensor if isinstance(packed, _PackedTensor) else packed
    return tensor


def _create_saved_storage(storage: torch.UntypedStorage, tensor: Tensor, index: int) -> SavedStorage:
    return SavedStorage(weakref.ref(storage), storage.nbytes(), tensor.dtype == torch.float32, index)


def _untyped_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage of `tensor`, or None if the tensor is sparse, empty or on device meta."""
    part = local_tensor(tensor)
    if part.layout != torch.strided or part.device.type == "meta":
        return None
    storage = part.untyped_storage()
    return storage if storage.nbytes() else None
