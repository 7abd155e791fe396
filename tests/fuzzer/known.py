"""The smallest cases of defects that the fuzzer has found. CI runs these cases."""

from __future__ import annotations

from typing import Any

from .cases import SIMPLEST, make_valid
from .collectives import MANY_ROWS
from .sequences import parse

Case = dict[str, Any]
FORWARD, BACKWARD = ["forward", True, True, "all"], ["backward", 0, True, False]


def _segment(backend: str, size: int, end: list[Any] | None = None, accumulate: int = 1) -> Case:
    return {"backend": backend, "size": size, "accumulate": accumulate, "end": end}


def _loop(steps: list[list[list[Any]]], **fields: Any) -> Case:
    simplest = {"kind": "loop", "seed": 0, "backend": "ddp", "size": 2, "unused": False, "output": "tensor"}
    return {**simplest, "compression": "none", "steps": steps, **fields}


def _collective(call: list[Any], **fields: Any) -> Case:
    return {"kind": "collective", "seed": 0, "backend": "ddp", "size": 2, "calls": [call], **fields}


ON_TWO_RANKS = [_segment("ddp", 2)]
LOADER: Case = {"loader": True, "source": "map"}
STREAM: Case = {"loader": True, "source": "shared"}

_TRAINER: dict[str, Case] = {
    "a buffer that forward reads, with step checkpoints": {
        "features": ["buffer"],
        "epochs": 3,
        "checkpoint_every_steps": 3,
        "segments": ON_TWO_RANKS,
    },
    "a buffer that forward reads, with validation": {
        "features": ["buffer"],
        "epochs": 3,
        "validation": "tensors",
        "segments": ON_TWO_RANKS,
    },
    "the loss of an epoch that was interrupted": {
        "segments": [_segment("local", 1, ["steps", 1]), _segment("local", 1)]
    },
    "ReduceLROnPlateau after an interruption inside an epoch": {
        "scheduler": "ReduceLROnPlateau",
        "epochs": 4,
        "segments": [_segment("local", 1, ["steps", 3]), _segment("local", 1)],
    },
    "MultiStepLR after a resume": {
        "scheduler": "MultiStepLR",
        "epochs": 3,
        "segments": [_segment("local", 1, ["steps", 2]), _segment("local", 1)],
    },
    "a callback that keeps a Counter": {
        "counting": "Counter",
        "epochs": 2,
        "segments": [_segment("local", 1, ["steps", 2]), _segment("local", 1)],
    },
    "a callback that keeps a defaultdict": {
        "counting": "defaultdict",
        "epochs": 2,
        "segments": [_segment("local", 1, ["steps", 2]), _segment("local", 1)],
    },
    "persistent workers and an output folder": {**LOADER, "workers": 1, "persistent": True, "output": True},
    "an exception with workers of a stream": {
        **STREAM,
        "workers": 1,
        "epochs": 2,
        "segments": [_segment("ddp", 2, ["raise", 1]), _segment("ddp", 2)],
    },
    "a SequentialSampler over a part": {**LOADER, "sampler": "sequential_part"},
    "a RandomSampler over a part": {**LOADER, "sampler": "random_part"},
    "validation with a sampler over a part": {"validation": "part"},
    "a stream of batches that reuses its memory": {
        "source": "batches",
        "reuse": True,
        "samples": 24,
        "segments": [_segment("ddp", 2)],
    },
    "a stream with a random collate function, interrupted": {
        **STREAM,
        "collate": "noise",
        "samples": 24,
        "segments": [_segment("local", 1, ["steps", 2]), _segment("local", 1)],
    },
    "a stream with a random collate function, stopped": {
        **STREAM,
        "collate": "noise",
        "samples": 24,
        "segments": [_segment("ddp", 2, ["stop", 2]), _segment("ddp", 2)],
    },
    "a validation that draws random numbers, in an interrupted epoch": {
        **STREAM,
        "collate": "noise",
        "samples": 24,
        "validation": "map",
        "segments": [_segment("local", 1, ["steps", 2]), _segment("local", 1)],
    },
    "early stopping after interruptions": {
        "early_stopping": ["val_loss", 2],
        "validation": "tensors",
        "optimizer_settings": {"lr": 0.0},
        "epochs": 5,
        "segments": [_segment("local", 1, ["steps", 1]), _segment("local", 1, ["steps", 3]), _segment("local", 1)],
    },
    "a parameter group added in the run, with clipping": {"change": ["add", 1], "clip": 0.05, "epochs": 2},
    "a parameter group added in the run, with tokens": {"change": ["add", 1], "loss": "tokens", "epochs": 2},
    "complex parameters with compression": {"features": ["complex"], "compression": "fp16"},
    "a gradient inside forward with compression and accumulation": {
        "features": ["penalty"],
        "compression": "fp16",
        "segments": [_segment("local", 1, None, 2)],
    },
    "a gradient inside forward with PowerSGD and accumulation": {
        "features": ["penalty"],
        "compression": "powersgd",
        "epochs": 2,
        "segments": [_segment("local", 1, None, 2)],
    },
    "an embedding with max_norm": {"features": ["max_norm"], "epochs": 2, "segments": ON_TWO_RANKS},
    "evaluation of own streams with drop_last": {
        "source": "own",
        "loader": True,
        "validation": "own",
        "validation_drop_last": True,
    },
    "a branch that only a dummy batch reaches": {
        "source": "batches",
        "samples": 14,
        "features": ["branch"],
        "optimizer": "AdamW",
        "optimizer_settings": {"lr": 0.01, "weight_decay": 0.1},
        "epochs": 3,
        "segments": [_segment("ddp", 3)],
    },
    "a dummy batch of rank 0 and BatchNorm": {
        "source": "own",
        "loader": True,
        "samples": 13,
        "features": ["norm"],
        "epochs": 2,
        "segments": [_segment("ddp", 2)],
    },
    "a collate function that leaves samples out": {
        **LOADER,
        "collate": "skip",
        "samples": 17,
        "segments": ON_TWO_RANKS,
    },
    "a collate function that leaves samples out of an evaluation": {"validation": "skip"},
    "a metric that returns the same tensor": {"validation": "map", "metrics": ["in_place"]},
    "a Subset with a negative index": {"source": "subset", "negative": True},
    "NormalizedRootMeanSquaredError on three ranks": {
        "validation": "tensors",
        "metrics": ["NormalizedRootMeanSquaredError"],
        "segments": [_segment("ddp", 3)],
    },
    "a resume after an exception": {
        "checkpoint_every_steps": 1,
        "epochs": 3,
        "segments": [_segment("ddp", 2, ["raise", 3]), _segment("ddp", 2)],
    },
    "a checkpoint at the last step of an epoch that did not end": {
        "checkpoint_every_steps": 1,
        "scheduler": "ReduceLROnPlateau",
        "optimizer_settings": {"lr": 0.3},
        "validation": "tensors",
        "epochs": 3,
        "segments": [_segment("local", 1, ["raise after epoch", 2]), _segment("local", 1)],
    },
    "fit once more after an exception in a micro-step": {
        "again": ["on_micro_batch_end", 4],
        "epochs": 3,
        "segments": [_segment("ddp", 2, None, 3)],
    },
    "fit once more after an exception before a step": {"again": ["on_before_optimizer_step", 2], "loss": "tokens"},
    "fit once more after an exception after a step": {
        "again": ["on_step_end", 3],
        "epochs": 2,
        "segments": ON_TWO_RANKS,
    },
    "a part that is unfrozen while another is used in some micro-steps only": {
        "seed": 11,
        "global_batch": 12,
        "features": ["branch"],
        "change": ["unfreeze", 4],
        "epochs": 6,
        "segments": [_segment("ddp", 2, None, 2)],
    },
    "Adafactor and a parameter group added in the run": {
        "features": ["late"],
        "optimizer": "Adafactor",
        "change": ["add", 2],
        "segments": ON_TWO_RANKS,
    },
    "CyclicLR after a resume on two ranks": {
        "scheduler": "CyclicLR",
        "epochs": 2,
        "segments": [_segment("ddp", 2, ["steps", 2]), _segment("ddp", 2)],
    },
    "complex128 parameters in a checkpoint": {"features": ["complex"], "output": True},
    "compression of a model whose output hides its tensors": {"features": ["object"], "compression": "fp16"},
    "an output without visible tensors and unused parameters": {
        "features": ["object", "unused"],
        "segments": ON_TWO_RANKS,
    },
}
CASES: dict[str, Case] = {
    **{name: make_valid({**SIMPLEST, **fields}) for name, fields in _TRAINER.items()},
    "a step after no_sync": _loop([[["forward", False, True, "all"], ["backward", 0, False, False]]]),
    "forward in no_sync, backward outside": _loop([[["forward", False, True, "all"], BACKWARD]]),
    "backward in no_sync, forward outside": _loop([[FORWARD, ["backward", 0, False, False]]]),
    "backward in no_sync, forward outside, with a hidden output and unused parameters": _loop(
        [[FORWARD, ["backward", 0, False, False]]], output="object", unused=True
    ),
    "the unwrapped model": _loop([[["forward", True, False, "all"], BACKWARD]]),
    "a hidden output and a retained graph": _loop([[FORWARD, ["backward", 0, True, True], BACKWARD]], output="object"),
    "a step after no_sync on horovod": _loop(
        [[["forward", False, True, "all"], ["backward", 0, False, False]]], backend="horovod"
    ),
    "nan of rank 0 in max": _collective(["backend", "allreduce", "max", "float32", MANY_ROWS, "nan"]),
    "nan of rank 1 in max": _collective(["backend", "allreduce", "max", "float32", MANY_ROWS, "nan"], seed=1),
    "nan of rank 2 in min": _collective(["backend", "allreduce", "min", "float64", MANY_ROWS, "nan"], seed=2, size=3),
    "nan in max on horovod": _collective(["group", "all_reduce", "max", "float32", 1, "nan"], backend="horovod"),
    "the gradient of an allgather": _collective(["backend", "differentiable_allgather", "sum", "float32", 1, "plain"]),
    "a coalesced reduction that ends with an empty tensor": _collective(
        ["group", "coalesced", "sum", "float32", 1, "plain"], backend="horovod"
    ),
    "complex numbers in reduce": _collective(["group", "reduce", "sum", "complex64", 1, "plain"], backend="horovod"),
    "complex numbers in reduce_scatter": _collective(
        ["group", "reduce_scatter", "sum", "complex64", 1, "plain"], backend="horovod"
    ),
    "large uint32 in max": _collective(["group", "all_reduce", "max", "uint32", 1, "large"], backend="horovod"),
    "fractions of float8 in sum": _collective(
        ["group", "all_reduce", "sum", "float8_e4m3fn", 1, "plain"], backend="horovod"
    ),
    "large uint64 in sum": _collective(["group", "all_reduce", "sum", "uint64", 1, "large"], backend="horovod"),
}

