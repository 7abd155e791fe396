"""Check that the fuzzer (tests/fuzzer) finds known defects again: revert one fix at a time in a copy of the repository.

    python benchmarks/fuzzer_reverts.py                 every defect; prints the rows of results/fuzzer_reverts.md
    python benchmarks/fuzzer_reverts.py 9a 9b           some of them

The patches in fuzzer_reverts/ restore the defects. They apply to the last commit that changed that folder, so the
script takes the repository from that commit: later changes of the code do not break it. The checkout is not changed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATCHES = HERE / "fuzzer_reverts"
Case = dict[str, Any]
# A busy machine is slow, and a case that fails once more is no accident.
CASE_SECONDS = 60.0


@dataclass(frozen=True)
class Defect:
    """A defect, the commits that fixed it, the known cases that find it, and which random cases can.

    `can_find` must be true for each case that may fail; the others are not run, to save time.
    """

    text: str
    fixes: str
    known: tuple[str, ...]
    can_find: Callable[[Case], Any]


def _trainer(condition: Callable[[Case], Any]) -> Callable[[Case], Any]:
    return lambda case: case["kind"] == "trainer" and condition(case)


def _collective(condition: Callable[[Case, list[Any]], Any]) -> Callable[[Case], Any]:
    return lambda case: case["kind"] == "collective" and any(condition(case, call) for call in case["calls"])


def _group(dtypes: str, *names: str) -> Callable[[Case], Any]:
    """Return whether a case has a collective of Horovod's process group of one of the dtypes and names."""
    return _collective(
        lambda case, call: (
            case["backend"] == "horovod"
            and call[0] == "group"
            and (not dtypes or call[3] in dtypes.split())
            and (not names or call[1] in names)
        )
    )


def _resumes(case: Case) -> bool:
    return len(case["segments"]) > 1


