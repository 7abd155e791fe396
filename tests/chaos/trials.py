"""Trials: the settings of a job and its faults, drawn from a seed."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from typing import Any

LOGICAL_RANKS = 4
EPOCHS, STEPS_PER_EPOCH, CHECKPOINT_EVERY = 3, 8, 3
STEPS = EPOCHS * STEPS_PER_EPOCH

# Phases in which an incident can happen. `Incident.number` is the number of starts of the rank for "start" and "init",
# of steps for "forward" and "optimizer step", of epochs for "validation" and "epoch end", and of file operations in the
# output folder for "checkpoint". "resume" and "fit end" ignore the number.
PHASES = (
    "start", "init", "resume", "forward", "optimizer step", "validation", "epoch end", "checkpoint", "fit end"
)  # fmt: skip
# Faults that occur inside the rank of an incident.
OWN_FAULTS = ("kill", "exception", "stop")
# Faults that the runner injects: FAULTS on one or two hosts, NETWORK_FAULTS only on two hosts.
FAULTS = (
    "kill a rank", "kill all ranks", "kill the command", "kill the launcher", "terminate the command", "stop a rank",
    "stop the command", "stop the launcher", "full disk",
)  # fmt: skip
NETWORK_FAULTS = ("cut the link", "slow link", "lose a host")
# The runner injects this fault only into elastic jobs on one host.
SLOTS_FAULT = "change the slots"


@dataclass(frozen=True)
class Fault:
    """A fault that the runner injects `delay_seconds` after an incident. A temporary fault lasts `seconds`. `number` is
    a rank, modulo the number of ranks, or a number of slots."""

    kind: str
    delay_seconds: float = 0.0
    seconds: float = 0.0
    number: int = 0


@dataclass(frozen=True)
class Incident:
    """Faults that start when `rank`, modulo the number of ranks, reaches a phase. An incident happens once per trial.

    `own` is the fault that occurs inside this rank, or empty. The fault "stop" lasts `own_seconds`.
    """

    phase: str
    number: int
    rank: int
    own: str = ""
    own_seconds: float = 0.0
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True)
class Start:
    """Settings with which the runner starts the job. `ranks` is the number of ranks on each host."""

    backend: str
    launcher: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Trial:
    """A job and its faults. The job is started with each element of `starts` in turn until it succeeds. If it does not
    succeed, further starts use the last element."""

    starts: tuple[Start, ...]
    incidents: tuple[Incident, ...]
    is_logical: bool = True
    shard: str = "none"
    is_elastic: bool = False
    standby: bool = False
    in_memory: bool = False
    is_async: bool = True
    max_restarts: int = 2
    timeout_seconds: float = 20.0

    @property
    def num_hosts(self) -> int:
        return len(self.starts[0].ranks)

    @property
    def fills_disk(self) -> bool:
        """Whether a fault fills the file system of the output folder."""
        return any(fault.kind == "full disk" for incident in self.incidents for fault in incident.faults)

    @property
    def needs_mount(self) -> bool:
        """Whether the trial needs two hosts, or fills a separate file system."""
        return self.num_hosts == 2 or self.fills_disk

    @property
    def options(self) -> list[str]:
        """The names of the enabled options."""
        flags = {
            "logical ranks": self.is_logical, "sharding": self.shard != "none", "elastic": self.is_elastic,
            "standby ranks": self.standby, "checkpoints in memory": self.in_memory,
            "asynchronous checkpoints": self.is_async, "two hosts": self.num_hosts == 2,
        }  # fmt: skip
        return [name for name, is_set in flags.items() if is_set]


def to_json(trial: Trial) -> str:
    """Return the trial on one line, for the option --trial."""
    return json.dumps(asdict(trial))


def parse_trial(text: str) -> Trial:
    """Return the trial that `to_json` has converted to `text`."""
    found: dict[str, Any] = json.loads(text)
    starts = tuple(Start(row["backend"], row["launcher"], tuple(row["ranks"])) for row in found.pop("starts"))
    incidents = tuple(
        Incident(**{**row, "faults": tuple(Fault(**fault) for fault in row["faults"])})
        for row in found.pop("incidents")
    )
    return Trial(starts, incidents, **found)


def draw_trial(seed: int) -> Trial:
    """Return the trial of a seed."""
    rng = random.Random(seed)
    num_hosts = 2 if rng.random() < 0.25 else 1
    is_logical = rng.random() < 0.75
    is_elastic = is_logical and rng.random() < 0.35
    # Without logical ranks, the results of three ranks depend on the order of gradients in DDP's buckets, which differs
    # in the first step after a restart.
    max_ranks = 3 if is_logical else 2
    starts = [_draw_start(rng, num_hosts, max_ranks, is_elastic=is_elastic)]
    for _ in range(2):
        # Without logical ranks, the exact results depend on the backend and on the number of ranks.
        starts.append(_draw_start(rng, num_hosts, max_ranks, is_elastic=is_elastic) if is_logical else starts[0])
    shard = "none" if is_logical else rng.choice(["none", "none", "state", "gradients", "parameters"])
    incidents = tuple(_draw_incident(rng, num_hosts, is_elastic=is_elastic) for _ in range(rng.randint(1, 4)))
    return Trial(
        tuple(starts),
        incidents,
        is_logical=is_logical,
        shard=shard,
        is_elastic=is_elastic,
        standby=rng.random() < 0.4,
        in_memory=rng.random() < 0.5,
        is_async=rng.random() < 0.6,
        max_restarts=rng.randint(1, 3),
    )


def _draw_start(rng: random.Random, num_hosts: int, max_ranks: int, *, is_elastic: bool) -> Start:
    backend = rng.choice(["ddp", "horovod"])
    launchers = ["torchrun", "torchrun", "horovodrun", "horovodrun", "mpirun"]
    if num_hosts == 2 and is_elastic:
        launchers = ["horovodrun", "horovodrun", "mpirun"]
    launcher = rng.choice(launchers)
    if launcher == "horovodrun" and backend == "ddp" and rng.random() < 0.7:
        backend = "horovod"
    ranks = (1, rng.randint(1, max_ranks - 1)) if num_hosts == 2 else (rng.choice([1, 2, 2, max_ranks]),)
    if num_hosts == 2 and is_elastic and (backend, launcher) == ("ddp", "mpirun"):
        return Start("ddp", "torchrun", (1, 1))  # torchrun's agents need equal numbers of slots
    return Start(backend, launcher, ranks)


def _draw_incident(rng: random.Random, num_hosts: int, *, is_elastic: bool) -> Incident:
    phase = rng.choice([*PHASES, "forward", "optimizer step", "checkpoint"])
    numbers = {"start": 3, "init": 3, "resume": 3, "validation": EPOCHS, "epoch end": EPOCHS, "checkpoint": 80}
    number = rng.randint(1, numbers.get(phase, STEPS))
    # Rank 0 writes the files.
    rank = 0 if phase == "checkpoint" else rng.randrange(3)
    own = rng.choice(["", "kill", "kill", "exception", "stop"])
    if own == "exception" and phase == "checkpoint":
        own = "kill"
    kinds = [*FAULTS, *(NETWORK_FAULTS * 2 if num_hosts == 2 else ())]
    if is_elastic and num_hosts == 1:
        kinds += [SLOTS_FAULT] * 5
    count = rng.choice([0, 1, 1, 2, 2] if own else [1, 2, 2, 3])
    faults = tuple(_draw_fault(rng, rng.choice(kinds)) for _ in range(count))
    return Incident(phase, number, rank, own, _draw_stop_seconds(rng) if own == "stop" else 0.0, faults)


def _draw_stop_seconds(rng: random.Random) -> float:
    """Return the duration for which a rank is stopped. It may exceed the timeout of the rank."""
    return 60.0 if rng.random() < 0.08 else round(rng.uniform(0.1, 3.0), 2)


def _draw_fault(rng: random.Random, kind: str) -> Fault:
    delay = rng.choice([0.0, 0.0, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0])
    if kind == SLOTS_FAULT:
        return Fault(kind, delay, number=rng.randint(1, 3))
    longest = {"stop the command": 3.0, "stop the launcher": 3.0, "full disk": 4.0}
    longest |= {"cut the link": 6.0, "slow link": 6.0, "lose a host": 6.0}
    seconds = round(rng.uniform(0.1, longest[kind]), 2) if kind in longest else 0.0
    if kind == "stop a rank":
        seconds = _draw_stop_seconds(rng)
    return Fault(kind, delay, seconds, rng.randrange(3))
