"""Program that trains with another trainer on a process group: `trainers_on_process_groups.py TRAINER BACKEND`.

TRAINER is `lightning`, `accelerate` or `ignite`. BACKEND is the backend of the default process group.
Rank 0 prints the trained parameters and a loss as JSON. The loss is the mean over all samples, except with Accelerate:
there, it is the sum of the losses of all batches in the last epoch.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch._dynamo  # import before creating the process group, which would otherwise not be released
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from unitrain.backends.horovod import register_process_group

BATCH, EPOCHS = 8, 2


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).tanh())


def network() -> nn.Module:
    torch.manual_seed(7 + int(dist.is_initialized() and dist.get_rank()))  # DDP broadcasts rank 0's parameters
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def report(model: nn.Module, backend: str, loss: float) -> None:
    """Print the parameters and the loss on rank 0. All ranks must call this function."""
    assert dist.get_backend() == backend, dist.get_backend()
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    gathered = [torch.zeros_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    assert all(torch.equal(other, gathered[0]) for other in gathered)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps({"loss": loss, "parameters": values.tolist()}), flush=True)


def train_with_lightning(backend: str) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.loss = 0.0

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            loss = nn.functional.mse_loss(self.network(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_epoch=True, on_step=False)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    model = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend=backend), max_epochs=EPOCHS,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=2, gradient_clip_val=0.5,
    )  # fmt: skip
    trainer.fit(model, DataLoader(samples(), batch_size=BATCH))
    report(model.network, backend, float(trainer.callback_metrics["loss"]))


def train_with_accelerate(backend: str) -> None:
    from accelerate import Accelerator

    # On CPUs, Accelerate only accepts gloo in InitProcessGroupKwargs, but uses an existing group.
    dist.init_process_group(backend)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples(), batch_size=BATCH))
    total = 0.0
    for _ in range(EPOCHS):
        total = 0.0
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            total += accelerator.gather_for_metrics(loss.detach()[None]).sum().item()
    report(accelerator.unwrap_model(model), backend, total)


def train_with_ignite(backend: str) -> None:
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
    from ignite.metrics import Loss

    def training(local_rank: int) -> None:
        data = samples()
        model = idist.auto_model(network())
        optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        loader = idist.auto_dataloader(data, batch_size=2 * BATCH, shuffle=False)
        trainer = create_supervised_trainer(model, optimizer, nn.functional.mse_loss, device=idist.device())
        evaluator = create_supervised_evaluator(model, {"loss": Loss(nn.functional.mse_loss)}, device=idist.device())
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: evaluator.run(loader))
        trainer.run(loader, max_epochs=EPOCHS)
        unwrapped = model.module if hasattr(model, "module") else model
        report(unwrapped, backend, evaluator.state.metrics["loss"])

    # idist.Parallel(backend=...) only accepts gloo and nccl, but uses an existing group.
    dist.init_process_group(backend)
    with idist.Parallel() as parallel:
        parallel.run(training)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    trainer, backend = sys.argv[1:]
    if backend == "horovod":
        register_process_group()
    globals()[f"train_with_{trainer}"](backend)
    dist.destroy_process_group()
