"""Selection of devices by `unitrain launch --devices` on hosts with simulated GPUs. Ranks are not started."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner
from fake_programs import write_program

from unitrain.cli import unitrain
from unitrain.launchers import Host, LaunchError, devices, parse_devices, select_devices
from unitrain.launchers.devices import count_gpus, visible_gpus

UUIDS = ("GPU-4f21", "GPU-9b07")


class Selection(NamedTuple):
    """CUDA_VISIBLE_DEVICES and the number of ranks in the printed command."""

    visible: str | None
    num_processes: int


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a script, and remove the user's GPU settings from the environment."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    path = tmp_path / "train.py"
    path.touch()
    return path


def simulate_gpus(folder: Path, count: int) -> None:
    """Create an nvidia-smi program that lists `count` GPUs."""
    lines = "\n".join(f"GPU {index}: NVIDIA H100 (UUID: GPU-{index:04x})" for index in range(count))
    write_program(folder, "nvidia-smi", f"cat <<END\n{lines}\nEND" if count else "echo No devices found.")


def run_launch_command(script: Path, *options: str) -> str:
    """Return the output of `unitrain launch --dry-run`, or the error message as one line."""
    result = CliRunner().invoke(unitrain, ["launch", "--dry-run", *options, str(script)])
    if result.exit_code == 0:
        return result.stdout.strip()
    assert result.exit_code == 2, result.output
    return " ".join(result.output.partition("Error: ")[2].split())


def parse_selection(command: str) -> Selection:
    """Return the selection in a printed torchrun command."""
    words = shlex.split(command)
    visible = [word.partition("=")[2] for word in words if word.startswith("CUDA_VISIBLE_DEVICES=")]
    return Selection(visible[0] if visible else None, int(words[words.index("--nproc-per-node") + 1]))


@pytest.mark.parametrize(
    ("options", "selected"),
    [
        pytest.param([], Selection(None, 1), id="none"),
        pytest.param(["-np", "2"], Selection(None, 2), id="none with -np"),
        pytest.param(["--devices", "0"], Selection("", 1), id="0: CPU"),
        pytest.param(["--devices", "0", "-np", "2"], Selection("", 2), id="0 with -np"),
        pytest.param(["--devices", "3"], Selection("0,1,2", 3), id="3: first three"),
        pytest.param(["--devices", "3", "-np", "3"], Selection("0,1,2", 3), id="3 with -np"),
        pytest.param(["--devices", "-1"], Selection("0,1,2,3", 4), id="-1: all"),
        pytest.param(["--devices", "[0]"], Selection("0", 1), id="[0]"),
        pytest.param(["--devices", "0,"], Selection("0", 1), id="0,"),
        pytest.param(["--devices", "1,3"], Selection("1,3", 2), id="1,3"),
        pytest.param(["--devices", " [3, 1] "], Selection("3,1", 2), id="[3, 1]"),
        pytest.param(["--devices", "2", "-H", "localhost:4"], Selection("0,1", 2), id="2 of 4 slots"),
    ],
)
def test_devices_selects_gpus_and_ranks_on_a_host_with_four_gpus(
    options: list[str], selected: Selection, script: Path
) -> None:
    simulate_gpus(script.parent, 4)
    assert parse_selection(run_launch_command(script, *options)) == selected


@pytest.mark.parametrize(
    ("options", "selected"),
    [
        pytest.param([], Selection(None, 1), id="none"),
        pytest.param(["--devices", "0"], Selection("", 1), id="0"),
        pytest.param(["--devices", "3"], Selection(None, 3), id="3 processes"),
    ],
)
def test_devices_is_the_number_of_processes_on_a_host_without_gpus(
    options: list[str], selected: Selection, script: Path
) -> None:
    simulate_gpus(script.parent, 0)
    assert parse_selection(run_launch_command(script, *options)) == selected


@pytest.mark.parametrize(
    ("setting", "options", "selected"),
    [
        pytest.param("2,3", ["--devices", "2"], "2,3", id="visible GPUs"),
        pytest.param("3,0,2", ["--devices", "1,0"], "0,3", id="order of the argument"),
        pytest.param("3,0,2", ["--devices", "-1"], "3,0,2", id="all"),
        pytest.param(",".join(UUIDS), ["--devices", "[1]"], UUIDS[1], id="UUID"),
        pytest.param("1,9,2", ["--devices", "-1"], "1", id="entries after an invalid one"),
    ],
)
def test_indices_are_relative_to_cuda_visible_devices(
    setting: str, options: list[str], selected: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate_gpus(script.parent, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
    assert parse_selection(run_launch_command(script, *options)) == Selection(selected, len(selected.split(",")))


def test_repeated_and_hidden_gpus_are_not_counted(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpus(script.parent, 4)
    for setting in ("1,1", "", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", setting)
        assert visible_gpus() == []


@pytest.mark.parametrize(
    ("gpus", "options", "message"),
    [
        (4, ["1,4"], "--devices 1,4 selects GPU 4, but this host has 4 GPUs, with indices 0 to 3. Use --devices -1 "),
        (4, ["[7]"], "--devices 7, selects GPU 7, but this host has 4 GPUs, with indices 0 to 3. Use --devices -1 "),
        (1, ["2"], "--devices 2 selects 2 GPUs, but this host has 1 GPU, with index 0. Use --devices -1 "),
        (0, ["1,3"], "--devices 1,3 selects GPUs, but this host has 0 GPUs. To run processes on the CPU, pass their n"),
        (0, ["-1"], "--devices -1 selects GPUs, but this host has 0 GPUs. To run processes on the CPU, pass their n"),
        (4, ["1,3,1"], "--devices 1,3,1 selects GPU 1 twice, but two ranks cannot use the same GPU. Use --devices 1,3"),
        (4, ["0,0"], "--devices 0,0 selects GPU 0 twice, but two ranks cannot use the same GPU. Use --devices 0,"),
        *(
            (4, [text], f"--devices takes a number of devices, -1 for all GPUs, 0 for the CPU, or the indices of GPUs, "
            f"got {text!r}. Use --devices 2 for two devices, or --devices 1,3 for GPUs 1 and 3.")
            for text in ("two", "-2", "1,-1", "[]", ",", "1.5", "0x1", "1 3", "²", "[1,3", "cuda:0", "12345")
        ),
        (4, ["1,3", "-np", "4"], "--devices 1,3 starts one rank per device (2), but -np 4 requests 4. Use -np 2, or l"),
        (0, ["2", "-np", "4"], "--devices 2 starts one rank per device (2), but -np 4 requests 4. Use -np 2, or leave"),
        (4, ["3", "-H", "localhost:2"], "--devices 3 starts 3 ranks on each host, but host 'localhost' has 2 slots. U"),
        (0, ["2", "-H", "localhost"], "--devices 2 starts 2 ranks on each host, but host 'localhost' has 1 slot. Use:"),
        (4, ["2", "--backend", "local"], "--devices 2 starts 2 ranks, but backend 'local' runs one process. Use --"),
        (4, ["2", "--elastic", "1:4"], "--devices 2 starts one rank per device, but --elastic 1:4 requests a "),
        (4, ["2", "-x", "CUDA_VISIBLE_DEVICES=1"], "--devices 2 and -x CUDA_VISIBLE_DEVICES both select the GPUs."),
        (4, ["2", "--launcher", "srun"], "--devices 2 selects devices, but srun starts ranks on the hosts of the a"),
        (4, ["-1", "-H", "a:4,b:4"], "--devices -1 selects all GPUs, but unitrain counts the GPUs of this host"),
        (4, ["2", "-H", "a:4,b:1"], "--devices 2 starts 2 ranks on each host, but host 'b' has 1 slot. Use: -H a:4,b"),
        (4, ["2", "-H", "a:2,b:2", "-np", "3"], "--devices 2 starts one rank per device (2 on each host, 4 in all)"),
    ],
)  # fmt: skip
def test_invalid_devices_are_rejected_with_a_fix(gpus: int, options: list[str], message: str, script: Path) -> None:
    simulate_gpus(script.parent, gpus)
    assert run_launch_command(script, "--devices", *options).startswith(message)


def test_message_of_a_missing_gpu_contains_cuda_visible_devices(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_gpus(script.parent, 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    message = "--devices 2,3 selects GPU 3, but this host has 2 GPUs listed in CUDA_VISIBLE_DEVICES=2,3, with indices "
    assert run_launch_command(script, "--devices", "2,3").startswith(message)
    several = "--devices 2 selects GPUs of a, b, but CUDA_VISIBLE_DEVICES=2,3 refers to the GPUs of this host. Clear it"
    assert run_launch_command(script, "--devices", "2", "-H", "a:2,b:2").startswith(several)
    assert "CUDA_VISIBLE_DEVICES=''" in run_launch_command(script, "--devices", "0", "-H", "a:2,b:2")


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun", "mpirun", "none"])
def test_every_launcher_on_this_host_sets_cuda_visible_devices(launcher: str, script: Path) -> None:
    simulate_gpus(script.parent, 4)
    write_program(script.parent, "mpirun", "echo 'mpirun (Open MPI) 4.1.4'")
    command = run_launch_command(script, "--devices", "[3]", "--launcher", launcher)
    assert re.search(r"(^| )CUDA_VISIBLE_DEVICES=3 ", command)
    assert (" -x CUDA_VISIBLE_DEVICES " in command) == (launcher == "mpirun")
    if launcher in ("horovodrun", "mpirun"):
        assert " -np 1 " in command


def test_devices_are_selected_on_each_of_several_hosts(script: Path) -> None:
    """The number of GPUs on this host is ignored, because this host may be a login node."""
    simulate_gpus(script.parent, 0)
    lines = run_launch_command(script, "--devices", "1,3", "-H", "a:4,b:2").splitlines()
    assert [line.partition(":")[0] for line in lines] == ["on a", "on b"]
    assert [parse_selection(line) for line in lines] == [Selection("1,3", 2)] * 2
    command = run_launch_command(script, "--devices", "3", "-H", "a:4,b:4", "--backend", "horovod")
    assert "CUDA_VISIBLE_DEVICES=0,1,2 " in command
    assert " -np 6 -H a:3,b:3 " in command
    # horovodrun does not send this variable to other hosts.
    assert f" env CUDA_VISIBLE_DEVICES=0,1,2 {sys.executable} " in command
    command = run_launch_command(
        script, "-x", "CUDA_VISIBLE_DEVICES=1", "-H", "a:4,b:4", "--backend", "horovod", "--mpi"
    )
    assert f" env CUDA_VISIBLE_DEVICES=1 {sys.executable} " in command


def test_devices_is_rejected_in_a_slurm_allocation_of_two_hosts(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(script.parent, "scontrol", "echo n1; echo n2")
    variables = {"JOB_ID": "7", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[1-2]", "TASKS_PER_NODE": "2(x2)"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("torchrun", "horovodrun", "mpirun", "srun"):
        with pytest.raises(
            LaunchError, match=f"{name} starts ranks on .*, where Slurm assigns the GPUs. Leave .* out,"
        ):
            select_devices(parse_devices("2"), name, None)
    assert select_devices(parse_devices("0"), "torchrun", 2, (Host("localhost", 2),)).num_processes == 2


def test_gpus_are_counted_with_the_driver_if_nvidia_smi_is_missing(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address in ("0000:18:00.0", "0000:3b:00.0", "0000:86:00.0"):
        (folder := script.parent / "gpus" / address).mkdir(parents=True)
        (folder / "information").write_text("Model: NVIDIA H100\n")
    monkeypatch.setattr(devices, "DRIVER_FOLDER", script.parent / "gpus")
    monkeypatch.setenv("PATH", str(script.parent))
    assert count_gpus() == 3
    write_program(script.parent, "nvidia-smi", "exit 9")  # this nvidia-smi cannot communicate with the driver
    assert count_gpus() == 3
    simulate_gpus(script.parent, 2)
    monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
    assert count_gpus() == 2


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3, "devices=3"),
        (-1, "devices=-1"),
        ([1, 3], "devices=[1, 3]"),
        ((0,), "devices=[0]"),
        ("1,3", "devices=[1, 3]"),
    ],
)
def test_messages_of_unitrain_run_contain_the_devices_argument(value: int | list[int] | str, text: str) -> None:
    assert str(parse_devices(value, from_python=True)) == text


@pytest.mark.parametrize("value", [True, -2, -1.0, [], [1, -1], [True], {"gpu": 1}, b"1"])
def test_invalid_arguments_of_unitrain_run_are_rejected(value: object) -> None:
    message = r"^unitrain\.run\(devices=\.\.\.\) takes a number of devices, .* Use devices=2 .*, or devices=\[1, 3\] "
    with pytest.raises(LaunchError, match=message):
        parse_devices(value, from_python=True)  # type: ignore[arg-type]
