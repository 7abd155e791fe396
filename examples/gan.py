"""Two models and two optimizers: a generative adversarial network on handwritten digits, in a loop of its own.

torchrun --nproc-per-node 2 examples/gan.py --backend horovod

The Trainer has one optimizer and one loss. A loop of its own has as many as it needs: each model is wrapped, and each
backward reduces the gradients of the models that it passes through.
"""

from __future__ import annotations

import click
import torch
from digits import digits_data
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import unitrain
from unitrain.data.sharding import TrainingShard

NOISE = 16


@click.command()
@click.option("--backend", help="ddp, horovod or local; what the launcher implies when left out.")
@click.option("--device", help="cpu or cuda; a GPU for each rank where there are GPUs when left out.")
@click.option("--epochs", default=20, show_default=True)
@click.option("--batch-size", default=32, show_default=True, help="Samples per rank.")
@click.option("--seed", default=0, show_default=True)
def main(backend: str | None, device: str | None, epochs: int, batch_size: int, seed: int) -> None:
    """Train a generator of 8 x 8 digits against a discriminator (Goodfellow et al. 2014)."""
    with unitrain.init(backend, device=device) as ranks:
        torch.manual_seed(seed)
        generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid()).to(ranks.device)
        critic = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)).to(ranks.device)
        optimizers = [
            torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999)) for model in (generator, critic)
        ]
        generator, critic = ranks.distributed_model(generator), ranks.distributed_model(critic)
        generates, judges = (
            ranks.distributed_optimizer(optimizer, model)
            for optimizer, model in zip(optimizers, (generator, critic), strict=True)
        )
        noise = torch.Generator(ranks.device).manual_seed(seed + ranks.rank)  # different on every rank

        share = TrainingShard(digits_data(seed)[0], ranks, batch_size=batch_size, seed=seed)
        for epoch in range(epochs):
            sums = torch.zeros(3, device=ranks.device)
            for (images, _), part in share.micro_batches(epoch):
                real = images.to(ranks.device)
                weight = part.samples * ranks.size / part.step_samples  # the last batch is divided unevenly
                fake = generator(torch.randn(len(real), NOISE, generator=noise, device=ranks.device))

                # One forward for both, because each forward of a wrapped model is followed by one backward.
                scores = critic(torch.cat([real.flatten(1), fake.detach()]))
                labels = torch.cat([torch.ones_like(scores[: len(real)]), torch.zeros_like(scores[len(real) :])])
                judged = binary_cross_entropy_with_logits(scores, labels)
                (judged * weight).backward()
                judges.step()
                judges.zero_grad()

                # The gradient passes through the critic without changing it: its own gradients are dropped.
                score = critic(fake)
                fooled = binary_cross_entropy_with_logits(score, torch.ones_like(score))
                (fooled * weight).backward()
                generates.step()
                generates.zero_grad()
                judges.zero_grad()
                sums += torch.stack([judged.detach(), fooled.detach(), torch.ones_like(judged)]) * part.samples
            sums = ranks.allreduce(sums, op="sum")
            judged_mean, fooled_mean = (sums[:2] / sums[2]).tolist()
        if ranks.rank == 0:
            print(f"final critic_loss={judged_mean:.4f} generator_loss={fooled_mean:.4f}")


if __name__ == "__main__":
    main()
