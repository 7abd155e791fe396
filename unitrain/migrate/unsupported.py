"""Names that are refused, each with a fix. An entry also applies to the members of the name. The first matching entry
is used."""

from __future__ import annotations

# Names for which the script as a whole cannot be converted.
STRUCTURAL = {
    "horovod.torch.elastic": "Elastic Horovod restores state itself. Use the Trainer: docs/guides/elastic.md",
    "horovod.run": "The script starts its own ranks. Start it with: unitrain launch -np 4 train.py",
    "horovod.spark": "Horovod on Spark is not supported",
    "horovod.ray": "Horovod on Ray is not supported",
    "horovod.tensorflow": "Only PyTorch scripts are supported",
    "horovod.keras": "Only PyTorch scripts are supported",
    "torch.multiprocessing.spawn": "The script starts its own ranks. Remove the call, and start the function once per "
    "rank with: unitrain launch -np 4 train.py",
    "torch.distributed.fsdp": 'Sharded models: use backend.distributed_model(model, shard="parameters")',
    "torch.distributed.tensor": "Tensor parallelism is not supported",
    "torch.distributed.pipelining": "Use unitrain.Pipeline: docs/guides/pipeline.md",
    "torch.distributed.rpc": "RPC is not supported",
    "torch.distributed.elastic": "Start the script with: unitrain launch",
    "torch.distributed.run": "Start the script with: unitrain launch",
    "torch.distributed.checkpoint": "Use TrainConfig(output_dir=...), or torch.save on rank 0",
    "torch.distributed.device_mesh": "Device meshes are not supported",
    "torch.distributed.init_device_mesh": "Device meshes are not supported",
    # These libraries start a process group or Horovod themselves.
    "pytorch_lightning.Trainer": "Scripts with Lightning's Trainer are not converted. See docs/migrating/lightning.md",
    "lightning.pytorch.Trainer": "Scripts with Lightning's Trainer are not converted. See docs/migrating/lightning.md",
    "lightning.Trainer": "Scripts with Lightning's Trainer are not converted. See docs/migrating/lightning.md",
    "transformers.Trainer": "Scripts with the Trainer of transformers are not converted",
    "deepspeed": "DeepSpeed is not supported",
    "apex.parallel": "Use torch.nn.parallel.DistributedDataParallel, then migrate the script",
    "accelerate.notebook_launcher": "Use unitrain.run: docs/guides/notebooks.md",
    "accelerate.DeepSpeedPlugin": "DeepSpeed is not supported",
    "accelerate.FullyShardedDataParallelPlugin": 'Use backend.distributed_model(model, shard="parameters")',
}
# Names for which an edit of the line is sufficient.
LINES = {
    "horovod.torch.join": "Remove it if all ranks have the same number of batches, as with DistributedSampler. "
    "Otherwise use unitrain.ShardedLoader, which gives all ranks the same number of batches",
    "horovod.torch.Adasum": "unitrain has no Adasum. Use the mean: remove this option",
    "horovod.torch.SyncBatchNorm": "Use unitrain.sync_batch_norm(model, backend)",
    "horovod.torch.cross_rank": "Use backend.node_rank, the index of the host",
    "horovod.torch.cross_size": "Use backend.num_nodes, the number of hosts",
    "horovod.torch.nccl_built": "The script checks how Horovod was built. Remove the condition",
    "horovod.torch.mpi_built": "The script checks how Horovod was built. Remove the condition",
    "horovod.torch.gloo_built": "The script checks how Horovod was built. Remove the condition",
    "torch.distributed.get_backend": "The name depends on the backend. Compare backend.transport instead",
    "torch.distributed.optim": 'Use backend.distributed_optimizer(optimizer, model, shard="state")',
    "torch.distributed.algorithms": "Communication hooks and Join: use compression=... of distributed_model, and "
    "unitrain.ShardedLoader",
    "torch.distributed.is_nccl_available": "unitrain selects the transport. Remove the condition",
    "torch.distributed.is_torchelastic_launched": "unitrain.init detects the launcher. Remove the condition",
}
_PREFIXES = ("horovod", "torch.distributed", "deepspeed", "apex.parallel")


def find_fix(name: str, table: dict[str, str]) -> str | None:
    """Return the fix for `name` or for the module or class that contains it."""
    return next((fix for prefix, fix in table.items() if name == prefix or name.startswith(prefix + ".")), None)


def is_of_library(name: str) -> bool:
    """Return whether `name` belongs to a library whose unknown names are refused."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in _PREFIXES)
