"""The overloads of torch.distributed.ProcessGroup's methods, and the validation of their arguments.

torch.distributed passes lists of tensors and an options object. Programs that call a group's methods directly may also
pass single tensors, roots, operations and timeouts: `group.allreduce(tensor)`, `group.broadcast(tensor, root=0)`. The
decorators in this module convert these arguments to lists and options, validate them with the messages of torch's own
process groups, and apply the timeout in the options to the returned Work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unitrain.errors import CollectiveArgumentError
from unitrain.torch_compat import register_inflight_work

_AllgatherOptions: Any = dist.distributed_c10d.AllgatherOptions
_REDUCE_OPS = (dist.ReduceOp, dist.ReduceOp.RedOpType)
_UNSET = timedelta()
Arguments = tuple[Any, ...]
# A conversion returns the arguments of the overload that takes lists of tensors and, as last argument, options.
Conversion = Callable[..., Arguments]


def accepts(convert: Conversion) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a process group method. The decorated method passes its arguments to `convert`, and the
    result to the original method. The first argument of the original method contains the outputs.
    """

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *arguments: Any, **options: Any) -> Any:
            converted = convert(self, *arguments, **options)
            work = method(self, *converted)
            timeout = getattr(converted[-1], "timeout", None)
            if timeout is not None and timeout > _UNSET:  # torch passes -1 ms if the caller sets no timeout
                work.set_timeout(timeout)
            if len(converted) > 1:  # a barrier has no outputs
                register_inflight_work(converted[0], work)
            return work

        return call

    return decorate


def broadcast(
    group: Any, tensors: Any = None, opts: Any = None, timeout: Any = None, *, tensor: Any = None, root: Any = None
) -> Arguments:
    """Convert and validate the arguments of `broadcast`."""
    tensors = _as_list(tensors if tensor is None else tensor)
    opts = _create_options(dist.BroadcastOptions, opts, timeout, rootRank=opts if isinstance(opts, int) else root)
    _check_root("broadcast", group, opts.rootRank)
    if not 0 <= opts.rootTensor < len(tensors):
        raise CollectiveArgumentError(
            f"Horovod's broadcast got an invalid root tensor: {opts.rootTensor}, in a list of {len(tensors)}. "
            "Set opts.rootTensor to the index of a tensor in the list."
        )
    _check_same_metadata("broadcast", tensors)
    return tensors, opts


def allreduce(
    group: Any, tensors: Any = None, opts: Any = None, timeout: Any = None, *, tensor: Any = None, op: Any = None
) -> Arguments:
    """Convert and validate the arguments of `allreduce`."""
    tensors = _as_list(tensors if tensor is None else tensor)
    opts = _create_options(dist.AllreduceOptions, opts, timeout, reduceOp=opts if isinstance(opts, _REDUCE_OPS) else op)
    _check_same_metadata("allreduce", tensors)
    return tensors, opts


def allreduce_coalesced(group: Any, tensors: Any, opts: Any = None) -> Arguments:
    """Convert and validate the arguments of `allreduce_coalesced`."""
    tensors = _as_list(tensors)
    _check_not_empty("allreduce_coalesced", tensors)
    first = tensors[0]
    for index, tensor in enumerate(tensors):
        if tensor.layout != first.layout:
            raise CollectiveArgumentError(
                f"Horovod's allreduce_coalesced got an invalid tensor layout at index {index}: {tensor.layout}. "
                "Call it with dense tensors: tensor.to_dense()"
            )
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise CollectiveArgumentError(
                "Horovod's allreduce_coalesced: tensors must all have the same type, got "
                f"{first.dtype} and {tensor.dtype}. Call it once for each dtype and device."
            )
    if first.layout != torch.strided:
        raise CollectiveArgumentError(
            f"Horovod's allreduce_coalesced got tensors of an unsupported layout: {first.layout}. "
            "Call allreduce once for each sparse tensor."
        )
    return tensors, _create_options(dist.AllreduceCoalescedOptions, opts)


def reduce(
    group: Any,
    tensors: Any = None,
    opts: Any = None,
    op: Any = None,
    timeout: Any = None,
    *,
    tensor: Any = None,
    root: Any = None,
) -> Arguments:
    """Convert and validate the arguments of `reduce`."""
    tensors = _as_list(tensors if tensor is None else tensor)
    opts = _create_options(
        dist.ReduceOptions, opts, timeout, rootRank=opts if isinstance(opts, int) else root, reduceOp=op
    )
    _check_root("reduce", group, opts.rootRank)
    _check_single("reduce", "tensor list", tensors)
    if opts.rootTensor != 0:
        raise CollectiveArgumentError(
            f"Horovod's reduce got an invalid root tensor: {opts.rootTensor}. Set opts.rootTensor to 0."
        )
    return tensors, opts


