"""Random number generators: seeds derived from the run's seed, and the RNG state of this process."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch


class SeedPurpose(IntEnum):
    """Purpose of a derived seed: seeds for different purposes are independent."""

    WORKERS = 2
    RANK = 3
    SHARED = 4
    SAMPLER = 5
    MICRO_BATCH = 6
    BATCH = 7
    STEP = 8
    EVALUATION = 9


def derive_seed(seed: int, purpose: SeedPurpose, *path: int) -> int:
    """Return a 63-bit seed that depends only on the arguments. All arguments must be at least 0."""
    return int(np.random.SeedSequence([seed, purpose, *path]).generate_state(1, np.uint64)[0] >> 1)


def seed_generators(seed: int) -> None:
    """Seed the generators of torch (all devices), numpy and Python in this process."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_micro_batch(seed: int, epoch: int, step_end: int, logical_rank: int, micro_batch_index: int) -> None:
    """Seed the generators of this process for micro-batch `micro_batch_index` of a logical rank, in the step that ends
    at position `step_end` of `epoch`.

    The random numbers of a micro-batch then depend neither on the process nor on earlier steps.
    """
    seed_generators(derive_seed(seed, SeedPurpose.MICRO_BATCH, epoch, step_end, logical_rank, micro_batch_index))


def seed_evaluation_batch(position: int) -> None:
    """Seed the generators of this process for the evaluation batch that starts at `position` of the data."""
    seed_generators(derive_seed(0, SeedPurpose.EVALUATION, position))


def seed_after_step(seed: int, step: int) -> None:
    """Seed the generators of this process, after `step` steps with logical ranks. The seed is equal in all
    processes."""
    seed_generators(derive_seed(seed, SeedPurpose.STEP, step))


def capture_generators(device: torch.device) -> dict[str, Any]:
    """Return the RNG state of torch (CPU and `device`), numpy and Python, in types that load with
    `weights_only=True`."""
    # torch.load(weights_only=True) rejects numpy arrays. Tensors are copied and saved faster than lists of 625 numbers.
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    numpy_key = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    version, python_numbers, gauss_next = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_key}},
        "python": (version, torch.tensor(python_numbers, device="cpu"), gauss_next),
    }


def restore_generators(state: dict[str, Any], device: torch.device) -> None:
    """Restore the RNG state that `capture_generators` returned. If `state` has no GPU state, the GPU generator does not
    change."""
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    key = np.asarray(state["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    version, python_numbers, gauss_next = state["python"]
    random.setstate((version, tuple(python_numbers.tolist()), gauss_next))


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Context manager that restores the RNG state of this process at its end."""
    state = capture_generators(device)
    try:
        yield
    finally:
        restore_generators(state, device)


class GeneratorStates(NamedTuple):
    """States of the process-wide generators of torch (CPU and, on a GPU, its device), numpy and Python."""

    torch: torch.Tensor
    cuda: torch.Tensor | None
    numpy: Any
    python: Any


def get_generator_states(device: torch.device) -> GeneratorStates:
    """Return the RNG state of this process. Unlike `capture_generators`, it does not convert the states."""
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return GeneratorStates(torch.get_rng_state(), cuda, np.random.get_state(legacy=False), random.getstate())


def set_generator_states(states: GeneratorStates, device: torch.device) -> None:
    """Restore the RNG state that `get_generator_states` returned."""
    torch.set_rng_state(states.torch)
    if states.cuda is not None:
        torch.cuda.set_rng_state(states.cuda, device)
    np.random.set_state(states.numpy)
    random.setstate(states.python)


_CPU = torch.device("cpu")


class IsolatedGenerators:
    """Separate RNG state of torch (CPU), numpy and Python, seeded with `seed`.

    Inside `with`, the global generators use this state. Afterwards, their previous state is restored.
    """

    def __init__(self, seed: int) -> None:
        outer_states = get_generator_states(_CPU)
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        self._states = get_generator_states(_CPU)
        set_generator_states(outer_states, _CPU)

    def __enter__(self) -> None:
        self._outer_states = get_generator_states(_CPU)
        set_generator_states(self._states, _CPU)

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._states = get_generator_states(_CPU)
        set_generator_states(self._outer_states, _CPU)
