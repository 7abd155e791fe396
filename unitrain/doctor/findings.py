"""What is wrong, from what the ranks have told: pure functions, each for one kind of trouble."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unitrain.doctor.facts import Facts
from unitrain.doctor.probes import Between

Level = Literal["error", "warning", "note"]
_ORDER: tuple[Level, ...] = ("error", "warning", "note")
_GIB = 2**30
_LEAST_SHARED_MEMORY = 1 * _GIB
_LEAST_FREE = 2 * _GIB
_LEAST_FILES = 4096
_MOST_CLOCK_SECONDS = 1.0
# Variables that may differ: each rank or host has its own.
_OWN = ("CUDA_VISIBLE_DEVICES", "HOROVOD_", "UNITRAIN_", "TORCHELASTIC", "TORCH_NCCL_ASYNC")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something to mend: what and where, what it leads to, and a line to paste or do against it."""

    level: Level
    what: str
    fix: str


@dataclass(frozen=True)
class Told:
    """What one rank has told; `between` is None where it is alone."""

    facts: Facts
    between: Between | None


def judge(ranks: Sequence[Told]) -> list[Finding]:
    """Return what is wrong, the worst first; `ranks` are in rank order."""
    found = [finding for look in _LOOKS for finding in look(ranks)]
    return sorted(dict.fromkeys(found), key=lambda one: _ORDER.index(one.level))


def _hosts(ranks: Sequence[Told]) -> list[Facts]:
    """The facts of the first rank of each host."""
    return [told.facts for told in ranks if told.facts.local_rank == 0]


