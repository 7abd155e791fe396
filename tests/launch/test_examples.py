"""The examples run in one process and print the documented results."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from preload import preloaded
from small_mnist import small_mnist

EXAMPLES = Path(__file__).parents[2] / "examples"
FINAL = re.compile(r"final val_accuracy=(\d\.\d{4}) val_loss=(\d+\.\d{4})\n")


def run(
    script: str, *arguments: str | Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, EXAMPLES / script, *arguments]
    return subprocess.run(
        command,
        env=preloaded({**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def read_results(done: subprocess.CompletedProcess[str]) -> tuple[float, float]:
    """Return the accuracy and the loss from the only line on standard output."""
    assert done.returncode == 0, done.stderr
    match = FINAL.fullmatch(done.stdout)
    assert match, done.stdout
    return float(match[1]), float(match[2])


def test_own_loop_and_pipeline_print_the_same_results_as_digits() -> None:
    tutorial = read_results(run("digits.py", "--epochs", "3"))
    assert tutorial[0] >= 0.92
    assert read_results(run("own_loop.py", "--epochs", "3")) == tutorial
    assert read_results(run("pipeline.py", "--stages", "1", "--micro-batches", "1", "--epochs", "3")) == tutorial


@pytest.mark.ci
def test_freezing_reaches_a_higher_accuracy_after_all_layers_are_unfrozen() -> None:
    frozen, _ = read_results(run("freezing.py", "--epochs", "3"))
    unfrozen, _ = read_results(run("freezing.py", "--epochs", "6"))
    assert unfrozen > frozen


def test_digits_prints_the_same_results_after_a_resume(tmp_path: Path) -> None:
    uninterrupted = read_results(run("digits.py", "--epochs", "2", "--accumulate", "2"))
    first_epoch = run("digits.py", "--epochs", "1", "--accumulate", "2", "--output", tmp_path)
    assert read_results(first_epoch) != uninterrupted
    assert (
        read_results(run("digits.py", "--epochs", "2", "--accumulate", "2", "--output", tmp_path, "--resume"))
        == uninterrupted
    )


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"))


def test_mnist_reaches_80_percent_accuracy(mnist: Path) -> None:
    accuracy, _ = read_results(run("mnist.py", "--data", mnist, "--epochs", "6", "--batch-size", "16"))
    assert accuracy >= 0.8


@pytest.mark.ci
def test_mnist_trains_a_resnet(mnist: Path) -> None:
    read_results(run("mnist.py", "--data", mnist, "--model", "resnet18", "--epochs", "1", "--batch-size", "64"))


def test_mnist_without_data_prints_the_option_that_downloads_it(tmp_path: Path) -> None:
    done = run("mnist.py", "--data", tmp_path / "nothing")
    assert done.returncode == 1
    assert done.stderr.startswith("Error: MNIST was not found in '")
    assert done.stderr.endswith("Download it with: --data " + str(tmp_path / "nothing") + " --download\n")
    (tmp_path / "half" / "MNIST" / "raw").mkdir(parents=True)  # as after a failed download
    assert run("mnist.py", "--data", tmp_path / "half").stderr.startswith("Error: MNIST was not found in '")


def test_mnist_without_a_network_prints_an_error(tmp_path: Path) -> None:
    proxy = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = run("mnist.py", "--data", tmp_path, "--download", "--backend", "local", variables=proxy)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"Error: MNIST cannot be downloaded to '{tmp_path}': Error downloading train-images" in done.stderr
    assert done.stderr.endswith(
        f"Download it on a machine with a network, and copy the folder MNIST to '{tmp_path}'.\n"
    )


@pytest.mark.parametrize(
    ("script", "package", "extra"),
    [("flyte_mnist.py", "flytekit", "flyte"), ("huggingface.py", "datasets", "huggingface")],
)
def test_missing_package_is_reported_with_the_extra(
    script: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(EXAMPLES / script))
    text = str(caught.value)
    assert package in text
    assert text.endswith(f"Install it, in the source folder of unitrain, with: pip install '.[{extra}]'")
