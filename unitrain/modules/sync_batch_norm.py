"""BatchNorm with the mean and variance over the samples of all ranks, on CPUs and GPUs and on every backend.

Sergey Ioffe and Christian Szegedy, Batch Normalization (arXiv 1502.03167), applied to the micro-batches of all ranks.
Each layer calls one allreduce in the forward pass and one in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.lazy import LazyModuleMixin

from unitrain.backends.base import Communicator
from unitrain.backends.logical_ranks import TRAINER_REQUIRED_MESSAGE
from unitrain.errors import CollectiveMismatchError, ModelError
from unitrain.modules.buffers import check_model_and_communicator
from unitrain.modules.run_time_classes import ReplacedForward, create_replacing_class
from unitrain.torch_compat import BatchNormBase, buffers_by_name, disable_compile

_HALF_DTYPES = (torch.float16, torch.bfloat16)
# CPU tensors with at most this many elements are converted to float64, which takes fewer operations.
_MAX_SMALL_ELEMENTS = 1 << 15


def sync_batch_norm(model: nn.Module, communicator: Communicator) -> nn.Module:
    """Synchronize every BatchNorm layer of `model` over all ranks, in place, and return `model`.

    The layers remain the same objects, with the same parameters, buffers, hooks and `state_dict` keys, so optimizers
    and checkpoints remain valid, including checkpoints of the model without synchronization. In training mode, all
    ranks must call the layers in the same order, with any number of samples. With gradient accumulation, each
    micro-batch has its own statistics. Eval mode and single-rank runs do not communicate.

    Call it on every rank, for several models in the same order, before training. Layers that are already synchronized
    do not change. Raises ConfigError for invalid arguments, and ModelError for a layer that overrides `forward`, for a
    lazy layer before its first forward pass, and for a layer with a process group.
    """
    check_model_and_communicator("sync_batch_norm", model, communicator)
    layers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and not isinstance(module, SyncedForward)
    }
    for name, layer in layers.items():
        _check_layer(name or "the model itself", layer)
    names_by_number = {next(communicator.layer_numbers): name for name in layers}  # unique among all models
    statistics = SharedStatistics(communicator, names_by_number)
    for layer_number, layer in zip(names_by_number, layers.values(), strict=True):
        # Replace torch's SyncBatchNorm, because its forward depends on torch.distributed.
        plain_class: Any = BatchNorm if isinstance(layer, nn.SyncBatchNorm) else type(layer)
        layer.__class__ = create_replacing_class(SyncedForward, plain_class)
        layer.shared_statistics, layer.layer_number = statistics, layer_number
    if layers:
        model.register_forward_pre_hook(statistics.begin_forward, with_kwargs=True)
        model.register_forward_hook(statistics.end_forward, always_call=True)
    return model


@contextmanager
def exclude_from_statistics(model: nn.Module) -> Iterator[None]:
    """Context manager that excludes this rank's samples from the statistics of `model`, in the forward and backward
    pass.

    A rank without samples uses it for its dummy batch. Buffers that the forward pass writes, such as the buffers of a
    BatchNorm without synchronization, are restored at the end.
    """
    shared = {module.shared_statistics for module in model.modules() if isinstance(module, SyncedForward)}
    # The buffers of synchronized layers are not restored, because they contain the statistics of the other ranks.
    restored_modules = [
        module
        for module in model.modules()
        if not isinstance(module, SyncedForward) or module.shared_statistics.is_local
    ]
    saved = [
        (buffers_by_name(module), name, buffer, buffer.detach().clone())
        for module in restored_modules
        for name, buffer in buffers_by_name(module).items()
        if buffer is not None
    ]
    for statistics in shared:
        statistics.is_excluded = True
    try:
        yield
    finally:
        for statistics in shared:
            statistics.is_excluded = False
        # Restore after the backward pass, which may need the written values.
        for buffers, name, buffer, value in saved:
            buffers[name] = buffer
            if not torch.equal(buffer, value):  # a write of equal values would also increment the version counter
                buffer.detach().copy_(value)


@dataclass(frozen=True)
class Source:
    """The samples of a forward pass: those of `rank`, one of `size` ranks or, with `is_logical`, logical ranks.

    If it is unknown to which batch the inputs belong, `error` states the reason.
    """

    includes_samples: bool
    rank: int
    size: int
    is_logical: bool = False
    error: ModelError | None = None


class SharedStatistics:
    """State shared by all synchronized layers of a model: the communicator, and whether local samples are excluded.

    Local samples are excluded by `exclude_from_statistics`, and if the inputs of the model are a dummy batch.
    Copies of the model also share it. An unpickled model has no communicator and normalizes over local samples.
    """

    def __init__(self, communicator: Communicator | None, names_by_number: dict[int, str]) -> None:
        self.communicator, self.names_by_number = communicator, names_by_number
        self.is_excluded = False  # whether `exclude_from_statistics` excludes this rank's samples
        # Set by the model while its logical ranks take turns.
        self.sum_over_logical_ranks: Callable[[Tensor], Tensor] | None = None
        self._inputs: list[Any] = []  # the arguments of each forward pass of the model that is in progress
        self._cached_layer_numbers: dict[tuple[int, torch.device], Tensor] = {}
        # The latest count of each layer, and its cached tensor.
        self._cached_counts_and_layer_numbers: dict[int, tuple[float, Tensor]] = {}

    @property
    def is_local(self) -> bool:
        """Whether statistics are local, because there is a single rank or no communicator."""
        if self.communicator is None:
            return True
        logical_ranks = [batch.logical_rank for batch in self.communicator.current_batches.entered]
        if logical_ranks and logical_ranks[0] is not None:
            return logical_ranks[0].count == 1
        return self.communicator.size == 1

    def sum_over_ranks(self, tensor: Tensor, source: Source) -> Tensor:
        """Return the sum of `tensor` over all ranks or, with logical ranks, over all logical ranks, which must all call
        it."""
        assert self.communicator is not None
        if not source.is_logical:
            return self.communicator.allreduce(tensor, "sum")
        if self.sum_over_logical_ranks is None:
            raise ModelError(
                "A layer that sync_batch_norm has synchronized was called with logical_ranks outside of the Trainer. "
                f"{TRAINER_REQUIRED_MESSAGE}"
            )
        return self.sum_over_logical_ranks(tensor)

    @disable_compile
    def begin_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the model: store its inputs, which identify the current batch."""
        self._inputs.append((args, kwargs))

    @disable_compile
    def end_forward(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the model, which also runs after an exception."""
        if self._inputs:
            self._inputs.pop()

    def find_source(self) -> Source:
        """Return the samples of the forward pass that is in progress. Does not raise, because the other ranks wait in
        this forward pass; `reduce` raises the error on all ranks."""
        assert self.communicator is not None
        try:
            current = self.communicator.current_batches.find(self._inputs[-1] if self._inputs else None)
        except ModelError as error:
            return Source(False, self.communicator.rank, self.communicator.size, error=error)
        includes_samples = not (self.is_excluded or (current is not None and current.is_dummy))
        if current is None or current.logical_rank is None:
            return Source(includes_samples, self.communicator.rank, self.communicator.size)
        return Source(includes_samples, current.logical_rank.index, current.logical_rank.count, is_logical=True)

    def reduce(
        self, source: Source, sums: list[Tensor], count: int, layer_number: int, *, is_centered: bool, check: bool
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        """Return the mean and variance, float64 [channels], and the number of values per channel, over all ranks.

        `sums` are the results of `_local_sums` for `count` values per channel of `source` in layer `layer_number`. The
        number of values is a float on CPUs, and a tensor on GPUs. Raises CollectiveMismatchError on every rank if ranks
        call different layers, and ModelError if there are fewer than two values per channel, or if the source is
        unknown on some ranks. On GPUs, these errors are only detected with `check`, which synchronizes with the device.
        """
        if not source.includes_samples:
            # The sums are replaced instead of multiplied by 0, because 0 * nan is nan.
            sums, count = [torch.zeros_like(tensor) for tensor in sums], 0
        num_local_values = math.nan if source.error is not None else count
        # If ranks called different layers of the same width, their statistics would be mixed without an error. The
        # layer numbers of all ranks are equal if and only if the mean of their squares is the square of their mean.
        channels, is_on_cpu = len(sums[0]), sums[0].device.type == "cpu"
        if is_on_cpu:
            constants = [self._count_and_layer_number_on_cpu(num_local_values, layer_number)]
        else:
            constants = [
                sums[0].new_full((1,), num_local_values),
                self._layer_number_on_device(layer_number, sums[0].device),
            ]
        local = torch.cat([*sums, *constants])
        rows: Tensor | None = None
        if is_centered:
            rows = local.new_zeros(source.size, len(local))
            rows[source.rank] = local
            rows = self.sum_over_ranks(rows, source)  # an allgather, because all other ranks add 0
            total = rows.sum(0)
        else:
            total = self.sum_over_ranks(local, source)
        if source.error is not None:
            raise source.error
        tail = total[2 * channels :]
        num_values: Tensor | float
        if is_on_cpu:
            numbers = tail.tolist()
            num_values = float(numbers[0])
            self._check_layer_and_count(source.size, layer_number, *numbers)
        else:  # a tensor, because a GPU divides by a float less accurately, by multiplying by the reciprocal
            num_values = tail[0]
            if check:
                self._check_layer_and_count(source.size, layer_number, *tail.tolist())
        mean, second_moment = (total[: 2 * channels] / num_values).view(2, channels).unbind()
        if rows is None:
            return mean, (second_moment - mean.square()).clamp_min_(0), num_values
        counts = rows[:, 2 * channels, None]
        differences = rows[:, :channels] / counts.clamp_min(1) - mean  # between the means of each rank and of all ranks
        return mean, second_moment + (differences.square() * counts).sum(0) / num_values, num_values

    def sum_gradients(self, source: Source, sums: Tensor, layer_number: int) -> Tensor:
        """Return the sum over all ranks of `sums`, float64 [elements], in the backward pass of layer `layer_number`.
        Raises CollectiveMismatchError on every rank if ranks run the backward passes of different layers, which is only
        detected on CPUs."""
        if sums.device.type != "cpu":
            return self.sum_over_ranks(sums, source)
        identity = self._layer_number_on_device(layer_number, sums.device)
        total = self.sum_over_ranks(torch.cat([sums, identity]), source)
        self._check_layer(source.size, layer_number, *total[-2:].tolist())
        return total[:-2]

    def _count_and_layer_number_on_cpu(self, count: float, layer_number: int) -> Tensor:
        """Return the count, the layer number and its square, float64 [3]. The latest result per layer is cached."""
        cached = self._cached_counts_and_layer_numbers.get(layer_number)
        if cached is None or cached[0] != count:
            cached = count, torch.tensor([count, layer_number, layer_number**2], dtype=torch.float64, device="cpu")
            self._cached_counts_and_layer_numbers[layer_number] = cached
        return cached[1]

    def _layer_number_on_device(self, layer_number: int, device: torch.device) -> Tensor:
        """Return a layer number and its square, float64 [2], cached because a copy would wait for queued kernels."""
        if (cached := self._cached_layer_numbers.get((layer_number, device))) is None:
            cached = torch.tensor([layer_number, layer_number**2], dtype=torch.float64, device=device)
            self._cached_layer_numbers[layer_number, device] = cached
        return cached

    def _check_layer_and_count(
        self, size: int, layer_number: int, num_values: float, layer_number_sum: float, layer_number_square_sum: float
    ) -> None:
        name = self.names_by_number[layer_number]
        if math.isnan(num_values):
            raise ModelError(
                f"Another rank could not determine which samples count in BatchNorm {name!r}. Its error states the "
                "cause."
            )
        self._check_layer(size, layer_number, layer_number_sum, layer_number_square_sum)
        if num_values < 2:
            raise ModelError(
                f"BatchNorm {name!r} got {num_values:g} values per channel over all ranks, but a variance needs two. "
                "Use a larger batch, or model.eval() to normalize by the running statistics."
            )

    def _check_layer(
        self, size: int, layer_number: int, layer_number_sum: float, layer_number_square_sum: float
    ) -> None:
        if layer_number_square_sum * size != layer_number_sum**2:
            raise CollectiveMismatchError(
                f"This rank calls BatchNorm {self.names_by_number[layer_number]!r} while another rank calls another "
                "layer, of this model or of another model, so their statistics would be mixed. Let every rank call the "
                "same layers in the same order, or leave sync_batch_norm out."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedStatistics:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedStatistics, (None, self.names_by_number)


class BatchNorm(BatchNormBase):
    """BatchNorm for inputs with two or more dimensions, as a replacement of torch's SyncBatchNorm."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ModelError(
                f"BatchNorm takes [samples, channels, ...], got shape {list(input.shape)}. "
                "Add a dimension of samples: x[None]."
            )


