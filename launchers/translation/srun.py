"""The command line of srun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from unitrain.launchers.arguments import merge_options
from unitrain.launchers.errors import LaunchError
from unitrain.launchers.rendezvous import DEFAULT_PORT
from unitrain.launchers.srun import DEFAULT_OPTIONS, task_options
from unitrain.launchers.translation.hosts import divide_evenly, expand_nodelist
from unitrain.launchers.translation.job import Job, LauncherOption, parse_number
from unitrain.launchers.translation.options import Options, Syntax, arity_table, topic_by_option
from unitrain.launchers.translation.words import join, mark_expansion
from unitrain.launchers.translation.writing import CommandLine, Translation, options_for, restart_remarks, variables_for

LAUNCHER = "srun"
FIRST_HOST = mark_expansion('"$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"')
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
# Options that sbatch also has; they apply to the complete job.
_JOB_OPTIONS = (
    "--account --bb --bbf --begin --cpus-per-task --comment --cpu-freq --dependency --deadline --delay-boot "
    "--gres --gres-flags --hold --job-name --no-kill --licenses --clusters --mail-type --mail-user --mcs-label --nice "
    "--output --error --input --overcommit --partition --power --priority --profile --propagate --qos --reboot "
    "--oversubscribe --core-spec --signal --spread-job --switches --thread-spec --time --time-min --use-min-nodes "
    "--wckey --cluster-constraint --contiguous --constraint --mem --mincpus --reservation --tmp --exclude --exclusive "
    "--mem-per-cpu --sockets-per-node --cores-per-socket --threads-per-core --extra-node-info --ntasks-per-core "
    "--ntasks-per-socket --cpus-per-gpu --gpus --gpu-bind --gpu-freq --gpus-per-node --gpus-per-socket --gpus-per-task "
    "--mem-per-gpu --distribution --hint --mem-bind"
)
_OPTIONS_WITH_OPTIONAL_VALUE = "--compress --exclusive --immediate --kill-on-bad-exit --nice --propagate --send-libs"
SYNTAX = Syntax(
    LAUNCHER,
    arity_table(
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
        _OPTIONS_WITH_OPTIONAL_VALUE,
    ),
    _SHORT | {"--tasks-per-node": "--ntasks-per-node", "--cpu_bind": "--cpu-bind"},
)
_TOPICS = topic_by_option(
    resources=_JOB_OPTIONS,
    queue="--account --begin --clusters --comment --deadline --delay-boot --dependency --hold --job-name --mail-type "
    "--mail-user --mcs-label --nice --no-kill --partition --priority --profile --propagate --qos --reboot "
    "--reservation --time --time-min --wckey",
    output="--output --error --label",
    unneeded="--unbuffered --overcommit",
    other="--input --gpu-bind",
    binding="--cpu-bind --mem-bind --accel-bind --hint",
    mapping="--distribution --relative",
    grace="--signal",
    diagnosis="--verbose --slurmd-debug --quiet",
)


def parse(words: Sequence[str]) -> Job:
    """Parse the words after `srun` into a job."""
    options = Options(SYNTAX, words)
    if ":" in options.program or options.take_flag("--multi-prog"):
        raise LaunchError(
            "The srun command starts several programs, which unitrain cannot translate. "
            "Start one script that branches on its rank"
        )
    text = options.take_last("--nodelist")
    names = expand_nodelist(text) if text is not None else ()
    tasks, per_node = options.take_number("--ntasks"), options.take_number("--ntasks-per-node")
    min_nodes, dash, max_nodes = (options.take_last("--nodes") or "").partition("-")
    remarks: list[str] = []
    per_gpu = options.take_number("--ntasks-per-gpu")
    if dash and min_nodes != max_nodes:
        remarks.append(
            f"--nodes {min_nodes}-{max_nodes} lets Slurm choose the number of hosts. The translated command uses "
            f"{max_nodes}."
        )
    nodes = parse_number("--nodes", max_nodes or min_nodes) if min_nodes else len(names) or None
    if per_gpu is not None and tasks is None:
        tasks = per_gpu * _count_requested_gpus(options, nodes, per_gpu)
    if per_gpu is not None:
        remarks.append(
            f"--ntasks-per-gpu {per_gpu} of srun is left out. Under srun, it also restricts each task to one GPU. "
            "Under other launchers, each rank uses the GPU of its local rank."
        )
    if tasks is None and per_node is None:
        if nodes is None:
            raise LaunchError(
                "The srun command does not specify the number of tasks. In a batch script, the #SBATCH lines specify "
                "it. Add --ntasks to the command, as in: srun --ntasks 8"
            )
        remarks.append(
            "The srun command does not specify the number of tasks. In a batch script, the #SBATCH lines specify it. "
            "The translated command starts one task per host. Add --ntasks N for another number."
        )
    if nodes is None:
        nodes = -(-tasks // per_node) if tasks and per_node else 1
        if tasks and tasks > 1 and not per_node:
            remarks.append(
                f"Slurm chooses the number of hosts for {tasks} tasks. The translated command uses one host. "
                "Add --nodes N for another number."
            )
    counts = divide_evenly(tasks or nodes * (per_node or 1), nodes)
    if names and len(names) < len(counts):
        raise LaunchError(f"--nodelist {text} names {len(names)} of the {len(counts)} hosts. Name all hosts, or none")
    variables, forwarded = _parse_export(options, remarks)
    return Job(
        program=options.program,
        ranks_per_host=counts,
        hosts=names[: len(counts)],
        environment=variables,
        forwarded=forwarded,
        directory=options.take_last("--chdir"),
        launcher_options=(*_take_sbatch_options(options), *options.remaining(_TOPICS)),
        remarks=tuple(remarks),
    )


def build(job: Job) -> Translation:
    """Return the srun command, which runs in an allocation."""
    extra_options, remarks = options_for(job, LAUNCHER)
    placement = [*task_options(job.ranks_per_host)]
    hosts = ["--nodelist", ",".join(name.strip("[]") for name in job.hosts)] if job.hosts else []
    variables = variables_for(job, LAUNCHER) | rendezvous_variables(job, remarks)
    if job.directory is not None:
        placement += ["--chdir", job.directory]
    srun_options = merge_options(DEFAULT_OPTIONS, extra_options)
    if len(job.ranks_per_host) > 1:
        requested = [
            word
            for option in job.launcher_options
            if option.launcher == LAUNCHER and option.topic in ("resources", "queue")
            for word in option.words
        ]
        nodes = ["--nodes", str(len(job.ranks_per_host)), "--ntasks-per-node", str(max(job.ranks_per_host))]
        remarks.append(
            "Run the command in an allocation, such as the shell that this command starts: "
            f"{join(['salloc', *hosts, *nodes, *requested])}"
        )
    words = [LAUNCHER, *hosts, *placement, *srun_options, *job.program]
    line = CommandLine(words, variables, private_names=job.private_values)
    return Translation([line], [*job.remarks, *remarks, *_uneven_placement_remark(job), *restart_remarks(job)])


def rendezvous_variables(job: Job, remarks: list[str]) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT, which srun does not set. Add a remark to `remarks` if an address is left out.

    Without named hosts, the rendezvous is on the first host that Slurm selects.
    """
    if job.hosts or len(job.ranks_per_host) == 1:
        return job.rendezvous_variables
    if job.address is not None:
        remarks.append(
            f"The address {job.address} is left out, because the rendezvous is on the first host that Slurm chooses."
        )
    return {"MASTER_ADDR": FIRST_HOST, "MASTER_PORT": str(job.port or DEFAULT_PORT)}


