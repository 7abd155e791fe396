"""Training as described by configuration files, and the resolved configuration of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from unitrain.backends.base import Backend
from unitrain.checkpoint import files, output_folder
from unitrain.config_files.instantiation import build_arguments
from unitrain.config_files.parser import PYTHON_PATH, ParsedConfig, describe_versions, module_folders
from unitrain.factories import FIT_ARGUMENTS


def train(parsed: ParsedConfig) -> dict[str, float]:
    """Train as described by `parsed`, and return the results of `Trainer.fit`. All ranks must call this function.

    The resolved configuration is stored as config.yaml in the output folder and in each checkpoint. If `parsed` was
    read from such a file, the run is repeated in a new folder, unless the command line sets an output folder, or
    `resume` is set.
    """
    import unitrain

    values = parsed.values
    if values.output_dir is not None:
        values.output_dir = str(Path(values.output_dir).expanduser())
    with unitrain.init(
        values.backend, device=values.device, transport=values.transport, timeout_seconds=values.timeout_seconds
    ) as backend:
        if (folder := _choose_rerun_folder(parsed, backend)) is not None:
            if backend.rank == 0:
                click.echo(f"Repeating the run of '{parsed.files[-1].path}' in the new folder '{folder}'.")
            values.output_dir = folder
        arguments = build_arguments(parsed)
        fit_arguments = [arguments.pop(name) for name in FIT_ARGUMENTS]
        trainer = unitrain.Trainer(**arguments, backend=backend, config_text=_resolved_text(parsed))
        return trainer.fit(*fit_arguments)


def _resolved_text(parsed: ParsedConfig) -> str:
    """Return the resolved configuration. The text does not depend on restarts of the run, so `resume` is false unless
    it selects the checkpoint of another run."""
    values = parsed.values
    changes: dict[str, Any] = {PYTHON_PATH: module_folders(parsed.files)}
    own = None if values.output_dir is None else files.real_path(Path(values.output_dir))
    if (
        isinstance(values.resume, bool)
        or values.resume == "auto"
        or files.real_path(Path(values.resume).expanduser()) == own
    ):
        changes["resume"] = False
    stored = f"{values.output_dir or 'FOLDER'}/{files.CONFIG}"
    return (
        f"# Resolved configuration of a run of `unitrain train`. {describe_versions()}\n"
        f"# Repeat the run:    unitrain train {stored}\n"
        f"# Continue the run:  unitrain train {stored} --resume true\n"
    ) + parsed.to_yaml(**changes)


def _choose_rerun_folder(parsed: ParsedConfig, backend: Backend) -> str | None:
    """Return a new output folder if the run of a stored configuration is repeated, otherwise None.

    The name is that of the run's folder with the next free number. A restarted job keeps its folder. All ranks must
    call this function.
    """
    values = parsed.values
    is_selected = any(word.startswith(("--output_dir", "--resume")) for word in parsed.overrides)
    if not parsed.files or values.output_dir is None or is_selected or values.resume:
        return None
    folder, file = Path(values.output_dir), files.real_path(parsed.files[-1].path)
    if file.name != files.CONFIG or files.real_path(folder) not in (file.parent, file.parent.parent):
        return None

    def find() -> str:
        suffix = 2
        while True:
            candidate = folder.with_name(f"{folder.name}-{suffix}")
            if not candidate.exists() or output_folder.belongs_to_earlier_attempt(candidate):
                return str(candidate)
            suffix += 1

    task_description = f"find a new folder for the run of '{folder}'"
    free_folder = output_folder.run_on_rank_zero(backend, task_description, output_folder.CHECK_WRITABLE, find)
    new_folder: str = backend.broadcast_object(free_folder)
    return new_folder
