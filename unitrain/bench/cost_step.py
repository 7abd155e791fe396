"""How long a training step is on many ranks: gradients travel in buckets while backward goes on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# DistributedDataParallel's, and Horovod's here: a small first bucket, so that communication begins early.
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20


@dataclass(frozen=True)
class Layer:
    """The gradients of a part of the model, in the order in which backward comes to them: their bytes, and the seconds
    that backward spends on that part."""

    size: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one rank computes in a step, without communication: seconds before and after backward, and its layers."""

    before: float
    layers: Sequence[Layer]
    after: float = 0.0

    @property
    def seconds(self) -> float:
        """How long a step takes on one rank."""
        return self.before + sum(layer.seconds for layer in self.layers) + self.after


@dataclass(frozen=True)
class Step:
    """A step: its seconds, and how much of them is communication that backward does not hide."""

    seconds: float
    exposed: float

    @property
    def efficiency(self) -> float:
        """What a rank does in a second, as a share of what one alone does."""
        return 1 - self.exposed / self.seconds


def even_work(
    step_seconds: float,
    gradient_bytes: float,
    backward_share: float = 2 / 3,
    layers: int = 100,
    largest_layer: float = FIRST_BUCKET,
) -> Work:
    """Return the work of a model whose gradients are spread evenly over backward, `backward_share` of the step.

    Backward is two of three parts of a step where it computes two gradients for each product of forward. There are at
    least `layers` layers, and as many as it takes for each to have at most `largest_layer` bytes: a bucket holds whole
    layers, so larger ones would determine the buckets' size.
    """
    layers = max(layers, math.ceil(gradient_bytes / largest_layer))
    backward = backward_share * step_seconds
    even = [Layer(gradient_bytes / layers, backward / layers)] * layers
    return Work(before=step_seconds - backward, layers=even)


def predict_step(
    work: Work, allreduce: Callable[[float], float], *, bucket: float = BUCKET, first_bucket: float = FIRST_BUCKET
) -> Step:
    """Return a step in which `allreduce(bytes)` seconds are spent on each bucket, one after the other.

    A bucket is closed by the layer that fills it, and begins its way when backward has computed that layer and the
    bucket before it has arrived. The optimizer waits for the last one.
    """
    clock, arrived, filled, limit = work.before, 0.0, 0.0, first_bucket
    for number, layer in enumerate(work.layers, 1):
        clock += layer.seconds
        filled += layer.size
        if filled and (filled >= limit or number == len(work.layers)):
            arrived = max(arrived, clock) + allreduce(filled)
            filled, limit = 0.0, bucket
    exposed = max(0.0, arrived - clock)
    return Step(work.seconds + exposed, exposed)
