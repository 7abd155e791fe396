"""Which device a rank computes on."""

from __future__ import annotations

import torch

from unitrain.errors import ConfigError


def choose_device(requested: str | torch.device | None, local_rank: int) -> torch.device:
    """Return the device for the rank numbered `local_rank` on its host, and make it current when it is a GPU.

    With nothing requested, a GPU where there is one, else the CPU. A launcher that shows each process a single GPU is
    taken at its word. Raises ConfigError when the host has fewer GPUs than ranks.
    """
    device = torch.device(requested) if requested is not None else _default_kind()
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


def _default_kind() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
