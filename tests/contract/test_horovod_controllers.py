"""The contract suite on Horovod under horovodrun, with each of the two controllers.

`make test` runs only the cases about collectives and gradients, on which the other cases depend.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from groups import nightly
from preload import preloaded
from requirements import needs_mpi

from unitrain.backends.base import Backend
from unitrain.bootstrap import environment
from unitrain.testing import RankGroup
from unitrain.testing.cases import CASES
from unitrain.testing.test_contract import broadcasts, collectives, gradients, large_tensors

BUILDING_BLOCKS = {module.__name__ for module in (broadcasts, collectives, gradients, large_tensors)}
HOROVODRUN = str(Path(sys.executable).parent / "horovodrun")


def controller(backend: Backend) -> tuple[str, bool, bool]:
    import horovod.torch as hvd

    return backend.transport, hvd.gloo_enabled(), hvd.mpi_enabled()


@pytest.fixture(scope="module", params=[pytest.param("mpi", marks=needs_mpi), *nightly("gloo")])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    environment.export_defaults({"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})
    with RankGroup(
        "horovod", 2, command=[HOROVODRUN, "-np", "2", f"--{request.param}"], variables=preloaded({})
    ) as group:
        expected = ("gloo", True, False) if request.param == "gloo" else ("mpi", False, True)
        assert group.run(controller) == [expected] * 2
        yield group


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=[] if case.__module__ in BUILDING_BLOCKS else pytest.mark.nightly)
        for name, case in CASES.items()
    ],
)
def test_contract(ranks: RankGroup, case: object) -> None:
    ranks.run(case, timeout_seconds=120)  # type: ignore[arg-type]