LOOPS = (
    "a step after no_sync", "forward in no_sync, backward outside", "the unwrapped model",
    "a step after no_sync on horovod",
)  # fmt: skip
DEFECTS = {
    "1": Defect("an optimizer steps on gradients of one rank", "a3401a8", LOOPS, lambda case: case["kind"] == "loop"),
    "1-hidden": Defect(
        "gradients stay local after a second backward from an output that hides its tensors",
        "a3401a8",
        ("a hidden output and a retained graph",),
        lambda case: case["kind"] == "loop" and case["output"] == "object",
    ),
    "2": Defect(
        "saving and validating changes buffers that a training forward reads",
        "c190abd",
        ("a buffer that forward reads, with step checkpoints", "a buffer that forward reads, with validation"),
        _trainer(lambda case: "buffer" in case["features"] and case["segments"][-1]["size"] > 1),
    ),
    "3": Defect(
        "the training loss of an epoch that was interrupted is that of the rest of the epoch",
        "b3809c7",
        (
            "the loss of an epoch that was interrupted",
            "ReduceLROnPlateau after an interruption inside an epoch",
            "a checkpoint at the last step of an epoch that did not end",
        ),
        _trainer(_resumes),
    ),
    "4": Defect(
        "min and max lose NaN, depending on the rank and the size of the tensor",
        "733e118, 19bc5a3",
        ("nan of rank 0 in max", "nan of rank 1 in max", "nan of rank 2 in min", "nan in max on horovod"),
        _collective(lambda case, call: case["size"] > 1 and call[2] in ("min", "max") and call[5] == "nan"),
    ),
    "5-coalesced": Defect(
        "Horovod: a coalesced reduction that ends with an empty tensor is complete at once",
        "19bc5a3",
        ("a coalesced reduction that ends with an empty tensor",),
        _group("", "coalesced"),
    ),
    "5-complex": Defect(
        "Horovod: reduce and reduce_scatter drop the imaginary part",
        "19bc5a3",
        ("complex numbers in reduce", "complex numbers in reduce_scatter"),
        _group("complex64 complex128"),
    ),
    "5-float8": Defect(
        "Horovod: float8 loses fractions", "19bc5a3", ("fractions of float8 in sum",), _group("float8_e4m3fn")
    ),
    "5-uint32": Defect(
        "Horovod: the maximum of uint32 is wrong from 2^31 on", "19bc5a3", ("large uint32 in max",), _group("uint32")
    ),
    "5-uint64": Defect(
        "Horovod: sums of uint64 wrap at 32 bits", "19bc5a3", ("large uint64 in sum",), _group("uint64")
    ),
    "6": Defect(
        "an allgather has no gradient",
        "14c911b",
        ("the gradient of an allgather",),
        _collective(lambda case, call: call[1] == "differentiable_allgather"),
    ),
    "9a": Defect(
        "an asynchronous checkpoint changes Counter, so MultiStepLR is wrong after a resume",
        "f4228e4",
        (
            "MultiStepLR after a resume",
            "a callback that keeps a Counter",
            "a callback that keeps a defaultdict",
        ),
        _trainer(
            lambda case: (
                case["output"]
                and (case["counting"] or case["scheduler"] in ("MultiStepLR", "SequentialLR", "ChainedScheduler"))
            )
        ),
    ),
    "9b": Defect(
        "fit does not return while workers that it has started live",
        "41a5954",
        ("persistent workers and an output folder", "an exception with workers of a stream"),
        _trainer(lambda case: case["workers"] and case["output"]),
    ),
    "9c": Defect(
        "a sampler over fewer samples than the dataset has is taken for the default, and all samples are used",
        "9447dcb",
        ("a SequentialSampler over a part", "a RandomSampler over a part", "validation with a sampler over a part"),
        _trainer(lambda case: case["sampler"] in ("sequential_part", "random_part") or case["validation"] == "part"),
    ),
    "9d": Defect(
        "a stream that reuses its memory: ranks train on other batches than it yields",
        "b1cd415",
        ("a stream of batches that reuses its memory",),
        _trainer(lambda case: case["reuse"]),
    ),
    "9e": Defect(
        "the random numbers of collate_fn are drawn once more after a resume within an epoch",
        "2a6b5b3",
        (
            "a stream with a random collate function, interrupted",
            "a stream with a random collate function, stopped",
        ),
        _trainer(lambda case: case["collate"] == "noise" and _resumes(case)),
    ),
    "9e-validation": Defect(
        "random numbers that a validation draws change what training draws after it",
        "83b0266",
        ("a validation that draws random numbers, in an interrupted epoch",),
        _trainer(lambda case: case["collate"] == "noise" and case["validation"] in ("map", "part")),
    ),
    "9f": Defect(
        "EarlyStopping counts an interruption as an epoch",
        "8b90c0b",
        ("early stopping after interruptions",),
        _trainer(lambda case: case["early_stopping"] and _resumes(case)),
    ),
    "9g-clip": Defect(
        "parameters that join the optimizer during the run are not clipped",
        "4a29e52",
        ("a parameter group added in the run, with clipping",),
        _trainer(lambda case: case["clip"] and case["change"] and case["change"][0] == "add"),
    ),
    "9g-tokens": Defect(
        "parameters that join the optimizer during the run are not divided by the number of tokens",
        "4a29e52",
        ("a parameter group added in the run, with tokens",),
        _trainer(lambda case: case["loss"] == "tokens" and case["change"] and case["change"][0] == "add"),
    ),
    "9h": Defect(
        "complex gradients lose the imaginary part in fp16 and bf16 compression on one rank",
        "3dd5cf3",
        ("complex parameters with compression",),
        _trainer(lambda case: "complex" in case["features"] and case["compression"] != "none"),
    ),
    "9i": Defect(
        "a gradient inside forward compresses what accumulation has added up so far",
        "f129a85",
        (
            "a gradient inside forward with compression and accumulation",
            "a gradient inside forward with PowerSGD and accumulation",
        ),
        _trainer(lambda case: "penalty" in case["features"] and case["compression"] != "none"),
    ),
    "9j": Defect(
        "the ranks' weights of an embedding with max_norm differ",
        "7cb8507",
        ("an embedding with max_norm",),
        _trainer(lambda case: "max_norm" in case["features"]),
    ),
    "9k": Defect(
        "an evaluation of streams that are the ranks' own applies drop_last",
        "a20ab92",
        ("evaluation of own streams with drop_last",),
        _trainer(lambda case: case["validation"] == "own" and case["validation_drop_last"]),
    ),
    "9l-gradient": Defect(
        "a dummy batch gives parameters that only it reaches a gradient of zeros",
        "0bb59a9",
        ("a branch that only a dummy batch reaches",),
        _trainer(lambda case: "branch" in case["features"]),
    ),
    "9l-norm": Defect(
        "a dummy batch of rank 0 is in the running statistics of BatchNorm",
        "0bb59a9",
        ("a dummy batch of rank 0 and BatchNorm",),
        _trainer(lambda case: {"norm", "buffer"} & set(case["features"])),
    ),
    "9m": Defect(
        "a batch from which collate_fn left samples out weighs as much as its items",
        "83a8c4a",
        ("a collate function that leaves samples out", "a collate function that leaves samples out of an evaluation"),
        _trainer(lambda case: "skip" in (case["collate"], case["validation"])),
    ),
    "9n": Defect(
        "a metric that returns the same tensor each time is averaged wrongly",
        "6783a92",
        ("a metric that returns the same tensor",),
        _trainer(lambda case: "in_place" in case["metrics"]),
    ),
    "9o-subset": Defect(
        "a Subset of tensors with a negative index raises IndexError",
        "a9ccfba",
        ("a Subset with a negative index",),
        _trainer(lambda case: case["negative"]),
    ),
    "9o-nrmse": Defect(
        "NormalizedRootMeanSquaredError is wrong, or fails, on three ranks",
        "15fa669",
        ("NormalizedRootMeanSquaredError on three ranks",),
        _trainer(lambda case: "NormalizedRootMeanSquaredError" in case["metrics"]),
    ),
    # What the fuzzer itself has found.
    "again": Defect(
        "fit after an exception counts the loss of the micro-steps before it twice",
        "b3809c7",
        ("fit once more after an exception in a micro-step",),
        _trainer(lambda case: case["again"]),
    ),
    "again-step": Defect(
        "fit after an exception between the gradients and the step counts the loss of the step twice",
        "6d663da",
        ("fit once more after an exception before a step",),
        _trainer(lambda case: case["again"]),
    ),
    "unfreeze": Defect(
        "after a part is unfrozen, what only micro-steps in no_sync used is not reduced",
        "40dc3ff",
        ("a part that is unfrozen while another is used in some micro-steps only",),
        _trainer(lambda case: case["change"] and case["change"][0] == "unfreeze"),
    ),
    "scheduler": Defect(
        "a resume on several ranks fails, because load_state_dict of CyclicLR changes the state",
        "d5d1298",
        ("CyclicLR after a resume on two ranks",),
        _trainer(lambda case: case["scheduler"] == "CyclicLR" and _resumes(case)),
    ),
    "complex128": Defect(
        "checkpoints with complex128 tensors cannot be written",
        "6452167",
        ("complex128 parameters in a checkpoint",),
        _trainer(lambda case: "complex" in case["features"] and case["output"]),
    ),
    "powersgd": Defect(
        "PowerSGD begins differently on other numbers of ranks where a parameter is unused at first",
        "feffec3",
        (),
        _trainer(lambda case: case["compression"] == "powersgd" and "branch" in case["features"]),
    ),
    "powersgd-complex": Defect(
        "PowerSGD sends half of the complex gradients only",
        "41513ed",
        (),
        _trainer(lambda case: "complex" in case["features"] and case["compression"].startswith("powersgd")),
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("defects", nargs="*", metavar="NAME", help=f"one of {', '.join(DEFECTS)}")
    parser.add_argument("--seconds", type=float, default=180.0, help="time for random cases of each defect")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--most", type=int, default=3000, help="the seed after the last")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        print(json.dumps(search(DEFECTS[arguments.inside], arguments.seconds, arguments.first, arguments.most)))
        return 0
    missed = False
    for name in arguments.defects or DEFECTS:
        found = _search_in_copy(name, arguments.seconds, arguments.first, arguments.most)
        missed |= not any(found["known"].values()) or found["seed"] is None
        print(_row(name, DEFECTS[name], found), flush=True)
        print(f"  {json.dumps(found)}", file=sys.stderr, flush=True)
    return 1 if missed else 0


def search(defect: Defect, seconds: float, first: int, most: int) -> dict[str, Any]:
    """Return what each known case finds, and the first random case that fails; for inside of a patched copy."""
    import unitrain
    from tests.fuzzer import cases, known, runner

    assert Path(unitrain.__file__).is_relative_to(Path.cwd()), unitrain.__file__
    runner.CASE_SECONDS = CASE_SECONDS

    def failure(case: Case) -> str | None:
        found = runner.failures(case, ranks) and runner.failures(case, ranks)
        return found[0][:300] if found else None

    with runner.pool() as ranks:
        result: dict[str, Any] = {"known": {name: failure(known.CASES[name]) for name in defect.known}}
        result |= {"seed": None, "text": None, "ran": 0, "seeds": 0}
        started = time.monotonic()
        for seed in range(first, most):
            if time.monotonic() > started + seconds:
                break
            result["seeds"] = seed + 1
            case = cases.draw(seed)
            if defect.can_find(case):
                result["ran"] += 1
                if text := failure(case):
                    return {**result, "seed": seed, "text": text}
        return result


def _search_in_copy(name: str, seconds: float, first: int, most: int) -> dict[str, Any]:
    """Run `search` in a copy of the repository to which the patch of the defect is applied."""
    root = HERE.parent
    with tempfile.TemporaryDirectory(prefix="unitrain-reverts-") as folder:
        commit = _git(root, "log", "-1", "--format=%H", "--", str(PATCHES)).decode().strip()
        archive = _git(root, "archive", commit, "unitrain", "launchers", "tests", "pyproject.toml")
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        subprocess.run(["patch", "-p1", "-s", "-i", str(PATCHES / f"{name}.patch")], cwd=folder, check=True)
        numbers = ["--seconds", str(seconds), "--first", str(first), "--most", str(most)]
        command = [sys.executable, __file__, "--inside", name, *numbers]
        variables = {**os.environ, "PYTHONPATH": folder}
        done = subprocess.run(command, cwd=folder, env=variables, stdout=subprocess.PIPE, check=True)
        found: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
        return found


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(root), *arguments], stdout=subprocess.PIPE, check=True).stdout


def _row(name: str, defect: Defect, found: dict[str, Any]) -> str:
    finding = [name for name, text in found["known"].items() if text]
    seed = f"not within {found['seeds']} seeds" if found["seed"] is None else f"{found['seed']}"
    symptom = (found["text"] or next(filter(None, found["known"].values()), "")).splitlines()[:1]
    return (
        f"| {name} | {defect.text} | {defect.fixes} | {'; '.join(finding) or 'none'} | {seed} | "
        f"{''.join(symptom)[:90].replace('|', '/')} |"
    )


if __name__ == "__main__":
    sys.exit(main())
