"""The command line: frozen options, errors for invalid arguments, and help that does not import torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from fake_programs import write_program

from unitrain import __version__
from unitrain.cli import unitrain
from unitrain.errors import ConfigError
from unitrain.factories import call_training_function

# Scripts and job files depend on these options, so changes must be deliberate. All commands also have --help and -h.
OPTIONS = {
    "unitrain": {"--version"},
    "unitrain bench": set(),
    "unitrain bench collectives": {
        "-np", "-n", "--num-processes", "--backends", "--operations", "--sizes", "--max-bytes", "--seconds", "--device",
        "--json", "--output",
    },
    "unitrain bench compare": {"BEFORE", "AFTER"},
    "unitrain bench train": {
        "TARGET", "--ranks", "--backends", "--setting", "--batch-size", "--steps", "--seconds", "--device", "--json",
        "--output",
    },
    "unitrain bench predict": {
        "MEASURED", "--train", "--parameters", "--step-seconds", "--backward-share", "--bytes-per-parameter",
        "--bucket-bytes", "--latency", "--bandwidth", "--algorithms", "--ranks", "--ranks-per-host", "--host-latency",
        "--host-bandwidth", "--servers", "--methods", "--local-steps", "--json", "--output",
    },
    "unitrain launch": {
        "--backend", "--launcher", "-np", "-n", "--num-processes", "--devices", "-H", "--hosts", "--gloo", "--mpi",
        "-x", "--launcher-args", "--max-restarts", "--elastic", "--host-discovery-script", "--elastic-timeout",
        "--untuned", "--log-dir", "--dry-run", "--hostfile", "--interface", "-m", "--module", "SCRIPT", "ARGS",
        "--standby", "--metrics-port", "--metrics-address",
    },
    "unitrain memory": {
        "-np", "-n", "--num-processes", "--backend", "--ranks", "--steps", "--timeout-seconds", "--json", "SCRIPT",
        "ARGS",
    },
    "unitrain migrate": {"--write", "SCRIPT"},
    "unitrain ckpt": set(),
    "unitrain ckpt convert": {"SOURCE", "FOLDER", "--strip-prefix", "--epoch", "--step"},
    "unitrain ckpt consolidate": {"CHECKPOINT", "FILE", "--average"},
    "unitrain ckpt ls": {"FOLDER", "--json"},
    "unitrain ckpt show": {"CHECKPOINT"},
    "unitrain ckpt verify": {"FOLDER"},
    "unitrain submit": {
        "--to", "--backend", "--nodes", "-np", "-n", "--num-processes", "--gpus-per-node", "--cpus-per-task",
        "--memory", "--time", "--job-name", "--partition", "--account", "--output", "--signal-seconds", "--kind",
        "--image", "--namespace", "-x", "--dry-run", "--runtime", "--mpi-runtime", "--follow",
        "[OPTION=VALUE]... SCRIPT [ARGS]...",
    },
    "unitrain train": {"[CONFIG ...] [--KEY VALUE ...]"},
    "unitrain translate": {"--to", "-H", "--hosts", "--backend", "--kind", "LINE"},
    "unitrain verify": {
        "-np", "-n", "--num-processes", "--steps", "--backends", "--tolerance", "--float64", "--cpu",
        "--bits", "--timeout-seconds", "--json", "TARGET", "ARGS",
    },
    "unitrain horovod": set(),
    "unitrain horovod build": {
        "--with-mpi", "--without-mpi", "--with-cuda", "--without-cuda", "--jobs", "--cache-dir", "--no-install",
        "--force", "--dry-run",
    },
    "unitrain doctor": {"--launch", "--json", "--timeout-seconds", "--marked-json"},
    "unitrain horovod check": {"--json"},
    "unitrain tune": {"--launch", "--minutes", "--seconds", "--compression", "--local-sgd", "SCRIPT", "ARGS"},
    "unitrain report": {"--output", "--png", "--goodput", "RUN_DIR..."},
    "unitrain follow": {"--to", "--cluster", "--namespace", "--kind", "JOB"},
}  # fmt: skip
QUICK = """
import sys
import unitrain
assert "torch" not in sys.modules, "import unitrain"
from unitrain.cli import unitrain as command
for line in ({lines}):
    try:
        command(line.split(), standalone_mode=False)
    except SystemExit:
        pass
    assert "torch" not in sys.modules, line
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


