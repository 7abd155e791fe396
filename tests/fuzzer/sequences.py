"""Random programs: sequences of calls on Trainers and own loops that live in the same processes.

A case has `objects`, which are Trainers (`t0`) and loops (`l0`), and `sections`. Each section runs on one backend and
number of ranks, and creates an object, with resume=True, when a call first uses it. Its `settings` replace settings of
objects from then on, like a script that was edited. A call is [object, verb, argument].
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

from . import cases
from .parts import OWN_GENERATORS, SCHEDULERS

Case = dict[str, Any]
Call = list[Any]

# A single segment satisfies the functions that are shared with cases of one Trainer. Sections replace it.
SIMPLEST_TRAINER: Case = {
    **cases.SIMPLEST,
    "epochs": 2,
    "show_every": 1,
    "accumulate": 1,
    "shard": "none",
    "keep_best": None,
    "keep_last": 3,
    "max_steps": None,
    "max_seconds": None,
    "data_change": None,
    "data_change_at": "epoch",
}
SIMPLEST_LOOP: Case = {
    "kind": "loop",
    "seed": 0,
    "models": [[]],
    "compose": "sum",
    "swap": False,
    "unused": False,
    "loaders": [12],
    "optimizers": ["SGD"],
    "shard": "none",
}
LAYOUTS = [("ddp", 2), ("horovod", 2), ("ddp", 3), ("local", 1), ("horovod", 3)]
LAYOUT_WEIGHTS = [6, 4, 3, 3, 1]
RAISES = (
    "on_micro_batch_end", "on_before_optimizer_step", "on_step_end", "on_epoch_end", "dataset", "loss", "metric",
    "interrupt",
)  # fmt: skip
VERBS = {
    "trainer": {"fit": 14, "evaluate": 1, "predict": 1, "best": 4, "save": 1, "load": 1, "change": 2},
    "loop": {"run": 10, "evaluate": 2, "freeze": 1, "unfreeze": 1, "rewrap": 1, "save": 2, "load": 2},
}
LOOP_OPTIMIZERS = ("SGD", "AdamW", "Adam", "ScheduleFree", "GlobalScale", "LBFGS")
FEATURES = (
    "tied",
    "alias",
    "frozen",
    "unused",
    "branch",
    "norm",
    "sync_norm",
    "buffer",
    "embedding",
    "dropout",
    "penalty",
)
STATE_OF_FORWARD = {"norm", "sync_norm", "buffer"}
SETTINGS_OF_OWN_OPTIMIZERS: dict[str, Case] = {"ScheduleFree": {"lr": 0.1}, "GlobalScale": {"lr": 0.05}}
PER_RANK_STEP = 6  # samples of a loop's step over all ranks


def optimizer_settings(name: str) -> Case:
    """Return the settings of an optimizer of a loop."""
    if name == "LBFGS":
        return {"lr": 0.3, "max_iter": 3, "line_search_fn": "strong_wolfe"}
    return dict(SETTINGS_OF_OWN_OPTIMIZERS.get(name) or cases.OPTIMIZERS[name][0])


# Drawing


def draw_sequence(seed: int) -> Case:
    """Return the program of `seed`, which depends only on the seed."""
    r = random.Random(seed)
    count = r.choices([(1, 0), (0, 1), (1, 1), (2, 0), (2, 1), (0, 2)], [8, 4, 2, 3, 1, 2])[0]
    objects: Case = {f"t{number}": _draw_trainer(r, seed + number) for number in range(count[0])}
    objects |= {f"l{number}": _draw_loop(r, seed + number) for number in range(count[1])}
    sections = []
    for _ in range(r.choices([1, 2, 3], [5, 4, 2])[0]):
        backend, size = r.choices(LAYOUTS, LAYOUT_WEIGHTS)[0]
        calls = [call for name in r.choices(list(objects), k=r.randint(2, 5)) for call in _draw_calls(r, name)]
        sections.append({"backend": backend, "size": size, "settings": {}, "calls": calls})
    for section in sections[1:]:
        for name, definition in objects.items():
            if definition["kind"] == "trainer" and r.random() < 0.25:
                limit = limit_of(definition)
                section["settings"][name] = {limit: definition[limit] + r.randint(1, 3)}
    return make_valid({"kind": "sequence", "seed": seed, "objects": objects, "sections": sections})


def _draw_trainer(r: random.Random, seed: int) -> Case:
    def maybe(chance: float, value: Any, otherwise: Any = None) -> Any:
        return value if r.random() < chance else otherwise

    case = copy.deepcopy(SIMPLEST_TRAINER)
    case["seed"] = seed % 1000
    case["samples"] = r.randint(8, 24)
    case["source"] = r.choices(["tensors", "map", "subset", "shared", "batches", "map_batches"], [6, 7, 4, 2, 1, 1])[0]
    case["loader"] = r.random() < 0.7
    case["sampler"] = r.choice([None, None, "shuffle", "own", "batches", "twins", *OWN_GENERATORS])
    case["shuffle"] = r.random() < 0.5
    case["global_batch"] = r.choice([6, 6, 12])
    case["accumulate"] = r.choice([1, 1, 2])
    case["validation"] = r.choices([None, "tensors", "map", "part"], [2, 5, 3, 1])[0]
    case["features"] = sorted(r.sample(FEATURES, r.choice([0, 0, 1, 1, 2])))
    case["loss"] = r.choices(["mse", "cross_entropy", "tokens", "accuracy"], [12, 4, 4, 1])[0]
    case["optimizer"] = r.choice(
        ["SGD", "SGD", "SGD", "AdamW", "Adam", "RMSprop", "ScheduleFree", "ScheduleFree", "GlobalScale"]
    )
    settings = cases.OPTIMIZERS.get(case["optimizer"]) or [SETTINGS_OF_OWN_OPTIMIZERS[case["optimizer"]]]
    case["optimizer_settings"] = dict(r.choice(settings))
    planned = [f"{kind}_{name}" for kind in ("planned", "sized") for name in ("cosine", "linear", "one_cycle")]
    case["scheduler"] = maybe(0.6, r.choice([*r.sample(SCHEDULERS, 5), "StepLR", "ReduceLROnPlateau", *planned]))
    case["scheduler_every"] = r.choice(["step", "epoch"])
    case["clip"] = maybe(0.2, 0.05)
    case["ema"] = maybe(0.2, 0.7)
    case["change"] = maybe(0.25, [r.choice(["lr", "freeze", "unfreeze"]), r.randint(1, 4)])
    case["metrics"] = sorted(set(r.choices(["squares", "each", "in_place", "MeanSquaredError"], k=r.choice([0, 1]))))
    case["output"] = r.random() < 0.7
    case["checkpoint_every_steps"] = r.choice([None, 1, 2, 3])
    case["checkpoint_every"] = r.choice([1, 1, 2])
    case["asynchronous"] = r.random() < 0.75
    case["shard"] = r.choices(["none", "state", "gradients"], [7, 2, 1])[0]
    case["keep_best"] = maybe(0.6, r.choice(["train_loss", "val_loss", "val_loss"]))
    case["keep_last"] = r.choice([1, 1, 3])
    case["epochs"] = r.randint(2, 4)
    case["max_steps"] = maybe(0.3, r.randint(3, 8))
    case["max_seconds"] = maybe(0.1, 0.001)
    case["data_change"] = maybe(0.3, r.choice(["tensors", "indices", "grow"]))
    case["data_change_at"] = r.choice(["epoch", "call"])
    return case


def _draw_loop(r: random.Random, seed: int) -> Case:
    case = copy.deepcopy(SIMPLEST_LOOP)
    case["seed"] = seed % 1000
    features = ("tied", "alias", "unused", "branch", "sync_norm", "sync_norm", "embedding", "dropout")
    case["models"] = [sorted(set(r.choices(features, k=r.choice([0, 1, 1, 2])))) for _ in range(r.choice([1, 2, 2]))]
    case["compose"] = r.choice(["sum", "chain", "sandwich"])
    case["swap"] = r.random() < 0.3
    case["unused"] = r.random() < 0.5
    case["loaders"] = [r.randint(4, 13) for _ in range(r.choice([1, 2, 2]))]
    case["optimizers"] = [r.choice(LOOP_OPTIMIZERS) for _ in case["models"]]
    case["shard"] = r.choices(["none", "state"], [4, 1])[0]
    return case


def _draw_calls(r: random.Random, name: str) -> list[Call]:
    weights = VERBS["loop" if name.startswith("l") else "trainer"]
    verb = r.choices(list(weights), list(weights.values()))[0]
    if name.startswith("l"):
        return [[name, verb, r.randint(2, 5) if verb == "run" else None]]
    if verb == "fit":
        end = r.choices([None, "stop", r.choice(RAISES)], [3, 4, 4])[0]
        return [[name, verb, None if end is None else [end, r.randint(1, 6)]]]
    if verb == "best":
        return [[name, "best", None], [name, "evaluate", None]]
    if verb == "change":
        return [[name, "change", r.choice(["data", "data", "freeze", "unfreeze", "lr"])]]
    return [[name, verb, None]]


def make_valid(case: Case) -> Case:
    """Return `case` without the calls and values that are not valid programs."""
    case = copy.deepcopy(case)
    for definition in case["objects"].values():
        (_make_trainer_valid if definition["kind"] == "trainer" else _make_loop_valid)(definition)
    saved: set[str] = set()
    for section in case["sections"]:
        section["calls"] = [call for call in section["calls"] if call[0] in case["objects"]]
        ended: set[str] = set()
        kept = []
        for call in section["calls"]:
            definition = case["objects"][call[0]]
            if call[0] in ended and call[1] not in ("evaluate", "predict"):
                continue
            if definition["kind"] == "trainer" and not _make_call_valid(call, definition, saved, ended):
                continue
            if call[1] == "load" and call[0] not in saved:
                continue
            if call[1] == "save":
                saved.add(call[0])
            kept.append(call)
        section["calls"] = kept
        section["settings"] = {
            name: value
            for name, value in section["settings"].items()
            if name in case["objects"] and next(iter(value)) == limit_of(case["objects"][name])
        }
    case["sections"] = [section for section in case["sections"] if section["calls"]]
    used = {call[0] for section in case["sections"] for call in section["calls"]}
    case["objects"] = {name: value for name, value in case["objects"].items() if name in used}
    for section in case["sections"]:
        section["settings"] = {name: value for name, value in section["settings"].items() if name in used}
    return case


def limit_of(definition: Case) -> str:
    """Return the setting that limits the run of a Trainer."""
    return "max_steps" if definition["max_steps"] else "epochs"


def _make_trainer_valid(case: Case) -> None:
    if case["sampler"] in (*OWN_GENERATORS, "twins"):
        case["loader"] = True
        case["source"] = "map"
    if case["sampler"] == "twins":
        case["data_change"], case["samples"] = None, max(case["samples"], 8)
    allowed = {"subset": ("tensors", "indices"), "tensors": ("tensors",), "map": ("tensors", "grow")}
    if case["data_change"] not in allowed.get(case["source"], ()) or case["sampler"] in ("batches", "own"):
        case["data_change"] = None
    if case["data_change"] == "grow" and case["sampler"] in OWN_GENERATORS:
        case["data_change"] = None  # these samplers have a fixed length
    if case["data_change"] == "indices":
        case["data_change_at"] = "epoch"
    if case["max_steps"]:
        case["epochs"] = 50
    elif case["epochs"] == 50:
        case["epochs"] = 2
    if case["source"] in ("shared", "batches") or case["sampler"] == "batches":
        case["scheduler"] = (case["scheduler"] or "").replace("planned", "sized") or None  # the data has no length
    if (case["scheduler"] or "").startswith(("planned", "sized")):
        if case["data_change"] == "grow" and (case["data_change_at"] == "epoch" or "sized" in case["scheduler"]):
            case["data_change"] = None  # the length of the schedule would not be known
        if case["max_steps"]:
            case["scheduler_every"] = "step"
    if case["scheduler"] == "ReduceLROnPlateau":
        case["scheduler_every"] = "epoch"
    features = set(case["features"])
    if case["ema"] or "tied" in features or case["optimizer"] == "ScheduleFree":
        features.discard("alias")  # an average of shared memory depends on the order of the updates
    if case["optimizer"] == "ScheduleFree":
        case["ema"] = case["clip"] = None
    if "norm" in features:
        features.discard("sync_norm")
    if case["shard"] != "none":
        features -= {"penalty", "branch", "unused", "buffer"}
        case["optimizer_settings"].pop("fused", None)
    if case["loss"] == "accuracy":
        case["metrics"] = []
    case["features"] = sorted(features)
    valid = cases.make_valid(case)
    valid["show_every"] = 1
    if case["max_seconds"] or case["keep_best"]:
        valid["output"] = True
    if case["output"] or valid["output"]:  # a single segment does not need a folder
        valid["output"] = True
        for name in ("checkpoint_every_steps", "checkpoint_every", "asynchronous"):
            valid[name] = case[name]
    if valid["keep_best"] == "val_loss" and valid["validation"] is None:
        valid["keep_best"] = "train_loss"
    case.clear()
    case.update(valid)


def _make_loop_valid(case: Case) -> None:
    while len(case["optimizers"]) < len(case["models"]):
        case["optimizers"].append("SGD")
    case["optimizers"] = case["optimizers"][: len(case["models"])]
    if len(case["models"]) == 1:
        case["compose"], case["swap"] = "sum", False
    elif "LBFGS" in case["optimizers"]:
        case["optimizers"] = ["SGD" if name == "LBFGS" else name for name in case["optimizers"]]
    depends_on_rank = case["swap"] or case["compose"] == "sandwich"
    for features in case["models"]:
        if "alias" in features and "tied" in features:
            features.remove("tied")
        if "sync_norm" in features and (depends_on_rank or "LBFGS" in case["optimizers"]):
            features.remove("sync_norm")  # the ranks would call the layers in different orders
        if "ScheduleFree" in case["optimizers"]:
            features[:] = [name for name in features if name != "alias"]
        if "LBFGS" in case["optimizers"]:
            features[:] = [name for name in features if name not in ("branch", "unused", "alias")]
        case["unused"] = case["unused"] or bool({"unused", "branch", "embedding"} & set(features))
    if case["shard"] != "none" and "LBFGS" in case["optimizers"]:
        case["shard"] = "none"


def _make_call_valid(call: Call, definition: Case, saved: set[str], ended: set[str]) -> bool:
    """Change an invalid argument of a Trainer's call. Return False if the call is not valid."""
    name, verb, argument = call
    if verb == "best":
        if definition["keep_best"] is None:
            return False
        if definition["optimizer"] == "ScheduleFree":
            ended.add(name)  # the optimizer's state does not belong to the loaded weights
    if verb in ("save", "load") and (definition["shard"] != "none" or definition["optimizer"] == "ScheduleFree"):
        return False
    if verb == "change" and argument == "lr" and (definition["scheduler"] or "").startswith("planned"):
        return False  # such a scheduler starts from the learning rates at the creation of the Trainer
    if verb == "change" and argument == "data":
        return bool(definition["data_change"]) and definition["data_change_at"] == "call"
    if verb in ("evaluate", "predict") and definition["validation"] is None:
        return False
    if verb != "fit" or argument is None:
        return True
    end = argument[0]
    changes_at_epoch = definition["data_change"] and definition["data_change_at"] == "epoch"
    needs_validation = end in ("metric", "interrupt") and (definition["validation"] is None or changes_at_epoch)
    reads_samples = definition["source"] == "map" and definition["loss"] != "tokens"
    is_between_steps = end in ("stop", "on_epoch_end", "metric", "interrupt")
    if definition["max_seconds"]:
        call[2] = None
    elif (
        needs_validation
        or (end == "dataset" and not reads_samples)
        or (end == "on_epoch_end" and definition["data_change"])
        # A repeated forward pass would change the state again.
        or (STATE_OF_FORWARD & set(definition["features"]) and not is_between_steps)
    ):
        call[2] = ["on_step_end", argument[1]]
    return True


