"""PyTorch's process group tests that pass with Gloo also pass with Horovod. See tests/torch_suites."""

from __future__ import annotations

import pytest
from requirements import needs_mpi
from torch_suites.__main__ import compare, run_suite
from torch_suites.suites import BY_NAME


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("suite", "backend"),
    [
        *(pytest.param(one, "horovod", marks=pytest.mark.nightly) for one in ("wheel", "groups")),
        *(pytest.param(one, "horovod-mpi", marks=[pytest.mark.nightly, needs_mpi]) for one in ("wheel", "groups")),
    ],
)
def test_torch_tests_that_pass_with_gloo_pass_with_horovod(suite: str, backend: str) -> None:
    found = compare(BY_NAME[suite], run_suite(BY_NAME[suite], ["gloo", backend], None, [], None))
    assert not found.failed, "\n\n".join(f"{test}\n{detail}" for _, test, detail in found.failed)
    assert found.passed[backend] >= (85 if suite == "wheel" else 10)
