"""Markers, the order of test files, and fixtures for several test files."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import hypothesis
import pytest
import slow_tests
from hosts import Host, hosts

from unitrain.testing.ranks import import_before_fork

TESTS = Path(__file__).parent


# Run the slowest files first. Alternate files whose tests compute with files whose tests wait for processes and
# timeouts. xdist assigns files to workers in the order of collection, so one worker computes while the other one waits,
# and both finish at about the same time.
COMPUTING_FILES = (
    "test_contract", "test_iterable_datasets", "test_equivalence", "test_fuzzer", "test_examples", "test_process_group",
    "test_samplers", "test_compile", "test_examples_real", "test_skipped_samples", "test_compression",
    "test_horovod_controllers", "test_process_group_dtypes", "test_consistency_check", "test_tracking",
    "test_sync_batch_norm", "test_resume_within_epoch", "test_torchmetrics", "test_sharded_loader", "test_prediction",
    "test_tune", "test_differentiable_allgather", "test_torch_suites", "test_process_group_methods",
)  # fmt: skip
WAITING_FILES = (
    "test_watchdog", "test_verify", "test_launcher_matrix", "test_timeouts", "test_several_hosts", "test_launch_real",
    "test_preemption", "test_security", "test_dataloader_workers", "test_restarts", "test_skipped_backward",
    "test_elastic", "test_recovery", "test_overlapping_faults", "test_functions", "test_reinitialization",
    "test_rendezvous", "test_installed_package", "test_chaos", "test_mismatches",
)  # fmt: skip
ORDER = [name for pair in zip_longest(COMPUTING_FILES, WAITING_FILES) for name in pair if name]


def pytest_configure(config: pytest.Config) -> None:
    """Create temporary files of all tests in one folder, which is removed at the end of the session.

    Terminated processes do not remove their temporary files. pytest's own folders remain in the default location.

    Also restore the default handlers of SIGINT and SIGHUP. A shell ignores SIGINT in background jobs, and nohup ignores
    SIGHUP. The processes of tests would inherit this.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # The ranks share the cores with those of other test processes. test_equivalence runs ranks that poll.
    os.environ.setdefault("UNITRAIN_POLLING", "0")
    # On a busy machine, an example can take longer than the default limit of 0.2 s.
    hypothesis.settings.register_profile(
        "unitrain", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("unitrain")
    if not hasattr(config, "workerinput"):  # this is the main process of pytest-xdist
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        folder = tempfile.TemporaryDirectory(prefix="unitrain-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TMPDIR"] = tempfile.tempdir = folder.name


# Modules of the contract suite that test code of each backend. The other modules test code that the backends share.
BACKEND_MODULES = {"broadcasts", "collectives", "gradients", "large_tensors", "parameters", "sharding"}
# Cases that are slow because every rank runs the compiler. In CI, one group of ddp and one group of horovod run them.
COMPILING_CASES = ("-compiled_models_are_reduced", "-compiled_models_are_reduced_with_sharded_gradients")


@pytest.hookimpl(tryfirst=True)  # run before pytest deselects tests by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the name of its folder and slow tests with their tier, and sort the files. Tests of the
    contract suite are in `unitrain.testing`."""
    slow = slow_tests.read()
    for item in items:
        for tier, tests in slow.items():
            if item.nodeid.removeprefix("tests/").startswith(tests):
                item.add_marker(tier)
        item.add_marker(item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else "contract")
        if item.path.name == "test_contract.py" and isinstance(item, pytest.Function):
            case, ranks = item.callspec.params["case"], item.callspec.params["ranks"]
            tier = contract_tier(item.callspec.id, case.__module__.rpartition(".")[2], ranks)
            if tier is not None:
                item.add_marker(tier)
    ranking = {name: number for number, name in enumerate(ORDER)}
    items.sort(key=lambda item: ranking.get(item.path.stem, len(ranking)))  # keeps the order within a file


def contract_tier(case_id: str, module: str, ranks: tuple[str, int]) -> str | None:
    """Return the marker of a case of the contract suite in `module` on these ranks, or None if `make test` runs the
    case."""
    if ranks in [("ddp", 2), ("horovod", 3)]:
        return "nightly"
    if case_id.endswith(COMPILING_CASES):
        return {("horovod", 2): None, ("ddp", 3): "ci"}.get(ranks, "nightly")
    return "nightly" if ranks in [("ddp", 1), ("horovod", 1)] and module not in BACKEND_MODULES else None


def pytest_collection_finish() -> None:
    """Use one thread in the test processes, and exclude the collected tests from garbage collection.

    With several processes per core, OpenMP threads spend most of their CPU time waiting for each other: a small network
    in float64 trains 25 times faster on one thread. Collected tests and imported modules are never freed, but each
    garbage collection would visit them.
    """
    gc.collect()
    gc.freeze()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Restore the environment after each test, because commands that run in the test process export variables."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Write SCRIPT of the test's module to a file and return its path."""
    path = tmp_path / "train.py"
    path.write_text(request.module.SCRIPT)
    return str(path)


@pytest.fixture
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    """Yield two new hosts (`hosts.py`), and terminate all their processes after the test.

    Tests that use this fixture must have the marker `requirements.needs_hosts`.
    """
    with hosts(2, tmp_path_factory.mktemp("hosts")) as both:
        yield both


@pytest.fixture(scope="module", autouse=True)
def _import_in_fork_server(request: pytest.FixtureRequest) -> None:
    """Import the modules in RANKS_IMPORT of the test file once in the fork server, because each rank would take seconds
    to import them."""
    if names := getattr(request.module, "RANKS_IMPORT", ()):
        import_before_fork(*names)
