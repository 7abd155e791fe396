"""Lists tests that pass with Gloo and may fail with Horovod, with the reason.

A name that ends with "*" stands for all tests with this prefix. A listed test that passes is reported, so that it can
be removed from the list. `MPI_ONLY` contains differences of the MPI transport.
"""

from __future__ import annotations

_DEBUG_WRAPPER = (
    "torch's TORCH_DISTRIBUTED_DEBUG=DETAIL wraps its own C++ backends only; Horovod's group reports a mismatch when "
    "the operation is waited for"
)
REASONS: dict[str, str] = {
    "ProcessGroupGlooWrapperTest.test_collective_shape_mismatch_debug_mode": _DEBUG_WRAPPER,
    "ProcessGroupGlooWrapperTest.test_collectives_op_mismatch_debug_mode": _DEBUG_WRAPPER,
    "ProcessGroupWithDispatchedCollectivesTests.test_init_process_group_for_all_backends": (
        "it expects the name 'gloo' for the group that it requests"
    ),
}

MPI_ONLY: dict[str, str] = {}


def find_reason(test: str, backend: str) -> str | None:
    """Return the reason why `test` ("Class.method") may fail with `backend`, or None if it must pass."""
    reasons = {**REASONS, **MPI_ONLY} if backend == "horovod-mpi" else REASONS
    for name, reason in reasons.items():
        if name == test or (name.endswith("*") and test.startswith(name[:-1])):
            return reason
    return None
