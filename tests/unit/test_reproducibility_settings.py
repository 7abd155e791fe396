"""Warnings about properties that differ between runs or ranks and can prevent bit-identical results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unitrain.progress.reproducibility_settings import (
    reproducibility_settings,
    warn_of_differences,
    warn_of_different_processes,
)
from unitrain.testing.fake_backend import FakeBackend

CPU = torch.device("cpu")


def test_resumed_run_reports_each_difference(caplog: pytest.LogCaptureFixture) -> None:
    saved = {**reproducibility_settings(CPU), "threads": 97, "torch": "1.0"}
    warn_of_differences(saved, FakeBackend(), "runs/first")
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(
        f"The checkpoint in 'runs/first' was written with torch=1.0, but this process has torch={torch.__version__}: "
    )
    assert second.endswith("Set OMP_NUM_THREADS, or call torch.set_num_threads.")


def test_equal_properties_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_differences(reproducibility_settings(CPU), FakeBackend(), "runs/first")
    warn_of_different_processes(FakeBackend(0, 3))
    warn_of_differences({"threads": 97}, FakeBackend(1, 2), "runs/first")  # only rank 0 reports
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("cudnn_benchmark", "Use the same setting of torch.backends.cudnn.benchmark."),
        ("cudnn_tf32", "Use the same TrainConfig.tf32."),
        ("device", "Use the same type of hardware."),
    ],
)
def test_difference_is_reported_with_a_fix(name: str, fix: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_of_differences({**reproducibility_settings(CPU), name: True}, FakeBackend(), "runs/first")
    (record,) = caplog.records
    assert f"with {name}=True, but this process has {name}=" in record.getMessage()
    assert record.getMessage().endswith(fix)


def test_differences_between_ranks_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    def peers(operation: str, value: Any, rank: int) -> Any:
        return {**value, "threads": value["threads"] + rank}

    warn_of_different_processes(FakeBackend(0, 2, peers=peers))
    (record,) = caplog.records
    threads = torch.get_num_threads()
    assert f"because threads differs between processes: [{threads}, {threads + 1}]" in record.getMessage()