# Sequences of calls. `_program` has a section for each list of calls, on the layouts in this order.


def _program(objects: Case, *sections: tuple[str, int, list[list[Any]]], settings: Case | None = None) -> Case:
    parts = [{"backend": backend, "size": size, "settings": {}, "calls": calls} for backend, size, calls in sections]
    parts[-1]["settings"] = settings or {}
    return parse({"kind": "sequence", "seed": 0, "objects": objects, "sections": parts})


def _trainer(**fields: Any) -> Case:
    return {"t0": {"kind": "trainer", "validation": "tensors", **fields}}


def _own_loop(**fields: Any) -> Case:
    return {"l0": {"kind": "loop", **fields}}


FIT, BEST, RUN = ["t0", "fit", None], ["t0", "best", None], ["l0", "run", 3]
GENERATORS = {"source": "map", "loader": True, "samples": 18}
SEQUENCES: dict[str, Case] = {
    **{
        f"two models that are reduced in another order on rank 1, on {backend}": _program(
            _own_loop(models=[[], []], optimizers=["SGD", "SGD"], compose="sandwich", unused=True),
            (backend, 2, [RUN]),
        )
        for backend in ("ddp", "horovod")
    },
    "two models that rank 1 calls in another order": _program(
        _own_loop(models=[[], []], optimizers=["SGD", "SGD"], compose="chain", swap=True), ("ddp", 2, [RUN])
    ),
    "a dummy batch of one loader and the statistics of another": _program(
        _own_loop(models=[["sync_norm"]], loaders=[12, 7]), ("ddp", 2, [RUN])
    ),
    "sharding of parameters that share memory": _program(
        _trainer(features=["alias"], shard="state"), ("ddp", 3, [FIT])
    ),
    "sharding of parameters that share memory, in a loop": _program(
        _own_loop(models=[["alias"]], shard="state"), ("horovod", 3, [RUN])
    ),
    "an optimizer with modes, evaluated": _program(
        _trainer(optimizer="ScheduleFree", optimizer_settings={"lr": 0.1}, samples=24), ("ddp", 2, [FIT])
    ),
    "an optimizer with modes, saved": _program(
        _trainer(optimizer="ScheduleFree", optimizer_settings={"lr": 0.1}, samples=24, keep_best="train_loss",
                 validation=None), ("ddp", 2, [FIT, BEST])
    ),
    "sharding of an optimizer with a global statistic": _program(
        _own_loop(optimizers=["GlobalScale"], shard="state"), ("ddp", 2, [RUN])
    ),
    "sharding of an optimizer with modes": _program(
        _trainer(optimizer="ScheduleFree", optimizer_settings={"lr": 0.1}, shard="state"), ("ddp", 2, [FIT])
    ),
    "a cosine schedule resumed with more epochs": _program(
        _trainer(scheduler="sized_cosine", output=True), ("ddp", 2, [FIT]), ("local", 1, [FIT]),
        settings={"t0": {"epochs": 4}},
    ),
    "OneCycleLR resumed with more epochs": _program(
        _trainer(scheduler="sized_one_cycle", output=True), ("ddp", 2, [["t0", "fit", ["stop", 2]]]),
        ("horovod", 2, [FIT]), settings={"t0": {"epochs": 4}},
    ),
    "a planned schedule and other data in the same process": _program(
        _trainer(scheduler="planned_cosine", source="map", data_change="grow", data_change_at="call", epochs=3),
        ("ddp", 2, [["t0", "fit", ["stop", 2]], ["t0", "change", "data"], FIT]),
    ),
    "the best checkpoint at the last step": _program(
        _trainer(samples=24, max_steps=3, checkpoint_every_steps=1, keep_best="val_loss"), ("ddp", 2, [FIT, BEST])
    ),
    "the best checkpoint at a stop": _program(
        _trainer(checkpoint_every_steps=1, keep_best="val_loss", keep_last=1, samples=24, change=["lr", 1]),
        ("ddp", 2, [["t0", "fit", ["stop", 1]], BEST]),
    ),
    **{
        f"the scheduler after {what} in the validation": _program(
            _trainer(scheduler="StepLR", scheduler_every="epoch", epochs=4),
            ("ddp", 2, [["t0", "fit", [place, 1]], FIT]),
        )
        for what, place in {"Ctrl-C": "interrupt", "a failing metric": "metric"}.items()
    },
    **{
        f"a sampler with a generator of {kind}": _program(
            _trainer(**GENERATORS, sampler=kind), ("ddp", 2, [["t0", "fit", ["stop", 2]], FIT])
        )
        for kind in ("python", "numpy")
    },
    "two generators of a sampler": _program(_trainer(**GENERATORS, sampler="twins"), ("ddp", 2, [FIT])),
    "tensors replaced between epochs": _program(_trainer(data_change="tensors", epochs=3), ("ddp", 2, [FIT])),
    "indices replaced between epochs": _program(
        _trainer(source="subset", data_change="indices", epochs=3), ("ddp", 2, [FIT])
    ),
    "a dataset that grows": _program(_trainer(source="map", data_change="grow", epochs=3), ("ddp", 2, [FIT])),
    "a loss function that returns the accuracy": _program(
        _trainer(loss="accuracy", samples=24, global_batch=12), ("ddp", 2, [FIT])
    ),
    "LBFGS with a line search": _program(_own_loop(optimizers=["LBFGS"]), ("ddp", 2, [["l0", "run", 5]])),
}  # fmt: skip
CASES |= SEQUENCES
