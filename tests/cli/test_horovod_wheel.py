"""`unitrain horovod build`: patches of Horovod's sources, cache, failures and dry runs."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from groups import nightly
from horovod_machines import GPU_TORCH, create_plan, replace_fields

from unitrain.cli.horovod import horovod
from unitrain.errors import HorovodBuildError
from unitrain.horovod_wheel import build, patches, plan
from unitrain.horovod_wheel.patches import PATCHES, Patch, apply_patches


@pytest.fixture(scope="module")
def original_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of Horovod, downloaded by the download step of a build plan."""
    cache = tmp_path_factory.mktemp("cache")
    build_plan = create_plan(replace_fields(python=sys.executable), cache=cache)
    download = next(step for step in build_plan.build_steps if step.name == "download")
    done = subprocess.run(download.argv, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    build.extract(build_plan.sdist, cache)
    return cache / f"horovod-{plan.HOROVOD}"


@pytest.fixture
def sources(original_sources: Path, tmp_path: Path) -> Path:
    """A copy of the source files that the patches modify."""
    for file in {file for patch in PATCHES for file, _, _ in patch.hunks()}:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(original_sources / file, tmp_path / file)
    return tmp_path


# --- patches ---


def read_files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_patches_produce_the_same_files_as_git_apply(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = tmp_path_factory.mktemp("git") / "sources"
    shutil.copytree(sources, expected)
    for file in sorted(Path(patches.__file__).parent.glob("*.patch")):
        subprocess.run(["git", "apply", str(file)], cwd=expected, check=True, timeout=60)
    apply_patches(sources, PATCHES)
    assert read_files(sources) == read_files(expected) != {}


def test_patches_required_to_compile_apply_without_the_others(sources: Path) -> None:
    apply_patches(sources, [patch for patch in PATCHES if patch.kind == "compile"])
    assert "set(CMAKE_CXX_STANDARD 20)" in (sources / "CMakeLists.txt").read_text()
    assert "global_ranks_.reserve(size_);" in (sources / "horovod/common/gloo/gloo_controller.cc").read_text()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_each_patch_states_its_kind_and_reason(patch: Patch) -> None:
    assert patch.kind in ("compile", "functional")
    assert patch.reason.endswith(".")


@pytest.mark.parametrize("count", [0, 2])
def test_unexpected_sources_are_refused_and_not_modified(sources: Path, count: int) -> None:
    controller = sources / "horovod/common/gloo/gloo_controller.cc"
    text = controller.read_text()
    [(_, hunk, _)] = next(patch for patch in PATCHES if patch.name == "gloo-stall").hunks()
    controller.write_text(text.replace(hunk, hunk * count))
    before = read_files(sources)
    with pytest.raises(
        HorovodBuildError, match=rf"'gloo-stall' expects .* once in .*gloo_controller.cc, but it occurs {count} times"
    ):
        apply_patches(sources, PATCHES)
    assert read_files(sources) == before


def test_folder_without_the_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HorovodBuildError, match=r"'cxx20' is for CMakeLists.txt, which does not exist in"):
        apply_patches(tmp_path, PATCHES)


# --- build ---


class RecordingReporter:
    """A reporter that records steps and percentages."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self.percents: list[int] = []

    def report_step(self, step: plan.BuildStep, *, is_skipped: bool) -> None:
        self.steps.append(step.name)

    def report_percent(self, percent: int) -> None:
        self.percents.append(percent)


def with_steps(build_plan: plan.BuildPlan, *steps: plan.BuildStep) -> plan.BuildPlan:
    return dataclasses.replace(build_plan, build_steps=steps, install_steps=())


def test_cached_wheel_is_rebuilt_only_with_force(tmp_path: Path) -> None:
    build_plan = with_steps(create_plan(cache=tmp_path), plan.BuildStep(name="wheel", description="", argv=("true",)))
    build_plan.folder.mkdir()
    build_plan.wheel.touch()
    assert build.run(build_plan, {"PATH": "/usr/bin:/bin"}, hit := RecordingReporter()) == build_plan.wheel
    assert hit.steps == []
    build.run(build_plan, {"PATH": "/usr/bin:/bin"}, forced := RecordingReporter(), force=True)
    assert forced.steps == ["wheel"]


@pytest.mark.parametrize("signum", [signal.SIGINT, *nightly(signal.SIGTERM, signal.SIGHUP)])
def test_signal_terminates_the_processes_of_the_build(signum: signal.Signals, tmp_path: Path) -> None:
    """The signal arrives while pip waits for a server that does not respond."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        variables = {"PIP_INDEX_URL": f"http://127.0.0.1:{server.getsockname()[1]}/", "PIP_NO_INDEX": "0"}
        command = [sys.executable, "-m", "unitrain", "horovod", "build", "--cache-dir", str(tmp_path / "cache")]
        with subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(20)
                process.send_signal(signum)
                assert process.wait(timeout=60) == 128 + signum
                while connection.recv(4096):
                    pass  # read the request of pip, until the exit of pip closes the connection
            assert process.stderr is not None
            assert process.stderr.read() == (b"\nunitrain: interrupted\n" if signum == signal.SIGINT else b"")
        # A remaining wheel or archive would be used by the next build, which deletes other remaining files.
        assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix in (".whl", ".gz")]


