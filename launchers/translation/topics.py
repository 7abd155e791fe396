"""What to do under a launcher instead of an option that it does not have, by what the option is about."""

from __future__ import annotations

_SSH = {
    "horovodrun": "it has -p PORT and -i KEY.",
    "mpirun": 'give ssh its options with: -mca plm_rsh_args "-p 2222".',
    "mpiexec": "write them into ~/.ssh/config.",
    "torchrun": "it is typed on each host, and uses no ssh.",
    "unitrain": "hand the launcher its own with --launcher-args, or write them into ~/.ssh/config.",
}
_OUTPUT = {
    "horovodrun": "use --output-filename FOLDER.",
    "mpirun": "use --output-filename FOLDER, or --tag-output.",
    "mpiexec": "use -outfile-pattern and -errfile-pattern, or -prepend-rank.",
    "torchrun": "use --log-dir FOLDER --tee 3.",
    "srun": "use --output FILE, with %t for the rank, or --label.",
    "sbatch": "the script has --output, and srun has --label.",
    "kubernetes": "use kubectl logs.",
    "unitrain": "hand the launcher its own with --launcher-args.",
}
_BINDING = {
    "horovodrun": 'with --mpi it has --binding-args "--bind-to core".',
    "mpirun": "use --bind-to and --map-by.",
    "mpiexec": "use -bind-to and -map-by.",
    "torchrun": "use --numa-binding node.",
    "srun": "use --cpu-bind.",
    "sbatch": "give srun --cpu-bind.",
    "kubernetes": "ask for whole cores, under the static policy of the CPU manager.",
    "unitrain": "hand the launcher its own with --launcher-args.",
}
_GRACE = {
    "horovodrun": "a rank has five seconds from SIGTERM on, which cannot be changed.",
    "mpirun": "use -mca odls_base_sigkill_timeout SECONDS.",
    "torchrun": "use --shutdown-timeout SECONDS, and --signals-to-handle.",
    "srun": "ask for a warning with --signal=USR1@SECONDS.",
    "sbatch": "ask for a warning with --signal=USR1@SECONDS.",
    "kubernetes": "set terminationGracePeriodSeconds.",
    "unitrain": "hand the launcher its own with --launcher-args.",
}
_RESOURCES = {
    "srun": "ask for it with srun's own options.",
    "sbatch": "add a line of its own: #SBATCH ...",
    "kubernetes": "ask for it under resources, in the manifest.",
}
_ELASTIC = {
    "torchrun": "use --nnodes MIN:MAX with --max-restarts, on each host.",
    "horovodrun": "use --min-np and --max-np with --host-discovery-script.",
    "kubernetes": "a PyTorchJob has elasticPolicy.",
}
_ADVICE: dict[str, tuple[dict[str, str], str]] = {
    "ssh": (_SSH, "the scheduler starts the ranks, without ssh."),
    "output": (_OUTPUT, "let the script write files of its own."),
    "binding": (_BINDING, "let the script bind itself."),
    "grace": (_GRACE, "let the script save within the time that there is."),
    "resources": (_RESOURCES, "it asks no scheduler. Start it where the job has what it needs."),
    "elastic": (_ELASTIC, "the number of ranks is fixed. Start again from a checkpoint with another: resume='auto'."),
    "rendezvous": ({}, "how ranks meet there is the launcher's own matter, or MASTER_ADDR's and MASTER_PORT's."),
    "mapping": ({}, "ranks are numbered host by host, in the order of the hosts. Order these as you need them."),
    "network": (
        {"mpirun": "use -mca btl_tcp_if_include NAME -mca oob_tcp_if_include NAME.", "mpiexec": "use -iface NAME."},
        "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME for every rank.",
    ),
    "diagnosis": ({}, "to see what would be started, use: unitrain launch --dry-run."),
    "variables": (
        {"mpirun": "name each with -x.", "torchrun": "set them on each host.", "srun": "use --export."},
        "name them before the command.",
    ),
    "own": ({}, "it is about that launcher itself, and nothing is needed in its place."),
}


def advice(topic: str, launcher: str) -> str:
    """Return a sentence of what to do under `launcher` where an option of that topic is missing."""
    by_launcher, otherwise = _ADVICE[topic]
    return by_launcher.get(launcher, otherwise)
