"""PowerSGD gradient compression, as specified in `compression_setting.PowerSGD`, and its state between steps.

torch also provides a comm hook for PowerSGD. That hook stores its state by bucket, so a run cannot resume with a
different number of ranks. It starts collectives in callbacks, whose order may differ between ranks, so it fails over
Gloo with more than one bucket. After an overflow, its error feedback contains inf or nan in all later steps. Here, the
state is stored by parameter, the caller starts the collectives and waits for them in the same order on every rank, and
a step with an overflow does not change the state.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.backends.capabilities import CompressionState
from unitrain.backends.compression_setting import PowerSGD
from unitrain.backends.gradients.end_of_backward import BackwardStage, end_of_backward, tensors_requiring_grad
from unitrain.errors import CheckpointError
from unitrain.torch_compat import call_after_loss_scaling, current_backward

Wait = Callable[[], object]
# Starts an in-place allreduce (sum) of a tensor, and returns its wait function.
StartSumAllreduce = Callable[[Tensor], Wait]

# A column of Q counts as rounding noise if its norm is less than this multiple of epsilon times the largest norm.
_ROUNDING_EPSILONS = 1000


class _Matrix(NamedTuple):
    """A gradient that is being reduced. All tensors except `gradient` have the dtype of the computation."""

    name: str
    gradient: Tensor
    remainder: Tensor  # contains M; the approximation is subtracted later, and the difference is the error e
    basis: Tensor  # the orthonormal Q
    is_used: Tensor  # 1 if the gradient has an element other than zero, else 0


class _NewState(NamedTuple):
    """The next state of a matrix, which is applied if all gradients of the backward pass are finite."""

    name: str
    error: Tensor
    query: Tensor
    is_used: Tensor


class PowerSGDCompressor(CompressionState):
    """Reduces the gradients of `model`, the user's module, with PowerSGD. All ranks must reduce the same gradients in
    the same order.
    """

    # If the errors of all ranks together take more bytes, a checkpoint stores only their mean over ranks, which has at
    # most as many elements as the model.
    max_gathered_bytes = 4 << 30

    def __init__(self, settings: PowerSGD, model: nn.Module, communicator: Communicator) -> None:
        _install_scale_recording()
        self.get_loss_scale: Callable[[], Tensor | None] = _grad_scaler_scale
        self._settings, self._communicator = settings, communicator
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._shapes = {name: _matrix_shape(p) for p, name in self._names.items() if self._is_compressed(p)}
        self._indices = {name: index for index, name in enumerate(self._names.values())}
        # DDP multiplies by the inverse, and a division, for example by 3, would round differently.
        self._inverse_size = 1 / communicator.size
        self._num_reductions = 0
        self._errors: dict[str, Tensor] = {}
        self._scratch: dict[str, Tensor] = {}  # memory for the next M; allocating takes longer than the arithmetic
        self._queries: dict[str, Tensor] = {}
        self._random_columns: dict[str, Tensor] = {}
        self.discard_unfinished()

    @property
    def is_before_start_step(self) -> bool:
        """Whether the next reduction precedes `start_step`, so that its gradients are not compressed."""
        return self._num_reductions < self._settings.start_step

    def discard_unfinished(self) -> None:
        """Discard a reduction that was interrupted by an exception."""
        self._new_states: list[_NewState] = []
        self._finite_flags: list[Tensor] = []
        self._scale: Tensor | None = None
        self._is_scale_known = False

    def reduce(
        self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], start_allreduce: StartSumAllreduce
    ) -> Iterator[Wait]:
        """Replace `gradients`, which have the same dtype, with their compressed means over ranks.

        This generator yields the wait function of each allreduce that it starts; the caller calls that function before
        it resumes the generator. After all gradients of a backward pass, the caller calls `finish`.
        """
        matrices: list[_Matrix] = []
        uncompressed: list[Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if self.is_before_start_step or (name := self._names[parameter]) not in self._shapes:
                uncompressed.append(gradient)
            else:
                matrices.append(self._create_matrix(name, gradient))

        dtype = matrices[0].remainder.dtype if matrices else torch.promote_types(gradients[0].dtype, torch.float32)
        count = len(matrices)
        parts = [
            *(matrix.remainder @ matrix.basis for matrix in matrices),
            *(matrix.is_used for matrix in matrices),
            *(gradient.to(dtype) * self._inverse_size for gradient in uncompressed),
        ]
        yield from _allreduce_parts(parts, start_allreduce)
        for gradient, mean in zip(uncompressed, parts[2 * count :], strict=True):
            gradient.copy_(mean)
            if not self.is_before_start_step:
                self._finite_flags.append(mean.isfinite().all())
        if not matrices:
            return

        finite = [projection.isfinite().all() for projection in parts[:count]]
        used = [part > 0 for part in parts[count : 2 * count]]
        left_bases = [_orthonormalize(torch.where(ok, part, 0)) for ok, part in zip(finite, parts[:count], strict=True)]
        # The transpose of M^T P, which is several times faster to compute.
        queries = [
            basis.T @ matrix.remainder * self._inverse_size for matrix, basis in zip(matrices, left_bases, strict=True)
        ]
        yield from _allreduce_parts(queries, start_allreduce)
        for index, matrix in enumerate(matrices):
            self._set_gradient(matrix, left_bases[index], queries[index].T, finite[index], used[index])

    def finish(self) -> None:
        """Count the reduction, and apply the new state of all matrices unless a gradient of the backward pass contains
        inf or nan."""
        finite = torch.stack(self._finite_flags).all() if self._new_states else torch.tensor(True, device="cpu")
        for name, error, query, is_used in self._new_states:
            if self._settings.error_feedback:
                self._store_error(name, error, finite)
            else:
                self._scratch[name] = error
            if self._settings.warm_start:
                before = self._queries.get(name)
                before = self._random_initial_query(name, query) if before is None else before
                self._queries[name] = torch.where(finite & is_used, query, before)
        self._num_reductions += 1
        self.discard_unfinished()

    def _store_error(self, name: str, error: Tensor, finite: Tensor) -> None:
        """Store `error` as the error of a matrix if `finite`, and reuse the memory of the replaced tensor for the next
        M.
        """
        before = self._errors.get(name)
        if before is None:
            self._errors[name] = torch.where(finite, error, 0)
        elif error.device.type != "cpu":  # reading `finite` would synchronize the host with the device
            torch.where(finite, error, before, out=before)
        elif finite:
            self._errors[name], error = error, before
        self._scratch[name] = error

    def state_dict(self) -> dict[str, Any]:
        errors = {}
        gathers = self._stores_errors_of_all_ranks()
        for name, error in self._errors.items():  # one at a time, to limit the memory usage
            own = error.unsqueeze(0)
            of_all_ranks = self._communicator.allgather(own) if gathers else self._communicator.allreduce(own)
            if self._communicator.rank == 0:
                errors[name] = of_all_ranks.cpu()
        # The queries are copied, because they are views of a buffer.
        queries = {
            name: query.clone(memory_format=torch.contiguous_format).cpu() for name, query in self._queries.items()
        }
        return {"steps": self._num_reductions, "errors": errors, "queries": queries}

    def _stores_errors_of_all_ranks(self) -> bool:
        """Return whether the state contains the errors of all ranks. Otherwise, it contains their mean, and rank 0
        issues a warning."""
        total = self._communicator.size * sum(error.nbytes for error in self._errors.values())
        if total <= self.max_gathered_bytes:
            return True
        if self._communicator.rank == 0:
            warnings.warn(
                f"The PowerSGD errors of {self._communicator.size} ranks take {total / 2**30:.1f} GiB, so checkpoints "
                "store their mean over ranks. A resumed run starts with the mean error on every rank, and is not "
                "bit-identical to an uninterrupted run.",
                stacklevel=2,
            )
        return False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        communicator = self._communicator
        is_rank_zero = communicator.rank == 0
        tables: dict[str, dict[str, Tensor]] = {}
        layout: Any = None
        if is_rank_zero:
            tables = {key: state.get(key, {}) for key in ("errors", "queries")}
            layout = {
                key: {name: (list(t.shape), t.dtype) for name, t in table.items()} for key, table in tables.items()
            } | {"steps": state.get("steps", 0)}
        layout = communicator.broadcast_object(layout)
        for name, (shape, _) in layout["errors"].items():
            self._check_shape("error", name, shape[1:], self._shapes.get(name))
        for name, (shape, _) in layout["queries"].items():
            needed_shape = self._shapes.get(name)
            self._check_shape("matrix Q", name, shape, needed_shape and (needed_shape[1], *shape[1:]))
        self._num_reductions, self._errors, self._queries = layout["steps"], {}, {}
        for key, load in (("errors", self._load_error), ("queries", self._load_query)):
            for name, (shape, dtype) in layout[key].items():
                own = tables[key][name] if is_rank_zero else torch.empty(shape, dtype=dtype, device="cpu")
                load(name, communicator.broadcast(own.to(communicator.device)))

    def _load_error(self, name: str, errors: Tensor) -> None:
        """Load this rank's error, or the mean error if the number of ranks has changed or only the mean was saved.
        Discard the error if the gradient is no longer compressed or error feedback is disabled."""
        if self._settings.error_feedback and name in self._shapes:
            is_same_size = len(errors) == self._communicator.size
            self._errors[name] = errors[self._communicator.rank].clone() if is_same_size else errors.mean(0)

    def _load_query(self, name: str, query: Tensor) -> None:
        """Load Q, unless this run does not use it, or needs a new Q because its approximation rank differs."""
        shape = self._shapes.get(name)
        if (
            self._settings.warm_start
            and shape is not None
            and list(query.shape) == [shape[1], self._approximation_rank(shape)]
        ):
            self._queries[name] = query

    def _is_compressed(self, parameter: Tensor) -> bool:
        rows, columns = shape = _matrix_shape(parameter)
        compressed_elements = (rows + columns) * self._approximation_rank(shape)
        return (
            parameter.is_floating_point()
            and compressed_elements * self._settings.min_compression_rate < rows * columns
        )  # fmt: skip

    def _approximation_rank(self, shape: tuple[int, int]) -> int:
        return min(*shape, self._settings.rank)

    def _create_matrix(self, name: str, gradient: Tensor) -> _Matrix:
        shape = self._shapes[name]
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        if not self._is_scale_known:
            self._scale, self._is_scale_known = self.get_loss_scale(), True
        # M is a separate tensor: in a resumed run, the gradient may have a different alignment in its bucket, and the
        # matrix product may then sum in a different order.
        remainder = self._scratch.pop(name, None)
        if remainder is None:
            remainder = torch.empty(shape, dtype=dtype, device=gradient.device)
        own, error = gradient.reshape(shape), self._errors.get(name)
        if error is None:
            remainder.copy_(own)
        elif self._scale is None:
            torch.add(own, error, out=remainder)
        else:
            torch.mul(error, self._scale.to(dtype), out=remainder).add_(own)
        query = self._queries.get(name)
        query = (
            self._random_initial_query(name, remainder)
            if query is None
            else self._replace_noise_columns(name, query.to(dtype))
        )
        smallest, largest = torch.aminmax(own)
        return _Matrix(name, gradient, remainder, _orthonormalize(query), (smallest.ne(0) | largest.ne(0)).to(dtype))

    def _replace_noise_columns(self, name: str, query: Tensor) -> Tensor:
        """Return Q, with its columns of rounding noise replaced by random columns. Such columns result from gradients
        of lower rank. The noise depends on the number of ranks, and the next approximation would depend on the noise.
        """
        lengths = torch.linalg.vector_norm(query, dim=0)
        is_noise = lengths <= _ROUNDING_EPSILONS * torch.finfo(query.dtype).eps * lengths.max()
        if (columns := self._random_columns.get(name)) is None:
            columns = self._random_columns[name] = self._random_query(name, query, 0)
        return torch.where(is_noise, columns, query)

    def _random_initial_query(self, name: str, like: Tensor) -> Tensor:
        """Return the random Q of a matrix without a Q from an earlier reduction.

        With `warm_start`, Q does not depend on the reduction count, because the count at a parameter's first reduction
        depends on the number of ranks: a parameter that no rank uses is reduced as zeros with several ranks and skipped
        with one rank.
        """
        return self._random_query(
            name, like, self._settings.start_step if self._settings.warm_start else self._num_reductions
        )

    def _random_query(self, name: str, like: Tensor, reduction_index: int) -> Tensor:
        """Return a random Q, equal on every rank."""
        shape = self._shapes[name]
        entropy = [self._settings.seed, self._indices[name], reduction_index]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
        random = torch.randn(
            shape[1],
            self._approximation_rank(shape),
            dtype=like.dtype,
            generator=torch.Generator().manual_seed(seed),
            device="cpu",
        )
        return random.to(like.device)

    def _set_gradient(
        self, matrix: _Matrix, left_basis: Tensor, query: Tensor, finite: Tensor, is_used: Tensor
    ) -> None:
        """Write P Q^T, with P = `left_basis` and Q = `query`, to the gradient, and append the new state of the matrix,
        which `finish` applies."""
        name, gradient, remainder, _, _ = matrix
        finite = finite & query.isfinite().all()
        # A gradient that is zero on all ranks remains zero, and its error is not communicated: the parameter may be
        # unused, and optimizers skip unused parameters.
        left_basis = torch.where(is_used, left_basis, 0)
        remainder.addmm_(left_basis, query.T, alpha=-1)
        if self._scale is not None:
            remainder /= self._scale.to(remainder.dtype)
        left_basis = torch.where(finite, left_basis, float("nan"))
        if gradient.dtype == remainder.dtype and gradient.is_contiguous():
            torch.mm(left_basis, query.T, out=gradient.view(remainder.shape))
        else:
            gradient.copy_((left_basis @ query.T).view(gradient.shape))
        self._finite_flags.append(finite)
        self._new_states.append(_NewState(name, remainder, query, is_used))

    def _check_shape(self, description: str, name: str, shape: list[int], needed_shape: tuple[int, ...] | None) -> None:
        """Raise CheckpointError if the model has no parameter `name`, or needs a different shape. `needed_shape` is
        None if the gradient is not compressed. `description` describes the tensor in the error."""
        if name not in self._indices:
            raise CheckpointError(
                f"The checkpoint has a PowerSGD {description} of {name!r}, but this model has no such parameter. "
                "Use the same model as the run that wrote it."
            )
        if needed_shape is not None and shape != list(needed_shape):
            raise CheckpointError(
                f"The checkpoint has a PowerSGD {description} of {name!r} with shape {shape}, but this model needs "
                f"{list(needed_shape)}. Use the same model as the run that wrote it."
            )


class _ScaledBackward:
    """A running backward pass of a loss that a GradScaler has multiplied by `scale`. The callbacks of the pass hold the
    only strong reference, so that the object does not outlive a pass that raises an exception."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def end(self) -> None:
        """Do nothing. As a callback at the end of the pass, this method keeps the object alive until then."""


