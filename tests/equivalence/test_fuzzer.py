"""Compare a fixed number of random training runs with plain torch. Their seeds are fixed. See `tests/fuzzer/`.

UNITRAIN_FUZZ_CASES sets the number of cases, and UNITRAIN_FUZZ_FIRST sets the first seed.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzer import cases, known, oracle, runner
from groups import nightly

FIRST = int(os.environ.get("UNITRAIN_FUZZ_FIRST", "0"))
COUNT = int(os.environ.get("UNITRAIN_FUZZ_CASES", "120"))
PER_TEST = 5
FIRSTS = range(FIRST, FIRST + COUNT, PER_TEST)
HERE = Path(__file__).parents[1] / "fuzzer"


@pytest.fixture(scope="module")
def ranks() -> Iterator[runner.Pool]:
    with runner.pool() as made:
        yield made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", known.CASES)
def test_known_defects_stay_fixed(ranks: runner.Pool, name: str) -> None:
    assert runner.find_failures(known.CASES[name], ranks) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", nightly(*FIRSTS))  # CI runs these cases with `make fuzz`
def test_random_runs_equal_plain_torch(ranks: runner.Pool, first: int) -> None:
    for seed in range(first, min(first + PER_TEST, FIRST + COUNT)):
        case = cases.draw_case(seed)
        if found := runner.find_failures(case, ranks):
            case, found = runner.shrink(case, found, ranks, seconds=60)
            pytest.fail(
                f"seed {seed}: " + "\n".join(found) + f"\nRepeat it with: python -m tests.fuzzer --seed {seed}\n"
                f"The simplest case: python -m tests.fuzzer --case '{cases.to_json(case)}'"
            )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("wrong", "symptom"),
    [
        ({"optimizer_settings": {"lr": 0.0501}}, "rates"),
        ({"clip": 0.01}, "parameters"),
        ({"features": ["tied"]}, "parameters"),
        ({"global_batch": 12}, "samples"),
        ({"epochs": 3}, "end"),
        ({"metrics": ["each"]}, "val_each"),
    ],
)
def test_fuzzer_detects_a_difference(
    ranks: runner.Pool, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, object], symptom: str
) -> None:
    """The oracle and the ranks compute different cases, so their results must differ."""
    case = cases.make_valid({**cases.SIMPLEST, "epochs": 2, "validation": "tensors", "samples": 13})
    assert runner.find_failures(case, ranks) == []
    run_segments = runner._run_segments
    monkeypatch.setattr(runner, "_run_segments", lambda _, pool: run_segments(case, pool))
    found = runner.find_failures({**case, **wrong}, ranks)
    assert any(symptom in text for text in found), found


def test_cases_depend_only_on_the_seed_and_can_be_parsed_from_their_text() -> None:
    drawn = [cases.draw_case(seed) for seed in range(300)]
    assert drawn == [cases.draw_case(seed) for seed in range(300)]
    assert {case["kind"] for case in drawn} == {"trainer", "loop", "collective"}
    for case in drawn:
        assert cases.parse_case(cases.to_json(case)) == case


def test_every_field_is_drawn_with_every_value() -> None:
    """`make_valid` must not exclude any value of a field."""
    drawn = [case for case in map(cases.draw_case, range(3000)) if case["kind"] == "trainer"]
    for name, simplest in cases.SIMPLEST.items():
        values = {repr(case[name]) for case in drawn}
        assert name == "kind" or (len(values) > 1 and repr(simplest) in values), name
    assert {name for case in drawn for name in case["features"]} >= set(cases.FEATURES)
    assert {case["scheduler"] for case in drawn} >= set(cases.SCHEDULERS)
    assert {case["optimizer"] for case in drawn} == set(cases.OPTIMIZERS)
    ends = {segment["end"][0] for case in drawn for segment in case["segments"] if segment["end"]}
    assert ends == {"steps", "stop", "raise", "raise after epoch"}


def test_shrinking_ends_at_the_simplest_case_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that depends on two fields is shrunk to a case with only these two fields set."""

    def fails(case: cases.Case, _: runner.Pool) -> list[str]:
        return ["parameters differ"] if case["clip"] and "tied" in case["features"] else []

    monkeypatch.setattr(runner, "find_failures", fails)
    case = next(case for case in map(cases.draw_case, range(1000)) if case["kind"] == "trainer" and fails(case, None))
    small, _ = runner.shrink(case, ["parameters differ"], runner.Pool())
    assert cases.parse_case(cases.to_json(small)) == small
    assert {name for name in small if small[name] != cases.SIMPLEST[name]} <= {"seed", "clip", "features"}
    assert small["features"] == ["tied"]


def test_the_oracle_imports_nothing_from_unitrain() -> None:
    for path in (HERE / "oracle.py", HERE / "parts.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "unitrain" for name in names), path
    assert oracle.Oracle.__module__.endswith("fuzzer.oracle")
