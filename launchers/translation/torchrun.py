"""The command line of torchrun, and of torch.distributed.run and torch.distributed.launch run with `python -m`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers.errors import LaunchError
from unitrain.launchers.rendezvous import DEFAULT_PORT
from unitrain.launchers.spec import after_options
from unitrain.launchers.torchrun import RESTART_VARIABLES, c10d_rendezvous_options, static_rendezvous_options
from unitrain.launchers.translation.job import Job, LauncherOption, parse_number
from unitrain.launchers.translation.options import Options, ParsedOption, Syntax, arity_table, topic_by_option
from unitrain.launchers.translation.writing import CommandLine, Translation, options_for, variables_for

LAUNCHER = "torchrun"
_ARITY = arity_table(
    # --use-env is an option of torch.distributed.launch.
    "--help --standalone --module --no-python --run-path --virtual-local-rank --use-env",
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
_TOPICS = topic_by_option(
    rendezvous="--standalone --rdzv-backend --rdzv-id --rdzv-conf --rdzv-endpoint --local-addr --node-rank",
    output="--log-dir --redirects --tee --log-line-prefix-template --local-ranks-filter --duplicate-stdout-filters "
    "--duplicate-stderr-filters --logs-specs",
    grace="--signals-to-handle --shutdown-timeout",
    binding="--numa-binding",
)


def parse(words: Sequence[str], python: str = "python") -> Job:
    """Parse the words after `torchrun` into a job. `python` is the interpreter of the ranks."""
    options = Options(SYNTAX, words)
    remarks: list[str] = []
    num_nodes = _parse_num_nodes(options.take_last("--nnodes") or "1", remarks)
    processes = options.take_last("--nproc-per-node") or "1"
    if processes in ("gpu", "cpu", "xpu", "auto"):
        raise LaunchError(
            f"--nproc-per-node {processes} depends on the host that runs torchrun, so the number is unknown here. "
            "Write the number, as in: --nproc-per-node 8"
        )
    count = parse_number("--nproc-per-node", processes)
    address, port = options.take_last("--master-addr"), options.take_number("--master-port", minimum=0)
    backend = options.take_last("--rdzv-backend")
    uses_etcd = backend is not None and backend.startswith("etcd")  # the endpoint is then the etcd server, not a host
    endpoint = None if uses_etcd else options.take_last("--rdzv-endpoint")
    if uses_etcd:
        remarks.append(f"--rdzv-backend {backend} is left out: the translated job does not use an etcd server.")
    is_standalone = options.take_flag("--standalone")
    if endpoint and not is_standalone:
        has_port = ":" in endpoint and not endpoint.endswith("]")  # [::1] is an IPv6 address
        host, _, text = endpoint.rpartition(":") if has_port else (endpoint, "", "")
        address, port = host, parse_number("--rdzv-endpoint HOST:PORT", text, minimum=0) if text else port
    if is_standalone or (num_nodes == 1 and address in ("localhost", "127.0.0.1")):
        address = None
    # The node rank of this command, and an option that torchrun always implies.
    options.take_all("--node-rank", "--use-env")
    max_restarts = options.take_number("--max-restarts", minimum=0)
    program = options.program
    if options.take_flag("--no-python"):
        pass
    elif options.take_flag("--module"):
        program = (python, "-m", *program)
    else:
        program = (python, *program)
    return Job(
        program=program,
        ranks_per_host=(count,) * num_nodes,
        address=address,
        port=port if port not in (0, DEFAULT_PORT) else None,
        max_restarts=max_restarts,
        launcher_options=options.remaining(_TOPICS),
        remarks=tuple(remarks),
    )


def build(job: Job) -> Translation:
    """Return the torchrun command of each host."""
    if job.address is None:
        job.check_hosts_named(LAUNCHER)
    variables = {**(RESTART_VARIABLES if job.max_restarts else {}), **variables_for(job, LAUNCHER)}
    names = job.hosts or [f"host {host_number}" for host_number, _ in enumerate(job.ranks_per_host, start=1)]
    rendezvous: dict[str, str] = {}
    if len(job.ranks_per_host) > 1:
        rendezvous = {
            parsed.name: parsed.values[0]
            for option in job.launcher_options
            if (parsed := _parse_torchrun_option(option)) is not None and parsed.values
        }
        # Options that differ between hosts or that are generated below.
        omitted = ("--local-addr", "--rdzv-endpoint", *(("--rdzv-id", "--rdzv-conf") if job.max_restarts else ()))
        kept_options = [
            option
            for option in job.launcher_options
            if (parsed := _parse_torchrun_option(option)) is None or parsed.name not in omitted
        ]
        job = replace(job, launcher_options=tuple(kept_options))
    extra_options, remarks = options_for(job, LAUNCHER)
    if "--local-addr" in rendezvous and not job.max_restarts:
        remarks.append(f"--local-addr {rendezvous['--local-addr']} is left out: each host needs its own address.")
    if len(job.ranks_per_host) > 1 and job.max_restarts:
        # The static rendezvous of --master-addr does not support restarts.
        options_per_host = [
            c10d_rendezvous_options(
                f"{len(job.ranks_per_host)}:{len(job.ranks_per_host)}",
                count,
                job.max_restarts,
                (job.address or job.hosts[0], job.port or DEFAULT_PORT),
                is_first=node_rank == 0,
                local_address=job.hosts[node_rank] if job.hosts else None,
                run_id=rendezvous.get("--rdzv-id", "unitrain"),
                settings=dict(
                    part.partition("=")[::2] for part in rendezvous.get("--rdzv-conf", "").split(",") if part
                ),
            )
            for node_rank, count in enumerate(job.ranks_per_host)
        ]
        remarks.append("The rendezvous assigns the node ranks; their order may change after a failure.")
    elif len(job.ranks_per_host) > 1:
        options_per_host = static_rendezvous_options(
            job.ranks_per_host, job.address or job.hosts[0], job.port or DEFAULT_PORT
        )
    elif job.port is not None or job.address is not None:
        options_per_host = [
            ["--nproc-per-node", str(job.ranks_per_host[0]), "--master-port", str(job.port or DEFAULT_PORT)]
        ]
    else:
        options_per_host = [["--standalone", "--nproc-per-node", str(job.ranks_per_host[0])]]
    if job.max_restarts and len(job.ranks_per_host) == 1:
        extra_options = ["--max-restarts", str(job.max_restarts), *extra_options]
    launcher, program = torchrun_and_program(job)
    lines = [
        CommandLine([*launcher, *options, *extra_options, *program], variables, job.directory, name, job.private_values)
        for name, options in zip(names, options_per_host, strict=True)
    ]
    if len(lines) > 1 and job.forwarded:
        remarks.append(
            f"torchrun forwards the variables of its own shell: set {', '.join(job.forwarded)} on each host."
        )
    if "OMP_NUM_THREADS" not in job.environment and max(job.ranks_per_host) > 1:
        remarks.append(
            "torchrun sets one thread per rank. For more threads, set OMP_NUM_THREADS to the cores of a host divided "
            "by its ranks."
        )
    return Translation(lines, [*job.remarks, *remarks])


def _parse_torchrun_option(option: LauncherOption) -> ParsedOption | None:
    """Return an option of torchrun with its name and values, or None for an option of another launcher."""
    return SYNTAX.parse([*option.words, "program"])[0][0] if option.launcher == LAUNCHER else None


def _parse_num_nodes(text: str, remarks: list[str]) -> int:
    min_nodes, colon, max_nodes = text.partition(":")
    if colon and min_nodes != max_nodes:
        remarks.append(
            f"--nnodes {text} may run on fewer hosts than {max_nodes}. The translated command uses all {max_nodes}."
        )
    return parse_number("--nnodes", max_nodes or min_nodes)


def torchrun_and_program(job: Job) -> tuple[list[str], tuple[str, ...]]:
    """Return the command that starts torchrun, and the arguments after its options: the program, preceded by --module
    or --no-python if needed."""
    python = job.python
    if python is None:
        return ["torchrun"], ("--no-python", *after_options(job.program))
    program = list(job.program[1:])
    if program[:1] == ["-u"]:  # torchrun passes -u itself
        program.pop(0)
    launcher = ["torchrun"] if "/" not in python else [python, "-m", "torch.distributed.run"]
    if program[:1] == ["-m"]:
        return launcher, ("--module", *after_options(program[1:]))
    if program[:1] and program[0].startswith("-"):
        return launcher, ("--no-python", *after_options(job.program))
    return launcher, after_options(program)
