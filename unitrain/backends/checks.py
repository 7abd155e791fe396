"""What every backend checks before it communicates, so that a mistake is the same error everywhere."""

from __future__ import annotations

from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unitrain import validation
from unitrain.backends.base import ReduceOp
from unitrain.backends.compression_setting import Compression, read_compression
from unitrain.errors import ConfigError, ModelError, TensorError, did_you_mean
from unitrain.monitoring.flight_recorder import dtype_name

REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip


def check_no_group() -> None:
    """Raise ConfigError when this process has torch.distributed's default group already."""
    if dist.is_initialized():
        raise ConfigError(
            "This process has a process group already, of an earlier unitrain.init() or an init_process_group() of "
            "its own. Use that one, or end it first: backend.shutdown() or torch.distributed.destroy_process_group()"
        )


def check_tensor(tensor: Tensor) -> None:
    """Raise TensorError unless `tensor` is a dense tensor of a supported dtype, whose gradient is not lost here."""
    if not isinstance(tensor, Tensor):
        raise TensorError(
            f"A collective takes a tensor, got {type(tensor).__name__}. "
            "Use torch.tensor(...) for numbers, or allgather_object and broadcast_object for Python objects."
        )
    if tensor.layout != torch.strided:
        raise TensorError(
            f"A collective takes a dense tensor, got layout {tensor.layout}. Call .to_dense() first, "
            "and use nn.Embedding(..., sparse=False) for gradients."
        )
    if tensor.dtype not in DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in DTYPES)
        raise TensorError(f"A collective cannot carry dtype {dtype_name(tensor.dtype)}. Convert to one of: {names}.")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TensorError(
            f"A collective got a tensor of shape {list(tensor.shape)} that requires grad, and its result has no "
            "gradient history: a loss of it would lose gradients. Use tensor.detach(), or, in a loss over the samples "
            "of all ranks, unitrain.differentiable_allgather(tensor, backend)."
        )


def check_reduce(tensor: Tensor, op: str) -> None:
    """Raise ConfigError for an unknown `op`, TensorError where `op` has no exact meaning for the tensor's dtype."""
    check_tensor(tensor)
    if op not in REDUCE_OPS:
        raise ConfigError(f"Unknown op {op!r}. {did_you_mean(str(op), REDUCE_OPS)}Available: {', '.join(REDUCE_OPS)}.")
    if op == "mean" and not tensor.dtype.is_floating_point:
        # Horovod would round down, Gloo refuse, and both would be right somewhere: nobody gets a wrong average here.
        raise TensorError(
            f"The mean of {dtype_name(tensor.dtype)} values is not an integer. "
            'Convert first, tensor.double(), or use op="sum" and divide.'
        )
    if op == "sum" and tensor.dtype == torch.bool:
        raise TensorError('The sum of booleans does not fit a boolean. Convert first, tensor.long(), or use op="max".')


def check_root(root: int, size: int) -> None:
    """Raise ConfigError unless `root` is one of the ranks."""
    if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < size:
        raise ConfigError(f"Root {root!r} is not one of the {size} ranks. Use a root from 0 to {size - 1}.")


def check_divides(tensor: Tensor, size: int) -> None:
    """Raise TensorError unless dim 0 can be cut into `size` equal slices."""
    if tensor.dim() == 0 or tensor.shape[0] % size:
        raise TensorError(
            f"reducescatter cuts dim 0 into {size} equal slices, got shape {list(tensor.shape)}. "
            f"Pad dim 0 to a multiple of {size}."
        )


def check_is_model(name: str, model: Any) -> None:
    """Raise ModelError unless `model` is a module with parameters that have a shape."""
    fix = "Pass the model itself, such as nn.Linear(3, 1)"
    if isinstance(model, torch.optim.Optimizer):
        fix = "Pass the model first and the optimizer second"
    validation.instance(name, model, nn.Module, "a torch.nn.Module", fix, error=ModelError)
    if type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
        raise ModelError(
            f"{name} is wrapped in {type(model).__name__}, and unitrain reduces its gradients itself. "
            "Pass the module inside it: model.module."
        )
    lazy = [key for key, value in model.named_parameters() if nn.parameter.is_lazy(value)]
    if lazy:
        raise ModelError(
            f"{type(model).__name__} has parameters without a shape yet: {', '.join(lazy[:4])}. "
            "Call the model once, before it is distributed and before the optimizer is built: model(inputs)."
        )


def check_is_optimizer(name: str, optimizer: Any) -> None:
    """Raise ModelError unless `optimizer` is an optimizer."""
    built = optimizer.__name__ if isinstance(optimizer, type) else "torch.optim.SGD"
    fix = f"Build one from the model's parameters: {built}(model.parameters(), lr=0.1)"
    if isinstance(optimizer, nn.Module):
        fix = "Pass the model first and the optimizer second"
    kind = torch.optim.Optimizer
    validation.instance(name, optimizer, kind, "a torch.optim.Optimizer", fix, error=ModelError)


def check_model(model: nn.Module, compression: Compression, device: torch.device) -> None:
    """Raise ModelError unless `model` can be trained on `device`, ConfigError for an unknown compression."""
    read_compression(compression)
    check_is_model("distributed_model(model)", model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"Model {type(model).__name__} has no parameter that requires a gradient, so there is nothing to train. "
            "Unfreeze some with parameter.requires_grad_(True), or use backend.broadcast to share its weights."
        )
    elsewhere = [p.device for p in model.parameters() if p.device.type != device.type]
    if elsewhere:
        raise ModelError(
            f"The model is on {elsewhere[0]} and this rank computes on {device}. Use model.to(backend.device) first."
        )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            # F.embedding(..., max_norm=...) does the same, but does not show in the model.
            raise ModelError(
                f"Module {name or type(model).__name__!r} has max_norm={module.max_norm:g}: its forward changes the "
                "weights of the items in this rank's batch only, so the ranks' weights would differ. Build it without "
                "max_norm, and limit the weights after each optimizer step: "
                f"with torch.no_grad(): embedding.weight.renorm_({module.norm_type:g}, 0, {module.max_norm:g})"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(
                f"Module {name or type(model).__name__!r} produces sparse gradients, which are not reduced. "
                f"Build it with sparse=False: {type(module).__name__}(..., sparse=False)."
            )


def check_one_optimizer(optimizer: Any) -> None:
    """Raise ModelError for several optimizers, and for one whose state is divided between ranks."""
    if isinstance(optimizer, list | tuple | dict):
        raise ModelError(
            f"One optimizer was expected, got a {type(optimizer).__name__} of {len(optimizer)}. Wrap each one with the "
            "model that it trains: optimizer = backend.distributed_optimizer(optimizer, model). The Trainer takes one; "
            "for several, write a loop as in examples/gan.py."
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ModelError(
            "ZeroRedundancyOptimizer divides the state between ranks, and its state cannot be saved and loaded as that "
            "of other optimizers. Use the optimizer that it wraps: torch.optim.AdamW(model.parameters(), ...)."
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ModelError unless `optimizer` is one optimizer whose parameters are all `model`'s."""
    check_one_optimizer(optimizer)
    check_is_optimizer("distributed_optimizer(optimizer)", optimizer)
    validation.instance("distributed_optimizer(model)", model, nn.Module, "a torch.nn.Module", "Pass the model second")
    known = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in held)
    if strangers:
        raise ModelError(
            f"The optimizer holds {strangers} of {len(held)} parameters that are not {type(model).__name__}'s, "
            "so their gradients would never be shared. Build it from this model's own parameters: "
            f"{type(optimizer).__name__}(model.parameters(), ...), after moving the model to its device."
        )
