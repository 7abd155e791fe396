"""Models from transformers with data from datasets train like a plain loop in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import transformers
from groups import ci, nightly
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from unitrain import LocalSGDConfig, ModelLoss, ShardedLoader, TrainConfig, Trainer
from unitrain.backends.base import Backend
from unitrain.backends.local import LocalBackend
from unitrain.data.order import epoch_order
from unitrain.testing import RankGroup

RANKS_IMPORT = ("datasets", "transformers", "transformers.models.gpt2.modeling_gpt2")
LOCAL = LocalBackend(torch.device("cpu"))
WORDS, LENGTH, ROWS, EPOCHS, STEP = 17, 9, 32, 2, 12  # with 12 of 32 rows per step, the last step has 8


def language_model() -> Any:
    """Return a GPT-2 in float64 whose output layer is tied to its embeddings."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTH, n_embd=8, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).double()
    assert model.lm_head.weight is model.transformer.wte.weight
    model.loss_function = mean_over_tokens  # the default loss function of transformers converts the logits to float32
    return model


def mean_over_tokens(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def classifier() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3,
        max_position_embeddings=LENGTH, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config).double()


def rows(task: str) -> list[dict[str, Any]]:
    """Return token sequences of different lengths, without padding."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(ROWS):
        # The lengths differ by a factor of 8. The last two sequences have one token, so there is no token to predict.
        length = 1 if number >= ROWS - 2 else 2 + number * 7 // ROWS
        ids = torch.randint(1, WORDS, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": ids if task == "language" else number % 3})
    return found


def pad(task: str, row: dict[str, Any]) -> dict[str, Any]:
    missing = LENGTH - len(row["input_ids"])
    labels = [*row["labels"], *[-100] * missing] if task == "language" else row["labels"]
    mask = [1] * len(row["input_ids"]) + [0] * missing
    return {"input_ids": [*row["input_ids"], *[0] * missing], "attention_mask": mask, "labels": labels}


def dataset(task: str) -> datasets.Dataset:
    table = [pad(task, row) for row in rows(task)]
    return datasets.Dataset.from_list(table).with_format("torch")


def encode(items: list[dict[str, Any]]) -> transformers.BatchEncoding:
    """Pad to the longest sequence of the batch, as the collators of transformers do."""
    length = max(len(item["input_ids"]) for item in items)
    table = [pad("language", item) for item in items]
    return transformers.BatchEncoding(
        {key: torch.tensor([row[key][:length] for row in table]) for key in ("input_ids", "attention_mask", "labels")}
    )


def make_data(source: str, size: int) -> Any:
    """Return the language data as a map-style dataset, an iterable dataset or a DataLoader."""
    if source == "map":
        return dataset("language")
    if source == "stream":
        return dataset("language").to_iterable_dataset(num_shards=4)
    loaded = datasets.Dataset.from_list(rows("language"))
    return DataLoader(loaded, batch_size=STEP // size // 2, shuffle=True, collate_fn=encode)


def train(backend: Backend, task: str, source: str = "map", **settings: Any) -> dict[str, Any]:
    """Train with two micro-batches per rank and step. Return the parameters, results and predictions."""
    model = language_model() if task == "language" else classifier()
    data = make_data(source, backend.size) if task == "language" else dataset(task)
    changes = {} if source == "loader" else {"batch_size": STEP // backend.size // 2}
    config = TrainConfig(
        max_epochs=EPOCHS, gradient_accumulation_steps=2, max_grad_norm=0.5, progress="off", **changes, **settings
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, backend=backend, config=config, metrics={"rows": count_rows})
    results = trainer.fit(data, dataset(task))
    outputs = trainer.predict(dataset(task))
    return {
        "parameters": [full_tensor(parameter) for parameter in backend.unwrap(trainer.model).parameters()],
        "results": results,
        "logits": outputs.logits,
        "parts": list(outputs),
    }


def full_tensor(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter).detach().clone()


def count_rows(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return one value per sample: the number of tokens."""
    assert output.loss is not None
    return batch["attention_mask"].sum(1).double()


