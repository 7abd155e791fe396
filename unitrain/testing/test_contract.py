"""The contract suite, which runs every case on every backend with every number of ranks. Ranks are reused between
cases.

pytest --pyargs unitrain.testing.test_contract
UNITRAIN_CONTRACT_BACKENDS=mine UNITRAIN_CONTRACT_SIZES=1,2 pytest --pyargs unitrain.testing.test_contract
UNITRAIN_TEST_DEVICE=cuda UNITRAIN_CONTRACT_SIZES=1 pytest --pyargs unitrain.testing.test_contract
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from unitrain.bootstrap import environment
from unitrain.testing import (
    RankGroup,
    broadcasts,
    buffers,
    collectives,
    compression,
    double_backward,
    gradients,
    half_precision,
    interleaved_logical_ranks,
    large_tensors,
    local_gradients,
    local_sgd,
    local_sgd_streaming,
    logical_ranks,
    optimizers,
    parameters,
    power_sgd,
    several_models,
    sharded_gradients,
    sharded_parameter_errors,
    sharded_parameters,
    sharding,
    shared_memory,
    synchronization,
    undistributed_optimizers,
)
from unitrain.testing.cases import CASES

__all__ = [
    "broadcasts",
    "buffers",
    "collectives",
    "compression",
    "double_backward",
    "gradients",
    "half_precision",
    "interleaved_logical_ranks",
    "large_tensors",
    "local_gradients",
    "local_sgd",
    "local_sgd_streaming",
    "logical_ranks",
    "optimizers",
    "parameters",
    "power_sgd",
    "several_models",
    "sharded_gradients",
    "sharded_parameter_errors",
    "sharded_parameters",
    "sharding",
    "shared_memory",
    "synchronization",
    "undistributed_optimizers",
]  # importing them fills CASES

BACKENDS = (environment.get_variable("UNITRAIN_CONTRACT_BACKENDS") or "local,ddp,horovod").split(",")
SIZES = [int(size) for size in (environment.get_variable("UNITRAIN_CONTRACT_SIZES") or "1,2,3").split(",")]
GROUPS = [(backend, size) for backend in BACKENDS for size in SIZES if size == 1 or backend != "local"]


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[0]}-{group[1]}")
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    """Yield the ranks of one backend and number of ranks, which are reused between cases."""
    backend, size = request.param
    with RankGroup(backend, size) as group:
        yield group


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_contract(ranks: RankGroup, case: object) -> None:
    ranks.run(case, timeout_seconds=120)  # type: ignore[arg-type]
