"""Private torch APIs that unitrain uses; `backends/sharding/fsdp_compat.py` has those of FSDP2.

Each entry for a private API states the torch versions that it was checked with. No other module uses private torch
APIs, with four exceptions: `backends/ddp.py`, `supervisor/standby_rank.py` and `testing/fork_server.py` import
torch._dynamo early; `backends/horovod/process_group.py` implements and calls methods of a process group whose names are
private; `horovod_wheel/machine.py` calls torch._C._cuda_getArchFlags, because that package works without the rest of
unitrain; and `callbacks/memory_snapshot.py` calls functions of torch.cuda.memory that torch documents.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import socket
import subprocess
import uuid
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.data._utils import worker as _dataloader_worker

from unitrain.errors import MissingFeatureError, UnsupportedError

# --- versions ---

MINIMUM_TORCH = "2.6"  # torch.load(weights_only=True), which reads checkpoints, runs code of the file in torch 2.5
FIRST_UNTESTED_TORCH = "2.16"  # increase it when `make test-torch` passes with a newer version; setup.py reads both
# The first torch version with the APIs that a feature requires. The documentation shows this table.
FIRST_TORCH = {
    'shard="parameters"': "2.9",
    "the size of the first gradient bucket (UNITRAIN_BUCKETS_MB)": "2.12",
    "the reduction PREMUL_SUM on Horovod's process group": "2.13",
}


def _parse(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def has_torch(version: str) -> bool:
    """Return whether the installed torch is at least `version`, such as "2.9". Pre-releases of this version count."""
    return _parse(torch.__version__) >= _parse(version)


def check_torch() -> None:
    """Raise UnsupportedError if the installed torch is not in the range of supported versions."""
    if not has_torch(MINIMUM_TORCH) or has_torch(FIRST_UNTESTED_TORCH):
        raise UnsupportedError(
            f"torch {torch.__version__} is installed, but unitrain supports torch >= {MINIMUM_TORCH} and "
            f"< {FIRST_UNTESTED_TORCH}. Install a supported version: pip install 'torch>={MINIMUM_TORCH},"
            f"<{FIRST_UNTESTED_TORCH}'"
        )


def require_torch(feature: str) -> None:
    """Raise MissingFeatureError if the installed torch lacks an API that `feature`, a key of FIRST_TORCH, requires."""
    if not has_torch(version := FIRST_TORCH[feature]):
        raise MissingFeatureError(
            f"{feature} requires torch {version} or later; installed: torch {torch.__version__}. Install it with: "
            f"pip install 'torch>={version},<{FIRST_UNTESTED_TORCH}'"
        )


# --- tensors ---


def cpu_attention_operations() -> dict[Any, Any]:
    """Return torch's operations for attention on CPUs, and for each one the GPU operation with the same FLOPs. Checked
    with torch 2.14."""
    aten = torch.ops.aten
    return {
        aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    }


# The functions on lists of tensors that the optimizers of torch use. Checked with torch 2.14.
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd treats `tensor` as a view of another tensor. Checked with torch 2.14."""
    return tensor._is_view()


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, without a copy, and other tensors unchanged. Checked with torch 2.14."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


# --- torch.optim ---


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run `optimizer.step()` without calling its registered hooks. Checked with torch 2.14."""
    step: Any = type(optimizer).step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


class _Hooks(UserDict[int, Callable[..., Any]]):
    """The registered hooks of an optimizer, preceded by `leading_hooks` and followed by `trailing_hooks`."""

    def __init__(
        self, registered: Any, leading_hooks: list[Callable[..., Any]], trailing_hooks: list[Callable[..., Any]]
    ) -> None:
        super().__init__()
        self.data = registered  # the handles of the registered hooks refer to this dictionary
        self._leading_hooks, self._trailing_hooks = leading_hooks, trailing_hooks

    def values(self) -> Any:
        return [*self._leading_hooks, *self.data.values(), *self._trailing_hooks]


def add_innermost_step_hooks(
    optimizer: torch.optim.Optimizer, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    """Register the innermost step hooks: `before` runs after all pre-hooks of `optimizer`, and `after` before all its
    post-hooks, including hooks that are registered later. Both take the arguments of step hooks. Checked with torch
    2.14."""
    hooks: Any = optimizer
    hooks._optimizer_step_pre_hooks = _Hooks(hooks._optimizer_step_pre_hooks, [], [before])
    hooks._optimizer_step_post_hooks = _Hooks(hooks._optimizer_step_post_hooks, [after], [])


def is_nested_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step hook of `optimizer` that calls this function runs in a nested step, such as
    `super().step()`. Checked with torch 2.14."""
    code = torch.optim.Optimizer.profile_hook_step(len).__code__  # the code object of every step with hooks
    frame, steps = inspect.currentframe(), 0
    while frame is not None and steps < 2:
        steps += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps > 1