class SyncedForward(ReplacedForward):
    """The synchronized forward. `sync_batch_norm` sets a layer's class to a subclass of this class and of the layer's
    original class.
    """

    class_name_prefix = "Synced"
    shared_statistics: SharedStatistics
    layer_number: int
    # The forward pass in training mode does not read the layer's buffers; see `backends.gradients.forward_buffers`.
    keeps_statistics = True
    _was_checked = False

    def forward(self: Any, input: Tensor) -> Tensor:
        """Normalize `input`, [samples, channels, ...]. In training mode, normalizes over all ranks, which must all call
        it.
        """
        if not self.training or self.shared_statistics.is_local:
            output: Tensor = BatchNormBase.forward(self, input)
            return output
        self._check_input_dim(input)
        return _normalize_over_ranks(self, input)


def _check_layer(name: str, layer: BatchNormBase) -> None:
    layer_class = type(layer)
    if isinstance(layer, LazyModuleMixin):
        raise ModelError(
            f"{name} is of class {layer_class.__name__}, which has no channels before its first forward. "
            "Call the model once, model(inputs), before sync_batch_norm."
        )
    if layer_class.forward not in (BatchNormBase.forward, nn.SyncBatchNorm.forward):
        raise ModelError(
            f"{name} is of class {layer_class.__name__}, which overrides forward, so sync_batch_norm cannot "
            "synchronize it. Build the model with BatchNorm1d, 2d or 3d there, or leave sync_batch_norm out."
        )
    if getattr(layer, "process_group", None) is not None:
        raise ModelError(
            f"{name} is a SyncBatchNorm with a process_group, but sync_batch_norm uses all ranks. "
            "Leave process_group out, or leave sync_batch_norm out."
        )


