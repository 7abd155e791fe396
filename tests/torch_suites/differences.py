"""Tests that pass with Gloo and may fail with Horovod, with the reason.

A name that ends with "*" stands for all tests that begin with it. A listed test that passes is reported, so that it is
removed from the list. Differences of one transport only are listed in `MPI_ONLY`.
"""

from __future__ import annotations

_MESSAGES = "Horovod's process group has no messages between two ranks"
_DEVICES = "torch does not find Horovod's process group among the backends of CPUs"
_GROUPS = "Horovod's process group has no groups of some ranks"
REASONS: dict[str, str] = {
    "DistributedTest.test_send_recv*": _MESSAGES,
    "DistributedTest.test_isend*": _MESSAGES,
    "DistributedTest.test_irecv": _MESSAGES,
    "DistributedTest.test_batch_isend_irecv*": _MESSAGES,
    "DistributedTest.test_all_gather_coalesced*": _DEVICES,
    "DistributedTest.test_monitored_barrier*": _DEVICES,
    "DistributedTest.test_SyncBatchNorm_process_group": _GROUPS,
}

MPI_ONLY: dict[str, str] = {}


def find_reason(test: str, backend: str) -> str | None:
    """Return the reason why `test`, as "Class.method", may fail with `backend`, or None."""
    reasons = {**REASONS, **MPI_ONLY} if backend == "horovod-mpi" else REASONS
    for name, reason in reasons.items():
        if name == test or (name.endswith("*") and test.startswith(name[:-1])):
            return reason
    return None
