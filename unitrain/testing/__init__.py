"""Run functions on several ranks, and check a backend against the contract suite.

    from unitrain.testing import run_ranks

    def mean_rank(backend):
        return backend.allreduce(torch.tensor(float(backend.rank))).item()

    assert run_ranks(mean_rank, size=3, backend="ddp") == [1.0, 1.0, 1.0]

A package with its own backend, registered in the entry-point group `unitrain.backends`, runs the contract of
`unitrain/backends/base.py` with one command:

    UNITRAIN_CONTRACT_BACKENDS=mine pytest --pyargs unitrain.testing.test_contract
"""

from unitrain.testing.ranks import RankError, RankGroup, run_ranks

__all__ = ["RankError", "RankGroup", "run_ranks"]