def expected_training(task: str, *, is_shuffled: bool = True) -> dict[str, Any]:
    """Train in one process, with one micro-batch per global batch and a loss computed from the logits."""
    model = language_model() if task == "language" else classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    table = dataset(task)[:]

    def summed_loss(chosen: Any) -> tuple[Tensor, int]:
        labels = table["labels"][chosen]
        logits = model(input_ids=table["input_ids"][chosen], attention_mask=table["attention_mask"][chosen]).logits
        if task == "language":
            logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return cross_entropy(logits, labels, reduction="sum"), int((labels != -100).sum())

    for epoch in range(EPOCHS):
        total, count = 0.0, 0
        for chosen in epoch_order(ROWS, seed=0, epoch=epoch, shuffle=is_shuffled).split(STEP):
            loss, tokens = summed_loss(chosen)
            (loss / tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            total, count = total + loss.item(), count + tokens
    model.eval()
    with torch.no_grad():
        loss, tokens = summed_loss(slice(None))
        logits = model(input_ids=table["input_ids"], attention_mask=table["attention_mask"]).logits
    results = {
        "train_loss": total / count,
        "val_loss": loss.item() / tokens,
        "val_rows": table["attention_mask"].sum().item() / ROWS,
    }
    return {"parameters": [one.detach() for one in model.parameters()], "results": results, "logits": logits}


def assert_results_are_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-11) -> None:
    for one, other in zip(found["parameters"], expected["parameters"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    assert found["results"] == pytest.approx(expected["results"], abs=max(tolerance, 1e-6))
    torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=10 * tolerance)
    assert found["parts"] == ["logits"]  # predict does not return the loss and the cache


class OneProcess:
    """Calls functions in this process, because importing transformers in another process takes seconds."""

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float) -> list[Any]:
        return [function(LOCAL, *args)]


Ranks = RankGroup | OneProcess
GROUPS = [("local", 1), *ci(("ddp", 3)), *nightly(("ddp", 2), ("horovod", 2), ("horovod", 3))]


@pytest.fixture(scope="module", params=GROUPS, ids=str)
def group(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    if request.param[0] == "local":
        yield OneProcess()
        return
    with RankGroup(*request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("source", ["map", "loader", "stream"])
def test_language_model_trains_with_the_mean_over_all_tokens(group: Ranks, source: str) -> None:
    expected = expected_training("language", is_shuffled=source != "stream")
    for found in group.run(train, "language", source, timeout_seconds=200):
        assert_results_are_close(found, expected)


def test_classifier_trains_with_the_mean_over_all_samples(group: Ranks) -> None:
    expected = expected_training("classifier")
    for found in group.run(train, "classifier", timeout_seconds=200):
        assert_results_are_close(found, expected)


def train_in_two_jobs(backend: Backend, folder: str, shard: str) -> dict[str, Any]:
    """Train one epoch, resume from its checkpoint in another Trainer, and save the model with save_pretrained."""
    settings: dict[str, Any] = {"batch_size": STEP // backend.size, "max_grad_norm": 0.5, "progress": "off"}
    for epochs in range(1, EPOCHS + 1):
        model = language_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        config = TrainConfig(max_epochs=epochs, output_dir=folder, resume="auto", shard=shard, **settings)
        trainer = Trainer(model, optimizer, backend=backend, config=config)
        assert trainer.progress.epoch == epochs - 1
        results = trainer.fit(dataset("language"), dataset("language"))
        assert model.lm_head.weight is model.transformer.wte.weight
    unwrapped = backend.unwrap(trainer.model)
    # All ranks call state_dict, which gathers sharded parameters.
    state = unwrapped.state_dict()
    if backend.rank == 0:
        unwrapped.save_pretrained(f"{folder}/pretrained", **({} if shard == "none" else {"state_dict": state}))
    backend.barrier()
    parameters = [full_tensor(parameter) for parameter in unwrapped.parameters()]
    return {"parameters": parameters, "train_loss": results["train_loss"]}


@pytest.mark.parametrize("shard", ["none", "parameters"])
def test_tied_weights_are_resumed_and_saved_with_save_pretrained(group: Ranks, tmp_path: Path, shard: str) -> None:
    expected = expected_training("language")
    for found in group.run(train_in_two_jobs, str(tmp_path), shard, timeout_seconds=200):
        for one, other in zip(found["parameters"], expected["parameters"], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)
        assert found["train_loss"] == pytest.approx(expected["results"]["train_loss"], abs=1e-6)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "pretrained", dtype=torch.float64)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for (name, one), other in zip(loaded.named_parameters(), expected["parameters"], strict=True):
        torch.testing.assert_close(one.detach(), other, rtol=0, atol=1e-11, msg=name)
    assert verify_checkpoint(tmp_path, language_model())


def verify_checkpoint(folder: Path, model: Any) -> bool:
    """Load the newest checkpoint in `folder` into `model`. Return whether the weights equal those of the saved
    model."""
    config = TrainConfig(max_epochs=1, batch_size=4, progress="off")
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), backend=LOCAL, config=config)
    trainer.load_weights(folder)
    loaded = transformers.GPT2LMHeadModel.from_pretrained(folder / "pretrained", dtype=torch.float64)
    pairs = zip(model.parameters(), loaded.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs) and model.lm_head.weight is model.transformer.wte.weight


