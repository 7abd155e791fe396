"""What can be set without changing what is computed, and the values that are worth a try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Knob:
    """An environment variable, what it is in a sentence, what it is by itself, and what else to try."""

    variable: str
    says: str
    default: str
    others: tuple[str, ...]


_BUCKETS = Knob(
    "UNITRAIN_BUCKETS_MB",
    "gradients travel in buckets: MiB of the first, and of the rest",
    "1,25",
    ("25,25", "1,5", "5,5", "1,100", "100,100"),
)
_VIEW = Knob("UNITRAIN_BUCKET_VIEW", "gradients lie in the buckets (1), or are copied (0)", "1", ("0",))
_CYCLE = Knob(
    "HOROVOD_CYCLE_TIME", "ms between two looks of Horovod at what is to be done", "0.5", ("0.1", "1", "2", "5")
)
_FUSION = Knob(
    "HOROVOD_FUSION_THRESHOLD", "bytes up to which Horovod puts buckets together", "134217728", ("0", "16777216")
)


def knobs(backend: str, threads: int | None, cores_per_rank: int) -> list[Knob]:
    """Return what can be tuned for `backend`; `threads` is what a rank has by itself, None where a GPU computes."""
    found = [_BUCKETS, _VIEW]
    if backend == "horovod":
        found += [_CYCLE, _FUSION]
    if threads is not None:
        counts = {count for count in (1, cores_per_rank // 2, cores_per_rank, 2 * cores_per_rank) if count > 0}
        others = tuple(str(count) for count in sorted(counts - {threads}))
        if others:
            found.append(Knob("OMP_NUM_THREADS", "threads of a rank", str(threads), others))
    return found


def shown(settings: Mapping[str, str]) -> str:
    """Return settings as a shell takes them."""
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "as it is"
