"""Tests that pass with Gloo and may fail with Horovod, with the reason.

A name that ends with "*" stands for all tests that begin with it. A listed test that passes is reported, so that it is
removed from the list. Differences of one transport only are listed in `MPI_ONLY`.
"""

from __future__ import annotations

_FILE_STORE = "failed in the recorded run, in which the barrier did not recognize the timeout of a FileStore"
REASONS: dict[str, str] = {
    "DistributedTest.test_monitored_barrier_gloo": _FILE_STORE,
    "DistributedTest.test_monitored_barrier_gloo_subgroup": _FILE_STORE,
}

MPI_ONLY: dict[str, str] = {}


def find_reason(test: str, backend: str) -> str | None:
    """Return the reason why `test`, as "Class.method", may fail with `backend`, or None."""
    reasons = {**REASONS, **MPI_ONLY} if backend == "horovod-mpi" else REASONS
    for name, reason in reasons.items():
        if name == test or (name.endswith("*") and test.startswith(name[:-1])):
            return reason
    return None
