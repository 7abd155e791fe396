"""The code blocks on the page about training modes run on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from preload import preloaded
from test_docs import PYTHON_BLOCKS

import unitrain
from unitrain.bootstrap.network import reserve_port

BLOCKS = [block.text for block in PYTHON_BLOCKS if block.place.startswith("docs/guides/modes.md:")]
PROGRAMS = [text for text in BLOCKS if "unitrain.run(" in text]
SPAWN = [text for text in BLOCKS if "__main__" in text]
# Blocks that require names from a training script.
FRAGMENTS = [text for text in BLOCKS if text not in PROGRAMS + SPAWN and "timeout_seconds=1800" not in text]


def test_every_code_block_of_the_page_has_a_test() -> None:
    assert (len(PROGRAMS), len(SPAWN), len(FRAGMENTS)) == (2, 1, 4)
    assert len(BLOCKS) == 8


@pytest.fixture(autouse=True)
def _preloaded_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in preloaded(os.environ).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("program", "backend"),
    [
        pytest.param(PROGRAMS[0], "ddp", id="comm hook on ddp"),
        pytest.param(PROGRAMS[0], "horovod", id="comm hook on horovod"),
        pytest.param(PROGRAMS[1], "ddp", id="local SGD on ddp"),
    ],
)
def test_programs_return_equal_parameters_on_all_ranks(
    program: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNITRAIN_BACKEND", backend)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(program, names)  # the program asserts that the parameters are equal
    assert len(names["first"][0]) == 4


def test_spawned_processes_are_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    with reserve_port() as reservation:
        script.write_text(SPAWN[0].replace("29400", str(reservation.getsockname()[1])))
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)
    # Both ranks write to the same pipe, so their lines may be mixed.
    assert sorted(re.findall(r"rank \d of 2: the sum of the ranks is 1\.0", done.stdout)) == [
        f"rank {rank} of 2: the sum of the ranks is 1.0" for rank in (0, 1)
    ]


def execute_fragments(fragments: list[str]) -> list[dict[str, list[float]]]:
    """Execute each fragment with a new model, and return the resulting parameters of each model."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(40, 4, generator=generator), torch.randint(0, 2, (40,), generator=generator)
    found = []
    with unitrain.init(device="cpu") as backend:
        for fragment in fragments:
            torch.manual_seed(1)
            model = torch.nn.Linear(4, 2)
            names: dict[str, Any] = {
                "torch": torch,
                "unitrain": unitrain,
                "backend": backend,
                "dataset": torch.utils.data.TensorDataset(inputs, targets),
                "model": model,
                "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
                "loss_fn": torch.nn.functional.cross_entropy,
            }
            exec(fragment, names)
            if "LogLargestWeight" in names:
                config = unitrain.TrainConfig(max_epochs=1, batch_size=8, progress="off")
                trainer = unitrain.Trainer(
                    model,
                    names["optimizer"],
                    names["loss_fn"],
                    backend=backend,
                    config=config,
                    callbacks=[names["LogLargestWeight"]()],
                )
                trainer.fit(names["dataset"])
            found.append({name: value.flatten().tolist() for name, value in model.state_dict().items()})
    return found


def test_fragments_train_the_model() -> None:
    first, second = unitrain.run(execute_fragments, (FRAGMENTS,), np=2, backend="horovod", timeout_seconds=120)
    torch.manual_seed(1)
    initial = torch.nn.Linear(4, 2).weight.flatten().tolist()
    for own, other, fragment in zip(first, second, FRAGMENTS, strict=True):
        assert own["weight"] != initial
        # Without distributed_model, each rank trains its own model.
        assert (own == other) == (not re.search("DistributedSampler", fragment))
