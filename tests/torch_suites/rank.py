"""One rank: receives names of tests, runs the tests and sends the outcomes."""

from __future__ import annotations

import os
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal import common_distributed, common_utils

PASSED, SKIPPED, FAILED = "passed", "skipped", "failed"
_EXITS_OF_SKIPPED_TESTS = {skip.exit_code for skip in common_distributed.TEST_SKIPS.values()}


class TestedBackend(str):
    """Name of the tested backend. It also compares equal to "gloo", so that tests use their branch for Gloo's
    features."""

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, str(other)) or other == "gloo"

    __hash__ = str.__hash__


class Rank:
    """Runs the tests of `module` with `backend` in this process, whose rank and world size are in RANK and
    WORLD_SIZE."""

    def __init__(self, module: ModuleType, classes: list[type[unittest.TestCase]], backend: str) -> None:
        self._module: Any = module
        self._classes = {test_class.__name__: test_class for test_class in classes}
        self._backend = backend
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if backend != "gloo":
            self._replace_gloo()

    def serve(self, connection: Connection) -> None:
        """Run the tests that are received on `connection` as (class, test, folder), until it is closed."""
        while True:
            try:
                class_name, test, folder = connection.recv()
            except EOFError:
                return
            connection.send(self._run_test(class_name, test, Path(folder)))

    def _run_test(self, class_name: str, test: str, folder: Path) -> tuple[str, str, float]:
        """Run a test, and return the outcome, the details and the seconds."""
        started = time.monotonic()
        try:
            self._call_test(self._classes[class_name], test, folder)
        except unittest.SkipTest as reason:
            outcome, detail = SKIPPED, str(reason)
        except SystemExit as stop:
            outcome = SKIPPED if stop.code in _EXITS_OF_SKIPPED_TESTS else PASSED if not stop.code else FAILED
            detail = f"exit code {stop.code}"
        except BaseException:
            outcome, detail = FAILED, traceback.format_exc()
        else:
            outcome, detail = PASSED, ""
        if outcome != FAILED:
            try:
                self._destroy_groups()
            except BaseException:
                outcome, detail = FAILED, traceback.format_exc()
        return outcome, detail, time.monotonic() - started

    def _call_test(self, test_class: Any, test: str, folder: Path) -> None:
        tempfile.tempdir = str(folder)
        common_utils.set_rng_seed()
        if issubclass(test_class, common_distributed.MultiProcContinuousTest):
            test_class.rank, test_class.world_size = self._rank, self._size
            test_class._init_pg(self._rank, self._size, str(folder / "store"))
            instance = test_class(test)
            instance.rank, instance.world_size = self._rank, self._size
            getattr(instance, test)()
            return
        instance = test_class(test)
        instance.rank, instance.file_name = self._rank, str(folder / "store")
        if getattr(test_class, "__unittest_skip__", False) or getattr(
            getattr(test_class, test), "__unittest_skip__", False
        ):
            raise unittest.SkipTest("skipped by a decorator")
        if hasattr(self._module, "DistributedTest"):
            os.environ["TEMP_DIR"] = str(folder)
            os.environ["INIT_METHOD"] = self._module.INIT_METHOD = f"file://{folder}/init"
            self._module.Barrier.barrier_id = 0
            seconds = self._module.CUSTOM_PG_TIMEOUT.get(test, self._module.default_pg_timeout)
            dist.init_process_group(
                init_method=f"file://{folder}/store",
                backend=self._module.BACKEND,
                world_size=self._size,
                rank=self._rank,
                timeout=timedelta(seconds=seconds),
            )
            instance._barrier()
            getattr(instance, test)()
            instance._barrier()
            return
        if issubclass(test_class, common_distributed.MultiProcessTestCase):
            getattr(instance, test)()  # setUp would start the ranks
            return
        instance.setUp()
        try:
            getattr(instance, test)()
        finally:
            instance.tearDown()

    def _destroy_groups(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _replace_gloo(self) -> None:
        """Use the tested backend where tests request Gloo."""
        from unitrain.backends import horovod

        horovod.register_process_group()
        if hasattr(self._module, "BACKEND"):
            self._module.BACKEND = TestedBackend(self._backend)

        def use_backend(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if options.get("backend") in ("gloo", "cpu:gloo"):
                    options["backend"] = self._backend
                options.pop("pg_options", None)
                if arguments[:1] == ("gloo",):
                    arguments = (self._backend, *arguments[1:])
                return function(*arguments, **options)

            return call

        c10d: Any = dist.distributed_c10d
        for name in ("init_process_group", "new_group"):
            replaced = use_backend(getattr(c10d, name))
            for holder in (c10d, dist):
                setattr(holder, name, replaced)

        initialize = dist.init_process_group

        def create_group(store: Any, rank: int, size: int, *options: Any) -> Any:
            timeout = next((option for option in options if isinstance(option, timedelta)), timedelta(seconds=50))
            self._destroy_groups()
            initialize(self._backend, store=store, rank=rank, world_size=size, timeout=timeout)
            return dist.group.WORLD

        for test_class in self._classes.values():
            if hasattr(test_class, "_create_process_group_gloo"):
                test_class._create_process_group_gloo = lambda self, *arguments: create_group(*arguments)


def main(module: ModuleType, classes: list[type[unittest.TestCase]], backend: str, connection: Connection) -> None:
    """Run tests from `connection` in this process as one rank, and exit."""
    torch.set_num_threads(1)
    Rank(module, classes, backend).serve(connection)
    os._exit(0)
