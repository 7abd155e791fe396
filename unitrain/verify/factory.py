"""What a rank runs when it is a function that is verified: the function says what to train, the `Trainer` trains it.

python factory.py package.module:function
python factory.py file.py:function
"""

from __future__ import annotations

import sys
from pathlib import Path


def train(target: str) -> None:
    """Train what the function named by `target` returns: see `factories.made_by`.

    torch, numpy and Python are seeded with 0 before it is called, on every rank alike.
    """
    import unitrain
    from unitrain import factories, randomness

    with unitrain.init() as backend:
        randomness.seed_generators(0)
        made = factories.made_by(target)
        arguments = {name: value for name, value in made.items() if name not in factories.FIT}
        unitrain.Trainer(**arguments, backend=backend).fit(*(made[name] for name in factories.FIT if name in made))


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # not the folder of this file, whose names are not the user's
    train(sys.argv[1])
