"""The keys of a configuration file and their types, command-line overrides, and errors with file, line and key."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import re
import sys
from abc import ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset

from unitrain.callbacks.callback import Callback
from unitrain.config import TrainConfig
from unitrain.config_files import yaml_text
from unitrain.config_files.imports import find_import_path, find_object, import_modules, option_values
from unitrain.config_files.sources import ConfigFile
from unitrain.errors import ConfigError, MissingDependencyError, did_you_mean
from unitrain.loggers.logger import Logger

PYTHON_PATH = "python_path"
REQUIRED = ("model", "optimizer", "train_data")
_EXAMPLES = {
    "model": "torch.nn.Linear",
    "optimizer": "torch.optim.AdamW",
    "train_data": "package.module.create_dataset",
}


class _DataMeta(ABCMeta):
    """Defines which classes count as subclasses of `Data`."""

    def __subclasscheck__(cls, subclass: type) -> bool:
        if issubclass(subclass, Dataset | DataLoader):
            return True
        if subclass.__module__ == "builtins" or issubclass(subclass, Mapping | nn.Module | argparse.Namespace):
            return False
        return hasattr(subclass, "__iter__") or (hasattr(subclass, "__getitem__") and hasattr(subclass, "__len__"))

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Dataset | DataLoader)

    def __subclasses__(cls) -> list[Any]:
        return [Dataset, DataLoader]


class Data(metaclass=_DataMeta):
    """Type of the data. Its subclasses are the datasets and DataLoaders of torch, and other classes with the methods of
    a dataset, such as `datasets.Dataset`.

    It is one type instead of a Union, because jsonargparse tries all types of a Union, and replaces the exceptions of
    the user's class or function with a message about the types.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[Any]: ...


# Name, type, default and help of the keys that are not settings of TrainConfig.
_KEYS: tuple[tuple[str, Any, Any, str], ...] = (
    ("model", nn.Module, None, "Class of the model, or function that returns it."),
    (
        "optimizer",
        Callable[[Iterable[Any]], Optimizer],
        None,
        "Class of the optimizer, or function that takes the model's parameters and returns the optimizer.",
    ),
    (
        "scheduler",
        Callable[[Optimizer], LRScheduler] | Callable[[Optimizer, int], LRScheduler] | None,
        None,
        "Class of the learning-rate scheduler, or function scheduler(optimizer, total_steps). If a class has an "
        "argument total_steps that is not set, it receives the number of steps of the run.",
    ),
    (
        "loss_fn",
        Callable[..., Any] | None,
        None,
        "Function loss_fn(output, target), or a class such as torch.nn.MSELoss. [default: the loss in the model's "
        "output]",
    ),
    ("metrics", dict[str, Callable[..., Any]] | None, None, "Metric functions or torchmetrics classes by name."),
    ("forward", Callable[..., Any] | None, None, "Function forward(model, batch) that returns (output, target)."),
    ("train_data", Data, None, "Class of the dataset or DataLoader, or function that returns it."),
    ("val_data", Data | dict[str, Data] | None, None, "Validation data, or several datasets by name."),
    ("callbacks", list[Callback], [], "Classes of the callbacks."),
    ("loggers", list[str | Logger], [], "Names or classes of the loggers."),
    ("backend", str | None, None, "ddp, horovod, local or a plug-in. [default: UNITRAIN_BACKEND, or the launcher's]"),
    ("device", str | None, None, "Device of each rank. [default: a GPU per rank if there are GPUs, otherwise cpu]"),
    ("transport", str | None, None, "Transport, such as gloo or nccl. [default: UNITRAIN_TRANSPORT, or the device's]"),
    ("timeout_seconds", float, 300.0, "Timeout of the rendezvous and of every collective."),
    (
        PYTHON_PATH,
        list[str],
        [],
        "Folders, relative to the working directory, that are searched for modules in addition to the working "
        "directory. Set it in a file. [default: the folder of the file]",
    ),
)
_CLASS_KEYS = ("model", "optimizer", "scheduler", "loss_fn", "train_data", "val_data", "callbacks", "loggers")
# For each key whose type is a Union that contains a class to instantiate: this class. The value, or each element of a
# list or dictionary, is instantiated separately.
_ELEMENT_TYPES: Mapping[str, Any] = {"val_data": Data, "loggers": Logger}
# By key, the return annotation that an error message suggests for a function.
_ANNOTATIONS = {
    "model": "torch.nn.Module",
    "optimizer": "torch.optim.Optimizer",
    "scheduler": "torch.optim.lr_scheduler.LRScheduler",
    "train_data": "torch.utils.data.Dataset",
    "val_data": "torch.utils.data.Dataset",
    "callbacks": "unitrain.Callback",
    "loggers": "unitrain.Logger",
}
# By key, the number of parameters of a function that are not set in a file.
_TRAINER_PARAMETERS = {"optimizer": 1, "scheduler": 2, "loss_fn": 2}
_UNION = "Does not validate against any of the Union subtypes"
_KEY_PATTERN = re.compile(r'(?:Parser )?[Kk]ey "([^"]+)"')
_CLASS_PATTERN = re.compile(r"<class '([\w.]+)'>")


