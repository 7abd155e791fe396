"""Variables that the user wants every rank to have: `-x NAME` and `-x NAME=VALUE`, as Open MPI writes them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from unitrain.launchers.errors import LaunchError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# TOKENS and TOKENIZERS are none of them.
_SECRET_WORDS = {
    *("APIKEY", "AUTH", "CREDENTIAL", "CREDENTIALS", "KEY", "PASS", "PASSPHRASE", "PASSWD", "PASSWORD", "PAT"),
    *("SECRET", "SECRETS", "SSHPASS", "TOKEN"),
}
# Names such as PGPASSWORD and GITHUBTOKEN put no "_" before the word.
_SECRET_ENDINGS = ("APIKEY", "CREDENTIALS", "PASSPHRASE", "PASSWD", "PASSWORD", "SECRET", "TOKEN", "_PWD")
_HANDED_ON = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")
_HANDED_ON_PREFIXES = ("PYTHON", "UNITRAIN_", "HOROVOD_", "NCCL_", "GLOO_", "TORCH_", "OMP_", "MKL_")
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def looks_secret(name: str, value: str = "") -> bool:
    """Return whether a variable seems to hold what other users of a host must not read: by a word of its name, as
    WANDB_API_KEY, or by a URL with a password in it."""
    upper = name.upper()
    named = upper.endswith(_SECRET_ENDINGS) or not _SECRET_WORDS.isdisjoint(upper.split("_"))
    return named or _URL_WITH_PASSWORD.search(value) is not None


def handed_on() -> list[str]:
    """Return the names of those variables here that ranks on other hosts need, sorted: what Python and the libraries
    below unitrain read. Anything else is the user's to name."""
    return sorted(name for name in os.environ if name in _HANDED_ON or name.startswith(_HANDED_ON_PREFIXES))


def parse_exports(
    texts: Iterable[str], environ: Mapping[str, str] | None = None
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the names to hand on, and the values to set first, of several "NAME" or "NAME=VALUE".

    Raises LaunchError for what is no name, a variable that is not set, or a secret's value: the line that gives it is
    itself one that everybody on the host can read.
    """
    environ = os.environ if environ is None else environ
    names: dict[str, None] = {}
    values: dict[str, str] = {}
    for text in texts:
        name, given, value = text.partition("=")
        if not _NAME.fullmatch(name):
            raise LaunchError(f"-x needs the name of a variable, got {name!r}. Write -x NAME or -x NAME=VALUE")
        if given and looks_secret(name, value):
            raise LaunchError(
                f"-x {name}=... shows a value that looks secret to everybody who lists the processes of this host. "
                f"Set it first, with: export {name}=..., and give its name alone: -x {name}"
            )
        if given:
            values[name] = value
        elif name not in environ and name not in values:
            raise LaunchError(
                f"-x {name} hands on a variable that is not set here. "
                f"Set it, with: export {name}=..., or leave -x {name} out"
            )
        names[name] = None
    return tuple(names), values