def skips_step_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `optimizer.step()` receives the result of GradScaler's check and skips the update itself, as fused
    optimizers do. Checked with torch 2.14."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def found_non_finite(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `scaler` found a gradient of `optimizer` with inf or nan in this step. Synchronizes with the
    device. Checked with torch 2.14."""
    return any(flag.item() for flag in scaler._found_inf_per_device(optimizer).values())


# --- torch.distributed ---

# torch 2.13 renamed these functions.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The base class of Work objects that are implemented in Python. Checked with torch 2.14.
Work = dist._Work


def transport_versions() -> dict[str, str]:
    """Return the version of each transport in this torch build, or "yes" for a transport without a version."""
    version_by_transport: dict[str, str] = {}
    if not dist.is_available():
        return version_by_transport
    if dist.is_gloo_available():
        version_by_transport["gloo"] = "yes"
    if dist.is_nccl_available() and torch.version.cuda is not None:
        version = torch.cuda.nccl.version()
        version_by_transport["nccl"] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    if dist.is_mpi_available():
        version_by_transport["mpi"] = "yes"
    return version_by_transport


def observe_ranks_of_torchrun(
    in_rank: Callable[[], object], after_exit: Callable[[Mapping[str, str], int], object]
) -> None:
    """Call `in_rank` in each rank that torchrun starts from this process, before the rank executes its program.

    Call `after_exit` in this process, with the environment and the exit status of the rank, when torchrun detects that
    a rank has exited. Checked with torch 2.14.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    class Rank(subprocess.Popen[bytes]):
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**{"preexec_fn": in_rank, **arguments})
            self._environment: Mapping[str, str] = arguments["env"]

        def poll(self) -> int | None:
            has_exited = self.returncode is not None
            status = super().poll()
            if status is not None and not has_exited:
                after_exit(self._environment, status)
            return status

    handlers: Any = subprocess_handler
    handlers.Popen = Rank


def default_process_group() -> dist.ProcessGroup:
    """Return the default process group. Checked with torch 2.14."""
    return dist.distributed_c10d._get_default_group()


def backend_options(name: str, timeout: timedelta) -> Any:
    """Return the options of a process group's backend. Checked with torch 2.14."""
    return torch._C._distributed_c10d.Backend.Options(name, timeout)


def default_store() -> dist.Store:
    """Return the store of the default process group. Checked with torch 2.14."""
    return dist.distributed_c10d._get_default_store()