@dataclass(frozen=True)
class ParsedConfig:
    """A parsed configuration: the parser, the values of all keys, the files, and the command-line overrides."""

    parser: Any
    values: Any
    files: Sequence[ConfigFile]
    overrides: Sequence[str]

    def to_yaml(self, **changes: Any) -> str:
        """Return the YAML text of all keys with these `changes`. The text does not refer to other files."""
        values = self.values.clone()
        for name, value in changes.items():
            values[name] = value
        text: str = self.parser.dump(values, skip_none=False, skip_validation=True)
        return text

    def instantiate(self, name: str) -> Any:
        """Return the object that the key `name` specifies.

        An exception of the user's class or function is raised unchanged, even if the type of the key is a Union. For a
        Union, jsonargparse would replace the exception with a message about the types.
        """
        value = self.values[name]
        if name not in _ELEMENT_TYPES:
            return self._instantiate(self.parser, name, value)
        parser = type(self.parser)(exit_on_error=False)
        parser.add_argument("--object", type=_ELEMENT_TYPES[name])

        def create(element: Any) -> Any:
            is_name = element is None or isinstance(element, str)
            return element if is_name else self._instantiate(parser, "object", element)

        if isinstance(value, list):
            return [create(element) for element in value]
        if isinstance(value, dict):
            return {key: create(element) for key, element in value.items()}
        return create(value)

    def _instantiate(self, parser: Any, name: str, value: Any) -> Any:
        raised: list[Exception] = []

        def create(class_type: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return class_type(*args, **kwargs)
            except Exception as error:
                raised.append(error)
                raise

        selected = type(self.values)()
        selected[name] = value
        try:
            return parser.instantiate(selected, instantiators=[(create, object, True)])[name]
        except Exception as error:
            failure = raised[0] if raised else error
        raise failure

    def location(self, name: str) -> str:
        """Return the location of the key `name`, as in an error message."""
        return _locate_key(self.files, self.overrides, [name], None)

    def error(self, key_path: Sequence[str], message: str, value: str | None = None) -> ConfigError:
        """Return an error whose message begins with the location of the key `key_path`, such as ("model", "hidden")."""
        return ConfigError(f"{_locate_key(self.files, self.overrides, key_path, value)}: {message}")


def parse(argv: Sequence[str]) -> ParsedConfig:
    """Parse the command line of `unitrain train`: files, followed by options --key value.

    Inserts the folders of modules into sys.path, and imports the modules that the values name. The options --help,
    --KEY.help and --print_config print and exit. Raises ConfigError, or MissingDependencyError if jsonargparse is
    missing. An exception that is raised while a module is imported propagates unchanged, with a note that states where
    the configuration names the module.
    """
    jsonargparse = _import_jsonargparse()
    count = next((index for index, argument in enumerate(argv) if argument.startswith("-")), len(argv))
    files, overrides = [ConfigFile.read(Path(name)) for name in argv[:count]], list(argv[count:])
    parser = _create_parser(jsonargparse)
    _check_keys(files, overrides)
    _extend_module_search(files)
    if (request := _help_request(files, overrides)) is None:
        import_modules(files, overrides)
        arguments = [*(word for file in files for word in ("--config", str(file.path))), *overrides]
    else:  # without the files, whose errors the user may want to correct with this help
        key, path = request
        import_modules((), [f"--{key}={path}"])
        if inspect.isfunction(function := find_object(path)):
            click.echo(_function_help(parser, key, path, function))
            sys.exit(0)
        arguments = [f"--{key}.help={path}"]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            values = parser.parse_args(arguments)
    except jsonargparse.ArgumentError as error:
        raise _locate_error(str(error), files, overrides) from None
    finally:
        if text := printed.getvalue():  # the output of --print_config and --KEY.help
            click.echo(_remove_subclasses(text), nl=False)
    values.pop("config", None)
    parsed = ParsedConfig(parser, values, files, overrides)
    for name in REQUIRED:
        if values[name] is None:
            where = f"'{files[-1].path}'" if files else "a configuration file"
            raise ConfigError(
                f"The key {name!r} is not set. Add it to {where}, as in {name}: {_EXAMPLES[name]}, or use --{name}"
            )
    return parsed


def _help_request(files: Sequence[ConfigFile], overrides: Sequence[str]) -> tuple[str, str] | None:
    """Return the key and the import path of the option --KEY.help, or None if there is no such option with a path.

    Without a value, the option describes the class or function that `files` or the other options name.
    """
    for name, value in option_values(overrides):
        key = name.removesuffix(".help")
        if key != name and key in _CLASS_KEYS and (path := value or find_import_path(key, files, overrides)):
            return key, path
    return None


def _function_help(parser: Any, key: str, path: str, function: Callable[..., Any]) -> str:
    """Return a description of the parameters of `function`, except those that the Trainer sets."""
    names = list(inspect.signature(function).parameters)
    described = type(parser)(prog="unitrain train", usage=argparse.SUPPRESS, add_help=False)
    skipped = set(names[: _TRAINER_PARAMETERS.get(key, 0)])
    described.add_function_arguments(function, key, fail_untyped=False, skip=skipped)
    text = re.sub(rf"^  --{key} CONFIG\s.*\n( {{10,}}.*\n?)*", "", described.format_help(), flags=re.MULTILINE)
    text = re.sub(r"<function .* at 0x\w+>:|Optional\[Untyped\]", lambda match: "Any" if "U" in match[0] else "", text)
    if f"--{key}." not in text:
        text += "\nThe function has no arguments.\n"
    body = text.strip("\n")
    return f"Help for --{key}.help={path}\n\n{body}"


def keys_help() -> str:
    """Return a description of all keys with their types. Raises MissingDependencyError if jsonargparse is missing."""
    text: str = _create_parser(_import_jsonargparse()).format_help()
    return text.partition("\n\n")[2]


def module_folders(files: Iterable[ConfigFile]) -> list[str]:
    """Return the folders to search for modules: the value of the key python_path, or else the folder of each file.

    The folders are relative to the working directory if they are inside it. The working directory is omitted.
    """
    folders: dict[str, None] = {}
    for file in files:
        names = file.content.get(PYTHON_PATH)
        for name in names if names and isinstance(names, list) else [file.path.parent]:
            path = Path(str(name)).resolve()
            if path != Path.cwd():
                folders[str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)] = None
    return list(folders)


