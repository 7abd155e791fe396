"""Which transports this build of torch.distributed has."""

from __future__ import annotations

import torch
import torch.distributed as dist


def transports() -> dict[str, str]:
    """Return the version of each transport that torch can use here, or "yes" where it does not say."""
    found: dict[str, str] = {}
    if not dist.is_available():
        return found
    if dist.is_gloo_available():
        found["gloo"] = "yes"
    if dist.is_nccl_available() and torch.version.cuda is not None:
        version = torch.cuda.nccl.version()
        found["nccl"] = ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    if dist.is_mpi_available():
        found["mpi"] = "yes"
    return found
