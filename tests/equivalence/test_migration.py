"""The programs in the README and the migration pages have the same results on one rank and on two."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from unitrain.backends.base import Backend
from unitrain.testing import run_ranks

ROOT = Path(__file__).parents[2]
MIGRATION_PAGES = ("accelerate", "ddp", "horovod", "ignite", "lightning")
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
Outcomes = dict[str, tuple[dict[str, float], list[float]]]  # results and parameters of each program


def build_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def accuracy(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return output.argmax(1) == targets


def code_blocks(page: str) -> list[str]:
    return _BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))


def run_programs(programs: dict[str, str]) -> Outcomes:
    """Run each program as a script, and return its results and parameters."""
    outcomes: Outcomes = {}
    for name, program in programs.items():
        # The last batch of 150 samples is smaller than the other batches, and the ranks' shares of it are uneven.
        names: dict[str, Any] = {
            "build_model": build_model,
            "train_data": data(150),
            "val_data": data(45),
            "dataset": data(150),
            "loss_fn": nn.CrossEntropyLoss(),
            "accuracy": accuracy,
        }
        exec(compile(program, name, "exec"), names)
        parameters = torch.cat([parameter.detach().flatten() for parameter in names["model"].parameters()])
        results = {key: value for key, value in names.get("results", {}).items() if "second" not in key}
        outcomes[name] = results, parameters.tolist()
    return outcomes


def run_programs_on_each_backend(backend: Backend, programs: dict[str, str]) -> dict[str, Outcomes]:
    backend.shutdown()
    outcomes: dict[str, Outcomes] = {}
    for name in ("ddp", "horovod"):
        os.environ["UNITRAIN_BACKEND"] = name
        outcomes[name] = run_programs(programs)
    return outcomes


def test_program_before_migration_compiles() -> None:
    for page in MIGRATION_PAGES:
        before, _ = code_blocks(f"docs/migrating/{page}.md")
        compile(before, page, "exec")


def test_documented_program_produces_the_same_numbers_on_one_rank_and_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {page: code_blocks(f"docs/migrating/{page}.md")[1] for page in MIGRATION_PAGES}
    trainer, own_loop = code_blocks("README.md")
    assert "batch_size=32)" in own_loop
    programs["README, Trainer"] = trainer
    # Use the same global batch size on one rank and on two.
    programs["README, own loop"] = own_loop.replace("batch_size=32)", "batch_size=32 // backend.size)")
    monkeypatch.setenv("UNITRAIN_BACKEND", "local")
    reference = run_programs(programs)
    assert reference["lightning"][0]["val_accuracy"] > 0.5
    for outcomes in run_ranks(run_programs_on_each_backend, 2, args=(programs,), backend="ddp"):
        for backend in outcomes:
            for name, (results, parameters) in reference.items():
                assert outcomes[backend][name][0] == pytest.approx(results, rel=1e-6), (backend, name)
                assert outcomes[backend][name][1] == pytest.approx(parameters, abs=1e-9), (backend, name)