def allgather(
    group: Any,
    output_tensors: Any = None,
    input_tensors: Any = None,
    opts: Any = None,
    *,
    input_tensor: Any = None,
    timeout: Any = None,
) -> Arguments:
    """Convert and validate the arguments of `allgather`."""
    outputs, inputs = _as_nested(output_tensors), _as_list(input_tensors if input_tensor is None else input_tensor)
    _check_not_empty("allgather", inputs, "input tensor list")
    if len(inputs) != len(outputs):
        raise CollectiveArgumentError(
            "Horovod's allgather requires input/output tensor lists to have the same length, got "
            f"{len(inputs)} and {len(outputs)}. Pass one list of outputs for each input."
        )
    _check_same_metadata("allgather", inputs)
    for index, parts in enumerate(outputs):
        count = group.size() * len(inputs)
        if len(parts) != count:
            raise CollectiveArgumentError(
                f"Horovod's allgather got an invalid output tensor list at index {index}: length {len(parts)}, "
                f"expected {count}. Pass one output per input and rank."
            )
        for part in parts:
            _check_metadata("allgather", part, inputs[0], checks_shape=part.numel() != inputs[0].numel())
    return outputs, inputs, _create_options(_AllgatherOptions, opts, timeout)


def allgather_coalesced(group: Any, output_lists: Any, input_list: Any, opts: Any = None) -> Arguments:
    """Convert and validate the arguments of `allgather_coalesced`: one list of outputs for each rank."""
    inputs = _as_list(input_list)
    _check_not_empty("allgather_coalesced", inputs, "input tensor list")
    if len(output_lists) != group.size():
        raise CollectiveArgumentError(
            f"Horovod's allgather_coalesced: output lists should be equal to world size, got {len(output_lists)} lists "
            f"on {group.size()} ranks. Pass one list of outputs for each rank."
        )
    for outputs in output_lists:
        if len(outputs) != len(inputs):
            raise CollectiveArgumentError(
                f"Horovod's allgather_coalesced got an invalid output size: {len(outputs)} tensors in a list, expected "
                f"{len(inputs)}. Pass one output for each input in every list."
            )
        for index, (output, expected) in enumerate(zip(outputs, inputs, strict=True)):
            if output.shape != expected.shape:
                raise CollectiveArgumentError(
                    f"Horovod's allgather_coalesced got an invalid size of output tensor at index {index}: "
                    f"{tuple(output.shape)}, expected {tuple(expected.shape)}. Pass outputs of the same shape."
                )
            if output.dtype != expected.dtype or output.layout != expected.layout:
                raise CollectiveArgumentError(
                    f"Horovod's allgather_coalesced got an invalid tensor type at index {index}: {output.dtype}, "
                    f"{output.layout}, expected {expected.dtype}, {expected.layout}. Pass outputs like the inputs."
                )
    return output_lists, inputs, _create_options(_AllgatherOptions, opts)


def gather(
    group: Any,
    output_tensors: Any = None,
    input_tensors: Any = None,
    opts: Any = None,
    timeout: Any = None,
    *,
    input_tensor: Any = None,
    root: Any = None,
) -> Arguments:
    """Convert and validate the arguments of `gather`."""
    outputs, inputs = _as_nested(output_tensors), _as_list(input_tensors if input_tensor is None else input_tensor)
    opts = _create_options(dist.GatherOptions, opts, timeout, rootRank=opts if isinstance(opts, int) else root)
    _check_root("gather", group, opts.rootRank)
    _check_single("gather", "input tensor list", inputs)
    if _is_root_with_valid_list("gather", "output", group, opts.rootRank, outputs):
        _check_parts("gather", "output", group, outputs[0], inputs[0])
    return outputs, inputs, opts


