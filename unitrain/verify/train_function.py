"""Script that each rank runs if the target of `unitrain verify` is a function, which returns the training arguments.

Usage: python train_function.py package.module:function, or file.py:function.
"""

from __future__ import annotations

import sys
from pathlib import Path


def train(target: str) -> None:
    """Train with the arguments returned by the function `target` (see `factories.call_training_function`).

    Seeds the generators of torch, numpy and Python with 0 on every rank before the call.
    """
    import unitrain
    from unitrain import factories, randomness

    with unitrain.init() as backend:
        randomness.seed_generators(0)
        all_arguments = factories.call_training_function(target)
        names = factories.FIT_ARGUMENTS
        trainer_arguments = {name: value for name, value in all_arguments.items() if name not in names}
        fit_arguments = [all_arguments[name] for name in names if name in all_arguments]
        unitrain.Trainer(**trainer_arguments, backend=backend).fit(*fit_arguments)


if __name__ == "__main__":
    # The working directory, which contains the user's function, replaces the folder of this file, which Python has
    # prepended.
    sys.path[0] = str(Path.cwd())
    train(sys.argv[1])
