"""Functions of torch.distributed that torch 2.14 renamed.

Which transports this build of torch.distributed has.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


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
