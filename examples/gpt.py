"""Train a small character-level GPT on Python's manual, on any backend.

python examples/gpt.py
torchrun --nproc-per-node 2 examples/gpt.py --precision bf16
horovodrun -np 2 python examples/gpt.py --backend horovod
"""

from __future__ import annotations

from pydoc_data.topics import topics

import click
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import unitrain

LENGTH = 64
PAD = 0
VOCABULARY = [chr(PAD), "\n", *map(chr, range(32, 127))]  # padding, line feed, ASCII


class GPT(nn.Module):
    """Maps characters [n, length] to logits of the next character at each position, [n, length, characters]."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters = nn.Embedding(len(VOCABULARY), width)
        self.positions = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.scores = nn.Linear(width, len(VOCABULARY), bias=False)

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits, computed with causal attention."""
        length = text.shape[1]
        hidden = self.characters(text) + self.positions(torch.arange(length, device=text.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        scores: Tensor = self.scores(self.layers(hidden, mask=mask, is_causal=True))
        return scores


def encode(text: str) -> list[int]:
    """Return the index of each character that is in the vocabulary."""
    return [VOCABULARY.index(character) for character in text if character in VOCABULARY]


def paragraphs() -> TensorDataset:
    """Return the paragraphs of Python's manual, split into padded pieces of equal length."""
    pieces = []
    for paragraph in "\n\n".join(topics.values()).split("\n\n"):
        text = encode(" ".join(paragraph.split()) + "\n")
        pieces += [text[start : start + LENGTH + 1] for start in range(0, len(text) - 1, LENGTH)]
    table = torch.full((len(pieces), LENGTH + 1), PAD)
    for row, piece in zip(table, pieces, strict=True):
        row[: len(piece)] = torch.tensor(piece)
    return TensorDataset(table[:, :-1].clone(), table[:, 1:].clone())


def loss_and_count(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the loss over all characters except padding, and their number, so that each has the same
    weight.
    """
    total = cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")
    return total, (targets != PAD).sum()


@torch.no_grad()
def generate_text(model: nn.Module, beginning: str, length: int, device: torch.device) -> str:
    """Return `beginning`, followed by `length` characters sampled from the model."""
    generator = torch.Generator().manual_seed(0)
    text = encode(beginning)
    for _ in range(length):
        scores = model(torch.tensor([text[-LENGTH:]], device=device))[0, -1].float().cpu()
        text.append(int(torch.multinomial((scores / 0.7).softmax(0), 1, generator=generator)))
    return "".join(VOCABULARY[character] for character in text)


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--device", help="cpu or cuda. [default: a GPU per rank, if there are GPUs]")
@click.option("--steps", default=500, show_default=True)
@click.option("--global-batch-size", default=64, show_default=True, help="Pieces per step, over all ranks.")
@click.option("--precision", type=click.Choice(["fp32", "bf16", "fp16"]), default="fp32", show_default=True)
def main(backend_name: str | None, device: str | None, steps: int, global_batch_size: int, precision: str) -> None:
    """Train on Python's manual, and print a sample."""
    with unitrain.init(backend_name, device=device) as backend:
        train, validation = random_split(paragraphs(), [0.97, 0.03], generator=torch.Generator().manual_seed(0))
        torch.manual_seed(0)  # the same initial weights in every run
        model = GPT()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps + 1, pct_start=0.1)
        config = unitrain.TrainConfig(
            max_steps=steps, global_batch_size=global_batch_size, max_grad_norm=1.0, precision=precision
        )
        trainer = unitrain.Trainer(model, optimizer, loss_and_count, backend=backend, config=config, scheduler=schedule)
        results = trainer.fit(train, validation)
        if backend.rank == 0:
            print(generate_text(model.eval(), "The statement ", 200, backend.device))
            print(f"final train_loss={results['train_loss']:.4f} val_loss={results['val_loss']:.4f}")


if __name__ == "__main__":
    main()