def _groups(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """{what was told: [who told it]}"""
    groups: dict[Any, list[Any]] = {}
    for who, what in pairs:
        groups.setdefault(what, []).append(who)
    return groups


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _versions(ranks: Sequence[Told]) -> Iterator[Finding]:
    for name, of, fix in (
        ("unitrain", lambda facts: facts.unitrain, "pip install the same unitrain on every host"),
        ("torch", lambda facts: facts.torch, 'pip install "torch=={}" on every host'),
        (
            "Python",
            lambda facts: ".".join(facts.python.split(".")[:2]),
            "use one environment for all: what is pickled between ranks, and wheels, are of one version",
        ),
    ):
        groups = _groups([(told.facts.rank, of(told.facts)) for told in ranks])
        if len(groups) > 1:
            listed = "; ".join(f"{value} on {_named(who)}" for value, who in groups.items())
            yield Finding(
                level="error", what=f"{name} differs between ranks: {listed}.", fix=fix.format(next(iter(groups)))
            )


def _horovod(ranks: Sequence[Told]) -> Iterator[Finding]:
    hosts = _hosts(ranks)
    have = [facts for facts in hosts if facts.horovod is not None]
    for facts in have:
        assert facts.horovod is not None
        for problem in facts.horovod["problems"]:
            level: Level = "error" if problem["fatal"] else "note"
            yield Finding(level=level, what=f"Horovod on {facts.host}: {problem['what']}", fix=problem["fix"])
    if not have:
        yield Finding(
            level="note",
            what="Horovod is not installed; the ddp backend does not need it.",
            fix="unitrain horovod build",
        )
    elif len(have) < len(hosts):
        lacking = ", ".join(facts.host for facts in hosts if facts.horovod is None)
        yield Finding(
            level="error",
            what=f"Horovod is installed on some hosts, but not on {lacking}.",
            fix="unitrain horovod build",
        )
    builds = _groups(
        [(one.host, (one.horovod["version"], *one.horovod["cpu_operations"])) for one in have if one.horovod]
    )
    if len(builds) > 1:
        listed = "; ".join(f"{', '.join(build)} on {', '.join(who)}" for build, who in builds.items())
        yield Finding(
            level="error",
            what=f"Horovod differs between hosts: {listed}.",
            fix="unitrain horovod build --no-install  # then pip install the wheel that it names on every host",
        )


def _gpus(ranks: Sequence[Told]) -> Iterator[Finding]:
    for facts in _hosts(ranks):
        ours = [told.facts for told in ranks if told.facts.host == facts.host]
        if facts.nvidia_driver and facts.torch_cuda is None:
            yield Finding(
                level="error",
                what=f"{facts.host} has an NVIDIA driver, but its torch {facts.torch} is built for the CPU.",
                fix="pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",
            )
        elif facts.nvidia_driver and not facts.gpus:
            hidden = facts.variables.get("CUDA_VISIBLE_DEVICES")
            why = f": CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else ""
            yield Finding(
                level="error",
                what=f"{facts.host} has an NVIDIA driver, but torch sees no GPU{why}.",
                fix="nvidia-smi  # shows the driver's CUDA version, which must not be below torch's "
                f"{facts.torch_cuda}; unset CUDA_VISIBLE_DEVICES",
            )
        chosen = [
            (one.rank, one.gpus[min(one.local_rank, len(one.gpus) - 1) if len(one.gpus) > 1 else 0].uuid)
            for one in ours
            if one.gpus
        ]
        for gpu, who in _groups(chosen).items():
            if len(who) > 1:
                yield Finding(
                    level="error",
                    what=f"{_named(who).capitalize()} on {facts.host} would compute on the same GPU, {gpu}.",
                    fix=f"start {len(_groups(chosen))} ranks on that host, or pass device='cpu' to unitrain.init",
                )


def _names(ranks: Sequence[Told]) -> Iterator[Finding]:
    several = len({told.facts.host for told in ranks}) > 1
    for told in ranks:
        facts = told.facts
        if facts.local_rank != 0:
            continue
        own = told.between.address if told.between else next(iter(facts.interfaces.values()), "ADDRESS")
        loops = [address for address in facts.name_leads_to if address.startswith("127.")]
        line = f'echo "{own} {facts.host}" | sudo tee -a /etc/hosts'
        if not facts.name_leads_to:
            yield Finding(
                level="warning",
                what=f"The name {facts.host} does not resolve on {facts.host} itself. unitrain does not need it, but "
                "Horovod, torchrun and MPI by hand do.",
                fix=line,
            )
        elif loops and several:
            yield Finding(
                level="warning",
                what=f"The name {facts.host} leads to {loops[0]} on that host. unitrain takes the address that leads "
                "to the others, but Horovod and torchrun by hand take this one, which no other host reaches.",
                fix=f"sudo sed -i '/^{loops[0]}.*{facts.host}/d' /etc/hosts; {line}",
            )
    machines = _groups([(facts.machine, facts.host) for facts in _hosts(ranks) if facts.machine])
    for host, found in machines.items():
        if len(set(found)) > 1:
            yield Finding(
                level="error",
                what=f"{len(set(found))} machines are all called {host}: ranks of different machines would be numbered "
                "as if they shared one.",
                fix="sudo hostnamectl set-hostname NAME  # another one on each",
            )


def _interfaces(ranks: Sequence[Told]) -> Iterator[Finding]:
    for facts in _hosts(ranks):
        for name in ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
            asked = facts.variables.get(name, "")
            absent = [one for one in asked.split(",") if one and one not in facts.interfaces]
            if absent:
                yield Finding(
                    level="error",
                    what=f"{name} is {asked!r}, but {facts.host} has only {', '.join(facts.interfaces)}.",
                    fix=f"unset {name}  # unitrain takes the one that leads to the other hosts",
                )


def _reach(ranks: Sequence[Told]) -> Iterator[Finding]:
    for told in ranks:
        for host, why in (told.between.unreachable if told.between else {}).items():
            yield Finding(
                level="error",
                what=f"{told.facts.host} cannot reach {host} at {why}. Ranks talk on any free port.",
                fix=f"sudo ufw allow from {told.between.address if told.between else ''}  # on {host}",
            )


def _clocks(ranks: Sequence[Told]) -> Iterator[Finding]:
    for told in ranks:
        if told.facts.local_rank == 0 and told.between and abs(told.between.clock) > _MOST_CLOCK_SECONDS:
            ahead = "ahead of" if told.between.clock > 0 else "behind"
            yield Finding(
                level="warning",
                what=f"The clock of {told.facts.host} is {abs(told.between.clock):.1f} s {ahead} rank 0's: logs will "
                "tell the wrong order of what happened.",
                fix="sudo timedatectl set-ntp true",
            )


def _folders(ranks: Sequence[Told]) -> Iterator[Finding]:
    apart = sorted({told.facts.host for told in ranks if told.between and not told.between.shares_folder})
    if apart:
        yield Finding(
            level="warning",
            what=f"{', '.join(apart)}: what rank 0 writes in {ranks[0].facts.folder} is not seen there. Only rank 0 "
            "writes checkpoints, and every host reads them to go on.",
            fix="start from a folder on a shared file system, or give TrainConfig(output_dir=...) one",
        )
    for facts in _hosts(ranks):
        if facts.folder_free < _LEAST_FREE:
            yield Finding(
                level="warning",
                what=f"{facts.folder} on {facts.host} has {facts.folder_free / _GIB:.1f} GiB left for checkpoints.",
                fix="TrainConfig(output_dir=...) on another disk, or keep_last=1",
            )


def _limits(ranks: Sequence[Told]) -> Iterator[Finding]:
    for facts in _hosts(ranks):
        if facts.shared_memory is not None and facts.shared_memory < _LEAST_SHARED_MEMORY:
            yield Finding(
                level="warning",
                what=f"/dev/shm on {facts.host} has {facts.shared_memory / 2**20:.0f} MiB: DataLoader workers pass "
                'batches through it, and die of a "bus error" when it is full.',
                fix="docker run --shm-size=8g ...  # or: sudo mount -o remount,size=8g /dev/shm",
            )
        if 0 <= facts.open_files < _LEAST_FILES:
            yield Finding(
                level="warning",
                what=f"A process on {facts.host} may open {facts.open_files} files: many ranks or workers need more.",
                fix="ulimit -n 65536",
            )
        if facts.infiniband and facts.locked_memory is not None:
            yield Finding(
                level="warning",
                what=f"{facts.host} has InfiniBand, but lets a process lock only {facts.locked_memory // 1024} KiB.",
                fix="ulimit -l unlimited  # in /etc/security/limits.conf, or LimitMEMLOCK of the scheduler's service",
            )


def _cores(ranks: Sequence[Told]) -> Iterator[Finding]:
    for host, ours in _groups([(told.facts, told.facts.host) for told in ranks]).items():
        cores, count = len({core for one in ours for core in one.cores}), len(ours)
        threads = ours[0].variables.get("OMP_NUM_THREADS", "")
        if any(one.gpus for one in ours):
            continue
        shared = f"{cores} {'core' if cores == 1 else 'cores'} on {host}"
        if count > cores:
            what = f"{count} ranks share {shared}, and will wait for each other."
            yield Finding(level="warning", what=what, fix=f"-np {cores}, or -H {host}:{cores}")
        elif threads.isdecimal() and int(threads) * count > cores:
            what = f"{count} {'rank' if count == 1 else 'ranks'} of {threads} threads each share {shared}."
            yield Finding(level="warning", what=what, fix=f"export OMP_NUM_THREADS={max(1, cores // count)}")


def _variables(ranks: Sequence[Told]) -> Iterator[Finding]:
    names = sorted({name for told in ranks for name in told.facts.variables if not name.startswith(_OWN)})
    for name in names:
        groups = _groups([(told.facts.rank, told.facts.variables.get(name)) for told in ranks])
        if len(groups) > 1:
            listed = "; ".join(
                f"{'unset' if value is None else repr(value)} on {_named(who)}" for value, who in groups.items()
            )
            yield Finding(
                level="warning",
                what=f"{name} differs between ranks: {listed}.",
                fix=f"unitrain launch -x {name} ...  # hands on the value that it has where you type",
            )


def _authentication(ranks: Sequence[Told]) -> Iterator[Finding]:
    without = [told.facts.rank for told in ranks if not told.facts.has_job_key]
    if len(ranks) > 1 and without:
        yield Finding(
            level="warning",
            what=f"{_named(without)} {'has' if len(without) == 1 else 'have'} no key to sign messages with: any "
            "program that can reach the job's ports can end the job, or send it objects that run code.",
            fix="unitrain launch ...  # or see docs/security.md for a launcher that you type yourself",
        )


_LOOKS: tuple[Callable[[Sequence[Told]], Iterator[Finding]], ...] = (
    _versions, _reach, _gpus, _horovod, _names, _interfaces, _folders, _limits, _cores, _clocks, _variables,
    _authentication,
)  # fmt: skip
