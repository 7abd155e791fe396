"""The shape of the house: who may import what, how long a file may be, and that everything public says what it does."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("unitrain/**/*.py"), *ROOT.glob("launchers/**/*.py")])
MOST_LINES = 300
VAGUE_NAMES = {"base_utils", "common", "core", "helper", "helpers", "lib", "misc", "tools", "util", "utils"}

# Each line: these files must not import those modules, except the ones that are named.
FORBIDDEN = [
    ("launchers/*", ["torch", "unitrain", "horovod"], []),
    (
        "unitrain/backends/*",
        ["unitrain.*", "unitrain"],
        ["unitrain.backends", "unitrain.environment", "unitrain.errors"],
    ),
    # The loop and all it stands on know the interface, never what is behind it.
    (
        "unitrain/[!_]*.py",
        ["unitrain.backends", "unitrain.commands", "unitrain.testing", "unitrain.horovod_wheel", "launchers"],
        ["unitrain.backends.base", "unitrain.backends.registry"],
    ),
    ("unitrain/environment.py", ["torch", "unitrain", "launchers"], ["unitrain.errors"]),
    ("unitrain/errors.py", ["torch", "unitrain", "launchers"], []),
    ("unitrain/cli.py", ["torch", "launchers"], []),
    ("unitrain/horovod_wheel/*", ["unitrain", "launchers"], ["unitrain.horovod_wheel", "unitrain.errors"]),
    ("*", ["torch.distributed", "torch.nn.parallel"], None),
    ("*", ["horovod"], None),
]
ALLOWED_IN = {
    "torch.distributed": ["unitrain/backends/*", "unitrain/testing/*"],
    "torch.nn.parallel": ["unitrain/backends/*", "unitrain/testing/*"],
    "horovod": ["unitrain/backends/horovod*.py", "unitrain/horovod_wheel/*"],
}
ENVIRONMENT_READERS = ["unitrain/environment.py", "launchers/*"]

Rule = Callable[[str, str], Iterator[str]]


def imports(source: str) -> Iterator[str]:
    """Yield the full name of every module and member that `source` imports when it runs, wherever it does so."""
    tree = ast.parse(source)
    for_types = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: list[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def imports_go_one_way(path: str, source: str) -> Iterator[str]:
    for files, forbidden, allowed in FORBIDDEN:
        if not fnmatch(path, files) or (files == "unitrain/[!_]*.py" and path.count("/") > 1):
            continue
        for name in imports(source):
            names = [package.removesuffix(".*") for package in forbidden]
            if not within(name, names):
                continue
            if allowed is None:
                places = ALLOWED_IN[names[0]]
                if not any(fnmatch(path, place) for place in places):
                    yield f"{path} imports {name}"
            elif not within(name, allowed):
                yield f"{path} imports {name}"


def the_environment_has_one_reader(path: str, source: str) -> Iterator[str]:
    if any(fnmatch(path, reader) for reader in ENVIRONMENT_READERS):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
            yield f"{path}:{node.lineno} touches {ast.unparse(node)}"
    for name in imports(source):
        if name in ("os.environ", "os.getenv", "os.putenv"):
            yield f"{path} imports {name}"


def files_are_short(path: str, source: str) -> Iterator[str]:
    lines = sum(bool(line.strip()) for line in source.splitlines())
    if lines > MOST_LINES:
        yield f"{path} has {lines} lines that are not blank"


def names_say_something(path: str, source: str) -> Iterator[str]:
    for part in Path(path).with_suffix("").parts:
        if part in VAGUE_NAMES:
            yield f"{path} is named {part}"


def everything_public_is_documented(path: str, source: str) -> Iterator[str]:
    tree = ast.parse(source)
    if source.strip() and not ast.get_docstring(tree):
        yield f"{path} has no docstring"
    for node in tree.body:
        public = isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        # A test case of the contract suite is its name, which is the sentence that it shows.
        is_case = isinstance(node, ast.FunctionDef) and "contract" in map(ast.unparse, node.decorator_list)
        if public and not is_case and not node.name.startswith("test_") and not ast.get_docstring(node):
            yield f"{path}: {node.name} has no docstring"


def nothing_is_printed(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield f"{path}:{node.lineno} prints"


RULES: list[tuple[Rule, str, str]] = [
    (imports_go_one_way, "launchers/x.py", "import torch"),
    (imports_go_one_way, "launchers/x.py", "from unitrain import errors"),
    (imports_go_one_way, "unitrain/trainer.py", "from unitrain.backends.ddp import DDPBackend"),
    (imports_go_one_way, "unitrain/trainer.py", "def f():\n    from unitrain.backends import horovod"),
    (imports_go_one_way, "unitrain/data.py", "import torch.distributed as dist"),
    (imports_go_one_way, "unitrain/data.py", "from torch import distributed"),
    (imports_go_one_way, "unitrain/commands/x.py", "import horovod.torch as hvd"),
    (imports_go_one_way, "unitrain/backends/ddp.py", "import horovod.torch as hvd"),
    (imports_go_one_way, "unitrain/backends/x.py", "from unitrain.trainer import Trainer"),
    (imports_go_one_way, "unitrain/environment.py", "import torch"),
    (imports_go_one_way, "unitrain/horovod_wheel/x.py", "from unitrain.backends import base"),
    (the_environment_has_one_reader, "unitrain/trainer.py", "import os\nx = os.environ['RANK']"),
    (the_environment_has_one_reader, "unitrain/trainer.py", "import os\nx = os.getenv('RANK')"),
    (the_environment_has_one_reader, "unitrain/trainer.py", "from os import environ"),
    (files_are_short, "unitrain/x.py", "x = 1\n" * (MOST_LINES + 1)),
    (names_say_something, "unitrain/utils.py", ""),
    (names_say_something, "unitrain/common/x.py", ""),
    (everything_public_is_documented, "unitrain/x.py", "x = 1"),
    (everything_public_is_documented, "unitrain/x.py", '"""A."""\ndef f(): ...'),
    (everything_public_is_documented, "unitrain/x.py", '"""A."""\nclass F: ...'),
    (nothing_is_printed, "unitrain/x.py", "print(1)"),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in RULES), ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule) -> None:
    assert len(FILES) > 50
    violations = [
        violation
        for path in FILES
        for violation in rule(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(("rule", "path", "source"), RULES, ids=lambda value: getattr(value, "__name__", value))
def test_each_rule_sees_its_violation(rule: Rule, path: str, source: str) -> None:
    assert list(rule(path, source))


def test_what_is_allowed_is_not_reported() -> None:
    for path, source in (
        ("unitrain/trainer.py", "from unitrain.backends.base import Backend"),
        ("unitrain/__init__.py", "if TYPE_CHECKING:\n    from unitrain.backends.ddp import DDPBackend"),
        ("unitrain/backends/ddp.py", "import torch.distributed as dist\nfrom unitrain import environment"),
        ("unitrain/backends/horovod_work.py", "import horovod.torch as hvd"),
        ("launchers/x.py", "import os\nx = os.environ"),
    ):
        assert not [*imports_go_one_way(path, source), *the_environment_has_one_reader(path, source)], path
