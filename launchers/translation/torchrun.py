"""torchrun's command line: `torchrun`, `python -m torch.distributed.run` and, with its options, `...launch`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.rendezvous import DEFAULT_PORT
from unitrain.launchers.torchrun import RESTART_VARIABLES, c10d_rendezvous_options, static_rendezvous_options
from unitrain.launchers.translation.job import Job, Other, number
from unitrain.launchers.translation.options import Given, Options, Syntax, table, topics
from unitrain.launchers.translation.writing import Line, Written, options_of, variables_of

LAUNCHER = "torchrun"
_ARITY = table(
    "--help --standalone --module --no-python --run-path --virtual-local-rank --use-env",  # of torch.distributed.launch
    "--nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --max-restarts --monitor-interval "
    "--start-method --event-log-handler --role --log-dir --redirects --tee --log-line-prefix-template "
    "--local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank --master-addr "
    "--master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout --print-completion",
)
SYNTAX = Syntax(
    LAUNCHER,
    _ARITY,
    {f"--{name[2:].replace('-', '_')}": name for name in _ARITY}
    | {"-m": "--module", "-r": "--redirects", "-t": "--tee", "-h": "--help"},
)
_TOPICS = topics(
    rendezvous="--standalone --rdzv-backend --rdzv-id --rdzv-conf --rdzv-endpoint --local-addr --node-rank --role",
    output="--log-dir --redirects --tee --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters "
    "--duplicate-stderr-filters --logs-specs",
    grace="--signals-to-handle --shutdown-timeout",
    binding="--numa-binding --virtual-local-rank",
)


def read(words: Sequence[str], python: str = "python") -> Job:
    """Return the job of torchrun's words, which come after its name. `python` is the one that it starts ranks with."""
    options = Options(SYNTAX, words)
    said: list[str] = []
    nodes = _nodes(options.last("--nnodes") or "1", said)
    processes = options.last("--nproc-per-node") or "1"
    if processes in ("gpu", "cpu", "xpu", "auto"):
        raise LaunchError(
            f"--nproc-per-node {processes} counts what the host has that torchrun runs on, which only that host knows. "
            "Write the number, as in: --nproc-per-node 8"
        )
    count = number("--nproc-per-node", processes)
    address, port = options.last("--master-addr"), options.number("--master-port", least=0)
    backend = options.last("--rdzv-backend")
    server = backend is not None and backend.startswith("etcd")  # whose endpoint is none of the hosts
    endpoint = None if server else options.last("--rdzv-endpoint")
    if server:
        said.append(f"--rdzv-backend {backend} is left out: the hosts are written without a server of their own.")
    if endpoint and not options.flag("--standalone"):
        host, _, text = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
        address, port = host, number("--rdzv-endpoint HOST:PORT", text, least=0) if text else None
    if options.flag("--standalone") or (nodes == 1 and address in ("localhost", "127.0.0.1")):
        address = None
    # How its agents find each other, which of the lines it is, and what torchrun always does.
    options.all("--node-rank", "--use-env")
    restarts = options.number("--max-restarts", least=0) or 0
    program = options.program
    if options.flag("--no-python"):
        pass
    elif options.flag("--module"):
        program = (python, "-m", *program)
    else:
        program = (python, *program)
    return Job(
        program=program,
        counts=(count,) * nodes,
        address=address,
        port=port if port not in (0, DEFAULT_PORT) else None,
        max_restarts=restarts,
        others=options.others(_TOPICS),
        remarks=tuple(said),
    )


def write(job: Job) -> Written:
    """Return torchrun's line for each host."""
    if job.address is None:
        job.check_hosts_named(LAUNCHER)
    variables = {**(RESTART_VARIABLES if job.max_restarts else {}), **variables_of(job, LAUNCHER)}
    names = job.hosts or [f"host {place}" for place, _ in enumerate(job.counts, start=1)]
    rendezvous: dict[str, str] = {}
    if len(job.counts) > 1:
        rendezvous = {
            given.name: given.values[0] for one in job.others if (given := _own(one)) is not None and given.values
        }
        # What is not the same on each host, and what is written anew.
        left = ("--local-addr", "--rdzv-endpoint", *(("--rdzv-id", "--rdzv-conf") if job.max_restarts else ()))
        kept = [one for one in job.others if (given := _own(one)) is None or given.name not in left]
        job = replace(job, others=tuple(kept))
    words, said = options_of(job, LAUNCHER)
    if "--local-addr" in rendezvous and not job.max_restarts:
        said.append(f"--local-addr {rendezvous['--local-addr']} is left out, because each host has its own.")
    if len(job.counts) > 1 and job.max_restarts:
        # The static rendezvous of --master-addr ends with the first attempt.
        nodes = [
            c10d_rendezvous_options(
                f"{len(job.counts)}:{len(job.counts)}",
                count,
                job.max_restarts,
                (job.address or job.hosts[0], job.port or DEFAULT_PORT),
                is_first=place == 0,
                local_address=job.hosts[place] if job.hosts else None,
                run_id=rendezvous.get("--rdzv-id", "unitrain"),
                settings=dict(
                    part.partition("=")[::2] for part in rendezvous.get("--rdzv-conf", "").split(",") if part
                ),
            )
            for place, count in enumerate(job.counts)
        ]
        said.append("The rendezvous numbers the hosts, perhaps in another order after a failure.")
    elif len(job.counts) > 1:
        nodes = static_rendezvous_options(job.counts, job.address or job.hosts[0], job.port or DEFAULT_PORT)
    elif job.port is not None or job.address is not None:
        nodes = [["--nproc-per-node", str(job.counts[0]), "--master-port", str(job.port or DEFAULT_PORT)]]
    else:
        nodes = [["--standalone", "--nproc-per-node", str(job.counts[0])]]
    if job.max_restarts and len(job.counts) == 1:
        words = ["--max-restarts", str(job.max_restarts), *words]
    launcher, program = started(job)
    lines = [
        Line([*launcher, *options, *words, *program], variables, job.directory, name)
        for name, options in zip(names, nodes, strict=True)
    ]
    if len(lines) > 1 and job.forwarded:
        said.append(f"torchrun hands on what is set where it is typed: set {', '.join(job.forwarded)} on each host.")
    if "OMP_NUM_THREADS" not in job.environment and max(job.counts) > 1:
        said.append(
            "torchrun gives each rank one thread: set OMP_NUM_THREADS to the cores of a host divided by its ranks, "
            "where they should have more."
        )
    return Written(lines, [*job.remarks, *said])


def _own(one: Other) -> Given | None:
    """Return an option of torchrun's own as it was given, or None for one of another launcher."""
    return SYNTAX.take([*one.words, "program"])[0][0] if one.launcher == LAUNCHER else None


def _nodes(text: str, said: list[str]) -> int:
    least, colon, most = text.partition(":")
    if colon and least != most:
        said.append(f"--nnodes {text} may run on fewer hosts than {most}: the job is written for all {most}.")
    return number("--nnodes", most or least)


def started(job: Job) -> tuple[list[str], tuple[str, ...]]:
    """Return torchrun's words, and the program as torchrun takes it."""
    python = job.python
    if python is None:
        return ["torchrun"], ("--no-python", *job.program)
    program = list(job.program[1:])
    if program[:1] == ["-u"]:  # which torchrun gives to every Python
        program.pop(0)
    launcher = ["torchrun"] if "/" not in python else [python, "-m", "torch.distributed.run"]
    if program[:1] == ["-m"]:
        return launcher, ("--module", *program[1:])
    if program[:1] and program[0].startswith("-"):
        return launcher, ("--no-python", *job.program)
    return launcher, tuple(program)
