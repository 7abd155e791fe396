"""Batches that are mappings of the model's keyword arguments, and losses that the model returns."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, Dataset, IterableDataset

from unitrain import ConfigError, DataError, ModelLoss, ShardedLoader, TrainConfig, Trainer
from unitrain.backends.local import LocalBackend
from unitrain.data.batch import count_batch_samples
from unitrain.errors import UnitrainError
from unitrain.testing import run_ranks

LOCAL = LocalBackend(torch.device("cpu"))


@dataclass
class Output:
    loss: Tensor | None
    scores: Tensor


class CausalLMOutput(Output):
    """A class with the name of a transformers class, by which unitrain recognizes it."""


class MaskedLMOutput(Output):
    pass


class Regression(nn.Module):
    """Linear regression that returns its loss in an output of the type `returned`."""

    def __init__(self, returned: str = "object") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.returned = nn.Linear(3, 1), returned

    def forward(self, inputs: Tensor, labels: Tensor | None = None, scale: float = 1.0) -> Any:
        scores = self.layer(inputs)[:, 0] * scale
        loss = None if labels is None else mse_loss(scores, labels)
        if self.returned == "object":
            return SimpleNamespace(loss=loss, scores=scores)
        if self.returned == "mapping":
            return {"loss": loss, "scores": scores}
        return (
            Output(loss, scores)
            if self.returned == "dataclass"
            else (loss, scores)
            if self.returned == "tuple"
            else loss
        )


class Rows(Dataset[dict[str, Any]]):
    def __init__(self, length: int = 10, **extra: Any) -> None:
        self.inputs = torch.randn(length, 3, generator=torch.Generator().manual_seed(1))
        self.extra = extra

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index].sum(), **self.extra}


def build_trainer(model: nn.Module, loss_fn: Any = None, backend: Any = LOCAL, **settings: Any) -> Trainer:
    config = TrainConfig(max_epochs=2, progress="off", **{"batch_size": 4, **settings})
    return Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, backend=backend, config=config)


def train_in_plain_torch() -> list[Tensor]:
    model, rows = Regression("loss"), Rows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for part in torch.arange(10).split(4):
            model(rows.inputs[part], rows.inputs[part].sum(1)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("returned", ["object", "mapping", "dataclass", "loss"])
def test_trainer_uses_the_loss_in_the_output(returned: str) -> None:
    model = Regression(returned)
    build_trainer(model, shuffle=False).fit(Rows(), Rows())
    for one, other in zip(model.parameters(), train_in_plain_torch(), strict=True):
        torch.testing.assert_close(one, other)


def test_loss_function_and_metrics_receive_the_output_and_the_mapping() -> None:
    model, seen = Regression("mapping"), list[Any]()

    def loss_fn(output: Any, batch: Any) -> Tensor:
        seen.append(batch)
        return mse_loss(output["scores"], batch["labels"])

    def largest(output: Any, batch: Any) -> Tensor:
        return torch.maximum(output["scores"], batch["labels"])

    config = TrainConfig(max_epochs=2, batch_size=4, progress="off", shuffle=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, loss_fn, backend=LOCAL, config=config, metrics={"largest": largest})
    rows = Rows()
    results = trainer.fit(rows, rows)
    assert seen[0].keys() == {"inputs", "labels"}
    for one, other in zip(model.parameters(), train_in_plain_torch(), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        scores = model(rows.inputs)["scores"]
    assert results["val_largest"] == pytest.approx(torch.maximum(scores, rows.inputs.sum(1)).mean().item())


@pytest.mark.parametrize("returned", ["mapping", "dataclass"])
def test_predict_returns_the_outputs_without_the_loss(returned: str) -> None:
    outputs = build_trainer(Regression(returned)).predict(Rows())
    scores = outputs["scores"] if returned == "mapping" else outputs.scores
    assert scores.shape == (10,)
    assert "loss" not in outputs if returned == "mapping" else outputs.loss is None


class TokenModel(nn.Module):
    """A model that returns the mean loss over the labels other than -100, in an object of class `output_class`."""

    def __init__(self, output_class: Any, *, is_shifted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.output_class, self.is_shifted = nn.Embedding(5, 5), output_class, is_shifted

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        scores = self.layer(input_ids)
        expected = labels[:, 1:] if self.is_shifted else labels
        predicted = scores[:, : expected.shape[1]]
        return self.output_class(loss=cross_entropy(predicted.flatten(0, 1), expected.flatten()), scores=scores)


class Tokens(Dataset[dict[str, Tensor]]):
    def __init__(self, dtype: torch.dtype = torch.int64) -> None:
        self.ids = torch.randint(5, (8, 6), generator=torch.Generator().manual_seed(2))
        lengths = torch.tensor([6, 5, 2, 1, 1, 1, 3, 6])  # if labels are shifted, micro-batch 3 of 4 has no labels
        self.labels = torch.where(torch.arange(6) < lengths[:, None], self.ids, -100).to(dtype)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


CASES = {
    "next token": (CausalLMOutput, True, ModelLoss()),
    "same token": (MaskedLMOutput, False, ModelLoss()),
    "another class": (SimpleNamespace, False, ModelLoss("tokens", shift_labels=False)),
    "another class, shifted": (dict, True, ModelLoss("auto", shift_labels=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_are_weighted_by_their_number_of_labels(case: str) -> None:
    output_class, is_shifted, loss_fn = CASES[case]
    found, expected = (
        TokenModel(output_class, is_shifted=is_shifted),
        TokenModel(SimpleNamespace, is_shifted=is_shifted),
    )
    tokens = Tokens()
    build_trainer(found, loss_fn, batch_size=2, gradient_accumulation_steps=2, shuffle=False).fit(tokens)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        for part in torch.arange(8).split(4):
            expected(tokens.ids[part], tokens.labels[part]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(found.layer.weight, expected.layer.weight)


def test_average_over_samples_or_tokens_can_be_selected() -> None:
    output = CausalLMOutput(torch.tensor(2.0), torch.ones(1))
    batch = {"input_ids": torch.ones(2, 3), "labels": torch.tensor([[1, 2, -100], [1, -100, -100]])}
    assert ModelLoss("samples")(output, batch) is output.loss
    assert ModelLoss()(output, {"labels": torch.ones(2)}) is output.loss
    assert ModelLoss()(output, {"labels": torch.ones(2, 3)}) is output.loss, "floating-point labels are not tokens"
    total, count = ModelLoss()(output, batch)  # type: ignore[misc]
    assert (total.item(), int(count)) == (2.0, 1)
    total, count = ModelLoss(ignore_index=2)(output, batch)  # type: ignore[misc]
    assert (total.item(), int(count)) == (6.0, 3)


def test_mean_over_no_tokens_is_zero_and_half_precision_is_summed_in_float32() -> None:
    labels = torch.full((1, 3), -100)
    total, count = ModelLoss()(MaskedLMOutput(torch.tensor(torch.nan), torch.ones(1)), {"labels": labels})  # type: ignore[misc]
    assert (total.item(), int(count)) == (0.0, 0)
    loss = torch.tensor(3.0, dtype=torch.bfloat16)
    total, _ = ModelLoss()(MaskedLMOutput(loss, torch.ones(1)), {"labels": torch.ones(1001, 3, dtype=torch.long)})  # type: ignore[misc]
    assert total.item() == 9009.0


def error_message(call: Any) -> str:
    with pytest.raises(UnitrainError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_output_without_a_loss_is_rejected() -> None:
    class Unlabeled(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"inputs": self.inputs[index]}

    end = "without a loss. The batch has 'inputs'. Let the model return its loss"
    starts = {
        "object": f"an object of class SimpleNamespace {end}",
        "mapping": f"an object of class dict {end}",
        "loss": f"an object of class NoneType {end}",
    }
    for returned, start in starts.items():
        found = error_message(lambda returned=returned: build_trainer(Regression(returned)).fit(Unlabeled()))
        assert found.startswith(f"ModelError: The Trainer has no loss_fn, and the model returned {start}"), found
    found = error_message(lambda: build_trainer(Regression("tuple")).fit(Rows()))
    assert (
        "an object of class tuple without a loss. For a model of transformers, use model.config.return_dict = True."
        in found
    )
    pairs = torch.utils.data.TensorDataset(torch.ones(4, 3), torch.ones(4))
    found = error_message(lambda: build_trainer(nn.Linear(3, 2)).fit(pairs))
    assert found.startswith(
        "ModelError: The Trainer has no loss_fn, and the model returned a tensor of shape [4, 2] instead of a loss. "
        "Pass a loss function, as in Trainer(model, optimizer, torch.nn.CrossEntropyLoss(), ...)."
    )


def test_unknown_average_is_rejected_with_the_choices() -> None:
    found = error_message(lambda: build_trainer(TokenModel(SimpleNamespace, is_shifted=False)).fit(Tokens()))
    assert found.startswith(
        "ModelError: The batch has labels of shape [4, 6], and the model returned an object of class SimpleNamespace"
    )
    assert 'Use loss_fn=unitrain.ModelLoss("samples"), ModelLoss("tokens", shift_labels=False), or, ' in found
    found = error_message(lambda: build_trainer(TokenModel(dict, is_shifted=False), ModelLoss("tokens")).fit(Tokens()))
    assert "ModelError: It is unknown whether the model, which returned an object of class dict, predicts the" in found
    found = error_message(lambda: build_trainer(Regression(), ModelLoss("tokens", labels="targets")).fit(Rows()))
    assert "counts the labels in a batch, but this dict does not have a tensor 'targets'. Name the key" in found


def test_invalid_arguments_of_the_loss_are_rejected() -> None:
    for call, start in (
        (lambda: ModelLoss("token"), "Unknown ModelLoss average 'token'. Did you mean 'tokens'?"),  # type: ignore[arg-type]
        (lambda: ModelLoss(labels=""), "ModelLoss(labels=...) must be a non-empty string, got ''. Use labels="),
        (lambda: ModelLoss(shift_labels=1), "ModelLoss.shift_labels must be True, False or None, got 1."),  # type: ignore[arg-type]
        (lambda: ModelLoss(ignore_index="x"), "ModelLoss(ignore_index=...) must be a whole number, got 'x'."),  # type: ignore[arg-type]
    ):
        assert error_message(call).startswith(f"ConfigError: {start}")
    with pytest.raises(ConfigError, match=r"^Trainer\(loss_fn\) must be a function, got the class ModelLoss\."):
        build_trainer(Regression(), ModelLoss)


class Anything(Regression):
    def forward(self, inputs: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        return super().forward(inputs, labels)


class Failing(Regression):
    def forward(self, ids: Any, labels: Any = None) -> Any:
        return super().forward(ids.float(), labels)


class OutOfMemory(Failing):
    def forward(self, ids: Any, labels: Tensor) -> Any:
        raise torch.OutOfMemoryError("no memory")


def test_items_that_the_model_does_not_accept_are_rejected() -> None:
    found = error_message(lambda: build_trainer(Regression()).fit(Rows(text="hello", number=3)))
    assert found == (
        "DataError: The batch has 'text', 'number', which Regression.forward does not accept. It accepts: inputs, "
        "labels, scale. Remove the other columns, as in dataset.remove_columns(['text', 'number']), or pass a "
        "function: Trainer(..., forward=lambda model, batch: ...)."
    )
    found = error_message(lambda: build_trainer(Anything()).predict(Rows(text="hello", number=3)))
    assert found.startswith("DataError: The batch has 'text', which Anything.forward does not accept.")
    build_trainer(Anything()).fit(Rows(number=3))


def test_lists_instead_of_tensors_are_rejected() -> None:
    items = [{"ids": [1, 2, 3], "labels": 1.0}] * 4
    found = error_message(lambda: build_trainer(Failing()).fit(items))  # type: ignore[arg-type]
    assert found.startswith("DataError: Failing.forward failed on a batch in which 'ids' is a list of 3 tensors: Attr")
    assert 'dataset.set_format("torch")' in found
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory$"):
        build_trainer(OutOfMemory()).fit(items)  # type: ignore[arg-type]
    loader = DataLoader([{"inputs": "text"}] * 4, batch_size=2)
    found = error_message(lambda: build_trainer(Regression(), batch_size=None).fit(loader))
    assert found.startswith(
        "DataError: The batch, of class dict, has no tensors ('inputs': list). Let the samples contain"
    )


def test_samples_of_a_mapping_are_counted() -> None:
    assert count_batch_samples({"scale": torch.tensor(1.0), "ids": torch.ones(3, 2), "labels": torch.ones(3)}) == 3
    assert count_batch_samples(UserDict(ids=torch.ones(2, 2))) == 2
    with pytest.raises(
        DataError, match=r"^The number of samples in this dict is unknown, because the first dimensions"
    ):
        count_batch_samples({"ids": torch.ones(3, 2), "labels": torch.ones(4)})
    with pytest.raises(
        DataError, match=r"because it contains no tensor\. Yield batches such as \{\"input_ids\": .*with_"
    ):
        count_batch_samples({"text": ["a", "b"]})


class Stream(IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        yield {"inputs": torch.ones(3, 3), "labels": torch.ones(2)}


def test_stream_of_batches_with_different_lengths_is_rejected() -> None:
    loader = DataLoader(Stream(), batch_size=None)
    found = error_message(lambda: build_trainer(Regression(), batch_size=None).fit(loader))
    assert "the first dimensions of its tensors differ ('inputs': 3, 'labels': 2). Make the samples the first" in found


def get_error_for_different_keys(backend: Any) -> str:
    extra = {"scale": 1.0} if backend.rank == 1 else {}
    return error_message(lambda: build_trainer(Regression(), backend=backend).fit(Rows(**extra)))


def loader_batches(backend: Any) -> tuple[list[Tensor], list[float], list[int]]:
    """Return the inputs, loss weights and numbers of samples of the batches of a `ShardedLoader`."""
    loader = ShardedLoader(Rows(5), backend, batch_size=2, shuffle=True)
    found: tuple[list[Tensor], list[float], list[int]] = ([], [], [])
    for batch in loader:
        assert batch.keys() == {"inputs", "labels"}
        for values, value in zip(found, (batch["inputs"], loader.loss_weight, loader.num_samples), strict=True):
            values.append(value)
    return found


@pytest.mark.ci
def test_keys_that_differ_between_ranks_are_rejected_and_sharded_loader_yields_mappings() -> None:
    for found in run_ranks(get_error_for_different_keys, 2):
        assert found.startswith(
            "DataError: The batches do not have the same keys on every rank (rank 0: 'inputs', 'labels'; rank 1: "
            "'inputs', 'labels', 'scale'). Give every rank the same data"
        )
    first, second = run_ranks(loader_batches, 2)
    assert (first[1], first[2]) == ([1.0, 2.0], [2, 1])
    assert (second[1], second[2]) == ([1.0, 0.0], [2, 0])
    rows = torch.cat([*first[0], *second[0][:1]])
    assert torch.equal(rows.sort(0).values, Rows(5).inputs.sort(0).values)


@pytest.mark.parametrize("is_shifted", [True, False])
@pytest.mark.parametrize("masks_first", [True, False])
def test_labels_of_causal_language_models_are_counted_with_the_shift_of_the_model(
    is_shifted: bool, masks_first: bool
) -> None:
    """Some models that return a CausalLMOutput, such as BartForCausalLM, do not shift the labels."""
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 600, 7), torch.randint(0, 7, (2, 600))
    labels[0, 300:] = -100
    if masks_first:
        labels[:, :2] = -100
    predictions, targets = (logits[:, :-1], labels[:, 1:]) if is_shifted else (logits, labels)
    output = CausalLMOutput(cross_entropy(predictions.flatten(0, 1), targets.flatten()), torch.empty(0))
    output.logits = logits  # type: ignore[attr-defined]
    batch, loss_fn = {"input_ids": labels, "labels": labels}, ModelLoss()
    for _ in range(2):
        total, count = loss_fn(output, batch)  # type: ignore[misc]
        assert int(count) == int((targets != -100).sum())
        expected = cross_entropy(predictions.flatten(0, 1), targets.flatten(), reduction="sum")
        torch.testing.assert_close(total, expected)


class UnshiftedLanguageModel(nn.Module):
    """A language model that returns a CausalLMOutput, and does not shift the labels."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Embedding(5, 5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        output = CausalLMOutput(None, torch.empty(0))
        output.logits = self.layer(input_ids)  # type: ignore[attr-defined]
        output.loss = cross_entropy(output.logits.flatten(0, 1), labels.flatten())  # type: ignore[attr-defined]
        return output


