"""What a rank says about a collective before it takes part, so that ranks which disagree find out instead of hanging.

Every collective is preceded by one exchange of a short row of integers on the CPU. The row also carries the sizes that
an uneven allgather needs, and is all that a barrier is; and what is small, as a number or a flag, travels in it, so
that it takes no second exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unitrain.backends.checks import DTYPES, REDUCE_OPS, dtype_name

_OPERATIONS = (
    "allreduce", "allgather", "reducescatter", "broadcast", "broadcast_object", "allgather_object", "barrier",
    "gradients",
)  # fmt: skip
_MOST_DIMS = 10
_HEADER = 7 + _MOST_DIMS
CARRIED_BYTES = 1024  # a packet with the rest of the row, which takes no longer than a shorter one
ROW_LENGTH = _HEADER + CARRIED_BYTES // 8


@dataclass(frozen=True)
class Call:
    """One rank's view of one collective. `shape` is empty for objects; `refused` says that its arguments are wrong.

    `content`, uint8 [at most CARRIED_BYTES], is what this rank gives, where it is small.
    """

    number: int
    operation: str
    op: str = ""
    root: int = -1
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    refused: bool = False
    content: Tensor | None = field(default=None, compare=False, repr=False)

    def row(self) -> Tensor:
        """Return the call as int64 [ROW_LENGTH]."""
        dims = self.shape
        if len(dims) > _MOST_DIMS:  # fold what does not fit into the last place: still equal only when equal
            dims = (*dims[: _MOST_DIMS - 1], hash(dims[_MOST_DIMS - 1 :]))
        row = torch.zeros(ROW_LENGTH, dtype=torch.int64)
        row[:_HEADER] = torch.tensor(
            [
                self.number,
                -1 if self.refused else _OPERATIONS.index(self.operation),
                REDUCE_OPS.index(self.op) if self.op else -1,
                self.root,
                DTYPES.index(self.dtype) if self.dtype is not None else -1,
                len(self.shape),
                -1 if self.content is None else len(self.content),
                *dims,
                *[0] * (_MOST_DIMS - len(dims)),
            ]
        )
        if self.content is not None:
            row[_HEADER:].view(torch.uint8)[: len(self.content)] = self.content
        return row

    @classmethod
    def from_rows(cls, rows: Tensor) -> list[Call]:
        """Return the calls that `rows`, int64 [ranks, ROW_LENGTH], tell of."""
        contents = rows[:, _HEADER:].view(torch.uint8)
        return [cls._from_row(row, content) for row, content in zip(rows[:, :_HEADER].tolist(), contents, strict=True)]

    @classmethod
    def _from_row(cls, row: Sequence[int], content: Tensor) -> Call:
        number, operation, op, root, dtype, dims, length, *shape = row
        return cls(
            number=number,
            operation="" if operation < 0 else _OPERATIONS[operation],
            op="" if op < 0 else REDUCE_OPS[op],
            root=root,
            dtype=None if dtype < 0 else DTYPES[dtype],
            shape=tuple(shape[:dims]),
            refused=operation < 0,
            content=None if length < 0 else content[:length],
        )

    def agrees_with(self, other: Call) -> bool:
        """Tell whether both can be parts of one collective; only an allgather's dim 0 may differ."""
        if (self.number, self.operation, self.op, self.root) != (other.number, other.operation, other.op, other.root):
            return False
        free = 1 if self.operation == "allgather" else 0
        if self.operation in ("broadcast_object", "allgather_object"):
            return True
        return (
            self.dtype == other.dtype
            and len(self.shape) == len(other.shape)
            and self.shape[free:] == other.shape[free:]
        )

    def __str__(self) -> str:
        if self.refused:
            return "was refused its arguments"
        arguments = []
        if self.dtype is not None:
            arguments.append(f"{dtype_name(self.dtype)} {list(self.shape)}")
        if self.op:
            arguments.append(self.op)
        if self.root > 0:
            arguments.append(f"root={self.root}")
        return f"called {self.operation}({', '.join(arguments)}) as collective #{self.number}"


def describe_disagreement(calls: Sequence[Call]) -> str:
    """Return one sentence that tells who called what, ranks with the same call together."""
    ranks: dict[str, list[str]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(str(call), []).append(str(rank))
    told = "; ".join(f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(who)} {what}" for what, who in ranks.items())
    return f"The ranks do not agree on a collective: {told}."


def small(tensor: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the bytes, uint8, of `tensor` in `dtype`, where they are few enough for a row and on the CPU as it is."""
    if tensor.device.type != "cpu" or tensor.numel() * dtype.itemsize > CARRIED_BYTES:
        return None
    return tensor.detach().to(dtype).reshape(-1).contiguous().view(torch.uint8)


def carried(calls: Sequence[Call], like: Tensor) -> list[Tensor] | None:
    """Return what each rank gives, of the dtype of `like` and one-dimensional, if the rows carried that of all."""
    contents = [call.content for call in calls if call.content is not None]
    if len(contents) < len(calls):
        return None
    return [content.clone().view(like.dtype) for content in contents]  # a copy, which begins where its dtype may