def set_transport_timeout(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> None:
    """Set the timeout of the transport of `group` for tensors on `device`. Checked with torch 2.11 and 2.14."""
    transport = group._get_backend(device)
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL, the transport is wrapped in a group that checks arguments and has no timeout.
    getattr(transport, "wrapped_pg", transport)._set_default_timeout(timeout)


def create_gloo_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta, *, interface: str, address: str, connects: bool = True
) -> Any:
    """Create and return a ProcessGroupGloo. All ranks must call this function. With `connects`, all ranks are connected
    afterwards.

    The group uses the network interface `interface`. If `interface` is empty, it uses the interface with `address`, or,
    if `address` is also empty, the interface to which the host name resolves. Without `connects`, two ranks connect
    when they exchange their first message, and one of them waits for the other. Raises RuntimeError if the ranks cannot
    connect within the timeout. Checked with torch 2.14.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    location: dict[str, Any] = {"interface": interface} if interface else {"hostname": address or socket.gethostname()}
    if has_torch("2.8"):  # before torch 2.8, the ranks always connect
        location["lazy_init"] = not connects
    options._devices = [gloo.create_device(**location)]
    options._timeout, options._threads = timeout, 1
    return gloo(store, rank, size, options)


def register_inflight_work(outputs: Any, work: dist.Work) -> None:
    """Let `wait_tensor` wait for `work`, inside torch's `allow_inflight_collective_as_graph_input_ctx`. `outputs` are
    the tensors that `work` writes. Torch's own process groups do the same. Checked with torch 2.14."""
    bindings = torch._C._distributed_c10d
    if bindings._allow_inflight_collective_as_graph_input():
        # Register a C++ Work, because the registry, which is C++ code, does not keep the Python object of `work` alive.
        registered = bindings._create_work_from_future(work.get_future())
        for output in tree_leaves(outputs):
            bindings._register_work(output, registered)


def open_connection(store: dist.Store) -> dist.Store:
    """Return a store with its own connection to the process that serves `store`.

    Its keys differ from those of `store` before torch 2.8, but all stores that this function returns for the same keys,
    on any rank, have the same keys. A store without a connection is returned itself. Checked with torch 2.6 and 2.14.
    """
    if has_torch("2.8"):
        return store.clone()
    server = store
    while isinstance(server, dist.PrefixStore):
        server = server.underlying_store
    if not isinstance(server, dist.TCPStore):
        return store
    # The prefixes of `store` cannot be read, so the ranks agree on a new one.
    prefix = store.compare_set("connections", "", uuid.uuid4().hex).decode()
    connection = dist.TCPStore(server.host, server.port, is_master=False, wait_for_workers=False, multi_tenant=True)
    return dist.PrefixStore(prefix, connection)


def serving_options(descriptor: int | None) -> dict[str, Any]:
    """Return the arguments with which a TCPStore serves the listening socket `descriptor`. The servers before torch 2.9
    that use libuv do not accept a socket. Checked with torch 2.6, 2.9 and 2.14."""
    return {"master_listen_fd": descriptor, **({} if has_torch("2.9") else {"use_libuv": False})}


def store_host(store: dist.Store) -> str | None:
    """Return the host that serves `store`, or None if it is not a TCPStore. Checked with torch 2.14."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store.host if isinstance(store, dist.TCPStore) else None


def skip_shape_validation(stage: Any) -> None:
    """Make a stage of torch.distributed.pipelining accept micro-batches of different shapes, even with
    TORCH_DISTRIBUTED_DEBUG=DETAIL. Checked with torch 2.14.
    """
    stage._runtime_validate = False


def set_receive_shape(
    receive_infos: Iterable[Any], shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Make a stage of torch.distributed.pipelining receive tensors of `shape` and `dtype`, and allocate their buffers
    if torch does not. Checked with torch 2.14 and 2.15.
    """
    for info in receive_infos:
        if hasattr(info, "allocate_buffer"):  # torch 2.15 allocates the buffer and releases it after its use
            empty = torch.empty(tuple(shape), dtype=dtype, device="meta")
            info.tensor_meta = dataclasses.replace(
                info.tensor_meta, shape=empty.shape, stride=empty.stride(), dtype=dtype
            )
        else:
            info.buffer = torch.empty(tuple(shape), dtype=dtype, device=device)


def release_receive_buffers(receive_infos: Iterable[Any]) -> None:
    """Release the buffers that `set_receive_shape` has allocated, after their use."""
    for info in receive_infos:
        if not hasattr(info, "allocate_buffer"):
            info.buffer = torch.empty(0, device=info.buffer.device)


# --- autograd ---

