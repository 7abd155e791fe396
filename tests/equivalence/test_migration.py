"""The pages about moving to unitrain: what each calls "after" runs, and gives on two ranks what it gives on one."""

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

PAGES = sorted(set((Path(__file__).parents[2] / "docs" / "migrating").glob("*.md")) - {Path(__file__).parents[2] / "docs/migrating/index.md"})
Told = dict[str, tuple[dict[str, float], list[float]]]  # by page: results and parameters
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def build_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def data(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def after_moving(programs: dict[str, str]) -> Told:
    """Run each program as a script, and return its results and parameters."""
    told: Told = {}
    for name, program in programs.items():
        # The last batch of 150 samples is smaller, and is shared unevenly.
        names: dict[str, Any] = {"build_model": build_model, "train_data": data(150), "val_data": data(45)}
        exec(compile(program, name, "exec"), names)
        parameters = torch.cat([one.detach().flatten() for one in names["model"].parameters()])
        results = {key: value for key, value in names["results"].items() if "second" not in key}
        told[name] = results, parameters.tolist()
    return told


def on_each(backend: Backend, programs: dict[str, str]) -> dict[str, Told]:
    backend.shutdown()
    told: dict[str, Told] = {}
    for name in ("ddp", "horovod"):
        os.environ["UNITRAIN_BACKEND"] = name
        told[name] = after_moving(programs)
    return told


def test_what_is_after_gives_the_same_on_one_rank_and_two(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = {page.stem: _BLOCK.findall(page.read_text(encoding="utf-8")) for page in PAGES}
    assert sorted(blocks) == ["accelerate", "ddp", "horovod", "ignite", "lightning"]
    for before, _ in blocks.values():
        compile(before, "before", "exec")
    programs = {name: after for name, (_, after) in blocks.items()}
    monkeypatch.setenv("UNITRAIN_BACKEND", "local")
    reference = after_moving(programs)
    assert reference["lightning"][0]["val_accuracy"] > 0.5
    for told in run_ranks(on_each, 2, args=(programs,), backend="ddp"):
        for backend in told:
            for name, (results, parameters) in reference.items():
                assert told[backend][name][0] == pytest.approx(results, rel=1e-6), (backend, name)
                assert told[backend][name][1] == pytest.approx(parameters, abs=1e-9), (backend, name)