def setting_names() -> list[str]:
    """Return the names of the settings of TrainConfig."""
    return [field.name for field in fields(TrainConfig)]


def _import_jsonargparse() -> Any:
    try:
        jsonargparse = importlib.import_module("jsonargparse")
        jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
        jsonargparse.set_dumper("yaml", yaml_text.dump)
    except ImportError as error:  # also raised if an optional dependency of jsonargparse is missing
        raise MissingDependencyError(
            f"unitrain train needs a package that is missing: {error}. Install it, in the source folder of unitrain, "
            'with: pip install ".[config]"'
        ) from error
    return jsonargparse


def _remove_subclasses(text: str) -> str:
    """Return a help text of jsonargparse without the lists of all imported subclasses: hundreds of modules of torch."""
    return re.sub(r",\s+known\s+subclasses:[^()]*\)", ")", text)


def _create_parser(jsonargparse: Any) -> Any:
    def format_help(parser: Any) -> str:
        return _remove_subclasses(jsonargparse.ArgumentParser.format_help(parser))

    def dump(parser: Any, *args: Any, with_comments: bool = False, **kwargs: Any) -> str:
        text: str = jsonargparse.ArgumentParser.dump(parser, *args, **kwargs)
        if not with_comments:
            return text
        commented = jsonargparse.ArgumentParser.dump(parser, *args, with_comments=True, **kwargs)
        # ruamel.yaml, which adds the comments, omits quotes that only YAML 1.1 requires, as in "off".
        return yaml_text.restore_quotes(commented, text)

    methods = {"format_help": format_help, "dump": dump}
    parser_class = type("ConfigParser", (jsonargparse.ArgumentParser,), methods)
    parser = parser_class(
        prog="unitrain train",
        usage="unitrain train [CONFIG ...] [--KEY VALUE ...]",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="A configuration file, like CONFIG.")
    for name, value_type, default, text in _KEYS:
        parser.add_argument(f"--{name}", type=value_type, default=default, help=text)
    parser.add_class_arguments(TrainConfig, None)
    return parser


