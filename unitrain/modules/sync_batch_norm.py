"""BatchNorm with the mean and variance of all ranks' samples, on CPUs and GPUs and on every backend.

Sergey Ioffe and Christian Szegedy, Batch Normalization (arXiv 1502.03167), with the batch of a micro-step over all
ranks. Each layer takes one allreduce in forward and one in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from unitrain.backends.base import Communicator
from unitrain.errors import CollectiveMismatchError, ModelError
from unitrain.modules.buffers import check_model_and_communicator

_HALF = (torch.float16, torch.bfloat16)


def sync_batch_norm(model: nn.Module, communicator: Communicator) -> nn.Module:
    """Let every BatchNorm of `model` normalise over the samples of all ranks, and return that same `model`.

    The layers stay the same objects, with their parameters, buffers, hooks and names in `state_dict`; so optimizers
    and checkpoints stay valid, also those of the model without it. From then on every rank calls the layers in the same
    order while they train, with any number of samples; also each micro-step of an accumulated step has statistics of
    its own. In eval mode nothing is communicated. Call it on every rank, before training; one rank alone computes what
    it did before. Raises ModelError for a layer that has a forward of its own, or a group of some of the ranks.
    """
    check_model_and_communicator("sync_batch_norm", model, communicator)
    layers: dict[str, Any] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncedForward)
    }
    for name, layer in layers.items():
        _check(name or "the model itself", layer)
    statistics = SharedStatistics(communicator, tuple(layers))
    for number, layer in enumerate(layers.values()):
        # What torch's own has to do with the wrapped model is no longer so.
        kind: Any = BatchNorm if isinstance(layer, nn.SyncBatchNorm) else type(layer)
        layer.__class__ = _synced(kind)
        layer.shared_statistics, layer.number = statistics, number
    return model


@contextmanager
def exclude_from_statistics(model: nn.Module) -> Iterator[None]:
    """Inside it, this rank's samples are in no statistics of `model`, neither in forward nor in backward.

    It is for a rank that has no samples and borrows some, because the others wait for its gradients. Buffers that the
    forward writes, such as those of a BatchNorm of this rank alone, have their values again at the end.
    """
    shared = {module.shared_statistics for module in model.modules() if isinstance(module, SyncedForward)}
    # Layers that take part in statistics of all ranks follow those of the other ranks' samples.
    own = [m for m in model.modules() if not (isinstance(m, SyncedForward) and not m.shared_statistics.alone)]
    before = [
        (module._buffers, name, buffer, buffer.detach().clone())
        for module in own
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    for statistics in shared:
        statistics.counts = False
    try:
        yield
    finally:
        for statistics in shared:
            statistics.counts = True
        # After the backward, which may need what the forward has written.
        for buffers, name, buffer, value in before:
            buffers[name] = buffer
            if not torch.equal(buffer, value):  # a copy of a constant would look like a write
                buffer.detach().copy_(value)


class SharedStatistics:
    """What all layers of a model share: who the other ranks are, and whether this rank's samples count.

    Copies of the model share it too; a model that is unpickled is alone, and normalises like any other.
    """

    def __init__(self, communicator: Communicator | None, names: tuple[str, ...]) -> None:
        self.communicator, self.names = communicator, names
        self.counts = True
        self._numbers: dict[tuple[int, torch.device], Tensor] = {}

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.communicator is None or self.communicator.size == 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of `tensor` over ranks. All ranks call it."""
        assert self.communicator is not None
        return self.communicator.allreduce(tensor, "sum")

    def gather(self, mean: Tensor, squares: Tensor, count: int, number: int, *, check: bool) -> tuple[Tensor, ...]:
        """Return mean and variance, float64 [channels], and number, float64 [], of the values that count on all ranks.

        `mean` and `squares`, the sum of squared distances from it, are of this rank's `count` values per channel.
        `check` says that it may wait for the device, to find out that the ranks are in different layers or have fewer
        than two values, which is an error on all of them.
        """
        if not self.counts:
            count = 0
        # Ranks that are in different layers of the same width would mix their statistics unawares: unless the numbers
        # of all are equal, the mean of their squares is more than the square of their mean.
        constants = self._on_device(number, mean.device)
        # 0 * nan is nan, so what does not count is not multiplied by 0.
        own = torch.cat([mean * count, squares + mean.square() * count]) if count else mean.new_zeros(2 * len(mean))
        total = self.sum(torch.cat([own, mean.new_full((1,), count), constants]))
        means, second, (values, numbers, number_squares) = total.tensor_split((len(mean), 2 * len(mean)))
        if check:
            self._check(number, *torch.stack([values, numbers, number_squares]).tolist())
        means = means / values
        return means, (second / values - means.square()).clamp_min(0), values

    def _on_device(self, number: int, device: torch.device) -> Tensor:
        """Return a layer's number and its square, float64 [2]. They are kept, because to copy them to a GPU is to wait
        for all that is queued there."""
        if (kept := self._numbers.get((number, device))) is None:
            kept = self._numbers[number, device] = torch.tensor([number, number**2], dtype=torch.float64, device=device)
        return kept

    def _check(self, number: int, values: float, numbers: float, number_squares: float) -> None:
        assert self.communicator is not None
        name = self.names[number]
        if number_squares * self.communicator.size != numbers**2:
            raise CollectiveMismatchError(
                f"This rank is in BatchNorm {name!r} while others are in another one, so their statistics would be "
                "mixed. Let every rank call the same layers in the same order, or leave sync_batch_norm out."
            )
        if values < 2:
            raise ModelError(
                f"BatchNorm {name!r} got {values:g} values per channel over all ranks, and a variance takes two. "
                "Use a larger batch, or model.eval() to normalise by the running statistics."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedStatistics:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedStatistics, (None, self.names)


class BatchNorm(_BatchNorm):
    """Takes any number of dimensions from two on, as torch's SyncBatchNorm does, which becomes one of these."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ModelError(
                f"BatchNorm takes [samples, channels, ...], got shape {list(input.shape)}. Add the samples: x[None]."
            )


class SyncedForward:
    """The forward that `sync_batch_norm` gives to a layer, by making its class a subclass of this and of its own."""

    shared_statistics: SharedStatistics
    number: int
    plain: type[nn.Module]
    keeps_statistics = True  # its buffers are not read in training mode
    _seen = False

    def forward(self: Any, input: Tensor) -> Tensor:
        """Normalise `input`, [samples, channels, ...]; in training over all ranks, which all call it."""
        if not self.training or self.shared_statistics.alone:
            output: Tensor = _BatchNorm.forward(self, input)
            return output
        self._check_input_dim(input)
        return _normalise_over_ranks(self, input)

    def __reduce_ex__(self: Any, protocol: Any) -> tuple[Any, ...]:
        # The class has been made here, under a name that pickle does not find.
        return _restore, (self.plain,), self.__getstate__()


@functools.cache
def _synced(kind: Any) -> Any:
    return type(f"Synced{kind.__name__}", (SyncedForward, kind), {"plain": kind})


def _restore(kind: Any) -> Any:
    synced = _synced(kind)
    return synced.__new__(synced)


def _check(name: str, layer: _BatchNorm) -> None:
    kind = type(layer)
    if isinstance(layer, LazyModuleMixin):
        raise ModelError(
            f"{name} is a {kind.__name__}, which does not know its channels yet. "
            "Call the model once, model(inputs), before sync_batch_norm."
        )
    if kind.forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise ModelError(
            f"{name} is a {kind.__name__}, which has a forward of its own that statistics of all ranks do not fit "
            "into. Build the model with BatchNorm1d, 2d or 3d there, or leave sync_batch_norm out."
        )
    if getattr(layer, "process_group", None) is not None:
        raise ModelError(
            f"{name} is a SyncBatchNorm with a process_group, and here statistics are those of all ranks. "
            "Leave process_group out, or leave sync_batch_norm out."
        )


@_disable_dynamo  # a compiled model calls the collectives between the parts that are compiled
def _normalise_over_ranks(layer: Any, x: Tensor) -> Tensor:
    shared: SharedStatistics = layer.shared_statistics
    with torch.no_grad():
        mean, squares, count = _moments(x)
        # On a GPU, only where it can matter: it waits for all that is queued.
        check = x.device.type == "cpu" or count < 2 or not layer._seen
        layer._seen = True
        mean, variance, values = shared.gather(mean, squares, count, layer.number, check=check)
        if layer.track_running_stats:
            _follow(layer, mean, variance * (values / (values - 1)))
        dtype = _computed_in(x)
        mean, variance = mean.to(dtype), variance.to(dtype)
    output: Tensor = _Normalise.apply(x, layer.weight, layer.bias, mean, variance, values, layer.eps, shared)
    return output


def _moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return mean and sum of squared distances from it, float64 [channels], and the number of values per channel."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    count = x.numel() // x.shape[1]
    if not count:
        nothing = x.new_zeros(x.shape[1], dtype=torch.float64)
        return nothing, nothing, 0
    # The differences are exact where it matters, near the mean, so only the sums need float64: five times as fast as
    # computing all of it there, and as exact.
    mean = x.mean(dims, dtype=torch.float64)
    near = mean.to(_computed_in(x))
    squares = (x - _spread(near, x)).square_().sum(dims, dtype=torch.float64)
    return mean, squares - count * (mean - near).square(), count


def _follow(layer: Any, mean: Tensor, variance: Tensor) -> None:
    """Move the running statistics towards those of the batch, as BatchNorm does."""
    layer.num_batches_tracked.add_(1)
    # In float64: 1.0 / an integer tensor would be float32. To read the number would wait for the device.
    momentum = 1.0 / layer.num_batches_tracked.double() if layer.momentum is None else layer.momentum
    for running, found in ((layer.running_mean, mean), (layer.running_var, variance)):
        running.mul_(1 - momentum).add_(found.to(running.dtype) * momentum)


class _Normalise(torch.autograd.Function):
    """Normalise by the given statistics, whose gradient in backward is that of all ranks' samples."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        values: Tensor,
        eps: float,
        shared: SharedStatistics,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance, values)
        ctx.eps, ctx.shared, ctx.counts = eps, shared, shared.counts
        ctx.dtypes = [None if one is None else one.dtype for one in (weight, bias)]
        weight, bias = (None if one is None else one.to(mean.dtype) for one in (weight, bias))
        # Kernels of eval mode normalise by what they are given.
        return nn.functional.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, variance, values = ctx.saved_tensors
        weight = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        # Of constant statistics: for x, and the sums over this rank of gradient * normalised x and of gradient.
        if x.numel():
            constant = torch.ops.aten.native_batch_norm_backward
            dx, dweight, dbias = constant(
                gradient, x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
            )
        else:  # a kernel that divides by zero
            dx, dweight, dbias = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        means = ctx.shared.sum(torch.cat([dweight, dbias]).double()) / values
        if ctx.counts:
            slope, offset = means.view(2, -1).unbind()
            scale = (variance.double() + ctx.eps).rsqrt()
            slope, offset = slope * scale * scale * weight, offset * scale * weight
            through = (x - _spread(mean, x)).mul_(_spread(slope.to(mean.dtype), x))
            dx = (dx - through.add_(_spread(offset.to(mean.dtype), x))).to(x.dtype)
        of_weight, of_bias = (
            None if dtype is None else one.to(dtype) for one, dtype in zip((dweight, dbias), ctx.dtypes, strict=True)
        )
        return dx, of_weight, of_bias, None, None, None, None, None


def _computed_in(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in _HALF else x.dtype


def _spread(channels: Tensor, x: Tensor) -> Tensor:
    """Return a view of `channels` that broadcasts over x."""
    return channels.view(1, -1, *[1] * (x.dim() - 2))