def _count_requested_gpus(options: Options, num_nodes: int | None, tasks_per_gpu: int) -> int:
    """Return the number of GPUs that the command requests. The GPU options remain in `options`.

    Raises LaunchError if the command requests no GPUs, or requests GPUs per host on several hosts. In the second case,
    the number of tasks is ambiguous: according to Slurm's manual, the GPUs of all hosts count, but Slurm 22.05 starts
    one task per host.
    """
    count = 0
    for name in ("--gpus", "--gpus-per-node", "--gres"):
        for option in options.take_all(name):
            options.put_back(option)
            parts = option.values[0].split(",")
            if name == "--gres":
                parts = [part.partition(":")[2] or "1" for part in parts if part.partition(":")[0] == "gpu"]
            num_gpus = sum(_count_gpus(name, part) for part in parts)
            if num_gpus and not count and name != "--gpus" and (num_nodes or 1) > 1:
                raise LaunchError(
                    f"How many tasks srun starts for --nodes {num_nodes} {join(option.words)} --ntasks-per-gpu "
                    f"{tasks_per_gpu} depends on the version of Slurm. Add their number to the command, as in: "
                    f"srun --ntasks {(num_nodes or 1) * num_gpus * tasks_per_gpu}"
                )
            count = count or num_gpus  # several options may request the same GPUs
    if not count:
        raise LaunchError(
            "The srun command has --ntasks-per-gpu but does not request GPUs, so the number of tasks depends on the "
            "allocation. Add --ntasks, as in: srun --ntasks 8"
        )
    return count


def _count_gpus(option: str, text: str) -> int:
    """Return the number of GPUs in "a100:4" or "4"; a type without a number counts as one GPU."""
    gpu_type, _, last = text.partition("(")[0].rpartition(":")
    # The type of a MIG device starts with a digit, as in "1g.10gb".
    return 1 if not gpu_type and not last.isdecimal() else parse_number(option, last)


def _uneven_placement_remark(job: Job) -> list[str]:
    if job.ranks_per_host == divide_evenly(job.size, len(job.ranks_per_host)):
        return []
    return [
        f"Slurm distributes {job.size} tasks evenly, not as {', '.join(map(str, job.ranks_per_host))}. If that "
        "matters, add --distribution=arbitrary, and set SLURM_HOSTFILE to a file with the host of each task."
    ]


def _parse_export(options: Options, remarks: list[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the variables that --export sets, and the names of the variables that it forwards."""
    variables: dict[str, str] = {}
    names: list[str] = []
    for option in options.take_all("--export"):
        for part in option.values[0].split(","):
            name, equals, value = part.partition("=")
            if equals:
                variables[name] = value
            elif name == "NONE":
                remarks.append(
                    "--export=NONE is left out: under other launchers ranks inherit the variables of the shell."
                )
            elif name != "ALL":
                names.append(name)
    return variables, tuple(names)


def _take_sbatch_options(options: Options) -> list[LauncherOption]:
    """Take and return the options that sbatch also has. Drop the options that `build` sets by default."""
    launcher_options: list[LauncherOption] = []
    for option in options.take_all("--kill-on-bad-exit", "--wait"):
        if option.values not in ((), ("1",)) if option.name == "--kill-on-bad-exit" else option.values != ("0",):
            options.put_back(option)
    for option in options.take_all(*_JOB_OPTIONS.split()):
        directive = option.name if not option.values else f"{option.name}={option.values[0]}"
        launcher_options.append(
            replace(
                LauncherOption(LAUNCHER, option.words, _TOPICS.get(option.name, "resources")),
                equivalents={"sbatch": (directive,)},
            )
        )
    return launcher_options