def _check_keys(files: Iterable[ConfigFile], overrides: Sequence[str]) -> None:
    """Raise ConfigError for unknown keys of files, for unknown options, and for the option --python_path."""
    known_keys = _known_keys()
    for file in files:
        for entry in file.entries:
            name = str(entry.key[0])
            if len(entry.key) == 1 and name.partition(".")[0] not in known_keys:
                raise ConfigError(
                    f"{file.location(entry)}: unknown key {name!r}. {did_you_mean(name, known_keys)}Print all keys "
                    "with: unitrain train --help"
                )
    check_options(overrides)


def check_options(
    words: Sequence[str], where: str = "", fix: str = "Print all options with: unitrain train --help"
) -> None:
    """Raise ConfigError if `words`, the arguments after the configuration files, contain an unknown option or the
    option --python_path.

    `where` and `fix` are parts of the message about an unknown option. The values of the options are not checked.
    """
    known_keys = _known_keys()
    for word in words:
        if not re.match(r"--|-[A-Za-z]", word) or word in ("-h", "-inf", "-nan"):
            continue
        option = word.partition("=")[0].rstrip("+")
        name = option.lstrip("-")
        if name == PYTHON_PATH:
            raise ConfigError(f"--{PYTHON_PATH} is read from files only. Use: export PYTHONPATH=folder")
        if not option.startswith("--") or name.partition(".")[0] not in (
            *known_keys, "config", "print_config", "help"
        ):  # fmt: skip
            suggestion = did_you_mean(name.replace("-", "_"), known_keys)
            raise ConfigError(f"Unknown option {option}{where}. {suggestion}{fix}")


def _known_keys() -> list[str]:
    return [*(name for name, *_ in _KEYS), *setting_names()]


def _extend_module_search(files: Iterable[ConfigFile]) -> None:
    folders = [str(Path.cwd()), *(str(Path(name).resolve()) for name in module_folders(files))]
    sys.path[:0] = [folder for folder in folders if folder not in sys.path]


def _locate_error(text: str, files: Sequence[ConfigFile], overrides: Sequence[str]) -> ConfigError:
    """Return a ConfigError with file, line and key for `text`, an error message of jsonargparse."""
    names = [part for dotted_key in _KEY_PATTERN.findall(text) for part in dotted_key.split(".")]
    if not names:
        return ConfigError(f"{text.strip()}. Print all keys with: unitrain train --help")
    if (error := _missing_annotation_error(names[0], text, files, overrides)) is not None:
        return error
    message, value = _shorten_message(text)
    if (option := re.search(r"Option '([^']+)' is not accepted", text)) is not None:
        names.append(option[1])
    top = names[0]
    path = find_import_path(top, files, overrides)
    is_found = path is not None and callable(find_object(path))
    words = ["unitrain train", *(str(file.path) for file in files), f"--{top}.help", str(path) if is_found else "CLASS"]
    fix = f"Print the arguments with: {' '.join(words)}"
    if top not in _CLASS_KEYS:
        fix = "Print the types of all keys with: unitrain train --help"
    place = _locate_key(files, overrides, names, value)
    return ConfigError(f"{place}: {message.rstrip('.')}. {fix}")


