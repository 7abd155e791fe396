"""Build plans of `unitrain horovod build` on different machines, and the errors for missing requirements."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from horovod_machines import CPU_TORCH, CUDA_TORCH, GPU_TORCH, PLAIN, TOOLKIT, create_plan, replace_fields, step_names

from unitrain.errors import HorovodBuildError
from unitrain.horovod_wheel import machine, plan, requirements
from unitrain.horovod_wheel.machine import Machine, Tool
from unitrain.horovod_wheel.patches import PATCHES, patch_digest


def test_plan_without_a_gpu_has_cpu_operations_and_does_not_require_a_toolkit() -> None:
    decided = create_plan()
    assert decided.facts["controllers"] == ["gloo", "mpi"]
    assert decided.facts["cuda"] is None
    assert not {name for name in decided.settings if "CUDA" in name or "NCCL" in name}
    assert any("--with-cuda" in note for note in decided.notes)
    assert step_names(decided) == [
        *("download", "unpack", "patch", "wheel", "store"),
        *("install", "dependencies", "check"),
    ]


def test_nccl_is_enabled_if_a_gpu_is_visible_and_the_toolkit_matches() -> None:
    other = Tool(path="/opt/cuda-12.4", version="12.4")
    decided = create_plan(replace_fields(torch=GPU_TORCH, toolkits=(other, TOOLKIT)))
    assert decided.facts["nccl"] == "2.30.7"
    assert decided.settings["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert decided.settings["HOROVOD_CUDA_HOME"] == TOOLKIT.path
    assert decided.settings["HOROVOD_BUILD_CUDA_CC_LIST"] == "80,90"
    assert decided.environment({"PATH": "/usr/bin"})["PATH"] == "/opt/cuda-13.0/bin:/usr/bin"
    assert "link" in step_names(decided)


def test_toolkit_of_cuda_13_is_installed_by_pip_if_it_is_missing() -> None:
    decided = create_plan(cuda=True)
    toolkit = next(step for step in decided.build_steps if step.name == "toolkit")
    assert toolkit.argv[-1] == "cuda-toolkit[nvcc,cccl]==13.0.*"
    assert decided.settings["CUDA_HOME"] == "/cache/cuda-13.0/nvidia/cu13"
    assert step_names(decided).index("toolkit") < step_names(decided).index("wheel")


def test_missing_toolkit_of_cuda_12_is_reported_with_a_fix() -> None:
    old = replace_fields(torch=dataclasses.replace(GPU_TORCH, version="2.7.0+cu128", cuda="12.8"), toolkits=(TOOLKIT,))
    by_itself = create_plan(old)
    assert by_itself.facts["cuda"] is None
    assert any("CUDA 12.8 toolkit" in note for note in by_itself.notes)
    with pytest.raises(HorovodBuildError, match=r"13\.0 in /opt/cuda-13\.0.*cuda-toolkit-12-8.*--without-cuda"):
        create_plan(old, cuda=True)


@pytest.mark.parametrize(
    ("found", "request_options", "message"),
    [
        (replace_fields(compiler=None), {}, r"No C\+\+ compiler.*sudo apt-get install -y g\+\+"),
        (
            replace_fields(compiler=None, named_compiler="ccache g++"),
            {},
            r"CXX is 'ccache g\+\+', but it must be one program, without options\. Use: CXX=g\+\+ unitrain horovod",
        ),
        (
            replace_fields(compiler=Tool(path="/usr/bin/g++", version="g++ (GCC) 8.5.0 20210514 (Red Hat 8.5.0-10)")),
            {},
            "C.*CXX=",
        ),
        (replace_fields(make=None, package_manager="dnf"), {}, "No make was found.*sudo dnf install -y make"),
        (replace_fields(mpi=None), {"mpi": True}, "--with-mpi .*libopenmpi-dev.*omit --with-mpi"),
        (replace_fields(torch=CPU_TORCH), {"cuda": True}, r"2\.14\.1\+cpu was built without CUDA.*omit --with-cuda"),
        (replace_fields(nccl=None), {"cuda": True}, "pip install nvidia-nccl-cu13"),
        (replace_fields(modules=frozenset()), {}, "/venv/bin/python has no pip.*ensurepip"),
        (
            replace_fields(has_python_headers=False, package_manager="conda"),
            {},
            "Python.h.*conda install -y -c conda-forge python",
        ),
    ],
    ids=["compiler", "named compiler", "old compiler", "make", "mpi", "cuda", "nccl", "pip", "headers"],
)
def test_missing_requirement_is_reported_with_a_fix(
    found: Machine, request_options: dict[str, bool], message: str
) -> None:
    with pytest.raises(HorovodBuildError, match=message):
        create_plan(found, **request_options)


def test_commands_for_root_do_not_use_sudo() -> None:
    assert requirements.install_command(replace_fields(is_root=True), "make") == "apt-get install -y make"


def test_all_missing_requirements_are_reported_together() -> None:
    assert (
        len(
            list(
                requirements.missing_requirements(
                    replace_fields(compiler=None, make=None, mpi=None), mpi=True, cuda=False
                )
            )
        )
        == 3
    )


def test_missing_mpi_is_a_note_if_it_was_not_requested() -> None:
    decided = create_plan(replace_fields(mpi=None))
    assert decided.settings["HOROVOD_WITHOUT_MPI"] == "1"
    assert any("libopenmpi-dev" in note for note in decided.notes)


@pytest.mark.parametrize("cmake", [None, Tool(path="/usr/bin/cmake", version="3.13.4")], ids=["none", "old"])
def test_missing_or_old_build_tools_are_installed_into_the_build_folder(cmake: Tool | None) -> None:
    decided = create_plan(replace_fields(cmake=cmake, modules=frozenset({"pip", "wheel", "packaging"})))
    tools = decided.build_steps[0]
    assert tools.name == "tools"
    assert tools.argv[-3:] == (str(decided.work / "tools"), plan.BUILD_REQUIREMENTS["setuptools"], plan.CMAKE)
    assert decided.settings["HOROVOD_CMAKE"] == str(decided.work / "tools/cmake/data/bin/cmake")
    assert decided.environment({"PYTHONPATH": "/mine"})["PYTHONPATH"] == f"{decided.work}/tools:/mine"


@pytest.mark.parametrize(
    ("found", "request_options"),
    [
        (replace_fields(torch=dataclasses.replace(CUDA_TORCH, version="2.13.0+cu130")), {}),
        (replace_fields(torch=CPU_TORCH), {}),
        (replace_fields(torch=dataclasses.replace(CUDA_TORCH, cxx11_abi=False)), {}),
        (replace_fields(python_tag="cp312-cp312"), {}),
        (replace_fields(libc="glibc 2.28"), {}),
        (replace_fields(compiler=Tool(path="/usr/bin/c++", version="c++ (Debian 13.1.0) 13.1.0")), {}),
        (replace_fields(mpi=Tool(path="/usr/bin/mpicxx", version="MPICH 4.0")), {}),
        (PLAIN, {"mpi": False}),
        (PLAIN, {"cuda": True}),
        (replace_fields(toolkits=(TOOLKIT,)), {"cuda": True}),
        (replace_fields(flags={"CXXFLAGS": "-march=haswell"}), {}),
        (replace_fields(flags={"LDFLAGS": "-L/opt/lib"}), {}),
    ],
)
def test_the_key_depends_on_torch_python_compiler_and_flags(found: Machine, request_options: dict[str, bool]) -> None:
    assert create_plan(found, **request_options).key != create_plan().key


@pytest.mark.parametrize("name", machine.FLAGS)
def test_flags_of_the_environment_are_part_of_the_key(name: str) -> None:
    environ = {"PATH": "/usr/bin:/bin"}
    assert machine.detect({**environ, name: "-O1"}).flags == {name: "-O1"}
    plain, first, second = (create_plan(replace_fields(flags=flags)) for flags in ({}, {name: "-O1"}, {name: "-O2"}))
    assert len({one.key for one in (plain, first, second)}) == 3
    assert not plain.facts.keys() & {"flags", "cpu"}
    assert first.environment({name: "-O1"})[name] == "-O1"
    assert any(note.endswith(f"unset {name}") for note in first.notes)


def test_key_depends_on_the_processor_if_the_compiler_flags_are_native() -> None:
    assert machine.detect({"PATH": "/usr/bin:/bin", "CXXFLAGS": "-O3 -march=haswell"}).cpu is None
    here = machine.detect({"PATH": "/usr/bin:/bin", "CXXFLAGS": "-O3 -march=native"}).cpu
    assert here
    flags = {"CXXFLAGS": "-O3 -march=native"}
    plans = [create_plan(replace_fields(flags=flags, cpu=cpu)) for cpu in (here, "another")]
    assert plans[0].key != plans[1].key
    assert any("only runs on processors of the same type as this machine's" in note for note in plans[0].notes)


def test_the_key_depends_on_the_patches_but_not_on_irrelevant_settings() -> None:
    assert create_plan(replace_fields(jobs=64), cache=Path("/elsewhere"), install=False).key == create_plan().key
    assert create_plan().facts["patches"] == patch_digest(PATCHES)
    assert patch_digest(PATCHES[:-1]) != patch_digest(PATCHES)


def test_user_variables_that_contradict_the_plan_are_removed() -> None:
    seen = create_plan().environment(
        {"HOROVOD_GPU_OPERATIONS": "NCCL", "CCL_ROOT": "/ccl", "MAKEFLAGS": "-j64", "HOME": "/h"}
    )
    assert "HOROVOD_GPU_OPERATIONS" not in seen
    assert "CCL_ROOT" not in seen
    assert (seen["MAKEFLAGS"], seen["HOME"]) == ("-j4", "/h")


def test_cache_folder_is_determined_by_environment_variables() -> None:
    assert plan.cache_folder({"UNITRAIN_CACHE": "/u", "XDG_CACHE_HOME": "/x"}) == Path("/u/horovod")
    assert plan.cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/unitrain/horovod")
    assert plan.cache_folder({}) == Path("~/.cache/unitrain/horovod").expanduser()


def test_an_nvcc_outside_a_toolkit_is_ignored(tmp_path: Path) -> None:
    wrapper, real = tmp_path / "wrapper", tmp_path / "real"
    for root in (wrapper, real):
        (root / "bin").mkdir(parents=True)
        (root / "bin/nvcc").write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
        (root / "bin/nvcc").chmod(0o755)
    (real / "include").mkdir()
    (real / "include/cuda_runtime.h").touch()
    found = machine.detect({"PATH": f"{wrapper}/bin:/usr/bin:/bin", "CUDA_HOME": str(real)})
    assert found.toolkits[0] == Tool(path=str(real), version="13.0")
    assert str(wrapper) not in {tool.path for tool in found.toolkits}
