"""`unitrain launch`, as one more launcher."""

from __future__ import annotations

from collections.abc import Sequence

from launchers.errors import LaunchError
from launchers.exports import looks_secret
from launchers.options import parse_options
from launchers.translation.hosts import fill, listed, named
from launchers.translation.job import Job, Other
from launchers.translation.options import Options, Syntax, table
from launchers.translation.words import join
from launchers.translation.writing import IMPLIED, Line, Written, options_of

LAUNCHER = "unitrain"
SYNTAX = Syntax(
    "unitrain launch",
    table(
        "--gloo --mpi --dry-run --help",
        "--backend --launcher --num-processes --hosts -x --max-restarts --launcher-args",
    ),
    {"-np": "--num-processes", "-n": "--num-processes", "-H": "--hosts", "-h": "--help"},
)
_LAUNCHERS = {"ddp": "torchrun", "horovod": "horovodrun"}


def read(words: Sequence[str]) -> Job:
    """Return the job of the words after `unitrain launch`."""
    options = Options(SYNTAX, words)
    hosts = named(options.last("--hosts"), None, "--hosts")
    size = options.number("--num-processes") or sum(host.slots for host in hosts) or 1
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
    others = [Other(launcher, tuple(parse_options([text])), "own") for text in texts]
    others += [Other("horovodrun", ("--mpi",), "own") for one in controller[-1:] if one.name == "--mpi"]
    counts, names, said = fill(size, hosts)
    options.all("--dry-run")
    return Job(
        program=("python", *options.program),
        counts=counts,
        hosts=names,
        backend=backend,
        environment=variables,
        forwarded=tuple(dict.fromkeys(forwarded)),
        max_restarts=options.number("--max-restarts", least=0) or 0,
        others=(*others, *options.others({})),
        remarks=said,
    )


def write(job: Job) -> Written:
    """Return the line of `unitrain launch`, under the launcher that reaches all hosts and is the backend's."""
    job.check_hosts_named("unitrain launch")
    if job.python is None or job.program[1:2] == () or job.program[1].startswith("-"):
        raise LaunchError(
            f"unitrain launch runs a Python script, and the job runs: {join(job.program)}. "
            "Make it one, or choose another launcher, as in: --to torchrun"
        )
    usual = _LAUNCHERS.get(job.backend or "ddp", "torchrun")
    launcher = "mpirun" if len(job.counts) > 1 and usual == "torchrun" else usual
    mpi = any(other.words == ("--mpi",) for other in job.others)
    given, said = options_of(job, launcher)
    variables = dict(job.environment)
    for other in job.others:
        if other.launcher != launcher and launcher not in other.passes:
            variables = {**other.variables, **variables}
    if len(job.counts) > 1 or job.address or job.port:
        variables |= {} if usual == launcher == "horovodrun" else job.meeting
    secrets = {name: value for name, value in variables.items() if looks_secret(name, value)}
    options = [*(("--backend", job.backend) if job.backend else ())]
    if launcher != usual:
        options += ["--launcher", launcher]
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
    if given:
        options += ["--launcher-args", join(given)]
    line = Line(["unitrain", "launch", *options, *job.program[1:]], secrets, job.directory)
    return Written([line], [*job.remarks, *said])