# Return the ID of the current autograd graph task, or -1 outside a backward pass. IDs increase. Checked with torch
# 2.14.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the current backward pass, after previously queued callbacks. Checked with torch
    2.14."""
    Variable._execution_engine.queue_callback(callback)


def is_reached_by_backward(parameter: Tensor) -> bool:
    """Return whether the current backward pass accumulates into the gradient of `parameter`. Checked with torch 2.14.

    Raises RuntimeError during torch.autograd.grad with respect to parameters, which accumulates no gradients.
    """
    return torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)


def accumulates_into_others_only(output: Tensor, parameters: Iterable[Tensor]) -> bool:
    """Return whether the graph of `output` contains none of `parameters`, and the current backward pass accumulates
    into the gradient of a leaf of this graph. The pass must have reached `output`. Checked with torch 2.14."""
    ids = set(map(id, parameters))
    with torch.enable_grad():
        pending: list[Any] = [get_gradient_edge(output).node]
    seen, accumulates = set(), False
    try:
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            pending += [next_node for next_node, _ in node.next_functions]
            if isinstance(leaf := getattr(node, "variable", None), Tensor) and not node.next_functions:
                if id(leaf) in ids:
                    return False
                accumulates |= torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad with respect to the leaf, which accumulates nothing
        return False
    return accumulates


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether a hook is registered on `parameter`. Checked with torch 2.14."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


@contextmanager
def gradient_hooks_disabled(parameter: Tensor) -> Iterator[None]:
    """Context manager that disables the hooks registered on `parameter`. Checked with torch 2.14."""
    registered = [hooks for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks) if hooks]
    copies = [hooks.copy() for hooks in registered]
    for hooks in registered:
        hooks.clear()  # in place, because autograd refers to the same dictionary
    try:
        yield
    finally:
        for hooks, copy in zip(registered, copies, strict=True):
            hooks.update(copy)


def drop_empty_gradient_hooks(parameter: Tensor) -> None:
    """Remove the dictionary of post-accumulate hooks from `parameter` if it is empty, because autograd also processes
    an empty one. Checked with torch 2.14."""
    if not parameter._post_accumulate_grad_hooks:
        parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]


def tensor_version(tensor: Tensor) -> int:
    """Return the version counter of `tensor`, which increases with every write. Checked with torch 2.14."""
    return tensor._version


# --- tensor subclasses ---

# The value of `__torch_function__` in a tensor subclass that handles operations in `__torch_dispatch__` only. Checked
# with torch 2.14.
without_torch_function = torch._C._disabled_torch_function_impl


def make_wrapper_tensor(subclass: type[Tensor], tensor: Tensor) -> Any:
    """Return a tensor of class `subclass` without memory, with the shape, strides, dtype and device of `tensor`.
    Checked with torch 2.14."""
    make: Any = Tensor._make_wrapper_subclass
    return make(subclass, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def call_after_loss_scaling(record: Callable[[Any, Tensor], object]) -> None:
    """Call `record(scaled, scale)` in this process whenever a torch.amp.GradScaler has multiplied losses by `scale`;
    `scaled` is a tensor or an iterable. Checked with torch 2.14."""
    scaler_class: Any = torch.amp.GradScaler
    original = scaler_class.scale

    @functools.wraps(original)
    def recorded(scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if scaler.is_enabled():
            record(scaled, scaler._scale)
        return scaled

    scaler_class.scale = recorded


# --- modules and torch.compile ---

# Exclude a function from torch.compile (graph break). torch.compiler.disable has the same effect, but imports
# torch._dynamo, which takes 1.5 s. Checked with torch 2.14.
disable_compile = _disable_dynamo

# The base class of all normalization layers with running statistics. Checked with torch 2.14.
BatchNormBase = _BatchNorm
InstanceNormBase = _InstanceNorm


def unwrap_compiled(model: nn.Module) -> nn.Module:
    """Return the original module if `model` is a torch.compile wrapper, otherwise `model`. Checked with torch 2.14."""
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile(...)` returned `model`, or `model.compile()` was called. Checked with torch
    2.14."""
    return hasattr(model, "_orig_mod") or model._compiled_call_impl is not None