def toolkit_step(folder: Path, script: str) -> plan.BuildStep:
    """Return the toolkit step of a build plan with a shell script as its command, so it does not need a network."""
    build_plan = create_plan(cache=folder, cuda=True)
    step = next(step for step in build_plan.build_steps if step.name == "toolkit")
    return dataclasses.replace(step, argv=("sh", "-c", script.replace("TOOLKIT", str(folder / "cuda-13.0"))))


FILL = "mkdir TOOLKIT/nvidia && echo new > TOOLKIT/nvidia/nvcc"


@pytest.mark.parametrize("force", [False, True])
def test_interrupted_installation_of_the_toolkit_is_repeated(tmp_path: Path, force: bool) -> None:
    build_plan = create_plan(cache=tmp_path, cuda=True)
    broken = with_steps(
        build_plan, toolkit_step(tmp_path, "mkdir TOOLKIT/nvidia && touch TOOLKIT/nvidia/old && exit 1")
    )
    with pytest.raises(HorovodBuildError, match="Step 'toolkit'"):
        build.run(broken, {"PATH": "/usr/bin:/bin"}, RecordingReporter())
    files = tmp_path / "cuda-13.0" / "nvidia"
    assert files.is_dir()
    plan_with_toolkit = with_steps(build_plan, toolkit_step(tmp_path, FILL))
    build.run(plan_with_toolkit, {"PATH": "/usr/bin:/bin"}, RecordingReporter(), force=force)
    assert [file.name for file in files.iterdir()] == ["nvcc"]
    (files / "nvcc").write_text("used")
    build.run(plan_with_toolkit, {"PATH": "/usr/bin:/bin"}, RecordingReporter())
    assert (files / "nvcc").read_text() == "used", "a complete toolkit must not be replaced without --force"
    build.run(plan_with_toolkit, {"PATH": "/usr/bin:/bin"}, RecordingReporter(), force=True)
    assert (files / "nvcc").read_text() == "new\n"


def test_builds_with_different_keys_share_the_toolkit(tmp_path: Path) -> None:
    """Four builds run concurrently, the last one with --force. A compiler logs "gone" if the toolkit is incomplete."""
    slow = f"echo installed >> {tmp_path}/log; mkdir TOOLKIT/nvidia; sleep 0.3; echo new > TOOLKIT/nvidia/nvcc"
    compiler = f"for i in 1 2 3 4 5; do test -s {tmp_path}/cuda-13.0/nvidia/nvcc || echo gone >> {tmp_path}/log; "
    compiler += "sleep 0.1; done"
    plans = [
        with_steps(
            create_plan(
                replace_fields(torch=dataclasses.replace(GPU_TORCH, architectures=(version,))),
                cache=tmp_path,
                cuda=True,
            ),
            toolkit_step(tmp_path, slow),
            plan.BuildStep(name="wheel", description="", argv=("sh", "-c", compiler)),
        )
        for version in ("7.0", "8.0", "9.0", "10.0")
    ]
    assert len({one.key for one in plans}) == len(plans)
    with ThreadPoolExecutor(len(plans)) as pool:
        started = []
        for number, one in enumerate(plans):
            forced = number == len(plans) - 1
            started.append(pool.submit(build.run, one, {"PATH": "/usr/bin:/bin"}, RecordingReporter(), force=forced))
            time.sleep(0.05)
        for one in started:
            one.result(timeout=60)
    # On a busy machine, the forced build may be the first. The other builds then use its toolkit.
    assert (tmp_path / "log").read_text().split() in (["installed"], ["installed", "installed"])


