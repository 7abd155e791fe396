"""Rules about the source code that neither ruff nor import-linter can check."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

import unitrain

ROOT = Path(__file__).parents[2]
PACKAGES = sorted([*ROOT.glob("unitrain/**/*.py"), *ROOT.glob("launchers/**/*.py")])
EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))
VAGUE_NAMES = {"base_utils", "common", "core", "helper", "helpers", "lib", "misc", "tools", "util", "utils"}
ENVIRONMENT_READERS = ("unitrain/bootstrap/environment.py", "launchers/*", "unitrain/launchers/*")
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv")
# Functions of torch that create tensors on the default device.
FACTORIES = {
    f"torch.{name}"
    for name in (
        "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones",
        "rand", "randint", "randn", "randperm", "scalar_tensor", "sparse_coo_tensor", "sparse_csr_tensor", "tensor",
        "tril_indices", "triu_indices", "zeros",
    )
}  # fmt: skip
NAMED_TUPLE = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
# Private names of torch and other packages that a file may use. torch_compat.py and fsdp_compat.py may use all private
# names of torch.
PRIVATE_NAMES = {
    "unitrain/backends/ddp.py": {"_dynamo"},  # imports the module early
    "unitrain/backends/horovod/horovodrun.py": {"_slot_info_to_command_fn"},
    "unitrain/backends/horovod/process_sets.py": {"_basics"},  # provides Horovod's C functions
    # torch documents these names in "Understanding CUDA Memory Usage".
    "unitrain/callbacks/memory_snapshot.py": {"_dump_snapshot", "_record_memory_history"},
    "unitrain/horovod_wheel/machine.py": {"_C", "_cuda_getArchFlags"},  # does not import other packages of unitrain
    "unitrain/metrics/torchmetrics.py": {"_computed", "_defaults", "_reductions", "_to_sync", "_update_count"},
    "unitrain/testing/parameters.py": {"_optimizer_step_pre_hooks", "_post_accumulate_grad_hooks", "_rendezvous"},
    "unitrain/testing/ranks.py": {"_listener", "_socket"},
    "unitrain/testing/worker.py": {"_run_exitfuncs"},
}

# State that belongs to the process, to a thread or to the key of a weak dictionary, by file and name. All other state
# belongs to an object.
PROCESS = "there is one per process"
WEAK = "the values belong to the keys, which are objects of the user"
SHARED = "parameters may belong to several models"
ORDER = "all ranks create these objects in the same order"
CONTEXT = "the value belongs to the thread"
STATE_OUTSIDE_OBJECTS = {
    "unitrain/backends/checks.py": {"_distributed_models": SHARED},
    "unitrain/backends/gradients/ddp_wrapper.py": {"_instances": SHARED},
    "unitrain/backends/gradients/end_of_backward.py": {"end_of_backward": "autograd has one queue of callbacks"},
    "unitrain/backends/gradients/power_sgd.py": {"_scaled_backwards": "the keys are the backward passes of autograd"},
    "unitrain/backends/gradients/local_gradients.py": {
        "_instances": SHARED,
        "_step_check_handles": WEAK,
        "_other_optimizers": WEAK,
    },
    "unitrain/backends/horovod/process_sets.py": {"_num_uses": "Horovod's process sets"},
    "unitrain/backends/horovod/runtime.py": dict.fromkeys(
        ("_servers", "_exported_settings", "_group_numbers", "_own_address", "_start_id"), "Horovod runs in the process"
    ),
    "unitrain/backends/local.py": {"_running_backends": PROCESS},
    "unitrain/backends/pipeline/pipeline.py": {"_pipeline_numbers": ORDER},
    "unitrain/backends/sharding/distributed_model.py": {"_instances": SHARED},
    "unitrain/backends/sharding/forward_passes.py": {"_participants": WEAK},
    "unitrain/backends/sharding/optimizer_shards.py": {"_optimizers": WEAK},
    "unitrain/backends/sharding/optimizer_state.py": {"_sharded_states": WEAK},
    "unitrain/backends/sharding/state_format.py": {"_root": CONTEXT, "_keeps_shards": CONTEXT},
    "unitrain/backends/slow_network_exchange.py": {"_unfinished": "outlives the group of an interrupted exchange"},
    "unitrain/bench/collectives.py": {"_phase_numbers": ORDER, "_measured_cases": WEAK},
    "unitrain/bench/training.py": {"_prepared": "the benchmark runs in its own processes"},
    "unitrain/bootstrap/rendezvous.py": {"_rendezvous_numbers": ORDER, "_served_stores": PROCESS},
    "unitrain/checkpoint/folder_lock.py": {"_held_locks": PROCESS, "_held_locks_mutex": PROCESS},
    "unitrain/checkpoint/writer.py": {"_writers": "several Trainers may write to one folder"},
    "unitrain/data/stream_state.py": {"_iterations": "the values belong to the keys, the ids of the user's objects"},
    "unitrain/data/workers.py": {"_generators": PROCESS},
    "unitrain/memory/recorder.py": {"_active": "the measurement runs in its own process"},
    "unitrain/monitoring/flight_record_file.py": {"_late_writers": PROCESS},
    "unitrain/monitoring/peer_connection.py": {"_open_connections": "closed in forked processes"},
    "unitrain/monitoring/supervisor_client.py": {"_client": PROCESS},
    "unitrain/optim/outer_groups.py": {"_phase_numbers": ORDER},
    "unitrain/output.py": {"stderr": PROCESS, "stdout": PROCESS},
    "unitrain/processes.py": {
        "preemption_signals": PROCESS,
        "_last_fork": PROCESS,
        "_terminates_with_parent_pid": PROCESS,
    },
    "unitrain/progress/prometheus.py": {"_endpoints": PROCESS, "_endpoints_to_close_in_forks": PROCESS},
    "unitrain/progress/run_metrics.py": {"_is_first_in_process": PROCESS},
    "unitrain/threads.py": {"_reported": PROCESS},
}

Rule = Callable[[str, str], Iterator[str]]


def only_one_module_reads_the_environment(path: str, source: str) -> Iterator[str]:
    """Report uses of os.environ, also through an alias of the `os` module, which ruff's banned-api does not detect."""
    if any(fnmatch(path, pattern) for pattern in ENVIRONMENT_READERS):
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
            yield f"{path}:{node.lineno} uses {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (f"{path} imports os.{alias.name}" for alias in node.names if alias.name in ENVIRONMENT)


