"""The settings of a parsed configuration: TrainConfig, and the values that are checked before the ranks communicate."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml

from unitrain.backends.registry import check_backend_name
from unitrain.bootstrap.devices import parse_device
from unitrain.config import TrainConfig
from unitrain.config_files.parser import ParsedConfig, setting_names
from unitrain.errors import ConfigError
from unitrain.initialize import check_timeout
from unitrain.loggers import create_loggers

# Loggers that write to output_dir, unless their argument `folder` is set.
_FILE_LOGGERS = {
    "csv": "CSVLogger",
    "jsonl": "JSONLinesLogger",
    "tensorboard": "TensorBoardLogger",
    "wandb": "WandbLogger",
}
_CLASS_CALL = re.compile(r"(\w+)=(?:LocalSGDConfig|PowerSGD)\(([^()]*)\)")
_CONFIG_CALL = re.compile(r"TrainConfig\((?:\.\.\., )?(.*?)(?:, \.\.\.)?\)(?=[.,;:]|$)")
# name=value, where the value is a string, a tuple or a word, but not TrainConfig.name=value.
_ASSIGNMENT = re.compile(r"(?<![\w.])(\w+)=(\"[^\"]*\"|'[^']*'|\([^()]*\)|[\w.+-]+?)(?=[.,;)}\s]|$)")


def build_config(parsed: ParsedConfig) -> TrainConfig:
    """Return the TrainConfig. Raises ConfigError with the location of an invalid setting."""
    settings = {}
    for name in setting_names():
        try:
            settings[name] = parsed.instantiate(name)
        except ConfigError as error:
            raise _error_with_location(parsed, name, error) from None
    try:
        return TrainConfig(**settings)
    except ConfigError as error:
        names = [word for word in re.findall(r"\w+", str(error)) if word in setting_names()]
        if not names:
            raise
        raise _error_with_location(parsed, names[0], error) from None


def check_values(parsed: ParsedConfig) -> None:
    """Raise ConfigError, with the location, for an invalid setting of TrainConfig, or an invalid value of
    timeout_seconds, backend, device, val_data or loggers.

    The check does not communicate, and creates neither the model nor the data.
    """
    config, values = build_config(parsed), parsed.values
    _check(parsed, "timeout_seconds", lambda: check_timeout(values.timeout_seconds))
    if values.backend is not None:
        _check(parsed, "backend", lambda: check_backend_name(values.backend))
    if values.device is not None:
        _check(parsed, "device", lambda: parse_device("device", values.device))
    if values.val_data is not None and not values.val_data:
        raise parsed.error(
            ["val_data"],
            "the mapping contains no dataset. Use val_data: package.module.create_dataset, or remove the key.",
        )
    _check(parsed, "loggers", lambda: create_loggers([name for name in values.loggers if isinstance(name, str)]))
    if config.output_dir is None and not config.dry_run:
        _check_logger_folders(parsed, values.loggers)


def _check_logger_folders(parsed: ParsedConfig, loggers: Sequence[Any]) -> None:
    for logger in loggers:
        if isinstance(logger, str):
            name, has_no_folder = logger, logger in _FILE_LOGGERS
        else:
            name = str(logger["class_path"])
            package, _, class_name = name.rpartition(".")
            is_file_logger = package.partition(".")[0] == "unitrain" and class_name in _FILE_LOGGERS.values()
            has_no_folder = is_file_logger and logger.get("init_args.folder") is None
        if has_no_folder:
            raise parsed.error(
                ["loggers"],
                f"the logger {name!r} writes to output_dir, which is not set. Use output_dir: runs/first, or the "
                "option --output_dir runs/first",
                name,
            )


def _check(parsed: ParsedConfig, name: str, check: Callable[[], object]) -> None:
    """Call `check`. If it raises ConfigError, raise one with the location of the key `name`."""
    try:
        check()
    except ConfigError as error:
        raise _error_with_location(parsed, name, error) from None


def _error_with_location(parsed: ParsedConfig, name: str, error: ConfigError) -> ConfigError:
    return parsed.error([name], _use_file_notation(str(error)))


def _use_file_notation(message: str) -> str:
    """Return the error message of a class such as TrainConfig, with each name=value rewritten as in a configuration
    file: name: value."""
    text = _CLASS_CALL.sub(lambda call: f"{call[1]}: {{{_ASSIGNMENT.sub(_to_yaml, call[2])}}}", message)
    return _ASSIGNMENT.sub(_to_yaml, _CONFIG_CALL.sub(r"\1", text))


def _to_yaml(assignment: re.Match[str]) -> str:
    try:
        value = ast.literal_eval(assignment[2])
    except (ValueError, SyntaxError):
        return f"{assignment[1]}: {assignment[2]}"
    value = list(value) if isinstance(value, tuple) else value
    text: str = yaml.safe_dump(value, default_flow_style=True, width=1000)
    text = text.strip().removesuffix("...").strip()  # safe_dump ends a scalar with a line of three dots
    return f"{assignment[1]}: {text}"