def _missing_annotation_error(
    name: str, text: str, files: Sequence[ConfigFile], overrides: Sequence[str]
) -> ConfigError | None:
    """Return an error if the key `name` names a function that has no return annotation and whose path is in `text`;
    otherwise None."""
    if name not in _ANNOTATIONS:
        return None
    entries = [entry for file in files for entry in file.entries if entry.key[0] == name]
    paths = [entry.value for entry in entries if "init_args" not in entry.key]
    paths += [path for word in overrides for path in (word, word.partition("=")[2])]
    for path in paths:
        if path is None or path not in text:
            continue
        module, _, function_name = path.rpartition(".")
        function = getattr(sys.modules.get(module), function_name, None)  # jsonargparse has imported the module
        if inspect.isfunction(function) and "return" not in function.__annotations__:
            return ConfigError(
                f"{_locate_key(files, overrides, [name], path)}: the function {path!r} has no return annotation. Add "
                f"it, as in: def {function_name}(...) -> {_ANNOTATIONS[name]}:"
            )
    return None


def _shorten_message(text: str) -> tuple[str, str | None]:
    """Return the message of jsonargparse in one line, and the invalid value if it is known."""
    text = _CLASS_PATTERN.sub(lambda match: "None" if match[1] == "NoneType" else match[1], text)
    text = re.sub(r"\bunitrain\.config_files\.parser\.Data\b|(?<=subclass of )Data\b", "Dataset or DataLoader", text)
    text = re.sub(r"\bType collections\.abc\.Callable\[.*?\] expects a function or a callable class: ", "", text)
    text = re.sub(r"\. Got value: Namespace\(.*\)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"(has no attribute '[^']*'|is not accepted)\. Got value: .*$", r"\1", text, flags=re.MULTILINE)
    text = re.sub(r"typing\.Literal\[([^\]]*)\]", r"one of \1", text)
    causes = re.findall(r"^\s*- (module '[^']*' has no attribute '[^']*'|Option '[^']*' is not accepted)$", text, re.M)
    if text.count(_UNION) == 1 and causes:
        return str(causes[0]), None
    types, given = re.search(r"Subtypes: \[(.*)\]$", text, re.MULTILINE), re.search(r"Given value: (.*)", text)
    if text.count(_UNION) == 1 and types and given and "Problem with" not in text:
        expected = sorted(_split_types(types[1]), key=lambda name: name == "None")  # the order differs between versions
        return f"expected {' or '.join(expected)}, got {given[1]!r}", given[1]
    last_line = text.strip().splitlines()[-1].strip().removeprefix("- ")
    if (match := re.fullmatch(r"Expected an? (.*)\. Got value: (.*)", last_line)) is not None:
        return f"expected {match[1]}, got {match[2]!r}", match[2]
    problem = re.search(r"Problem with given class_path '([^']+)':\s*(.*)", text)
    if problem is not None and text.count("Problem with") == 1:
        return f"{problem[1]}: {problem[2].strip()}", problem[1]
    lines = text.strip().splitlines()[1:] or text.strip().splitlines()
    return "; ".join(line.strip() for line in lines), None


def _split_types(text: str) -> list[str]:
    """Split types at the commas that are not inside brackets."""
    types, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            types.append("")
        else:
            types[-1] += character
    return [name.strip() for name in types]


def _locate_key(
    files: Sequence[ConfigFile], overrides: Sequence[str], key_path: Sequence[str], value: str | None
) -> str:
    """Return the option of the command line, or the file and line, that sets the key `key_path` last."""
    key = ".".join(key_path)
    for word in reversed(overrides):
        option = word[2:].partition("=")[0].rstrip("+") if word.startswith("--") else ""
        parts = option.split(".")
        if parts[0] == key_path[0] and (len(parts) == 1 or parts[-1] in key_path):
            return f"--{option}"
    for file in reversed(files):
        if (entry := file.find(key_path, value)) is not None:
            return f"{file.location(entry)}: {key}"
    return key


def describe_versions() -> str:
    """Return the versions of unitrain and torch for the header of a file."""
    import unitrain

    return f"unitrain {unitrain.__version__}, torch {torch.__version__}"