@disable_compile  # graph break: collectives cannot be compiled
def _normalize_over_ranks(layer: Any, x: Tensor) -> Tensor:
    shared: SharedStatistics = layer.shared_statistics
    source = shared.find_source()
    with torch.no_grad():
        # The mean of the squares minus the square of the mean loses the digits that both have in common. In float64,
        # enough digits remain for inputs of lower precision, but not for float64 inputs. Their squares are those of the
        # differences from the mean of each rank, at the cost of one row per rank in the allreduce.
        is_centered = x.dtype == torch.float64
        sums, count = _local_sums(x, is_centered=is_centered)
        # On a GPU, the check waits for all queued kernels, so it runs only in the first forward pass and for tiny
        # batches.
        check = x.device.type == "cpu" or count < 2 or not layer._was_checked
        layer._was_checked = True
        mean, variance, num_values = shared.reduce(
            source, sums, count, layer.layer_number, is_centered=is_centered, check=check
        )
        if layer.track_running_stats:
            _update_running_statistics(layer, mean, variance, num_values)
        dtype = _computation_dtype(x)
        mean, variance = mean.to(dtype), variance.to(dtype)
    output: Tensor = _Normalize.apply(
        x, layer.weight, layer.bias, mean, variance, num_values, layer.eps, shared, source, layer.layer_number
    )
    return output


