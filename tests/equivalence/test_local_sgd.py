"""Local SGD through the Trainer, compared with a simulation of all ranks in plain torch and with synchronous training.
Interrupted runs are compared with uninterrupted runs. The contract suite tests `LocalSGD` in a training loop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from unitrain import Callback, LocalSGDConfig, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.capabilities import SupportsPointToPoint
from unitrain.backends.local import LocalBackend
from unitrain.checkpoint import files
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
SAMPLES, GLOBAL_BATCH, EPOCHS, SEED = 67, 12, 3, 6  # the last step of an epoch has 7 samples
DECAY = 0.8
PLAIN = LocalSGDConfig(steps=4)
DILOCO = LocalSGDConfig(steps=4, outer_lr=0.7, outer_momentum=0.9)
COMPRESSED = LocalSGDConfig(steps=4, outer_lr=0.7, outer_momentum=0.9, compression="int8")
STREAMING = LocalSGDConfig(steps=4, outer_lr=0.7, outer_momentum=0.9, fragments=2, overlap_steps=3)
GROUPED = LocalSGDConfig(
    steps=4,
    outer_lr=0.7,
    outer_momentum=0.9,
    compression="int8",
    fragments=2,
    overlap_steps=2,
    synchronous_ranks="host",
)
# Settings of the Trainer. "optimizer" selects the inner optimizer, and "tokens" selects a loss over tokens.
CASES: dict[str, dict[str, Any]] = {
    "local SGD": {"local_sgd": 4},
    "post-local SGD": {"local_sgd": LocalSGDConfig(steps=4, warmup_steps=5), "ema_decay": DECAY},
    "DiLoCo": {"local_sgd": DILOCO, "optimizer": "adamw", "max_grad_norm": 0.3},
    "accumulated": {"local_sgd": DILOCO, "gradient_accumulation_steps": 2, "count": 60},
    "tokens": {"local_sgd": LocalSGDConfig(steps=4, warmup_steps=3), "tokens": True},
    "average": {"local_sgd": DILOCO, "ema_decay": DECAY},
    "streaming": {"local_sgd": STREAMING, "optimizer": "adamw", "max_grad_norm": 0.3, "ema_decay": DECAY},
    "streaming, accumulated": {"local_sgd": STREAMING, "gradient_accumulation_steps": 2, "count": 60},
}
FRAGMENTS = (("0.weight", "0.bias"), ("1.weight", "1.bias", "3.weight", "3.bias"))  # parameter names


def network(norm: Any = nn.BatchNorm1d) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 16), norm(16), nn.Tanh(), nn.Linear(16, 4)).double()


def data(count: int = SAMPLES, seed: int = 5) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 4, (count,), generator=generator))


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def summed_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return the summed loss and the number of tokens, which differs between ranks."""
    tokens = 1 + 3 * target
    return (nn.functional.cross_entropy(output, target, reduction="none") * tokens).sum(), tokens.sum()


def make_trainer(backend: Backend, model: nn.Module, **settings: Any) -> Trainer:
    optimizer_name, tokens = settings.pop("optimizer", "sgd"), settings.pop("tokens", False)
    callbacks = settings.pop("callbacks", ())
    batch_size = GLOBAL_BATCH // backend.size // settings.get("gradient_accumulation_steps", 1)
    defaults = {"max_epochs": EPOCHS, "batch_size": batch_size, "seed": SEED, "progress": "off"}
    if "max_steps" in settings:
        defaults.pop("max_epochs")
    loss_fn = summed_loss if tokens else nn.functional.cross_entropy
    config = TrainConfig(**{**defaults, **settings})
    return Trainer(
        model, optimizer_of(model, optimizer_name), loss_fn, backend=backend, config=config, callbacks=callbacks
    )


def flat_state(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in model.state_dict().values()])


def fit(backend: Backend, settings: dict[str, Any], validation: bool = True) -> dict[str, Any]:
    """Train, and return the results and the final states of the model and of its average."""
    settings = dict(settings)
    count = settings.pop("count", SAMPLES)
    model = network(settings.pop("norm", nn.BatchNorm1d))
    trainer = make_trainer(backend, model, **settings)
    results = trainer.fit(data(count), data(30, seed=8) if validation else None)
    average = trainer.averaged_model
    return {"model": flat_state(model), "average": None if average is None else flat_state(average), "results": results}


