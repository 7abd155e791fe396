"""Train a small language model from transformers on a datasets.Dataset, on any backend. Nothing is downloaded.
This example requires transformers and datasets: pip install '.[huggingface]'

python examples/huggingface.py
torchrun --nproc-per-node 2 examples/huggingface.py --output runs/model
horovodrun -np 2 python examples/huggingface.py --backend horovod
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import click
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import unitrain

try:
    import datasets
    import tokenizers
    import transformers
except ModuleNotFoundError as error:
    sys.exit(f"{error}. Install it, in the source folder of unitrain, with: pip install '.[huggingface]'")

LENGTH = 48
VOCABULARY_SIZE = 512


def paragraphs() -> list[str]:
    """Return the paragraphs of Python's manual."""
    texts = (" ".join(text.split()) for topic in topics.values() for text in topic.split("\n\n"))
    return [text for text in texts if len(text) > 40]


def train_tokenizer(texts: list[str]) -> str:
    """Train a byte-pair tokenizer on `texts`, and return it as JSON."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=["<pad>", "<end>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return str(tokenizer.to_str())


def create_model() -> transformers.PreTrainedModel:
    """Return a small Llama with random weights. To fine-tune a model, use AutoModelForCausalLM.from_pretrained."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        max_position_embeddings=LENGTH,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def accuracy(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the accuracy of the next token for each sample."""
    labels = batch["labels"][:, 1:]
    is_token = labels != -100
    hits = (output.logits[:, :-1].argmax(2) == labels) & is_token
    return hits.sum(1) / is_token.sum(1)


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--device", help="cpu or cuda. [default: a GPU per rank, if there are GPUs]")
@click.option("--steps", default=60, show_default=True)
@click.option("--global-batch-size", default=24, show_default=True, help="Paragraphs per step, over all ranks.")
@click.option("--samples", default=1200, show_default=True, help="Number of paragraphs.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder to which the model is saved.")
def main(
    backend_name: str | None,
    device: str | None,
    steps: int,
    global_batch_size: int,
    samples: int,
    output: Path | None,
) -> None:
    """Train on Python's manual. With --output, save the model with save_pretrained."""
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    with unitrain.init(backend_name, device=device) as backend:
        texts = paragraphs()[:samples]
        encoding = backend.broadcast_object(train_tokenizer(texts) if backend.rank == 0 else None)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer.from_str(encoding), pad_token="<pad>", eos_token="<end>"
        )

        def tokenize(rows: Mapping[str, list[str]]) -> Mapping[str, list[Any]]:
            ended = [text + tokenizer.eos_token for text in rows["text"]]
            return dict(tokenizer(ended, max_length=LENGTH, truncation=True, padding="max_length"))

        data = datasets.Dataset.from_dict({"text": texts}).map(tokenize, batched=True, remove_columns=["text"])
        parts = data.train_test_split(test_size=0.1, seed=0)
        # The labels are the tokens, and -100 for padding.
        collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        train, validation = (
            DataLoader(
                parts[name], batch_size=global_batch_size // backend.size, shuffle=name == "train", collate_fn=collate
            )
            for name in ("train", "test")
        )

        torch.manual_seed(0)  # the same initial weights in every run
        model = create_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        config = unitrain.TrainConfig(max_steps=steps, max_grad_norm=1.0)
        trainer = unitrain.Trainer(
            model,
            optimizer,
            backend=backend,
            config=config,
            scheduler=lambda optimizer, total: transformers.get_linear_schedule_with_warmup(optimizer, 10, total),
            metrics={"accuracy": accuracy},
        )
        results = trainer.fit(train, validation)
        if backend.rank == 0:
            if output is not None:
                backend.unwrap(trainer.model).save_pretrained(output)
                tokenizer.save_pretrained(output)
                check_saved(output, model)
            print(
                f"final train_loss={results['train_loss']:.4f} val_loss={results['val_loss']:.4f} "
                f"val_accuracy={results['val_accuracy']:.4f} perplexity={math.exp(results['val_loss']):.2f}"
            )


def check_saved(folder: Path, model: transformers.PreTrainedModel) -> None:
    """Load the model in `folder`, and check that its weights are equal to those of `model`."""
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for (name, found), expected in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(found, expected.cpu()), name


if __name__ == "__main__":
    main()
