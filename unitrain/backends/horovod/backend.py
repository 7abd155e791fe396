"""Horovod, through its process group: everything above the collectives is the ddp backend's own code."""

from __future__ import annotations

from datetime import timedelta
from typing import Self

import horovod.torch as hvd
import torch
import torch.distributed as dist

from unitrain.backends import checks
from unitrain.backends.base import StartOptions
from unitrain.backends.horovod.process_group import NAME, register_backend
from unitrain.backends.horovod.runtime import CYCLE, FUSION, meet_with_horovod
from unitrain.backends.process_group import ProcessGroupBackend
from unitrain.bootstrap import environment
from unitrain.bootstrap.devices import check_gpus, choose_device
from unitrain.bootstrap.network import interface_of
from unitrain.bootstrap.rendezvous import Rendezvous
from unitrain.errors import BackendUnavailableError, ConfigError


class HorovodBackend(ProcessGroupBackend):
    """Horovod's collectives, moved by Gloo, MPI or NCCL as it was built and started.

    Horovod itself runs on after `shutdown`, until the process exits, and a later backend finds it running: MPI can be
    started only once in a process, and horovodrun's rendezvous gives a second start the addresses of the first.
    """

    name = "horovod"
    tunables = (*ProcessGroupBackend.tunables, CYCLE, FUSION)

    @classmethod
    def start(cls, options: StartOptions) -> Self:
        """Raise ConfigError for a transport that this Horovod does not use here and for two ranks on one GPU,
        BackendUnavailableError for a GPU where this Horovod moves tensors between CPUs only."""
        checks.check_no_group()
        rank_info = options.rank_info
        device = choose_device(options.device, rank_info.local_rank)
        _check_operations(device)
        rendezvous = meet_with_horovod(rank_info, options.timeout)
        check_gpus(rendezvous, device, options.device)
        transport = _transport(device)
        if options.transport not in (None, transport):
            raise ConfigError(
                f"Transport {options.transport!r} was asked for, but Horovod moves data by {transport!r} here. "
                "See what it can do with: unitrain horovod check"
            )
        register_backend()
        dist.init_process_group(
            NAME,
            store=dist.PrefixStore("horovod", rendezvous.store),
            rank=rank_info.rank,
            world_size=rank_info.size,
            timeout=options.timeout,
        )
        return cls(rendezvous, device, transport, _control_group(rendezvous, options.timeout))


def _control_group(rendezvous: Rendezvous, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return a Gloo group of all ranks for what is exchanged before collectives. All ranks call it.

    Horovod looks for work once per cycle, and in the order in which it was issued: an exchange of 1 KB takes it 1 ms,
    and longer while gradients are being reduced.
    """
    if not dist.is_gloo_available():
        return None
    own = rendezvous.own_address
    interface = environment.setting("HOROVOD_GLOO_IFACE") or (interface_of(own) if own else None)
    if interface:
        environment.export_defaults({"GLOO_SOCKET_IFNAME": interface})
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)  # type: ignore[assignment]
    return group


def _check_operations(device: torch.device) -> None:
    if device.type == "cuda" and not (hvd.nccl_built() or hvd.cuda_built() or hvd.rocm_built()):
        raise BackendUnavailableError(
            f"This rank computes on {device}, but Horovod was built without GPU operations. "
            "Build it with: unitrain horovod build --with-cuda, or use device='cpu'."
        )


def _transport(device: torch.device) -> str:
    if device.type == "cuda" and hvd.nccl_built():
        return "nccl"
    return "gloo" if hvd.gloo_enabled() else "mpi"
