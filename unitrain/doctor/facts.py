"""What one rank sees of its host and its software."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import unitrain
from unitrain.bootstrap import environment
from unitrain.bootstrap.authentication import has_key
from unitrain.bootstrap.environment import RankInfo
from unitrain.bootstrap.network import interfaces
from unitrain.horovod_wheel import check
from unitrain.torch_compat import transports

# What libraries read beside code, by the start of its name.
_TELLING = ("NCCL_", "GLOO_", "HOROVOD_", "TORCH_", "OMP_", "MKL_", "CUDA_", "UCX_", "FI_", "UNITRAIN_")
_TELLING_WHOLE = ("PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_PROGRAMS = ("torchrun", "horovodrun", "mpirun", "mpiexec", "srun", "ssh")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that torch sees: bytes of memory, and the same `uuid` for the same piece of hardware everywhere."""

    name: str
    memory: int
    uuid: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One rank's host and software; sizes in bytes, times in seconds, None for what cannot be known.

    `machine` is the same for processes on one running kernel, also in containers of different names. `name_leads_to`
    are the addresses that the host's own name resolves to, `cores` the numbers of those that this process may run on.
    `horovod` is None where it is not installed, and on all but
    the first rank of a host, which asks for all. `has_job_key` is whether this process signs its messages.
    """

    host: str
    rank: int
    local_rank: int
    launcher: str
    evidence: tuple[str, ...]
    machine: str | None
    name_leads_to: tuple[str, ...]
    interfaces: Mapping[str, str]
    python: str
    executable: str
    unitrain: str
    torch: str
    torch_cuda: str | None
    transports: Mapping[str, str]
    gpus: tuple[Gpu, ...]
    nvidia_driver: bool
    horovod: Mapping[str, Any] | None
    cores: tuple[int, ...]
    memory: int | None
    shared_memory: int | None
    open_files: int
    locked_memory: int | None
    infiniband: bool
    folder: str
    folder_free: int
    programs: Mapping[str, str]
    variables: Mapping[str, str]
    has_job_key: bool

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Facts:
        """Return what `as_json` made plain."""
        gpus = tuple(Gpu(**gpu) for gpu in told["gpus"])
        tuples = {name: tuple(told[name]) for name in ("evidence", "name_leads_to", "cores")}
        return cls(**{**told, **tuples, "gpus": gpus})

    def as_json(self) -> dict[str, Any]:
        """The facts as plain data."""
        return dataclasses.asdict(self)


def gather(rank_info: RankInfo) -> Facts:
    """Return what this process sees. It takes seconds: torch is imported, and on a host's first rank Horovod too."""
    import torch

    inherited = environment.copy()
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    searched = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")])
    programs = {name: shutil.which(name, path=searched) for name in _PROGRAMS}
    return Facts(
        host=socket.gethostname(),
        rank=rank_info.rank,
        local_rank=rank_info.local_rank,
        launcher=rank_info.launcher,
        evidence=rank_info.evidence,
        machine=_machine(),
        name_leads_to=_resolved(socket.gethostname()),
        interfaces=interfaces(),
        python=platform.python_version(),
        executable=sys.executable,
        unitrain=unitrain.__version__,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        transports=transports(),
        gpus=tuple(_gpus()),
        nvidia_driver=_DRIVER.exists(),
        horovod=_horovod() if rank_info.local_rank == 0 else None,
        cores=tuple(
            sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        ),
        memory=_memory(),
        shared_memory=_size("/dev/shm"),
        open_files=soft_files,
        locked_memory=None if soft_locked == resource.RLIM_INFINITY else soft_locked,
        infiniband=Path("/sys/class/infiniband").exists(),
        folder=str(Path.cwd()),
        folder_free=shutil.disk_usage(Path.cwd()).free,
        programs={name: path for name, path in programs.items() if path is not None},
        has_job_key=has_key(),
        variables={
            name: value
            for name, value in sorted(inherited.items())
            if (name.startswith(_TELLING) or name in _TELLING_WHOLE) and not any(word in name for word in _SECRET)
        },
    )


def _machine() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _resolved(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return ()
    return tuple(sorted({str(entry[4][0]) for entry in found}))


def _gpus() -> list[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return []
    told = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [Gpu(name=one.name, memory=one.total_memory, uuid=str(one.uuid)) for one in told]


def _horovod() -> dict[str, Any] | None:
    report = check.inspect()
    return None if report.folder is None else report.as_json()


def _cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _memory() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _size(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).total
    return None
