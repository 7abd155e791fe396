"""Arguments that `unitrain launch` passes on: options of the launcher, and environment variables of the ranks."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from unitrain.launchers.errors import LaunchError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FORWARDED_NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
_FORWARDED_PREFIXES = ("PYTHON", "UNITRAIN_", "HOROVOD_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")
# Launchers set these variables on each rank. Forwarding a single value would assign the same rank to all processes.
_RANK_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "PMIX_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"),
}


def parse_launcher_args(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the words of all `--launcher-args` values, which are split as by a shell.

    Raises LaunchError for invalid quoting, and for a value that does not begin with an option.
    """
    words: list[str] = []
    for text in texts:
        try:
            words_of_text = shlex.split(text)
        except ValueError as error:
            raise LaunchError(
                f"--launcher-args {text!r} cannot be split into words: {error}. Quote it as for a shell, as in "
                '--launcher-args "--bind-to core"'
            ) from error
        if not words_of_text or not words_of_text[0].startswith("-"):
            # Otherwise, the launcher would execute the first word of `text` as the program.
            raise LaunchError(
                f"--launcher-args {text!r} does not begin with an option. Give the option with its values, as in "
                '--launcher-args "--bind-to core"'
            )
        words += words_of_text
    return tuple(words)


def merge_options(defaults: Iterable[Sequence[str]], options: Sequence[str]) -> tuple[str, ...]:
    """Return `options`, preceded by the `defaults` that they do not override. Open MPI rejects an option that occurs
    twice.

    The last word of a default is its value; the words before it identify the option. The number of leading dashes is
    ignored.
    """
    plain = [word.lstrip("-") for word in options]
    kept_defaults: list[str] = []
    for default in defaults:
        name = [word.lstrip("-") for word in default[:-1]]
        if not any(plain[start : start + len(name)] == name for start in range(len(plain))):
            kept_defaults += default
    return (*kept_defaults, *options)


def parse_exports(
    texts: Iterable[str], environ: Mapping[str, str] | None = None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Parse the values of `-x`, each NAME or NAME=VALUE. Return all names, and the values of NAME=VALUE.

    Any value may be secret, and every user of the host can read command lines. Launchers therefore pass values out of
    band, in the environment of a process or through a pipe, and messages show NAME=... Raises LaunchError for invalid
    names, for NAME if the variable is not set, and for variables that the launcher sets on each rank.
    """
    environ = os.environ if environ is None else environ
    names: dict[str, None] = {}
    values: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not _NAME.fullmatch(name):
            raise LaunchError(f"-x needs the name of a variable, got {name!r}. Write -x NAME or -x NAME=VALUE")
        if name in _RANK_VARIABLES:
            raise LaunchError(
                f"-x {name} sets {name} to one value on all ranks, but the launcher sets it on each rank. "
                f"Leave -x {name} out. Use -np to set the number of ranks."
            )
        if equals:
            values[name] = value
        elif name not in environ and name not in values:
            raise LaunchError(
                f"-x {name} forwards a variable that is not set here. "
                f"Set it, with: export {name}=..., or leave -x {name} out"
            )
        names[name] = None
    return tuple(names), values


def check_no_backend(values: Mapping[str, str]) -> None:
    """Raise LaunchError if the `values` of -x contain UNITRAIN_BACKEND, which `unitrain launch` sets."""
    if "UNITRAIN_BACKEND" in values:
        raise LaunchError(
            f"-x UNITRAIN_BACKEND={values['UNITRAIN_BACKEND']} is not supported, because unitrain launch sets this "
            f"variable. Use: --backend {values['UNITRAIN_BACKEND']}"
        )


def names_forwarded_by_default() -> list[str]:
    """Return the sorted names of the variables that torchrun and mpirun forward to other hosts without -x.

    They are the search paths, the virtual environment, and settings of Python and of libraries that unitrain uses.
    """
    return sorted(name for name in os.environ if name in _FORWARDED_NAMES or name.startswith(_FORWARDED_PREFIXES))