class FirstLabels(Dataset[dict[str, Tensor]]):
    """Rows of which every second one, which rank 1 of two ranks receives, has a label at the first position only."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = (torch.arange(6) * (index + 2)) % 5
        labels = row.roll(1)
        if index % 2:
            labels[1:] = -100
        return {"input_ids": row, "labels": labels}


def evaluate_and_train(backend: Any) -> list[Any]:
    results: list[Any] = []
    for evaluates_first in (True, False):
        model = UnshiftedLanguageModel()
        trainer = build_trainer(model, backend=backend, batch_size=None, global_batch_size=4, shuffle=False)
        if evaluates_first:
            results.append(trainer.evaluate(FirstLabels()))
        results += [trainer.fit(FirstLabels()), trainer.evaluate(FirstLabels()), model.layer.weight.tolist()]
    return results


def test_ranks_agree_on_the_shift_of_the_labels() -> None:
    """The batches of rank 1 do not show the shift, and have labels that are counted only without a shift."""
    expected = evaluate_and_train(LOCAL)
    for results in run_ranks(evaluate_and_train, 2):
        torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-6)


def test_labels_are_assumed_to_be_shifted_if_the_loss_is_not_the_cross_entropy() -> None:
    labels = torch.randint(0, 7, (2, 5))
    output = CausalLMOutput(torch.tensor(70.0), torch.empty(0))
    output.logits = torch.randn(2, 5, 7)  # type: ignore[attr-defined]
    loss_fn = ModelLoss()
    for _ in range(5):
        assert int(loss_fn(output, {"input_ids": labels, "labels": labels})[1]) == 8  # type: ignore[index]


def test_labels_are_assumed_to_be_shifted_if_the_loss_is_not_finite() -> None:
    labels = torch.randint(0, 7, (2, 5))
    output = CausalLMOutput(torch.tensor(torch.nan), torch.empty(0))
    output.logits = torch.randn(2, 5, 7)  # type: ignore[attr-defined]
    loss_fn = ModelLoss()
    for loss in (torch.nan, torch.inf):
        output.loss = torch.tensor(loss)
        assert int(loss_fn(output, {"input_ids": labels, "labels": labels})[1]) == 8  # type: ignore[index]


def test_labels_of_one_sequence_without_a_batch_dimension_are_counted() -> None:
    labels = torch.randint(0, 7, (5,))
    output = CausalLMOutput(torch.tensor(70.0), torch.empty(0))
    output.logits = torch.randn(5, 7)  # type: ignore[attr-defined]
    assert int(ModelLoss("tokens")(output, {"input_ids": labels, "labels": labels})[1]) == 4  # type: ignore[index]
