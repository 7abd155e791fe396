"""Validation of arguments, models and optimizers. An invalid argument raises the same error on every backend.

Only the functions with a `communicator` communicate: they compare arguments, models or weights of all ranks.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unitrain import validation
from unitrain.backends.base import Communicator, ReduceOp, ShardingMode
from unitrain.backends.compression_setting import Compression, PowerSGD, resolve_compression
from unitrain.backends.objects import broadcast_tensors
from unitrain.backends.pipeline.stage_runner import StageModule
from unitrain.backends.synchronized_errors import gather_if_different
from unitrain.backends.tensors import as_bytes, find_shared_memory
from unitrain.errors import ConfigError, ModelError, TensorError, UnsupportedError, did_you_mean
from unitrain.monitoring.flight_recorder import dtype_name
from unitrain.monitoring.rank_status import format_ranks
from unitrain.torch_compat import (
    DDP_IGNORED_NAMES,
    call_before_embedding_renorm,
    local_shard,
    shares_memory,
    unwrap_compiled,
)

REDUCE_OPS: tuple[str, ...] = get_args(ReduceOp)
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip

_WORDS_PER_ROW = 256
_ROWS_PER_CHUNK = 2**12
_HASH_MULTIPLIER = 0x1E3779B97F4A7C15  # odd, so that the multiplication modulo 2**64 is invertible
# Largest difference of a weight between ranks that is attributed to rounding, relative to the largest weight of the
# parameter. For half precision, the limit is 4 epsilon. All ranks apply the same gradients, so rounding errors
# accumulate slowly.
_MAX_ROUNDING = 1e-4

# Models whose weights must be equal on all ranks after each step.
_distributed_models: WeakSet[nn.Module] = WeakSet()


def check_no_default_group() -> None:
    """Raise ConfigError if this process already has a default process group of torch.distributed."""
    if dist.is_initialized():
        raise ConfigError(
            "This process already has a process group, from an earlier unitrain.init() or init_process_group(). "
            "Use that group, or shut it down first: backend.shutdown() or torch.distributed.destroy_process_group()"
        )


def check_tensor(tensor: Tensor) -> None:
    """Raise TensorError unless `tensor` is a dense tensor that has values and a supported dtype, and does not require
    grad. Under torch.no_grad(), it may require grad."""
    if not isinstance(tensor, Tensor):
        raise TensorError(
            f"A collective takes a tensor, got {type(tensor).__name__}. "
            "Use torch.tensor(...) for numbers, or allgather_object and broadcast_object for Python objects."
        )
    if nn.parameter.is_lazy(tensor):
        raise TensorError(
            "A collective got a parameter of a lazy module, which has no shape yet. Call the model once first: "
            "model(inputs)."
        )
    if tensor.is_nested:
        raise TensorError(
            "A collective takes a dense tensor, got a nested tensor. Use tensor.to_padded_tensor(0.0), or pass the "
            "tensors of tensor.unbind() one after the other."
        )
    if tensor.is_meta:
        raise TensorError(
            f"A collective got a tensor of shape {list(tensor.shape)} on device meta, which has no values. "
            "Create it on a device with memory: torch.zeros(shape, device=backend.device)."
        )
    if tensor.layout != torch.strided:
        raise TensorError(
            f"A collective takes a dense tensor, got layout {tensor.layout}. Call .to_dense() first, "
            "and use nn.Embedding(..., sparse=False) for gradients."
        )
    if tensor.dtype not in DTYPES:
        names = ", ".join(dtype_name(dtype) for dtype in DTYPES)
        raise TensorError(
            f"A collective does not support dtype {dtype_name(tensor.dtype)}. Convert to one of: {names}."
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TensorError(
            f"A collective got a tensor of shape {list(tensor.shape)} that requires grad, but its result has no "
            "gradient history, so a loss computed from it would lose gradients. Use tensor.detach(), or, for a loss "
            "over the samples of all ranks, unitrain.differentiable_allgather(tensor, backend)."
        )


def check_reduction(tensor: Tensor, op: str) -> None:
    """Raise ConfigError for an unknown `op`, and TensorError for a tensor that `check_tensor` rejects or whose dtype
    cannot represent the result: the mean of integers or booleans, and the sum of booleans."""
    check_tensor(tensor)
    if op not in REDUCE_OPS:
        raise ConfigError(f"Unknown op {op!r}. {did_you_mean(str(op), REDUCE_OPS)}Available: {', '.join(REDUCE_OPS)}.")
    if op == "mean" and not tensor.dtype.is_floating_point:
        # Horovod rounds down and Gloo raises an error. Raising an error here makes all backends consistent.
        raise TensorError(
            f"The mean of {dtype_name(tensor.dtype)} values is not always an integer. "
            'Convert the tensor first, tensor.double(), or use op="sum" and divide.'
        )
    if op == "sum" and tensor.dtype == torch.bool:
        raise TensorError(
            'The sum of booleans does not fit into a boolean. Convert the tensor first, tensor.long(), or use op="max".'
        )


def check_root(root: int, size: int) -> None:
    """Raise ConfigError unless `root` is a rank of a group of `size` ranks."""
    if not isinstance(root, int) or isinstance(root, bool) or not 0 <= root < size:
        raise ConfigError(f"Root {root!r} is not one of the {size} ranks. Use a root from 0 to {size - 1}.")


def check_divisible(tensor: Tensor, size: int, operation: str = "reducescatter") -> None:
    """Raise TensorError unless dim 0 of `tensor` can be divided into `size` equal slices."""
    if tensor.dim() == 0 or tensor.shape[0] % size:
        raise TensorError(
            f"{operation} divides dim 0 into {size} equal slices, got shape {list(tensor.shape)}. "
            f"Pad dim 0 to a multiple of {size}."
        )


def check_is_module(argument: str, model: Any) -> None:
    """Raise ModelError unless `model` is a module, and UnsupportedError for a Pipeline."""
    check_not_pipeline(argument, model)
    fix = "Pass the model itself, such as nn.Linear(3, 1)"
    validation.check_instance(argument, model, nn.Module, "a torch.nn.Module", fix, error=ModelError)


def check_not_pipeline(argument: str, model: Any) -> None:
    """Raise UnsupportedError for a Pipeline, and for the module of one of its stages."""
    if type(model).__name__ == "Pipeline" or isinstance(model, StageModule):
        raise UnsupportedError(
            f"{argument} got a Pipeline, which reduces its gradients itself, and supports neither gradient compression "
            "nor a sharded optimizer state. Write your own loop, as in examples/pipeline.py: "
            "pipeline.forward_backward(inputs, targets), then optimizer.step()."
        )


def check_argument_of_no_sync(model: Any, is_distributed: bool) -> None:
    """Raise ModelError if the argument of no_sync is not a model that `distributed_model` returned."""
    if not is_distributed:
        raise ModelError(
            "no_sync takes the model that distributed_model returned, got "
            f"{validation.describe_value(model)}. Use: model = backend.distributed_model(model)."
        )


def check_unwrapped_model(argument: str, model: Any) -> None:
    """Raise ModelError unless `model` is a module that is not wrapped in torch's DistributedDataParallel or
    DataParallel, and that has no uninitialized lazy parameters. Raise UnsupportedError for a Pipeline."""
    check_not_pipeline(argument, model)
    fix = "Pass the model itself, such as nn.Linear(3, 1)"
    if isinstance(model, torch.optim.Optimizer):
        fix = "Pass the model first and the optimizer second"
    validation.check_instance(argument, model, nn.Module, "a torch.nn.Module", fix, error=ModelError)
    if type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
        raise ModelError(
            f"{argument} is wrapped in {type(model).__name__}, but unitrain reduces the gradients itself. "
            "Pass the module inside it: model.module."
        )
    lazy = [key for key, value in model.named_parameters() if nn.parameter.is_lazy(value)]
    if lazy:
        raise ModelError(
            f"{type(model).__name__} has lazy parameters that have no shape yet: {', '.join(lazy[:4])}. "
            "Call the model once, before it is distributed and before the optimizer is built: model(inputs)."
        )


def check_is_optimizer(argument: str, optimizer: Any) -> None:
    """Raise ModelError unless `optimizer` is an optimizer."""
    built = optimizer.__name__ if isinstance(optimizer, type) else "torch.optim.SGD"
    fix = f"Build one from the model's parameters: {built}(model.parameters(), lr=0.1)"
    if isinstance(optimizer, nn.Module):
        fix = "Pass the model first and the optimizer second"
    validation.check_instance(
        argument, optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer", fix, error=ModelError
    )


def check_shard(method: str, shard: ShardingMode) -> None:
    """Raise ConfigError unless `shard`, an argument of `method`, is a known value."""
    validation.check_choice(f"{method}(shard=...)", shard, get_args(ShardingMode))


def check_matching_shard(model_shard: ShardingMode | None, shard: ShardingMode) -> None:
    """Raise ModelError unless distributed_model and distributed_optimizer got compatible `shard` values.

    `model_shard` is the setting of the model, or None if it is not distributed.
    """
    for value in ("gradients", "parameters"):
        if value in (model_shard, shard) and model_shard != shard:
            model_description = "that is not distributed" if model_shard is None else f"with shard={model_shard!r}"
            raise ModelError(
                f"distributed_optimizer was called with shard={shard!r} and a model {model_description}. Pass the same "
                f"value to both: model = backend.distributed_model(model, shard={value!r}), and "
                f"backend.distributed_optimizer(optimizer, model, shard={value!r})."
            )


def check_shard_compression(shard: ShardingMode, compression: Compression) -> None:
    """Raise ModelError for sharded gradients with a compression that requires complete gradients."""
    if shard == "gradients" and isinstance(resolve_compression(compression), PowerSGD):
        raise ModelError(
            "PowerSGD compresses complete gradients, so it cannot be used with shard='gradients'. "
            'Use compression="bf16", or shard="state".'
        )


def check_trainable_model(model: nn.Module, compression: Compression, device: torch.device) -> None:
    """Raise ModelError unless `model` can be trained on `device`, ConfigError for an invalid `compression`, and
    UnsupportedError for a Pipeline."""
    resolve_compression(compression)
    check_unwrapped_model("distributed_model(model)", model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError(
            f"Model {type(model).__name__} has no parameter that requires a gradient, so there is nothing to train. "
            "Unfreeze some with parameter.requires_grad_(True), or broadcast its weights with backend.broadcast."
        )
    if ignored := sorted(getattr(unwrap_compiled(model), DDP_IGNORED_NAMES, ())):
        raise ModelError(
            f"{type(model).__name__}.{DDP_IGNORED_NAMES} excludes {', '.join(ignored[:4])} from DDP, but "
            "unitrain keeps all parameters and buffers equal on all ranks. Remove the attribute and, if the values "
            "differ between ranks, store them in an attribute that is neither a parameter nor a buffer: "
            "module.values = [tensor]."
        )
    tensors = dict(named_tensors(model))
    check_no_meta_tensors(model)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ModelError(
                f"{name!r} of {type(model).__name__} is a tensor of layout {tensor.layout}, which cannot be broadcast "
                "or reduced. Use a dense tensor: tensor.to_dense()."
            )
    devices = list(dict.fromkeys(parameter.device for parameter in model.parameters()))
    elsewhere = [used for used in devices if used.type != device.type]
    # One process may place the parameters on several GPUs.
    if len(devices) == 1 and None not in (devices[0].index, device.index) and devices[0] != device:
        elsewhere = devices
    if elsewhere:
        raise ModelError(
            f"The model is on {elsewhere[0]} and this rank computes on {device}. Use model.to(backend.device) first."
        )
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ModelError(
                f"Module {name or type(model).__name__!r} has max_norm={module.max_norm:g}: its forward pass "
                "renormalizes only the rows that this rank's batch uses, so the ranks' weights would differ. Build it "
                "without max_norm, and limit the weights after each optimizer step: "
                f"with torch.no_grad(): embedding.weight.renorm_({module.norm_type:g}, 0, {module.max_norm:g})"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(
                f"Module {name or type(model).__name__!r} produces sparse gradients, which unitrain does not reduce. "
                f"Build it with sparse=False: {type(module).__name__}(..., sparse=False)."
            )


def forbid_embedding_renorm(model: nn.Module) -> None:
    """Make `torch.nn.functional.embedding` and `embedding_bag` raise ModelError if they are called with `max_norm` and
    a parameter of `model`.

    `check_trainable_model` rejects embedding layers with `max_norm`, but calls of these functions can be checked only
    when they run.
    """
    _distributed_models.add(unwrap_compiled(model))
    _install_embedding_renorm_check()


@functools.cache
def _install_embedding_renorm_check() -> None:
    call_before_embedding_renorm(_check_renormalized_weight)


def _check_renormalized_weight(weight: Tensor, max_norm: float, norm_type: float) -> None:
    """Raise ModelError if `weight` is a parameter of a distributed model, or shares the memory of one."""
    for model in list(_distributed_models):
        # The parameters are looked up in each call, because in a forward pass, complete parameters replace the shards.
        for name, parameter in model.named_parameters():
            if shares_memory(weight, parameter):
                raise ModelError(
                    f"torch.nn.functional.embedding was called with max_norm={max_norm:g} for parameter {name!r} of "
                    f"{type(model).__name__}: it renormalizes only the rows that this rank's batch uses, so the "
                    "ranks' weights would differ. Call it without max_norm, and limit the weights after each optimizer "
                    f"step: with torch.no_grad(): parameter.renorm_({norm_type:g}, 0, {max_norm:g})"
                )


def check_no_shared_memory(tensors: Mapping[str, Tensor], feature: str) -> None:
    """Raise ModelError if two different `tensors` have elements in the same memory. `feature` treats them as separate
    tensors, so that updates of one would be lost or would not reach the other."""
    if (names := find_shared_memory(tensors)) is not None:
        raise ModelError(
            f"{names[0]!r} and {names[1]!r} are different tensors that share memory, for example after an assignment "
            f"to .data, which {feature} does not support. Use one nn.Parameter for both, module.weight = other.weight, "
            f"give each its own memory with .clone(), or leave {feature} out."
        )


def check_no_meta_tensors(model: nn.Module) -> None:
    """Raise ModelError if a parameter or buffer is on device meta."""
    if meta := [name for name, tensor in named_tensors(model) if tensor.is_meta]:
        raise ModelError(
            f"{type(model).__name__} has tensors on device meta, which have no values: {', '.join(meta[:4])}. Use "
            "model.to_empty(device=backend.device), then initialize or load the weights."
        )


def check_single_optimizer(optimizer: Any) -> None:
    """Raise ModelError for several optimizers, and for torch's ZeroRedundancyOptimizer."""
    if isinstance(optimizer, list | tuple | dict):
        raise ModelError(
            f"One optimizer was expected, got a {type(optimizer).__name__} of {len(optimizer)}. Wrap each with the "
            "model that it trains: optimizer = backend.distributed_optimizer(optimizer, model). The Trainer takes one; "
            "for several, write a loop as in examples/gan.py."
        )
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ModelError(
            "ZeroRedundancyOptimizer shards its state over ranks, so checkpoints cannot save and load it like "
            "the state of other optimizers. Use the optimizer that it wraps, and let unitrain shard its state: "
            'backend.distributed_optimizer(optimizer, model, shard="state"), or TrainConfig(shard="state").'
        )


