"""torch.compile in the Trainer changes neither results nor parameter names, and compiles few graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from groups import nightly
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.utils.data import TensorDataset

from unitrain import TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.testing import RankGroup

LOCAL = LocalBackend(torch.device("cpu"))
SAMPLES, GLOBAL_BATCH = 50, 12  # batches of 12 and 2 samples, in training and evaluation


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3))


def train(backend: Backend, settings: dict[str, Any], by_user: bool = False) -> tuple[dict[str, Tensor], float, int]:
    """Return the state of the user's module, the last validation loss and the number of compiled graphs."""
    torch._dynamo.reset()
    inductor_config.compile_threads = 1  # compiler processes would delay the exit of the ranks by 20 seconds
    counters.clear()
    generator = torch.Generator().manual_seed(6)
    data = TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator), torch.randint(3, (SAMPLES,), generator=generator)
    )
    model = network()
    given: Any = torch.compile(model) if by_user else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    config = TrainConfig(**{"max_epochs": 4, "batch_size": GLOBAL_BATCH // backend.size, "progress": "off", **settings})
    trainer = Trainer(given, optimizer, nn.functional.cross_entropy, backend=backend, config=config)
    results = trainer.fit(data, data)
    assert backend.unwrap(trainer.model) is model
    return model.state_dict(), results["val_loss"], counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module", params=[("local", 1), *nightly(("ddp", 2), ("horovod", 2))], ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[RankGroup]:
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("settings", "by_user"),
    [
        pytest.param({}, True, id="by the user", marks=pytest.mark.nightly),
        pytest.param({"compile": True, "ema_decay": 0.5}, False, id="by the Trainer", marks=pytest.mark.nightly),
    ],
)
def test_compiled_training_equals_eager_with_few_compilations(
    settings: dict[str, Any], by_user: bool, group: RankGroup, tmp_path: Path
) -> None:
    expected, loss, graphs = train(LOCAL, {})
    assert graphs == 0
    output = {"output_dir": str(tmp_path), "resume": True}
    group.run(train, {**settings, **output, "max_epochs": 2}, by_user, timeout_seconds=240)
    for state, found_loss, graphs in group.run(train, {**settings, **output}, by_user, timeout_seconds=240):
        assert 0 < graphs <= 6, "training and evaluation must each compile at most three graphs"
        assert list(state) == list(expected)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
        assert "ema_decay" in settings or found_loss == pytest.approx(loss, abs=1e-6)
    (saved,) = tmp_path.glob("step-000000020/model.safetensors")
    assert list(load_file(saved)) == sorted(expected)


# torch.compile reads the attribute .grad of outputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.ci
def test_trainer_compiles_training_and_evaluation() -> None:
    """One epoch of complete batches requires fewer compilations than the test above."""
    complete = {"max_epochs": 1, "limit_train_steps": 4, "limit_val_batches": 4}
    expected, loss, _ = train(LOCAL, complete)
    state, compiled_loss, graphs = train(LOCAL, {**complete, "compile": True})
    assert 0 < graphs <= 2
    assert compiled_loss == pytest.approx(loss, abs=1e-6)
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
