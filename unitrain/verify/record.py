"""The files of a verified run: the request that `unitrain verify` writes, and the records that the ranks write."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# The function that the ranks of a verified run call, see `trainer_overrides`.
RECORDER = "unitrain.verify.recorder:create_recorder"
TENSORS = "end.safetensors"
_REQUEST = "request.json"
# Digests of samples are added modulo this number: the sum does not depend on the assignment of samples to ranks.
_DIGEST_MODULUS = 2**64


@dataclass(frozen=True, kw_only=True)
class Request:
    """Train `steps` steps, then end.

    A run on fewer than `as_ranks` ranks accumulates gradients to reach the global batch of `as_ranks` ranks. If
    `float64`, model and data are converted to double precision.
    """

    steps: int
    as_ranks: int
    float64: bool = False

    def write(self, folder: Path) -> None:
        """Write the request to `folder`, where the ranks read it."""
        (folder / _REQUEST).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Request:
        """Return the request in `folder`."""
        return cls(**json.loads((folder / _REQUEST).read_text()))


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One rank's part of a step.

    `loss` is the sum of the losses over `weight` samples or tokens. `samples` has the number of samples of each
    micro-batch, and `digest` is the sum of their digests. `learning_rates` has an entry per parameter group.
    """

    loss: float
    weight: float
    samples: Sequence[int]
    digest: int
    learning_rates: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """The record of one rank.

    `start` and `end` are digests of its parameters before the first and after the last step, and `moved` is the largest
    |end - start| of each parameter. `random` names the generators that were used in between. `fixed_batch` is True if
    the script sets its global batch size itself. `batch_statistics` states over which samples of a micro-batch
    BatchNorm normalizes: "rank", "all" or "none". `rounding` is the format to which gradients are rounded for
    communication: "fp16", "bf16" or "none".
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
    moved: dict[str, float]
    random: Sequence[str]
    fixed_batch: bool
    batch_statistics: str
    rounding: str

    def write(self, folder: Path) -> None:
        """Write the record to `folder`, atomically."""
        path = folder / f"rank-{self.rank}.json"
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.rename(path)

    @classmethod
    def read(cls, path: Path) -> RankRecord:
        """Return the record that a rank wrote to `path`."""
        data = json.loads(path.read_text())
        return cls(**data | {"steps": [StepRecord(**step) for step in data["steps"]]})


@dataclass(frozen=True)
class Record:
    """The records of all ranks of a run, in rank order, and the folder with the tensors of rank 0."""

    ranks: Sequence[RankRecord]
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """Return the record in `folder`, or None if a rank has not written its part."""
        found = sorted((RankRecord.read(path) for path in folder.glob("rank-*.json")), key=lambda record: record.rank)
        return cls(found, folder) if found and len(found) == found[0].size else None

    @property
    def first(self) -> RankRecord:
        """The record of rank 0, for values that are equal on all ranks."""
        return self.ranks[0]

    @property
    def steps(self) -> int:
        """The number of steps that every rank finished."""
        return min(len(record.steps) for record in self.ranks)

    def losses(self) -> list[float]:
        """Return the exact mean loss of each step, over the samples or tokens of all ranks."""
        return [
            math.fsum(one.loss for one in parts) / weight if (weight := math.fsum(one.weight for one in parts)) else 0.0
            for parts in self._by_step()
        ]

    def data(self) -> list[int]:
        """Return a digest of the samples of each step, independent of their assignment to ranks."""
        return [sum(one.digest for one in parts) % _DIGEST_MODULUS for parts in self._by_step()]

    def global_batch(self) -> list[int]:
        """Return the number of samples of each step, over all ranks."""
        return [sum(sum(one.samples) for one in parts) for parts in self._by_step()]

    def batch_norm_groups(self) -> list[list[int]]:
        """Return the sizes of the groups of samples over which BatchNorm normalizes in each step, largest first."""
        is_synced = self.first.batch_statistics == "all"
        return [
            sorted(
                map(sum, zip(*(one.samples for one in parts), strict=True))
                if is_synced
                else (count for one in parts for count in one.samples if count),
                reverse=True,
            )
            for parts in self._by_step()
        ]

    def learning_rates(self) -> list[Sequence[float]]:
        """Return the learning rates of each step, one per parameter group."""
        return [one.learning_rates for one in self.first.steps]

    def first_replica_mismatch(self) -> tuple[int, str] | None:
        """Return the first (rank, parameter) whose final bits differ from those of rank 0, or None."""
        for record in self.ranks:
            for name, digest in self.first.end.items():
                if record.end.get(name) != digest:
                    return record.rank, name
        return None

    def _by_step(self) -> list[tuple[StepRecord, ...]]:
        return list(zip(*(record.steps for record in self.ranks), strict=False))
