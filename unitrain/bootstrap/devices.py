"""Selection of the device on which a rank computes."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import torch

from unitrain import validation
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import ConfigError


def choose_device(requested: str | torch.device | None, local_rank: int, *, communicates: bool = True) -> torch.device:
    """Return the device of the rank with `local_rank`, and make it the current device if it is a GPU.

    The default is a GPU if one is visible to torch, otherwise the CPU. If several GPUs are visible, the rank uses the
    GPU with index `local_rank`, unless `requested` contains an index. If one GPU is visible, the launcher may have
    assigned one GPU per rank; if not, `gather_and_check_gpus` raises an error. Raises ConfigError for an invalid
    device, for a GPU that does not exist, and if several GPUs are visible, but none with index `local_rank`. With
    `communicates`, raises ConfigError for devices other than CPUs and CUDA GPUs, because Gloo's allreduce returns
    tensors on such devices unchanged, without an error.
    """
    device = _default_device() if requested is None else parse_device("unitrain.init(device=...)", requested)
    if communicates and device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"Device {str(device)!r} was requested, but tensors are transferred between CPUs or CUDA GPUs only. Use "
            "device='cpu', or train in one process with backend 'local'."
        )
    if device.type != "cuda":
        return device
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        raise ConfigError(f"Device {str(device)!r} was requested, but torch sees no GPU here. Use device='cpu'.")
    has_index = device.index is not None
    if not has_index:
        device = torch.device("cuda", local_rank if num_gpus > 1 else 0)
    if device.index >= num_gpus:
        if has_index:
            raise ConfigError(
                f"Device {str(device)!r} was requested, but torch sees {num_gpus} {'GPU' if num_gpus == 1 else 'GPUs'} "
                "here. Use device='cuda' for the GPU of the local rank."
            )
        raise ConfigError(
            f"local_rank {local_rank} needs GPU {device.index}, but this host has {num_gpus}. "
            f"Start {num_gpus} ranks per host, or use device='cpu'."
        )
    torch.cuda.set_device(device)
    return device


def parse_device(name: str, requested: Any) -> torch.device:
    """Return the device that `requested` describes. Raises ConfigError, with the `name` of the argument, if it does not
    describe a device."""
    try:
        return torch.device(requested)
    except (RuntimeError, TypeError, ValueError):
        raise ConfigError(
            f"{name} must be a device such as 'cpu', 'cuda' or 'cuda:0', got {validation.describe_value(requested)}. "
            "Use device='cpu', or leave it out to use a GPU if there is one."
        ) from None


def gather_and_check_gpus(rendezvous: Rendezvous, device: torch.device, requested: str | torch.device | None) -> None:
    """Raise ConfigError on every rank if two ranks use the same GPU, unless they requested it by its index.

    All ranks must call this function.
    """
    has_index = requested is not None and torch.device(requested).index is not None
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" and not has_index else None
    check_gpus_differ(rendezvous.allgather("gpu", [socket.gethostname(), gpu]))


def check_gpus_differ(host_and_gpu_by_rank: Sequence[Sequence[str | None]]) -> None:
    """Raise ConfigError if two ranks use the same GPU.

    `host_and_gpu_by_rank` contains the host and the GPU's UUID for each rank; the UUID is None for a rank that is not
    checked. Hosts may be containers on one machine, so only the UUIDs are compared.
    """
    ranks_by_gpu: dict[str, list[str]] = {}
    host_by_gpu: dict[str, str | None] = {}
    for rank, (host, gpu) in enumerate(host_and_gpu_by_rank):
        if gpu is not None:
            ranks_by_gpu.setdefault(gpu, []).append(str(rank))
            host_by_gpu.setdefault(gpu, host)
    for gpu, sharing_ranks in ranks_by_gpu.items():
        if len(sharing_ranks) > 1:
            raise ConfigError(
                f"Ranks {', '.join(sharing_ranks)} on host {host_by_gpu[gpu]!r} use the same GPU, {gpu}. "
                "Start one rank per GPU, or use device='cpu'."
            )


def _default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
