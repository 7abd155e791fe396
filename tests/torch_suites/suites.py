"""The suites and the tests that they select."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

WHEEL_MODULE = "torch.testing._internal.distributed.distributed_test"


@dataclass(frozen=True)
class Suite:
    """Tests of one module, which run on `size` ranks.

    `module` is the name of a module of the wheel, or the path of a file relative to the folder of PyTorch's checkout.
    If `size` is None, each test class defines its number of ranks. `single_rank` contains the names of classes whose
    tests run on one rank.
    """

    name: str
    title: str
    module: str
    size: int | None
    selects: Callable[[str], bool] = lambda test: True
    single_rank: tuple[str, ...] = ()

    @property
    def is_in_wheel(self) -> bool:
        return not self.module.endswith(".py")


def _starts_with(*prefixes: str) -> Callable[[str], bool]:
    return lambda test: test.startswith(prefixes)


def _is_group_test(test: str) -> bool:
    return "group" in test


_FOLDER = "test/distributed"
# Other test files for checkpoints, DDP's communication hooks and functional collectives need GPUs.
_CHECKPOINT_FILES = ("checkpoint", "file_system_checkpoint_cpu", "format_utils")
SUITES = (
    Suite("wheel", "DistributedTest", WHEEL_MODULE, 2),
    Suite("groups", "DistributedTest, groups, 3 ranks", WHEEL_MODULE, 3, _is_group_test),
    Suite(
        "direct",
        "ProcessGroupGlooTest (direct method calls)",
        f"{_FOLDER}/test_c10d_gloo.py",
        None,
        _starts_with("ProcessGroupGlooTest."),
    ),
    Suite(
        "reducer",
        "DDP, comm hooks, reducer",
        f"{_FOLDER}/test_c10d_gloo.py",
        None,
        _starts_with("DistributedDataParallelTest.", "ReducerTest.", "CommTest."),
        ("ReducerTest",),
    ),
    Suite("common", "DDP, and process groups implemented in Python", f"{_FOLDER}/test_c10d_common.py", None),
    Suite("wrapper", "checks of arguments (TORCH_DISTRIBUTED_DEBUG)", f"{_FOLDER}/test_pg_wrapper.py", None),
    Suite("join", "Join", f"{_FOLDER}/algorithms/test_join.py", None),
    Suite("objects", "object collectives", f"{_FOLDER}/test_c10d_object_collectives.py", None),
    Suite("zero", "ZeroRedundancyOptimizer", f"{_FOLDER}/optim/test_zero_redundancy_optimizer.py", None),
    Suite("mesh", "DeviceMesh", f"{_FOLDER}/test_device_mesh.py", None),
    *(
        Suite(f"checkpoint.{name}", f"distributed checkpoint, {name}", f"{_FOLDER}/checkpoint/test_{name}.py", None)
        for name in _CHECKPOINT_FILES
    ),
)
BY_NAME = {suite.name: suite for suite in SUITES}


def load_module(suite: Suite, folder: Path | None) -> ModuleType:
    """Import the module of a suite from the wheel or from `folder`.

    Set the environment variables for Gloo first, because decorators in the module read them during the import.
    """
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(suite.size or 2), INIT_METHOD="file://unused")
    if suite.is_in_wheel:
        return importlib.import_module(suite.module)
    assert folder is not None
    path = folder / suite.module
    sys.path[:0] = [str(path.parent), str(folder / "test")]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def find_test_classes(suite: Suite, module: ModuleType) -> list[type[unittest.TestCase]]:
    """Return the classes with multi-rank tests and the classes in `suite.single_rank`."""
    from torch.testing._internal import common_distributed

    if suite.is_in_wheel:
        wheel: Any = module
        return [type("DistributedTest", (wheel.TestDistBackend, wheel.DistributedTest._DistTestBase), {})]
    bases = (common_distributed.MultiProcessTestCase, common_distributed.MultiProcContinuousTest)
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and (issubclass(value, bases) or value.__name__ in suite.single_rank)
    ]


def select_tests(suite: Suite, classes: list[type[unittest.TestCase]]) -> Iterator[tuple[type[unittest.TestCase], str]]:
    """Yield the class and the name of each test that the suite selects, in the order of `classes`, alphabetically
    within a class."""
    for test_class in classes:
        for name in unittest.TestLoader().getTestCaseNames(test_class):
            if suite.selects(f"{test_class.__name__}.{name}"):
                yield test_class, name
