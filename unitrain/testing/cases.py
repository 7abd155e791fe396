"""Registration of contract cases: functions that take a started backend, and run on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType

from unitrain.backends.base import Backend
from unitrain.errors import UnsupportedError

Case = Callable[[Backend], None]
CASES: dict[str, Case] = {}


def contract(case: Case) -> Case:
    """Add `case` to the suite under the name of the function. On a GPU, the case creates its tensors there by
    default."""

    @functools.wraps(case)
    def on_device(backend: Backend) -> None:
        if backend.device.type == "cpu":
            return case(backend)
        with backend.device:
            return case(backend)

    assert case.__name__ not in CASES, f"duplicate case {case.__name__}"
    CASES[case.__name__] = on_device
    return on_device


def may_raise_unsupported_error(case: Case) -> Case:
    """Accept UnsupportedError, with the same message on every rank, from a backend of another package.

    The backends of unitrain must pass the case.
    """

    @functools.wraps(case)
    def may_raise_unsupported(backend: Backend) -> None:
        try:
            case(backend)
        except UnsupportedError as error:
            if type(backend).__module__.startswith("unitrain."):
                raise
            assert_same_on_every_rank(backend, str(error))

    return may_raise_unsupported


def raises(error_class: type[BaseException], text: str, action: Callable[[], object]) -> str:
    """Assert that `action` raises an `error_class` with `text` in its message, and return the message."""
    try:
        action()
    except error_class as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
        return str(error)
    raise AssertionError(f"{error_class.__name__} with {text!r} was not raised")


def assert_same_on_every_rank(backend: Backend, value: object) -> None:
    """Assert that `value` is equal on every rank. Every rank must call this function."""
    values = backend.allgather_object(value)
    assert all(value_of_rank == values[0] for value_of_rank in values), f"the ranks differ: {values}"


@contextmanager
def replaced_settings(module: ModuleType, settings: Mapping[str, object]) -> Iterator[None]:
    """Context manager in which the constants of `module` have the values of `settings`. All ranks must use it."""
    original_settings = {name: getattr(module, name) for name in settings}
    for name, value in settings.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in original_settings.items():
            setattr(module, name, value)
