"""Run one PyTorch training script on native DDP or Horovod, under any launcher, with the same numerical results.

    import unitrain

    with unitrain.init() as backend:
        model = backend.distributed_model(model)
        optimizer = backend.distributed_optimizer(optimizer, model)
        ...

`import unitrain` does not import torch. The first access to a public name imports the module that defines it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public names and the modules that define them.
_EXPORTS = {
    "AuthenticationError": "unitrain.errors",
    "Backend": "unitrain.backends.base",
    "BackendUnavailableError": "unitrain.errors",
    "BatchSizeSearch": "unitrain.batch_size_finder",
    "CSVLogger": "unitrain.loggers.csv",
    "Callback": "unitrain.callbacks.callback",
    "CallbackError": "unitrain.errors",
    "CheckpointError": "unitrain.errors",
    "CollectiveArgumentError": "unitrain.errors",
    "CollectiveMismatchError": "unitrain.errors",
    "CollectiveTimeoutError": "unitrain.errors",
    "Communicator": "unitrain.backends.base",
    "ConfigError": "unitrain.errors",
    "DataError": "unitrain.errors",
    "EarlyStopping": "unitrain.callbacks.early_stopping",
    "EnvironmentVariableError": "unitrain.errors",
    "FunctionError": "unitrain.errors",
    "GradientWatch": "unitrain.callbacks.gradient_watch",
    "Histograms": "unitrain.callbacks.histograms",
    "HorovodBuildError": "unitrain.errors",
    "JSONLinesLogger": "unitrain.loggers.json_lines",
    "LauncherMismatchError": "unitrain.errors",
    "LearningRateCurve": "unitrain.learning_rate_finder",
    "LocalSGDConfig": "unitrain.backends.local_sgd_config",
    "LocalSGD": "unitrain.optim.local_sgd",
    "Logger": "unitrain.loggers.logger",
    "LoggerError": "unitrain.errors",
    "Loss": "unitrain.optim.loss_weighting",
    "MLflowLogger": "unitrain.loggers.mlflow",
    "MeanMetric": "unitrain.metrics.means",
    "MetricError": "unitrain.errors",
    "MemorySnapshot": "unitrain.callbacks.memory_snapshot",
    "MissingDependencyError": "unitrain.errors",
    "ModelSummary": "unitrain.model_summary",
    "ModelError": "unitrain.errors",
    "ModelLoss": "unitrain.optim.model_loss",
    "NonFiniteGradientError": "unitrain.errors",
    "NonFiniteLossError": "unitrain.errors",
    "Pipeline": "unitrain.backends.pipeline.pipeline",
    "PowerSGD": "unitrain.backends.compression_setting",
    "PredictionWriter": "unitrain.prediction_writer",
    "Preempted": "unitrain.errors",
    "Profiler": "unitrain.callbacks.profiler",
    "RankFailedError": "unitrain.errors",
    "RankInfo": "unitrain.bootstrap.environment",
    "ReportError": "unitrain.errors",
    "ShardedLoader": "unitrain.data.sharded_loader",
    "SupportsAllToAll": "unitrain.backends.capabilities",
    "SupportsAsyncBroadcasts": "unitrain.backends.capabilities",
    "SupportsPointToPoint": "unitrain.backends.capabilities",
    "SupportsPowerSGD": "unitrain.backends.capabilities",
    "SupportsShardedParameters": "unitrain.backends.capabilities",
    "TensorBoardLogger": "unitrain.loggers.tensorboard",
    "TensorError": "unitrain.errors",
    "TrainConfig": "unitrain.config",
    "Trainer": "unitrain.trainer",
    "TrainingProgress": "unitrain.progress.training_progress",
    "UnitrainError": "unitrain.errors",
    "UnknownBackendError": "unitrain.errors",
    "UnsupportedError": "unitrain.errors",
    "WandbLogger": "unitrain.loggers.wandb",
    "available_backends": "unitrain.backends.registry",
    "broadcast_buffers": "unitrain.modules.buffers",
    "checkpoint_activations": "unitrain.modules.activation_checkpointing",
    "differentiable_allgather": "unitrain.modules.differentiable_allgather",
    "find_batch_size": "unitrain.batch_size_finder",
    "find_learning_rate": "unitrain.learning_rate_finder",
    "init": "unitrain.initialize",
    "register_process_group": "unitrain.backends.horovod",
    "require_capability": "unitrain.backends.capabilities",
    "run": "unitrain.functions.run",
    "shard_optimizer_state": "unitrain.backends.sharding.optimizer_state",
    "summarize": "unitrain.model_summary",
    "sync_batch_norm": "unitrain.modules.sync_batch_norm",
}
_RENAMED = {"available_backends": "available"}

__all__ = [
    "AuthenticationError",
    "Backend",
    "BackendUnavailableError",
    "BatchSizeSearch",
    "CSVLogger",
    "Callback",
    "CallbackError",
    "CheckpointError",
    "CollectiveArgumentError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Communicator",
    "ConfigError",
    "DataError",
    "EarlyStopping",
    "EnvironmentVariableError",
    "FunctionError",
    "GradientWatch",
    "Histograms",
    "HorovodBuildError",
    "JSONLinesLogger",
    "LauncherMismatchError",
    "LearningRateCurve",
    "LocalSGD",
    "LocalSGDConfig",
    "Logger",
    "LoggerError",
    "Loss",
    "MLflowLogger",
    "MeanMetric",
    "MemorySnapshot",
    "MetricError",
    "MissingDependencyError",
    "ModelError",
    "ModelLoss",
    "ModelSummary",
    "NonFiniteGradientError",
    "NonFiniteLossError",
    "Pipeline",
    "PowerSGD",
    "PredictionWriter",
    "Preempted",
    "Profiler",
    "RankFailedError",
    "RankInfo",
    "ReportError",
    "ShardedLoader",
    "SupportsAllToAll",
    "SupportsAsyncBroadcasts",
    "SupportsPointToPoint",
    "SupportsPowerSGD",
    "SupportsShardedParameters",
    "TensorBoardLogger",
    "TensorError",
    "TrainConfig",
    "Trainer",
    "TrainingProgress",
    "UnitrainError",
    "UnknownBackendError",
    "UnsupportedError",
    "WandbLogger",
    "__version__",
    "available_backends",
    "broadcast_buffers",
    "checkpoint_activations",
    "differentiable_allgather",
    "find_batch_size",
    "find_learning_rate",
    "init",
    "register_process_group",
    "require_capability",
    "run",
    "shard_optimizer_state",
    "summarize",
    "sync_batch_norm",
]

if TYPE_CHECKING:
    from unitrain.backends.base import Backend, Communicator
    from unitrain.backends.capabilities import (
        SupportsAllToAll,
        SupportsAsyncBroadcasts,
        SupportsPointToPoint,
        SupportsPowerSGD,
        SupportsShardedParameters,
        require_capability,
    )
    from unitrain.backends.compression_setting import PowerSGD
    from unitrain.backends.horovod import register_process_group
    from unitrain.backends.local_sgd_config import LocalSGDConfig
    from unitrain.backends.pipeline.pipeline import Pipeline
    from unitrain.backends.registry import available as available_backends
    from unitrain.backends.sharding.optimizer_state import shard_optimizer_state
    from unitrain.batch_size_finder import BatchSizeSearch, find_batch_size
    from unitrain.bootstrap.environment import RankInfo
    from unitrain.callbacks.callback import Callback
    from unitrain.callbacks.early_stopping import EarlyStopping
    from unitrain.callbacks.gradient_watch import GradientWatch
    from unitrain.callbacks.histograms import Histograms
    from unitrain.callbacks.memory_snapshot import MemorySnapshot
    from unitrain.callbacks.profiler import Profiler
    from unitrain.config import TrainConfig
    from unitrain.data.sharded_loader import ShardedLoader
    from unitrain.errors import (
        AuthenticationError,
        BackendUnavailableError,
        CallbackError,
        CheckpointError,
        CollectiveArgumentError,
        CollectiveMismatchError,
        CollectiveTimeoutError,
        ConfigError,
        DataError,
        EnvironmentVariableError,
        FunctionError,
        HorovodBuildError,
        LauncherMismatchError,
        LoggerError,
        MetricError,
        MissingDependencyError,
        ModelError,
        NonFiniteGradientError,
        NonFiniteLossError,
        Preempted,
        RankFailedError,
        ReportError,
        TensorError,
        UnitrainError,
        UnknownBackendError,
        UnsupportedError,
    )
    from unitrain.functions.run import run
    from unitrain.initialize import init
    from unitrain.learning_rate_finder import LearningRateCurve, find_learning_rate
    from unitrain.loggers.csv import CSVLogger
    from unitrain.loggers.json_lines import JSONLinesLogger
    from unitrain.loggers.logger import Logger
    from unitrain.loggers.mlflow import MLflowLogger
    from unitrain.loggers.tensorboard import TensorBoardLogger
    from unitrain.loggers.wandb import WandbLogger
    from unitrain.metrics.means import MeanMetric
    from unitrain.model_summary import ModelSummary, summarize
    from unitrain.modules.activation_checkpointing import checkpoint_activations
    from unitrain.modules.buffers import broadcast_buffers
    from unitrain.modules.differentiable_allgather import differentiable_allgather
    from unitrain.modules.sync_batch_norm import sync_batch_norm
    from unitrain.optim.local_sgd import LocalSGD
    from unitrain.optim.loss_weighting import Loss
    from unitrain.optim.model_loss import ModelLoss
    from unitrain.prediction_writer import PredictionWriter
    from unitrain.progress.training_progress import TrainingProgress
    from unitrain.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'unitrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