def _local_sums(x: Tensor, *, is_centered: bool) -> tuple[list[Tensor], int]:
    """Return the sums of values and squares, float64 [channels] each, and the number of values per channel.

    With `is_centered`, the squares are those of the differences from the mean of `x`.
    """
    dims = [dim for dim in range(x.dim()) if dim != 1]
    count = x.numel() // x.shape[1]
    if not count:
        return list(x.new_zeros(2, x.shape[1], dtype=torch.float64)), 0
    if x.device.type == "cpu" and x.numel() <= _MAX_SMALL_ELEMENTS and not is_centered:  # fewer operations
        wide = x.double()
        return [wide.sum(dims), wide.square().sum(dims)], count
    # Differences from the mean are exact near the mean, so only the sums need float64. For large inputs this is five
    # times faster than computing everything in float64, with the same accuracy.
    mean = x.mean(dims, dtype=torch.float64)
    rounded_mean = mean.to(_computation_dtype(x))
    squares = (x - _broadcastable(rounded_mean, x)).square_().sum(dims, dtype=torch.float64)
    squares -= count * (mean - rounded_mean).square()
    return [mean * count, squares if is_centered else squares + mean.square() * count], count


def _update_running_statistics(layer: Any, mean: Tensor, variance: Tensor, num_values: Tensor | float) -> None:
    """Update the running statistics, as BatchNorm does, with the statistics of a batch with `num_values` values per
    channel."""
    layer.num_batches_tracked.add_(1)
    # `double()`, because 1.0 / integer tensor is float32. `item()` would synchronize with the device.
    momentum = 1.0 / layer.num_batches_tracked.double() if layer.momentum is None else layer.momentum
    for running, statistic, factor in (
        (layer.running_mean, mean, momentum),
        (layer.running_var, variance, momentum * (num_values / (num_values - 1))),
    ):
        running.mul_(1 - momentum).add_((statistic * factor).to(running.dtype))


