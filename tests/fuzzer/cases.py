"""Random cases as plain data: drawing, constraints between fields, and simplification."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from .parts import SCHEDULERS

Case = dict[str, Any]

# The simplest value of each field of a case with the Trainer. Shrinking restores these values.
SIMPLEST: Case = {
    "kind": "trainer",
    "seed": 0,
    "samples": 12,
    "source": "tensors",
    "loader": False,
    "sampler": None,
    "negative": False,
    "uneven_batches": False,
    "collate": None,
    "drop_last": False,
    "workers": 0,
    "persistent": False,
    "reuse": False,
    "uneven": "weight",
    "shuffle": False,
    "global_batch": 6,
    "validation": None,
    "validation_drop_last": False,
    "features": [],
    "loss": "mse",
    "optimizer": "SGD",
    "optimizer_settings": {"lr": 0.05},
    "scheduler": None,
    "scheduler_every": "step",
    "clip": None,
    "lr_scaling": "none",
    "warmup": 0,
    "ema": None,
    "precision": "fp32",
    "compression": "none",
    "change": None,
    "metrics": [],
    "early_stopping": None,
    "counting": None,
    "output": False,
    "checkpoint_every_steps": None,
    "checkpoint_every": 1,
    "asynchronous": True,
    "show_every": None,
    "epochs": 1,
    "extra_call": None,
    "again": None,
    "segments": [{"backend": "local", "size": 1, "accumulate": 1, "end": None}],
}
FEATURES = (
    "tied", "frozen", "complex", "unused", "branch", "norm", "sync_norm", "buffer", "embedding", "max_norm", "dropout",
    "object", "penalty",
)  # fmt: skip
OPTIMIZERS: dict[str, list[Case]] = {
    "SGD": [
        {"lr": 0.05},
        {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1},
        {"lr": 0.05, "momentum": 0.9, "nesterov": True},
    ],
    "AdamW": [{"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.01, "amsgrad": True}],
    "Adam": [{"lr": 0.01}, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}, {"lr": 0.01, "fused": True}],
    "RMSprop": [{"lr": 0.01, "momentum": 0.5, "centered": True}],
    "Adagrad": [{"lr": 0.05}],
    "Adadelta": [{"lr": 1.0}],
    "Adamax": [{"lr": 0.01}],
    "NAdam": [{"lr": 0.01}],
    "RAdam": [{"lr": 0.01}],
    "ASGD": [{"lr": 0.05}],
    "Adafactor": [{"lr": 0.05}],
}  # fmt: skip
TORCHMETRICS = (
    "MeanSquaredError", "MeanAbsoluteError", "PearsonCorrCoef", "NormalizedRootMeanSquaredError", "R2Score",
    "SpearmanCorrCoef", "ExplainedVariance",
)  # fmt: skip
LAYOUTS = [("local", 1), ("ddp", 2), ("ddp", 3), ("horovod", 2), ("horovod", 3), ("ddp", 1), ("horovod", 1)]
LAYOUT_WEIGHTS = [6, 6, 3, 4, 2, 1, 1]
# Number of batches per step, over all ranks, if the dataset or the sampler creates the batches.
BATCHES_PER_STEP = 6
HALF_COMPRESSION = ("fp16", "bf16")


def draw_case(seed: int) -> Case:
    """Return the case of `seed`, which depends only on the seed."""
    r = random.Random(seed)
    kind = r.choices(["trainer", "loop", "collective"], [78, 14, 8])[0]
    if kind == "loop":
        from .loops import draw_loop

        return draw_loop(r, seed)
    if kind == "collective":
        from .collectives import draw_collectives

        return draw_collectives(r, seed)
    return make_valid(_draw_trainer_case(r, seed))


def _draw_trainer_case(r: random.Random, seed: int) -> Case:
    def maybe(chance: float, value: Any, otherwise: Any = None) -> Any:
        return value if r.random() < chance else otherwise

    case = copy.deepcopy(SIMPLEST)
    case["seed"] = seed % 1000
    case["samples"] = r.randint(7, 31)
    case["source"] = r.choices(
        ["tensors", "subset", "map", "shared", "own", "batches", "map_batches"], [4, 3, 5, 5, 3, 4, 2]
    )[0]
    case["loader"] = r.random() < 0.8
    case["negative"] = r.random() < 0.15
    case["sampler"] = r.choice(
        [None, None, None, None, "shuffle", "shuffle", "sequential_part", "random_part", "random_few", "replacement",
         "subset_random", "weighted", "own", "own", "batches", "batches", "batches"]
    )  # fmt: skip
    case["uneven_batches"] = r.random() < 0.5
    case["collate"] = r.choices([None, "pairs", "dict", "skip", "noise"], [10, 2, 2, 2, 3])[0]
    case["drop_last"] = r.random() < 0.2
    case["workers"] = r.choices([0, 1, 2], [16, 1, 1])[0]
    case["persistent"] = r.random() < 0.5
    case["reuse"] = r.random() < 0.3
    case["uneven"] = r.choice(["weight", "weight", "drop"])
    case["shuffle"] = r.random() < 0.5
    case["global_batch"] = r.choice([6, 6, 12])
    kinds = [None, "tensors", "map", "skip", "part", "shared"]
    case["validation"] = r.choices(kinds, [10, 10, 6, 2, 2, 10])[0]
    case["validation_drop_last"] = r.random() < 0.25
    case["features"] = sorted(r.sample(FEATURES, r.choice([0, 1, 1, 2, 2, 3])))
    case["loss"] = r.choice(["mse", "mse", "cross_entropy", "tokens"])
    case["optimizer"] = r.choice([*OPTIMIZERS, "SGD", "SGD", "AdamW"])
    case["optimizer_settings"] = dict(r.choice(OPTIMIZERS[case["optimizer"]]))
    case["scheduler"] = maybe(0.6, r.choice([*SCHEDULERS, "MultiStepLR", "ReduceLROnPlateau", "ReduceLROnPlateau"]))
    case["scheduler_every"] = r.choice(["step", "epoch"])
    case["clip"] = maybe(0.35, 0.05)
    case["lr_scaling"] = r.choices(["none", "linear", "sqrt"], [8, 1, 1])[0]
    case["warmup"] = r.choice([0, 3])
    case["ema"] = maybe(0.25, 0.7)
    case["precision"] = r.choices(["fp32", "fp16", "bf16"], [6, 1, 1])[0]
    case["compression"] = r.choices(["none", "fp16", "bf16", "powersgd", "powersgd_full"], [10, 2, 2, 3, 1])[0]
    case["change"] = maybe(0.3, [r.choice(["add", "add", "lr", "freeze", "unfreeze"]), r.randint(1, 4)])
    pool = ["squares", "squares", "each", "in_place", *TORCHMETRICS]
    case["metrics"] = sorted(set(r.choices(pool, k=r.choice([0, 0, 1, 2]))))
    case["early_stopping"] = maybe(0.3, [r.choice(["train_loss", "val_loss"]), r.choice([1, 2])])
    case["counting"] = maybe(0.2, r.choice(["Counter", "Counter", "defaultdict", "OrderedDict", "dict"]))
    case["output"] = r.random() < 0.3
    case["checkpoint_every_steps"] = r.choice([None, None, 1, 2, 3])
    case["checkpoint_every"] = r.choice([1, 1, 2])
    case["asynchronous"] = r.random() < 0.75
    case["show_every"] = r.choice([None, 1, 2])
    case["epochs"] = r.randint(1, 5)
    case["extra_call"] = maybe(0.4, r.choice(["evaluate", "predict"]))
    _combine_features(r, case)
    case["again"] = maybe(
        0.12, [r.choice(["on_micro_batch_end", "on_before_optimizer_step", "on_step_end"]), r.randint(1, 5)]
    )
    segments = []
    end = 0
    for number in range(count := r.choices([1, 2, 3], [5, 4, 1])[0]):
        backend, size = r.choices(LAYOUTS, LAYOUT_WEIGHTS)[0]
        end += r.randint(1, 6)
        kind = r.choices(["steps", "stop", "raise", "raise after epoch"], [4, 2, 2, 1])[0]
        segments.append(
            {
                "backend": backend,
                "size": size,
                "accumulate": r.choice([1, 1, 2]),
                "end": None if number == count - 1 else [kind, end],
            }
        )
    if "complex" in case["features"] and r.random() < 0.8:
        segments, case["output"] = segments[-1:], False
        case["checkpoint_every_steps"] = case["counting"] = None
    if r.random() < 0.3:  # runs usually resume on the same number of ranks
        for segment in segments:
            segment.update({name: segments[0][name] for name in ("backend", "size", "accumulate")})
    case["segments"] = segments
    return case


def _combine_features(r: random.Random, case: Case) -> None:
    """Draw combinations in which several parts of the code interact more often."""
    features = set(case["features"])
    combination = r.random()
    if combination < 0.05:
        features.add("penalty")
        case["compression"] = r.choice(["fp16", "powersgd"])
    elif combination < 0.10:
        features.add("branch")
        case["source"], case["collate"], case["drop_last"] = r.choice(["batches", "shared", "own"]), None, False
        case["optimizer"], case["optimizer_settings"] = "AdamW", {"lr": 0.01, "weight_decay": 0.1}
    elif combination < 0.13:
        features.add("complex")
        case["compression"], case["output"] = r.choice(["fp16", "bf16"]), False
    elif combination < 0.16:
        case["source"], case["collate"], case["loader"] = "shared", "noise", True
    elif combination < 0.19:
        case["source"], case["loader"], case["drop_last"] = "own", True, False
        features.add("norm")
    case["features"] = sorted(features)


def make_valid(case: Case) -> Case:
    """Return `case` with incompatible fields set to simpler values, so that the case is a valid run."""
    case = copy.deepcopy(case)
    if case["kind"] == "sequence":
        from .sequences import make_valid as make_sequence_valid

        return make_sequence_valid(case)
    if case["kind"] == "trainer":
        _make_data_valid(case)
        _make_model_valid(case)
        _make_steps_valid(case)
        _make_results_valid(case)
        _make_layout_valid(case)
    return case


def has_predefined_batches(case: Case) -> bool:
    """Return whether the dataset or the sampler decides which samples are in a batch."""
    return case["source"] in ("batches", "map_batches") or case["sampler"] == "batches"


def _make_data_valid(case: Case) -> None:
    source = case["source"]
    if case["compression"] == "powersgd":
        # The result is compared with a run on another layout, so it must not depend on the number of ranks.
        case["collate"] = None if case["collate"] in ("noise", "skip") else case["collate"]
        source = case["source"] = "shared" if source == "own" else source
    if source in ("batches", "map_batches"):
        case["loader"], case["drop_last"], case["collate"] = True, False, None
    if source in ("shared", "own", "batches", "map_batches"):
        case["sampler"], case["shuffle"] = None, False
    if case["loader"]:
        case["shuffle"] = False
    else:
        case["sampler"], case["collate"], case["workers"], case["drop_last"] = None, None, 0, False
    if source == "subset" and case["sampler"] == "batches":
        case["sampler"] = "own"
    if case["sampler"] == "batches":
        case["drop_last"] = False
    if source != "subset":
        case["negative"] = False
    if case["collate"] == "noise":
        case["workers"] = 0  # workers are reseeded at the start of every epoch, including a resumed epoch
    if not case["workers"]:
        case["persistent"] = False
    if source not in ("batches", "map_batches"):
        case["uneven_batches"] = False
    if source != "batches" or case["workers"]:
        case["reuse"] = False
    if not (has_predefined_batches(case) or source == "own"):
        case["uneven"] = "weight"
    # There must be enough samples for every rank of each layout, and for one step if the remainder is dropped.
    least = max(7, case["global_batch"] + 2 * (source == "subset"))
    if case["drop_last"]:
        least = 3 * case["global_batch"]
    if case["uneven"] == "drop":
        least = max(least, 3 * BATCHES_PER_STEP)
    case["samples"] = max(case["samples"], least)


def _make_model_valid(case: Case) -> None:
    features = set(case["features"]) - {"late"}
    if case["change"] and case["change"][0] == "add":
        case["scheduler"] = None  # torch's schedulers handle only the groups that existed when they were created
        features.add("late")
    if "complex" in features:
        features.discard("max_norm")
        if case["precision"] == "fp16":
            case["precision"] = "fp32"  # torch's GradScaler does not support complex gradients on a CPU
        if case["optimizer"] == "Adafactor" or case["optimizer_settings"].get("fused"):
            case["optimizer"], case["optimizer_settings"] = "SGD", {"lr": 0.05}
    if "object" in features:
        features.discard("penalty")
    if "penalty" in features:  # the second backward pass requires unchanged inputs
        features -= {"max_norm", "buffer", "sync_norm"}  # a synchronized BatchNorm is differentiable only once
    if "norm" in features:
        features.discard("sync_norm")
    if "max_norm" in features:
        # Each forward pass changes the weights, including those in evaluations, so the weights depend on the number of
        # evaluations.
        features.discard("embedding")
        case["validation"] = case["ema"] = None
    if case["compression"] == "powersgd":
        features -= {"norm", "buffer", "max_norm", "sync_norm"}
    if case["compression"] in HALF_COMPRESSION or features & {"max_norm", "buffer"}:
        features.discard("sync_norm")  # the oracle runs each rank separately
    case["features"] = sorted(features)


def _make_steps_valid(case: Case) -> None:
    if has_predefined_batches(case):
        case["lr_scaling"] = "none"
    if case["lr_scaling"] == "none":
        case["warmup"] = 0
    if case["compression"] in HALF_COMPRESSION:
        if case["loss"] == "tokens":  # rounds before division by a count, at an unspecified scale
            case["loss"] = "cross_entropy"
        if case["precision"] == case["compression"] == "fp16":
            case["precision"] = "fp32"  # loss scaling changes the rounding of gradients
    if case["scheduler"] == "CyclicLR" and case["optimizer"] == "Adafactor":
        case["scheduler"] = "StepLR"
    if case["scheduler"] == "ReduceLROnPlateau":
        case["scheduler_every"] = "epoch"
    if case["scheduler"] is None:
        case["scheduler_every"] = "step"


def _make_results_valid(case: Case) -> None:
    if case["loss"] != "mse":
        case["metrics"] = [name for name in case["metrics"] if not name[0].isupper()]
    if case["validation"] in ("shared", "own"):
        case["validation"] = "own" if case["source"] == "own" else "shared"
    if case["validation"] is None:
        case["metrics"], case["extra_call"] = [], None
        if case["early_stopping"]:
            case["early_stopping"] = ["train_loss", case["early_stopping"][1]]
    if case["validation"] in ("tensors", None):
        case["validation_drop_last"] = False
    # Outputs of different streams are in rank order. Outputs that are objects cannot be concatenated.
    if case["extra_call"] == "predict" and (case["validation"] in ("own", "skip") or "object" in case["features"]):
        case["extra_call"] = "evaluate"


def _make_layout_valid(case: Case) -> None:
    case["segments"] = segments = equalize_step_sizes(case, case["segments"], has_predefined_batches(case))
    segments[-1]["end"] = None
    if case["collate"] == "noise" or case["change"]:
        case["again"] = None
    if case["again"] and {"norm", "sync_norm", "buffer"} & set(case["features"]):
        case["again"] = ["on_step_end", case["again"][1]]  # repeated forward passes would change the state again
    if len(segments) > 1 or case["checkpoint_every_steps"] or case["counting"]:
        case["output"] = True
    if not case["output"]:
        case["checkpoint_every_steps"], case["checkpoint_every"], case["asynchronous"] = None, 1, True
    for segment in segments:
        # The script of a segment contains the step of a stop, but not the step of the last checkpoint before an
        # exception.
        if case["change"] and segment["end"] and segment["end"][0].startswith("raise"):
            segment["end"] = ["steps", segment["end"][1]]
    if any(segment["end"] and segment["end"][0] == "stop" for segment in segments):
        case["show_every"] = 1


def equalize_step_sizes(case: Case, segments: list[Case], predefined_batches: bool) -> list[Case]:
    """Change the segments so that all have the same number of samples per step, regardless of the number of ranks.
    Return the segments.

    If the results depend on the layout, all segments get the layout of the last segment.
    """
    randomness = case["collate"] == "noise"
    same_layout = case["source"] == "own" or randomness or case["compression"] in ("fp16", "bf16")
    same_layout = same_layout or {"norm", "buffer", "sync_norm", "max_norm"} & set(case["features"])
    for segment in segments:
        if same_layout:
            segment.update({name: segments[-1][name] for name in ("backend", "size", "accumulate")})
    for segment in segments:
        if predefined_batches:
            segment["accumulate"] = BATCHES_PER_STEP // segment["size"]
        elif case["global_batch"] % (segment["size"] * segment["accumulate"]):
            segment["accumulate"] = 1
    return segments


def simpler_cases(case: Case) -> Iterator[Case]:
    """Yield cases that are each simpler than `case` in one respect, starting with the largest simplification."""
    if case["kind"] == "loop":
        from .loops import simpler_loop

        yield from simpler_loop(case)
        return
    if case["kind"] == "sequence":
        from .sequences import simpler

        yield from simpler(case)
        return
    if case["kind"] == "collective":
        from .collectives import simpler_collectives

        yield from simpler_collectives(case)
        return
    for at in range(len(case["segments"]) - 1):
        yield {**case, "segments": case["segments"][:at] + case["segments"][at + 1 :]}
    for name in ("features", "metrics"):
        if len(case[name]) > 1:
            yield {**case, name: []}
        for part in case[name]:
            yield {**case, name: [one for one in case[name] if one != part]}
    for name, value in SIMPLEST.items():
        if name not in ("kind", "seed", "segments", "features", "metrics") and case[name] != value:
            yield {**case, name: value}
            if name == "epochs" and case[name] > 2:
                yield {**case, name: 2}
    for at, segment in enumerate(case["segments"]):
        for change in (
            {"backend": "local", "size": 1},
            {"backend": "ddp", "size": 2} if segment["size"] > 1 else {},
            {"backend": "ddp"} if segment["backend"] == "horovod" else {},
            {"accumulate": 1},
            {"end": ["steps", 1]} if segment["end"] else {},
            {"end": ["steps", segment["end"][1]]} if segment["end"] else {},
        ):
            changed = {**segment, **change}
            if changed != segment and not (changed["backend"] == "local" and changed["size"] > 1):
                yield {**case, "segments": [*case["segments"][:at], changed, *case["segments"][at + 1 :]]}


def to_json(case: Case) -> str:
    """Return `case` as JSON. For a case with the Trainer, the JSON contains only the fields that differ from
    `SIMPLEST`."""
    if case["kind"] == "sequence":
        from .sequences import compact

        return json.dumps(compact(case))
    if case["kind"] != "trainer":
        return json.dumps(case)
    return json.dumps({name: value for name, value in case.items() if value != SIMPLEST[name]})


def parse_case(text: str) -> Case:
    """Return the case for the text that `to_json` returned."""
    found = json.loads(text)
    if found.get("kind") == "sequence":
        from .sequences import parse

        return parse(found)
    return make_valid({**SIMPLEST, **found}) if found.get("kind", "trainer") == "trainer" else found
