"""Evaluate the reports of all ranks. Each check is a pure function for one type of problem."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from unitrain.bootstrap.network import is_loopback
from unitrain.doctor.facts import Facts
from unitrain.doctor.peers import PeerCheckResults

Level = Literal["error", "warning", "note"]
_ORDER: tuple[Level, ...] = ("error", "warning", "note")
_GIB = 2**30
_MIN_SHARED_MEMORY_BYTES = 1 * _GIB
_MIN_FREE_BYTES = 2 * _GIB
_MIN_OPEN_FILES = 4096
_MIN_LOCKED_MEMORY_BYTES = 1 * _GIB
_MAX_CLOCK_OFFSET_SECONDS = 1.0
# Prefixes of the variables that are allowed to differ between ranks or hosts.
_PER_RANK_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HOROVOD_", "UNITRAIN_", "TORCHELASTIC", "TORCH_NCCL_ASYNC")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem with its location and consequence, and a command or an instruction to fix it."""

    level: Level
    what: str
    fix: str


@dataclass(frozen=True)
class RankReport:
    """The report of one rank. `peer_checks` is None in a job with one rank."""

    facts: Facts
    peer_checks: PeerCheckResults | None


def find_problems(reports: Sequence[RankReport]) -> list[Finding]:
    """Return the findings, most severe first. `reports` must be in rank order."""
    findings = [finding for check in _CHECKS for finding in check(reports)]
    return sorted(dict.fromkeys(findings), key=lambda finding: _ORDER.index(finding.level))


def _first_facts_per_host(reports: Sequence[RankReport]) -> list[Facts]:
    """Return the facts of the first rank per host."""
    return [report.facts for report in reports if report.facts.local_rank == 0]


def _group_by_value(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, list[Any]]:
    """Return {value: [keys]} for (key, value) pairs."""
    groups: dict[Any, list[Any]] = {}
    for key, value in pairs:
        groups.setdefault(value, []).append(key)
    return groups


def _format_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _check_versions(reports: Sequence[RankReport]) -> Iterator[Finding]:
    for name, get_value, fix in (
        ("unitrain", lambda facts: facts.unitrain, "pip install the same unitrain on every host"),
        ("torch", lambda facts: facts.torch, 'pip install "torch=={}" on every host'),
        (
            "Python",
            lambda facts: ".".join(facts.python.split(".")[:2]),
            "use one environment on every host: pickled objects and wheels require the same Python version",
        ),
    ):
        groups = _group_by_value([(report.facts.rank, get_value(report.facts)) for report in reports])
        if len(groups) > 1:
            values_text = "; ".join(f"{value} on {_format_ranks(ranks)}" for value, ranks in groups.items())
            yield Finding(
                level="error", what=f"{name} differs between ranks: {values_text}.", fix=fix.format(next(iter(groups)))
            )


def _check_horovod(reports: Sequence[RankReport]) -> Iterator[Finding]:
    hosts = _first_facts_per_host(reports)
    installed = [facts for facts in hosts if facts.horovod is not None]
    for facts in installed:
        assert facts.horovod is not None
        for problem in facts.horovod["problems"]:
            level: Level = "error" if problem["fatal"] else "note"
            yield Finding(level=level, what=f"Horovod on {facts.host}: {problem['what']}", fix=problem["fix"])
    if not installed:
        yield Finding(
            level="note",
            what="Horovod is not installed; the ddp backend does not need it.",
            fix="unitrain horovod build",
        )
    elif len(installed) < len(hosts):
        lacking = ", ".join(facts.host for facts in hosts if facts.horovod is None)
        yield Finding(
            level="error",
            what=f"Horovod is installed on some hosts, but not on {lacking}.",
            fix="unitrain horovod build",
        )
    builds = _group_by_value(
        [
            (facts.host, (facts.horovod["version"], *facts.horovod["cpu_operations"]))
            for facts in installed
            if facts.horovod
        ]
    )
    if len(builds) > 1:
        builds_text = "; ".join(f"{', '.join(build)} on {', '.join(names)}" for build, names in builds.items())
        yield Finding(
            level="error",
            what=f"Horovod differs between hosts: {builds_text}.",
            fix="unitrain horovod build --no-install  # then pip install the printed wheel on every host",
        )


