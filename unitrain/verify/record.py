"""The files of a verified run: the request from `unitrain verify`, and the records of the ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from unitrain.rank_records import read_rank_records, write_rank_record

# Called by the ranks of a verified run, see `bootstrap.overrides`.
RECORDER = "unitrain.verify.recorder:create_recorder"
TENSORS_FILE = "end.safetensors"
_REQUEST_FILE = "request.json"
# Sums of sample digests are reduced modulo this number. A sum does not depend on the assignment of samples to ranks.
_DIGEST_MODULUS = 2**64


@dataclass(frozen=True, kw_only=True)
class RecordRequest:
    """Request to train `steps` steps and exit.

    A run on fewer than `emulated_ranks` ranks matches the global batch size of `emulated_ranks` ranks: it accumulates
    gradients or, with synchronized BatchNorm, uses larger batches. This does not apply to a script that sets the global
    batch size or logical ranks. With `float64`, model and data are converted to double precision. With `bits`, a digest
    of the bits of each tensor is recorded after each step.
    """

    steps: int
    emulated_ranks: int
    float64: bool = False
    bits: bool = False

    def write(self, folder: Path) -> None:
        """Write the request to `folder` for the ranks."""
        (folder / _REQUEST_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> RecordRequest:
        """Read the request from `folder`."""
        return cls(**json.loads((folder / _REQUEST_FILE).read_text()))


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The record of one step on one rank.

    `loss` is the sum of the losses over `weight` samples or tokens. `samples` contains the number of samples per
    micro-batch, and `digest` is the sum of the sample digests. `learning_rates` has one entry per parameter group.
    With RecordRequest.bits, `losses` contains the loss of each micro-batch, and `tensors` the digest of each parameter,
    optimizer state, averaged weight and, on rank 0, buffer after the step.
    """

    loss: float
    weight: float
    samples: Sequence[int]
    digest: int
    learning_rates: Sequence[float]
    losses: Sequence[float] = ()
    tensors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The record of one rank.

    `start` and `end` are digests of the parameters before the first and after the last step, and `max_change` is the
    largest |end - start| per parameter. `used_rngs` names the random number generators that were used during training.
    `has_fixed_global_batch_size` is True if the script sets the global batch size or logical ranks. Without BatchNorm,
    `batch_statistics` is "none"; otherwise, it states whether BatchNorm normalizes over one "rank" or over "all" ranks.
    `compression_dtype` is the format of compressed gradients: "fp16", "bf16" or "none".
    """

    rank: int
    size: int
    backend: str
    transport: str
    device: str
    optimizer: str
    steps: Sequence[StepRecord]
    start: dict[str, str]
    end: dict[str, str]
    max_change: dict[str, float]
    used_rngs: Sequence[str]
    has_fixed_global_batch_size: bool
    batch_statistics: str
    compression_dtype: str

    def write(self, folder: Path) -> None:
        """Write the record to `folder`, atomically."""
        write_rank_record(folder, self.rank, asdict(self))

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> RankRecord:
        """Return the record with the values in `fields`."""
        return cls(**fields | {"steps": [StepRecord(**step) for step in fields["steps"]]})


@dataclass(frozen=True)
class Record:
    """The records of all ranks of a run in rank order, and the folder with the tensors of rank 0."""

    rank_records: Sequence[RankRecord]
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """Read the record from `folder`. Return None if the record of a rank is missing."""
        rank_records = read_rank_records(folder)
        return (
            None if rank_records is None else cls([RankRecord.from_fields(fields) for fields in rank_records], folder)
        )

    @property
    def first(self) -> RankRecord:
        """The record of rank 0, for values that are equal on all ranks."""
        return self.rank_records[0]

    @property
    def steps(self) -> int:
        """The number of steps completed by every rank."""
        return min(len(record.steps) for record in self.rank_records)

    def losses(self) -> list[float]:
        """Return the mean loss per step over the samples or tokens of all ranks; 0 for a step without samples."""
        return [
            math.fsum(step.loss for step in parts) / weight
            if (weight := math.fsum(step.weight for step in parts))
            else 0.0
            for parts in self._records_by_step()
        ]

    def sample_digests(self) -> list[int]:
        """Return a digest of the samples per step, independent of their assignment to ranks."""
        return [sum(step.digest for step in parts) % _DIGEST_MODULUS for parts in self._records_by_step()]

    def global_batch_sizes(self) -> list[int]:
        """Return the global batch size per step."""
        return [sum(sum(step.samples) for step in parts) for parts in self._records_by_step()]

    def batch_norm_groups(self) -> list[list[int]]:
        """Return, for each step, the numbers of samples over which BatchNorm normalizes, largest first."""
        is_synced = self.first.batch_statistics == "all"
        return [
            sorted(
                map(sum, zip(*(step.samples for step in parts), strict=True))
                if is_synced
                else (count for step in parts for count in step.samples if count),
                reverse=True,
            )
            for parts in self._records_by_step()
        ]

    def learning_rates(self) -> list[Sequence[float]]:
        """Return the learning rates per step, one per parameter group."""
        return [step.learning_rates for step in self.first.steps]

    def first_replica_mismatch(self) -> tuple[int, str] | None:
        """Return the first (rank, parameter) that is not bitwise equal to rank 0 at the end, or None."""
        for record in self.rank_records:
            for name, digest in self.first.end.items():
                if record.end.get(name) != digest:
                    return record.rank, name
        return None

    def _records_by_step(self) -> list[tuple[StepRecord, ...]]:
        return list(zip(*(record.steps for record in self.rank_records), strict=False))