def scatter(
    group: Any,
    output_tensors: Any = None,
    input_tensors: Any = None,
    opts: Any = None,
    timeout: Any = None,
    *,
    output_tensor: Any = None,
    root: Any = None,
) -> Arguments:
    """Convert and validate the arguments of `scatter`."""
    outputs, inputs = _as_list(output_tensors if output_tensor is None else output_tensor), _as_nested(input_tensors)
    opts = _create_options(dist.ScatterOptions, opts, timeout, rootRank=opts if isinstance(opts, int) else root)
    _check_root("scatter", group, opts.rootRank)
    _check_single("scatter", "output tensor list", outputs)
    if _is_root_with_valid_list("scatter", "input", group, opts.rootRank, inputs):
        _check_parts("scatter", "input", group, inputs[0], outputs[0])
    return outputs, inputs, opts


def reduce_scatter(
    group: Any,
    output_tensors: Any = None,
    input_tensors: Any = None,
    opts: Any = None,
    timeout: Any = None,
    *,
    input_tensor: Any = None,
    op: Any = None,
) -> Arguments:
    """Convert and validate the arguments of `reduce_scatter`."""
    outputs, inputs = _as_list(output_tensors), _as_nested(input_tensors if input_tensor is None else input_tensor)
    opts = _create_options(
        dist.ReduceScatterOptions, opts, timeout, reduceOp=opts if isinstance(opts, _REDUCE_OPS) else op
    )
    _check_single("reduce_scatter", "output tensor list", outputs)
    _check_single("reduce_scatter", "input list", inputs)
    _check_parts("reduce_scatter", "input", group, inputs[0], outputs[0], checks_shape=False)
    return outputs, inputs, opts


def all_gather_single(group: Any, output: Any, input: Any, opts: Any = None, timeout: Any = None) -> Arguments:
    """Convert the arguments of `all_gather_single`."""
    return output, input, _create_options(_AllgatherOptions, opts, timeout)


def reduce_scatter_single(group: Any, outputTensor: Any, inputTensor: Any, opts: Any = None) -> Arguments:  # noqa: N803 (torch's names)
    """Convert the arguments of `reduce_scatter_single`."""
    return outputTensor, inputTensor, _create_options(dist.ReduceScatterOptions, opts)


def all_to_all_single(
    group: Any,
    output: Any = None,
    input: Any = None,
    output_split_sizes: Sequence[int] = (),
    input_split_sizes: Sequence[int] = (),
    opts: Any = None,
    timeout: Any = None,
    *,
    output_tensor: Any = None,
    input_tensor: Any = None,
) -> Arguments:
    """Convert the arguments of `all_to_all_single`."""
    output, input = output if output_tensor is None else output_tensor, input if input_tensor is None else input_tensor
    return output, input, output_split_sizes, input_split_sizes, _create_options(dist.AllToAllOptions, opts, timeout)


def alltoall(
    group: Any, output_tensors: Any = None, input_tensors: Any = None, opts: Any = None, timeout: Any = None
) -> Arguments:
    """Convert and validate the arguments of `alltoall`: lists with one tensor per rank."""
    outputs, inputs = _as_list(output_tensors), _as_list(input_tensors)
    for direction, tensors in (("input", inputs), ("output", outputs)):
        if len(tensors) != group.size():
            raise CollectiveArgumentError(
                f"Horovod's all_to_all got a list of {len(tensors)} {direction} tensors on {group.size()} ranks. Pass "
                f"one {direction} tensor for each rank."
            )
    for tensor in (*inputs, *outputs):
        _check_metadata("all_to_all", tensor, inputs[0], checks_shape=False)
    return outputs, inputs, _create_options(dist.AllToAllOptions, opts, timeout)


def check_alltoall_output(output: Tensor, source: Tensor, *, has_splits: bool) -> None:
    """Raise CollectiveArgumentError unless `output` has the layout and dtype of `source`, the input of this rank, and,
    with splits, rows of the same size or, without splits, the same number of elements."""
    _check_metadata("all_to_all_single", output, source, checks_shape=False)
    fits = output.shape[1:].numel() == source.shape[1:].numel() if has_splits else output.numel() == source.numel()
    if not fits:
        raise CollectiveArgumentError(
            f"Horovod's all_to_all_single got an output of shape {tuple(output.shape)} for an input of shape "
            f"{tuple(source.shape)}. Pass an output "
            + ("with rows of the same size." if has_splits else "with the same number of elements.")
        )


def barrier(group: Any, opts: Any = None, timeout: Any = None) -> Arguments:
    """Convert the arguments of `barrier`."""
    return (_create_options(dist.BarrierOptions, opts, timeout),)