# Simplification


def simpler(case: Case) -> Iterator[Case]:
    """Yield programs that are each simpler than `case`: fewer sections, calls and objects, then simpler fields."""
    sections = case["sections"]
    for at in range(len(sections)):
        if len(sections) > 1:
            yield {**case, "sections": sections[:at] + sections[at + 1 :]}
    for name in case["objects"]:
        if len(case["objects"]) > 1:
            yield {**case, "objects": {other: value for other, value in case["objects"].items() if other != name}}

    def replaced(at: int, **fields: Any) -> Case:
        return {**case, "sections": [*sections[:at], {**sections[at], **fields}, *sections[at + 1 :]]}

    for at, section in enumerate(sections):
        calls = section["calls"]
        for place in range(len(calls)):
            if len(calls) > 1:
                yield replaced(at, calls=calls[:place] + calls[place + 1 :])
        if section["settings"]:
            yield replaced(at, settings={})
        layout = section["backend"], section["size"]
        for backend, size in [("local", 1), ("ddp", 2), ("ddp", section["size"])]:
            if (backend, size) != layout and size <= section["size"] and (layout != ("local", 1)):
                yield replaced(at, backend=backend, size=size)
        for place, call in enumerate(calls):
            if isinstance(call[2], int) and call[2] > 1:
                yield replaced(at, calls=[*calls[:place], [*call[:2], call[2] - 1], *calls[place + 1 :]])
            if isinstance(call[2], list) and call[2][0] != "stop":
                yield replaced(at, calls=[*calls[:place], [*call[:2], ["stop", call[2][1]]], *calls[place + 1 :]])
    for name, definition in case["objects"].items():
        simplest = SIMPLEST_TRAINER if definition["kind"] == "trainer" else SIMPLEST_LOOP
        for field, value in simplest.items():
            if field not in ("kind", "seed", "segments") and definition[field] != value:
                yield {**case, "objects": {**case["objects"], name: {**definition, field: value}}}
        for field in ("features", "models"):
            for part in definition.get(field, ()) if field == "features" else ():
                kept = [one for one in definition[field] if one != part]
                yield {**case, "objects": {**case["objects"], name: {**definition, field: kept}}}
        for at, features in enumerate(definition.get("models", ())):
            for feature in features:
                models = [list(one) for one in definition["models"]]
                models[at].remove(feature)
                yield {**case, "objects": {**case["objects"], name: {**definition, "models": models}}}


