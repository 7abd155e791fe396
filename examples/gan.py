"""A generative adversarial network on handwritten digits: two models and two optimizers, in your own loop.

torchrun --nproc-per-node 2 examples/gan.py --backend horovod

The Trainer supports one optimizer and one loss. Your own loop can use several: wrap each model. A backward pass reduces
the gradients of all models that it passes through.
"""

from __future__ import annotations

import click
import torch
from digits import digits_data
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import unitrain

NOISE = 16


@click.command()
@click.option("--backend", "backend_name", help="ddp, horovod or local. [default: implied by the launcher]")
@click.option("--device", help="cpu or cuda. [default: a GPU per rank, if there are GPUs]")
@click.option("--epochs", default=20, show_default=True)
@click.option("--batch-size", default=32, show_default=True, help="Samples per rank.")
@click.option("--seed", default=0, show_default=True)
def main(backend_name: str | None, device: str | None, epochs: int, batch_size: int, seed: int) -> None:
    """Train a generator of 8 x 8 digits against a discriminator (Goodfellow et al. 2014)."""
    with unitrain.init(backend_name, device=device) as backend:
        torch.manual_seed(seed)
        generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        discriminator = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))
        generator, discriminator = generator.to(backend.device), discriminator.to(backend.device)
        optimizers = [
            torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999)) for model in (generator, discriminator)
        ]
        generator, discriminator = backend.distributed_model(generator), backend.distributed_model(discriminator)
        generator_optimizer, discriminator_optimizer = (
            backend.distributed_optimizer(optimizer, model)
            for optimizer, model in zip(optimizers, (generator, discriminator), strict=True)
        )
        noise = torch.Generator(backend.device).manual_seed(seed + backend.rank)  # different on every rank

        loader = unitrain.ShardedLoader(digits_data(seed)[0], backend, batch_size=batch_size, seed=seed)
        mean_discriminator_loss, mean_generator_loss = unitrain.MeanMetric(backend), unitrain.MeanMetric(backend)
        for _ in range(epochs):
            mean_discriminator_loss.reset()
            mean_generator_loss.reset()
            for real, _ in loader:
                fake = generator(torch.randn(len(real), NOISE, generator=noise, device=backend.device))

                # Use one forward pass for both batches, because one backward pass must follow each forward pass.
                scores = discriminator(torch.cat([real.flatten(1), fake.detach()]))
                labels = torch.cat([torch.ones_like(scores[: len(real)]), torch.zeros_like(scores[len(real) :])])
                discriminator_loss = binary_cross_entropy_with_logits(scores, labels)
                (discriminator_loss * loader.loss_weight).backward()
                discriminator_optimizer.step()
                discriminator_optimizer.zero_grad()

                # The gradient flows through the discriminator, whose own gradients are discarded.
                score = discriminator(fake)
                generator_loss = binary_cross_entropy_with_logits(score, torch.ones_like(score))
                (generator_loss * loader.loss_weight).backward()
                generator_optimizer.step()
                generator_optimizer.zero_grad()
                discriminator_optimizer.zero_grad()
                mean_discriminator_loss.update(discriminator_loss, loader.num_samples)
                mean_generator_loss.update(generator_loss, loader.num_samples)
        # The mean losses of the last epoch. All ranks must call compute.
        losses = mean_discriminator_loss.compute(), mean_generator_loss.compute()
        if backend.rank == 0:
            print(f"final discriminator_loss={losses[0]:.4f} generator_loss={losses[1]:.4f}")


if __name__ == "__main__":
    main()
