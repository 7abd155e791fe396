"""Commands, options, fields, names, variables and paths in the inline code of the README and docs/ exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import click
import pytest

import unitrain
from unitrain.cli import unitrain as command_line

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FIELDS = {field.name for field in dataclasses.fields(unitrain.TrainConfig)}
# Options of other programs, such as examples, benchmarks, torchrun, horovodrun, Slurm and Docker.
OTHER_OPTIONS = {
    "--device", "--standalone", "--rdzv-backend", "--master-addr", "--nproc-per-node", "--bind-to", "--pty", "--qos",
    "--shm-size", "--fail-on-warning", "--runs", "--mpi", "--known", "--seed", "--cases",
}  # fmt: skip
OWNERS: dict[str, type] = {
    "backend": unitrain.Backend,
    "trainer": unitrain.Trainer,
    "loader": unitrain.ShardedLoader,
    "Trainer": unitrain.Trainer,
    "Callback": unitrain.Callback,
}


class Span(NamedTuple):
    """A piece of inline code. `place` is the page and the line of its start."""

    place: str
    text: str


def inline_code(page: str, text: str) -> Iterator[Span]:
    """Yield the inline code of a Markdown text, without fenced blocks. Line breaks become spaces."""
    without_blocks = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.S | re.M)
    for found in re.finditer(r"(`+)(.+?)\1", without_blocks, re.DOTALL):
        line = without_blocks.count("\n", 0, found.start()) + 1
        yield Span(f"{page}:{line}", " ".join(found[2].split()))


SPANS = [span for page in PAGES for span in inline_code(str(page.relative_to(ROOT)), page.read_text())]


def command_of(words: list[str]) -> tuple[click.Command | None, list[str]]:
    """Return the command at the start of `words` (None if it does not exist) and the remaining words."""
    command: click.Command | None = command_line
    while isinstance(command, click.Group) and words and words[0] != "...":
        command, words = command.get_command(click.Context(command), words[0]), words[1:]
    return command, words


def options_of(command: click.Command) -> set[str]:
    """Return all options of a command and of its subcommands."""
    options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            subcommand = command.get_command(context, name)
            assert subcommand is not None
            options |= options_of(subcommand)
    return options | {"--help"}


ALL_OPTIONS = options_of(command_line)


def long_options(words: list[str]) -> Iterator[str]:
    """Yield the names of the long options before the script, without their values."""
    for word in words:
        if word.endswith((".py", ".yaml")):
            return
        if re.match(r"--[a-z]", word):
            yield word.split("=")[0]


def unknown_command_or_option(text: str) -> str:
    """Return `text` if it calls an unknown command, or its first unknown option, or "" if all parts exist."""
    words = text.split()
    if words[0] == "srun":
        words = words[words.index("unitrain") :] if "unitrain" in words else []
    if words[:1] != ["unitrain"] or len(words) == 1:
        return ""
    command, rest = command_of(words[1:])
    if command is None:
        return text
    known = options_of(command)
    return next((name for name in long_options(rest) if name not in known), "")


def unknown_option(text: str) -> str:
    """Return the option at the start of `text` if no documented program has it, otherwise ""."""
    words = text.split()
    name = words[0].split("=")[0]
    is_option = re.fullmatch(r"--[a-z][a-z0-9-]*", name) is not None
    return name if is_option and name not in ALL_OPTIONS | OTHER_OPTIONS else ""


def unknown_field(text: str) -> str:
    """Return a keyword or attribute of `TrainConfig` that is not a field, or "" if there is none."""
    attribute = re.fullmatch(r"(?:unitrain\.)?TrainConfig\.(\w+)", text)
    if attribute:
        return "" if attribute[1] in FIELDS else attribute[1]
    if not re.match(r"(?:unitrain\.)?TrainConfig\(\w", text):
        return ""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call), text
    return next((keyword.arg for keyword in call.keywords if keyword.arg and keyword.arg not in FIELDS), "")


def unknown_name(text: str) -> str:
    """Return a name, module or entry-point group `unitrain...` that does not exist, or "" if all exist."""
    for name in re.findall(r"(?<![\w./-])unitrain((?:\.\w+)+)", text):
        first = name.split(".")[1]
        entry_point_group = name in (".backends", ".launchers")
        owner = getattr(unitrain, first, None) if first in unitrain.__all__ else None
        if owner is not None:
            if all(hasattr(owner, part) for part in name.split(".")[2:]):
                continue
            return f"unitrain{name}"
        if entry_point_group or module_or_member_exists(f"unitrain{name}"):
            continue
        return f"unitrain{name}"
    return ""


def module_or_member_exists(name: str) -> bool:
    """Return whether `name` is a module or a member of a module."""
    parent, _, last = name.rpartition(".")
    try:
        if importlib.util.find_spec(name) is not None:
            return True
    except ModuleNotFoundError:
        pass
    try:
        return hasattr(importlib.import_module(parent), last)
    except ModuleNotFoundError:
        return False


def unknown_attribute(text: str) -> str:
    """Return an attribute of one of OWNERS, such as `backend.size`, that does not exist, or "" if all exist."""
    found = re.match(r"(\w+)\.(\w+)", text)
    if found is None or found[1] not in OWNERS:
        return ""
    owner = OWNERS[found[1]]
    assigned = set(re.findall(r"self\.(\w+)\b", Path(owner_file(owner)).read_text()))
    annotated = {name for base in owner.__mro__ for name in vars(base).get("__annotations__", {})}
    known = hasattr(owner, found[2]) or found[2] in assigned | annotated
    return "" if known else found[0]


def owner_file(owner: type) -> str:
    """Return the path of the module that defines a class."""
    spec = importlib.util.find_spec(owner.__module__)
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


def unknown_variable(text: str) -> str:
    """Return a variable UNITRAIN_... that the code does not read, or "" if it reads all."""
    return next((name for name in re.findall(r"UNITRAIN_[A-Z_]*[A-Z]", text) if name not in VARIABLES), "")


def missing_path(text: str) -> str:
    """Return a path in a folder of the checkout that does not exist, or "" if all exist."""
    if not re.fullmatch(r"(unitrain|launchers|benchmarks|examples|tests|docs|backends)/[\w./-]*", text):
        return ""
    return "" if (ROOT / text).exists() or (ROOT / "unitrain" / text).exists() else text


VARIABLES = {
    name
    for folder in ("unitrain", "launchers", "tests", "setup.py")
    for path in ([ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
    for name in re.findall(r"UNITRAIN_[A-Z_]*[A-Z]", path.read_text())
}


@pytest.mark.parametrize(
    "unknown",
    [
        unknown_command_or_option, unknown_option, unknown_field, unknown_name, unknown_attribute, unknown_variable,
        missing_path,
    ],
)  # fmt: skip
def test_names_in_inline_code_exist(unknown: Callable[[str], str]) -> None:
    assert [f"{place}: {wrong}" for place, text in SPANS if (wrong := unknown(text))] == []


def test_tables_of_field_values_contain_exactly_the_valid_values() -> None:
    types = get_type_hints(unitrain.TrainConfig)
    documented = {}
    for page in PAGES:
        for header, rows in re.findall(r"^\| `(\w+)` \|.*\n\|[-|]+\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE):
            if header in FIELDS and get_origin(types[header]) is Literal:
                documented[header] = set(re.findall(r'^\| `"(\w+)"`', rows, re.MULTILINE))
    assert documented == {name: set(get_args(types[name])) for name in ("uneven", "stream", "checkpoint_format")}


@pytest.mark.parametrize(
    ("unknown", "valid", "invalid"),
    [
        (unknown_command_or_option, "unitrain launch --elastic 2:8 train.py --mine", "unitrain launch --elastics 2:8"),
        (unknown_command_or_option, "srun unitrain doctor", "unitrain docter"),
        (unknown_command_or_option, "unitrain bench train --setting x=1", "unitrain bench trains"),
        (unknown_option, "--elastic 2:8", "--elastics"),
        (unknown_field, "TrainConfig(max_epochs=3, uneven=...)", "TrainConfig(epochs=3)"),
        (unknown_field, "TrainConfig.seed", "TrainConfig.seeds"),
        (unknown_name, "unitrain.testing.run_ranks", "unitrain.testing.run_rank"),
        (unknown_name, "except unitrain.UnitrainError", "unitrain.ShardLoader(data)"),
        (unknown_attribute, "trainer.load_weights", "trainer.load_weight"),
        (unknown_attribute, "backend.no_sync(model)", "backend.nosync(model)"),
        (unknown_variable, "UNITRAIN_DEBUG=1", "UNITRAIN_DEBUGS"),
        (missing_path, "unitrain/trainer.py", "unitrain/trainers.py"),
    ],
)
def test_each_check_of_inline_code_reports_an_invalid_name(
    unknown: Callable[[str], str], valid: str, invalid: str
) -> None:
    assert unknown(valid) == ""
    assert unknown(invalid) != ""
