"""List the missing build requirements, each with a command or option as a fix."""

from __future__ import annotations

import re
from collections.abc import Iterator

from unitrain.horovod_wheel.machine import Machine, Tool

MIN_COMPILER_VERSION = 10  # the first g++ and clang++ with -std=c++20
MIN_CMAKE_VERSION = (3, 18)
MIN_PIP_TOOLKIT_VERSION = 13  # NVIDIA's pip wheels for CUDA 12 do not contain nvcc

_PACKAGES = {
    "apt-get": {"compiler": "g++", "make": "make", "mpi": "openmpi-bin libopenmpi-dev", "headers": "python3-dev"},
    "dnf": {"compiler": "gcc-c++", "make": "make", "mpi": "openmpi-devel", "headers": "python3-devel"},
    "yum": {"compiler": "gcc-c++", "make": "make", "mpi": "openmpi-devel", "headers": "python3-devel"},
    "conda": {"compiler": "cxx-compiler", "make": "make", "mpi": "openmpi-mpicxx", "headers": "python"},
}


def install_command(machine: Machine, requirement: str) -> str:
    """Return the command that installs `requirement`, such as "compiler", with the package manager of this machine, by
    default apt-get.

    The command does not use sudo if the user is root, because containers rarely contain sudo.
    """
    manager = machine.package_manager or "apt-get"
    channel = "-y -c conda-forge " if manager == "conda" else "-y "
    sudo = "" if machine.is_root or manager == "conda" else "sudo "
    return f"{sudo}{manager} install {channel}{_PACKAGES[manager][requirement]}"


def find_toolkit(machine: Machine) -> Tool | None:
    """Return a toolkit with torch's CUDA major version, preferably also the same minor version; None if there is none.

    With other major versions, Horovod compiles but cannot be loaded.
    """
    cuda = machine.torch.cuda or ""
    same_major = [tool for tool in machine.toolkits if tool.version.split(".")[0] == cuda.split(".")[0]]
    return next((tool for tool in same_major if tool.version == cuda), same_major[0] if same_major else None)


def pip_has_toolkit(machine: Machine) -> bool:
    """Return whether NVIDIA's pip wheels contain a complete compiler for the CUDA version of torch."""
    cuda = machine.torch.cuda
    return cuda is not None and int(cuda.split(".")[0]) >= MIN_PIP_TOOLKIT_VERSION


def is_old_cmake(cmake: Tool) -> bool:
    """Return whether this cmake is too old for C++20 and current CUDA versions."""
    return tuple(map(int, re.findall(r"\d+", cmake.version)[:2])) < MIN_CMAKE_VERSION


def missing_requirements(machine: Machine, *, mpi: bool, cuda: bool) -> Iterator[str]:
    """Yield the missing requirements of a build with these features."""
    if "pip" not in machine.modules:
        yield (
            f"{machine.python} has no pip, which downloads and builds Horovod. "
            f"Add it with: {machine.python} -m ensurepip --upgrade   (in a uv environment: uv pip install pip)"
        )
    if not machine.has_python_headers:
        yield (
            f"The C headers of {machine.python} (Python.h) were not found. "
            f"Install them with: {install_command(machine, 'headers')}"
        )
    yield from _missing_compiler(machine)
    if machine.make is None:
        yield f"No make was found on PATH. Install it with: {install_command(machine, 'make')}"
    if mpi and machine.mpi is None:
        yield (
            "--with-mpi needs mpicxx, which is not on PATH. "
            f"Install MPI with: {install_command(machine, 'mpi')}   (on a cluster: module load openmpi), "
            "or omit --with-mpi: the Gloo controller does not need MPI."
        )
    if cuda:
        yield from missing_cuda_requirements(machine)


def _missing_compiler(machine: Machine) -> Iterator[str]:
    line = install_command(machine, "compiler")
    if machine.compiler is None and machine.named_compiler is not None:
        yield (
            f"No C++ compiler was found: CXX is {machine.named_compiler!r}, but it must be one program, without "
            f"options. Use: CXX=g++ unitrain horovod build, or install a compiler with: {line}"
        )
        return
    if machine.compiler is None:
        yield f"No C++ compiler was found (CXX, c++, g++ or clang++ on PATH). Install one with: {line}"
        return
    versions = re.findall(r"\b(\d+)\.\d+\.\d+\b", machine.compiler.version)
    if versions and int(versions[-1]) < MIN_COMPILER_VERSION:
        yield (
            f"The C++ compiler {machine.compiler.path} is {machine.compiler.version!r}, but torch's headers need "
            f"C++20: g++ {MIN_COMPILER_VERSION} or newer. Install one with: {line}   (on a cluster: module load gcc), "
            "then select it: CXX=g++-12 unitrain horovod build"
        )


def missing_cuda_requirements(machine: Machine) -> Iterator[str]:
    """Yield the missing requirements of GPU operations, regardless of the request."""
    torch = machine.torch
    if torch.cuda is None:
        yield (
            f"--with-cuda needs a torch with CUDA, but torch {torch.version} was built without CUDA. "
            "Install a torch with CUDA (pip install torch), or omit --with-cuda."
        )
        return
    if find_toolkit(machine) is None and not pip_has_toolkit(machine):
        other_toolkits = ", ".join(f"{tool.version} in {tool.path}" for tool in machine.toolkits) or "none"
        yield (
            f"GPU operations need a CUDA {torch.cuda} toolkit (nvcc and headers), the version torch {torch.version} "
            f"was built for; found: {other_toolkits}. Install it with: conda install -c nvidia "
            f"cuda-toolkit={torch.cuda}   (or NVIDIA's package cuda-toolkit-{torch.cuda.replace('.', '-')}), set its "
            f"folder with CUDA_HOME=/usr/local/cuda-{torch.cuda}, or use --without-cuda for CPU operations."
        )
    if machine.nccl is None:
        yield (
            f"GPU operations need the headers of NCCL, which were not found for torch {torch.version}. Install them "
            f"with: pip install nvidia-nccl-cu{torch.cuda.split('.')[0]}, set a folder with include/ and lib/: "
            "HOROVOD_NCCL_HOME=..., or use --without-cuda for CPU operations."
        )
