"""PowerSGD, as `base.PowerSGD` defines it, and what it keeps between steps.

torch has a hook of it too. It keeps its state by bucket, so that it cannot go on in another process or with another
number of ranks; it begins its collectives in callbacks of others, whose order may differ between ranks (over Gloo it
fails with more than one bucket); and one overflow in its memory stays there. Here state belongs to parameters, and who
calls it, in which order everywhere, begins and awaits the sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from unitrain.backends.base import Communicator
from unitrain.backends.capabilities import CompressionState
from unitrain.backends.compression_setting import PowerSGD
from unitrain.errors import CheckpointError

Wait = Callable[[], object]
# Begins to sum a tensor over ranks in place, and returns what waits for it.
StartSum = Callable[[Tensor], Wait]

# A column of Q is rounding only if it is shorter than so many last digits of the longest.
_ROUNDING = 1000


class _Matrix(NamedTuple):
    """A gradient on its way: all but `gradient` are of the dtype that it is computed in."""

    name: str
    gradient: Tensor
    owed: Tensor  # M, of which what the ranks agree to send will be taken off
    start: Tensor  # the orthonormal Q
    used: Tensor  # 1 if the gradient has anything but zeros, else 0


class _Change(NamedTuple):
    """What the memory becomes if the whole reduction turns out to be finite."""

    name: str
    owed: Tensor
    query: Tensor
    used: Tensor


class LowRankGradients(CompressionState):
    """Reduces the gradients of `model`, the user's own, by PowerSGD; every rank the same of them, in the same order."""

    # Above that, rank 0 does not collect the errors of all ranks, but their mean, which is as large as the model.
    most_gathered_bytes = 4 << 30

    def __init__(self, settings: PowerSGD, model: nn.Module, communicator: Communicator) -> None:
        self.loss_scale: Callable[[], Tensor | None] = lambda: None
        self._settings, self._communicator = settings, communicator
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._shapes = {name: _matrix_shape(p) for p, name in self._names.items() if self._is_worth_it(p)}
        self._places = {name: place for place, name in enumerate(self._names.values())}
        self._share = 1 / communicator.size  # DDP too multiplies by it, which divides by 3 in another last digit
        self._steps = 0
        self._errors: dict[str, Tensor] = {}
        self._room: dict[str, Tensor] = {}  # for the next M: fresh memory costs more than the arithmetic
        self._queries: dict[str, Tensor] = {}
        self._spares: dict[str, Tensor] = {}
        self._begin()

    @property
    def sends_whole(self) -> bool:
        """Whether the next reduction is one before `start_step`."""
        return self._steps < self._settings.start_step

    def forget_unfinished(self) -> None:
        """Begin a reduction anew, after one that an exception has ended."""
        self._begin()

    def reduce(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], start_sum: StartSum) -> Iterator[Wait]:
        """Make `gradients`, of one dtype, what all ranks send; yields each sum that it needs, to be awaited before it
        goes on. `finish` follows when all gradients of a backward are reduced."""
        matrices: list[_Matrix] = []
        whole: list[Tensor] = []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if self.sends_whole or (name := self._names[parameter]) not in self._shapes:
                whole.append(gradient)
            else:
                matrices.append(self._matrix(name, gradient))

        dtype = matrices[0].owed.dtype if matrices else gradients[0].dtype
        count = len(matrices)
        parts = [
            *(matrix.owed @ matrix.start for matrix in matrices),
            *(matrix.used for matrix in matrices),
            *(gradient.to(dtype) * self._share for gradient in whole),
        ]
        yield from _sum(parts, start_sum)
        for gradient, mean in zip(whole, parts[2 * count :], strict=True):
            gradient.copy_(mean)
            if not self.sends_whole:
                self._finite.append(mean.isfinite().all())
        if not matrices:
            return

        finite = [projected.isfinite().all() for projected in parts[:count]]
        used = [part > 0 for part in parts[count : 2 * count]]
        bases = [_orthonormal(torch.where(ok, part, 0)) for ok, part in zip(finite, parts[:count], strict=True)]
        # Transposed, which is several times as fast as M^T P.
        queries = [base.T @ matrix.owed * self._share for matrix, base in zip(matrices, bases, strict=True)]
        yield from _sum(queries, start_sum)
        for number, matrix in enumerate(matrices):
            self._send(matrix, bases[number], queries[number].T, finite[number], used[number])

    def finish(self) -> None:
        """Take over what the memory becomes, unless any gradient of the backward was inf or nan."""
        finite = torch.stack(self._finite).all() if self._changes else torch.tensor(True)
        for name, owed, query, used in self._changes:
            if self._settings.error_feedback:
                self._remember(name, owed, finite)
            else:
                self._room[name] = owed
            if self._settings.warm_start:
                before = self._queries.get(name)
                before = self._first_query(name, query) if before is None else before
                self._queries[name] = torch.where(finite & used, query, before)
        self._steps += 1
        self._begin()

    def _remember(self, name: str, owed: Tensor, finite: Tensor) -> None:
        """Make `owed` the error of a matrix, and what was it the room for the next, unless the step is none."""
        before = self._errors.get(name)
        if before is None:
            self._errors[name] = torch.where(finite, owed, 0)
        elif owed.device.type != "cpu":  # where to ask would be to wait
            torch.where(finite, owed, before, out=before)
        elif finite:
            self._errors[name], owed = owed, before
        self._room[name] = owed

    def state_dict(self) -> dict[str, Any]:
        errors = {}
        gathers = self._gathers_errors()
        for name, error in self._errors.items():  # one at a time, to limit the memory that other ranks need
            own = error.unsqueeze(0)
            kept = self._communicator.allgather(own) if gathers else self._communicator.allreduce(own)
            if self._communicator.rank == 0:
                errors[name] = kept.cpu()
        # Copies, because they are views of what has travelled.
        queries = {
            name: query.clone(memory_format=torch.contiguous_format).cpu() for name, query in self._queries.items()
        }
        return {"steps": self._steps, "errors": errors, "queries": queries}

    def _gathers_errors(self) -> bool:
        """Return whether the state holds the error of every rank, and warn on rank 0 if it holds only their mean."""
        total = self._communicator.size * sum(error.nbytes for error in self._errors.values())
        if total <= self.most_gathered_bytes:
            return True
        if self._communicator.rank == 0:
            warnings.warn(
                f"What PowerSGD still owes on {self._communicator.size} ranks takes {total / 2**30:.1f} GiB, so "
                "checkpoints hold its mean over ranks. A resumed run has the same mean gradient to send, but is not "
                "bit-identical to one without interruption.",
                stacklevel=2,
            )
        return False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        communicator = self._communicator
        first = communicator.rank == 0
        tables: dict[str, dict[str, Tensor]] = {kind: state.get(kind, {}) for kind in ("errors", "queries")}
        kept = communicator.broadcast_object(
            {kind: {name: (list(t.shape), t.dtype) for name, t in table.items()} for kind, table in tables.items()}
            | {"steps": state.get("steps", 0)}
            if first
            else None
        )
        self._check_fits({name: shape[1:] for name, (shape, _) in kept["errors"].items()})
        self._steps, self._errors, self._queries = kept["steps"], {}, {}
        for kind, keep in (("errors", self._keep_error), ("queries", self._keep_query)):
            for name, (shape, dtype) in kept[kind].items():
                own = tables[kind][name] if first else torch.empty(shape, dtype=dtype)
                keep(name, communicator.broadcast(own.to(communicator.device)))

    def _keep_error(self, name: str, of_all_ranks: Tensor) -> None:
        """Take this rank's part of what is owed; what a matrix owes that is sent whole from now on is dropped."""
        if self._settings.error_feedback and name in self._shapes:
            same = len(of_all_ranks) == self._communicator.size
            self._errors[name] = of_all_ranks[self._communicator.rank].clone() if same else of_all_ranks.mean(0)

    def _keep_query(self, name: str, query: Tensor) -> None:
        """Take Q, unless this run approximates by another rank, for which it begins anew."""
        shape = self._shapes.get(name)
        if self._settings.warm_start and shape is not None and list(query.shape) == [shape[1], self._rank(shape)]:
            self._queries[name] = query

    def _begin(self) -> None:
        self._changes: list[_Change] = []
        self._finite: list[Tensor] = []
        self._scale: Tensor | None = None
        self._scale_known = False

    def _is_worth_it(self, parameter: Tensor) -> bool:
        rows, columns = shape = _matrix_shape(parameter)
        sent = (rows + columns) * self._rank(shape)
        return parameter.is_floating_point() and sent * self._settings.min_compression_rate < rows * columns

    def _rank(self, shape: tuple[int, int]) -> int:
        return min(*shape, self._settings.rank)

    def _matrix(self, name: str, gradient: Tensor) -> _Matrix:
        shape = self._shapes[name]
        dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        if not self._scale_known:
            self._scale, self._scale_known = self.loss_scale(), True
        # Always a tensor of its own: a bucket of another run of the same may have the gradient at another place of its
        # memory, and there the product of matrices might be added up in another order.
        owed = self._room.pop(name, None)
        if owed is None:
            owed = torch.empty(shape, dtype=dtype, device=gradient.device)
        own, error = gradient.reshape(shape), self._errors.get(name)
        if error is None:
            owed.copy_(own)
        elif self._scale is None:
            torch.add(own, error, out=owed)
        else:
            torch.mul(error, self._scale.to(dtype), out=owed).add_(own)
        query = self._queries.get(name)
        start = _orthonormal(self._first_query(name, owed) if query is None else self._filled(name, query.to(dtype)))
        least, most = torch.aminmax(own)
        return _Matrix(name, gradient, owed, start, (least.ne(0) | most.ne(0)).to(dtype))

    def _filled(self, name: str, query: Tensor) -> Tensor:
        """Return Q with a random column for each that is rounding only, as after a gradient of a lower rank: else what
        is sent next would follow from what is not the same everywhere."""
        lengths = torch.linalg.vector_norm(query, dim=0)
        empty = lengths <= _ROUNDING * torch.finfo(query.dtype).eps * lengths.max()
        if (spare := self._spares.get(name)) is None:
            spare = self._spares[name] = self._random(name, query, 0)
        return torch.where(empty, spare, query)

    def _first_query(self, name: str, like: Tensor) -> Tensor:
        """Return the random Q of a matrix that has none from an earlier reduction.

        With `warm_start` it is the same in every reduction. Some ranks reduce the zeros of a parameter that no rank
        used, and others, such as a single one, skip them, so that its first reduction has another number there.
        """
        return self._random(name, like, self._settings.start_step if self._settings.warm_start else self._steps)

    def _random(self, name: str, like: Tensor, reduction: int) -> Tensor:
        """Return a random Q, equal on every rank."""
        shape = self._shapes[name]
        entropy = [self._settings.seed, self._places[name], reduction]
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)
        random = torch.randn(
            shape[1], self._rank(shape), dtype=like.dtype, generator=torch.Generator().manual_seed(seed)
        )
        return random.to(like.device)

    def _send(self, matrix: _Matrix, base: Tensor, query: Tensor, finite: Tensor, used: Tensor) -> None:
        name, gradient, owed, _, _ = matrix
        finite = finite & query.isfinite().all()
        # A gradient of nothing is no occasion to send what is owed: of a parameter that no rank used, nobody takes it.
        base = torch.where(used, base, 0)
        owed.addmm_(base, query.T, alpha=-1)
        if self._scale is not None:
            owed /= self._scale.to(owed.dtype)
        base = torch.where(finite, base, float("nan"))
        if gradient.dtype == owed.dtype and gradient.is_contiguous():
            torch.mm(base, query.T, out=gradient.view(owed.shape))
        else:
            gradient.copy_((base @ query.T).view(gradient.shape))
        self._finite.append(finite)
        self._changes.append(_Change(name, owed, query, used))

    def _check_fits(self, shapes: dict[str, list[int]]) -> None:
        for name, shape in shapes.items():
            if name not in self._places:
                raise CheckpointError(
                    f"The checkpoint has gradients that are still owed to {name!r}, which this model has not. "
                    "Build the model that wrote it."
                )
            expected = self._shapes.get(name)
            if expected is not None and shape != list(expected):
                raise CheckpointError(
                    f"The checkpoint has gradients that are still owed to {name!r} as {shape}, and here it is "
                    f"{list(expected)}. Build the model that wrote it."
                )


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    rows = parameter.shape[0] if parameter.dim() else 1
    return rows, parameter.numel() // max(rows, 1)


def _orthonormal(matrix: Tensor) -> Tensor:
    """Return orthonormal columns that span at least those of `matrix`."""
    basis: Tensor = torch.linalg.qr(matrix).Q
    return basis


def _sum(parts: list[Tensor], start_sum: StartSum) -> Iterator[Wait]:
    """Replace `parts` by their sums over ranks, which travel together."""
    flat = torch.cat([part.reshape(-1) for part in parts])
    yield start_sum(flat)
    shapes = [part.shape for part in parts]
    parts[:] = [piece.view(shape) for piece, shape in zip(flat.split([s.numel() for s in shapes]), shapes, strict=True)]
