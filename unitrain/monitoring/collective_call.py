"""One rank's arguments of a collective, as they are compared with other ranks and shown in messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without "torch."."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's arguments of one collective. `shape` is [bytes] for objects; `refused` means invalid arguments."""

    number: int
    operation: str
    op: str = ""
    root: int = -1
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    refused: bool = False

    @property
    def fingerprint(self) -> int:
        """A number below 2**63, equal on ranks whose calls can be parts of one collective and on no others.

        An allgather may differ in dim 0, and objects in their bytes.
        """
        if self.operation in ("broadcast_object", "allgather_object"):
            arguments: tuple[object, ...] = ()
        else:
            free = 1 if self.operation == "allgather" else 0
            arguments = (self.dtype, len(self.shape), self.shape[free:])
        told = repr((self.number, self.operation, self.op, self.root, self.refused, arguments))
        return int.from_bytes(blake2b(told.encode(), digest_size=8).digest(), "little") >> 1

    @property
    def count(self) -> int:
        """What may differ between ranks: the length of dim 0, 1 without dimensions, or the bytes of an object."""
        return self.shape[0] if self.shape else 1

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


def describe_mismatch(calls: Sequence[CollectiveCall]) -> str:
    """Return one sentence that tells who called what, ranks with the same call together."""
    ranks: dict[str, list[str]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(str(call), []).append(str(rank))
    told = "; ".join(f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(who)} {what}" for what, who in ranks.items())
    return f"The ranks do not agree on a collective: {told}."
