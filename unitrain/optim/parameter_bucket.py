"""Buckets of parameters for `local_sgd` (local SGD and DiLoCo), each synchronized over ranks as one vector.

`backends/local_sgd_config.py` specifies the formulas, and defines the errors that compression causes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from unitrain.backends.local_sgd_config import LocalSGDConfig
from unitrain.backends.tensors import as_real
from unitrain.optim.outer_gradient import OuterMean, PendingMean
from unitrain.optim.outer_groups import OuterGroups

# Maximum number of elements that are reduced together, unless a single parameter has more.
BUCKET_ELEMENTS = 2**23
_HALF_DTYPES = (torch.float16, torch.bfloat16)


class ParameterBucket:
    """Parameters of one dtype that are synchronized together, as a vector in the dtype of the computation: float32 for
    half precision, otherwise the dtype of the parameters.

    `anchor`, [elements], contains the weights after the last synchronization. `momentum`, [elements], is the momentum
    of the outer optimizer. `pending` is the mean of an outer gradient over ranks, while its transfer is in progress.
    `anchor` is None if `settings.averages_weights` is True, `momentum` is None before the first step of the outer
    optimizer and without momentum, and `pending` is None if no transfer is in progress.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Mapping[str, nn.Parameter],
        groups: OuterGroups,
        settings: LocalSGDConfig,
    ) -> None:
        self.names, self._settings = names, settings
        self._parameters = [parameters[name] for name in names]
        self._shapes = [torch.Size(real_shape(parameter)) for parameter in self._parameters]
        self._sizes = [shape.numel() for shape in self._shapes]
        self._parameter_dtype = self._parameters[0].dtype.to_real()
        self._dtype = torch.float32 if self._parameter_dtype in _HALF_DTYPES else self._parameter_dtype
        self.outer_mean = OuterMean(groups, settings.compression, sum(self._sizes))
        self._weight_mean = OuterMean(groups, "none", sum(self._sizes))
        self.pending: PendingMean | None = None
        self.momentum: Tensor | None = None
        self.anchor: Tensor | None = None
        self.start_from_weights()

    def start_from_weights(self) -> None:
        """Set the anchor to the current weights, which are equal on all ranks, unless `settings.averages_weights` is
        True."""
        if not self._settings.averages_weights:
            self.anchor = self._flatten(self._parameters)

    def step(self) -> None:
        """Synchronize the parameters with a step of the outer optimizer. All ranks must call this method."""
        if self.anchor is None:
            self.average_weights()
            return
        self.start_transfer()
        self.merge(own_fraction=0.0)

    def start_transfer(self) -> None:
        """Start to transfer the outer gradient. All ranks must call this method."""
        assert self.anchor is not None
        # With half-precision parameters, the local steps started from the rounded anchor.
        initial_weights = self.anchor.to(self._parameter_dtype).to(self._dtype)
        self.pending = self.outer_mean.start(initial_weights - self._flatten(self._parameters))

    def merge(self, own_fraction: float) -> None:
        """Wait for the mean outer gradient, and update the anchor with a step of the outer optimizer. Merge the anchor
        into the parameters, which contribute `own_fraction` of the result. All ranks must call this method."""
        assert self.anchor is not None
        assert self.pending is not None
        gradient, self.pending = self.pending.finish(), None
        momentum = self._settings.outer_momentum
        if momentum:
            if self.momentum is None:
                self.momentum = gradient.clone()
            else:
                self.momentum.mul_(momentum).add_(gradient)
            gradient.add_(self.momentum, alpha=momentum)
        self.anchor.add_(gradient, alpha=-self._settings.outer_lr)
        if own_fraction:
            self._write(self.anchor.lerp(self._flatten(self._parameters), own_fraction))
        else:
            self._write(self.anchor)

    def swap_weights(self, weights: Tensor | None) -> Tensor:
        """Set the parameters to `weights`, [elements], and return their previous values."""
        assert weights is not None
        previous = self._flatten(self._parameters)
        self._write(weights)
        return previous

    def average_weights(self) -> None:
        """Set the parameters to their mean over ranks. All ranks must call this method."""
        self._write(self._weight_mean(self._flatten(self._parameters)))

    def reduce_gradients(self, mean_over_ranks: Callable[[Tensor], Tensor]) -> None:
        """Set each `.grad` to its mean over ranks, or leave it None if it is None on every rank. All ranks over which
        the mean is computed call it."""
        gradients = [parameter.grad for parameter in self._parameters]
        values = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        flat = self._flatten(values)
        is_used = flat.new_tensor([float(gradient is not None) for gradient in gradients])
        mean, any_used = mean_over_ranks(torch.cat([flat, is_used])).split([len(flat), len(gradients)])
        used = any_used.tolist()
        for index, (parameter, part) in enumerate(zip(self._parameters, self._split(mean), strict=True)):
            if not used[index]:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_conj() or parameter.grad.is_neg():  # clipping and optimizers may reject such views
                parameter.grad = torch.empty_like(parameter.grad)
            _copy_elements(parameter.grad, part)

    def load(self, outer: Mapping[str, Mapping[str, Tensor]], errors: Mapping[str, Tensor]) -> None:
        """Load the state of the outer optimizer and this rank's compression error. State that the settings do not
        use is discarded."""
        settings = self._settings
        if not settings.averages_weights:
            self.anchor = self._join(outer["anchors"])
        self.momentum = self._join(outer["momentum"]) if settings.outer_momentum else None
        self.outer_mean.load_errors(self._join(errors), self._join(outer["slice_errors"]))
        self.pending = None

    def load_pending(self, means: Mapping[str, Tensor]) -> None:
        """Load the mean outer gradient of a completed transfer."""
        self.pending = PendingMean(None, self._join(means))

    def parts(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the parts of `vector`, [elements], by parameter name."""
        return dict(zip(self.names, self._split(vector), strict=True))

    def _join(self, parts_by_name: Mapping[str, Tensor]) -> Tensor | None:
        """Return the vector of the parts in `parts_by_name`, or None if there are none. Missing parts are zero."""
        if not any(name in parts_by_name for name in self.names):
            return None
        vector = torch.zeros(sum(self._sizes), dtype=self._dtype, device=self._parameters[0].device)
        for name, part in self.parts(vector).items():
            if name in parts_by_name:
                part.copy_(parts_by_name[name])
        return vector

    def _flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([as_real(tensor.detach().resolve_conj()).to(self._dtype).reshape(-1) for tensor in tensors])

    def _split(self, vector: Tensor) -> list[Tensor]:
        return [part.view(shape) for part, shape in zip(vector.split(self._sizes), self._shapes, strict=True)]

    def _write(self, vector: Tensor) -> None:
        for parameter, part in zip(self._parameters, self._split(vector), strict=True):
            _copy_elements(parameter.detach(), part)


def create_buckets(
    parameters: Mapping[str, nn.Parameter], groups: OuterGroups, settings: LocalSGDConfig
) -> list[ParameterBucket]:
    """Return the buckets of `parameters`. Only parameters of the same dtype share a bucket."""
    return [ParameterBucket(names, parameters, groups, settings) for names in _divide_into_buckets(parameters)]


def _divide_into_buckets(parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Divide `parameters` into buckets, and return the names of the parameters of each bucket."""
    buckets: list[list[str]] = []
    open_buckets: dict[torch.dtype, tuple[list[str], int]] = {}
    for name, parameter in parameters.items():
        names, elements = open_buckets.get(parameter.dtype, ([], 0))
        if not names or elements + parameter.numel() > BUCKET_ELEMENTS:
            names, elements = [], 0
            buckets.append(names)
        names.append(name)
        open_buckets[parameter.dtype] = (names, elements + parameter.numel())
    return buckets


def real_shape(parameter: Tensor) -> list[int]:
    """Return the shape of `parameter`, or the shape of its real view if it is complex."""
    return [*parameter.shape, 2] if parameter.is_complex() else list(parameter.shape)


def _copy_elements(target: Tensor, values: Tensor) -> None:
    """Copy `values`, which are pairs of real numbers if `target` is complex, into `target`. The conjugate bit of
    `target` may be set."""
    target.copy_(torch.view_as_complex(values) if target.is_complex() else values)
