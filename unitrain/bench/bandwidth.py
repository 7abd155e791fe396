"""Which collectives are measured, and what their bandwidth is."""

from __future__ import annotations

OPERATIONS = ("allreduce", "allgather", "reducescatter", "broadcast")


def bus_factor(operation: str, ranks: int) -> float:
    """Return what algorithm bandwidth (bytes / seconds) is multiplied by to give bus bandwidth.

    Bus bandwidth is what a link carries whatever the number of ranks, to be held against the hardware's. As defined in
    doc/PERFORMANCE.md of NVIDIA's nccl-tests, and so is the size of an operation: that of the whole array, which for an
    allgather is the result, for a reducescatter the input.
    """
    return {
        "allreduce": 2 * (ranks - 1) / ranks,
        "allgather": (ranks - 1) / ranks,
        "reducescatter": (ranks - 1) / ranks,
        "broadcast": 1.0,
    }[operation]
