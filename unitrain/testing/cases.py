"""How a sentence of the contract becomes a test: a function of a started backend, run on every rank, that asserts."""

from __future__ import annotations

from collections.abc import Callable

from unitrain.backends.base import Backend

Case = Callable[[Backend], None]
CASES: dict[str, Case] = {}


def contract(case: Case) -> Case:
    """Add `case` to the suite under its own name."""
    assert case.__name__ not in CASES, f"two cases are called {case.__name__}"
    CASES[case.__name__] = case
    return case


def raises(kind: type[BaseException], text: str, action: Callable[[], object]) -> str:
    """Assert that `action` raises a `kind` whose message contains `text`, and return the message."""
    try:
        action()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {str(error)!r}"
        return str(error)
    raise AssertionError(f"{kind.__name__} with {text!r} was not raised")


def same_on_every_rank(backend: Backend, value: object) -> None:
    """Assert that every rank passes an equal `value`."""
    values = backend.allgather_object(value)
    assert all(other == values[0] for other in values), f"the ranks differ: {values}"
