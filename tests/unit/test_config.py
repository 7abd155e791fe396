"""Validation of `TrainConfig` and other configuration classes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_rank import simulate_rank

from unitrain.backends.compression_setting import PowerSGD
from unitrain.backends.local_sgd_config import LocalSGDConfig
from unitrain.callbacks.profiler import Profiler
from unitrain.config import TrainConfig, check_same_config
from unitrain.errors import ConfigError
from unitrain.prediction_writer import PredictionWriter


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"takes either max_epochs or max_steps, got neither\. Use TrainConfig\(max_epochs=10\)\."),
        (
            {"max_epochs": 1, "max_steps": 2},
            r"either max_epochs or max_steps, got max_epochs=1 and max_steps=2\.",
        ),
        ({"max_epochs": 0}, r"^TrainConfig\.max_epochs must be at least 1, got 0\."),
        ({"max_steps": 0}, r"^TrainConfig\.max_steps must be at least 1, got 0\."),
        ({"max_epochs": 1.5}, r"^TrainConfig\.max_epochs must be a whole number, got 1\.5\."),
        ({"max_epochs": True}, r"^TrainConfig\.max_epochs must be a whole number, got True\."),
        (
            {"max_epochs": 1, "gradient_accumulation_steps": 0},
            r"gradient_accumulation_steps must be at least 1, got 0\. Use 1 to step after every batch\.$",
        ),
        ({"max_epochs": 1, "batch_size": 0}, r"batch_size must be at least 1, got 0\."),
        ({"max_epochs": 1, "eval_batch_size": -1}, r"eval_batch_size must be at least 1, got -1\."),
        (
            {"max_epochs": 2**63},
            r"max_epochs must be at most 9223372036854775807 \(2\*\*63 - 1\), got 9223372036854775808\. Use max_ep",
        ),
        ({"max_epochs": 1, "batch_size": 2**70}, r"batch_size must be at most 9223372036854775807 .* Use 32 to start"),
        ({"max_epochs": 1, "seed": -1}, r"seed must be at least 0, got -1\."),
        ({"max_epochs": 1, "seed": 2**64}, r"seed must be at most 18446744073709551615 \(2\*\*64 - 1, the maximum of"),
        ({"max_epochs": -(10**5000)}, r"max_epochs must be at least 1, got an integer of 16610 bits\."),
        ({"max_epochs": 1, "max_seconds": 10**5000}, r"max_seconds must be .*, got an integer of 16610 bits\."),
        ({"max_epochs": 1, "seed": 10**5000}, r"seed must be at most .*, got an integer of 16610 bits\. Use 0\."),
        ({"max_epochs": 1, "num_workers": "2"}, r"num_workers must be a whole number, got '2'\."),
        ({"max_epochs": 1, "checkpoint_every_epochs": 0}, r"checkpoint_every_epochs must be at least 1, got 0\."),
        ({"max_epochs": 1, "log_every_n_steps": 0}, r"log_every_n_steps must be at least 1, got 0\."),
        (
            {"max_epochs": 1, "max_grad_norm": 0},
            r"max_grad_norm must be .* above 0, got 0\. Use None to disable clipping\.$",
        ),
        ({"max_epochs": 1, "max_grad_norm": float("nan")}, r"max_grad_norm must be a number above 0, got nan\."),
        (
            {"max_epochs": 1, "compression": "fp8"},
            r"Unknown TrainConfig\.compression 'fp8'\. .*Available: none, fp16, bf16, powersgd, ",
        ),
        ({"max_epochs": 1, "progress": "bars"}, r"Unknown TrainConfig\.progress 'bars'\. Did you mean 'bar'\?"),
        ({"max_epochs": 1, "scheduler_interval": "batch"}, r"scheduler_interval 'batch'\. Available: step, epoch\.$"),
        (
            {"max_epochs": 1, "precision": "fp8"},
            r"Unknown TrainConfig\.precision 'fp8'\. Available: fp32, bf16, fp16\.$",
        ),
        (
            {"max_epochs": 1, "ema_decay": 0},
            r"ema_decay must be a number above 0, got 0\. Use 0\.999, or None to disable averaging",
        ),
        (
            {"max_epochs": 1, "local_sgd": 0},
            r"TrainConfig\.local_sgd must be at least 1, got 0\. Use a number of steps, or unitrain\.LocalSGDConfig\(",
        ),
        ({"max_epochs": 1, "local_sgd": "25"}, r"TrainConfig\.local_sgd must be a whole number, got '25'\."),
        (
            {"max_epochs": 1, "local_sgd": 4, "shard": "state"},
            r"shard='state' is not supported with local_sgd, because each rank trains .* Leave shard out, or leave ",
        ),
        (
            {"max_epochs": 1, "local_sgd": 4, "compression": "bf16"},
            r"compression='bf16' is not supported .* Use local_sgd=LocalSGDConfig\(steps=25, compression='bf16'\), or ",
        ),
        ({"max_epochs": 1, "local_sgd": 4, "logical_ranks": 4}, r"logical_ranks=4 is not supported with local_sgd"),
        ({"max_epochs": 1, "local_sgd": 4, "sync_batch_norm": True}, r"sync_batch_norm=True is not supported with"),
        (
            {"max_epochs": 1, "local_sgd": 4, "precision": "fp16"},
            r"precision='fp16' is not supported with local_sgd, .* Use precision='bf16', or leave local_sgd out\.$",
        ),
        ({"max_epochs": 1, "ema_decay": 1.0}, r"ema_decay must be below 1, got 1\.0: at 1 the average never changes\."),
        ({"max_epochs": 1, "sync_batch_norm": "yes"}, r"sync_batch_norm must be True or False, got 'yes'\."),
        ({"max_epochs": 1, "channels_last": 1}, r"channels_last must be True or False, got 1\."),
        (
            {"max_epochs": 1, "compile": "max"},
            r"Unknown TrainConfig\.compile 'max'\. .*Available: default, reduce-overhead",
        ),
        ({"max_epochs": 1, "global_batch_size": 0}, r"global_batch_size must be at least 1, got 0\."),
        (
            {"max_epochs": 1, "lr_scaling": "liner"},
            r"Unknown .*\.lr_scaling 'liner'\. Did you mean 'linear'\?",
        ),
        (
            {"max_epochs": 1, "lr_scaling": "sqrt"},
            r"lr_scaling 'sqrt' needs the global batch size .*reference_batch_size=256",
        ),
        (
            {"max_epochs": 1, "reference_batch_size": 64},
            r"reference_batch_size configures the scaling .* or leave reference_b",
        ),
        (
            {"max_epochs": 1, "warmup_steps": 10},
            r"warmup_steps configures the scaling .* lr_scaling is 'none'\. Use .*scheduler\.$",
        ),
        ({"max_epochs": 1, "output_dir": ""}, r"output_dir must be a non-empty path, got ''\. Use output_dir="),
        (
            {"max_epochs": 1, "output_dir": "s3://bucket/run"},
            r"got the URL 's3://bucket/run'\. .*, and copy it to the URL",
        ),
        (
            {"max_epochs": 1, "output_dir": Path("gs://b/run")},
            r"output_dir must be a path in a file .* 'gs:/b/run'",
        ),
        ({"max_epochs": 1, "resume": "file:///runs"}, r"resume must be a path in a file .* got the URL"),
        (
            {"max_epochs": 1, "output_dir": "~nobody-has-this-name/x"},
            r"home folder of this user is unknown\. .*'\./~nob",
        ),
        ({"max_epochs": 1, "resume": 1}, r"resume must be a non-empty path, got 1\. Use resume=True, "),
        ({"max_epochs": 1, "tf32": "yes"}, r"tf32 must be True, False or None, got 'yes'\. Use tf32=True"),
        *(
            ({"max_epochs": 1, name: 2}, rf"{name}=2 configures checkpoints, but without output_dir none are written\.")
            for name in (
                "keep_last",
                "checkpoint_every_steps",
                "checkpoint_every_minutes",
                "memory_checkpoint_every_steps",
            )
        ),
        ({"max_epochs": 1, "resume": True}, r"resume=True looks for checkpoints in output_dir, which is not set\."),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": 0}, r"LocalSGDConfig\.steps must be at least 1, got 0\. Use LocalSGDConfig\(steps=25\)\.$"),
        ({"steps": 2.5}, r"LocalSGDConfig\.steps must be a whole number, got 2\.5\."),
        ({"steps": 4, "outer_lr": 0}, r"outer_lr must be a number above 0, got 0\. Use outer_lr=0\.7"),
        ({"steps": 4, "outer_momentum": 1}, r"outer_momentum must be at least 0 and less than 1, got 1\. Use outer_"),
        ({"steps": 4, "outer_momentum": "0.9"}, r"got '0\.9'\. Use outer_momentum=0\.9, or 0 to average the weights\."),
        (
            {"steps": 4, "compression": "int4"},
            r"Unknown LocalSGDConfig\.compression 'int4'\. .*Available: none, bf16, int8",
        ),
        (
            {"steps": 4, "synchronous_ranks": 0},
            r"synchronous_ranks must be at least 1, got 0\. Use sync",
        ),
        ({"steps": 4, "synchronous_ranks": (2, 0)}, r"synchronous_ranks must be at least 1, got 0\. Use sync"),
        ({"steps": 4, "synchronous_ranks": "site"}, r"synchronous_ranks must be a whole number, got 'site'\. Use sync"),
        ({"steps": 4, "warmup_steps": -1}, r"LocalSGDConfig\.warmup_steps must be at least 0, got -1\."),
        ({"steps": 4, "fragments": 5}, r"fragments must be at most 4 with steps=4, got 5\. Use fragments=4, or more"),
        ({"steps": 4, "fragments": 0}, r"fragments must be at least 1, got 0\. Use fragments=1 to"),
        (
            {"steps": 4, "overlap_steps": 4},
            r"overlap_steps must be at most 3 with steps=4, got 4\. Use overlap_steps=3",
        ),
        ({"steps": 4, "mixing": 1}, r"mixing must be at least 0 and less than 1, got 1\. Use mixing=0\.5, or 0 to"),
    ],
)
def test_invalid_local_sgd_settings_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalSGDConfig(**settings)


def test_config_is_frozen_and_keyword_only() -> None:
    config = TrainConfig(max_epochs=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.max_epochs = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        TrainConfig(2)  # type: ignore[misc]


def test_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        TrainConfig(max_epochs=1, gradient_accumulation_steps=0)


def test_settings_that_differ_between_ranks_are_named() -> None:
    mine, other = TrainConfig(max_epochs=1, batch_size=8), TrainConfig(max_epochs=1, batch_size=16)
    check_same_config(mine, simulate_rank(0, 2))
    with pytest.raises(ConfigError, match=r"TrainConfig\.batch_size differs between ranks: \[8, 16\]\."):
        check_same_config(mine, simulate_rank(0, 2, gathered=[(mine, None), (other, None)]))
    message = r"Trainer\(config_text=\.\.\.\) differs between ranks 0 and 1\."
    with pytest.raises(ConfigError, match=message):
        check_same_config(mine, simulate_rank(0, 2, gathered=[(mine, "seed: 0"), (mine, "seed: 1")]), "seed: 0")


class _Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no text")

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    __hash__ = object.__hash__


UNUSUAL_VALUES: list[Any] = [
    _Unprintable(),
    [_Unprintable()],
    10**400,
    "x" * 10000,
    np.array([1, 2]),
    1j,
    b"x",
    {"a": None},
]


@pytest.mark.parametrize("path_type", [str, Path])
def test_home_folder_is_expanded_in_all_paths(path_type: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = TrainConfig(max_epochs=1, output_dir=path_type("~/runs"), resume=path_type("~/runs/step-1"))
    wanted = path_type(tmp_path / "runs")
    assert (config.output_dir, config.resume) == (wanted, path_type(tmp_path / "runs/step-1"))
    assert PredictionWriter(path_type("~/runs")).folder == Profiler(folder=path_type("~/runs")).folder == wanted
    for unchanged in ("./~/runs", "runs/", "a:b/c", "C:/runs"):
        assert TrainConfig(max_epochs=1, output_dir=unchanged).output_dir == unchanged


@pytest.mark.parametrize("config_class", [TrainConfig, LocalSGDConfig, PowerSGD])
def test_unusual_values_of_every_field_are_accepted_or_raise_a_config_error(config_class: type[Any]) -> None:
    required: dict[str, Any] = {TrainConfig: {"max_epochs": 1, "output_dir": "runs"}, LocalSGDConfig: {"steps": 5}}.get(
        config_class, {}
    )
    raised = 0
    for field in dataclasses.fields(config_class):
        for value in UNUSUAL_VALUES:
            try:
                config_class(**{**required, field.name: value})
            except ConfigError as error:
                assert len(str(error)) < 1500
                raised += 1
    assert raised > len(dataclasses.fields(config_class)) * len(UNUSUAL_VALUES) // 2


def test_errors_describe_numbers_above_the_float_range_and_unprintable_values() -> None:
    with pytest.raises(
        ConfigError, match=r"^TrainConfig\.max_grad_norm must be a number above 0, got an integer of 1329 bits"
    ):
        TrainConfig(max_epochs=1, max_grad_norm=10**400)
    with pytest.raises(ConfigError, match=r"^TrainConfig\.seed must be a whole number, got an object of class list\. "):
        TrainConfig(max_epochs=1, seed=[_Unprintable()])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^TrainConfig\.seed must .* got a string of 10000 characters that starts"):
        TrainConfig(max_epochs=1, seed="x" * 10000)  # type: ignore[arg-type]
