"""The shape of the house: who may import what, how long a file may be, and that everything public says what it does."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted([*ROOT.glob("unitrain/**/*.py"), *ROOT.glob("launchers/**/*.py")])
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
MOST_LINES = 500
VAGUE_NAMES = {"base_utils", "common", "core", "helper", "helpers", "lib", "misc", "tools", "util", "utils"}

# Each line: these files (a * stops at no folder, "-" takes files out) must not import those modules, except the named.
FORBIDDEN = [
    ("launchers/*", ["torch", "unitrain", "horovod"], []),
    ("unitrain/errors.py", ["torch", "unitrain", "launchers"], []),
    ("unitrain/bootstrap/environment.py", ["torch", "unitrain", "launchers"], ["unitrain.errors"]),
    (
        "unitrain/monitoring/supervisor_client.py unitrain/bootstrap/authentication.py",
        ["torch", "unitrain", "launchers"],
        ["unitrain.bootstrap.environment", "unitrain.errors", "unitrain.bootstrap.authentication"],
    ),
    ("unitrain/cli/__init__.py unitrain/__main__.py", ["torch", "launchers"], []),
    ("unitrain/horovod_wheel/*", ["unitrain", "launchers"], ["unitrain.horovod_wheel", "unitrain.errors"]),
    ("unitrain/* -unitrain/commands/*", ["unitrain.cli"], []),
    ("unitrain/* -unitrain/commands/* -unitrain/functions/run.py", ["launchers"], []),
    # A function's ranks are started like a script's; what it does there is its own matter.
    (
        "unitrain/functions/*",
        ["torch", "unitrain"],
        [
            "unitrain.functions",
            "unitrain.bootstrap.authentication",
            "unitrain.bootstrap.environment",
            "unitrain.errors",
            "unitrain.processes",
            "unitrain.validation",
            "unitrain.backends.registry",
        ],
    ),
    ("unitrain/* -unitrain/commands/* -unitrain/horovod_wheel/* -unitrain/doctor/*", ["unitrain.horovod_wheel"], []),
    # Ranks that take turns are measured as they are tested: kept alive between functions, and ended whatever happens.
    ("unitrain/* -unitrain/testing/* -unitrain/bench/contestants.py", ["unitrain.testing"], []),
    # What a backend stands on; the interface stands on less, and no backend on another one.
    (
        "unitrain/backends/*",
        ["unitrain"],
        [
            "unitrain.backends",
            "unitrain.bootstrap.authentication",
            "unitrain.bootstrap.environment",
            "unitrain.errors",
            "unitrain.validation",
        ],
    ),
    (
        "unitrain/backends/base.py",
        ["unitrain.backends"],
        ["unitrain.monitoring.rank_status", "unitrain.backends.capabilities", "unitrain.backends.compression_setting"],
    ),
    ("unitrain/backends/* -unitrain/backends/horovod*.py", ["unitrain.backends.horovod.backend"], []),
    ("unitrain/backends/* -unitrain/backends/ddp.py", ["unitrain.backends.ddp"], []),
    ("unitrain/backends/* -unitrain/backends/local.py", ["unitrain.backends.local"], []),
    # The loop and all it stands on know the interface, never what is behind it; the names are for who starts a backend.
    (
        "unitrain/* examples/* -unitrain/backends/* -unitrain/initialize.py -unitrain/commands/* -unitrain/testing/* "
        "-unitrain/functions/* -unitrain/doctor/* -unitrain/bench/* -unitrain/trainer_arguments.py",
        ["unitrain.backends"],
        ["unitrain.backends.base", "unitrain.backends.capabilities", "unitrain.backends.compression_setting"],
    ),
    ("unitrain/bench/*", ["unitrain.backends"], ["unitrain.backends.base", "unitrain.bootstrap.network"]),
    # What is measured and worked out of it is nobody's else to know; figures alone can be read without torch.
    ("unitrain/* -unitrain/bench/* -unitrain/commands/* -unitrain/report/*", ["unitrain.bench"], []),
    (
        "unitrain/bench/bandwidth.py unitrain/bench/results.py unitrain/bench/builtin.py unitrain/bench/comparison.py "
        "unitrain/bench/tables.py unitrain/bench/cost_*.py",
        ["torch", "unitrain"],
        ["unitrain.bench", "unitrain.errors", "unitrain.__version__"],
    ),
    ("unitrain/bench/*", ["unitrain.checkpoint", "unitrain.progress", "unitrain.metrics"], []),
    ("unitrain/initialize.py", ["unitrain.backends"], ["unitrain.backends.base", "unitrain.backends.registry"]),
    ("unitrain/commands/* -unitrain/cli/doctor.py", ["unitrain.backends"], ["unitrain.backends.registry"]),
    # It looks at what backends stand on, and at no backend.
    (
        "unitrain/doctor/* unitrain/cli/doctor.py",
        ["unitrain.backends"],
        ["unitrain.bootstrap.network", "unitrain.bootstrap.rendezvous", "unitrain.torch_compat"],
    ),
    ("unitrain/* -unitrain/commands/* -unitrain/doctor/*", ["unitrain.doctor"], []),
    (
        "unitrain/testing/*",
        ["unitrain.backends"],
        [
            "unitrain.backends.base",
            "unitrain.backends.checks",
            "unitrain.backends.compression_setting",
            "unitrain.bootstrap.network",
        ],
    ),
    # It reads files, so that runs can be looked at where nothing of theirs is installed.
    (
        "unitrain/report/*",
        ["torch", "unitrain", "launchers"],
        [
            "unitrain.report",
            "unitrain.errors",
            "unitrain.progress.history",
            "unitrain.progress.stragglers",
            "unitrain.bench.results",
        ],
    ),
    ("unitrain/* -unitrain/commands/* -unitrain/report/*", ["unitrain.report"], []),
    ("unitrain/* -unitrain/report/charts.py", ["matplotlib"], []),
    # Where numbers go is a matter of its own, and each service's package is its logger's.
    (
        "unitrain/tracking/loggers/*",
        ["torch", "unitrain"],
        ["unitrain.loggers", "unitrain.loggers.json_lines", "unitrain.errors", "unitrain.validation"],
    ),
    ("unitrain/* -unitrain/tracking/loggers/*", ["wandb", "mlflow", "tensorboard", "torch.utils.tensorboard"], []),
    # trainer -> run -> data, step, tracking, metrics, modules -> config
    ("*", ["unitrain.trainer"], []),
    # A run that is verified is recorded in its own processes, and compared by the command; nothing else knows of it.
    ("unitrain/* -unitrain/verify/* -unitrain/commands/*", ["unitrain.verify"], []),
    ("unitrain/trainer_overrides.py", ["unitrain", "torch"], ["unitrain.bootstrap.environment"]),
    ("unitrain/* -unitrain/tuning/* -unitrain/commands/*", ["unitrain.tune"], []),
    (
        "unitrain/tuning/* -unitrain/tune/timer.py",
        ["torch", "unitrain"],
        ["unitrain.tune", "unitrain.errors", "unitrain.backends.capabilities"],
    ),
    ("unitrain/verify/* -unitrain/verify/recorder.py", ["unitrain.callbacks", "unitrain.data", "unitrain.config"], []),
    ("unitrain/verify/*", ["unitrain.checkpoint", "unitrain.optim", "unitrain.progress", "unitrain.metrics"], []),
    (
        "unitrain/config.py",
        ["unitrain"],
        ["unitrain.backends.base", "unitrain.backends.compression_setting", "unitrain.errors", "unitrain.validation"],
    ),
    # Checks of arguments stand on nothing, so that everything may use them.
    ("unitrain/validation.py", ["torch", "unitrain", "launchers"], ["unitrain.errors"]),
    (
        "unitrain/trainer_arguments.py",
        ["unitrain"],
        [
            "unitrain.backends.base",
            "unitrain.backends.checks",
            "unitrain.config",
            "unitrain.errors",
            "unitrain.validation",
        ],
    ),
    ("unitrain/* -unitrain/lifecycle/* -unitrain/trainer.py -unitrain/commands/*", ["unitrain.checkpoint"], []),
    ("unitrain/data/*", ["unitrain.optim", "unitrain.progress", "unitrain.metrics", "unitrain.modules"], []),
    ("unitrain/step/* unitrain/modules/*", ["unitrain.progress", "unitrain.metrics"], []),
    ("unitrain/metrics/*", ["unitrain.progress", "unitrain.data"], []),
    ("* -unitrain/backends/*", ["torch.distributed", "torch.nn.parallel"], []),
    ("* -unitrain/backends/horovod*.py -unitrain/horovod_wheel/*", ["horovod"], []),
]
ENVIRONMENT_READERS = "unitrain/bootstrap/environment.py launchers/*"
ENVIRONMENT = ["environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"]

Rule = Callable[[str, str], Iterator[str]]


def concerns(files: str, path: str) -> bool:
    """Whether `path` is among `files`, patterns of which those with a "-" take out."""
    patterns = files.split()
    return any(fnmatch(path, one) for one in patterns if one[0] != "-") and not any(
        fnmatch(path, one[1:]) for one in patterns if one[0] == "-"
    )


def imports(path: str, source: str) -> Iterator[str]:
    """Yield the full name of every module and member that `source` imports when it runs, wherever it does so.

    Also those that are reached through a name that is there already, as `torch.distributed` after `import torch`, and
    those that importlib is asked for by a literal name.
    """
    tree = ast.parse(source)
    for_types = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    top = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = path.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and within(name := ast.unparse(node), sorted(top)):
            yield name
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (str(argument.value) for argument in node.args if isinstance(argument, ast.Constant))


def within(name: str, packages: list[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def imports_go_one_way(path: str, source: str) -> Iterator[str]:
    names = sorted(set(imports(path, source)))
    for files, forbidden, allowed in FORBIDDEN:
        if concerns(files, path):
            yield from (
                f"{path} imports {name}" for name in names if within(name, forbidden) and not within(name, allowed)
            )


def the_environment_has_one_reader(path: str, source: str) -> Iterator[str]:
    if concerns(ENVIRONMENT_READERS, path):
        return
    tree = ast.parse(source)
    modules = {"os"} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os" and alias.asname
    }
    names = {f"{module}.{member}" for module in modules for member in ENVIRONMENT}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in names:
            yield f"{path}:{node.lineno} touches {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (f"{path} imports os.{alias.name}" for alias in node.names if alias.name in ENVIRONMENT)


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
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        # A case of the contract suite is its name, which is the sentence that it shows.
        is_case = concerns("unitrain/testing/*", path) and (
            node.name.startswith("test_") or "contract" in map(ast.unparse, node.decorator_list)
        )
        if not is_case and not ast.get_docstring(node):
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
    (imports_go_one_way, "unitrain/data/x.py", "import torch.distributed as dist"),
    (imports_go_one_way, "unitrain/data/x.py", "from torch import distributed"),
    (imports_go_one_way, "unitrain/commands/x.py", "import horovod.torch as hvd"),
    (imports_go_one_way, "unitrain/backends/ddp.py", "import horovod.torch as hvd"),
    (imports_go_one_way, "unitrain/backends/x.py", "from unitrain.trainer import Trainer"),
    (imports_go_one_way, "unitrain/bootstrap/environment.py", "import torch"),
    (imports_go_one_way, "unitrain/monitoring/supervisor_client.py", "from unitrain.checkpoint import preemption"),
    (imports_go_one_way, "unitrain/horovod_wheel/x.py", "from unitrain.backends import base"),
    (imports_go_one_way, "unitrain/trainer.py", "from .backends.ddp import DDPBackend"),
    (imports_go_one_way, "unitrain/trainer.py", "from . import commands"),
    (imports_go_one_way, "unitrain/trainer.py", "import importlib\nimportlib.import_module('unitrain.backends.ddp')"),
    (imports_go_one_way, "unitrain/trainer.py", "from unitrain.backends import registry"),
    (imports_go_one_way, "unitrain/trainer.py", "import launchers"),
    (imports_go_one_way, "unitrain/data/x.py", "import torch\nx = torch.distributed.get_rank()"),
    (imports_go_one_way, "unitrain/data/x.py", "from unitrain.trainer import Trainer"),
    (imports_go_one_way, "unitrain/config.py", "from unitrain.data.order import MicroBatch"),
    (imports_go_one_way, "unitrain/metrics/x.py", "from unitrain.checkpoint import checkpoint"),
    (imports_go_one_way, "unitrain/data/x.py", "from unitrain.optim.step import Update"),
    (imports_go_one_way, "unitrain/lifecycle/x.py", "from unitrain.verify.recorder import Recorder"),
    (imports_go_one_way, "unitrain/trainer.py", "from unitrain.verify import report"),
    (imports_go_one_way, "unitrain/verify/report.py", "from unitrain.callbacks.callback import Callback"),
    (imports_go_one_way, "unitrain/verify/recorder.py", "from unitrain.checkpoint.run_state import Run"),
    (imports_go_one_way, "unitrain/verify/processes.py", "import launchers"),
    (imports_go_one_way, "unitrain/initialize.py", "from unitrain.backends.ddp import DDPBackend"),
    (imports_go_one_way, "unitrain/commands/x.py", "from unitrain.backends.ddp import DDPBackend"),
    (imports_go_one_way, "unitrain/testing/x.py", "from unitrain.backends.ddp import DDPBackend"),
    (imports_go_one_way, "unitrain/testing/x.py", "import torch.distributed"),
    (imports_go_one_way, "unitrain/backends/base.py", "from unitrain.backends import checks"),
    (imports_go_one_way, "unitrain/backends/ddp.py", "from unitrain.backends.horovod.backend import HorovodBackend"),
    (imports_go_one_way, "unitrain/backends/process_group.py", "from unitrain.backends.ddp import DDPBackend"),
    (imports_go_one_way, "unitrain/x.py", "from unitrain.testing import run_ranks"),
    (imports_go_one_way, "unitrain/bench/sweep.py", "from unitrain.testing import run_ranks"),
    (imports_go_one_way, "unitrain/bench/x.py", "from unitrain.backends.ddp import DDPBackend"),
    (imports_go_one_way, "unitrain/bench/cost_model.py", "import torch"),
    (imports_go_one_way, "unitrain/trainer.py", "from unitrain.bench import results"),
    (imports_go_one_way, "unitrain/report/x.py", "from unitrain.bench import sweep"),
    (imports_go_one_way, "unitrain/report/x.py", "import torch"),
    (imports_go_one_way, "unitrain/report/x.py", "from unitrain.checkpoint import checkpoint"),
    (imports_go_one_way, "unitrain/tracking/x.py", "from unitrain.report import figures"),
    (imports_go_one_way, "unitrain/report/page.py", "from matplotlib.figure import Figure"),
    (imports_go_one_way, "unitrain/tracking/loggers/x.py", "from unitrain.config import TrainConfig"),
    (imports_go_one_way, "unitrain/tracking/loggers/x.py", "from torch import Tensor"),
    (imports_go_one_way, "unitrain/tracking/x.py", "import wandb"),
    (imports_go_one_way, "unitrain/trainer.py", "from torch.utils.tensorboard import SummaryWriter"),
    (imports_go_one_way, "examples/x.py", "import torch.distributed as dist"),
    (imports_go_one_way, "examples/x.py", "from unitrain.backends.ddp import DDPBackend"),
    (the_environment_has_one_reader, "unitrain/trainer.py", "import os\nx = os.environ['RANK']"),
    (the_environment_has_one_reader, "unitrain/trainer.py", "import os\nx = os.getenv('RANK')"),
    (the_environment_has_one_reader, "unitrain/trainer.py", "from os import environ"),
    (the_environment_has_one_reader, "unitrain/trainer.py", "import os as o\no.environ['A'] = 'B'"),
    (the_environment_has_one_reader, "examples/x.py", "import os\nos.environ['A'] = 'B'"),
    (files_are_short, "unitrain/x.py", "x = 1\n" * (MOST_LINES + 1)),
    (names_say_something, "unitrain/utils.py", ""),
    (names_say_something, "unitrain/common/x.py", ""),
    (everything_public_is_documented, "unitrain/x.py", "x = 1"),
    (everything_public_is_documented, "unitrain/x.py", '"""A."""\ndef f(): ...'),
    (everything_public_is_documented, "unitrain/x.py", '"""A."""\nclass F: ...'),
    (everything_public_is_documented, "unitrain/x.py", '"""A."""\nasync def f(): ...'),
    (everything_public_is_documented, "unitrain/x.py", '"""A."""\ndef test_f(): ...'),
    (nothing_is_printed, "unitrain/x.py", "print(1)"),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in RULES), ids=lambda rule: rule.__name__)
def test_the_house_keeps(rule: Rule) -> None:
    assert len(PACKAGES) > 50
    assert EXAMPLES
    files = PACKAGES if rule is nothing_is_printed else [*PACKAGES, *EXAMPLES]
    violations = [
        violation
        for path in files
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
        ("unitrain/backends/horovod/work.py", "import horovod.torch as hvd"),
        ("launchers/x.py", "import os\nx = os.environ"),
    ):
        assert not [*imports_go_one_way(path, source), *the_environment_has_one_reader(path, source)], path
