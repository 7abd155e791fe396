"""Run functions on several ranks, and test backends with the contract suite.

    from unitrain.testing import run_ranks

    def mean_rank(backend):
        return backend.allreduce(torch.tensor(float(backend.rank))).item()

    assert run_ranks(mean_rank, size=3, backend="ddp") == [1.0, 1.0, 1.0]

`FakeBackend` replaces the backend in a unit test of code that communicates, without starting ranks:

    backend = FakeBackend(rank=0, size=4, peers=lambda operation, value, rank: value + rank)
    assert backend.allreduce(torch.zeros(1)).item() == 1.5

To test a backend from the entry-point group `unitrain.backends` against the contract in `unitrain/backends/base.py`,
run:

    UNITRAIN_CONTRACT_BACKENDS=mine pytest --pyargs unitrain.testing.test_contract
"""

from typing import TYPE_CHECKING, Any

from unitrain.testing.ranks import RankError, RankGroup, run_ranks

if TYPE_CHECKING:
    from unitrain.testing.fake_backend import FakeBackend

__all__ = ["FakeBackend", "RankError", "RankGroup", "run_ranks"]


def __getattr__(name: str) -> Any:
    if name != "FakeBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from unitrain.testing.fake_backend import FakeBackend  # imports torch

    return FakeBackend