class _Normalize(torch.autograd.Function):
    """Normalize with the statistics over all ranks. The gradients of the statistics are summed over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        num_values: Tensor | float,
        eps: float,
        shared: SharedStatistics,
        source: Source,
        layer_number: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.eps, ctx.num_values, ctx.layer_number = eps, num_values, layer_number
        ctx.shared, ctx.source = shared, source
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (weight, bias)]
        weight, bias = (None if tensor is None else tensor.to(mean.dtype) for tensor in (weight, bias))
        # In eval mode, the kernel uses the passed statistics.
        return nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        # The gradient of x with constant statistics, and this rank's sums of gradient * normalized x and of gradient.
        if x.numel():
            kernel = torch.ops.aten.native_batch_norm_backward
            no_statistics = mean.new_empty(0)  # for channels-last inputs, the CUDA kernel rejects None
            dx, dweight, dbias = kernel(
                gradient, x, weight, mean, variance, no_statistics, no_statistics, False, ctx.eps, [True, True, True]
            )
        else:  # the kernel would divide by zero
            dx, dweight, dbias = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        sums = torch.cat([dweight, dbias]).double()
        means = ctx.shared.sum_gradients(ctx.source, sums, ctx.layer_number) / ctx.num_values
        if ctx.source.includes_samples:
            scale = (variance.double() + ctx.eps).rsqrt_()
            slope, offset = means.view(2, -1).mul_(scale * weight).unbind()
            slope, offset = (slope * scale).to(mean.dtype), offset.to(mean.dtype)
            correction = (x - _broadcastable(mean, x)).mul_(_broadcastable(slope, x))
            dx = (dx - correction.add_(_broadcastable(offset, x))).to(x.dtype)
        weight_gradient, bias_gradient = (
            None if dtype is None else gradient_part.to(dtype)
            for gradient_part, dtype in zip((dweight, dbias), ctx.dtypes, strict=True)
        )
        return dx, weight_gradient, bias_gradient, None, None, None, None, None, None, None


def _computation_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in _HALF_DTYPES else x.dtype


def _broadcastable(channels: Tensor, x: Tensor) -> Tensor:
    """Return `channels`, [channels], as a view that broadcasts over `x`."""
    return channels if x.dim() == 2 else channels.view(1, -1, *[1] * (x.dim() - 2))