def _check_gpus(reports: Sequence[RankReport]) -> Iterator[Finding]:
    for facts in _first_facts_per_host(reports):
        facts_on_host = [report.facts for report in reports if report.facts.host == facts.host]
        if facts.nvidia_driver and facts.torch_cuda is None:
            yield Finding(
                level="error",
                what=f"{facts.host} has an NVIDIA driver, but its torch {facts.torch} is built for the CPU.",
                fix="pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130",
            )
        elif facts.nvidia_driver and not facts.gpus:
            visible_devices = facts.variables.get("CUDA_VISIBLE_DEVICES")
            if visible_devices is not None:
                why, fix = f": CUDA_VISIBLE_DEVICES is {visible_devices!r}", "unset CUDA_VISIBLE_DEVICES"
            else:
                why = ""
                fix = f"nvidia-smi  # the CUDA version of the driver must be at least torch's {facts.torch_cuda}"
            yield Finding(
                level="error", what=f"{facts.host} has an NVIDIA driver, but torch sees no GPU{why}.", fix=fix
            )
        ranks_and_gpus = [
            (
                rank_facts.rank,
                rank_facts.gpus[
                    min(rank_facts.local_rank, len(rank_facts.gpus) - 1) if len(rank_facts.gpus) > 1 else 0
                ].uuid,
            )
            for rank_facts in facts_on_host
            if rank_facts.gpus
        ]
        for gpu, ranks in _group_by_value(ranks_and_gpus).items():
            if len(ranks) > 1:
                yield Finding(
                    level="error",
                    what=f"{_format_ranks(ranks).capitalize()} on {facts.host} would use the same GPU, {gpu}.",
                    fix=f"start one rank per GPU on that host, {len(_group_by_value(ranks_and_gpus))} in all, or pass "
                    "device='cpu' to unitrain.init",
                )


def _check_host_names(reports: Sequence[RankReport]) -> Iterator[Finding]:
    has_several_hosts = len({report.facts.host for report in reports}) > 1
    for report in reports:
        facts = report.facts
        if facts.local_rank != 0:
            continue
        interface_address = next(iter(facts.interfaces.values()), "ADDRESS")
        own_address = report.peer_checks.address if report.peer_checks else interface_address
        loopback_addresses = [address for address in facts.name_addresses if address.startswith("127.")]
        add_name_command = f'echo "{own_address} {facts.host}" | sudo tee -a /etc/hosts'
        if not facts.name_addresses:
            yield Finding(
                level="warning",
                what=f"The name {facts.host} does not resolve on {facts.host} itself. unitrain does not need the name, "
                "but Horovod, torchrun and MPI need it when they are launched without unitrain.",
                fix=add_name_command,
            )
        elif loopback_addresses and has_several_hosts:
            yield Finding(
                level="warning",
                what=f"The name {facts.host} resolves to {loopback_addresses[0]} on that host. unitrain uses the "
                "address of the route to the other hosts, but Horovod and torchrun without unitrain use this address, "
                "which is not reachable from other hosts.",
                fix=f"sudo sed -i '/^{loopback_addresses[0]}.*{facts.host}/d' /etc/hosts; {add_name_command}",
            )
    machines_by_host = _group_by_value(
        [(facts.machine, facts.host) for facts in _first_facts_per_host(reports) if facts.machine]
    )
    for host, machines in machines_by_host.items():
        if len(set(machines)) > 1:
            yield Finding(
                level="error",
                what=f"{len(set(machines))} machines have the name {host}. Ranks of different machines would get "
                "local ranks as if they shared a host.",
                fix="sudo hostnamectl set-hostname NAME  # a different name on each machine",
            )


def _check_interfaces(reports: Sequence[RankReport]) -> Iterator[Finding]:
    for facts in _first_facts_per_host(reports):
        for name in ("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"):
            requested = facts.variables.get(name, "")
            names = filter(None, requested.split(","))
            if any(interface not in facts.interfaces for interface in names):
                yield Finding(
                    level="error",
                    what=f"{name} is {requested!r}, but {facts.host} has only {', '.join(facts.interfaces)}.",
                    fix=f"unset {name}  # unitrain uses the interface of the route to the other hosts",
                )


