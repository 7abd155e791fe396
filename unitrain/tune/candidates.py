"""What can be set without changing what is computed, and the values that are worth a try."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unitrain.backends.capabilities import Tunable

# The variables that the built-in backends can be tuned by.
BUILT_IN = frozenset(
    {
        *("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD", "OMP_NUM_THREADS"),
        *("UNITRAIN_BUCKETS_MB", "UNITRAIN_BUCKET_VIEW"),
    }
)


def tunables(of_backend: Sequence[Tunable], threads: int | None, cores_per_rank: int) -> list[Tunable]:
    """Return what can be tuned: the backend's own, and the threads of a rank, which has so many by itself; None where a
    GPU computes."""
    found = list(of_backend)
    if threads is not None:
        counts = {count for count in (1, cores_per_rank // 2, cores_per_rank, 2 * cores_per_rank) if count > 0}
        others = tuple(str(count) for count in sorted(counts - {threads}))
        if others:
            found.append(Tunable("OMP_NUM_THREADS", "threads of a rank", str(threads), others))
    return found


def shown(settings: Mapping[str, str]) -> str:
    """Return settings as a shell takes them."""
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "as it is"