def train_with(backend: Backend, settings: dict[str, Any]) -> dict[str, Any]:
    return train(backend, "language", **settings)


@pytest.mark.ci
@pytest.mark.parametrize("shard", ["state", "gradients", "parameters"])
def test_sharded_language_model_trains_like_one_process(group: Ranks, shard: str) -> None:
    expected = expected_training("language")
    for found in group.run(train_with, {"shard": shard}, timeout_seconds=200):
        assert_results_are_close(found, expected)


def train_with_logical_ranks(backend: Backend) -> dict[str, Any]:
    model = language_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    config = TrainConfig(
        max_epochs=EPOCHS, batch_size=2, logical_ranks=6, max_grad_norm=0.5, ema_decay=0.5, progress="off"
    )
    trainer = Trainer(model, optimizer, backend=backend, config=config)
    results = trainer.fit(dataset("language"), dataset("language"))
    assert trainer.averaged_model is not None
    averages = [parameter.detach().clone() for parameter in trainer.averaged_model.parameters()]
    assert trainer.averaged_model.lm_head.weight is trainer.averaged_model.transformer.wte.weight  # type: ignore[union-attr]
    return {
        "parameters": [one.detach().clone() for one in model.parameters()],
        "averages": averages,
        "results": results,
    }


@pytest.mark.ci
def test_logical_ranks_give_the_same_bits_for_any_number_of_processes(group: Ranks) -> None:
    expected, in_one_process = expected_training("language"), train_with_logical_ranks(LOCAL)
    for found in group.run(train_with_logical_ranks, timeout_seconds=200):
        for name in ("parameters", "averages"):
            assert all(map(torch.equal, found[name], in_one_process[name]))
        assert found["results"] == in_one_process["results"]
        for one, other in zip(found["parameters"], expected["parameters"], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


def train_in_own_loop(backend: Backend) -> list[Tensor]:
    """Train with the loop of docs/guides/huggingface.md."""
    model = language_model()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    distributed = backend.distributed_model(model)
    optimizer = backend.distributed_optimizer(optimizer, distributed)
    loader = ShardedLoader(dataset("language"), backend, batch_size=STEP // backend.size)
    loss_fn: Any = ModelLoss("tokens")
    for _ in range(EPOCHS):
        for batch in loader:
            total, tokens = loss_fn(distributed(**batch), batch)
            is_used = loader.num_samples > 0
            all_tokens = backend.allreduce(tokens * is_used, "sum").clamp(min=1)
            (total * is_used * backend.size / all_tokens).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.ci
def test_own_loop_trains_with_the_mean_over_all_tokens(group: Ranks) -> None:
    expected = expected_training("language")["parameters"]
    for found in group.run(train_in_own_loop, timeout_seconds=200):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "compile": {"compile": True},
    "bf16": {"precision": "bf16"},
    "checkpoint_activations": {"checkpoint_activations": ("LlamaDecoderLayer",)},
    "local_sgd": {"local_sgd": LocalSGDConfig(steps=2)},
}


def train_llama(backend: Backend, feature: str) -> dict[str, float]:
    """Train a Llama in float32 with the loss function of transformers and one of FEATURES. Return the results."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=LENGTH, tie_word_embeddings=True, use_cache=False,
    ))  # fmt: skip
    config = TrainConfig(max_epochs=EPOCHS, batch_size=STEP // backend.size, progress="off", **FEATURES[feature])
    trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), backend=backend, config=config)
    return trainer.fit(dataset("language"), dataset("language"))


# torch.compile reads the attribute .grad of outputs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("feature", [*ci(*(name for name in FEATURES if name != "compile")), *nightly("compile")])
def test_settings_of_the_trainer_work_with_transformers(group: Ranks, feature: str) -> None:
    expected = train_llama(LOCAL, "plain")
    tolerance = {"bf16": 0.02, "local_sgd": 0.1}.get(feature, 1e-4)
    for found in group.run(train_llama, feature, timeout_seconds=500):
        assert found == pytest.approx(expected, abs=tolerance)
