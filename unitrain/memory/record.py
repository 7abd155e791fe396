"""The files of a recorded run: the request from `unitrain memory`, and the records of the ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unitrain.rank_records import read_rank_records, write_rank_record

# Called by the Trainer in the ranks of a recorded run, see `bootstrap.overrides`.
RECORDER = "unitrain.memory.recorder:active_recorder"
_REQUEST_FILE = "request.json"


@dataclass(frozen=True, kw_only=True)
class MemoryRequest:
    """Request to train `warmup_steps` steps, measure the memory of `steps` steps, and exit."""

    warmup_steps: int
    steps: int

    def write(self, folder: Path) -> None:
        """Write the request to `folder` for the ranks."""
        (folder / _REQUEST_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> MemoryRequest:
        """Read the request from `folder`."""
        return cls(**json.loads((folder / _REQUEST_FILE).read_text()))


@dataclass(frozen=True, kw_only=True)
class BlockRecord:
    """The activations if the modules of class `name` are checkpointed. See `saved_tensors.CheckpointingEffect`."""

    name: str
    calls: int
    kept_bytes: int
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """The record of one rank. All sizes are in bytes and refer to this rank.

    `steps` is the number of measured steps. `parameters` and `gradients` are the bytes of their elements, and `trained`
    the bytes of the parameters that require grad. `gradient_storages` is the memory of the gradients, which may be
    views of buckets. `buckets` is the size of DDP's buckets, or 0 if gradients are views of them, and `fusion_buffer`
    is the size of Horovod's fusion buffer. `state` is the optimizer state of this rank, `is_state_complete` is False if
    it is sharded, and `formula_state` is the complete state computed from the optimizer class, or None. `average` is
    the size of the averaged weights.

    `activations` is the largest total size of the saved tensors at any time, `float32_activations` is the part of it in
    float32, and `early_gradients` is the memory of the gradients at that time. `activations_at_peak` and
    `gradients_at_peak` are the sizes of activations and gradients at the time when their sum is largest. `other` is the
    memory in use before the measured steps, excluding the tensors above: on CPUs, Python, libraries and data.

    `forward_backward_peak` and `step_peak` are the peaks between optimizer steps and during an optimizer step, and
    `startup_peak` is the peak before the measured steps.
    """

    rank: int
    size: int
    backend: str
    device: str
    optimizers: Sequence[str]
    settings: dict[str, Any]
    steps: int
    parameters: int
    trained: int
    buffers: int
    gradients: int
    gradient_storages: int
    buckets: int
    fusion_buffer: int
    state: int
    is_state_complete: bool
    formula_state: int | None
    average: int
    activations: int
    float32_activations: int
    early_gradients: int
    activations_at_peak: int
    gradients_at_peak: int
    blocks: Sequence[BlockRecord]
    other: int
    forward_backward_peak: int
    step_peak: int
    startup_peak: int

    def write(self, folder: Path) -> None:
        """Write the record to `folder`, atomically."""
        write_rank_record(folder, self.rank, asdict(self))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> RankMemory:
        """Return the record with the values in `fields`, which may have been converted to JSON and back."""
        settings = dict(fields["settings"])
        accumulation = settings.get("gradient_accumulation_steps")
        if isinstance(accumulation, dict):  # a schedule by epoch; JSON has no integer keys
            settings["gradient_accumulation_steps"] = {int(epoch): steps for epoch, steps in accumulation.items()}
        blocks = [BlockRecord(**block) for block in fields["blocks"]]
        return cls(**fields | {"settings": settings, "blocks": blocks})

    @property
    def peak(self) -> int:
        """The peak memory of the measured steps."""
        return max(self.forward_backward_peak, self.step_peak)


def read_records(folder: Path) -> list[RankMemory] | None:
    """Read the records of all ranks from `folder`, in rank order. Return None if the record of a rank is missing."""
    rank_records = read_rank_records(folder)
    return None if rank_records is None else [RankMemory.from_fields(fields) for fields in rank_records]