def run(*arguments: str, **variables: str) -> Result:
    return CliRunner().invoke(unitrain, list(arguments), env=variables)


def usage_error(*arguments: str, **variables: str) -> str:
    """Return the error message for invalid arguments.

    `launch` runs with --dry-run, because a launch that accepts its arguments would replace the pytest process.
    """
    if arguments[0] == "launch":
        arguments = ("launch", "--dry-run", *arguments[1:])
    result = run(*arguments, **variables)
    assert result.exit_code == 2, result.output
    return result.stderr.rpartition("\nError: ")[2].strip()


def option_names(command: click.Command, context: click.Context) -> set[str]:
    """Return all spellings of the options of `command` and the names of its arguments."""
    words: set[str] = set()
    for parameter in command.get_params(context):
        if isinstance(parameter, click.Option):
            words |= {*parameter.opts, *parameter.secondary_opts}
        else:
            words.add(parameter.human_readable_name)
    return words


def options_by_command(
    command: click.Command, name: str = "unitrain", parent: click.Context | None = None
) -> dict[str, set[str]]:
    """Return the options and arguments of a command and of its subcommands, by the path of the command."""
    command._help_option = None  # click caches the option of the first context
    context = click.Context(command, parent=parent, info_name=name, **command.context_settings)
    found = {context.command_path: option_names(command, context)}
    if isinstance(command, click.Group):
        for subcommand in command.list_commands(context):
            known = command.get_command(context, subcommand)
            assert known is not None
            found |= options_by_command(known, subcommand, context)
    return found


def test_options_are_frozen() -> None:
    found = {path: words - {"--help", "-h"} for path, words in options_by_command(unitrain).items()}
    assert found == OPTIONS
    for path in OPTIONS:
        for option in ("-h", "--help"):
            result = run(*path.split()[1:], option)
            assert result.exit_code == 0
            assert result.output.startswith("Usage: "), result.output


def test_help_and_dry_runs_do_not_import_torch(script: str) -> None:
    lines = ["--help", "--version", "launch --help", "verify --help", "horovod --help", "horovod build --help"]
    lines += ["bench --help", "bench collectives --help"]
    lines += [f"launch --dry-run --backend {name} -np 2 {script}" for name in ("ddp", "horovod")]
    lines += ["translate --to srun -- torchrun train.py", f"submit --dry-run --to slurm {script}"]
    source = QUICK.format(lines="".join(f"{line!r}," for line in lines))
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Usage: ") == 7, done.stdout
    assert done.stdout.count("--nproc-per-node 2") == 1
    assert done.stdout.count("horovodrun -np 2 --gloo") == 1


def test_version_is_printed_by_the_command_and_the_module() -> None:
    assert run("--version").output == f"unitrain {__version__}\n"
    command = [sys.executable, "-m", "unitrain", "--version"]
    assert subprocess.check_output(command, text=True, timeout=60) == f"unitrain {__version__}\n"


def test_options_after_the_script_are_passed_to_it(script: str) -> None:
    result = run("launch", "--dry-run", "-np", "2", script, "--backend", "mine", "-np", "7", "--help")
    assert result.exit_code == 0
    assert result.stdout.strip().endswith(f"--nproc-per-node 2 -- {script} --backend mine -np 7 --help")


def launcher_of(words: list[str]) -> str:
    """Return the name of the launcher that a command starts, or "python" if it does not start a launcher."""
    called = next(word for word in words if "=" not in word)
    assert called == sys.executable
    return words[words.index("-m") + 1].rpartition(".")[2] if "-m" in words else "python"


