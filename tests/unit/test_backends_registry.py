"""Selection of backends by name: built-in backends, backends of other packages, and errors if loading fails."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import unitrain
from unitrain.backends import registry
from unitrain.backends.local import LocalBackend
from unitrain.errors import BackendUnavailableError, ConfigError, UnknownBackendError

PLUGIN = """
from unitrain.backends.local import LocalBackend


class ModestBackend(LocalBackend):
    name = "modest"
"""
REQUEST_HOROVOD = """
import unitrain
from unitrain.errors import BackendUnavailableError
assert hasattr(unitrain, "register_process_group")
for request in (lambda: unitrain.init("horovod"), unitrain.register_process_group):
    try:
        request()
    except BackendUnavailableError as error:
        print(error)
"""
# Starts the default backend for the variables of each launcher, one after another in one process.
PRINT_DEFAULT_BACKEND = """
import json, os, sys
import unitrain
for variables in json.loads(sys.argv[1]):
    os.environ.update(variables)
    with unitrain.init(device="cpu", timeout_seconds=30) as backend:
        print(backend.name)
    for name in variables:
        del os.environ[name]
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package with four backends: one is valid, one has the name of a built-in backend, one fails to import,
    and one names a class that does not exist."""
    (tmp_path / "modest_plugin.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("import a_library_nobody_has\n")
    metadata = tmp_path / "modest_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: modest-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[unitrain.backends]\nmodest = modest_plugin:ModestBackend\nddp = modest_plugin:ModestBackend\n"
        "broken = broken_plugin:BrokenBackend\n"
        "misnamed = json:Missing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("plugins")
def test_installed_package_adds_a_backend_but_does_not_replace_a_built_in_backend() -> None:
    assert unitrain.available_backends() == ["broken", "ddp", "horovod", "local", "misnamed", "modest"]
    with unitrain.init("modest") as backend:
        assert (backend.name, backend.rank, backend.size) == ("modest", 0, 1)
    assert registry.load("ddp").__module__ == "unitrain.backends.ddp"


@pytest.mark.usefixtures("plugins")
def test_missing_library_of_a_backend_is_reported_with_a_fix() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        unitrain.init("broken")
    assert str(caught.value) == (
        "Backend 'broken' cannot be loaded: No module named 'a_library_nobody_has'. "
        "Install the packages that 'broken_plugin' needs."
    )
    with pytest.raises(
        BackendUnavailableError, match=r"^Backend 'misnamed' cannot be loaded: .* no attribute 'Missing'"
    ):
        unitrain.init("misnamed")


def test_unknown_backend_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(UnknownBackendError) as caught:
        unitrain.init("dpd")
    assert str(caught.value) == "Unknown backend 'dpd'. Did you mean 'ddp'? Available: ddp, horovod, local."


def test_backend_argument_overrides_variable_and_variable_overrides_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with unitrain.init() as backend:
        assert type(backend) is LocalBackend
    monkeypatch.setenv("UNITRAIN_BACKEND", "of the variable")
    with pytest.raises(UnknownBackendError, match=r"^Unknown backend 'of the variable'\."):
        unitrain.init()
    with unitrain.init("local") as backend:
        assert type(backend) is LocalBackend


def test_launcher_determines_default_backend() -> None:
    """One rank per launcher. test_launch_real.py covers horovodrun and mpirun, which require a real launch."""
    by_hand = {"RANK": "0", "WORLD_SIZE": "1"}
    torchrun = by_hand | {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}
    srun = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    cases = [{}, {"UNITRAIN_BACKEND": ""}, by_hand, torchrun, srun, srun | {"UNITRAIN_BACKEND": "local"}]
    done = subprocess.run(
        [sys.executable, "-c", PRINT_DEFAULT_BACKEND, json.dumps(cases)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["local", "local", "ddp", "ddp", "ddp", "local"], done.stderr


@pytest.mark.parametrize("seconds", [0, -1.5, float("inf"), float("nan")])
def test_invalid_timeouts_are_rejected(seconds: float) -> None:
    with pytest.raises(ConfigError) as caught:
        unitrain.init(timeout_seconds=seconds)
    assert str(caught.value) == (
        f"timeout_seconds must be a number above 0 and at most 31536000 (a year), got {seconds}. "
        "Use 300 for five minutes."
    )


def test_local_backend_rejects_a_transport() -> None:
    with unitrain.init("local", transport="none") as backend:
        assert backend.transport == "none"
    with pytest.raises(ConfigError) as caught:
        unitrain.init("local", transport="gloo")
    assert str(caught.value) == (
        "Transport 'gloo' was requested, but backend 'local' runs in one process and does not communicate. "
        "Leave transport out, or use --backend ddp."
    )


def error_without_horovod(shadow: Path) -> str:
    """Return the error that init and register_process_group raise if `shadow` hides the installed Horovod."""
    done = subprocess.run(
        [sys.executable, "-c", REQUEST_HOROVOD],
        env=os.environ | {"PYTHONPATH": str(shadow)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Horovod also prints warnings.
    messages = [line for line in done.stdout.splitlines() if line.startswith("Backend")]
    assert len(messages) == 2, done.stdout
    assert messages[0] == messages[1]
    return messages[0]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"horovod/__init__.py": "raise ModuleNotFoundError(\"No module named 'horovod'\")"}, "No module named"),
        (
            # The loader's message for an extension that was built for another torch.
            {
                "horovod/__init__.py": "",
                "horovod/torch/__init__.py": "raise ImportError('mpi_lib_v2.so: undefined symbol: _ZN3c104impl3cow11')",
            },
            "undefined symbol",
        ),
    ],
    ids=["missing", "built for another torch"],
)
def test_unusable_horovod_is_reported_with_the_build_command(files: dict[str, str], found: str, tmp_path: Path) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    message = error_without_horovod(tmp_path)
    assert message.startswith("Backend 'horovod' cannot be loaded: ")
    assert found in message
    assert message.endswith("Build it for this torch with: unitrain horovod build")


@pytest.mark.parametrize(
    "extension",
    [
        "unloadable",
        "missing",
    ],
)
def test_horovod_with_a_broken_extension_is_reported_with_the_build_command(extension: str, tmp_path: Path) -> None:
    """The copy of the installed Horovod has an empty library for torch tensors, or none."""
    spec = importlib.util.find_spec("horovod")
    assert spec is not None
    assert spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, tmp_path / "horovod", copy_function=os.symlink)
    (library,) = (tmp_path / "horovod/torch").glob("mpi_lib_v2*.so")
    library.unlink()
    if extension == "unloadable":
        library.touch()
    message = error_without_horovod(tmp_path)
    assert message.startswith("Backend 'horovod' cannot be loaded: ")
    assert "mpi_lib_v2" in message
    assert message.endswith("Build it for this torch with: unitrain horovod build")
