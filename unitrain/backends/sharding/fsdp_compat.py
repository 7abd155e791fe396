"""Private APIs of FSDP2 (`fully_shard`) and of DTensors that unitrain uses.

As in `torch_compat`, each docstring states the torch version with which the function was checked.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from unitrain.torch_compat import tree_map_only


def fsdp_parameter_records(module: nn.Module) -> list[Any]:
    """Return the `FSDPParam` objects of the parameters that `fully_shard(module)` manages, without those of nested FSDP
    modules. Each has the attribute `sharded_param`. Checked with torch 2.14."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    return [parameter for group in state._fsdp_param_groups for parameter in group.fsdp_params]


def unsharded_parameter(record: Any) -> Tensor | None:
    """Return the complete parameter of `record`, one of `fsdp_parameter_records`, or None before the first forward
    pass. Memory for the complete parameter is allocated only while it is used. Checked with torch 2.14.
    """
    return getattr(record, "_unsharded_param", None)


def was_fsdp_interrupted(module: nn.Module) -> bool:
    """Return whether an exception interrupted the last forward or backward pass of the root FSDP module.
    Checked with torch 2.14.
    """
    context: Any = module._get_fsdp_state()._state_ctx  # type: ignore[operator]
    return context.iter_forward_root is not None or context.post_backward_final_callback_queued


def is_fsdp_initialized(module: nn.Module) -> bool:
    """Return whether the root FSDP module has run a forward pass. Checked with torch 2.14."""
    return module._get_fsdp_state()._is_root is not None  # type: ignore[operator]


def count_post_forward_groups(module: nn.Module) -> int:
    """Return the number of parameter groups in FSDP's post-forward order: those that have run in forward passes of the
    root FSDP module since the last backward pass. A group that runs several times is counted each time. Checked
    with torch 2.14.
    """
    context: Any = module._get_fsdp_state()._comm_ctx  # type: ignore[operator]
    return len(context.post_forward_order) if is_fsdp_initialized(module) else 0


def truncate_post_forward_order(module: nn.Module, num_kept: int) -> None:
    """Remove all parameter groups except the first `num_kept` from FSDP's post-forward order.

    The order also contains the groups of forward passes without gradients. In the next backward pass, each group in
    the order prefetches the parameters of the group before it. Checked with torch 2.14.
    """
    recorded: list[Any] = module._get_fsdp_state()._comm_ctx.post_forward_order  # type: ignore[operator]
    for group in set(recorded[num_kept:]):
        group._post_forward_indices[:] = [index for index in group._post_forward_indices if index < num_kept]
    del recorded[num_kept:]


def release_fsdp_groups(module: nn.Module) -> None:
    """Delete the references to process groups that the FSDP state of `module` holds. Checked with torch 2.14."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    for group in state._fsdp_param_groups:
        for holder in (group, *group.fsdp_params):
            for name in ("mesh_info", "post_forward_mesh_info"):
                if getattr(holder, name, None) is not None:
                    holder.__dict__[name].shard_process_group = None


def support_norms_of_any_order() -> None:
    """Make `torch.nn.utils.get_total_norm` and `clip_grad_norm_` support infinite and negative orders for DTensors.

    torch 2.14 returns a partial result for infinite orders, which contains the norm of the elements on this rank. On a
    rank without elements, it raises a RuntimeError, because an empty tensor has no norm of such an order. The other
    ranks then wait for this rank in an allreduce. Checked with torch 2.14.
    """
    from torch.distributed.tensor import DTensor, Replicate

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    aten: Any = torch.ops.aten

    def prepare(tensor: Any, order: float) -> Any:
        """Return `tensor`, reduced over ranks if it is a partial result. An empty local shard is replaced by an element
        that does not change the norm."""
        if any(placement.is_partial() for placement in tensor.placements):
            kept = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
            return tensor.redistribute(placements=kept)
        if not tensor.numel() or tensor._local_tensor.numel():
            return tensor
        sizes = [max(size, 1) for size in tensor._local_tensor.shape]
        local = tensor._local_tensor.new_full(sizes, math.inf if order < 0 else 0.0)
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def compute(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        order = float(args[1] if len(args) > 1 else kwargs.get("ord", 2))
        is_norm_of_all = len(args) <= 2 and not kwargs.keys() & {"dim", "keepdim"}
        if is_norm_of_all and (order < 0 or math.isinf(order)):
            args = (tree_map_only(DTensor, lambda tensor: prepare(tensor, order), args[0]), *args[1:])
        handler = handlers.pop(operation)
        try:
            return operation(*args, **kwargs)
        finally:
            handlers[operation] = handler

    for operation in (aten.linalg_vector_norm.default, aten._foreach_norm.Scalar):
        handlers.setdefault(operation, compute)