def only_torch_compat_uses_private_names_of_torch(path: str, source: str) -> Iterator[str]:
    """Report private names that are not in PRIVATE_NAMES. Names that the file itself defines are allowed."""
    if path in ("unitrain/torch_compat.py", "unitrain/backends/sharding/fsdp_compat.py"):
        return
    tree = ast.parse(source)
    allowed = NAMED_TUPLE | PRIVATE_NAMES.get(path, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            allowed.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            allowed.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            allowed.add(node.attr)
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls", "os", "sys"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module != "__future__":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            names = [node.args[1].value] if isinstance(node.args[1], ast.Constant) else []
        for name in names:
            if name.startswith("_") and not name.endswith("__") and name not in allowed:
                yield f"{path}:{node.lineno} uses the private name {name}; move it to unitrain/torch_compat.py"


def module_names_state_a_subject(path: str, source: str) -> Iterator[str]:
    yield from (f"{path} is named {part}" for part in Path(path).with_suffix("").parts if part in VAGUE_NAMES)


def public_names_are_documented(path: str, source: str) -> Iterator[str]:
    tree = ast.parse(source)
    if source.strip() and not ast.get_docstring(tree):
        yield f"{path} has no docstring"
    for node in tree.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        # Contract cases do not need a docstring, because their names state the rules.
        is_case = path.startswith("unitrain/testing/") and (
            node.name.startswith("test_") or "contract" in map(ast.unparse, node.decorator_list)
        )
        if not is_case and not ast.get_docstring(node):
            yield f"{path}: {node.name} has no docstring"


def packages_do_not_print(path: str, source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
            yield f"{path}:{node.lineno} calls print"


def tensors_do_not_depend_on_the_default_device(path: str, source: str) -> Iterator[str]:
    """Report new tensors without `device`. A program's torch.set_default_device would change their device."""
    if not path.startswith("unitrain/") or path.startswith("unitrain/testing/") or path == "unitrain/bench/models.py":
        return
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in FACTORIES
            and not any(keyword.arg in ("device", None) for keyword in node.keywords)
        ):
            yield f"{path}:{node.lineno} calls {ast.unparse(node.func)} without device="


def only_one_module_starts_threads(path: str, source: str) -> Iterator[str]:
    """Report threads whose unexpected exceptions nobody reports. The threads of Turns and horovodrun pass their
    exceptions on."""
    allowed = ("threads.py", "processes.py", "backends/turns.py", "backends/horovod/horovodrun.py")
    if not path.startswith("unitrain/") or path.removeprefix("unitrain/") in allowed:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread"):
            yield f"{path}:{node.lineno} starts a thread; use unitrain.threads.start_thread"


def only_one_module_creates_consoles_and_loggers(path: str, source: str) -> Iterator[str]:
    """Report consoles of rich, which interpret markup in names, and loggers whose handlers may end a training run."""
    allowed = ("output.py", "errors.py", "testing/*")
    if not path.startswith("unitrain/") or any(fnmatch(path.removeprefix("unitrain/"), one) for one in allowed):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Console", "rich.console.Console"):
            yield f"{path}:{node.lineno} creates a console; use unitrain.output.plain_console"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("logging.getLogger", "getLogger"):
            yield f"{path}:{node.lineno} creates a logger; use unitrain.output.get_logger"


def state_belongs_to_objects(path: str, source: str) -> Iterator[str]:
    """Report variables of modules and classes that are not constants."""
    if not path.startswith("unitrain/") or path.startswith("unitrain/testing/"):
        return
    allowed = STATE_OUTSIDE_OBJECTS.get(path, {})
    for line, name in _find_state_outside_objects(source):
        if name not in allowed:
            yield f"{path}:{line} stores state in {name}, which no object owns"


def _find_state_outside_objects(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of `global` statements, of assignments to attributes of classes, and of variables of modules
    and classes with a mutable value. Names in upper case are constants."""
    tree = ast.parse(source)
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield from ((node.lineno, name) for name in node.names)
        for target in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]:
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) in {*classes, "cls"}:
                yield target.lineno, target.attr
        for statement in node.body if isinstance(node, ast.Module | ast.ClassDef) else []:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if _is_mutable(getattr(statement, "value", None)):
                yield from ((statement.lineno, name) for name in names if not name.isupper() and name != "__all__")


def _is_mutable(value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        name = ast.unparse(value.func).rpartition(".")[2]
        immutable = ("TypeVar", "Path", "Struct", "Lock", "RLock", "NewType", "ParamSpec")
        factories = ("count", "dict", "list", "set", "deque", "defaultdict", "local")
        return name in factories or (name[:1].isupper() and name not in immutable)
    return isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)


VIOLATIONS: list[tuple[Rule, str, str]] = [
    (state_belongs_to_objects, "unitrain/x.py", "_current = {}"),
    (state_belongs_to_objects, "unitrain/x.py", "numbers: Iterator[int] = itertools.count()"),
    (state_belongs_to_objects, "unitrain/x.py", "_depth = ContextVar('depth', default=0)"),
    (state_belongs_to_objects, "unitrain/x.py", "_depth = 0\ndef enter():\n    global _depth\n    _depth += 1"),
    (state_belongs_to_objects, "unitrain/x.py", "class A:\n    is_dummy = False\ndef f():\n    A.is_dummy = True"),
    (state_belongs_to_objects, "unitrain/x.py", "class A:\n    instances: ClassVar[WeakSet[A]] = WeakSet()"),
    (only_one_module_reads_the_environment, "unitrain/trainer.py", "import os\nx = os.environ['RANK']"),
    (only_one_module_reads_the_environment, "unitrain/trainer.py", "import os\nx = os.getenv('RANK')"),
    (only_one_module_reads_the_environment, "unitrain/trainer.py", "from os import environ"),
    (only_one_module_reads_the_environment, "unitrain/trainer.py", "import os as o\no.environ['A'] = 'B'"),
    (only_one_module_reads_the_environment, "examples/x.py", "import os\nos.environ['A'] = 'B'"),
    (only_torch_compat_uses_private_names_of_torch, "unitrain/x.py", "import torch\ntorch._foreach_norm([])"),
    (only_torch_compat_uses_private_names_of_torch, "unitrain/x.py", "import torch._dynamo"),
    (only_torch_compat_uses_private_names_of_torch, "unitrain/x.py", "from torch.utils import _pytree"),
    (only_torch_compat_uses_private_names_of_torch, "unitrain/x.py", "from torch.utils._pytree import tree_map"),
    (only_torch_compat_uses_private_names_of_torch, "unitrain/x.py", "getattr(tensor, '_local_tensor', tensor)"),
    (only_torch_compat_uses_private_names_of_torch, "examples/x.py", "module._parameters"),
    (module_names_state_a_subject, "unitrain/utils.py", ""),
    (module_names_state_a_subject, "unitrain/common/x.py", ""),
    (public_names_are_documented, "unitrain/x.py", "x = 1"),
    (public_names_are_documented, "unitrain/x.py", '"""A."""\ndef f(): ...'),
    (public_names_are_documented, "unitrain/x.py", '"""A."""\nclass F: ...'),
    (public_names_are_documented, "unitrain/x.py", '"""A."""\nasync def f(): ...'),
    (public_names_are_documented, "unitrain/x.py", '"""A."""\ndef test_f(): ...'),
    (packages_do_not_print, "unitrain/x.py", "print(1)"),
    (only_one_module_starts_threads, "unitrain/x.py", "import threading\nthreading.Thread(target=f).start()"),
    (only_one_module_creates_consoles_and_loggers, "unitrain/x.py", "Console(stderr=True)"),
    (only_one_module_creates_consoles_and_loggers, "unitrain/x.py", "import logging\nlogging.getLogger(__name__)"),
    (tensors_do_not_depend_on_the_default_device, "unitrain/x.py", "torch.zeros(\n3)"),
    (tensors_do_not_depend_on_the_default_device, "unitrain/x.py", "torch.as_tensor(values, dtype=torch.int64)"),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in VIOLATIONS), ids=lambda rule: rule.__name__)
def test_source_satisfies_the_rules(rule: Rule) -> None:
    assert len(PACKAGES) > 50
    assert EXAMPLES
    files = PACKAGES if rule is packages_do_not_print else [*PACKAGES, *EXAMPLES]
    violations = [
        violation
        for path in files
        for violation in rule(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
    ]
    assert not violations, "\n".join(violations)


@pytest.mark.parametrize(
    ("rule", "path", "source"), VIOLATIONS, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_each_rule_reports_a_violation(rule: Rule, path: str, source: str) -> None:
    assert list(rule(path, source))


def test_all_exceptions_for_state_outside_objects_are_used() -> None:
    found = {
        path: {name for _, name in _find_state_outside_objects((ROOT / path).read_text(encoding="utf-8"))}
        for path in STATE_OUTSIDE_OBJECTS
    }
    unused = {path: names.keys() - found[path] for path, names in STATE_OUTSIDE_OBJECTS.items()}
    assert not any(unused.values()), unused


def test_launchers_may_read_the_environment() -> None:
    assert not list(only_one_module_reads_the_environment("launchers/x.py", "import os\nx = os.environ"))


def test_private_names_that_a_file_defines_are_allowed() -> None:
    source = "class A:\n    def _f(self): ...\n    def g(self, other): self._x = other._x + other._f() + self._y"
    assert not list(only_torch_compat_uses_private_names_of_torch("unitrain/x.py", source))


def test_every_public_name_is_imported_for_type_checkers() -> None:
    tree = ast.parse((ROOT / "unitrain/__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imported = {
        alias.asname or alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == set(unitrain.__all__) - {"__version__"}
