"""Optimizers and samplers as users write them, in plain torch: with modes, global statistics or own generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer
from torch.utils.data import RandomSampler, Sampler


class ScheduleFree(Optimizer):
    """Schedule-free SGD. In training mode the parameters are y, the points of the gradients; in evaluation mode they
    are x, the averages that are evaluated and saved. `eval` and `train` convert between them."""

    def __init__(self, parameters: Iterable[Any], lr: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "steps": 0, "train_mode": False})

    def train(self) -> None:
        self._convert(True, lambda beta: 1 - beta)

    def eval(self) -> None:
        self._convert(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def _convert(self, train_mode: bool, weight_of: Callable[[float], float]) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != train_mode else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight_of(group["beta"]))
            group["train_mode"] = train_mode

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("ScheduleFree.step was called in evaluation mode: call optimizer.train() first.")
            group["steps"] += 1
            share, lr = 1 / group["steps"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, share).add_(parameter.grad, alpha=lr * (group["beta"] * (1 - share) - 1))
                z.sub_(parameter.grad, alpha=lr)


class GlobalScale(Optimizer):
    """Divides the gradients by a statistic of all parameters, like Prodigy and SAM: the largest norm so far."""

    def __init__(self, parameters: Iterable[Any], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "largest": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = float(sum(float(gradient.abs().square().sum()) for gradient in gradients) ** 0.5)
        for group in self.param_groups:
            group["largest"] = max(group["largest"], norm)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / (1e-3 + group["largest"]))


OPTIMIZERS: dict[str, type[Optimizer]] = {"ScheduleFree": ScheduleFree, "GlobalScale": GlobalScale}


def set_mode(optimizer: Any, train: bool) -> bool:
    """Switch an optimizer that has modes, and return whether it has modes."""
    if hasattr(optimizer, "eval"):
        optimizer.train() if train else optimizer.eval()
    return hasattr(optimizer, "eval")


class OwnGenerator(Sampler[int]):
    """A random order drawn from a generator that belongs to the sampler, without `set_epoch`."""

    def __init__(self, count: int, kind: str) -> None:
        self.count = count
        makers: dict[str, Callable[[], Any]] = {"python": lambda: random.Random(0).shuffle}
        makers |= {"numpy": lambda: np.random.default_rng(0).shuffle, "torch": self._torch_shuffle}
        self.shuffle = makers[kind]()

    def _torch_shuffle(self) -> Callable[[list[int]], None]:
        generator = torch.Generator().manual_seed(0)

        def shuffle(order: list[int]) -> None:
            order[:] = torch.randperm(len(order), generator=generator).tolist()

        return shuffle

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        self.shuffle(order)
        return iter(order)


class TwinGenerators(Sampler[int]):
    """Pairs (i, j) of two independent random orders, as the index i * count + j of a dataset of all pairs."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.first = RandomSampler(range(count), generator=torch.Generator().manual_seed(1))
        self.second = RandomSampler(range(count), generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return (i * self.count + j for i, j in zip(self.first, self.second, strict=True))