def test_failed_step_is_reported_with_the_error_a_fix_and_the_log(tmp_path: Path) -> None:
    script = (
        "echo '[ 40%] Building'; echo 'x.cc:1: fatal error: No space left on device'; echo 'make: *** Error'; exit 3"
    )
    build_plan = with_steps(
        create_plan(cache=tmp_path), plan.BuildStep(name="wheel", description="", argv=("sh", "-c", script))
    )
    with pytest.raises(HorovodBuildError) as caught:
        build.run(build_plan, {"PATH": "/usr/bin:/bin"}, seen := RecordingReporter())
    message = str(caught.value)
    assert "Step 'wheel'" in message
    assert "exit status 3: x.cc:1: fatal error: No space left on device. The disk" in message
    assert "--cache-dir" in message
    assert str(build_plan.log) in message
    assert "[ 40%] Building" in build_plan.log.read_text()
    assert seen.percents == [40]


def test_sdist_with_another_checksum_is_refused(tmp_path: Path) -> None:
    build_plan = with_steps(create_plan(cache=tmp_path), plan.BuildStep(name="unpack", description=""))
    build_plan.sdist.parent.mkdir()
    build_plan.sdist.write_bytes(b"something else")
    with pytest.raises(HorovodBuildError, match=r"is not the sdist of Horovod 0\.28\.1: its sha256 is .*rm "):
        build.run(build_plan, {"PATH": "/usr/bin:/bin"}, RecordingReporter())


def test_archive_is_extracted_by_python_versions_without_extraction_filters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("content")
    with tarfile.open(tmp_path / "archive.tar", "w") as archive:
        archive.add(tmp_path / "file", "file")

    # The signature in Python 3.11.0 to 3.11.3.
    def extractall(self: tarfile.TarFile, path: Path) -> None:
        for member in self:
            self.extract(member, path)

    monkeypatch.delattr(tarfile, "data_filter")
    monkeypatch.setattr(tarfile.TarFile, "extractall", extractall)
    build.extract(tmp_path / "archive.tar", tmp_path / "folder")
    assert (tmp_path / "folder" / "file").read_text() == "content"


def test_dry_run_prints_every_step_and_does_not_build(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    result = CliRunner().invoke(horovod, ["build", "--dry-run", "--cache-dir", str(cache), "--without-mpi"])
    assert result.exit_code == 0, result.output
    for number, name in enumerate(
        ("download", "unpack", "patch", "wheel", "store", "install", "dependencies", "check"), 1
    ):
        assert f"\n{number}. {name}: " in result.output
    for patch in PATCHES:
        assert f"{patch.name} ({patch.kind}): {patch.reason}" in result.output
    assert "+  global_ranks_.resize(size_);" in result.output
    assert "export HOROVOD_WITHOUT_MPI=1" in result.output
    assert "Usually takes about" in result.output
    assert not cache.exists()


def test_missing_requirement_ends_the_command_with_an_error(tmp_path: Path) -> None:
    result = CliRunner(env={"CXX": "no-such-compiler"}).invoke(
        horovod, ["build", "--cache-dir", str(tmp_path / "cache")]
    )
    assert result.exit_code == 1
    assert "No C++ compiler was found: CXX is 'no-such-compiler', but" in result.output
