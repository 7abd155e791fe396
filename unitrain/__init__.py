"""One training script, any backend, any launcher, the same numbers.

    import unitrain

    with unitrain.init() as backend:
        model = backend.distributed_model(model)
        optimizer = backend.distributed_optimizer(optimizer, model)
        ...

`import unitrain` is cheap: torch is imported with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Each public name and the module it lives in, imported when the name is first used.
_EXPORTS = {
    "Backend": "unitrain.backends.base",
    "CSVLogger": "unitrain.loggers.csv",
    "Callback": "unitrain.callbacks.callback",
    "CheckpointError": "unitrain.errors",
    "Communicator": "unitrain.backends.base",
    "EarlyStopping": "unitrain.callbacks.early_stopping",
    "GradientWatch": "unitrain.callbacks.gradient_watch",
    "Histograms": "unitrain.callbacks.histograms",
    "JSONLinesLogger": "unitrain.loggers.json_lines",
    "Logger": "unitrain.loggers.logger",
    "MLflowLogger": "unitrain.loggers.mlflow",
    "RankInfo": "unitrain.bootstrap.environment",
    "PowerSGD": "unitrain.backends.compression_setting",
    "Profiler": "unitrain.callbacks.profiler",
    "TensorBoardLogger": "unitrain.loggers.tensorboard",
    "TrainConfig": "unitrain.config",
    "Trainer": "unitrain.trainer",
    "UnitrainError": "unitrain.errors",
    "WandbLogger": "unitrain.loggers.wandb",
    "available_backends": "unitrain.backends.registry",
    "differentiable_allgather": "unitrain.modules.differentiable_allgather",
    "init": "unitrain.initialize",
    "register_process_group": "unitrain.backends.horovod",
    "require": "unitrain.backends.capabilities",
    "run": "unitrain.functions.run",
    "share_buffers": "unitrain.modules.buffers",
    "sync_batch_norm": "unitrain.modules.sync_batch_norm",
}
_RENAMED = {"available_backends": "available"}

__all__ = [
    "Backend",
    "CSVLogger",
    "Callback",
    "CheckpointError",
    "Communicator",
    "EarlyStopping",
    "GradientWatch",
    "Histograms",
    "JSONLinesLogger",
    "Logger",
    "MLflowLogger",
    "PowerSGD",
    "Profiler",
    "RankInfo",
    "TensorBoardLogger",
    "TrainConfig",
    "Trainer",
    "UnitrainError",
    "WandbLogger",
    "__version__",
    "available_backends",
    "differentiable_allgather",
    "init",
    "register_process_group",
    "require",
    "run",
    "share_buffers",
    "sync_batch_norm",
]

if TYPE_CHECKING:
    from unitrain.backends.base import Backend, Communicator
    from unitrain.backends.capabilities import require
    from unitrain.backends.compression_setting import PowerSGD
    from unitrain.backends.horovod import register_process_group
    from unitrain.backends.registry import available as available_backends
    from unitrain.bootstrap.environment import RankInfo
    from unitrain.callbacks.callback import Callback
    from unitrain.callbacks.early_stopping import EarlyStopping
    from unitrain.callbacks.gradient_watch import GradientWatch
    from unitrain.callbacks.histograms import Histograms
    from unitrain.callbacks.profiler import Profiler
    from unitrain.config import TrainConfig
    from unitrain.errors import CheckpointError, UnitrainError
    from unitrain.functions.run import run
    from unitrain.initialize import init
    from unitrain.loggers.csv import CSVLogger
    from unitrain.loggers.json_lines import JSONLinesLogger
    from unitrain.loggers.logger import Logger
    from unitrain.loggers.mlflow import MLflowLogger
    from unitrain.loggers.tensorboard import TensorBoardLogger
    from unitrain.loggers.wandb import WandbLogger
    from unitrain.modules.buffers import share_buffers
    from unitrain.modules.differentiable_allgather import differentiable_allgather
    from unitrain.modules.sync_batch_norm import sync_batch_norm
    from unitrain.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'unitrain' has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