_scaled_backwards: WeakValueDictionary[int, _ScaledBackward] = WeakValueDictionary()


@functools.cache
def _install_scale_recording() -> None:
    call_after_loss_scaling(_record_scale)


def _record_scale(scaled: Any, scale: Tensor) -> None:
    def begin_backward(_: Tensor) -> None:
        backward = current_backward()
        if backward not in _scaled_backwards:
            _scaled_backwards[backward] = scaled_backward = _ScaledBackward(scale)
            end_of_backward.add(BackwardStage.RAISE_ERRORS, scaled_backward.end)

    for tensor in tensors_requiring_grad(scaled):
        tensor.register_hook(begin_backward)


def _grad_scaler_scale() -> Tensor | None:
    """Return the scale by which a torch.amp.GradScaler has multiplied the loss of the current backward pass, or of the
    pass in which it is nested; None without a GradScaler."""
    started = [backward for backward in list(_scaled_backwards) if backward <= current_backward()]
    scaled_backward = _scaled_backwards.get(max(started)) if started else None
    return None if scaled_backward is None else scaled_backward.scale


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    rows = parameter.shape[0] if parameter.dim() else 1
    return rows, parameter.numel() // max(rows, 1)


def _orthonormalize(matrix: Tensor) -> Tensor:
    """Return orthonormal columns that span at least the columns of `matrix`."""
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


def _allreduce_parts(parts: list[Tensor], start_allreduce: StartSumAllreduce) -> Iterator[Wait]:
    """Replace `parts` with their sums over ranks, communicated as one tensor."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    yield start_allreduce(flat)
    shapes = [part.shape for part in parts]
    parts[:] = [piece.view(shape) for piece, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
