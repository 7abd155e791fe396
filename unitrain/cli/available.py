"""Which backends a command is about, and with which controllers each of them can be launched on this machine."""

from __future__ import annotations

import shutil

from unitrain.backends import registry

_CONTROLLERS = ("gloo", "mpi")


def names_of(backends: str | None) -> list[str]:
    """Return the names in "ddp,horovod", each once, or of all backends. Raises UnknownBackendError."""
    if backends is None:
        return registry.available()
    names = list(dict.fromkeys(name.strip() for name in backends.split(",")))
    for name in names:
        registry.check_result_name(name)
    return names


def available_here(names: list[str]) -> tuple[dict[str, list[str | None]], list[tuple[str, str]]]:
    """Return the controllers that each backend can be launched with here, [None] where none is to be chosen, and what
    cannot run here, with the reason."""
    from unitrain.errors import BackendUnavailableError
    from unitrain.horovod_wheel import check

    found: dict[str, list[str | None]] = {}
    skipped: list[tuple[str, str]] = []
    for name in names:
        if name == "horovod":
            horovod = check.inspect()
            fatal = [f"{problem.what} {problem.fix}" for problem in horovod.problems if problem.fatal]
            if fatal:
                skipped.append((name, fatal[0]))
                continue
            reasons = {
                one: None if one in horovod.controllers else "Horovod was built without it." for one in _CONTROLLERS
            }
            if reasons["mpi"] is None and shutil.which("mpirun") is None:
                reasons["mpi"] = "mpirun is not on PATH."
            found[name] = [one for one, reason in reasons.items() if reason is None]
            skipped += [(f"{name} over {one}", reason) for one, reason in reasons.items() if reason is not None]
        elif name in registry.BUILT_IN:
            found[name] = [None]
        else:
            try:
                registry.load(name)
                found[name] = [None]
            except BackendUnavailableError as error:
                skipped.append((name, str(error)))
    return found, skipped