@pytest.mark.parametrize(
    ("options", "program", "backend"),
    [
        ([], "torchrun", "ddp"),
        (["--backend", "ddp"], "torchrun", "ddp"),
        (["--backend", "horovod"], "horovodrun", "horovod"),
        (["--backend", "local"], "python", "local"),
        (["--launcher", "horovodrun"], "horovodrun", "horovod"),
        (["--launcher", "torchrun"], "torchrun", "ddp"),
        (["--mpi"], "horovodrun", "horovod"),
        (["--backend", "horovod", "--launcher", "torchrun"], "torchrun", "horovod"),
        (["--backend", "ddp", "--launcher", "horovodrun"], "horovodrun", "ddp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_backend_and_launcher_determine_each_other(options: list[str], program: str, backend: str, script: str) -> None:
    words = run("launch", "--dry-run", *options, script).stdout.split()
    assert launcher_of(words) == program
    assert f"UNITRAIN_BACKEND={backend}" in words


def test_mpirun_implies_horovod_unless_a_backend_is_given(script: str, tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text("#!/bin/sh\necho 'mpirun (Open MPI) 4.1.4'\n")
    mpirun.chmod(0o755)
    for options, backend in (([], "horovod"), (["--backend", "ddp"], "ddp")):
        words = run("launch", "--dry-run", "--launcher", "mpirun", *options, script, PATH=str(tmp_path)).stdout.split()
        assert str(mpirun) in words
        assert f"UNITRAIN_BACKEND={backend}" in words


def test_backend_variable_overrides_the_default_of_the_launcher(script: str) -> None:
    for options, program in (
        ([], "horovodrun"),
        (["--launcher", "torchrun"], "torchrun"),
        (["--backend", "ddp"], "torchrun"),
    ):
        words = run("launch", "--dry-run", *options, script, UNITRAIN_BACKEND="horovod").stdout.split()
        assert launcher_of(words) == program
        assert f"UNITRAIN_BACKEND={'ddp' if '--backend' in options else 'horovod'}" in words
    assert usage_error("launch", script, UNITRAIN_BACKEND="hovorod").startswith("Unknown backend 'hovorod'.")


def test_all_slots_are_used_by_default(script: str) -> None:
    hosts = ["--backend", "horovod", "-H", "localhost:3"]
    assert "-np 3 -H localhost:3" in run("launch", "--dry-run", *hosts, script).stdout
    assert "-np 2 -H localhost:3" in run("launch", "--dry-run", *hosts, "-np", "2", script).stdout
    assert "--nproc-per-node 1" in run("launch", "--dry-run", script).stdout


def test_invalid_arguments_are_reported_with_a_fix(script: str) -> None:
    assert "Did you mean 'build'?" in usage_error("horovod", "biuld")
    assert usage_error("lunch") == (
        "Unknown command 'lunch'. Did you mean 'launch'? "
        "Available: bench, ckpt, doctor, follow, horovod, launch, memory, migrate, report, submit, train, translate, "
        "tune, "
        "verify."
    )
    assert usage_error("launch", "--backend", "hovorod", script) == (
        "Unknown backend 'hovorod'. Did you mean 'horovod'? Available: ddp, horovod, local."
    )
    assert usage_error("launch", "--launcher", "torchrum", script) == (
        "Unknown launcher 'torchrum'. Did you mean 'torchrun'? Available: horovodrun, mpirun, none, srun, torchrun."
    )
    assert "Did you mean '--dry-run'?" in usage_error("launch", "--dry-rum", script)
    assert usage_error("launch", "-np", "0", script) == "A run needs at least 1 process, got -np 0. Use: -np 1"
    assert "is not a valid integer" in usage_error("launch", "-np", "two", script)
    assert usage_error("launch", "-np", "3", "-H", "localhost:2", script).endswith(
        "Use -np 2, or give the hosts more slots: -H localhost:3"
    )
    assert usage_error("launch", "--backend", "local", "-np", "2", script) == (
        "Without a launcher, unitrain starts one process on this host, but -np requests 2. "
        "Use --backend ddp or --backend horovod for -np 2, or -np 1 for one process."
    )
    assert usage_error("launch", "--gloo", "--launcher", "torchrun", script).startswith("--gloo chooses horovodrun's")
    assert usage_error("launch", "--mpi", "--backend", "local", script).startswith("--mpi chooses horovodrun's")
    assert "is not valid. Write name:slots" in usage_error("launch", "-H", "a b", script)
    missing = script.replace("train.py", "trian.py")
    assert usage_error("launch", missing) == (
        f"Script '{missing}' does not exist. Did you mean 'train.py'? Options of unitrain go before the script."
    )
    folder = str(Path(script).parent)
    assert (
        usage_error("launch", folder) == f"Script '{folder}' is not a file. Options of unitrain go before the script."
    )
    assert usage_error("launch", "-np", "2").startswith("Missing argument 'SCRIPT'")


def test_dry_run_does_not_require_an_installed_launcher(script: str, tmp_path: Path) -> None:
    """Users may prepare launches for a cluster on a laptop."""
    for options, name in (
        (["--launcher", "mpirun", "-H", "a:2,b:2"], "mpirun"),
        (["--backend", "horovod", "--mpi"], "mpirun"),
    ):
        result = run("launch", "--dry-run", *options, script, PATH=str(tmp_path))
        assert result.exit_code == 0, result.output
        assert script in result.stdout
        assert f"Warning: the command cannot run on this host. Launcher {name!r} is not installed." in result.stderr
    for options in ([], ["--backend", "horovod"]):  # Python runs these launchers as modules
        result = run("launch", "--dry-run", "-H", "a:4,b:4", *options, script, PATH=str(tmp_path))
        assert result.exit_code == 0, result.output
        assert (
            "Warning: the command cannot run on this host. ssh, which is needed to reach other hosts, is"
            in result.stderr
        )
        result = run("launch", "--dry-run", "-np", "2", *options, script, PATH=str(tmp_path))
        assert "Warning" not in result.stderr
    assert usage_error_without_dry_run("--launcher", "mpirun", script, PATH=str(tmp_path)).startswith(
        "Launcher 'mpirun' is not installed. It is part of Open MPI"
    )


def usage_error_without_dry_run(*arguments: str, **variables: str) -> str:
    result = run("launch", *arguments, **variables)
    assert result.exit_code == 2, result.output
    return result.stderr.rpartition("\nError: ")[2].strip()


def test_modules_can_be_launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__", "train", "__main__"):
        (package / f"{name}.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.chdir(tmp_path)
    for launcher in ("torchrun", "horovodrun", "none"):
        for module in ("package.train", "package"):
            result = run("launch", "--dry-run", "--launcher", launcher, "-m", module, "--epochs", "3")
            assert result.exit_code == 0, result.output
            separator = "-- " if launcher == "torchrun" else ""
            assert result.stdout.strip().endswith(f" -m {separator}{module} --epochs 3")
    assert usage_error("launch", "-m", "package.tran") == (
        f"Module 'package.tran' is not found from {tmp_path}. Start from the folder that contains its package, or "
        "install it: pip install -e ."
    )
    assert usage_error("launch", "-m", "package/train.py").startswith("-m takes the name of a module, got the file")
    assert usage_error("launch", "python", "train.py") == (
        "'python' is the interpreter, which unitrain starts itself. Leave 'python' out: unitrain launch -np 2 train.py"
    )


@pytest.mark.parametrize(
    ("launcher", "marker", "prefix", "size"),
    [
        ("torchrun", "TORCHELASTIC_RUN_ID", "", "WORLD_SIZE"),
        ("horovodrun", "HOROVOD_RANK", "HOROVOD_", "HOROVOD_SIZE"),
        ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_SIZE"),
    ],
    ids=["torchrun", "horovodrun", "mpirun"],
)
def test_launch_inside_a_launch_is_rejected(launcher: str, marker: str, prefix: str, size: str, script: str) -> None:
    inside = {marker: "0", f"{prefix}RANK": "0", size: "2", f"{prefix}LOCAL_RANK": "0"}
    assert usage_error("launch", script, **inside) == (
        f"{launcher} has started this process already ({prefix}RANK=0, {size}=2, {prefix}LOCAL_RANK=0). "
        f"In the command of that launcher, replace unitrain launch with: python {script}"
    )


def test_launch_inside_mpich_is_rejected(script: str) -> None:
    inside = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
    assert usage_error("launch", script, **inside).startswith("mpiexec has started this process already (PMI_RANK=0,")


def test_launch_in_one_of_several_pods_is_rejected(script: str) -> None:
    """Otherwise, each pod would train a separate model."""
    assert usage_error("launch", script, PET_NNODES="2", PET_NODE_RANK="0", PET_NPROC_PER_NODE="4") == (
        "PET_NNODES=2 means that this job has 2 pods, but this command would start ranks in this pod only. Start the "
        "script with torchrun, which reads this variable, as in: torchrun train.py"
    )
    printed = run("launch", "--dry-run", script, PET_NNODES="1", PET_NODE_RANK="0", PET_NPROC_PER_NODE="4").stdout
    assert "--nproc-per-node 1" in printed


@pytest.mark.parametrize("option", ["--nproc-per-node", "--nproc_per_node", "--np", "--ntasks"])
def test_number_of_processes_of_other_launchers_is_recognized(option: str, script: str) -> None:
    assert usage_error("launch", option, "2", script) == f"No such option: {option}. Did you mean '-np'?"
    assert usage_error("launch", f"{option}=2", script) == f"No such option: {option}. Did you mean '-np'?"


def test_names_of_other_programs_are_recognized(script: str) -> None:
    assert "Did you mean 'srun'?" in usage_error("launch", "--launcher", "slurm", script)
    assert "Did you mean 'mpirun'?" in usage_error("launch", "--launcher", "openmpi", script)
    assert "Did you mean 'kubernetes'?" in usage_error("translate", "--to", "k8s", "python t.py")
    assert "Did you mean 'kubernetes'?" in usage_error("submit", "--to", "k8s", script)


@pytest.mark.parametrize("source", ["", "parser.add_argument('-np')", "def main(num_processes): ..."])
@pytest.mark.parametrize("option", ["-np", "--num-processes", "--nproc-per-node"])
def test_option_after_the_script_is_noted_unless_the_script_contains_it(
    option: str, source: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(source)
    result = run("launch", "--dry-run", str(script), option, "2")
    assert result.exit_code == 0
    assert result.stdout.endswith(f"--nproc-per-node 1 -- {script} {option} 2\n")
    is_own = option.lstrip("-").replace("-", "_") in source
    assert (f"{option} is after SCRIPT, so it is an argument of" in result.stderr) == (not is_own)


def test_srun_command_is_shown_outside_an_allocation(script: str) -> None:
    result = run("launch", "--launcher", "srun", "--dry-run", "-np", "3", script)
    assert result.exit_code == 0
    assert "MASTER_ADDR=FIRST_HOST_OF_ALLOCATION" in result.stdout
    assert "--nodelist" not in result.stdout
    assert "srun starts ranks in a Slurm allocation, but SLURM_JOB_ID is not set." in result.stderr


def test_variables_and_launcher_options_are_forwarded(script: str) -> None:
    options = ["-x", "LEVEL=3", "-x", "HF_TOKEN", "--launcher-args", "--tee 3", "--launcher-args", "--max-restarts 1"]
    printed = run("launch", "--dry-run", *options, script, HF_TOKEN="abc").stdout
    assert printed.endswith(f"--nproc-per-node 1 --tee 3 --max-restarts 1 {script}\n")
    assert "LEVEL=... " in printed
    assert "abc" not in printed
    assert usage_error("launch", "-x", "UNITRAIN_BACKEND=ddp", script) == (
        "-x UNITRAIN_BACKEND=ddp is not supported, because unitrain launch sets this variable. Use: --backend ddp"
    )
    assert usage_error("launch", "--launcher-args", "core", script).startswith(
        "--launcher-args 'core' does not begin with"
    )


@pytest.mark.parametrize(
    ("options", "is_checked"),
    [
        ([], False),
        (["-H", "localhost:1"], True),
        (["--backend", "horovod"], False),
        (["--elastic", "1:1"], True),
        (["--backend", "horovod", "--elastic", "1:1", "--host-discovery-script", "discover"], False),
    ],
)
def test_interface_is_checked_on_this_host_only_if_all_ranks_run_here(
    options: list[str], is_checked: bool, script: str, tmp_path: Path
) -> None:
    write_program(tmp_path, "scontrol", "echo h1.invalid; echo h2.invalid")
    write_program(tmp_path, "srun", "exit 1")
    write_program(tmp_path, "discover", "echo h1.invalid:1")
    allocation = {
        "SLURM_JOB_ID": "1234", "SLURM_JOB_NODELIST": "h[1-2].invalid", "SLURM_TASKS_PER_NODE": "1(x2)",
        "SLURM_JOB_NUM_NODES": "2", "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    options = [str(tmp_path / option) if option == "discover" else option for option in options]
    result = run("launch", "--dry-run", "--interface", "nosuch0", *options, script, **allocation)
    assert ("--interface nosuch0 is not a network interface of this host" in result.stderr) == is_checked
    assert result.exit_code == (2 if is_checked else 0), result.output


@pytest.mark.parametrize("value", ["first", "²"])
def test_invalid_environment_variable_is_reported(value: str, script: str) -> None:
    assert usage_error("launch", script, RANK=value, WORLD_SIZE="2") == (
        f"RANK must be a whole number, got '{value}'. Set it, or clear it with: unset RANK"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "launch --interface nosuch0 {script}",
            "--interface nosuch0 is not a network interface of this host. Use one of: ",
        ),
        (
            "launch --log-dir /proc/x {script}",
            "--log-dir /proc/x is not writable: No such file or directory. Use a",
        ),
        (
            "launch --log-dir {script}/x {script}",
            "/x is not writable: Not a directory. Use another folder: --log-d",
        ),
        (
            "launch --elastic 1:2 --elastic-timeout nan {script}",
            "--elastic-timeout takes a number of seconds, got nan. Use --elastic-timeout 600",
        ),
        ("launch -np 2 --standby {script}", "Add the number of restarts: --max-restarts 3"),
        ("launch --elastic 1:2 --max-restarts 0 --standby {script}", "Add the number of restarts: --max-restarts 3"),
        (
            "launch --backend local --max-restarts 1 --standby {script}",
            "Leave --standby out, or use one of: torchrun, horovodrun, mpirun",
        ),
        (
            "launch -H h2.invalid:1,localhost:1 --max-restarts 1 --standby {script}",
            "rank 0 runs on the host of this command, but the first host is h2.invalid. Name this host first, or leave",
        ),
        (
            "launch -H localhost:1,h2.invalid:1 -x MASTER_PORT=2950 --max-restarts 1 --standby {script}",
            "two attempts need different ports. To let unitrain choose free ports, leave -x MASTER_PORT out",
        ),
        ("tune --minutes nan {script}", "'nan' is not a finite number."),
        ("bench predict --parameters 1e6 --step-seconds 0.1 --latency inf", "'inf' is not a finite number."),
        (
            "ckpt verify {folder}",
            "There is no checkpoint in '{folder}'. Pass the output_dir of a run, or one of its check",
        ),
        (
            "ckpt verify {script}",
            "There is no checkpoint in '{script}'. Pass the output_dir of a run, or one of its check",
        ),
    ],
)
def test_unusable_arguments_are_rejected(line: str, message: str, tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("print('started')")
    (folder := tmp_path / "empty").mkdir()
    result = CliRunner().invoke(unitrain, line.format(script=script, folder=folder).split())
    assert result.exit_code != 0
    assert message.format(script=script, folder=folder) in result.output
    assert "started" not in result.output


def test_mpi_without_mpirun_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script := tmp_path / "train.py").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    result = CliRunner().invoke(unitrain, ["launch", "--backend", "horovod", "--mpi", str(script)])
    assert result.exit_code == 2
    assert "mpirun" in result.output
    assert "apt-get install openmpi-bin), or omit --mpi" in result.output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train.py", r"'train\.py' is not the name of a function\. Give a module or a file and the function"),
        (
            "nosuch.py:parts",
            r"There is no file 'nosuch\.py' for nosuch\.py:parts\. Pass an existing file: train\.py:parts\.",
        ),
        (
            "no.such.module:parts",
            r"There is no module 'no' for no\.such\.module:parts\. Name a file, as in train\.py:parts",
        ),
        ("json:nosuch", r"There is no function 'nosuch' in json\."),
    ],
)
def test_missing_function_is_reported(target: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call_training_function(target)
