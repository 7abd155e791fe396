"""Train the GPT of examples/gpt.py with each method of low-communication training; see low_communication.py."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hierarchical_reduction_steps import sent_bytes
from torch import Tensor, nn

import unitrain

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, LENGTH, loss_per_character, paragraphs

__all__ = ["ALONE", "BATCH", "LENGTH", "PEAK_LR", "Method", "build", "methods"]

WIDTH, LAYERS, BATCH = 128, 3, 16  # samples per rank
PEAK_LR = 2e-3
ALONE = "without communication"
DILOCO: dict[str, Any] = {"outer_lr": 0.7, "outer_momentum": 0.9}


@dataclass(frozen=True)
class Method:
    """Synchronous training with gradient `compression`, or local steps.

    `prediction` is the method's name in `unitrain bench predict`. Without communication, every rank trains alone.
    """

    compression: Any = "none"
    local: unitrain.LocalSGDConfig | None = None
    prediction: str | None = None
    communicates: bool = True


def methods(steps: int) -> dict[str, Method]:
    """Return the methods by name, with `steps` local steps."""
    return {
        ALONE: Method(communicates=False),
        "synchronous": Method(prediction="synchronous"),
        "synchronous, bf16": Method("bf16", prediction="bf16"),
        "synchronous, PowerSGD": Method(unitrain.PowerSGD(rank=4, start_step=20)),
        "local SGD": _local("local-sgd", steps),
        "DiLoCo": _local("local-sgd", steps, **DILOCO),
        "DiLoCo, bf16": _local("local-sgd-bf16", steps, compression="bf16", **DILOCO),
        "DiLoCo, int8": _local("local-sgd-int8", steps, compression="int8", **DILOCO),
        "DiLoCo, streaming": _local("streaming", steps, fragments=5, overlap_steps=5, **DILOCO),
    }


def _local(prediction: str, steps: int, **settings: Any) -> Method:
    return Method(local=unitrain.LocalSGDConfig(steps=steps, **settings), prediction=prediction)


def build() -> nn.Module:
    """Return the untrained model, equal for every method."""
    torch.manual_seed(0)
    return GPT(width=WIDTH, layers=LAYERS)


def samples() -> tuple[Tensor, Tensor]:
    """Return the texts for training and validation, [texts, length + 1]."""
    inputs, targets = paragraphs().tensors
    texts = torch.cat([inputs, targets[:, -1:]], dim=1)
    texts = texts[torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))]
    return texts[500:], texts[:500]


def mean_loss(model: nn.Module, texts: Tensor) -> Tensor:
    """Return the loss per character."""
    total, count = loss_per_character(model(texts[:, :-1]), texts[:, 1:])
    return total / count


def train(backend: unitrain.Backend, method: Method, steps: int, evaluate_every: int, seed: int) -> dict[str, Any]:
    """Return the seconds, bytes sent by this host, and validation losses of a run.

    The validation is not included in the seconds and bytes, and all ranks evaluate the same texts.
    """
    texts, validation = samples()
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=steps + 1, pct_start=0.1)
    local = None if method.local is None else unitrain.LocalSGD(model, optimizer, backend, method.local)
    wrapped = model
    if local is None and method.communicates:
        wrapped = backend.distributed_model(model, compression=method.compression)
        backend.distributed_optimizer(optimizer, wrapped)
    generator = torch.Generator().manual_seed(1000 * seed + backend.rank)
    seconds, sent, curve = 0.0, 0, []
    for first in range(0, steps, evaluate_every):
        backend.barrier()
        before, start = sent_bytes(), time.perf_counter()
        for _ in range(evaluate_every):
            own = texts[torch.randint(len(texts), (BATCH,), generator=generator)]
            mean_loss(wrapped, own).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if local is not None:
                local.step()
        sent += sent_bytes() - before
        backend.barrier()
        seconds += time.perf_counter() - start
        if local is not None and first + evaluate_every == steps:
            local.synchronize()
        with torch.no_grad(), local.averaged_weights() if local is not None else torch.no_grad():
            losses = [mean_loss(model, part) for part in validation.split(100)]
        curve.append((seconds, float(torch.stack(losses).mean())))
    return {"seconds": seconds, "bytes": sent, "curve": curve}


def main() -> None:
    """Run each method, and print the results. The arguments are a JSON object; see low_communication.py."""
    given = json.loads(sys.argv[1])
    with unitrain.init(device="cpu") as backend:
        results: dict[str, list[dict[str, Any]]] = {}
        chosen = methods(given["local_steps"])
        train(backend, chosen["synchronous"], 2, 2, 0)  # warm-up
        for name in given["methods"]:
            for seed in range(given["seeds"]):
                found = train(backend, chosen[name], given["steps"], given["evaluate_every"], seed)
                results.setdefault(name, []).append(found)
        if backend.rank == 0:
            print(json.dumps({"results": results}))


if __name__ == "__main__":
    main()
