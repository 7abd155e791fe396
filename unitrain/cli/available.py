"""Parse the --backends option, and detect the backends available on this machine."""

from __future__ import annotations

import shutil

from unitrain.backends import registry

_CONTROLLERS = ("gloo", "mpi")


def parse_backends(backends: str | None) -> list[str]:
    """Return the distinct names in "ddp,horovod", or all registered backends for None. Raises UnknownBackendError."""
    if backends is None:
        return registry.available()
    names = list(dict.fromkeys(name.strip() for name in backends.split(",")))
    for name in names:
        registry.check_backend_name(name)
    return names


def find_available_backends(names: list[str]) -> tuple[dict[str, list[str | None]], list[tuple[str, str]]]:
    """Return the available controllers per backend, and (name, reason) for each unavailable backend or controller.

    Backends other than Horovod have the single controller None.
    """
    from unitrain.errors import BackendUnavailableError
    from unitrain.horovod_wheel import check

    controllers_by_backend: dict[str, list[str | None]] = {}
    skipped: list[tuple[str, str]] = []
    for name in names:
        if name == "horovod":
            report = check.inspect()
            fatal = [f"{problem.what} {problem.fix}" for problem in report.problems if problem.fatal]
            if fatal:
                skipped.append((name, fatal[0]))
                continue
            reasons = {
                controller: None if controller in report.controllers else f"Horovod was built without {controller}."
                for controller in _CONTROLLERS
            }
            if reasons["mpi"] is None and shutil.which("mpirun") is None:
                reasons["mpi"] = "mpirun is not on PATH."
            controllers_by_backend[name] = [controller for controller, reason in reasons.items() if reason is None]
            skipped += [
                (f"{name} over {controller}", reason) for controller, reason in reasons.items() if reason is not None
            ]
        elif name in registry.BUILT_IN:
            controllers_by_backend[name] = [None]
        else:
            try:
                registry.load(name)
                controllers_by_backend[name] = [None]
            except BackendUnavailableError as error:
                skipped.append((name, str(error)))
    return controllers_by_backend, skipped
