"""Accelerate and Fabric scripts that `unitrain migrate` has converted have the same results on both backends."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from launches import Launch, running_launcher
from requirements import needs_package

from unitrain.migrate import migrate

BIN = Path(sys.executable).parent
_MODEL = """
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh()), batch_size=8)
"""
ACCELERATE = f"""
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

def train():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    torch.manual_seed(accelerator.process_index)  # DDP broadcasts the parameters of rank 0
    {_MODEL.strip()}
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.mse_loss(model(batch), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    total = accelerator.gather_for_metrics(loss.detach()[None]).sum().item()
    accelerator.print("RESULT", accelerator.num_processes, total, *(p.sum().item() for p in model.parameters()))
    accelerator.end_training()

if __name__ == "__main__":
    train()
"""
FABRIC = f"""
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

def train():
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2)
    fabric.launch()
    torch.manual_seed(fabric.global_rank)
    {_MODEL.strip()}
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for _ in range(2):
        for batch, targets in loader:
            loss = torch.nn.functional.mse_loss(model(batch), targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    total = fabric.all_gather(loss.detach()[None]).sum().item()
    fabric.print("RESULT", fabric.world_size, total, *(p.sum().item() for p in model.parameters()))

if __name__ == "__main__":
    train()
"""


def run(command: list[str]) -> tuple[Launch, str]:
    with running_launcher(command, {"OMP_NUM_THREADS": "1"}) as launch:
        return launch, launch.output()


def read_results(command: list[str]) -> list[float]:
    """Return the numbers that rank 0 prints: the number of ranks, the loss and the sum of each parameter."""
    launch, output = run(command)
    assert launch.process.returncode == 0, output
    (line,) = re.findall(r"RESULT (.*)", output)
    return [float(number) for number in line.split()]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "source",
    [
        pytest.param(ACCELERATE, id="accelerate", marks=needs_package("accelerate", "peers")),
        pytest.param(FABRIC, id="fabric", marks=needs_package("lightning", "peers")),
    ],
)
def test_converted_script_has_the_same_results_as_the_original_on_both_backends(source: str, tmp_path: Path) -> None:
    original, converted = tmp_path / "original.py", tmp_path / "converted.py"
    original.write_text(source)
    converted.write_text(migrate(source).source or "")
    expected = read_results([str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", str(original)])
    assert expected[0] == 2
    launch = [str(BIN / "unitrain"), "launch", "-np", "2", "--backend"]
    for backend in ("ddp", "horovod"):
        found = read_results([*launch, backend, "--launcher", "torchrun", str(converted)])
        assert found == pytest.approx(expected, rel=1e-6), backend
    # horovodrun does not set the variables that these libraries read, so each rank would train a separate model.
    failed, output = run([*launch, "horovod", str(converted)])
    assert failed.process.returncode != 0
    assert "AssertionError: Start it with: unitrain launch --launcher torchrun" in output
    assert "RESULT" not in output
