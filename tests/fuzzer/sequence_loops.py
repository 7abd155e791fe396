"""A training loop with one or two models, loaders and optimizers, in plain torch. Ranks and the oracle share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import parts
from .sequences import optimizer_settings
from .user_objects import set_mode

Case = dict[str, Any]


def samples(case: Case, loader: int) -> tuple[Tensor, Tensor]:
    """Return the samples of a loader. Column 0 of the inputs is the index of the sample."""
    data = {"seed": case["seed"], "samples": case["loaders"][loader], "loss": "mse"}
    return parts.samples(data, offset=30 + loader)


class Loop:
    """The objects of a loop. `called` are the models that a step calls, and `rank` is the rank that computes it."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        self.models = [
            parts.Network({"seed": case["seed"] + number, "features": features})
            for number, features in enumerate(case["models"])
        ]
        self.called: list[nn.Module] = list(self.models)
        self.optimizers: list[torch.optim.Optimizer] = [
            parts.create_optimizer(
                {"optimizer": name, "optimizer_settings": optimizer_settings(name)}, model, late=False
            )
            for name, model in zip(case["optimizers"], self.models, strict=True)
        ]

    def output(self, x: Tensor) -> Tensor:
        """Return the output of the models for inputs `x`. With `swap`, odd ranks call the models in another order."""
        if len(self.called) == 1:
            return self.called[0](x)
        first, second = self.called[::-1] if self.case["swap"] and self.rank % 2 else self.called

        def join(hidden: Tensor) -> Tensor:
            return torch.cat([x[:, :2], hidden], 1)

        if self.case["compose"] == "sum":
            return first(x) + second(x)
        if self.case["compose"] == "chain":
            return second(join(first(x)))
        hidden = join(x[:, 2:]) if self.rank % 2 else join(first(x))
        return first(join(second(hidden)))

    def step(self, compute_loss: Callable[[], Tensor]) -> None:
        """Train one step."""

        def closure() -> Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = compute_loss()
            loss.backward()
            return loss

        if self.case["optimizers"] == ["LBFGS"]:
            self.optimizers[0].step(closure)
            return
        closure()
        for optimizer in self.optimizers:
            optimizer.step()

    def evaluate(self, _: Any) -> Tensor:
        """Return the outputs for the samples of the first loader, in evaluation mode."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model.eval()
            set_mode(optimizer, train=False)
        with torch.no_grad():
            plain, self.called = self.called, list(self.models)
            rank, self.rank = self.rank, 0
            output = self.output(samples(self.case, 0)[0])
            self.called, self.rank = plain, rank
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model.train()
            set_mode(optimizer, train=True)
        return output

    def freeze(self, _: Any) -> None:
        self.models[0].first.requires_grad_(False)

    def unfreeze(self, _: Any) -> None:
        self.models[0].first.requires_grad_(True)

    def parameters(self) -> list[dict[str, Tensor]]:
        """Return copies of the parameters of each model."""
        return [{name: p.detach().clone() for name, p in model.named_parameters()} for model in self.models]
