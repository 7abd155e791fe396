"""What a rank runs when it is a function that is verified: the function says what to train, the `Trainer` trains it.

python factory.py package.module:function
python factory.py file.py:function
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FIT = ("train_data", "val_data")


def train(target: str) -> None:
    """Train what the function named by `target` returns: the arguments of `Trainer` and `Trainer.fit`, by name.

    The function takes no arguments and returns a dictionary, on every rank alike, with "model", "optimizer", "loss_fn",
    "config" and "train_data", and what else these take, without "backend". torch, numpy and Python are seeded with 0
    before it is called. Raises ConfigError for a function that is not there, or returns something else.
    """
    import unitrain
    from unitrain import randomness
    from unitrain.errors import ConfigError

    with unitrain.init() as backend:
        randomness.seed_generators(0)
        made = _function(target, ConfigError)()
        if not isinstance(made, Mapping):
            raise ConfigError(
                f"{target} returned a {type(made).__name__}. Let it return a dictionary with the arguments of Trainer "
                "and fit: model, optimizer, loss_fn, config and train_data."
            )
        parameters = inspect.signature(unitrain.Trainer).parameters
        _check_names(target, made, [*parameters, *_FIT], ConfigError)
        arguments = {name: value for name, value in made.items() if name not in _FIT}
        unitrain.Trainer(**arguments, backend=backend).fit(*(made[name] for name in _FIT if name in made))


def _function(target: str, error: type[Exception]) -> Any:
    module, _, name = target.rpartition(":")
    if module.endswith(".py"):
        path = Path(module).resolve()
        sys.path.insert(0, str(path.parent))
        module = path.stem
    found = vars(importlib.import_module(module))
    if not callable(found.get(name)):
        raise error(f"There is no function {name!r} in {module}. Name one that returns the arguments of Trainer.")
    return found[name]


def _check_names(target: str, made: Mapping[str, Any], known: list[str], error: type[Exception]) -> None:
    from unitrain.errors import did_you_mean

    known.remove("backend")
    for name in made:
        if name not in known:
            raise error(
                f"{target} returned {name!r}, which is no argument of Trainer or fit. {did_you_mean(str(name), known)}"
                f"Known: {', '.join(known)}."
            )
    lacking = [name for name in ("model", "optimizer", "loss_fn", "config", "train_data") if name not in made]
    if lacking:
        raise error(
            f"{target} returned no {', '.join(lacking)}. Trainer and fit need {'it' if len(lacking) == 1 else 'them'}."
        )


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # not the folder of this file, whose names are not the user's
    train(sys.argv[1])
