"""Collect the host and software configuration of one rank."""

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
from unitrain.processes import usable_cores
from unitrain.torch_compat import transport_versions

# Prefixes and names of environment variables that configure the libraries.
_VARIABLE_PREFIXES = (
    "NCCL_", "GLOO_", "HOROVOD_", "TORCH_", "OMP_", "MKL_", "CUDA_", "UCX_", "FI_", "UNITRAIN_",
    "OMPI_MCA_oob_tcp_if_",  # set by mpirun if its network interfaces are selected
)  # fmt: skip
_VARIABLE_NAMES = ("PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX")
_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_PROGRAMS = ("torchrun", "horovodrun", "mpirun", "mpiexec", "srun", "ssh")
_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU visible to torch, with its memory in bytes. `uuid` identifies the hardware."""

    name: str
    memory: int
    uuid: str


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The host and software configuration of one rank. Sizes are in bytes. Unknown values are None.

    `machine` identifies the running kernel, even across containers with different names. `name_addresses` are the
    addresses to which the host's own name resolves, and `cores` the core numbers available to this process. `horovod`
    is None if Horovod is not installed, and on all ranks except the first per host. `open_files` and `locked_memory`
    are limits; without a limit, they are -1 and None. `has_job_key` is true if this process signs its messages.
    """

    host: str
    rank: int
    local_rank: int
    launcher: str
    evidence: tuple[str, ...]
    machine: str | None
    name_addresses: tuple[str, ...]
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
    def from_dict(cls, data: Mapping[str, Any]) -> Facts:
        """Create facts from the output of `as_dict`, which may have been converted to JSON and back."""
        gpus = tuple(Gpu(**gpu) for gpu in data["gpus"])
        tuple_fields = {name: tuple(data[name]) for name in ("evidence", "name_addresses", "cores")}
        return cls(**{**data, **tuple_fields, "gpus": gpus})

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        return dataclasses.asdict(self)


def collect_facts(rank_info: RankInfo) -> Facts:
    """Collect the facts of this process. Imports torch and, on one rank per host, Horovod, which takes seconds."""
    import torch

    inherited = environment.copy()
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    search_path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", "")])
    programs = {name: shutil.which(name, path=search_path) for name in _PROGRAMS}
    return Facts(
        host=socket.gethostname(),
        rank=rank_info.rank,
        local_rank=rank_info.local_rank,
        launcher=rank_info.launcher,
        evidence=rank_info.evidence,
        machine=_read_boot_id(),
        name_addresses=_resolve_host_name(socket.gethostname()),
        interfaces=interfaces(),
        python=platform.python_version(),
        executable=sys.executable,
        unitrain=unitrain.__version__,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        transports=transport_versions(),
        gpus=tuple(_detect_gpus()),
        nvidia_driver=_DRIVER.exists(),
        horovod=_inspect_horovod() if rank_info.local_rank == 0 else None,
        cores=usable_cores(),
        memory=_read_memory_size(),
        shared_memory=_file_system_size("/dev/shm"),
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
            if (name.startswith(_VARIABLE_PREFIXES) or name in _VARIABLE_NAMES)
            and not any(word in name for word in _SECRET_WORDS)
        },
    )


def _read_boot_id() -> str | None:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None


def _resolve_host_name(name: str) -> tuple[str, ...]:
    try:
        address_infos = socket.getaddrinfo(name, None, socket.AF_INET)
    except OSError:
        return ()
    return tuple(sorted({str(entry[4][0]) for entry in address_infos}))


def _detect_gpus() -> list[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [Gpu(name=gpu.name, memory=gpu.total_memory, uuid=str(gpu.uuid)) for gpu in properties]


def _inspect_horovod() -> dict[str, Any] | None:
    report = check.inspect()
    return None if report.folder is None else report.as_dict()


def _read_memory_size() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _file_system_size(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(path).total
    return None
