"""Runs configured by YAML files, in one process: keys, overrides, errors, stored configurations and repeated runs."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

import unitrain
from unitrain.cli import unitrain as command_line
from unitrain.config_files.instantiation import build_arguments, read_command_line
from unitrain.config_files.parser import parse
from unitrain.config_files.sources import ConfigFile
from unitrain.errors import ConfigError
from unitrain.supervisor import submission

# Each list contains ten aliases of the preceding list, so the expanded document would have 10^9 items.
ALIASES = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9))
# Each mapping merges the preceding mapping ten times.
MERGE_KEYS = "seed: &a0 {x: 1}\n" + "".join(
    f"k{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 10)
)

PARTS = '''
import sys

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset, TensorDataset

class Network(nn.Module):
    """A network.

    Args:
        hidden: the width of the hidden layer.
    """

    def __init__(self, hidden: int = 4, scale: float | None = 2.0) -> None:
        super().__init__()
        if hidden == 13:
            raise ValueError("13 is not supported")
        self.layers = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.scale = scale

    def forward(self, x):
        return self.layers(x)

def create_data(samples: int = 24, seed: int = 0) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 3, generator=generator), torch.randn(samples, 1, generator=generator))

def error(output, target):
    return (output - target).abs().mean(1)

def decay(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1 - step / total_steps)

def constant(optimizer: Optimizer, **options: float) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1.0)

def return_nothing() -> nn.Module:
    return None

def return_number() -> nn.Module:
    return 5

def call_exit() -> nn.Module:
    sys.exit(0)

def call_exit_later(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    sys.exit(0)

class Table:
    """A dataset that is not a subclass of torch's, such as datasets.Dataset."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int):
        return torch.zeros(3), torch.zeros(1)

def create_table() -> Table:
    return Table()

def unannotated(optimizer, total_steps):
    return constant(optimizer)

class FailingLoss(nn.Module):
    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        raise ArithmeticError("no loss")