def _check_reachability(reports: Sequence[RankReport]) -> Iterator[Finding]:
    for report in reports:
        for host, why in (report.peer_checks.unreachable if report.peer_checks else {}).items():
            yield Finding(
                level="error",
                what=f"{report.facts.host} cannot reach {host} at {why}. Ranks connect to arbitrary free ports.",
                fix=f"sudo ufw allow from {report.peer_checks.address if report.peer_checks else ''}  # on {host}",
            )


def _check_clocks(reports: Sequence[RankReport]) -> Iterator[Finding]:
    for report in reports:
        if report.facts.local_rank != 0 or report.peer_checks is None:
            continue
        offset_seconds = report.peer_checks.clock_offset_seconds
        if abs(offset_seconds) > _MAX_CLOCK_OFFSET_SECONDS:
            direction = "ahead of" if offset_seconds > 0 else "behind"
            yield Finding(
                level="warning",
                what=f"The clock of {report.facts.host} is {abs(offset_seconds):.1f} s {direction} rank 0's, so "
                "timestamps in logs cannot be compared.",
                fix="sudo timedatectl set-ntp true",
            )


def _check_folders(reports: Sequence[RankReport]) -> Iterator[Finding]:
    first = reports[0]
    hosts_without_folder = sorted(
        {report.facts.host for report in reports if report.peer_checks and not report.peer_checks.shares_folder}
    )
    if first.peer_checks is not None and not first.peer_checks.shares_folder:
        yield Finding(
            level="warning",
            what=f"Rank 0 cannot create files in {first.facts.folder} on {first.facts.host}, so it cannot write "
            "checkpoints there.",
            fix="start the job in a folder that you can write to, or set TrainConfig(output_dir=...) to one",
        )
    elif hosts_without_folder:
        yield Finding(
            level="warning",
            what=f"{', '.join(hosts_without_folder)}: files that rank 0 creates in {first.facts.folder} are not "
            "visible there. Only rank 0 writes checkpoints, and every host reads them to resume.",
            fix="start the job in a folder on a shared file system, or set TrainConfig(output_dir=...) to one",
        )
    for facts in _first_facts_per_host(reports):
        if facts.folder_free < _MIN_FREE_BYTES:
            yield Finding(
                level="warning",
                what=f"{facts.folder} on {facts.host} has only {facts.folder_free / _GIB:.1f} GiB of free space "
                "for checkpoints.",
                fix="TrainConfig(output_dir=...) on another disk, or keep_last=1",
            )


def _check_limits(reports: Sequence[RankReport]) -> Iterator[Finding]:
    for facts in _first_facts_per_host(reports):
        if facts.shared_memory is not None and facts.shared_memory < _MIN_SHARED_MEMORY_BYTES:
            yield Finding(
                level="warning",
                what=f"/dev/shm on {facts.host} has {facts.shared_memory / 2**20:.0f} MiB: DataLoader workers pass "
                'batches through it, and are killed by a "bus error" if it is full.',
                fix="docker run --shm-size=8g ...  # or: sudo mount -o remount,size=8g /dev/shm",
            )
        if 0 <= facts.open_files < _MIN_OPEN_FILES:
            yield Finding(
                level="warning",
                what=f"A process on {facts.host} may open only {facts.open_files} files. Many ranks or "
                "DataLoader workers need more.",
                fix="ulimit -n 65536",
            )
        if facts.infiniband and facts.locked_memory is not None and facts.locked_memory < _MIN_LOCKED_MEMORY_BYTES:
            yield Finding(
                level="warning",
                what=f"{facts.host} has InfiniBand, but the limit of locked memory is "
                f"{facts.locked_memory // 1024} KiB.",
                fix="ulimit -l unlimited  # in /etc/security/limits.conf, or LimitMEMLOCK of the scheduler's service",
            )


def _check_cores(reports: Sequence[RankReport]) -> Iterator[Finding]:
    for host, facts_on_host in _group_by_value([(report.facts, report.facts.host) for report in reports]).items():
        cores, count = len({core for facts in facts_on_host for core in facts.cores}), len(facts_on_host)
        threads = facts_on_host[0].variables.get("OMP_NUM_THREADS", "")
        if any(facts.gpus for facts in facts_on_host):
            continue
        shared = f"{cores} {'core' if cores == 1 else 'cores'} on {host}"
        if count > cores:
            what = f"{count} ranks share {shared} and will wait for each other."
            yield Finding(level="warning", what=what, fix=f"-np {cores}, or -H {host}:{cores}")
        elif threads.isdecimal() and int(threads) * count > cores:
            what = f"{count} {'rank' if count == 1 else 'ranks'} with {threads} threads each share {shared}."
            yield Finding(level="warning", what=what, fix=f"export OMP_NUM_THREADS={max(1, cores // count)}")


