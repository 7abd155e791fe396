"""From a machine and a wish to a `BuildPlan`: plain data that `--dry-run` prints and `build` runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unitrain.errors import HorovodBuildError
from unitrain.horovod_wheel import needs, patches
from unitrain.horovod_wheel.machine import Machine, Tool

HOROVOD = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
# The newest that built it here; an older one is as good.
TOOLS = {"setuptools": "setuptools>=64,<85", "wheel": "wheel", "packaging": "packaging"}
CMAKE = "cmake>=3.26,<5"
# Measured on 2 cores: 238 s of processor time (3 % more with NCCL), and what no second core helps with.
PARALLEL_SECONDS, SERIAL_SECONDS = 220.0, 25.0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for; None lets the machine decide."""

    cache: Path
    mpi: bool | None = None
    cuda: bool | None = None
    jobs: int | None = None
    install: bool = True


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step: a command, or without one the function of that name in `build`; skipped where `unless` exists.

    `fills` is a folder that builds with other keys use too: it is locked, emptied before the step, and complete when it
    contains `unless`, which is created after the step.
    """

    name: str
    says: str
    argv: tuple[str, ...] = ()
    unless: str | None = None
    fills: Path | None = None


@dataclass(frozen=True, kw_only=True)
class BuildPlan:
    """Everything a build does, decided before it starts; `facts` say what the wheel fits and make up its key."""

    key: str
    facts: Mapping[str, Any]
    settings: Mapping[str, str]
    first_on_path: tuple[str, ...]
    python_path: tuple[str, ...]
    folder: Path
    wheel: Path
    sdist: Path
    toolkit: str | None
    nccl: str | None
    build_steps: tuple[Step, ...]
    install_steps: tuple[Step, ...]
    notes: tuple[str, ...]
    usual_seconds: float

    @property
    def work(self) -> Path:
        """The scratch folder of this build, removed when it succeeds."""
        return self.folder / "work"

    @property
    def source(self) -> Path:
        """Where the sdist is unpacked."""
        return self.work / f"horovod-{HOROVOD}"

    @property
    def log(self) -> Path:
        """The whole output of the latest build of this wheel; kept, also when it fails."""
        return self.folder / "build.log"

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment of every command: the inherited one, less what would steer the build past the plan."""
        kept = {name: value for name, value in inherited.items() if name[:8] != "HOROVOD_" and name != "CCL_ROOT"}
        for name, first in (("PATH", self.first_on_path), ("PYTHONPATH", self.python_path)):
            if first:
                kept[name] = os.pathsep.join([*first, *filter(None, [kept.get(name)])])
        return {**kept, **self.settings}


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where wheels are kept: UNITRAIN_CACHE, else XDG_CACHE_HOME/unitrain, else ~/.cache/unitrain; then `horovod`."""
    if root := environment.get("UNITRAIN_CACHE"):
        return Path(root).expanduser() / "horovod"
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "unitrain" / "horovod"


def make(machine: Machine, request: Request) -> BuildPlan:
    """Decide the whole build, or raise HorovodBuildError with everything that is missing at once."""
    mpi = machine.mpi is not None if request.mpi is None else request.mpi
    cuda = _cuda_by_default(machine) if request.cuda is None else request.cuda
    if problems := list(needs.missing(machine, mpi=mpi, cuda=cuda)):
        raise HorovodBuildError("\n".join(problems))
    toolkit = needs.fitting_toolkit(machine) if cuda else None
    facts = _facts(machine, mpi=mpi, cuda=cuda, toolkit=toolkit)
    key = _key(facts)
    folder = request.cache / key
    jobs = request.jobs or machine.jobs
    pip_toolkit = request.cache / f"cuda-{machine.torch.cuda}"
    from_pip = cuda and toolkit is None
    home = str(pip_toolkit / "nvidia" / f"cu{str(machine.torch.cuda).split('.')[0]}") if from_pip else ""
    home = toolkit.path if toolkit else home
    tools = tuple(_absent_tools(machine))
    cmake = str(folder / "work" / "tools" / "cmake" / "data" / "bin" / "cmake")
    wheel = folder / f"horovod-{HOROVOD}-{machine.python_tag}-{machine.platform}.whl"
    sdist = request.cache / "sdist" / f"horovod-{HOROVOD}.tar.gz"
    return BuildPlan(
        key=key,
        facts=facts,
        settings=_settings(machine, mpi=mpi, home=home, nccl=str(folder / "work" / "nccl"), jobs=jobs)
        | {"HOROVOD_CMAKE": cmake if CMAKE in tools or machine.cmake is None else machine.cmake.path},
        first_on_path=(f"{home}/bin",) if home else (),
        python_path=(str(folder / "work" / "tools"),) if tools else (),
        folder=folder,
        wheel=wheel,
        sdist=sdist,
        toolkit=home or None,
        nccl=machine.nccl.path if cuda and machine.nccl else None,
        build_steps=tuple(_build_steps(machine, tools, folder, sdist, pip_toolkit if from_pip else None, cuda)),
        install_steps=tuple(_install_steps(machine, wheel)) if request.install else (),
        notes=tuple(_notes(machine, request, mpi=mpi, cuda=cuda, from_pip=from_pip)),
        usual_seconds=SERIAL_SECONDS + PARALLEL_SECONDS / jobs,
    )


def _cuda_by_default(machine: Machine) -> bool:
    """GPU operations only where a GPU is to be seen and everything for them is there."""
    return machine.torch.visible_gpus > 0 and not list(needs.missing_for_cuda(machine))


def _facts(machine: Machine, *, mpi: bool, cuda: bool, toolkit: Tool | None) -> dict[str, Any]:
    torch = machine.torch
    return {
        "horovod": HOROVOD,
        "torch": torch.version,
        "cxx11_abi": torch.cxx11_abi,
        "python": machine.python_tag,
        "platform": f"{machine.platform} {machine.libc}",
        "compiler": machine.compiler.version if machine.compiler else "",
        "controllers": ["gloo", "mpi"] if mpi else ["gloo"],
        "mpi": machine.mpi.version if mpi and machine.mpi else None,
        "cuda": (toolkit.version if toolkit else f"{torch.cuda} (pip)") if cuda else None,
        "nccl": machine.nccl.version if cuda and machine.nccl else None,
        "architectures": list(torch.architectures) if cuda else [],
        "mended": list(patches.mending()),
        "patches": patches.digest(),
        # Left out where none is set, so that those wheels keep their keys.
        **({"flags": dict(machine.flags), "cpu": machine.cpu} if machine.flags else {}),
    }


def _key(facts: Mapping[str, Any]) -> str:
    """Readable for whoever looks into the cache, exact through the digest of every fact."""
    parts = "-".join([*facts["controllers"], *(["nccl"] if facts["nccl"] else [])])
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return f"torch{facts['torch']}-{facts['python'].split('-')[0]}-{parts}-{digest}"


def _settings(machine: Machine, *, mpi: bool, home: str, nccl: str, jobs: int) -> dict[str, str]:
    settings = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if mpi else "HOROVOD_WITHOUT_MPI": "1",
        # Found by accident in some toolkits and not in others; the same flags must give the same wheel.
        "HOROVOD_WITHOUT_NVTX": "1",
        # CMake 4 refuses the 2.8.12 that the bundled gloo asks for; older ones ignore the variable.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        # Horovod passes make's own arguments to whatever generator is set.
        "CMAKE_GENERATOR": "Unix Makefiles",
        "CXX": machine.compiler.path if machine.compiler else "",
        "MAKEFLAGS": f"-j{jobs}",
    }
    if home:
        settings |= {
            "HOROVOD_GPU_OPERATIONS": "NCCL",
            "HOROVOD_NCCL_HOME": nccl,
            "HOROVOD_NCCL_LINK": "SHARED",
            "HOROVOD_CUDA_HOME": home,
            "CUDA_HOME": home,
            "CUDAToolkit_ROOT": home,
            "HOROVOD_BUILD_CUDA_CC_LIST": ",".join(arch.replace(".", "") for arch in machine.torch.architectures),
        }
    return settings


def _absent_tools(machine: Machine) -> Iterator[str]:
    """What the build needs from pip and this Python lacks; it goes into the build's own folder, not the user's."""
    for module, requirement in TOOLS.items():
        if module not in machine.modules:
            yield requirement
    if machine.cmake is None or needs.old_cmake(machine.cmake):
        yield CMAKE


def _build_steps(
    machine: Machine, tools: tuple[str, ...], folder: Path, sdist: Path, pip_toolkit: Path | None, cuda: bool
) -> Iterator[Step]:
    work = folder / "work"
    pip = (machine.python, "-m", "pip", "--disable-pip-version-check", "--no-input")
    if tools:
        argv = (*pip, "install", "--target", str(work / "tools"), *tools)
        yield Step(name="tools", says="Fetch the build tools this Python lacks, into the build's own folder", argv=argv)
    exact = ("--no-deps", "--no-build-isolation", "--no-binary", "horovod")
    argv = (*pip, "download", *exact, "--dest", str(sdist.parent), f"horovod=={HOROVOD}")
    yield Step(name="download", says=f"Fetch the sdist of Horovod {HOROVOD}", argv=argv, unless=str(sdist))
    yield Step(name="unpack", says=f"Check its sha256 ({SDIST_SHA256[:12]}...) and unpack it")
    yield Step(name="patch", says=f"Change the sources: {', '.join(change.name for change in patches.CHANGES)}")
    if pip_toolkit is not None:
        argv = (*pip, "install", "--target", str(pip_toolkit), f"cuda-toolkit[nvcc,cccl]=={machine.torch.cuda}.*")
        says = f"Fetch NVIDIA's pip wheels of the CUDA {machine.torch.cuda} compiler (about 100 MB)"
        yield Step(name="toolkit", says=says, argv=argv, unless=str(pip_toolkit / "complete"), fills=pip_toolkit)
    if cuda:
        yield Step(name="link", says="Link the NCCL that torch uses under the names that CMake looks for")
    argv = (
        *pip,
        "wheel",
        "-v",
        "--no-deps",
        "--no-build-isolation",
        "--no-cache-dir",
        "--wheel-dir",
        str(work / "out"),
    )
    yield Step(name="wheel", says="Compile and pack the wheel", argv=(*argv, str(work / f"horovod-{HOROVOD}")))
    yield Step(name="store", says="Put the wheel into the cache")


def _install_steps(machine: Machine, wheel: Path) -> Iterator[Step]:
    install = (machine.python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install")
    argv = (*install, "--no-deps", "--force-reinstall", str(wheel))
    yield Step(name="install", says="Install the wheel over any other Horovod", argv=argv)
    yield Step(name="dependencies", says="Install what it needs and is missing", argv=(*install, str(wheel)))
    yield Step(name="check", says="Import it and ask what it can do")


def _notes(machine: Machine, request: Request, *, mpi: bool, cuda: bool, from_pip: bool) -> Iterator[str]:
    """Each choice that the machine made instead of the user, and the flag that makes it otherwise."""
    if machine.flags:
        names = " ".join(machine.flags)
        fit = " The wheel runs on processors like this one only." if machine.cpu else ""
        yield f"Compiled with {names} of the environment, as another wheel.{fit} To leave them out: unset {names}"
    if request.mpi is None and not mpi:
        yield f"No MPI controller: there is no mpicxx on PATH. To have it: {needs.install_line(machine, 'mpi')}"
    if from_pip:
        yield f"No CUDA {machine.torch.cuda} toolkit on this machine: NVIDIA's pip wheels are used for the build alone."
    if request.cuda is None and not cuda and machine.torch.cuda:
        if machine.torch.visible_gpus == 0:
            yield "CPU operations only: no GPU is visible here. For GPU nodes that share this wheel: --with-cuda"
        else:
            yield from (f"CPU operations only. {reason}" for reason in needs.missing_for_cuda(machine))
