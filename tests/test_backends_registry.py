"""Backends by name: the built-in ones, those of other packages, and those that cannot be loaded."""

from __future__ import annotations

import os
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
ASK_FOR_HOROVOD = """
import unitrain
from unitrain.errors import BackendUnavailableError
try:
    unitrain.init("horovod")
except BackendUnavailableError as error:
    print(error)
"""


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with three backends: a good one, one that shadows ddp, and one that cannot be imported."""
    (tmp_path / "modest_plugin.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("import a_library_nobody_has\n")
    metadata = tmp_path / "modest_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Name: modest-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[unitrain.backends]\nmodest = modest_plugin:ModestBackend\nddp = modest_plugin:ModestBackend\n"
        "broken = broken_plugin:BrokenBackend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("plugins")
def test_a_package_adds_a_backend_but_replaces_none() -> None:
    assert unitrain.available_backends() == ["broken", "ddp", "horovod", "local", "modest"]
    with unitrain.init("modest") as backend:
        assert (backend.name, backend.rank, backend.size) == ("modest", 0, 1)
    assert registry.load("ddp").__module__ == "unitrain.backends.ddp"


@pytest.mark.usefixtures("plugins")
def test_a_backend_that_cannot_be_imported_says_what_it_needs() -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        unitrain.init("broken")
    assert str(caught.value) == (
        "Backend 'broken' cannot be loaded: No module named 'a_library_nobody_has'. "
        "Install the packages that 'broken_plugin' needs."
    )


def test_an_unknown_backend() -> None:
    with pytest.raises(UnknownBackendError) as caught:
        unitrain.init("dpd")
    assert str(caught.value) == "Unknown backend 'dpd'. Did you mean 'ddp'? Available: ddp, horovod, local."


def test_the_argument_goes_before_the_variable_and_both_before_what_is_implied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with unitrain.init() as backend:
        assert type(backend) is LocalBackend
    monkeypatch.setenv("UNITRAIN_BACKEND", "of the variable")
    with pytest.raises(UnknownBackendError, match=r"^Unknown backend 'of the variable'\."):
        unitrain.init()
    with unitrain.init("local") as backend:
        assert type(backend) is LocalBackend


def test_a_timeout_must_leave_time() -> None:
    with pytest.raises(ConfigError, match=r"^timeout_seconds must be above 0, got 0\. Use 300 for five minutes\.$"):
        unitrain.init(timeout_seconds=0)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"horovod/__init__.py": "raise ModuleNotFoundError(\"No module named 'horovod'\")"}, "No module named"),
        (
            # What the loader says of an extension that was built for another torch.
            {
                "horovod/__init__.py": "",
                "horovod/torch/__init__.py": "raise ImportError('mpi_lib_v2.so: undefined symbol: _ZN3c104impl3cow11')",
            },
            "undefined symbol",
        ),
    ],
    ids=["missing", "built for another torch"],
)
def test_a_horovod_that_cannot_be_used_says_how_to_build_it(files: dict[str, str], found: str, tmp_path: Path) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    done = subprocess.run(
        [sys.executable, "-c", ASK_FOR_HOROVOD],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.startswith("Backend 'horovod' cannot be loaded: "), done.stderr
    assert found in done.stdout
    assert done.stdout.endswith("Build it for this torch with: unitrain horovod build\n")
