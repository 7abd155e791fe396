"""`examples/flyte_mnist.py`, executed locally by flytekit in a separate virtual environment.

flytekit and the development tools require different versions of some packages. The environment contains flytekit and
its requirements, and imports all other packages from the environment of the tests.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import logger_output
import pytest
import torch
from small_mnist import small_mnist

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PACKAGES = ("flytekit==1.16.31",)
# Calls the workflow like a user, and prints its outputs.
CALL = """
import json, pathlib, sys
from flyte_mnist import Hyperparameters, train_mnist

arguments = json.loads(sys.argv[1])
hyperparameters = Hyperparameters(**arguments.pop("hyperparameters"))
outputs = train_mnist(hyperparameters=hyperparameters, **arguments)
folder = outputs.run.download()
print("outputs", json.dumps([outputs.accuracies, outputs.accuracy, outputs.model.download(), folder]))
"""
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("flyte")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=1200)
    interpreter = str(folder / "bin" / "python")
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *PACKAGES], check=True, timeout=1200)
    path = subprocess.check_output(
        [interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True, timeout=60
    ).strip()
    paths = [ROOT, sysconfig.get_path("purelib"), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    Path(path, "tests.pth").write_text("".join(f"{entry}\n" for entry in dict.fromkeys(map(str, paths))))
    return interpreter


def run(command: list[str], folder: Path) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_workflow_returns_accuracies_and_a_model_and_can_be_resumed(python: str, tmp_path: Path) -> None:
    data = small_mnist(tmp_path / "data")

    def call(**arguments: object) -> tuple[list[float], float, Path, Path]:
        output = run([python, "-c", CALL, json.dumps(arguments)], tmp_path)
        accuracies, accuracy, model, folder = json.loads(re.search("^outputs (.*)$", output, re.M)[1])  # type: ignore[index]
        return accuracies, accuracy, Path(model), Path(folder)

    settings = {"epochs": 4, "batch_size": 16}
    accuracies, accuracy, model, _ = call(hyperparameters=settings, data=str(data))
    assert len(accuracies) == 4
    assert accuracy == accuracies[-1] >= 0.7
    parameters = torch.load(model, weights_only=True)
    assert sum(tensor.numel() for tensor in parameters.values()) == 46_730

    # A retried task resumes from the checkpoint in its folder, even with another backend.
    shared = str(tmp_path / "shared")
    first = call(hyperparameters=settings | {"epochs": 2}, data=str(data), run_folder=shared, wandb=True)
    resumed = call(hyperparameters=settings | {"backend": "horovod"}, data=str(data), run_folder=shared, wandb=True)
    assert first[0] == accuracies[:2]
    assert resumed[0] == pytest.approx(accuracies, abs=0.02)
    points = {(name, step): value for name, step, value in logger_output.from_wandb(resumed[3])}
    assert [points["val_accuracy", 16 * epoch] for epoch in (1, 2, 3, 4)] == pytest.approx(resumed[0])


def test_example_trains_on_digits(python: str, tmp_path: Path) -> None:
    output = run([python, str(EXAMPLES / "flyte_mnist.py")], tmp_path)
    accuracies = [float(value) for value in re.search("^accuracies (.*)$", output, re.M)[1].split()]  # type: ignore[index]
    assert len(accuracies) == 3
    assert accuracies[-1] >= 0.8