def _check_variables(reports: Sequence[RankReport]) -> Iterator[Finding]:
    names = sorted(
        {name for report in reports for name in report.facts.variables if not name.startswith(_PER_RANK_VARIABLES)}
    )
    for name in names:
        groups = _group_by_value([(report.facts.rank, report.facts.variables.get(name)) for report in reports])
        if len(groups) > 1:
            values_text = "; ".join(
                f"{'unset' if value is None else repr(value)} on {_format_ranks(ranks)}"
                for value, ranks in groups.items()
            )
            yield Finding(
                level="warning",
                what=f"{name} differs between ranks: {values_text}.",
                fix=f"unitrain launch -x {name} ...  # passes on the value of the launching shell",
            )


def _check_authentication(reports: Sequence[RankReport]) -> Iterator[Finding]:
    without = [report.facts.rank for report in reports if not report.facts.has_job_key]
    if len(reports) > 1 and without:
        yield Finding(
            level="warning",
            what=f"{_format_ranks(without).capitalize()} {'has' if len(without) == 1 else 'have'} no key to sign "
            "messages. Any program that can reach the ports of the job can end the job, or send it objects that "
            "execute code.",
            fix="unitrain launch ...  # or see docs/security.md for launches without unitrain launch",
        )


def _check_open_ports(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Report the libraries' connections that have no authentication, if the job uses several hosts."""
    facts = reports[0].facts
    if len({report.facts.host for report in reports}) == 1:
        return
    uses_horovodrun = "HOROVOD_GLOO_RENDEZVOUS_ADDR" in facts.variables
    services = "torch's TCPStore" + (" and Horovod's rendezvous server" if uses_horovodrun else "")
    yield Finding(
        level="note",
        what=f"{services} on {facts.host} and the data connections of all hosts have no authentication. Any program "
        "that can reach their ports can end or join the job.",
        fix="Use a private network, or a firewall that accepts connections only from "
        f"{_format_host_addresses(reports)}.",
    )
    if facts.launcher == "mpirun" and not any(name.startswith("OMPI_MCA_oob_tcp_if_") for name in facts.variables):
        yield Finding(
            level="note",
            what=f"mpirun listens on all interfaces of {facts.host}.",
            fix=f"unitrain launch --interface {_interface_between_hosts(reports[0])} ...",
        )


def _check_metrics_endpoint(reports: Sequence[RankReport]) -> Iterator[Finding]:
    """Report an endpoint of `unitrain launch --metrics-port` that other hosts may be able to read."""
    facts = reports[0].facts
    port, address = (facts.variables.get(name) for name in ("UNITRAIN_METRICS_PORT", "UNITRAIN_METRICS_ADDRESS"))
    if port and address and not (is_loopback(address) or address in ("localhost", "::1")):
        yield Finding(
            level="note",
            what=f"The metrics endpoint of rank 0 on {facts.host} listens on {address}:{port} without authentication. "
            "Any program that can reach the port can read the metrics of the job.",
            fix="Leave --metrics-address out, so that it listens on 127.0.0.1, or use a firewall that accepts "
            "connections only from the Prometheus server.",
        )


def _format_host_addresses(reports: Sequence[RankReport]) -> str:
    """Return the addresses of the hosts, separated by commas."""
    return ", ".join(dict.fromkeys(report.peer_checks.address for report in reports if report.peer_checks))


def _interface_between_hosts(report: RankReport) -> str:
    address = report.peer_checks.address if report.peer_checks else None
    return next((name for name, own_address in report.facts.interfaces.items() if own_address == address), "NAME")


_CHECKS: tuple[Callable[[Sequence[RankReport]], Iterator[Finding]], ...] = (
    _check_versions, _check_reachability, _check_gpus, _check_horovod, _check_host_names, _check_interfaces,
    _check_folders, _check_limits, _check_cores, _check_clocks, _check_variables, _check_authentication,
    _check_open_ports, _check_metrics_endpoint,
)  # fmt: skip