def _create_options(options_class: Any, given: Any, timeout: Any = None, **fields: Any) -> Any:
    """Return `given` if it is an options object, otherwise new options with the `fields` that are not None and the
    timeout, which may also be passed as `given`."""
    if isinstance(given, options_class):
        return given
    options = options_class()
    for name, value in {**fields, "timeout": given if isinstance(given, timedelta) else timeout}.items():
        if value is not None:
            setattr(options, name, value)
    return options


def _as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _as_nested(tensors: Any) -> list[list[Tensor]]:
    """Return `tensors` as a list of lists. A list of tensors becomes the only element of the returned list."""
    return [tensors] if tensors and isinstance(tensors[0], Tensor) else tensors


def _check_root(operation: str, group: Any, root: int) -> None:
    if not 0 <= root < group.size():
        raise CollectiveArgumentError(
            f"Horovod's {operation} got an invalid root rank: {root}, in a group of {group.size()} ranks. "
            f"Use a rank from 0 to {group.size() - 1}."
        )


def check_peer(operation: str, group: Any, rank: int) -> None:
    """Raise CollectiveArgumentError unless `rank` is another rank of `group`. Without this check, Gloo would crash."""
    if not 0 <= rank < group.size() or rank == group.rank():
        raise CollectiveArgumentError(
            f"Horovod's {operation} got an invalid rank: {rank}, on rank {group.rank()} of a group of {group.size()} "
            "ranks. Use another rank of the group."
        )


def _check_not_empty(operation: str, tensors: Sequence[Any], list_name: str = "tensor list") -> None:
    if not tensors:
        raise CollectiveArgumentError(
            f"Horovod's {operation} requires non-empty {list_name}, got an empty one. Pass at least one tensor."
        )


def _check_single(operation: str, list_name: str, tensors: Sequence[Any]) -> None:
    if len(tensors) != 1:
        raise CollectiveArgumentError(
            f"Horovod's {operation} requires a single-element {list_name}, got {len(tensors)} elements. "
            "Call it once for each element."
        )


def _check_same_metadata(operation: str, tensors: Sequence[Tensor]) -> None:
    """Raise CollectiveArgumentError unless all tensors of this rank have the same layout, dtype and shape."""
    _check_not_empty(operation, tensors)
    for tensor in tensors[1:]:
        _check_metadata(operation, tensor, tensors[0])


def _check_metadata(operation: str, tensor: Tensor, expected: Tensor, checks_shape: bool = True) -> None:
    """Raise CollectiveArgumentError unless `tensor` has the layout and dtype of `expected` and, if `checks_shape`, also
    its shape."""
    for term, attribute, actual_value, expected_value in (
        ("layout", "layout", tensor.layout, expected.layout),
        ("type", "dtype", tensor.dtype, expected.dtype),
        ("size", "shape", tuple(tensor.shape), tuple(expected.shape)),
    ):
        if actual_value != expected_value and (checks_shape or term != "size"):
            raise CollectiveArgumentError(
                f"Horovod's {operation} got an invalid tensor {term}: {actual_value}, expected {expected_value}. "
                f"Pass tensors with the same {attribute}."
            )


def _is_root_with_valid_list(operation: str, direction: str, group: Any, root: int, lists: Sequence[Any]) -> bool:
    """Return whether this rank is the root. Raise CollectiveArgumentError if the root does not pass exactly one list,
    or if another rank passes a list that is not empty."""
    if group.rank() == root:
        _check_single(operation, f"{direction} list", lists)
        return True
    if lists and any(lists):
        raise CollectiveArgumentError(
            f"Horovod's {operation} requires empty {direction} on non-root ranks, got {len(lists)} lists on rank "
            f"{group.rank()} with root {root}. Pass an empty list on this rank."
        )
    return False


def _check_parts(
    operation: str,
    direction: str,
    group: Any,
    parts: Sequence[Tensor],
    expected: Tensor,
    checks_shape: bool = True,
) -> None:
    """Raise CollectiveArgumentError unless `parts` has one tensor per rank, each with the layout and dtype of
    `expected` and, if `checks_shape`, also with its shape."""
    size = group.size()
    if len(parts) != size:
        raise CollectiveArgumentError(
            f"Horovod's {operation}: Incorrect {direction} list size {len(parts)}. {direction.capitalize()} list size "
            f"should be {size}, same as size of the process group. Pass one tensor per rank."
        )
    for part in parts:
        _check_metadata(operation, part, expected, checks_shape)