# Text


def describe(case: Case) -> str:
    """Return a case as a short program."""
    lines = []
    for name, definition in case["objects"].items():
        simplest = SIMPLEST_TRAINER if definition["kind"] == "trainer" else SIMPLEST_LOOP
        fields = [f"{field}={value!r}" for field, value in definition.items() if value != simplest[field]]
        lines.append(f"{name} = {definition['kind'].capitalize()}({', '.join(fields)})")
    for section in case["sections"]:
        changes = "".join(f", {name}: {settings}" for name, settings in section["settings"].items())
        lines.append(f"with {section['size']} ranks on {section['backend']}{changes}:")
        for name, verb, argument in section["calls"]:
            lines.append(f"    {name}.{verb}({'' if argument is None else argument})")
    return "\n".join(lines)


def compact(case: Case) -> Case:
    """Return a case with only the fields of its objects that differ from the simplest object."""
    objects = {}
    for name, definition in case["objects"].items():
        simplest = SIMPLEST_TRAINER if definition["kind"] == "trainer" else SIMPLEST_LOOP
        fields = {field: value for field, value in definition.items() if value != simplest[field]}
        objects[name] = {"kind": definition["kind"], **fields}
    return {**case, "objects": objects}


def parse(found: Case) -> Case:
    """Return the case for the result of `compact`."""
    simplest = {"trainer": SIMPLEST_TRAINER, "loop": SIMPLEST_LOOP}
    objects = {name: {**simplest[value["kind"]], **value} for name, value in found["objects"].items()}
    return make_valid({**found, "objects": objects})
