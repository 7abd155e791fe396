"""The `.grad` of a parameter with a sharded gradient (ZeRO-2): a tensor whose elements are divided among the ranks.

A gradient has the shape of its parameter, so that clipping and loss scaling are plain torch code:
`nn.utils.clip_grad_norm_`, `nn.utils.clip_grad_value_`, `GradScaler` and `zero_grad` produce the same results as with
complete gradients. Norms and some in-place operations with numbers, such as `mul_`, are also supported. All other
torch operations raise ModelError, because they would use only this rank's shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from unitrain.backends.base import Communicator
from unitrain.backends.sharding.partition import flat_view
from unitrain.backends.tensors import HALF_DTYPES
from unitrain.errors import ModelError
from unitrain.torch_compat import foreach_norm, make_wrapper_tensor, without_torch_function


class ShardedGradient(Tensor):
    """The mean gradient of a parameter. This rank stores the elements [start, stop) in storage order, in `local`.

    `local` is 1-D, and empty on ranks that own no shard. Autograd adds the gradients of this rank's backward passes to
    `unreduced`. The next reduction computes their mean over ranks, adds this rank's elements to `local`, and sets
    `unreduced` to None.

    Norms are computed for the complete gradient, so all ranks must compute them. One allreduce computes the norms of
    all gradients of a model. `full_tensor()` returns the complete gradient. If there is an unreduced gradient, all
    operations except zeroing, `detach` and accumulation by autograd raise ModelError.
    """

    local: Tensor
    start: int
    stop: int
    unreduced: Tensor | None
    is_zero: bool
    _group: GradientGroup
    _norms: dict[float, Tensor]

    __torch_function__ = without_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: Tensor, group: GradientGroup) -> ShardedGradient:
        gradient: ShardedGradient = make_wrapper_tensor(cls, parameter)
        gradient._group = group
        gradient.local = parameter.new_empty(0)
        gradient.start = gradient.stop = 0
        gradient.unreduced = None
        gradient.is_zero = True
        gradient._norms = {}
        return gradient

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = function.overloadpacket.__name__
        handler = _HANDLERS.get(name)
        if handler is None:
            if name.rstrip("_") not in _ELEMENTWISE or not name.endswith("_"):
                _raise_unsupported(name)
            handler = _update_elements
        return handler(function, args, kwargs or {})

    def full_tensor(self) -> Tensor:
        """Return the complete gradient as a new tensor. All ranks must call this method.

        It takes the memory of the complete gradient on every rank, so use it only to log individual parameters.
        """
        self.check_reduced("full_tensor")
        local = torch.view_as_real(self.local).view(-1) if self.is_complex() else self.local
        complete = self._group.communicator.allgather(local)
        if self.is_complex():
            complete = torch.view_as_complex(complete.view(-1, 2))
        starts = self._group.communicator.allgather_object((self.start, self.stop))
        parts = complete.split([stop - start for start, stop in starts])
        ordered = [part for _, part in sorted(zip(starts, parts, strict=True), key=lambda pair: pair[0])]
        result = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
        flat_view(result).copy_(torch.cat(ordered))
        return result

    def clear_cached_norms(self) -> None:
        """Discard the cached norms after a change of `local`."""
        if self._norms:
            self._norms = {}

    def check_reduced(self, operation: str) -> None:
        """Raise ModelError if backward passes have added gradients that are not reduced over ranks yet."""
        if self.unreduced is not None:
            raise ModelError(
                f"{operation} was called on a gradient that is not reduced over ranks. Before clipping, unscaling or "
                "reading gradients, run the last backward pass through the model that backend.distributed_model "
                "returned, outside backend.no_sync."
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={list(self.shape)}, dtype={self.dtype}, elements={self.start}:{self.stop})"

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _raise_unsupported("pickle")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _raise_unsupported("deepcopy")


class GradientGroup:
    """The sharded gradients of one model, whose norms are computed together."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.gradients: list[ShardedGradient] = []

    def norm(self, gradient: ShardedGradient, order: float) -> Tensor:
        """Return the norm of the complete `gradient`, a 0-dim tensor. All ranks must call this method for the same
        gradient and order."""
        gradient.check_reduced("norm")
        if order not in gradient._norms:
            # Compute the norms of all gradients, including cached ones. The norm of an unused gradient, such as that of
            # a frozen parameter, may be cached on some ranks only, so an allreduce of only the missing norms could
            # differ between ranks.
            self._compute_norms(self.gradients, order)
        return gradient._norms[order]

    def _compute_norms(self, gradients: Sequence[ShardedGradient], order: float) -> None:
        """Cache the norms of the complete `gradients` that are reduced. All ranks must call this method with the same
        gradients."""
        if not order > 0:
            raise ModelError(
                f"A norm of order {order:g} was requested for a gradient that is sharded over ranks. Use a norm of "
                "positive order: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=2.0)."
            )
        device = self.communicator.device
        powers = torch.zeros(len(gradients), dtype=torch.float64, device=device)
        stored = [(index, gradient.local) for index, gradient in enumerate(gradients) if gradient.local.numel()]
        if stored:
            norms = foreach_norm([_upcast_half(local) for _, local in stored], order)
            values = torch.stack([norm.double() for norm in norms])
            if not math.isinf(order):
                values = values.pow(order)
            powers[torch.tensor([index for index, _ in stored], device=device)] = values
        total = self.communicator.allreduce(powers, "max" if math.isinf(order) else "sum")
        if not math.isinf(order):
            total = total.pow(1 / order)
        for gradient, value in zip(gradients, total.unbind(), strict=True):
            if gradient.unreduced is None:
                gradient._norms[order] = value.to(gradient.dtype.to_real())


