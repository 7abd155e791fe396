"""Random numbers: seeds that follow from the run's seed, and the state of this process's generators."""

from __future__ import annotations

import random
from enum import IntEnum
from typing import Any

import numpy as np
import torch


class Stream(IntEnum):
    """What a derived seed is for, so that two uses never share their numbers."""

    ORDER = 1
    WORKERS = 2
    RANK = 3


def derive_seed(seed: int, stream: Stream, *path: int) -> int:
    """Return 63 well mixed bits that depend on nothing but the arguments, which are all at least 0."""
    return int(np.random.SeedSequence([seed, stream, *path]).generate_state(1, np.uint64)[0] >> 1)


def seed_generators(seed: int) -> None:
    """Seed torch (every device), numpy and Python in this process."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def capture_generators(device: torch.device) -> dict[str, Any]:
    """Return the state of the generators of torch (CPU and `device`), numpy and Python, in types that load safely."""
    legacy: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        # torch.load(weights_only=True) takes tensors and plain numbers, and no numpy array.
        "numpy": {**legacy, "state": {**legacy["state"], "key": legacy["state"]["key"].tolist()}},
        "python": random.getstate(),
    }


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `capture_generators` returned; a state captured without a GPU leaves the GPU's generator alone."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    key = np.asarray(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    random.setstate(state["python"])