def check_optimizer_of_model(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ModelError unless `optimizer` is a single optimizer whose parameters all belong to `model`, and
    UnsupportedError if `model` is a Pipeline."""
    check_not_pipeline("distributed_optimizer(model)", model)
    check_single_optimizer(optimizer)
    check_is_optimizer("distributed_optimizer(optimizer)", optimizer)
    validation.check_instance(
        "distributed_optimizer(model)",
        model,
        nn.Module,
        "a torch.nn.Module",
        "Pass the model second",
        error=ModelError,
    )
    model_parameter_ids = {id(parameter) for parameter in model.parameters()}
    optimizer_parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    unknown = sum(id(parameter) not in model_parameter_ids for parameter in optimizer_parameters)
    if unknown:
        raise ModelError(
            f"{unknown} of the optimizer's {len(optimizer_parameters)} parameters do not belong to "
            f"{type(model).__name__}, so their gradients would never be reduced. Build the optimizer from the "
            f"parameters of this model: {type(optimizer).__name__}(model.parameters(), ...), after moving the model to "
            "its device."
        )


def check_same_settings(communicator: Communicator, method: str, **settings: object) -> None:
    """Raise ConfigError on every rank if arguments of `method` differ between ranks. All ranks must call this
    function."""
    settings_by_rank = gather_if_different(communicator, settings) or []
    for rank, settings_of_rank in enumerate(settings_by_rank):
        for name, value in settings_by_rank[0].items():
            if settings_of_rank[name] != value:
                raise ConfigError(
                    f"{method} was called with {name}={value!r} on rank 0 and {name}={settings_of_rank[name]!r} on "
                    f"rank {rank}. Pass the same value on every rank."
                )


def check_same_model(communicator: Communicator, model: nn.Module) -> None:
    """Raise ModelError on every rank if the names, shapes, dtypes or order of the parameters and buffers differ between
    ranks, or if the strides or requires_grad of the parameters differ. All ranks must call this function."""
    tensors = {name: (dtype_name(value.dtype), list(value.shape)) for name, value in named_tensors(model)}
    parameters = dict(model.named_parameters())
    strides = {name: _stride_of(parameter) for name, parameter in parameters.items()}
    requires_grad = [parameter.requires_grad for parameter in parameters.values()]
    descriptions_by_rank = gather_if_different(communicator, (tensors, strides, requires_grad)) or []
    tensors_by_rank: list[dict[str, tuple[str, list[int]]]] = [description[0] for description in descriptions_by_rank]
    for rank, tensors_of_rank in enumerate(tensors_by_rank):
        for name in dict.fromkeys([*tensors_by_rank[0], *tensors_of_rank]):
            expected, actual = tensors_by_rank[0].get(name), tensors_of_rank.get(name)
            if expected != actual:
                raise ModelError(
                    f"The model differs between ranks: {name!r} is {_describe_tensor(expected)} on rank 0 and "
                    f"{_describe_tensor(actual)} on rank {rank}. Build it from the same arguments on every rank."
                )
    if any(list(tensors_of_rank) != list(tensors_by_rank[0]) for tensors_of_rank in tensors_by_rank):
        raise ModelError(
            "The model's parameters are in a different order on some ranks. Build it in the same way on every rank."
        )
    for rank, (_, found_strides, _) in enumerate(descriptions_by_rank):
        for name, stride in descriptions_by_rank[0][1].items():
            if found_strides[name] != stride:
                raise ModelError(
                    f"The model differs between ranks: {name!r} has stride {stride} on rank 0 and "
                    f"{found_strides[name]} on rank {rank}. Use the same memory format on every rank."
                )
    if descriptions_by_rank:
        check_same_trainable_parameters(list(parameters), [flags for _, _, flags in descriptions_by_rank])


def _stride_of(tensor: Tensor) -> list[int]:
    return list(tensor.stride()) if tensor.layout == torch.strided else []


@torch.no_grad()
def check_same_weights(communicator: Communicator, model: nn.Module) -> bool:
    """Return whether all parameters that are not sharded have the same bits on all ranks. All ranks must call this
    function.

    Raises ModelError on every rank if the values of a parameter differ by more than rounding errors, which occur if
    the ranks compute on different processors. Computing a digest of the bits of each parameter takes about as long as
    reading the parameters once. A parameter whose digests differ is broadcast from rank 0 and compared.
    """
    if communicator.size == 1:
        return True
    parameters = {
        name: parameter for name, parameter in model.named_parameters() if local_shard(parameter) is parameter
    }
    digests = [digest_bits(parameter.detach()).to(communicator.device) for parameter in parameters.values()]
    own = torch.stack(digests).tolist() if digests else []
    digests_by_rank: list[list[int]] = gather_if_different(communicator, own) or []
    is_equal = True
    for name, values_by_rank in zip(parameters, zip(*digests_by_rank, strict=True), strict=False):
        # If several digests are equally frequent, `max` returns that of the lowest rank.
        counts = Counter(values_by_rank)
        expected = max(counts, key=counts.__getitem__)
        different = [rank for rank, digest in enumerate(values_by_rank) if digest != expected]
        is_equal = is_equal and not different
        if different and not _is_close_on_all_ranks(communicator, parameters[name].detach()):
            raise ModelError(
                f"The values of parameter {name!r} on {format_ranks(different)} differ from those on the other ranks, "
                "so the ranks train different models. Change weights in the same way on every rank, for example in "
                "callbacks, or disable this check: TrainConfig(check_weights=False)."
            )
    return is_equal


def _is_close_on_all_ranks(communicator: Communicator, tensor: Tensor) -> bool:
    """Broadcast the `tensor` of rank 0, and return whether the `tensor` of every rank differs from it by rounding
    errors at most. All ranks must call this function."""
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    reference = tensor.clone()
    broadcast_tensors(communicator, [reference])  # supports all dtypes
    reference = reference.to(wide)
    difference = (tensor.to(wide) - reference).abs().max()
    is_floating = tensor.is_floating_point() or tensor.is_complex()
    limit = max(_MAX_ROUNDING, 4 * torch.finfo(tensor.dtype).eps) if is_floating else 0.0
    is_within = difference <= limit * reference.abs().max()  # False for NaN
    return bool(communicator.allreduce(is_within.long().to(communicator.device), "min").item())


def digest_bits(tensor: Tensor) -> Tensor:
    """Return a 64-bit digest of the bits of `tensor`, which depends on their positions: a weighted sum of 64-bit words,
    in which the weight of a word is the product of the weights of its row of 256 words and of its column."""
    content = as_bytes(tensor)
    if num_padding_bytes := -len(content) % 8:
        content = torch.nn.functional.pad(content, (0, num_padding_bytes))
    elif content.storage_offset() % 8 or content.data_ptr() % 8:
        content = content.clone()
    words = content.view(torch.int64)  # summed in this dtype, because a conversion would take several times as long
    num_whole_words = len(words) // _WORDS_PER_ROW * _WORDS_PER_ROW
    # Chunks limit the memory for the shifted words.
    chunks = words[:num_whole_words].view(-1, _WORDS_PER_ROW).split(_ROWS_PER_CHUNK)
    column_weights = _position_weights(0, _WORDS_PER_ROW, tensor.device)
    rows = [_checksum_rows(chunk, column_weights) for chunk in (*chunks, words[num_whole_words:].unsqueeze(1))]
    summands = torch.cat(rows)
    return (summands * _position_weights(_WORDS_PER_ROW, len(summands), tensor.device)).sum()


def _checksum_rows(words: Tensor, column_weights: Tensor) -> Tensor:
    """Return a checksum of each row of int64 words, modulo 2**64. In a weighted sum of the words, changes of upper bits
    may cancel, such as changes of the signs of two numbers, so the upper halves are combined with the lower ones."""
    combined, weights = words ^ (words >> 32), column_weights[: words.shape[1]]
    # On CPUs, a product with a vector needs no memory for the weighted words. GPUs do not support it for integers.
    return torch.mv(combined, weights) if words.device.type == "cpu" else (combined * weights).sum(1)


def _position_weights(start: int, count: int, device: torch.device) -> Tensor:
    """Return the weights of the positions from `start` on, int64 [count]: odd numbers with pseudo-random bits, computed
    as in the generator SplitMix64."""
    weights = torch.arange(start + 1, start + 1 + count, device=device) * _HASH_MULTIPLIER
    for shift, multiplier in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        weights = (weights ^ (weights >> shift)) * multiplier
    return (weights ^ (weights >> 31)) | 1


def check_same_parameter_order(communicator: Communicator, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise ModelError on every rank if the groups of `optimizer` contain different parameters of `model` on different
    ranks, or the same parameters in a different order. All ranks must call this function, with the same number of
    parameters."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    own = [names.get(parameter, "") for group in optimizer.param_groups for parameter in group["params"]]
    names_by_rank: list[list[str]] = gather_if_different(communicator, own) or []
    for rank, names_of_rank in enumerate(names_by_rank):
        for index, (expected, name) in enumerate(zip(names_by_rank[0], names_of_rank, strict=True)):
            if name != expected:
                raise ModelError(
                    f"Parameter {index} of the optimizer is {expected!r} on rank 0 and {name!r} on rank {rank}, so "
                    "they would be trained with each other's settings and state. Build the optimizer from the "
                    "parameters in the same order on every rank."
                )


def check_same_trainable_parameters(names: Sequence[str], requires_grad_by_rank: Sequence[Sequence[bool]]) -> None:
    """Raise ModelError unless the same parameters require gradients on all ranks.

    `requires_grad_by_rank` contains every rank's values of requires_grad, in the order of `names`.
    """
    for rank, requires_grad_of_rank in enumerate(requires_grad_by_rank):
        if requires_grad_of_rank != requires_grad_by_rank[0]:
            name = next(
                name
                for name, first, second in zip(names, requires_grad_by_rank[0], requires_grad_of_rank, strict=True)
                if first != second
            )
            state, opposite = (
                ("trained", "frozen") if requires_grad_by_rank[0][names.index(name)] else ("frozen", "trained")
            )
            raise ModelError(
                f"Parameter {name!r} is {state} on rank 0 and {opposite} on rank {rank}. "
                "Freeze and unfreeze the same parameters on every rank: parameter.requires_grad_(...)."
            )


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of `model` with their names."""
    return [*model.named_parameters(), *model.named_buffers()]


def _describe_tensor(dtype_and_shape: tuple[str, list[int]] | None) -> str:
    return "missing" if dtype_and_shape is None else f"{dtype_and_shape[0]} {dtype_and_shape[1]}"
