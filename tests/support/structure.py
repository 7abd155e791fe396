"""Measure the structure of the product and compare it with LIMITS. `make check` runs the static measurements as
`python -m tests.support.structure`, and tests/contract/test_structure.py the measurements of running programs.

A limit is the value that the product has reached. Lower it with the value; never raise it: code that is added replaces
other code.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Name: (limit, goal, meaning).
LIMITS: dict[str, tuple[int, int, str]] = {
    "lines": (72_196, 52_000, "lines in unitrain/ and launchers/ without contract cases"),
    "core_lines": (45_487, 33_000, "those lines without MODES and TOOLS"),
    "top_packages": (25, 16, "packages at the top of unitrain/"),
    "top_modules": (25, 8, "modules at the top of unitrain/"),
    "floors": (17, 12, "longest chain of imports between packages and modules at the top"),
    "cycles": (1, 0, "groups of modules that import each other"),
    "imports_up": (4, 0, "imports whose removal leaves no package with a cycle of its modules"),
    "names": (39, 0, "file names that occur more than once"),
    "step_files_ddp": (34, 14, "files of unitrain that a step on ddp enters"),
    "step_files_horovod": (39, 18, "files of unitrain that a step on horovod enters"),
    "trainer_imports": (171, 100, "modules of unitrain that `import unitrain.trainer` loads"),
    "launch_imports": (48, 25, "modules of unitrain that `unitrain launch` loads before it starts the launcher"),
}
# Test cases for authors of backends, which are not part of the product. The rest of unitrain/testing/ is.
CONTRACT_CASES = ("unitrain/testing/*",)
TESTING = ("__init__", "fake_backend", "fork_server", "ranks", "worker")
MODES = (
    "unitrain/backends/pipeline/*", "unitrain/backends/sharding/*", "unitrain/backends/rank_groups.py",
    "unitrain/backends/*logical_ranks*", "unitrain/backends/gradients/interleaved_ranks_model.py",
    "unitrain/backends/gradients/exact_*.py", "unitrain/backends/turns.py", "unitrain/metrics/exact_sums.py",
    "unitrain/data/seeded_batches.py", "unitrain/backends/*local_sgd*", "unitrain/optim/*local_sgd*",
    "unitrain/optim/fragments.py", "unitrain/optim/outer_*.py", "unitrain/optim/parameter_bucket.py",
    "unitrain/backends/slow_network_exchange.py", "unitrain/verify/pipeline_recorder.py", "unitrain/modes/*",
)  # fmt: skip
TOOLS = (
    "launchers/translation/*", "unitrain/bench/*", "unitrain/config_files/*", "unitrain/doctor/*",
    "unitrain/factories.py", "unitrain/horovod_wheel/*", "unitrain/memory/*", "unitrain/migrate/*",
    "unitrain/report/*", "unitrain/tune/*", "unitrain/*_finder.py", "unitrain/trial_steps.py",
    "unitrain/model_summary.py", "unitrain/supervisor/*_job.py", "unitrain/supervisor/following.py",
    "unitrain/supervisor/submission.py", "unitrain/progress/*_evidence.py", "unitrain/progress/slow_causes.py",
    "unitrain/progress/prometheus.py", "unitrain/progress/metrics_server.py", "unitrain/tools/*",
)  # fmt: skip


def measure_source() -> dict[str, int]:
    """Return the values that are measured without running the product."""
    paths = sorted(path for folder in ("unitrain", "launchers") for path in (ROOT / folder).rglob("*.py"))
    paths = [path for path in paths if "unitrain/launchers/" not in str(path)]  # a link to launchers/
    product = [path for path in paths if not matches(path, CONTRACT_CASES) or path.stem in TESTING]
    top = [path for path in (ROOT / "unitrain").iterdir() if not path.name.startswith("__")]
    names = Counter(path.name for path in paths if not path.name.startswith("__"))
    return {
        "lines": count_lines(product),
        "core_lines": count_lines(path for path in product if not matches(path, MODES + TOOLS)),
        "top_packages": sum((path / "__init__.py").exists() for path in top),
        "top_modules": sum(path.suffix == ".py" for path in top),
        "names": sum(number > 1 for number in names.values()),
        **measure_imports(),
    }


def measure_imports() -> dict[str, int]:
    """Return the values of the import graph, which includes imports for type checkers and inside functions."""
    # Not installed with the product: import-linter depends on grimp, and torch on networkx.
    import grimp
    import networkx

    def build_graph() -> grimp.ImportGraph:
        graph = grimp.build_graph("unitrain", cache_dir=str(ROOT / ".import_linter_cache"))
        for name in graph.find_modules_directly_imported_by("unitrain"):
            graph.remove_import(importer="unitrain", imported=name)  # public names, which are imported on first use
        return graph

    def groups(graph: grimp.ImportGraph) -> networkx.DiGraph:
        """Return the graph of the groups of modules that import each other."""
        imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
        return networkx.condensation(networkx.DiGraph(imports))

    graph, tops = build_graph(), build_graph()
    packages = [name for name in sorted(graph.modules) if graph.find_children(name)]
    for name in tops.find_children("unitrain"):
        tops.squash_module(name)
    return {
        "floors": networkx.dag_longest_path_length(groups(tops)) + 1,
        "cycles": sum(len(members) > 1 for _, members in groups(graph).nodes.data("members")),
        "imports_up": sum(len(graph.nominate_cycle_breakers(package)) for package in packages),
    }


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(str(path.relative_to(ROOT)), pattern) for pattern in patterns)


def count_lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def compare(values: dict[str, int]) -> list[str]:
    """Return a message for each value that differs from its limit."""
    return [
        f"{name} is {value}, but its limit in tests/support/structure.py is {LIMITS[name][0]} ({LIMITS[name][2]}). "
        + ("Remove as much as was added." if value > LIMITS[name][0] else "Lower the limit to this value.")
        for name, value in values.items()
        if value > LIMITS[name][0] or (value < LIMITS[name][0] and "lines" not in name)
    ]


def main() -> None:
    start = time.monotonic()
    values = measure_source()
    for name, value in values.items():
        limit, goal, meaning = LIMITS[name]
        print(f"{name:14} {value:6} (limit {limit}, goal {goal}): {meaning}")
    print(f"Measured in {time.monotonic() - start:.1f} s.")
    sys.exit("\n".join(compare(values)) or None)


if __name__ == "__main__":
    main()
