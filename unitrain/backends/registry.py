"""Names of backends and their classes.

A package adds a backend with an entry point in the group `unitrain.backends`: a name and a subclass of `Backend`. It
cannot replace a built-in backend.
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
_FIXES = {"horovod": "Build it for this torch with: unitrain horovod build"}


def available() -> list[str]:
    """Return the sorted names of all built-in and installed backends. Imports none of them."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=_GROUP))})


def load(name: str) -> type[Backend]:
    """Import and return the class of backend `name`.

    Raises UnknownBackendError for an unregistered name, and BackendUnavailableError if a module, a class or a shared
    library is missing.
    """
    entry = _find_entry_point(name)
    try:
        loaded: type[Backend] = entry.load()
    except BackendUnavailableError:
        raise
    except (ImportError, AttributeError, OSError) as error:  # a module, class or shared library is missing
        fix = _FIXES.get(name, f"Install the packages that {entry.value.partition(':')[0]!r} needs.")
        raise BackendUnavailableError(f"Backend {name!r} cannot be loaded: {error}. {fix}") from error
    return loaded


def check_backend_name(name: str) -> None:
    """Raise UnknownBackendError for an unregistered name. Imports nothing."""
    _find_entry_point(name)


def _find_entry_point(name: str) -> EntryPoint:
    if name in BUILT_IN:
        return EntryPoint(name, BUILT_IN[name], _GROUP)
    matches = entry_points(group=_GROUP, name=name)
    if not matches:
        choices = available()
        raise UnknownBackendError(
            f"Unknown backend {name!r}. {did_you_mean(name, choices)}Available: {', '.join(choices)}."
        )
    return next(iter(matches))
