"""TrainConfig: what it takes, and what it says about what it does not take."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from one_rank import rank_of

from unitrain.config import TrainConfig, check_alike
from unitrain.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"takes either epochs or steps, got neither\. Use TrainConfig\(epochs=10\)\."),
        ({"epochs": 1, "steps": 2}, r"takes either epochs or steps, got epochs=1 and steps=2\."),
        ({"epochs": 0}, r"^TrainConfig\.epochs must be at least 1, got 0\."),
        ({"steps": 0}, r"^TrainConfig\.steps must be at least 1, got 0\."),
        ({"epochs": 1.5}, r"^TrainConfig\.epochs must be a whole number, got 1\.5\."),
        ({"epochs": True}, r"^TrainConfig\.epochs must be a whole number, got True\."),
        ({"epochs": 1, "accumulate": 0}, r"accumulate must be at least 1, got 0\. Use 1 to step after every batch\.$"),
        ({"epochs": 1, "batch_size": 0}, r"batch_size must be at least 1, got 0\."),
        ({"epochs": 1, "eval_batch_size": -1}, r"eval_batch_size must be at least 1, got -1\."),
        ({"epochs": 1, "seed": -1}, r"seed must be at least 0, got -1\."),
        ({"epochs": 1, "num_workers": "2"}, r"num_workers must be a whole number, got '2'\."),
        ({"epochs": 1, "checkpoint_every": 0}, r"checkpoint_every must be at least 1, got 0\."),
        ({"epochs": 1, "show_every": 0}, r"show_every must be at least 1, got 0\."),
        ({"epochs": 1, "clip_norm": 0}, r"clip_norm must be a number above 0, got 0\. Use None not to clip\.$"),
        ({"epochs": 1, "clip_norm": float("nan")}, r"clip_norm must be a number above 0, got nan\."),
        (
            {"epochs": 1, "compression": "fp8"},
            r"Unknown TrainConfig\.compression 'fp8'\. .*Available: none, fp16, bf16, powersgd, ",
        ),
        ({"epochs": 1, "progress": "bars"}, r"Unknown TrainConfig\.progress 'bars'\. Did you mean 'bar'\?"),
        ({"epochs": 1, "scheduler_every": "batch"}, r"scheduler_every 'batch'\. Available: step, epoch\.$"),
        (
            {"epochs": 1, "precision": "fp8"},
            r"Unknown TrainConfig\.precision 'fp8'\. Available: fp32, bf16, fp16\.$",
        ),
        (
            {"epochs": 1, "ema_decay": 0},
            r"ema_decay must be a number above 0, got 0\. Use 0\.999, or None not to average",
        ),
        ({"epochs": 1, "ema_decay": 1.0}, r"ema_decay must be below 1, got 1\.0: at 1 the average never moves\."),
        ({"epochs": 1, "sync_batch_norm": "yes"}, r"sync_batch_norm must be True or False, got 'yes'\."),
        ({"epochs": 1, "channels_last": 1}, r"channels_last must be True or False, got 1\."),
        (
            {"epochs": 1, "compile": "max"},
            r"Unknown TrainConfig\.compile 'max'\. .*Available: default, reduce-overhead",
        ),
        ({"epochs": 1, "global_batch_size": 0}, r"global_batch_size must be at least 1, got 0\."),
        ({"epochs": 1, "lr_scaling": "liner"}, r"Unknown TrainConfig\.lr_scaling 'liner'\. Did you mean 'linear'\?"),
        (
            {"epochs": 1, "lr_scaling": "sqrt"},
            r"lr_scaling 'sqrt' needs the global batch size .*reference_batch_size=256",
        ),
        ({"epochs": 1, "reference_batch_size": 64}, r"reference_batch_size says how to scale .* or leave reference_b"),
        (
            {"epochs": 1, "warmup_steps": 10},
            r"warmup_steps says how to scale .* 'none' does not do\. Use .*scheduler\.$",
        ),
        ({"epochs": 1, "resume": True}, r"resume=True looks for checkpoints in output_dir, which is not set\."),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**settings)


def test_it_is_frozen_and_takes_keywords_only() -> None:
    config = TrainConfig(epochs=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.epochs = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        TrainConfig(2)  # type: ignore[misc]


def test_the_error_is_the_builtin_it_is() -> None:
    with pytest.raises(ValueError, match="accumulate"):
        TrainConfig(epochs=1, accumulate=0)


def test_ranks_with_different_settings_are_told_which() -> None:
    mine, other = TrainConfig(epochs=1, batch_size=8), TrainConfig(epochs=1, batch_size=16)
    check_alike(mine, rank_of(0, 2))
    with pytest.raises(ConfigError, match=r"TrainConfig\.batch_size differs between ranks: \[8, 16\]\."):
        check_alike(mine, rank_of(0, 2, gathered=[mine, other]))
