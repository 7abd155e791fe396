"""The backend `ddp`: torch.distributed, by default with NCCL between GPUs and Gloo between CPUs."""

from __future__ import annotations

import torch
import torch._dynamo  # before init_process_group: a later import, as in an optimizer, would keep the group alive
import torch.distributed as dist
from typing_extensions import Self

from unitrain.backends import checks
from unitrain.backends.base import StartOptions
from unitrain.backends.process_group import (
    NCCL_TIMEOUT_MARGIN,
    ProcessGroupBackend,
    destroying_default_group_on_error,
)
from unitrain.bootstrap import environment
from unitrain.bootstrap.devices import choose_device, gather_and_check_gpus
from unitrain.bootstrap.network import interface_with_address
from unitrain.bootstrap.rendezvous import Rendezvous, connect_ranks
from unitrain.errors import ConfigError, did_you_mean
from unitrain.torch_compat import default_process_group, set_transport_timeout

_TRANSPORTS = ("gloo", "nccl", "mpi")
_GLOO_THREADS = 2  # of torch's Gloo process group


class DDPBackend(ProcessGroupBackend):
    """Backend that uses the collectives of torch.distributed, and DistributedDataParallel to reduce gradients."""

    name = "ddp"
    transports = _TRANSPORTS

    @classmethod
    def start(cls, options: StartOptions) -> Self:
        """Connect the ranks, and return the backend. Raises ConfigError if the transport is unknown, is missing from
        this torch build, or does not support the device, if two ranks use the same GPU, or if this process already has
        a process group.
        """
        checks.check_no_default_group()
        rank_info = options.rank_info
        device = choose_device(options.device, rank_info.local_rank)
        transport = options.transport or ("nccl" if device.type == "cuda" else "gloo")
        _check_transport(transport, device)
        rendezvous = connect_ranks(rank_info, options.timeout, "ddp")
        gather_and_check_gpus(rendezvous, device, options.device)
        if (own := rendezvous.own_address) and (interface := interface_with_address(own)):
            environment.export_defaults({"GLOO_SOCKET_IFNAME": interface})
        dist.init_process_group(
            # Consistency checks always exchange CPU tensors over Gloo.
            f"cpu:gloo,cuda:{transport}" if device.type == "cuda" else transport,
            store=dist.PrefixStore("ddp", rendezvous.store),
            rank=rank_info.rank,
            world_size=rank_info.size,
            timeout=options.timeout,
        )
        with destroying_default_group_on_error():
            # With a separate group, consistency checks do not wait for gradients that are being reduced, and their
            # messages cannot be matched with those of other collectives. NCCL does not need a separate group, because
            # its collectives are separate from Gloo's.
            control = dist.new_group(backend="gloo", timeout=options.timeout) if transport != "nccl" else None
            backend = cls(rendezvous, device, transport, control)  # type: ignore[arg-type]
            if transport == "nccl":
                set_transport_timeout(default_process_group(), device, options.timeout + NCCL_TIMEOUT_MARGIN)
        return backend

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        transport: str,
        control_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(rendezvous, device, transport, control_group)
        self._waits_on_stream = transport == "nccl"
        self.max_in_flight = _GLOO_THREADS if transport == "gloo" else 1


def _check_transport(transport: str, device: torch.device) -> None:
    if transport not in _TRANSPORTS:
        raise ConfigError(
            f"Unknown transport {transport!r}. {did_you_mean(transport, _TRANSPORTS)}"
            f"Available: {', '.join(_TRANSPORTS)}."
        )
    built = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    if not built[transport]:
        available = ", ".join(name for name, is_built in built.items() if is_built)
        raise ConfigError(f"Transport {transport!r} is not built into this torch. Use one of: {available}.")
    if transport == "nccl" and device.type != "cuda":
        raise ConfigError("Transport 'nccl' communicates between GPUs, but this rank computes on the CPU. Use 'gloo'.")
