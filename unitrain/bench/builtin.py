"""What `unitrain bench train` knows by name."""

from __future__ import annotations

# The function of each in bench/models.py, and so many steps that a turn takes a good part of a second.
BUILT_IN = {
    "tiny": ("tiny", 300),
    "25M": ("mlp_25m", 10),
    "gpt": ("gpt", 20),
    "resnet18": ("resnet18", 2),
    "resnet50": ("resnet50", 2),
}
STEPS = 20  # of anything else


def resolve(target: str) -> tuple[str, int]:
    """Return the function that `target` names, and how many steps a turn has where nothing is said of it."""
    if target not in BUILT_IN:
        return target, STEPS
    function, steps = BUILT_IN[target]
    return f"unitrain.bench.models:{function}", steps