'''
CONFIG = """\
model:
  class_path: config_parts.Network
  init_args:
    hidden: 5
optimizer:
  class_path: torch.optim.SGD
  init_args:
    lr: 0.1
    momentum: 0.9
loss_fn: torch.nn.MSELoss
metrics:
  error: config_parts.error
train_data: config_parts.create_data
val_data:
  class_path: config_parts.create_data
  init_args: {samples: 7, seed: 1}
callbacks:
- class_path: unitrain.EarlyStopping
  init_args: {monitor: val_loss, patience: 9}
max_epochs: 2
batch_size: 5
device: cpu
progress: "off"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with config/run.yaml and config/config_parts.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "config_parts", raising=False)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config_parts.py").write_text(PARTS)
    (tmp_path / "config" / "run.yaml").write_text(CONFIG)
    return tmp_path


def error_message(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_command_line(words)
    return str(caught.value)


def build_trainer_arguments(*words: str) -> dict[str, Any]:
    return build_arguments(parse(words))


def run_train_command(*words: str) -> str:
    done = CliRunner().invoke(command_line, ["train", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = max(folder.glob("step-*"))
    return load_file(checkpoint / "model.safetensors")


def are_equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_files_and_options_are_merged_in_order(folder: Path) -> None:
    (folder / "fast.yaml").write_text("batch_size: 8\noptimizer: {init_args: {lr: 0.2}}\nkeep_last: null\n")
    arguments = build_trainer_arguments(
        "config/run.yaml", "fast.yaml", "--max_epochs", "3", "--model.hidden=6", "--output_dir=runs"
    )
    config, model, optimizer = arguments["config"], arguments["model"], arguments["optimizer"]
    assert (config.max_epochs, config.batch_size, config.keep_last) == (3, 8, None)
    assert model.layers[0].out_features == 6
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.2, 0.9)
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    assert isinstance(arguments["loss_fn"], nn.MSELoss)
    assert arguments["callbacks"][0].patience == 9
    assert (len(arguments["train_data"]), len(arguments["val_data"])) == (24, 7)
    assert arguments["metrics"]["error"](torch.ones(2, 1), torch.zeros(2, 1)).tolist() == [1, 1]


def test_settings_may_be_objects_and_val_data_may_have_several_datasets(folder: Path) -> None:
    (folder / "more.yaml").write_text(
        "val_data: {one: config_parts.create_data, two: {class_path: config_parts.create_data}}\n"
        "local_sgd: {steps: 4}\nloggers: [csv, {class_path: unitrain.JSONLinesLogger}]\n"
        "checkpoint_activations: [Linear]\noutput_dir: runs\n"
    )
    arguments = build_trainer_arguments("config/run.yaml", "more.yaml")
    assert list(arguments["val_data"]) == ["one", "two"]
    assert arguments["config"].local_sgd == unitrain.LocalSGDConfig(steps=4)
    assert arguments["config"].checkpoint_activations == ("Linear",)
    assert arguments["loggers"][0] == "csv"
    assert isinstance(arguments["loggers"][1], unitrain.JSONLinesLogger)


def test_initial_weights_equal_those_of_torch_with_the_same_seed(folder: Path) -> None:
    torch.manual_seed(3)
    expected = nn.Linear(3, 5).weight
    assert torch.equal(build_trainer_arguments("config/run.yaml", "--seed=3")["model"].layers[0].weight, expected)


def test_scheduler_may_be_a_class_or_a_function(folder: Path) -> None:
    cosine = build_trainer_arguments(
        "config/run.yaml", "--scheduler=torch.optim.lr_scheduler.CosineAnnealingLR", "--scheduler.T_max=7"
    )
    assert isinstance(cosine["scheduler"], CosineAnnealingLR)
    assert cosine["scheduler"].T_max == 7
    assert cosine["scheduler"].optimizer is cosine["optimizer"]
    cycle = build_trainer_arguments(
        "config/run.yaml", "--scheduler=torch.optim.lr_scheduler.OneCycleLR", "--scheduler.max_lr=0.3"
    )
    planned = cycle["scheduler"](cycle["optimizer"], 11)
    assert isinstance(planned, OneCycleLR)
    assert planned.total_steps == 11
    decay = build_trainer_arguments("config/run.yaml", "--scheduler=config_parts.decay")
    assert decay["scheduler"](decay["optimizer"], 4).lr_lambdas[0](1) == 0.75
    assert isinstance(
        build_trainer_arguments("config/run.yaml", "--scheduler=config_parts.constant")["scheduler"], LambdaLR
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size: large", r"bad.yaml, line 2: batch_size: expected int or None, got 'large'\. Print the types of"),
        ("batch_size: 0", r"bad.yaml, line 2: batch_size: TrainConfig\.batch_size must be at least 1, got 0\. Use 32"),
        ("batch_sise: 4", r"bad.yaml, line 2: unknown key 'batch_sise'\. Did you mean 'batch_size'\?"),
        ("seed: 1\nseed: 2", r"bad.yaml, line 3: seed: the key is already set in line 2\. Remove one of them\."),
        ("callbacks: &all [*all]", r"bad.yaml: the values are nested too deeply, or an alias contains itself"),
        ("callbacks: " + "[" * 5000, r"bad.yaml: the values are nested too deeply"),
        (ALIASES, r"bad.yaml: the file contains more than 100000 values, including repeated aliases"),
        (MERGE_KEYS, r"bad.yaml: the file contains more than 100000 values, including repeated aliases"),
        ("? &a0 [x]\n: &a1 {? *a0 : *a0}", r"bad.yaml, line 2: "),
        ("", r"bad.yaml: the file contains no keys\. Create a complete file with: unitrain train --print_config"),
        ("seed: [1", r"bad.yaml, line \d: .*Correct the YAML syntax"),
        (
            "model:\n  init_args:\n    hidden: x",
            r"bad.yaml, line 4: model\.hidden: expected int, got 'x'\. Print the arg",
        ),
        ("model:\n  init_args:\n    hiden: 3", r"bad.yaml, line 4: model\.hiden: .*'hiden' is not accepted"),
        ("model: config_parts.Net", r"bad.yaml, line 2: model: config_parts\.Net: module 'config_parts' has no attr"),
        ("model: config_parts.constant", r"bad.yaml, line 2: model: .*\.constant does not correspond to a subcl"),
        (
            "model: config_parts.error",
            r"bad.yaml, line 2: model: the function 'config_parts\.error' has no return annotation\. Add it, as in: "
            r"def error\(\.\.\.\) -> torch\.nn\.Module:",
        ),
        (
            "scheduler: config_parts.unannotated",
            r"bad.yaml, line 2: scheduler: the function 'config_parts\.unannotated' has no return annotation\. .* -> "
            r"torch\.optim\.lr_scheduler\.LRScheduler:",
        ),
        (
            "train_data: {class_path: config_parts.unannotated}",
            r"bad.yaml, line 2: train_data: the function '.*unannotated' has .* -> torch\.utils\.data\.Dataset:",
        ),
        ("val_data:\n  one: config_parts.unannotated", r"bad.yaml, line 3: val_data: the function '.*' has no return"),
        ("train_data: torch.nn.ReLU", r"bad.yaml, line 2: train_data: .* subclass of Dataset or DataLoader\. Print"),
        ("scheduler: 3", r"bad.yaml, line 2: scheduler: .*Callable\[\[torch.optim.optimizer.Optimizer, int\], torch"),
        ("precision: fp17", r"bad.yaml, line 2: precision: expected one of 'fp32', 'bf16', 'fp16', got 'fp17'"),
        (
            "callbacks:\n- class_path: unitrain.GradientWatch\n- class_path: unitrain.EarlyStopping\n"
            "  init_args: {patience: soon}",
            r"bad.yaml, line 5: callbacks\.patience: expected int, got 'soon'",
        ),
        (
            "optimizer:\n  class_path: torch.optim.SGDD",
            r"bad.yaml, line 2: optimizer: module 'torch.optim' has no attribute 'SGDD'\. Print the arguments with: "
            r"unitrain train config/run.yaml bad.yaml --optimizer.help CLASS$",
        ),
        (
            "optimizer:\n  init_args: {lrr: 1}",
            r"bad.yaml, line 3: optimizer\.lrr: Option 'lrr' is not accepted\. Print the arguments with: unitrain "
            r"train config/run.yaml bad.yaml --optimizer.help torch.optim.SGD$",
        ),
        ("optimizer: {init_args: {lr: x}}", r"bad.yaml, line 2: optimizer\.lr: expected float.* got 'x'\. Print"),
        (
            "scheduler: {class_path: torch.optim.lr_scheduler.OneCycleLR, init_args: {max_lrr: 0.2}}",
            r"bad.yaml, line 2: scheduler\.max_lrr: Option 'max_lrr' is not accepted\. Print",
        ),
        (
            "train_data: {init_args: {sample: 2}}",
            r"bad.yaml, line 2: train_data\.sample: config_parts.create_data: Option 'sample' is not accepted\. Print "
            r"the arguments with: unitrain train config/run.yaml bad.yaml --train_data.help config_parts.create_data$",
        ),
        (
            "preemption_signals: [SIGKILL]",
            r"bad.yaml, line 2: .* that a program can handle\. Use preemption_signals: \[",
        ),
        ("preemption_signals: [SIGTERN]", r"bad.yaml, line 2: .* that a program can handle\. Did you mean 'SIGTERM'\?"),
        ("python_path: src", r"bad.yaml, line 2: python_path: .*src"),
        ("- 1", r"bad.yaml, line 2: the file contains a value of type list\. Use a mapping"),
        ("model: null", r"The key 'model' is not set\. Add it to 'bad.yaml', as in model: torch"),
        ("max_steps: 5", r"config/run.yaml, line 20: max_epochs: TrainConfig takes either max_epochs or max_s"),
    ],
)
def test_errors_name_the_file_line_and_key(text: str, message: str, folder: Path) -> None:
    (folder / "bad.yaml").write_text(f"# comment\n{text}\n")
    assert re.match(message, error_message("config/run.yaml", "bad.yaml"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch_size", "many"), r"--batch_size: expected int or None, got 'many'"),
        (("--model.hidden=x",), r"--model\.hidden: expected int, got 'x'"),
        (("--batch_size=0",), r"--batch_size: TrainConfig\.batch_size must be at least 1"),
        (("--batch-size=3",), r"Unknown option --batch-size\. Did you mean 'batch_size'\?"),
        (("--python_path=src",), r"--python_path is read from files only\. Use: export PYTHONPATH"),
    ],
)
def test_errors_name_the_option(words: tuple[str, ...], message: str, folder: Path) -> None:
    assert re.match(message, error_message("config/run.yaml", *words))


def test_missing_files_and_keys_are_reported(folder: Path) -> None:
    done = CliRunner().invoke(command_line, ["train", "config/rum.yaml"])
    assert done.exit_code == 2
    assert "Configuration file 'config/rum.yaml' does not exist. Did you mean 'run.yaml'?" in done.stderr
    assert "The key 'model' is not set" in CliRunner().invoke(command_line, ["train", "--seed=1"]).stderr
    assert "takes a configuration file" in CliRunner().invoke(command_line, ["train"]).stderr


def test_merge_keys_are_read(folder: Path) -> None:
    (folder / "merged.yaml").write_text("optimizer: &o {class_path: torch.optim.SGD}\nmodel:\n  <<: *o\n  x: 1\n")
    file = ConfigFile.read(Path("merged.yaml"))
    assert file.content["model"] == {"class_path": "torch.optim.SGD", "x": 1}
    assert [entry.line for entry in file.entries if entry.key == ("model", "x")] == [4]


def test_name_that_is_not_a_configuration_file_is_reported(folder: Path) -> None:
    (folder / "loop.yaml").symlink_to("loop.yaml")
    os.mkfifo(folder / "pipe.yaml")
    name = "x" * 300 + ".yaml"
    script = "'train.py' is a Python script, not a configuration file. Run it with: python train.py, or with: unitrain"
    assert error_message("train.py").startswith(f"{script} launch train.py")
    assert "is a symbolic link to a file that does not exist. Did you mean 'pipe.yaml'" in error_message("loop.yaml")
    assert "'pipe.yaml' is not a file. Did you mean 'loop.yaml'" in error_message("pipe.yaml")
    assert re.match("Cannot read configuration file 'x+.yaml': .*File name too long", error_message(name))


def test_exception_in_a_constructor_names_the_key_of_the_class(folder: Path) -> None:
    with pytest.raises(ValueError, match="13 is not supported") as caught:
        build_trainer_arguments("config/run.yaml", "--model.hidden=13")
    assert caught.value.__notes__[0].startswith("config/run.yaml, line 1: model: the exception was raised")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (
            "train_data: {class_path: config_parts.create_data, init_args: {samples: -1}}",
            RuntimeError,
            "negative dimen",
        ),
        ("val_data: {class_path: config_parts.create_data, init_args: {samples: -1}}", RuntimeError, "negative"),
        ("val_data: {a: {class_path: config_parts.create_data, init_args: {samples: -1}}}", RuntimeError, "negative"),
        ("loss_fn: config_parts.FailingLoss", ArithmeticError, "no loss"),
    ],
)
def test_exception_in_a_class_or_function_is_raised_with_a_note(
    text: str, error: type[Exception], message: str, folder: Path
) -> None:
    (folder / "failing.yaml").write_text(text)
    with pytest.raises(error, match=message) as caught:
        build_trainer_arguments("config/run.yaml", "failing.yaml")
    assert caught.value.__notes__[0].startswith(f"failing.yaml, line 1: {text.partition(':')[0]}: the exception was")
    assert caught.traceback[-1].name in ("create_data", "__init__")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('raise ArithmeticError("import failed")', ArithmeticError, "import failed"),
        ("def broken(:", SyntaxError, "invalid syntax"),
        ("import no_such_package", ModuleNotFoundError, "No module named 'no_such_package'"),
    ],
)
@pytest.mark.parametrize("key", ["model", "train_data", "metrics"])
def test_exception_of_a_module_is_raised_with_a_note(
    key: str, text: str, error: type[Exception], message: str, folder: Path
) -> None:
    (folder / "config" / "failing.py").write_text(f"\n{text}\n")
    path = "{a: failing.x}" if key == "metrics" else "failing.x"
    (folder / "failing.yaml").write_text(f"seed: 1\n{key}: {path}\n")
    name = "metrics.a" if key == "metrics" else key
    for words, location in ((("failing.yaml",), "failing.yaml, line 2: "), ((f"--{name}=failing.x",), "--")):
        with pytest.raises(error, match=message) as caught:
            read_command_line(("config/run.yaml", *words))
        note = f"{location}{name}: the exception was raised while the module 'failing' was imported"
        assert caught.value.__notes__ == [note]
        if error is ArithmeticError:
            assert str(caught.traceback[-1].path).endswith("failing.py")


def test_exit_of_a_module_or_function_is_an_error(folder: Path) -> None:
    (folder / "config" / "leaving.py").write_text("import sys\nsys.exit(0)\n")
    (folder / "leaving.yaml").write_text("model: leaving.x\n")
    done = CliRunner().invoke(command_line, ["train", "config/run.yaml", "leaving.yaml"])
    assert done.exit_code == 2
    output = " ".join(done.stderr.split())
    assert "Error: leaving.yaml, line 1: model: the import of leaving called sys.exit(0) in" in output
    assert "leaving.py, line 2. Raise an exception instead" in output
    (folder / "leaving.yaml").write_text("model: config_parts.call_exit\n")
    with pytest.raises(
        ConfigError, match=r"leaving.yaml, line 1: model: config_parts.call_exit called sys.exit\(0\) in .*py"
    ):
        build_trainer_arguments("config/run.yaml", "leaving.yaml")
    arguments = build_trainer_arguments("config/run.yaml", "--scheduler=config_parts.call_exit_later")
    with pytest.raises(ConfigError, match=r"--scheduler: config_parts.call_exit_later called sys.exit\(0\)"):
        arguments["scheduler"](arguments["optimizer"], 3)


@pytest.mark.parametrize(
    ("function", "returned"), [("return_nothing", "None"), ("return_number", "an object of type int")]
)
def test_model_function_must_return_a_module(function: str, returned: str, folder: Path) -> None:
    (folder / "wrong.yaml").write_text(f"seed: 1\nmodel: config_parts.{function}\n")
    message = (
        rf"wrong.yaml, line 2: model: config_parts\.{function} returned {returned}, not a torch\.nn\.Module\. Return a"
    )
    with pytest.raises(ConfigError, match=message):
        build_trainer_arguments("config/run.yaml", "wrong.yaml")


def test_parsing_does_not_use_the_standard_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("w") as full:
        for output in (None, full):
            monkeypatch.setattr(sys, "stdout", output)
            assert parse(["config/run.yaml"]).values.batch_size == 5


def test_dataset_need_not_be_a_subclass_of_torch_dataset(folder: Path) -> None:
    arguments = build_trainer_arguments(
        "config/run.yaml", "--train_data=config_parts.create_table", "--val_data=config_parts.Table"
    )
    assert [type(arguments[name]).__name__ for name in ("train_data", "val_data")] == ["Table", "Table"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size: -8", "batch_size: TrainConfig.batch_size must be at least 1, got -8. Use 32"),
        ("max_seconds: .nan", "max_seconds: TrainConfig.max_seconds must be a number above 0, got nan. Use None"),
        ("seed: 18446744073709551616", "seed: TrainConfig.seed must be at most 18446744073709551615 (2**64 - 1"),
        ("batch_size: 9223372036854775808", "batch_size: TrainConfig.batch_size must be at most 9223372036854775807"),
        ("timeout_seconds: -1", "timeout_seconds: timeout_seconds must be a number above 0 and at most 31536000"),
        ("backend: hovorod", "backend: Unknown backend 'hovorod'. Did you mean 'horovod'?"),
        (
            "device: nonsense",
            "device: device must be a device such as 'cpu', 'cuda' or 'cuda:0', got 'nonsense'. Use device: cpu, or",
        ),
        ("val_data: {}", "val_data: the mapping contains no dataset. Use val_data: package.module.create_dataset"),
        ("local_sgd: {steps: 0}", "local_sgd: LocalSGDConfig.steps must be at least 1, got 0"),
        (
            "lr_scaling: linear",
            "lr_scaling: TrainConfig.lr_scaling 'linear' needs the global batch size for which the ",
        ),
        ("loggers: [csw]", "loggers: Unknown logger 'csw'. Did you mean 'csv'?"),
        (
            "loggers: [csv]",
            "loggers: the logger 'csv' writes to output_dir, which is not set. Use output_dir: runs/first, or the "
            "option --output_dir runs/first",
        ),
        ("loggers: [{class_path: unitrain.CSVLogger}]", "loggers: the logger 'unitrain.CSVLogger' writes to output"),
    ],
)
def test_invalid_values_are_reported_before_the_backend_starts(
    text: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unitrain, "init", lambda *arguments, **options: pytest.fail("the backend was started"))
    without_validation = re.sub(r"val_data:\n(  .*\n)+", "", CONFIG)
    (folder / "config" / "run.yaml").write_text(without_validation)
    (folder / "bad.yaml").write_text(f"{text}\n")
    done = CliRunner().invoke(command_line, ["train", "config/run.yaml", "bad.yaml"])
    assert done.exit_code == 2, done.output
    assert f"Error: bad.yaml, line 1: {message}" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("lr_scaling: linear", "Use reference_batch_size: 256."),
        ("warmup_steps: 3", "Use lr_scaling: linear, or leave warmup_steps out and give the Trainer a scheduler."),
        ("resume: true", "Use output_dir: runs/first, resume: true, or pass a checkpoint: resume: runs/first."),
        ("local_sgd: 4\ncompression: bf16", "Use local_sgd: {steps: 25, compression: bf16}, or leave local_sgd out."),
        (
            "preemption_signals: [SIGKILL]",
            "Use preemption_signals: [SIGTERM, SIGHUP, SIGUSR1], or () to handle no signal.",
        ),
    ],
)
def test_fixes_use_the_syntax_of_configuration_files(text: str, fix: str, folder: Path) -> None:
    (folder / "bad.yaml").write_text(text)
    assert error_message("config/run.yaml", "bad.yaml").endswith(fix)


def test_missing_jsonargparse_is_reported_with_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    done = CliRunner().invoke(command_line, ["train", "config/run.yaml"])
    assert done.exit_code == 1
    assert 'with: pip install ".[config]"' in done.stderr
    assert CliRunner().invoke(command_line, ["train", "--help"]).output.startswith("Usage: ")


@pytest.mark.parametrize("command", ["launch -np 2", "verify", "tune", "memory", "bench train"])
def test_ranks_are_not_started_if_jsonargparse_is_missing(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    done = CliRunner().invoke(command_line, [*command.split(), "config/run.yaml"])
    assert done.exit_code == 2
    assert "Error: Configuration files need the package jsonargparse, which is not installed." in done.stderr
    assert 'with: pip install ".[config]"' in done.stderr


def test_command_for_another_host_is_printed_if_jsonargparse_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jsonargparse", None)
    for line in ("launch --dry-run -np 2", "submit --to slurm --nodes 2 --dry-run"):
        done = CliRunner().invoke(command_line, [*line.split(), "config/run.yaml"])
        assert done.exit_code == 0, done.output
        assert "unitrain train config/run.yaml" in done.stdout


def test_unknown_options_after_the_file_are_rejected_before_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("submit", "submit_and_follow"):
        monkeypatch.setattr(submission, name, lambda *arguments: pytest.fail("a job was submitted"))
    monkeypatch.setattr(
        importlib.import_module("unitrain.cli.launch"), "execute", lambda *arguments: pytest.fail("ranks were started")
    )
    for line in ("launch -np 2", "submit --to slurm"):
        for option in ("--dry-run", "-np", "--nodes=2", "--bach_size=4"):
            words = [*line.split(), "config/run.yaml", "--optimizer.lr", "-1e-3", "-inf", option]
            done = CliRunner().invoke(command_line, words)
            assert done.exit_code == 2, done.output
            message = f"Unknown option {option.partition('=')[0]} after the configuration file 'config/run.yaml'. "
            assert message in " ".join(done.stderr.split())
            assert done.stderr.rstrip().endswith("Options of unitrain go before the file.")
        options = ["--batch_size", "4", "--model.hidden=3", "--callbacks+=unitrain.EarlyStopping", "--dry_run=true"]
        done = CliRunner().invoke(command_line, [*line.split(), "--dry-run", "config/run.yaml", "more.yaml", *options])
        assert done.exit_code == 0, done.output
        assert "--model.hidden=3" in done.stdout


def test_help_describes_keys_and_print_config_prints_a_valid_file(folder: Path) -> None:
    shown = " ".join(run_train_command("--help").split())
    assert "--max_grad_norm" in shown
    assert "Clip the gradient norm of the global batch to this value." in shown
    assert "known subclasses" not in shown
    of_class = " ".join(run_train_command("config/run.yaml", "--model.help", "config_parts.Network").split())
    assert "the width of the hidden layer. (type: int, default: 4)" in of_class
    printed = yaml.safe_load(run_train_command("--print_config"))
    assert {"model", "train_data", "max_epochs", "batch_size"} <= printed.keys()
    printed = run_train_command("config/run.yaml", "--print_config=comments")
    assert "# Clip the gradient norm" in printed
    assert "known subclasses" not in printed
    (folder / "start.yaml").write_text(printed + "python_path: [config]\n" * ("\npython_path" not in printed))
    assert (
        build_trainer_arguments("config/run.yaml", "start.yaml")["config"]
        == build_trainer_arguments("config/run.yaml")["config"]
    )


def test_help_describes_the_parameters_of_a_function(folder: Path) -> None:
    (folder / "bad.yaml").write_text("train_data: {init_args: {sample: 3}}\noptimizer: {init_args: {lrr: 1}}\n")
    for words in (["bad.yaml", "--train_data.help"], ["--train_data.help", "config_parts.create_data"]):
        shown = run_train_command("config/run.yaml", *words)
        assert "Help for --train_data.help=config_parts.create_data\n" in shown
        assert re.search(r"--train_data.samples SAMPLES\s+\(type: int, default: 24\)", shown)
        assert "CONFIG" not in shown
        assert "<function" not in shown
    assert "The function has no arguments." in run_train_command(
        "config/run.yaml", "--model.help=config_parts.return_nothing"
    )
    assert "The function has no arguments." in run_train_command(
        "config/run.yaml", "--scheduler.help", "config_parts.unannotated"
    )
    assert "--optimizer.momentum" in run_train_command("config/run.yaml", "bad.yaml", "--optimizer.help")
    assert "config_parts' has no attribute 'x'" in error_message("config/run.yaml", "--model.help", "config_parts.x")


def test_stored_configuration_repeats_or_resumes_the_run(folder: Path) -> None:
    words = ["config/run.yaml", "--output_dir=runs/first", "--model.scale=null"]
    assert re.search(r"final train_loss=\S+ val_loss=\S+ val_error=\S+\n", run_train_command(*words))
    stored = folder / "runs" / "first" / "config.yaml"
    content = yaml.safe_load(stored.read_text())
    assert content["python_path"] == ["config"]
    assert content["model"]["init_args"] == {"hidden": 5, "scale": None}
    assert (content["batch_size"], content["keep_last"], content["output_dir"]) == (5, 3, "runs/first")
    (checkpoint, *_) = sorted((folder / "runs" / "first").glob("step-*"))
    assert (checkpoint / "config.yaml").read_text() == stored.read_text()

    assert "in the new folder 'runs/first-2'" in run_train_command("runs/first/config.yaml")
    assert are_equal(load_weights(folder / "runs" / "first"), load_weights(folder / "runs" / "first-2"))
    run_train_command(f"{checkpoint.relative_to(folder)}/config.yaml", "--output_dir", "other")
    assert are_equal(load_weights(folder / "runs" / "first"), load_weights(folder / "other"))

    run_train_command("runs/first/config.yaml", "--resume", "true", "--max_epochs", "3")
    run_train_command("config/run.yaml", "--max_epochs=3", "--output_dir=whole", "--model.scale=null")
    assert are_equal(load_weights(folder / "runs" / "first"), load_weights(folder / "whole"))
    assert yaml.safe_load(stored.read_text())["resume"] is False
    assert yaml.safe_load(stored.read_text())["max_epochs"] == 3


def test_output_folder_may_be_in_the_home_folder_but_not_a_url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "home.yaml").write_text("output_dir: ~/runs")
    run_train_command("config/run.yaml", "home.yaml")
    run_train_command("config/run.yaml", "--output_dir=~/option")
    run_train_command("home/runs/config.yaml")
    assert sorted(path.name for path in (folder / "home").iterdir()) == ["option", "runs", "runs-2"]
    assert not (folder / "~").exists()
    (folder / "url.yaml").write_text("output_dir: s3://bucket/run")
    for words in (["url.yaml"], ["--output_dir=s3://bucket/run"]):
        assert "got the URL 's3://bucket/run'. Use output_dir: runs/first, " in error_message("config/run.yaml", *words)
    assert not (folder / "s3:").exists()


def test_run_from_a_file_has_the_same_weights_as_a_run_from_a_script(folder: Path) -> None:
    run_train_command("config/run.yaml", "--output_dir=from_file")
    import config_parts  # type: ignore[import-not-found]

    with unitrain.init(device="cpu") as backend:
        torch.manual_seed(0)
        model = config_parts.Network(hidden=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        config = unitrain.TrainConfig(max_epochs=2, batch_size=5, output_dir="from_script", progress="off")
        trainer = unitrain.Trainer(model, optimizer, nn.MSELoss(), backend=backend, config=config)
        trainer.fit(config_parts.create_data(), config_parts.create_data(7, 1))
    assert are_equal(load_weights(folder / "from_file"), load_weights(folder / "from_script"))
    assert not (folder / "from_script" / "config.yaml").exists()


def test_config_text_must_be_a_string(folder: Path) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = unitrain.TrainConfig(max_epochs=1, batch_size=1)
    with (
        unitrain.init(device="cpu") as backend,
        pytest.raises(ConfigError, match=r"Trainer\(config_text=\.\.\.\) must be a non-empty string"),
    ):
        unitrain.Trainer(
            model,
            optimizer,
            nn.MSELoss(),
            backend=backend,
            config=config,
            config_text={"seed": 1},  # type: ignore
        )


def test_accumulation_schedule_is_read_from_a_file_or_an_option(folder: Path) -> None:
    path = folder / "config" / "run.yaml"
    path.write_text(CONFIG + "gradient_accumulation_steps: {0: 1, 1: 3}\n")
    assert parse([str(path)]).values["gradient_accumulation_steps"] == {0: 1, 1: 3}


STRINGS = [
    "1e3", "12e5", "1e400", "-1e3", "1_000", "0x1f", "007", "1:30", "1:30.5", "off", "null", "~", "nan", ".inf", "",
    "[1]", "a: b", "true", "2026-01-01", "1.5", "plain",
]  # fmt: skip


def test_strings_that_look_like_other_types_are_stored_and_printed_with_quotes(folder: Path) -> None:
    types = {"number": "str | int", "ratio": "str | float"}
    names = {f"{name}_{index}": kind for name, kind in types.items() for index in range(len(STRINGS))}
    given = {name: STRINGS[int(name.rpartition("_")[2])] for name in names}
    given |= {
        "text": "1e3",
        "word": "1e3",
        "texts": STRINGS,
        "words": STRINGS,
        "by_name": {text: text for text in STRINGS},
    }
    names |= {"text": "str", "word": "Literal['1e3', 'x']"}
    names |= {"texts": "list[str]", "words": "list[Literal[tuple(STRINGS)]]", "by_name": "dict[str, str]"}
    (folder / "config" / "string_parts.py").write_text(
        "from typing import Literal\nimport torch\n"
        f"STRINGS = {STRINGS!r}\n"
        "class Strings(torch.nn.Module):\n"
        f"    def __init__(self, {', '.join(f'{name}: {kind}' for name, kind in names.items())}) -> None:\n"
        "        super().__init__()\n"
        "        self.received = {name: value for name, value in locals().items() if name in self.names}\n"
        f"    names = {list(names)!r}\n"
    )
    model = {"class_path": "string_parts.Strings", "init_args": given}
    (folder / "config" / "strings.yaml").write_text(json.dumps({"model": model}))
    parsed = parse(["config/run.yaml", "config/strings.yaml"])
    assert parsed.instantiate("model").received == given
    (folder / "stored.yaml").write_text(parsed.to_yaml())
    printed = run_train_command("config/run.yaml", "config/strings.yaml", "--print_config=comments")
    assert "# Clip the gradient norm" in printed
    (folder / "printed.yaml").write_text(printed)
    for name in ("stored.yaml", "printed.yaml"):
        content = yaml.safe_load((folder / name).read_text())
        assert (content["model"]["init_args"], content["progress"]) == (given, "off"), name
        assert parse([name]).instantiate("model").received == given, name
