"""`unitrain launch`, as one more launcher."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers.arguments import looks_secret, parse_launcher_args
from unitrain.launchers.elastic import parse_elastic
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.translation.hosts import fill, listed, named
from unitrain.launchers.translation.job import Job, Other
from unitrain.launchers.translation.options import Given, Options, Syntax, table, topics
from unitrain.launchers.translation.words import join
from unitrain.launchers.translation.writing import IMPLIED, Line, Written, options_of

LAUNCHER = "unitrain launch"
SYNTAX = Syntax(
    LAUNCHER,
    table(
        "--gloo --mpi --dry-run --help --module --untuned",
        "--backend --launcher --num-processes --hosts --hostfile --interface -x --max-restarts --launcher-args "
        "--elastic --host-discovery-script --elastic-timeout --log-dir",
    ),
    {"-np": "--num-processes", "-n": "--num-processes", "-H": "--hosts", "-h": "--help", "-m": "--module"},
)
_TOPICS = topics(output="--log-dir", elastic="--elastic --elastic-timeout --host-discovery-script")
_TARGET = "unitrain"
_LAUNCHERS = {"ddp": "torchrun", "horovod": "horovodrun"}


def read(words: Sequence[str]) -> Job:
    """Return the job of the words after `unitrain launch`."""
    options = Options(SYNTAX, words)
    hosts = named(options.last("--hosts"), options.last("--hostfile"), "--hostfile")
    slots = sum(host.slots for host in hosts)
    size = options.number("--num-processes") or slots or 1
    script = options.last("--host-discovery-script")
    elastic = options.last("--elastic")
    if elastic is not None:
        most = parse_elastic(elastic).most
        size = min(most, slots or most)
    controller = options.all("--gloo", "--mpi")
    backend, launcher = options.last("--backend"), options.last("--launcher")
    launcher = launcher or (
        "horovodrun" if controller and backend is None else _LAUNCHERS.get(backend or "", "torchrun")
    )
    backend = backend or IMPLIED.get(launcher, "ddp")
    variables: dict[str, str] = {}
    forwarded: list[str] = []
    for one in options.all("-x"):
        name, equals, value = one.values[0].partition("=")
        if equals:
            variables[name] = value
        else:
            forwarded.append(name)
    texts = [one.values[0] for one in options.all("--launcher-args")]
    others = [Other(launcher, tuple(parse_launcher_args([text])), "own") for text in texts]
    others += [Other("horovodrun", ("--mpi",), "own") for one in controller[-1:] if one.name == "--mpi"]
    for one in options.all("--interface"):
        others.append(_network(one))
    if elastic is not None:
        found = ("--elastic", elastic, *(("--host-discovery-script", script) if script is not None else ()))
        others.append(Other(LAUNCHER, found, "elastic"))
    counts, names, said = fill(size, hosts)
    if launcher == "srun" and not hosts:
        said = (*said, "The hosts are those of the allocation: the job is written for one. Name them with --hosts.")
    options.all("--dry-run")
    module = ("-m",) if options.flag("--module") else ()
    return Job(
        program=("python", *module, *options.program),
        counts=counts,
        hosts=names,
        backend=backend,
        environment=variables,
        forwarded=tuple(dict.fromkeys(forwarded)),
        max_restarts=options.number("--max-restarts", least=0) or 0,
        discovery=script if elastic is not None else None,
        others=(*others, *options.others(_TOPICS)),
        remarks=said,
    )


def write(job: Job) -> Written:
    """Return the line of `unitrain launch`, under the launcher that reaches all hosts and is the backend's."""
    job.check_hosts_named(LAUNCHER)
    start = job.program[1:2]
    if job.python is None or start == () or (start[0].startswith("-") and (start[0] != "-m" or not job.program[2:])):
        raise LaunchError(
            f"unitrain launch runs a Python script, and the job runs: {join(job.program)}. "
            "Make it one, or choose another launcher, as in: --to torchrun"
        )
    usual = _LAUNCHERS.get(job.backend or "ddp", "torchrun")
    launcher = "mpirun" if len(job.counts) > 1 and usual == "torchrun" else usual
    mpi = any(other.words == ("--mpi",) for other in job.others)
    # Its own options, and those of another launcher that have a counterpart among them.
    own = [
        word for one in job.others for word in (one.words if one.launcher == LAUNCHER else one.passes.get(_TARGET, ()))
    ]
    rest = tuple(one for one in job.others if one.launcher != LAUNCHER and _TARGET not in one.passes)
    given, said = options_of(replace(job, others=rest), launcher)
    if any(one.launcher != LAUNCHER and "--elastic" in one.passes.get(_TARGET, ()) for one in job.others):
        said.append(
            "With --elastic, unitrain launch starts the job again when its hosts change: a Trainer then resumes from "
            "its newest checkpoint, and hvd.elastic is not used."
        )
    variables = dict(job.environment)
    for other in rest:
        if other.launcher != launcher and launcher not in other.passes:
            variables = {**other.variables, **variables}
    if len(job.counts) > 1 or job.address or job.port:
        variables |= {} if usual == launcher == "horovodrun" else job.rendezvous
    secrets = {name: value for name, value in variables.items() if looks_secret(name, value)}
    options = [*(("--backend", job.backend) if job.backend else ())]
    if launcher != usual:
        options += ["--launcher", launcher]
    if "--elastic" not in own:  # which says how many ranks there may be
        options += ["-np", str(job.size)]
    if job.hosts:
        options += ["-H", listed(job.slots)]
    if mpi and launcher == "horovodrun":
        options.append("--mpi")
        given = [word for word in given if word != "--mpi"]
    for name in dict.fromkeys([*job.forwarded, *secrets]):
        options += ["-x", name]
    for name, value in variables.items():
        if name not in secrets:
            options += ["-x", f"{name}={value}"]
    if job.max_restarts:
        options += ["--max-restarts", str(job.max_restarts)]
    options += own
    if given:
        options += ["--launcher-args", join(given)]
    line = Line(["unitrain", "launch", *options, *job.program[1:]], secrets, job.directory)
    return Written([line], [*job.remarks, *said])


def _network(one: Given) -> Other:
    """Return --interface with what it does under other launchers, as unitrain launch does it there."""
    name = one.values[0]
    variables = dict.fromkeys(("GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME"), name)
    settings = [word for part in ("btl", "oob") for word in ("-mca", f"{part}_tcp_if_include", name)]
    passes = {
        "horovodrun": ("--network-interfaces", name),
        "mpirun": (*(word for item in variables.items() for word in ("-x", "=".join(item))), *settings),
    }
    return Other(LAUNCHER, one.words, "network", passes=passes, variables=variables)
