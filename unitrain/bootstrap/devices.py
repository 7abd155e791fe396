"""Which device a rank computes on."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import torch

from unitrain import validation
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import ConfigError


def choose_device(requested: str | torch.device | None, local_rank: int) -> torch.device:
    """Return the device for the rank numbered `local_rank` on its host, and make it current when it is a GPU.

    With nothing requested, a GPU where there is one, else the CPU. Where a process sees a single GPU, that one: the
    launcher may have shown each its own, and `check_gpus` tells when it has not. Raises ConfigError when several are
    seen, but fewer than there are ranks on the host.
    """
    try:
        device = torch.device(requested) if requested is not None else _default_kind()
    except (RuntimeError, TypeError, ValueError):
        raise ConfigError(
            f"unitrain.init(device=...) must be a device such as 'cpu', 'cuda' or 'cuda:0', got "
            f"{validation.describe_value(requested)}. Use device='cpu', or leave it out to use a GPU where there is one."
        ) from None
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if count == 0:
        raise ConfigError(f"Device {str(device)!r} was asked for, but torch sees no GPU here. Use device='cpu'.")
    if str(device) == "cuda":  # any of them
        device = torch.device("cuda", local_rank if count > 1 else 0)
    if device.index >= count:
        raise ConfigError(
            f"local_rank {local_rank} needs GPU {device.index}, but this host shows {count}. "
            f"Start {count} ranks per host, or use device='cpu'."
        )
    torch.cuda.set_device(device)
    return device


def check_gpus(rendezvous: Rendezvous, device: torch.device, requested: str | torch.device | None) -> None:
    """Raise ConfigError, on every rank alike, when two ranks compute on one GPU without having asked for it by its
    number. All ranks call it."""
    named = requested is not None and torch.device(requested).index is not None
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" and not named else None
    check_gpus_differ(rendezvous.allgather("gpu", [socket.gethostname(), gpu]))


def check_gpus_differ(told: Sequence[Sequence[str | None]]) -> None:
    """Raise ConfigError when two ranks told of the same GPU; each told its host and GPU, in rank order, None for the
    CPU. Hosts may be containers of one machine, so it is the GPU that counts."""
    ranks: dict[str, list[str]] = {}
    hosts: dict[str, str | None] = {}
    for rank, (name, gpu) in enumerate(told):
        if gpu is not None:
            ranks.setdefault(gpu, []).append(str(rank))
            hosts.setdefault(gpu, name)
    for gpu, sharing in ranks.items():
        if len(sharing) > 1:
            host = hosts[gpu]
            raise ConfigError(
                f"Ranks {', '.join(sharing)} on host {host!r} compute on the same GPU, {gpu}. "
                "Start one rank per GPU, or use device='cpu'."
            )


def _default_kind() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
