"""Program of each rank when `unitrain verify` is given a function: it trains what the function returns.

It is executed by its path: python train_function.py package.module:function, or file.py:function.
"""

from __future__ import annotations

import sys
from pathlib import Path


def train(target: str) -> None:
    """Train with the arguments that the function named by `target` returns (see `factories.call_training_function`).

    The generators of torch, numpy and Python are seeded with 0 on every rank before the function is called.
    """
    import unitrain
    from unitrain import factories, randomness

    with unitrain.init() as backend:
        randomness.seed_generators(0)
        made = factories.call_training_function(target)
        arguments = {name: value for name, value in made.items() if name not in factories.FIT}
        unitrain.Trainer(**arguments, backend=backend).fit(*(made[name] for name in factories.FIT if name in made))


if __name__ == "__main__":
    # Python put the folder of this file first. The user's function is looked up in the working directory instead.
    sys.path[0] = str(Path.cwd())
    train(sys.argv[1])