def _raise_unsupported(name: str) -> NoReturn:
    raise ModelError(
        f'{name} was called on a gradient that is sharded over ranks (shard="gradients"). Supported: '
        "torch.nn.utils.clip_grad_norm_, clip_grad_value_, GradScaler, norms, in-place multiplication and division by "
        "a number, and zero_grad. Pass the optimizer to backend.distributed_optimizer(optimizer, model, "
        'shard="gradients"), or use the complete gradient: parameter.grad.full_tensor(), called on every rank.'
    )


def _upcast_half(local: Tensor) -> Tensor:
    return local.float() if local.dtype in HALF_DTYPES else local


# In-place operations whose other arguments are numbers. Each rank applies them to its shard.
_ELEMENTWISE = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "_foreach_")
    for name in ("mul", "div", "neg", "clamp", "clamp_min", "clamp_max", "zero", "nan_to_num")
)  # fmt: skip


def _local_of(value: Any) -> Any:
    if isinstance(value, ShardedGradient):
        return value.local
    return [_local_of(item) for item in value] if isinstance(value, list | tuple) else value


def _update_elements(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an in-place operation to the shards of this rank."""
    targets = args[0] if isinstance(args[0], list | tuple) else [args[0]]
    name = function.overloadpacket.__name__
    for value in (*args[1:], *kwargs.values()):
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, ShardedGradient) or (isinstance(item, Tensor) and item.dim() > 0):
                _raise_unsupported(name)
    gradients = [gradient for gradient in targets if isinstance(gradient, ShardedGradient)]
    is_zeroed = name.endswith("zero_")
    for gradient in gradients:
        if not is_zeroed:
            gradient.check_reduced(name)
        gradient.clear_cached_norms()
    function(_local_of(args[0]), *args[1:], **kwargs)
    if is_zeroed:
        for gradient in gradients:
            gradient.unreduced, gradient.is_zero = None, True
    return None if name.startswith("_foreach_") else args[0]


def _add(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Add the gradient that a backward pass computed on this rank. The next reduction sends it to the owners."""
    gradient, addend = args[:2]
    is_accumulation = (
        isinstance(gradient, ShardedGradient)
        and isinstance(addend, Tensor)
        and not isinstance(addend, ShardedGradient)
        and addend.shape == gradient.shape
        and addend.dtype == gradient.dtype
        and not kwargs
        and len(args) == 2
    )
    if not is_accumulation:
        _raise_unsupported("add_")
    # Autograd may use `addend` elsewhere, so it is not changed.
    gradient.unreduced = addend.detach() if gradient.unreduced is None else gradient.unreduced + addend
    gradient.is_zero = False
    return gradient  # type: ignore[no-any-return]


def _vector_norm(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    gradient, order = args[0], args[1] if len(args) > 1 else 2
    if len(args) > 2 or kwargs:
        _raise_unsupported("linalg.vector_norm with dim, keepdim or dtype")
    return gradient._group.norm(gradient, float(order))  # type: ignore[no-any-return]


def _foreach_norm(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    if len(args) > 2 or kwargs.keys() - {"ord"}:
        _raise_unsupported("_foreach_norm with dtype")
    return [
        gradient._group.norm(gradient, float(order))
        if isinstance(gradient, ShardedGradient)
        else function([gradient], order)[0]
        for gradient in args[0]
    ]


def _unscale(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale the gradients for GradScaler: multiply them by a number, and find inf and nan on any rank."""
    gradients, found_inf, factor = args
    sharded = [gradient for gradient in gradients if isinstance(gradient, ShardedGradient)]
    for gradient in sharded:
        gradient.check_reduced("GradScaler.unscale_")
        gradient.clear_cached_norms()
    stored = [local for local in _local_of(gradients) if local.numel()]
    if stored:
        function(stored, found_inf, factor)
    if sharded:
        found_inf.copy_(sharded[0]._group.communicator.allreduce(found_inf, "max"))


_HANDLERS: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    "detach": lambda function, args, kwargs: args[0],
    "add_": _add,
    "linalg_vector_norm": _vector_norm,
    "_foreach_norm": _foreach_norm,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
