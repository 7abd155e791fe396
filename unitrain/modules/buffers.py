"""Broadcasting the buffers of a model, such as running means, and loading buffers that are expanded views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.backends.objects import broadcast_tensors
from unitrain.backends.synchronized_errors import gather_if_different
from unitrain.backends.tensors import copy_into, is_expanded
from unitrain.errors import ModelError, UnitrainError
from unitrain.torch_compat import buffers_by_name


def check_model_and_communicator(function: str, model: Any, communicator: Any) -> None:
    """Raise ConfigError unless `model` is a module and `communicator` is a Communicator."""
    _check_model(function, model)
    fix = f"Use {function}(model, backend)"
    validation.check_instance(f"{function}(communicator)", communicator, Communicator, "a backend", fix)


def _check_model(function: str, model: Any) -> None:
    fix = f"Use {function}(model, backend)"
    validation.check_instance(f"{function}(model)", model, nn.Module, "a torch.nn.Module", fix)


def broadcast_buffers(model: nn.Module, communicator: Communicator) -> None:
    """Broadcast all buffers of `model` from rank 0, in one broadcast, after a small allreduce that compares their
    shapes and dtypes. All ranks must call this function.

    Call it before `model.eval()` and before saving, because during training each rank computes running statistics from
    its own samples. Training results do not change: the forward pass in training mode does not read running statistics,
    and the buffers that it reads are already equal. `model` is the module that `distributed_model` returned, or the
    user's module.

    Raises, on every rank, ConfigError if the `model` of some rank is not a module, and ModelError if the shapes or
    dtypes of the buffers differ between ranks.
    """
    if not isinstance(cast(Any, communicator), Communicator):
        check_model_and_communicator("broadcast_buffers", model, communicator)  # raises an error
    buffers = list[Tensor]()
    buffer_layouts: list[tuple[list[int], str]] | UnitrainError
    try:
        _check_model("broadcast_buffers", model)
    except UnitrainError as error:
        buffer_layouts = error
    else:
        # Writes to `data` do not invalidate an earlier forward pass whose backward pass has not run yet.
        buffers = [buffer.data for buffer in model.buffers()]
        buffer_layouts = [(list(buffer.shape), str(buffer.dtype)) for buffer in buffers]
    layouts_by_rank = gather_if_different(communicator, buffer_layouts)
    if layouts_by_rank is not None:
        errors = [result for result in layouts_by_rank if isinstance(result, UnitrainError)]
        raise errors[0] if errors else _difference_error(layouts_by_rank)
    if isinstance(buffer_layouts, UnitrainError):
        raise buffer_layouts
    broadcast_tensors(communicator, buffers)


def _difference_error(layouts_by_rank: list[list[tuple[list[int], str]]]) -> ModelError:
    """Return the error for buffers that differ between ranks, given the shapes and dtypes of each rank."""
    rank = next(rank for rank, value in enumerate(layouts_by_rank) if value != layouts_by_rank[0])
    first, differing = layouts_by_rank[0], layouts_by_rank[rank]
    if len(first) != len(differing):
        text = f"{len(first)} buffers on rank 0 and {len(differing)} on rank {rank}"
    else:
        index = next(index for index, pair in enumerate(zip(first, differing, strict=True)) if pair[0] != pair[1])
        text = f"{_describe_buffer(first[index])} on rank 0 and {_describe_buffer(differing[index])} on rank {rank}"
    return ModelError(
        f"broadcast_buffers was called with different buffers: {text}. Pass the same model on every rank."
    )


def _describe_buffer(buffer: tuple[list[int], str]) -> str:
    shape, dtype = buffer
    return f"a buffer of shape {shape} and dtype {dtype.removeprefix('torch.')}"


def load_state(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True) -> Any:
    """Call `model.load_state_dict(state, strict)`, with support for buffers that are expanded views, and return its
    result.

    torch raises an error for writes to an expanded view, because the elements of such a view share memory.
    """
    expanded = [
        (buffers, name, buffer, buffer.contiguous())
        for buffers in map(buffers_by_name, model.modules())
        for name, buffer in buffers.items()
        if buffer is not None and is_expanded(buffer)
    ]
    for buffers, name, _, loaded in expanded:
        buffers[name] = loaded
    try:
        return model.load_state_dict(state, strict)
    finally:
        for buffers, name, buffer, loaded in expanded:
            copy_into(buffer, loaded)
            buffers[name] = buffer
