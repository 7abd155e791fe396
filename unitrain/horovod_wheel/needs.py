"""What a build lacks on this machine, each as one sentence and the line to paste or the flag to drop."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unitrain.horovod_wheel.machine import Machine, Tool

OLDEST_COMPILER = 10  # the first g++ and clang++ that take -std=c++20
OLDEST_CMAKE = (3, 18)
FIRST_PIP_TOOLKIT = 13  # NVIDIA's pip wheels for CUDA 12 lack nvcc itself

_PACKAGES = {
    "apt-get": {"compiler": "g++", "make": "make", "mpi": "openmpi-bin libopenmpi-dev", "headers": "python3-dev"},
    "dnf": {"compiler": "gcc-c++", "make": "make", "mpi": "openmpi-devel", "headers": "python3-devel"},
    "yum": {"compiler": "gcc-c++", "make": "make", "mpi": "openmpi-devel", "headers": "python3-devel"},
    "conda": {"compiler": "cxx-compiler", "make": "make", "mpi": "openmpi-mpicxx", "headers": "python"},
}


def install_line(machine: Machine, part: str) -> str:
    """The command that installs `part` with this machine's package manager (Debian's where there is none).

    Without sudo for root: containers rarely have it.
    """
    manager = machine.package_manager or "apt-get"
    channel = "-y -c conda-forge " if manager == "conda" else "-y "
    sudo = "" if machine.root or manager == "conda" else "sudo "
    return f"{sudo}{manager} install {channel}{_PACKAGES[manager][part]}"


def fitting_toolkit(machine: Machine) -> Tool | None:
    """The toolkit of torch's CUDA major version, the same minor preferred; others compile and then fail to load."""
    cuda = machine.torch.cuda or ""
    same_major = [tool for tool in machine.toolkits if tool.version.split(".")[0] == cuda.split(".")[0]]
    return next((tool for tool in same_major if tool.version == cuda), same_major[0] if same_major else None)


def pip_has_toolkit(machine: Machine) -> bool:
    """Whether NVIDIA's pip wheels hold a whole compiler for torch's CUDA."""
    cuda = machine.torch.cuda
    return cuda is not None and int(cuda.split(".")[0]) >= FIRST_PIP_TOOLKIT


def old_cmake(cmake: Tool) -> bool:
    """Whether this cmake cannot build for C++20 and today's CUDA."""
    return tuple(map(int, re.findall(r"\d+", cmake.version)[:2])) < OLDEST_CMAKE


def missing(machine: Machine, *, mpi: bool, cuda: bool) -> Iterator[str]:
    """Everything that stands between this machine and a build with these parts; nothing when it can start."""
    if "pip" not in machine.modules:
        yield (
            f"{machine.python} has no pip, which fetches and builds Horovod. "
            f"Add it with: {machine.python} -m ensurepip --upgrade   (in a uv environment: uv pip install pip)"
        )
    if not machine.python_headers:
        yield (
            f"The C headers of {machine.python} (Python.h) were not found. "
            f"Install them with: {install_line(machine, 'headers')}"
        )
    yield from _compiler(machine)
    if machine.make is None:
        yield f"No make was found on PATH. Install it with: {install_line(machine, 'make')}"
    if mpi and machine.mpi is None:
        yield (
            "--with-mpi was asked for, and there is no mpicxx on PATH. "
            f"Install MPI with: {install_line(machine, 'mpi')}   (on a cluster: module load openmpi), "
            "or drop --with-mpi: the Gloo controller needs no MPI."
        )
    if cuda:
        yield from missing_for_cuda(machine)


def _compiler(machine: Machine) -> Iterator[str]:
    line = install_line(machine, "compiler")
    if machine.compiler is None:
        yield f"No C++ compiler was found (CXX, c++, g++ or clang++ on PATH). Install one with: {line}"
        return
    found = re.findall(r"\b(\d+)\.\d+\.\d+\b", machine.compiler.version)
    if found and int(found[-1]) < OLDEST_COMPILER:
        yield (
            f"The C++ compiler {machine.compiler.path} is {machine.compiler.version!r}, and torch's headers need "
            f"C++20: g++ {OLDEST_COMPILER} or newer. Install one with: {line}   (on a cluster: module load gcc), "
            "then name it: CXX=g++-12 unitrain horovod build"
        )


def missing_for_cuda(machine: Machine) -> Iterator[str]:
    """What GPU operations lack here, whether or not they were asked for."""
    torch = machine.torch
    if torch.cuda is None:
        yield (
            f"--with-cuda was asked for, and torch {torch.version} was built without CUDA. "
            "Install a torch with CUDA (pip install torch), or drop --with-cuda."
        )
        return
    if fitting_toolkit(machine) is None and not pip_has_toolkit(machine):
        others = ", ".join(f"{tool.version} in {tool.path}" for tool in machine.toolkits) or "none"
        yield (
            f"GPU operations need a CUDA {torch.cuda} toolkit (nvcc and headers), the version torch {torch.version} "
            f"was built for; found: {others}. Install it with: conda install -c nvidia cuda-toolkit={torch.cuda}   (or "
            f"NVIDIA's package cuda-toolkit-{torch.cuda.replace('.', '-')}), name its folder with "
            f"CUDA_HOME=/usr/local/cuda-{torch.cuda}, or use --without-cuda for CPU operations."
        )
    if machine.nccl is None:
        yield (
            f"GPU operations need the headers of NCCL, and none were found beside torch {torch.version}. Install them "
            f"with: pip install nvidia-nccl-cu{torch.cuda.split('.')[0]}, name a folder with include/ and lib/: "
            "HOROVOD_NCCL_HOME=..., or use --without-cuda for CPU operations."
        )
