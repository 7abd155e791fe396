"""The comparison of trained and frozen parameters between ranks."""

from __future__ import annotations

from collections.abc import Sequence

from unitrain.errors import ModelError


def check_same_trained(names: Sequence[str], by_rank: Sequence[Sequence[bool]]) -> None:
    """Raise ModelError unless all ranks train the same parameters. `by_rank` are the values of requires_grad of all
    ranks."""
    for rank, other in enumerate(by_rank):
        if other != by_rank[0]:
            name = next(name for name, one, two in zip(names, by_rank[0], other, strict=True) if one != two)
            state, opposite = ("trained", "frozen") if by_rank[0][names.index(name)] else ("frozen", "trained")
            raise ModelError(
                f"Parameter {name!r} is {state} on rank 0 and {opposite} on rank {rank}. "
                "Freeze and unfreeze the same parameters on every rank: parameter.requires_grad_(...)."
            )