def has_forward_pre_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Return whether `hook` is registered as a forward pre-hook of `module`. Checked with torch 2.14."""
    return hook in module._forward_pre_hooks.values()


def loads_state_unchanged(model: nn.Module) -> bool:
    """Return whether `model.load_state_dict` only copies tensors into the model, without hooks or overridden methods.
    Checked with torch 2.14.
    """
    return all(
        type(module)._load_from_state_dict.__module__.startswith("torch.nn.modules.")
        and type(module).load_state_dict is nn.Module.load_state_dict
        and type(module).set_extra_state is nn.Module.set_extra_state
        and not module._load_state_dict_pre_hooks
        and not module._load_state_dict_post_hooks
        for module in model.modules()
    )


def buffers_by_name(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary of `module`'s buffers, without the buffers of its submodules. Checked with torch 2.14."""
    return module._buffers


def parameters_by_name(module: nn.Module) -> dict[str, Any]:
    """Return the dictionary of `module`'s parameters, without the parameters of its submodules. Checked with torch
    2.14."""
    return module._parameters


# --- torch.nn.functional ---


def call_before_embedding_renorm(check: Callable[[Tensor, float, float], object]) -> None:
    """Call `check(weight, max_norm, norm_type)` in this process whenever `torch.nn.functional.embedding` or
    `embedding_bag` is about to limit the norms of rows of `weight` in place. Checked with torch 2.14.

    Other calls of these functions are as fast as before.
    """
    functional: Any = nn.functional
    original = functional._no_grad_embedding_renorm_

    @functools.wraps(original)
    def checked(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Any:
        check(weight, max_norm, norm_type)
        return original(weight, indices, max_norm, norm_type)

    functional._no_grad_embedding_renorm_ = checked
    torch.jit._builtins._register_builtin(checked, "aten::_no_grad_embedding_renorm_")  # for torch.jit.script


def shares_memory(tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether `tensor` uses the memory of `parameter`. `tensor` may also be the representation of a tensor in a
    function that torch.compile or torch.func traces. Checked with torch 2.14."""
    unwrapped_tensor, unwrapped_parameter = _unwrap_traced(tensor), _unwrap_traced(parameter)
    fake_mode = getattr(unwrapped_tensor, "fake_mode", None)
    if fake_mode is not None and not hasattr(unwrapped_parameter, "fake_mode"):
        unwrapped_parameter = fake_mode.fake_tensor_converter._get_memo(unwrapped_parameter)
        if unwrapped_parameter is None:  # the traced function does not use the parameter
            return False
    try:
        tensor_storage, parameter_storage = unwrapped_tensor.untyped_storage(), unwrapped_parameter.untyped_storage()
        if fake_mode is not None:  # fake tensors have storages without memory
            return bool(tensor_storage._cdata == parameter_storage._cdata)
        return bool(tensor_storage.data_ptr() == parameter_storage.data_ptr() != 0)
    except RuntimeError:  # a tensor has no storage
        return False


def has_memory(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` are in its storage, unlike those of a wrapper subclass. Checked with
    torch 2.14."""
    return torch._C._has_storage(tensor) and tensor.data_ptr() != 0


def _unwrap_traced(tensor: Any) -> Any:
    """Return the tensor inside the wrappers of torch.func and of AOTAutograd."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor.from_functional() if hasattr(tensor, "from_functional") else tensor


# --- torch.utils.data ---


@contextmanager
def hide_worker_info() -> Iterator[None]:
    """Context manager in which `torch.utils.data.get_worker_info` returns None. Checked with torch 2.14."""
    info, _dataloader_worker._worker_info = _dataloader_worker._worker_info, None
    try:
        yield
    finally:
        _dataloader_worker._worker_info = info


def has_shuffle_buffer(items: Any) -> bool:
    """Return whether `items` is a Hugging Face dataset with a shuffle buffer. Checked with datasets 5.2."""
    waiting = [getattr(items, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        if (inner := getattr(part, "ex_iterable", None)) is not None:
            waiting.append(inner)
        waiting += getattr(part, "ex_iterables", [])
    return False


def stop_workers(loader_iterator: Any) -> None:
    """Terminate the worker processes of `loader_iterator`, the iterator of a DataLoader with workers. Checked with
    torch 2.14."""
    loader_iterator._shutdown_workers()


def awaited_loader_iterator(frame: FrameType) -> Any | None:
    """Return the iterator of a DataLoader whose next batch the function of `frame` waits for, or None. Checked with
    torch 2.14."""
    code = frame.f_code
    if code.co_name != "_next_data" or not code.co_filename.endswith("torch/utils/data/dataloader.py"):
        return None
    return frame.f_locals.get("self")


def next_batch_index(loader_iterator: Any) -> int | None:
    """Return the index of a DataLoader iterator's next batch, or None without workers. Checked with torch 2.14."""
    return getattr(loader_iterator, "_rcvd_idx", None)


def worker_of_next_batch(loader_iterator: Any) -> tuple[int, int, Any] | None:
    """Return the index and the process ID of the worker that loads a DataLoader iterator's next batch, and the loader's
    worker_init_fn; None without workers. Checked with torch 2.14."""
    try:
        worker_index = loader_iterator._task_info[loader_iterator._rcvd_idx][0]
        return worker_index, loader_iterator._workers[worker_index].pid, loader_iterator._worker_init_fn
    except (AttributeError, KeyError, IndexError):  # another version of torch, or a loader without workers
        return None


# --- DistributedDataParallel ---

# The attribute of a module with the names of parameters and buffers that DDP ignores. Checked with torch 2.14.
DDP_IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"


class ReducerDDP(DistributedDataParallel):
    """DistributedDataParallel whose reducer, the C++ object that reduces the gradients in buckets, uses `reducer_group`
    instead of `process_group`. Checked with torch 2.14."""

    def __init__(self, module: nn.Module, reducer_group: dist.ProcessGroup, **settings: Any) -> None:
        self._reducer_group = reducer_group
        # `Backend.distributed_model` has broadcast the parameters and buffers. DDP of torch 2.6 always repeats it.
        if "init_sync" in inspect.signature(DistributedDataParallel).parameters:
            settings["init_sync"] = False
        super().__init__(module, **settings)
        self.broadcast_buffers = False

    def rebuild_reducer(self) -> None:
        """Replace the reducer with one for the parameters that currently require grad, and remove the hooks of the old
        reducer.
        """
        parameters, sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        self._ddp_init_helper(parameters, sparse, {}, self.static_graph)
        for hook, state in self._comm_hooks:
            dist._register_comm_hook(self.reducer, state, hook)

    def has_comm_hook(self) -> bool:
        """Return whether a communication hook is registered."""
        return bool(self._comm_hooks)

    def check_reducer_finished(self) -> None:
        """Raise RuntimeError if the last backward pass did not complete all buckets."""
        self.reducer._check_reducer_finalized()

    def rebuild_buckets(self) -> bool:
        """Reassign the gradients to buckets in the order of the first backward pass, as DDP's forward does. Return
        whether they were reassigned."""
        return self.reducer._rebuild_buckets()

    def prepare_reducer(self, reached: list[Tensor]) -> None:
        """Prepare the reducer for a backward pass. Parameters outside the graph of `reached` count as unused."""
        self.reducer.prepare_for_backward(reached)

    def release_groups(self) -> None:
        """Delete all references to process groups. The reducer cannot be used afterwards."""
        self._comm_hooks.clear()  # hooks may hold groups
        del self.reducer, self.logger, self.process_group, self._reducer_group

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        group, self.process_group = self.process_group, self._reducer_group
        try:
            super()._ddp_init_helper(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.process_group = group


def ddp_finds_all(tensors: list[Tensor], output: Any) -> bool:
    """Return whether DDP finds all `tensors` in `output`, the result of a forward pass. If not, DDP treats some used
    parameters as unused. Checked with torch 2.14."""
    return set(map(id, tensors)) <= set(map(id, _find_tensors(output)))


def bucket_bytes(module: nn.Module) -> int:
    """Return the total bucket size of a DistributedDataParallel in bytes; 0 for other modules, if gradients are views
    of the buckets, and after `release_groups`. Checked with torch 2.14.
    """
    if not isinstance(module, DistributedDataParallel) or module.gradient_as_bucket_view:
        return 0
    if not hasattr(module, "logger"):  # deleted by `release_groups`
        return 0
    data = module._get_ddp_logging_data()
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return sum(int(size) for size in sizes.split(",") if size.strip())
