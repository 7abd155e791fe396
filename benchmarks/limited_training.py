"""The training run that `memory_limits.py` measures: a transformer with Adam in float32."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import unitrain
from unitrain.backends.base import Backend, ShardingMode
from unitrain.memory.process_memory import HostMemory

WIDTH, LENGTH, CLASSES, VOCABULARY = 128, 32, 64, 20_000
STEPS = 2  # the first step creates the optimizer state
_MMAP_THRESHOLD_OPTION = -3  # M_MMAP_THRESHOLD of mallopt(3)


class TextClassifier(nn.Module):
    """Model that maps tokens of shape [n, LENGTH] to scores of shape [n, CLASSES]."""

    def __init__(self, blocks: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True) for _ in range(blocks))
        )
        self.scores = nn.Linear(WIDTH, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores."""
        scores: Tensor = self.scores(self.blocks(self.tokens(text)).mean(dim=1))
        return scores


def measure_peak_bytes(backend: Backend, shard: ShardingMode, is_checkpointed: bool, blocks: int, batch: int) -> int:
    """Train for STEPS steps. Return the peak memory in bytes, minus the memory that the process used before.

    `is_checkpointed` is whether the activations of the blocks are checkpointed.
    """
    # Each large tensor gets its own mapping, so that its memory is returned to the system immediately.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD_OPTION, 65536)
    _train(backend, TextClassifier(1, vocabulary=8), "none", 1)  # import modules and start threads
    memory = HostMemory()
    memory.reset_peak()
    before = memory.current()
    torch.manual_seed(0)
    model = TextClassifier(blocks)
    if is_checkpointed:
        unitrain.checkpoint_activations(model, nn.TransformerEncoderLayer)
    _train(backend, model, shard, batch)
    return memory.peak() - before


def _train(backend: Backend, model: TextClassifier, shard: ShardingMode, batch: int) -> None:
    vocabulary = model.tokens.num_embeddings
    distributed = backend.distributed_model(model, shard=shard)
    optimizer = backend.distributed_optimizer(torch.optim.Adam(model.parameters()), distributed, shard=shard)
    for _ in range(STEPS):
        text, classes = torch.randint(vocabulary, (batch, LENGTH)), torch.randint(CLASSES, (batch,))
        cross_entropy(distributed(text), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
