"""srun's command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers.arguments import merge_options
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.rendezvous import DEFAULT_PORT
from unitrain.launchers.srun import DEFAULT_OPTIONS, task_options
from unitrain.launchers.translation.hosts import expanded, spread
from unitrain.launchers.translation.job import Job, Other, number
from unitrain.launchers.translation.options import Options, Syntax, table, topics
from unitrain.launchers.translation.words import join, typed
from unitrain.launchers.translation.writing import Line, Written, options_of, restarts, variables_of

LAUNCHER = "srun"
FIRST_HOST = typed('"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"')
_SHORT = {
    "-A": "--account", "-b": "--begin", "-c": "--cpus-per-task", "-d": "--dependency", "-D": "--chdir", "-e": "--error",
    "-E": "--preserve-env", "-H": "--hold", "-i": "--input", "-I": "--immediate", "-J": "--job-name", "-k": "--no-kill",
    "-K": "--kill-on-bad-exit", "-l": "--label", "-L": "--licenses", "-M": "--clusters", "-m": "--distribution",
    "-n": "--ntasks", "-N": "--nodes", "-o": "--output", "-O": "--overcommit", "-p": "--partition", "-q": "--qos",
    "-Q": "--quiet", "-r": "--relative", "-s": "--oversubscribe", "-S": "--core-spec", "-T": "--threads",
    "-t": "--time", "-u": "--unbuffered", "-v": "--verbose", "-W": "--wait", "-X": "--disable-status",
    "-C": "--constraint", "-w": "--nodelist", "-x": "--exclude", "-Z": "--no-allocate", "-B": "--extra-node-info",
    "-G": "--gpus", "-h": "--help", "-V": "--version",
}  # fmt: skip
# What sbatch takes as well, and is asked of Slurm once for the job.
_OF_THE_JOB = (
    "--account --bb --bbf --begin --cpus-per-task --comment --cpu-freq --dependency --deadline --delay-boot "
    "--gres --gres-flags --hold --job-name --no-kill --licenses --clusters --mail-type --mail-user --mcs-label --nice "
    "--output --error --input --overcommit --partition --power --priority --profile --propagate --qos --reboot "
    "--oversubscribe --core-spec --signal --spread-job --switches --thread-spec --time --time-min --use-min-nodes "
    "--wckey --cluster-constraint --contiguous --constraint --mem --mincpus --reservation --tmp --exclude --exclusive "
    "--mem-per-cpu --sockets-per-node --cores-per-socket --threads-per-core --extra-node-info --ntasks-per-core "
    "--ntasks-per-socket --cpus-per-gpu --gpus --gpu-bind --gpu-freq --gpus-per-node --gpus-per-socket --gpus-per-task "
    "--mem-per-gpu --distribution --hint --mem-bind"
)
_OPTIONAL = "--compress --exclusive --immediate --kill-on-bad-exit --nice --propagate --send-libs"
SYNTAX = Syntax(
    LAUNCHER,
    table(
        "--preserve-env --hold --no-kill --label --multi-prog --overcommit --overlap --pty --quit-on-interrupt --quiet "
        "--reboot --oversubscribe --spread-job --unbuffered --use-min-nodes --verbose --disable-status --contiguous "
        "--no-allocate --exact --resv-ports --help --usage --version",
        "--account --acctg-freq --bb --bbf --bcast --bcast-exclude --begin --cpus-per-task --comment --container "
        "--cpu-freq --dependency --deadline --delay-boot --chdir --export --error --epilog --gres --gres-flags --input "
        "--jobid --job-name --licenses --clusters --distribution --mail-type --mail-user --mcs-label --mpi --ntasks "
        "--ntasks-per-node --nodes --output --het-group --partition --power --priority --prolog --profile --qos "
        "--relative --core-spec --signal --slurmd-debug --switches --task-epilog --task-prolog --thread-spec --threads "
        "--time --time-min --wait --wckey --cluster-constraint --constraint --mem --mincpus --reservation --tmp "
        "--nodelist --exclude --mem-per-cpu --sockets-per-node --cores-per-socket --threads-per-core --extra-node-info "
        "--ntasks-per-core --ntasks-per-socket --ntasks-per-gpu --cpus-per-gpu --gpus --gpu-bind --gpu-freq "
        "--gpus-per-node --gpus-per-socket --gpus-per-task --mem-per-gpu --cpu-bind --mem-bind --hint --accel-bind",
        _OPTIONAL,
    ),
    _SHORT | {"--tasks-per-node": "--ntasks-per-node", "--cpu_bind": "--cpu-bind"},
)
_TOPICS = topics(
    resources=_OF_THE_JOB,
    output="--output --error --label --unbuffered --quiet",
    binding="--cpu-bind --mem-bind --accel-bind --gpu-bind --hint",
    mapping="--distribution --relative",
    grace="--signal",
    diagnosis="--verbose --slurmd-debug",
)


def read(words: Sequence[str]) -> Job:
    """Return the job of srun's words, which come after its name."""
    options = Options(SYNTAX, words)
    if ":" in options.program or options.flag("--multi-prog"):
        raise LaunchError(
            "srun's line starts several programs, which no other launcher does. "
            "Start one script, which looks at its rank"
        )
    text = options.last("--nodelist")
    names = expanded(text) if text is not None else ()
    tasks, per_node = options.number("--ntasks"), options.number("--ntasks-per-node")
    least, dash, most = (options.last("--nodes") or "").partition("-")
    said: list[str] = []
    per_gpu = options.number("--ntasks-per-gpu")
    if dash and least != most:
        said.append(f"--nodes {least}-{most} leaves their number to Slurm: the job is written for {most}.")
    nodes = number("--nodes", most or least) if least else len(names) or None
    if per_gpu is not None and tasks is None:
        tasks = per_gpu * _gpus(options, nodes)
    if per_gpu is not None:
        said.append(
            f"--ntasks-per-gpu {per_gpu} of srun is left out, which also lets each task see one GPU only: elsewhere "
            "each rank takes the GPU of its local rank."
        )
    if tasks is None and per_node is None:
        if nodes is None:
            raise LaunchError(
                "srun's line does not say how many tasks it starts: in a batch script that is what its #SBATCH lines "
                "ask for. Add their number to it, as in: srun --ntasks 8"
            )
        said.append(
            "srun's line does not say how many tasks it starts, which in a batch script is what its #SBATCH lines ask "
            "for: the job is written for one on each host. Say how many with --ntasks N."
        )
    if nodes is None:
        nodes = -(-tasks // per_node) if tasks and per_node else 1
        if tasks and tasks > 1 and not per_node:
            said.append(
                f"srun leaves it to Slurm on how many hosts {tasks} tasks run: the job is written for one. "
                "Say how many with --nodes N."
            )
    counts = spread(tasks or nodes * (per_node or 1), nodes)
    if names and len(names) < len(counts):
        raise LaunchError(
            f"--nodelist {text} names {len(names)} hosts, and the job has {len(counts)}. Name all, or none"
        )
    variables, forwarded = _exported(options, said)
    return Job(
        program=options.program,
        counts=counts,
        hosts=names[: len(counts)],
        environment=variables,
        forwarded=forwarded,
        directory=options.last("--chdir"),
        others=(*_settings(options), *options.others(_TOPICS)),
        remarks=tuple(said),
    )


def write(job: Job) -> Written:
    """Return srun's line, which is typed in an allocation."""
    given, said = options_of(job, LAUNCHER)
    asked = [*task_options(job.counts)]
    if job.hosts:
        asked = ["--nodelist", ",".join(name.strip("[]") for name in job.hosts), *asked]
    variables = variables_of(job, LAUNCHER) | rendezvous(job, said)
    if job.directory is not None:
        asked += ["--chdir", job.directory]
    start = merge_options(DEFAULT_OPTIONS, given)
    if len(job.counts) > 1:
        said.append(
            "Type it in an allocation, as in the shell of: "
            f"salloc --nodes {len(job.counts)} --ntasks-per-node {max(job.counts)}"
        )
    line = Line([LAUNCHER, *asked, *start, *job.program], variables)
    return Written([line], [*job.remarks, *said, *_uneven(job), *restarts(job)])


def rendezvous(job: Job, said: list[str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT, for which srun's ranks have no other source: on the first host that Slurm
    chooses, where the job names none. What is left out is said."""
    if job.hosts or len(job.counts) == 1:
        return job.rendezvous
    if job.address is not None:
        said.append(f"The address {job.address} is left out: the ranks meet on the first host that Slurm chooses.")
    return {"MASTER_ADDR": FIRST_HOST, "MASTER_PORT": str(job.port or DEFAULT_PORT)}


def _gpus(options: Options, nodes: int | None) -> int:
    """Return how many GPUs the line asks for; leave its options.

    Raises LaunchError where it does not say, and for GPUs of each of several hosts: the manual of Slurm multiplies
    them, and srun of Slurm 22.05 then starts one task on each host.
    """
    count = 0
    for option in ("--gpus", "--gpus-per-node", "--gres"):
        for one in options.all(option):
            options.put_back(one)
            parts = one.values[0].split(",")
            if option == "--gres":
                parts = [part.partition(":")[2] or "1" for part in parts if part.partition(":")[0] == "gpu"]
            found = sum(_of_one_type(option, part) for part in parts)
            if found and not count and option != "--gpus" and (nodes or 1) > 1:
                raise LaunchError(
                    f"How many tasks srun starts for --nodes {nodes} {join(one.words)} --ntasks-per-gpu depends on the "
                    f"version of Slurm. Add their number to the line, as in: srun --ntasks {(nodes or 1) * found}"
                )
            count = count or found  # they say the same in several ways
    if not count:
        raise LaunchError(
            "srun's line has --ntasks-per-gpu and does not say how many GPUs there are, which only the allocation "
            "knows. Add the number of tasks, as in: srun --ntasks 8"
        )
    return count


def _of_one_type(option: str, text: str) -> int:
    """Return the number in "a100:4" or "4"; a type alone is one GPU."""
    kind, _, last = text.rpartition(":")
    return 1 if not kind and not last[:1].isdecimal() else number(option, last.partition("(")[0])


def _uneven(job: Job) -> list[str]:
    if job.counts == spread(job.size, len(job.counts)):
        return []
    return [
        f"Slurm deals {job.size} tasks out evenly, and not as {', '.join(map(str, job.counts))}. Where that matters, "
        "add --distribution=arbitrary, with a list of hosts in SLURM_HOSTFILE."
    ]


def _exported(options: Options, said: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables that --export sets, and those that it names."""
    variables: dict[str, str] = {}
    names: list[str] = []
    for one in options.all("--export"):
        for part in one.values[0].split(","):
            name, equals, value = part.partition("=")
            if equals:
                variables[name] = value
            elif name == "NONE":
                said.append("--export=NONE keeps variables from the ranks: elsewhere they have what the shell has.")
            elif name != "ALL":
                names.append(name)
    return variables, tuple(names)


def _settings(options: Options) -> list[Other]:
    """Return what sbatch takes as well; what unitrain itself sets is no loss."""
    found: list[Other] = []
    for one in options.all("--kill-on-bad-exit", "--wait"):
        if one.values not in ((), ("1",)) if one.name == "--kill-on-bad-exit" else one.values != ("0",):
            options.put_back(one)
    for one in options.all(*_OF_THE_JOB.split()):
        told = one.name if not one.values else f"{one.name}={one.values[0]}"
        found.append(
            replace(Other(LAUNCHER, one.words, _TOPICS.get(one.name, "resources")), passes={"sbatch": (told,)})
        )
    return found
