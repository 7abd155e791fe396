"""Random numbers: seeds that follow from the run's seed, and the state of this process's generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import TracebackType
from typing import Any

import numpy as np
import torch


class Stream(IntEnum):
    """What a derived seed is for, so that two uses never share their numbers."""

    WORKERS = 2
    RANK = 3
    SHARED = 4
    SAMPLER = 5


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


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Afterwards the generators of this process go on as if nothing had been drawn inside."""
    state = capture_generators(device)
    try:
        yield
    finally:
        restore_generators(state, device)


class IsolatedGenerators:
    """Random numbers of torch's CPU, numpy and Python that begin with `seed`, apart from the rest of the process.

    Inside `with` the global generators are these; outside they go on as if nobody had drawn in between.
    """

    def __init__(self, seed: int) -> None:
        outer = _global_states()
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self._own = _global_states()
        _set_global_states(outer)

    def __enter__(self) -> None:
        self._outer = _global_states()
        _set_global_states(self._own)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._own = _global_states()
        _set_global_states(self._outer)


_States = tuple[torch.Tensor, Any, Any]


def _global_states() -> _States:
    return torch.get_rng_state(), np.random.get_state(legacy=False), random.getstate()


def _set_global_states(states: _States) -> None:
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])
