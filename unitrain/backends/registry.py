"""Backend names and the classes behind them.

A package adds a backend through the entry-point group `unitrain.backends`, name -> subclass of `Backend`. Built-in
names cannot be taken over.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from unitrain.errors import BackendUnavailableError, UnknownBackendError, did_you_mean

if TYPE_CHECKING:
    from unitrain.backends.base import Backend

BUILT_IN = {
    "ddp": "unitrain.backends.ddp:DDPBackend",
    "horovod": "unitrain.backends.horovod.backend:HorovodBackend",
    "local": "unitrain.backends.local:LocalBackend",
}
_GROUP = "unitrain.backends"
_REMEDIES = {"horovod": "Build it for this torch with: unitrain horovod build"}


def available() -> list[str]:
    """Names of all backends, built in and installed by other packages, sorted; imports none of them."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=_GROUP))})


def load(name: str) -> type[Backend]:
    """Import the class behind `name`.

    Raises UnknownBackendError for a name that nobody registered and BackendUnavailableError when its library is
    missing.
    """
    entry = _entry(name)
    try:
        loaded: type[Backend] = entry.load()
    except BackendUnavailableError:
        raise
    except ImportError as error:
        remedy = _REMEDIES.get(name, f"Install the packages that {entry.value.partition(':')[0]!r} needs.")
        raise BackendUnavailableError(f"Backend {name!r} cannot be loaded: {error}. {remedy}") from error
    return loaded


def check_backend_name(name: str) -> None:
    """Raise UnknownBackendError for a name that nobody registered; imports nothing."""
    _entry(name)


def _entry(name: str) -> EntryPoint:
    if name in BUILT_IN:
        return EntryPoint(name, BUILT_IN[name], _GROUP)
    found = entry_points(group=_GROUP, name=name)
    if not found:
        choices = available()
        raise UnknownBackendError(
            f"Unknown backend {name!r}. {did_you_mean(name, choices)}Available: {', '.join(choices)}."
        )
    return next(iter(found))