class Simulation:
    """Simulates all ranks in one process with plain torch."""

    def __init__(self, size: int, settings: dict[str, Any]) -> None:
        given = settings["local_sgd"]
        self.size, self.settings = size, settings
        self.local = LocalSGDConfig(steps=given) if isinstance(given, int) else given
        self.models = [network() for _ in range(size)]
        self.optimizers = [optimizer_of(model, settings.get("optimizer", "sgd")) for model in self.models]
        self.outer = network()
        momentum = self.local.outer_momentum
        self.outer_optimizer = torch.optim.SGD(
            self.outer.parameters(), lr=self.local.outer_lr, momentum=momentum, nesterov=momentum > 0
        )
        self.average: AveragedModel | None = None
        self.steps = self.steps_since_synchronization = 0
        self.transfers: dict[int, tuple[int, dict[str, Tensor]]] = {}

    def run(self) -> nn.Module:
        """Train, and return the mean of the models."""
        count = self.settings.get("count", SAMPLES)
        inputs, targets = data(count).tensors
        for epoch in range(EPOCHS):
            order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED + epoch))
            for positions in order.split(GLOBAL_BATCH):
                self.step(
                    [(inputs[own], targets[own]) for own in (positions[r :: self.size] for r in range(self.size))]
                )
        return self.mean()

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        is_warm_up = self.steps < self.local.warmup_steps
        total = sum(len(targets) for _, targets in batches)
        total_tokens = sum((1 + 3 * targets).sum() for _, targets in batches)
        for model, (inputs, targets) in zip(self.models, batches, strict=True):
            losses = nn.functional.cross_entropy(self.forward(model, inputs), targets, reduction="none")
            if self.settings.get("tokens"):
                tokens = 1 + 3 * targets
                divisor = total_tokens / self.size if is_warm_up else tokens.sum()
                loss = (losses * tokens).sum() / divisor
            else:
                loss = losses.sum() * self.size / total
            loss.backward()
        if is_warm_up:
            for parameters in zip(*(model.parameters() for model in self.models), strict=True):
                mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
                for parameter in parameters:
                    parameter.grad = mean.clone()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if "max_grad_norm" in self.settings:
                nn.utils.clip_grad_norm_(model.parameters(), self.settings["max_grad_norm"])
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        if is_warm_up:
            self.outer.load_state_dict(self.models[0].state_dict())
            self.update_average(1)
            return
        self.steps_since_synchronization += 1
        if self.local.fragments > 1:
            for index in range(2):
                self.update_fragment(index, self.steps - self.local.warmup_steps)
        if self.steps_since_synchronization == self.local.steps:
            self.steps_since_synchronization = 0
            self.synchronize()
            self.update_average(self.local.steps)

    def forward(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Process the micro-batches separately, because each has its own BatchNorm statistics."""
        micro_batches = self.settings.get("gradient_accumulation_steps", 1)
        return torch.cat([model(part) for part in inputs.chunk(micro_batches)])

    def update_fragment(self, index: int, step: int) -> None:
        """Start the transfer of a fragment after `step` if it is due, and merge a completed transfer."""
        names, steps = FRAGMENTS[index], self.local.steps
        start = steps // 2 if index == 0 else steps
        if index in self.transfers and self.transfers[index][0] == step:
            outer = dict(self.outer.named_parameters())
            for name, gradient in self.transfers.pop(index)[1].items():
                outer[name].grad = gradient
            self.outer_optimizer.step()
            self.outer_optimizer.zero_grad()
            for model in self.models:
                for name in names:
                    own = model.get_parameter(name).data
                    own.copy_(self.local.mixing * own + (1 - self.local.mixing) * outer[name].data)
        if (step - start) % steps == 0:
            mean = self.mean()
            gradients = {name: self.outer.get_parameter(name).data - mean.get_parameter(name).data for name in names}
            self.transfers[index] = (step + self.local.overlap_steps, gradients)

    def synchronize(self) -> None:
        mean = self.mean()
        if self.local.fragments > 1:
            for model in (self.outer, *self.models):
                for buffer, target in zip(model.buffers(), mean.buffers(), strict=True):
                    buffer.copy_(target)
            return
        for parameter, target in zip(self.outer.parameters(), mean.parameters(), strict=True):
            parameter.grad = parameter.detach() - target.detach()
        self.outer_optimizer.step()
        for buffer, target in zip(self.outer.buffers(), mean.buffers(), strict=True):
            buffer.copy_(target)
        for model in self.models:
            model.load_state_dict(self.outer.state_dict())

    def mean(self) -> nn.Module:
        states = [model.state_dict() for model in self.models]
        result = network()
        result.load_state_dict(
            {name: torch.stack([s[name].double() for s in states]).mean(0).to(v.dtype) for name, v in states[0].items()}
        )
        return result

    def update_average(self, steps: int) -> None:
        if self.average is None:
            self.average = AveragedModel(self.outer)
            self.average.update_parameters(self.outer)
        else:
            self.average.multi_avg_fn = get_ema_multi_avg_fn(DECAY**steps)
            self.average.update_parameters(self.outer)


def validation_loss(model: nn.Module, *, tokens: bool) -> float:
    model.eval()
    inputs, targets = data(30, seed=8).tensors
    with torch.no_grad():
        if tokens:
            total, count = summed_loss(model(inputs), targets)
            return (total / count).item()
        return nn.functional.cross_entropy(model(inputs), targets).item()


@pytest.mark.parametrize("case", CASES)
def test_trainer_equals_simulated_ranks(launch_results: LaunchResults, case: str) -> None:
    initial = flat_state(network())
    for size in (1, 2, 3):
        simulation = Simulation(size, CASES[case])
        expected = simulation.run()
        assert (flat_state(expected) - initial).abs().max() > 0.1
        wanted = expected
        if simulation.average is not None and "ema_decay" in CASES[case]:
            wanted = simulation.average.module
            wanted.load_state_dict({**wanted.state_dict(), **dict(simulation.outer.named_buffers())})
        for result in results_of_size(launch_results, size):
            found = result["fits"][case]
            # AdamW amplifies the rounding errors of gradients that are zero in exact arithmetic.
            torch.testing.assert_close(found["model"], flat_state(expected), rtol=0, atol=1e-8)
            if "ema_decay" in CASES[case]:
                torch.testing.assert_close(found["average"], flat_state(wanted), rtol=0, atol=1e-8)
            loss = validation_loss(wanted, tokens=CASES[case].get("tokens", False))
            assert found["results"]["val_loss"] == pytest.approx(loss, abs=1e-9)


SYNCHRONOUS: dict[str, dict[str, Any]] = {
    "accumulated": {"norm": nn.LayerNorm, "gradient_accumulation_steps": 2, "count": 60},
    "average": {"norm": nn.LayerNorm, "ema_decay": DECAY},
}


def test_one_local_step_equals_synchronous_training(launch_results: LaunchResults) -> None:
    """Some cases have an uneven last step. They use LayerNorm, because BatchNorm over two samples amplifies rounding
    errors."""
    initial = flat_state(network(nn.LayerNorm))
    for size in (1, 2, 3):
        for name in SYNCHRONOUS:
            for result in results_of_size(launch_results, size):
                found, expected = result["one step"][name], result["synchronous"][name]
                for kind in ("model", "average") if expected["average"] is not None else ("model",):
                    assert (found[kind] - expected[kind]).abs().max() <= 1e-12
                    assert (found[kind] - initial).abs().max() > 0.1


def parameters_only(values: Tensor) -> Tensor:
    """Return the part of `flat_state(model)` that contains parameters."""
    model = network()
    kept = [name in dict(model.named_parameters()) for name in model.state_dict()]
    parts = values.split([tensor.numel() for tensor in model.state_dict().values()])
    return torch.cat([part for part, is_parameter in zip(parts, kept, strict=True) if is_parameter])


def train_in_float32(backend: Backend, local_sgd: LocalSGDConfig, precision: str) -> Tensor:
    model = network().float()
    inputs, targets = data().tensors
    trainer = make_trainer(backend, model, local_sgd=local_sgd, precision=precision, optimizer="adamw")
    trainer.fit(TensorDataset(inputs.float(), targets))
    return flat_state(model)


FLOAT32 = {
    "averaged": (PLAIN, "fp32"),
    "DiLoCo": (DILOCO, "fp32"),
    "bf16": (LocalSGDConfig(steps=2, outer_lr=0.7, outer_momentum=0.9, compression="bf16"), "bf16"),
    "int8": (COMPRESSED, "fp32"),
    "streaming": (STREAMING, "fp32"),
    "groups": (GROUPED, "fp32"),
}


@pytest.mark.parametrize("case", FLOAT32)
def test_backends_agree_in_float32(launch_results: LaunchResults, case: str) -> None:
    compressed = FLOAT32[case][0].compression != "none"
    for size in (2, 3):
        results = [result["float32"][case] for result in results_of_size(launch_results, size)]
        for found in results:
            assert found.isfinite().all()
            # The transport determines the summation order of an uncompressed sum over three ranks.
            assert (found - results[0]).abs().max() <= (0 if compressed or size == 2 else 1e-6)


class Evaluating(Callback):
    """Evaluates and predicts after each step."""

    def on_step_end(self, trainer: Trainer) -> None:
        trainer.evaluate(data(10))
        trainer.predict(data(10))


def run_with_and_without_evaluation(backend: Backend, folder: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the results of two runs. The second run also evaluates, predicts and saves a checkpoint after each
    step."""
    local_sgd = GROUPED if isinstance(backend, SupportsPointToPoint) else COMPRESSED
    settings = {"local_sgd": local_sgd, "optimizer": "adamw", "max_steps": 9}
    often = {"output_dir": folder, "checkpoint_every_steps": 1, "validate_every_steps": 1, "callbacks": [Evaluating()]}
    return fit(backend, settings, validation=False), fit(backend, {**settings, **often})


def test_evaluation_and_checkpoints_do_not_change_training(launch_results: LaunchResults) -> None:
    for _, results in launch_results:
        for result in results:
            undisturbed, often = result["with evaluation"]
            assert torch.equal(undisturbed["model"], often["model"])


def checkpoint_weights(folder: Path, step: int) -> dict[str, Tensor]:
    model = network()
    files.load_model_file(model, folder / f"step-{step:09d}" / files.MODEL)
    return model.state_dict()


INTERRUPTED = {
    "DiLoCo, full": (COMPRESSED, "full"),
    "DiLoCo, sharded": (COMPRESSED, "sharded"),
    "streaming, full": (replace(STREAMING, compression="int8", overlap_steps=2), "full"),
    "groups, sharded": (GROUPED, "sharded"),
}


@pytest.mark.parametrize("case", INTERRUPTED)
def test_run_interrupted_ten_times_on_two_backends_is_bit_equal(
    two_groups: list[RankGroup], case: str, tmp_path: Path
) -> None:
    local_sgd, checkpoint_format = INTERRUPTED[case]
    settings = {"local_sgd": local_sgd, "optimizer": "adamw", "ema_decay": DECAY}
    expected = two_groups[0].run(fit, {**settings, "max_steps": 11}, timeout_seconds=120)[0]
    saved = {"output_dir": str(tmp_path), "resume": True, "checkpoint_format": checkpoint_format}
    for steps in range(1, 12):
        results = two_groups[steps % 2].run(fit, {**settings, **saved, "max_steps": steps}, timeout_seconds=120)
    for result in results:
        assert torch.equal(result["model"], expected["model"])
        assert torch.equal(result["average"], expected["average"])
        assert result["results"] == results[0]["results"]
    if case == "DiLoCo, full":
        folder = tmp_path / "step-000000011"
        training = torch.load(folder / "training.pt", weights_only=True)["local_sgd"]
        assert len(training["ranks"]) == 2
        assert training["steps_since_synchronization"] == 3
        assert not torch.equal(*(one["weights"]["0.weight"] for one in training["ranks"])), "weights must differ"
        weights = torch.stack([rank["weights"]["0.weight"] for rank in training["ranks"]]).mean(0)
        torch.testing.assert_close(checkpoint_weights(tmp_path, 11)["0.weight"], weights, rtol=0, atol=1e-12)


def evaluate_and_continue(backend: Backend, settings: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Resume a run, evaluate it and continue its training. Return the loss before training, and the results."""
    trainer = make_trainer(backend, network(), **settings)
    loss = trainer.evaluate(data(30, seed=8))["loss"]
    return loss, trainer.fit(data(), data(30, seed=8))


def test_run_resumes_on_other_numbers_of_ranks(two_groups: list[RankGroup], tmp_path: Path) -> None:
    settings = {"local_sgd": COMPRESSED, "optimizer": "adamw", "output_dir": str(tmp_path), "resume": True}
    before = two_groups[0].run(fit, {**settings, "max_steps": 6}, timeout_seconds=120)[0]["results"]
    (loss, results) = evaluate_and_continue(LOCAL, {**settings, "max_steps": 13})
    assert loss == pytest.approx(before["val_loss"], abs=1e-12)
    for loss, _ in two_groups[1].run(evaluate_and_continue, {**settings, "max_steps": 18}, timeout_seconds=120):
        assert loss == pytest.approx(results["val_loss"], abs=1e-12)


def test_checkpoint_resumes_with_and_without_local_sgd(tmp_path: Path) -> None:
    saved = {"output_dir": str(tmp_path), "resume": True}
    for number, local_sgd in enumerate((None, 4, DILOCO, None, COMPRESSED, LocalSGDConfig(steps=2)), 1):
        fit(LOCAL, {**saved, "local_sgd": local_sgd, "max_steps": 3 * number})
    assert files.list_checkpoints(tmp_path)[0].name == "step-000000018"


class WeightRecorder(Callback):
    """Records the weights after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, Tensor] = {}

    def on_step_end(self, trainer: Trainer) -> None:
        self.weights[trainer.progress.step] = flat_state(trainer.model)


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
@pytest.mark.parametrize(
    ("local_sgd", "updated_at"),
    [(5, 10), (2, 10), (8, 13), (None, 10), (LocalSGDConfig(steps=5, warmup_steps=20), 10)],
    ids=["same", "fewer", "more", "none", "warm-up"],
)
def test_average_counts_all_steps_after_a_resume_with_other_local_steps(
    local_sgd: Any, updated_at: int, checkpoint_format: str, tmp_path: Path
) -> None:
    """The checkpoint is saved after step 9, four steps after the last update of the average."""
    keeps = WeightRecorder()
    settings = {
        "output_dir": tmp_path, "resume": True, "checkpoint_format": checkpoint_format, "ema_decay": DECAY,
        "norm": nn.LayerNorm, "callbacks": [keeps],
    }  # fmt: skip
    fit(LOCAL, {**settings, "local_sgd": 5, "max_steps": 9}, validation=False)
    average = fit(LOCAL, {**settings, "local_sgd": local_sgd, "max_steps": updated_at}, validation=False)["average"]
    decay = DECAY ** (updated_at - 5)
    expected = decay * keeps.weights[5] + (1 - decay) * keeps.weights[updated_at]
    torch.testing.assert_close(average, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("index", [0, 1], ids=["ddp", "horovod"])
def test_ranks_of_a_synchronous_group_have_the_gradient_of_all_their_tokens(
    two_groups: list[RankGroup], index: int
) -> None:
    settings = {"tokens": True, "norm": nn.LayerNorm, "count": 56}
    expected = fit(LOCAL, settings)
    for found in two_groups[index].run(fit, {**settings, "local_sgd": LocalSGDConfig(steps=3, synchronous_ranks=2)}):
        torch.testing.assert_close(found["model"], expected["model"], rtol=0, atol=1e-9)
        assert found["results"]["val_loss"] == pytest.approx(expected["results"]["val_loss"], abs=1e-9)


def test_run_resumes_with_a_longer_warm_up(two_groups: list[RankGroup], tmp_path: Path) -> None:
    """The resumed run returns to the warm-up between two synchronizations. After the warm-up, all ranks have equal
    weights."""
    settings = {"optimizer": "adamw", "output_dir": str(tmp_path), "resume": True, "norm": nn.LayerNorm}
    local = {"steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    two_groups[0].run(fit, {**settings, "local_sgd": LocalSGDConfig(**local), "max_steps": 6})
    resumed = {**settings, "local_sgd": LocalSGDConfig(**local, warmup_steps=9), "max_steps": 11}
    first, second = two_groups[0].run(fit, resumed)
    assert torch.equal(first["model"], second["model"])
    model = network(nn.LayerNorm)
    nn.utils.vector_to_parameters(first["model"], model.parameters())  # the model has no buffers
    for result in (first, second):
        assert result["results"]["val_loss"] == pytest.approx(validation_loss(model, tokens=False), abs=1e-9)


def test_run_resumes_with_a_shorter_warm_up(two_groups: list[RankGroup], tmp_path: Path) -> None:
    """The first outer gradient starts at the end of the warm-up, as in an uninterrupted run with the shorter
    warm-up."""
    local = {"steps": 4, "outer_lr": 0.7, "outer_momentum": 0.9}
    saved = {"output_dir": str(tmp_path), "resume": True, "norm": nn.LayerNorm}
    two_groups[0].run(fit, {**saved, "local_sgd": LocalSGDConfig(**local, warmup_steps=100), "max_steps": 6})
    shorter = {"local_sgd": LocalSGDConfig(**local, warmup_steps=6), "max_steps": 13}
    resumed = two_groups[0].run(fit, {**saved, **shorter})[0]
    expected = two_groups[0].run(fit, {"norm": nn.LayerNorm, **shorter})[0]
    torch.testing.assert_close(resumed["model"], expected["model"], rtol=0, atol=1e-12)


def test_loaded_weights_also_replace_the_outer_weights(tmp_path: Path) -> None:
    fit(LOCAL, {"output_dir": str(tmp_path), "max_steps": 3})
    model = network()
    trainer = make_trainer(LOCAL, model, local_sgd=DILOCO, max_steps=7)
    trainer.load_weights(tmp_path)
    expected, loaded = flat_state(model), flat_state(model)
    assert (expected - flat_state(network())).abs().max() > 0.01
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    trainer.fit(data())
    torch.testing.assert_close(parameters_only(flat_state(model)), parameters_only(loaded), rtol=0, atol=1e-12)


# --- running all cases in few launches ---


def run_all_cases(backend: Backend, folder: str) -> dict[str, Any]:
    return {
        "fits": {name: fit(backend, settings) for name, settings in CASES.items()},
        "synchronous": {name: fit(backend, settings) for name, settings in SYNCHRONOUS.items()},
        "one step": {name: fit(backend, {**settings, "local_sgd": 1}) for name, settings in SYNCHRONOUS.items()},
        "float32": {name: train_in_float32(backend, *case) for name, case in FLOAT32.items()},
        "with evaluation": run_with_and_without_evaluation(backend, folder),
    }


LaunchResults = list[tuple[tuple[str, int], list[dict[str, Any]]]]


def results_of_size(launch_results: LaunchResults, size: int) -> list[dict[str, Any]]:
    return [result for launch, results in launch_results if launch[1] == size for result in results]


@pytest.fixture(scope="module")
def two_groups() -> Iterator[list[RankGroup]]:
    with RankGroup("ddp", 2) as ddp, RankGroup("horovod", 2) as horovod:
        yield [ddp, horovod]


@pytest.fixture(scope="module")
def launch_results(two_groups: list[RankGroup], tmp_path_factory: pytest.TempPathFactory) -> LaunchResults:
    """Return the results of all ranks of each launch."""
    found: LaunchResults = [(("local", 1), [run_all_cases(LOCAL, str(tmp_path_factory.mktemp("run")))])]
    with RankGroup("ddp", 3) as three:
        for group in (*two_groups, three):
            results = group.run(run_all_cases, str(tmp_path_factory.mktemp("run")), timeout_seconds=240)
            found.append(((group.backend, group.size), results))
    return found
