"""What is asked of a run that is verified, and what its ranks tell: files in a folder of the run's own."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# The variable that names the folder of a run that is verified; set for its processes only.
FOLDER = "UNITRAIN_VERIFY"
TENSORS = "end.safetensors"
_REQUEST = "request.json"
# Digests of samples are added up modulo this: a sum does not depend on which rank had which sample, and when.
_DIGESTS = 2**64


@dataclass(frozen=True, kw_only=True)
class Request:
    """Train `steps` steps and end. A run on fewer than `as_ranks` ranks accumulates until its global batch is theirs.

    With `float64` model and data are converted to double precision.
    """

    steps: int
    as_ranks: int
    float64: bool = False

    def write(self, folder: Path) -> None:
        """Leave it in `folder`, for the ranks."""
        (folder / _REQUEST).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Request:
        """Return what was left in `folder`."""
        return cls(**json.loads((folder / _REQUEST).read_text()))


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One rank's part of a step: the sum of its losses and how many samples or tokens that is over, how many samples
    each of its micro-steps had, the sum of their digests, and the optimizer's learning rates."""

    loss: float
    weight: float
    samples: Sequence[int]
    digest: int
    learning_rates: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What one rank did. `start` and `end` are the digests of its parameters before the first step and after the last,
    and `moved` is the largest |end - start| of each parameter.

    `random` names the generators that gave numbers in between, `fixed_batch` tells that the script states its global
    batch itself, `batch_statistics` whose samples of a micro-step BatchNorm computes over: "rank", "all" or "none"; and
    `rounding` the format that gradients are rounded to as they travel: "fp16", "bf16" or "none".
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
        """Leave it in `folder`, whole or not at all."""
        path = folder / f"rank-{self.rank}.json"
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.rename(path)

    @classmethod
    def read(cls, path: Path) -> RankRecord:
        """Return what a rank wrote to `path`."""
        told = json.loads(path.read_text())
        return cls(**told | {"steps": [StepRecord(**step) for step in told["steps"]]})


@dataclass(frozen=True)
class Record:
    """What all ranks of a run did, in rank order, and the folder with rank 0's tensors."""

    ranks: Sequence[RankRecord]
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> Record | None:
        """Return what the ranks left in `folder`, None unless all of them did."""
        found = sorted((RankRecord.read(path) for path in folder.glob("rank-*.json")), key=lambda told: told.rank)
        return cls(found, folder) if found and len(found) == found[0].size else None

    @property
    def first(self) -> RankRecord:
        """What is the same on every rank is read from here."""
        return self.ranks[0]

    @property
    def steps(self) -> int:
        """The number of steps that every rank finished."""
        return min(len(told.steps) for told in self.ranks)

    def losses(self) -> list[float]:
        """Return the exact mean loss of each step, over the samples or tokens of all ranks."""
        return [
            math.fsum(one.loss for one in parts) / weight if (weight := math.fsum(one.weight for one in parts)) else 0.0
            for parts in self._by_step()
        ]

    def data(self) -> list[int]:
        """Return a digest of the samples of each step, whichever ranks had them."""
        return [sum(one.digest for one in parts) % _DIGESTS for parts in self._by_step()]

    def global_batch(self) -> list[int]:
        """Return the number of samples of each step."""
        return [sum(sum(one.samples) for one in parts) for parts in self._by_step()]

    def normalised(self) -> list[list[int]]:
        """Return over how many samples at a time BatchNorm computes in each step, largest first."""
        whole = self.first.batch_statistics == "all"
        return [
            sorted(
                map(sum, zip(*(one.samples for one in parts), strict=True))
                if whole
                else (count for one in parts for count in one.samples if count),
                reverse=True,
            )
            for parts in self._by_step()
        ]

    def learning_rates(self) -> list[Sequence[float]]:
        """Return the optimizer's learning rates at each step, one of each group."""
        return [one.learning_rates for one in self.first.steps]

    def unlike_rank_zero(self) -> tuple[int, str] | None:
        """Return a rank and the parameter that ends there with other bits than on rank 0, None when there is none."""
        for told in self.ranks:
            for name, digest in self.first.end.items():
                if told.end.get(name) != digest:
                    return told.rank, name
        return None

    def _by_step(self) -> list[tuple[StepRecord, ...]]:
        return list(zip(*(told.steps for told in self.ranks), strict=False))
