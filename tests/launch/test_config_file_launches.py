"""Configuration files under real launchers and with other commands that start ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from groups import ci
from launches import running_launcher
from safetensors.torch import load_file

from unitrain.cli import unitrain as command_line

BIN = Path(sys.executable).parent
EXAMPLES = Path(__file__).parents[2] / "examples"
VARIABLES = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(*command: str | Path) -> str:
    with running_launcher(list(map(str, command)), VARIABLES) as launch:
        output = launch.output()
    assert launch.process.returncode == 0, output
    return output


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(max(folder.glob("step-*")) / "model.safetensors")


def assert_equal_weights(first: Path, second: Path) -> None:
    ours, theirs = load_weights(first), load_weights(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("backend", ["ddp", *ci("horovod")])
def test_run_from_a_file_has_the_same_weights_as_a_script_on_two_ranks(backend: str, tmp_path: Path) -> None:
    script, file = tmp_path / "script", tmp_path / "file"
    launch = [BIN / "unitrain", "launch", "-np", "2", "--backend", backend]
    run(*launch, EXAMPLES / "digits.py", "--epochs", "1", "--batch-size", "16", "--output", script)
    options = ["--max_epochs", "1", "--batch_size", "16"]
    output = run(*launch, EXAMPLES / "digits.yaml", *options, "--output_dir", file)
    assert len(re.findall(r"final train_loss=\S+ val_loss=\S+ val_accuracy=", output)) == 1
    assert_equal_weights(script, file)

    stored = yaml.safe_load((file / "config.yaml").read_text())
    assert (stored["batch_size"], stored["backend"]) == (16, None)
    run(*launch, file / "config.yaml")
    assert_equal_weights(file, tmp_path / "file-2")


def test_torchrun_can_start_unitrain_train(tmp_path: Path) -> None:
    words = ["-m", "unitrain", "train", EXAMPLES / "digits.yaml", "--dry_run", "true"]
    output = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "2", *words)
    assert len(re.findall(r"final train_loss=", output)) == 1


@pytest.mark.parametrize("launcher", ["torchrun", "horovodrun", "mpirun", "srun", "none"])
def test_command_of_every_launcher_starts_unitrain_train(launcher: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.touch()
    ranks = "1" if launcher == "none" else "2"
    words = ["launch", "--dry-run", "--launcher", launcher, "-np", ranks, str(file), "--seed", "3"]
    shown = CliRunner().invoke(command_line, words)
    accepted = "not on PATH" in shown.output or "allocation" in shown.output
    found = shown.output.replace("-m -- unitrain", "-m unitrain")  # torchrun reads no options after "--"
    assert f"-m unitrain train {file} --seed 3" in found or accepted, shown.output


@pytest.mark.parametrize(
    ("options", "program"),
    [
        (["--to", "slurm"], "-m unitrain train"),
        (["--to", "kubernetes", "--image", "image"], "torchrun --module -- unitrain train"),
    ],
)
def test_submitted_job_starts_unitrain_train(options: list[str], program: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.touch()
    shown = CliRunner().invoke(command_line, ["submit", *options, "--nodes", "2", "--dry-run", str(file), "--seed=3"])
    assert shown.exit_code == 0, shown.output
    words = " ".join(shown.output.replace('"', "").split()).replace(" - ", " ")
    assert f"{program} {file} --seed=3" in words, shown.output


def test_launch_reports_a_missing_file() -> None:
    shown = CliRunner().invoke(command_line, ["launch", "--dry-run", "-np", "2", "no.yaml"])
    assert shown.exit_code == 2
    assert "Script 'no.yaml' does not exist" in shown.output


def test_verify_accepts_a_configuration_file(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ["-np", "2", "--steps", "3", "--backends", "local,ddp", "--tolerance", "1e-3", "--cpu"]
    output = run(BIN / "unitrain", "verify", *options, "--json", report, EXAMPLES / "digits.yaml", "--batch_size", "16")
    assert "Verdict: the same results." in output
    assert json.loads(report.read_text())["target"].endswith("digits.yaml")


@pytest.mark.nightly
def test_bench_memory_and_tune_accept_a_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = EXAMPLES / "digits.yaml"
    output = run(BIN / "unitrain", "bench", "train", file, "--ranks", "1,2", "--steps", "3", "--seconds", "0")
    assert "ddp" in output
    assert "largest part of training memory" in run(BIN / "unitrain", "memory", file)
    tuned = run(BIN / "unitrain", "tune", "--minutes", "0.1", "--seconds", "0.2", "--launch", "-np 2", file)
    assert "digits.yaml on 2 ranks" in tuned
