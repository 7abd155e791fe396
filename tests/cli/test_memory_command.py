"""`unitrain memory` on real ranks: predicted savings equal measurements with the suggested settings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from groups import nightly
from launches import running_launcher

from unitrain.backends.base import ShardingMode

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
import unitrain

WIDTH, HIDDEN, BATCH = 128, 2048, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH))

    def forward(self, inputs):
        return inputs + self.layers(inputs)


settings = dict(word.split("=") for word in sys.argv[1:] if "=" in word)
if "checkpoint_activations" in settings:
    settings["checkpoint_activations"] = (settings["checkpoint_activations"],)
with unitrain.init() as backend:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.Adam(model.parameters())
    data = TensorDataset(torch.randn(20 * BATCH, WIDTH), torch.randint(10, (20 * BATCH,)))
    if "own" in sys.argv:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model = backend.distributed_model(model)
        optimizer = backend.distributed_optimizer(optimizer, model)
        for inputs, targets in unitrain.ShardedLoader(data, backend, batch_size=BATCH):
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        config = unitrain.TrainConfig(
            max_epochs=1, batch_size=BATCH, limit_train_steps=3 if "short" in sys.argv else None,
            output_dir="must-not-exist", **settings
        )
        unitrain.Trainer(model, optimizer, nn.CrossEntropyLoss(), backend=backend, config=config).fit(data)
    print("the script ended")
"""

WIDTH, HIDDEN, BATCH = 128, 2048, 256
SHARDED = ("parameters", "gradients", "optimizer state")
PARAMETERS = 6 * (2 * WIDTH * HIDDEN + WIDTH + HIDDEN) + 10 * (WIDTH + 1)


def run(script: str, *words: str, options: tuple[str, ...] = ()) -> tuple[int, str, Any]:
    """Run `unitrain memory`, and return its exit code, its output and its JSON report."""
    path = Path(script).with_name("memory.json")
    command = [sys.executable, "-m", "unitrain", "memory", "--json", str(path), *options, script, *words]
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        output = launch.output()
        return launch.process.returncode, output, json.loads(path.read_text()) if path.exists() else None


def measured_bytes(report: Any, name: str) -> int:
    (row,) = [row for row in report["memory"] if row["name"] == name]
    found: int = row["measured"]
    return found


@pytest.mark.ci
@pytest.mark.parametrize("backend", ["ddp", *nightly("horovod")])
def test_predictions_equal_measurements(
    script: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each `shard` setting saves the predicted bytes within 1 %. Activation checkpointing saves them exactly."""
    monkeypatch.chdir(tmp_path)
    options = ("--backend", backend)
    code, output, plain = run(script, options=options)
    assert code == 0, output
    assert not Path("must-not-exist").exists(), "a recorded run must not write checkpoints"
    assert "the script ended" not in output
    assert measured_bytes(plain, "parameters") == measured_bytes(plain, "gradients") == 4 * PARAMETERS
    assert measured_bytes(plain, "optimizer state") == pytest.approx(8 * PARAMETERS, rel=0.01)
    # Each block saves its input, and the input and the output of GELU. The last layer saves its input. The loss saves
    # the log probabilities, the targets and the sum of the class weights.
    floats = 6 * (WIDTH + 2 * HIDDEN) + WIDTH + 10
    assert measured_bytes(plain, "activations") == 4 * BATCH * floats + 8 * BATCH + 4
    assert sum(row["at_peak"] for row in plain["memory"]) == plain["peak"]

    predicted = {one["setting"]: one["saved_bytes"] for one in plain["savings"]}
    for shard in get_args(ShardingMode)[1:]:
        code, output, sharded = run(script, f"shard={shard}", "checkpoint_activations=Block", options=options)
        assert code == 0, output
        saved = sum(measured_bytes(plain, name) - measured_bytes(sharded, name) for name in SHARDED)
        assert saved == pytest.approx(predicted[f'shard="{shard}"'], rel=0.01)
        suggested = {one["setting"] for one in sharded["savings"]}
        assert not suggested & {f'shard="{shard}"', 'checkpoint_activations=("Block",)'}
        if shard == "state":
            assert measured_bytes(sharded, "activations") == plain["ranks"][0]["blocks"][0]["kept_bytes"]


def test_custom_loop_without_the_trainer_is_recorded(script: str) -> None:
    code, output, report = run(script, "own", options=("-np", "1", "--backend", "local", "--ranks", "4"))
    assert code == 0, output
    assert measured_bytes(report, "optimizer state") == 4 * PARAMETERS
    assert 'shard="state"' in {one["setting"] for one in report["savings"]}
    assert report["predicted_ranks"] == 4
    assert "Gradients need" in output, "a report for one rank must mention the gradient buckets of several ranks"


def test_run_that_is_too_short_is_reported(script: str) -> None:
    code, output, _ = run(script, "short", options=("-np", "1"))
    assert code == 1
    assert "ended before 4 optimizer steps" in output
    assert "the script ended" in output


def test_report_that_cannot_be_written_is_rejected_before_the_run(script: str) -> None:
    file = Path(script).with_name("missing") / "memory.json"
    with running_launcher([sys.executable, "-m", "unitrain", "memory", "--json", str(file), script]) as launch:
        output = launch.output()
        assert launch.process.returncode == 2
    assert f"The folder '{file.parent}' of --json does not exist. Create it before the run." in output
    assert "training" not in output
