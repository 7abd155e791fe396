"""Causes of slow ranks: the evidence for each cause, and suggested fixes."""

from __future__ import annotations

from typing import NamedTuple

# A cause must explain at least this fraction of the excess time.
MIN_EXPLAINED_FRACTION = 0.5
# If a process uses at least this fraction of its cores, its threads wait for each other rather than for other
# processes.
_MIN_OWN_CPU_FRACTION = 0.8


class RankFigures(NamedTuple):
    """Seconds per step of one rank: the phases of `stragglers.TRAINING`, then the evidence of causes.

    `forward` is part of `compute`. `copy` is the duration of host-to-device copies. `cpu_wait` is the time for which a
    thread of the rank was runnable but not running, except `throttled`, the time for which a CPU quota stopped it.
    `worker_wait` is the same for DataLoader workers. `cpu` is the CPU time of the process divided by the number of its
    cores. `network` is the time for which the slowest TCP connection was limited by the network.
    """

    data: float = 0.0
    compute: float = 0.0
    wait: float = 0.0
    update: float = 0.0
    forward: float = 0.0
    copy: float = 0.0
    cpu_wait: float = 0.0
    worker_wait: float = 0.0
    throttled: float = 0.0
    cpu: float = 0.0
    network: float = 0.0

    @property
    def work(self) -> float:
        """The time in which the rank is busy."""
        return self.data + self.compute + self.update

    @property
    def backward(self) -> float:
        """The part of `compute` after the forward pass."""
        return max(0.0, self.compute - self.forward)


class Cause(NamedTuple):
    """The name of a cause, as part of a sentence, and a sentence that suggests a fix."""

    text: str
    suggestion: str


CAUSES = {
    "data_loading": Cause(
        "data loading",
        "Increase num_workers, or make the dataset's __getitem__ and its storage faster.",
    ),
    "copy": Cause(
        "host-to-device copy",
        "Use pinned memory (DataLoader(pin_memory=True)), copy less data, and check the PCIe link with nvidia-smi -q.",
    ),
    "forward": Cause(
        "forward pass",
        "Compare the inputs, the code that depends on the rank, and the clock rate of this device with another rank.",
    ),
    "backward": Cause(
        "backward pass",
        "Compare the inputs, gradient hooks, and the clock rate of this device with another rank.",
    ),
    "update": Cause(
        "optimizer update",
        "Check callbacks and gradient hooks that run on this rank only.",
    ),
    "cpu_quota": Cause(
        "CPU quota",
        "Raise the CPU limit of the container or cgroup, or start fewer threads and workers.",
    ),
    "other_processes": Cause(
        "other processes on its cores",
        "Stop them, or bind the rank to other cores.",
    ),
    "own_threads": Cause(
        "more threads than cores",
        "Reduce OMP_NUM_THREADS, or give the rank more cores.",
    ),
    "network": Cause(
        "network link",
        "Check the cable, the port and the traffic of this link, or exclude the host.",
    ),
}
CPU_CAUSES = ("cpu_quota", "other_processes", "own_threads")


def find_cause(figures: RankFigures, reference: RankFigures, phase: str) -> str:
    """Return the cause (a key of CAUSES) that makes `phase` longer in `figures` than in `reference`, the figures of
    other ranks or of earlier steps.

    Waiting for a core is the cause if it explains half of the excess of the rank or of the part of the step that would
    be named otherwise: a part that is longer because its threads did not run is not itself the cause.
    """
    parts = ("forward", "backward") if phase == "compute" else (phase,)
    part = max(parts, key=lambda part: getattr(figures, part) - getattr(reference, part))
    part_excess = getattr(figures, part) - getattr(reference, part)
    min_explained = MIN_EXPLAINED_FRACTION * min(figures.work - reference.work, part_excess)
    throttled = figures.throttled - reference.throttled
    waiting = figures.cpu_wait - reference.cpu_wait
    if phase == "data":
        waiting = max(waiting, figures.worker_wait - reference.worker_wait)
    if throttled + waiting >= min_explained:
        if throttled >= waiting:
            return "cpu_quota"
        is_saturated = figures.cpu >= _MIN_OWN_CPU_FRACTION * (figures.work + figures.wait)
        return "own_threads" if is_saturated else "other_processes"
    if phase == "data":
        return "copy" if figures.copy - reference.copy >= min_explained else "data_loading"
    return part


def describe_figures(cause: str, figures: RankFigures, step_seconds: float) -> str:
    """Return the figures that are evidence of `cause`, such as "waited 12 ms a step for a core"; empty for causes
    without such figures."""
    if cause == "cpu_quota":
        fraction = min(1.0, figures.throttled / (step_seconds or 1.0))
        return f"stopped for {format_milliseconds(figures.throttled)} ms a step, {fraction:.0%} of the time"
    if cause in ("other_processes", "own_threads"):
        waited = format_milliseconds(max(figures.cpu_wait, figures.worker_wait))
        return f"waited {waited} ms a step for a core"
    if cause == "copy":
        return f"copies take {format_milliseconds(figures.copy)} ms a step"
    if cause in ("forward", "backward"):
        return f"{format_milliseconds(figures.forward if cause == 'forward' else figures.backward)} ms a step"
    return ""


def format_milliseconds(seconds: float) -> str:
    """Return a duration in milliseconds as text, without the unit."""
    number = 1000 * seconds
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
