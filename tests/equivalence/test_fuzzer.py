"""Compare a fixed number of random training runs with plain torch. Their seeds are fixed. See `tests/fuzzer/`.

UNITRAIN_FUZZ_CASES and UNITRAIN_FUZZ_SEQUENCES set the numbers of runs and of sequences of calls, and
UNITRAIN_FUZZ_FIRST sets the first seed.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzer import cases, known, oracle, runner, sequences
from groups import nightly

FIRST = int(os.environ.get("UNITRAIN_FUZZ_FIRST", "0"))
COUNT = int(os.environ.get("UNITRAIN_FUZZ_CASES", "120"))
SEQUENCES = int(os.environ.get("UNITRAIN_FUZZ_SEQUENCES", "30"))
PER_TEST = 5
FIRSTS = range(FIRST, FIRST + COUNT, PER_TEST)
FIRST_SEQUENCES = range(FIRST, FIRST + SEQUENCES, PER_TEST)
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
        check(cases.draw_case(seed), ranks, f"--seed {seed}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", nightly(*FIRST_SEQUENCES))  # CI runs these sequences with `make fuzz`
def test_random_sequences_equal_plain_torch(ranks: runner.Pool, first: int) -> None:
    for seed in range(first, min(first + PER_TEST, FIRST + SEQUENCES)):
        check(sequences.draw_sequence(seed), ranks, f"--sequence {seed}")


def check(case: cases.Case, ranks: runner.Pool, option: str) -> None:
    """Run a case, and fail with the simplest case that fails in the same way."""
    if found := runner.find_failures(case, ranks):
        case, found = runner.shrink(case, found, ranks, seconds=60)
        pytest.fail(
            "\n".join([*found, runner.describe(case)])
            + f"\nRepeat it with: python -m tests.fuzzer {option}\n"
            + f"The simplest case: python -m tests.fuzzer --case '{cases.to_json(case)}'"
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


PROGRAM: cases.Case = {
    "kind": "sequence",
    "seed": 0,
    "objects": {
        "t0": {"kind": "trainer", "validation": "tensors", "keep_best": "val_loss", "epochs": 3, "scheduler": "StepLR"},
        "l0": {"kind": "loop", "models": [["sync_norm"], []], "optimizers": ["Adam", "ScheduleFree"]},
    },
    "sections": [
        {"backend": "local", "size": 1, "settings": {}, "calls": [["t0", "fit", ["stop", 3]], ["l0", "run", 3]]},
        {"backend": "ddp", "size": 2, "settings": {}, "calls": [["t0", "fit", None], ["t0", "best", None]]},
    ],
}


class OtherProgram:
    """Ranks that run another program than the oracle."""

    def __init__(self, ranks: runner.Pool, case: cases.Case) -> None:
        self.ranks, self.case, self.refusals = ranks, case, ranks.refusals
        self.replace = ranks.replace

    def run(self, layout: tuple[str, int], function: Any, case: cases.Case, *arguments: Any) -> list[Any]:
        return self.ranks.run(layout, function, self.case, *arguments)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "wrong", "symptom"),
    [
        ("t0", {"optimizer_settings": {"lr": 0.0501}}, "rates"),
        ("t0", {"clip": 0.01}, "results"),
        ("t0", {"scheduler": None}, "rates"),
        ("t0", {"samples": 13}, "samples"),
        ("t0", {"epochs": 4}, "end"),
        ("t0", {"keep_best": "train_loss"}, "best"),
        ("t0", {"output": False, "keep_best": None}, "resume"),
        ("t0", {"loss": "cross_entropy"}, "results"),
        ("t0", {"sampler": "own", "loader": True}, "samples"),
        ("l0", {"optimizers": ["SGD", "ScheduleFree"]}, "parameters"),
        ("l0", {"loaders": [13]}, "parameters"),
        ("l0", {"models": [[], []]}, "parameters"),
        ("l0", {"compose": "chain"}, "parameters"),
    ],
)
def test_fuzzer_detects_a_difference_in_a_sequence(
    ranks: runner.Pool, name: str, wrong: dict[str, Any], symptom: str
) -> None:
    objects = {**PROGRAM["objects"], name: {**PROGRAM["objects"][name], **wrong}}
    other = sequences.parse({**PROGRAM, "objects": objects})
    assert runner.find_failures(other, ranks) == []
    found = runner.find_failures(sequences.parse(PROGRAM), OtherProgram(ranks, other))  # type: ignore[arg-type]
    assert any(symptom in text for text in found), found


def test_sequences_depend_only_on_the_seed_and_contain_every_call() -> None:
    drawn = [sequences.draw_sequence(seed) for seed in range(1500)]
    assert drawn[:200] == [sequences.draw_sequence(seed) for seed in range(200)]
    for case in drawn:
        assert cases.parse_case(cases.to_json(case)) == case
    calls = [
        (case["objects"][call[0]], *call[1:]) for case in drawn for part in case["sections"] for call in part["calls"]
    ]
    for kind, verbs in sequences.VERBS.items():
        assert {verb for own, verb, _ in calls if own["kind"] == kind} == set(verbs)
    ends = {argument[0] for _, verb, argument in calls if verb == "fit" and argument}
    assert ends == {"stop", *sequences.RAISES}
    for kind, simplest in (("trainer", sequences.SIMPLEST_TRAINER), ("loop", sequences.SIMPLEST_LOOP)):
        found = [own for case in drawn for own in case["objects"].values() if own["kind"] == kind]
        for name in ("shard", "data_change", "sampler", "keep_best", "swap", "compose", "optimizers", "optimizer"):
            assert name not in simplest or len({repr(own[name]) for own in found}) > 1, name


def test_a_sequence_is_shrunk_to_the_calls_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: cases.Case, _: runner.Pool) -> list[str]:
        calls = [call for section in case["sections"] for call in section["calls"]]
        return ["best differs"] if any(call[1] == "best" for call in calls) else []

    monkeypatch.setattr(runner, "find_failures", fails)
    case = next(case for case in map(sequences.draw_sequence, range(100)) if fails(case, None))
    small, _ = runner.shrink(case, ["best differs"], runner.Pool())
    assert [len(section["calls"]) for section in small["sections"]] == [1]
    assert "t0.best()" in runner.describe(small) or "t1.best()" in runner.describe(small)
    assert cases.parse_case(cases.to_json(small)) == small


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
    for name in ("oracle", "parts", "sequences", "sequence_oracle", "sequence_loops", "user_objects"):
        path = HERE / f"{name}.py"
        for node in ast.walk(ast.parse(path.read_text())):
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "unitrain" for name in names), path
    assert oracle.Oracle.__module__.endswith("fuzzer.oracle")
