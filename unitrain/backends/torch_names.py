"""Functions of torch.distributed that torch 2.14 renamed."""

from __future__ import annotations

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
