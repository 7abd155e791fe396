"""TrainConfig: the settings of a training run, and their validation."""

from __future__ import annotations

import signal
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from unitrain import validation
from unitrain.accumulation import Accumulation, parse_accumulation
from unitrain.backends.base import Communicator, ShardingMode
from unitrain.backends.compression_setting import Compression, PowerSGD, resolve_compression
from unitrain.backends.local_sgd_config import LocalSGDConfig, parse_local_sgd
from unitrain.backends.synchronized_errors import gather_if_different
from unitrain.errors import ConfigError, did_you_mean

SchedulerUnit = Literal["step", "epoch"]
ProgressStyle = Literal["auto", "bar", "lines", "off"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
BestMode = Literal["min", "max"]
CheckpointFormat = Literal["auto", "full", "sharded"]
LrScaling = Literal["none", "linear", "sqrt"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
StreamKind = Literal["shared", "own"]
Uneven = Literal["weight", "drop", "pad"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run. Every rank must pass the same values.

    Only `max_epochs` or `max_steps` is required. A step is one optimizer update; a micro-batch is the batch of one
    forward and backward pass on one rank. Raises ConfigError for an invalid value or combination.
    """

    # --- Length -------------------------------------------------------------------------------------------------------
    max_epochs: int | None = None
    """Total epochs of the run, including those before a resume. Set either this or `max_steps`."""
    max_steps: int | None = None
    """Total optimizer steps of the run, including those before a resume."""
    max_seconds: float | None = None
    """Time limit of one `fit` call. At the limit, `fit` stops and saves a checkpoint, from which the run can be
    resumed.
    """
    limit_train_steps: int | None = None
    """End each epoch after this many optimizer steps."""
    limit_val_batches: int | None = None
    """Validate on at most this many batches, counted over all ranks. The selected samples do not depend on the number
    of ranks; with stream="own", each rank validates on this many batches."""
    dry_run: bool = False
    """Test a script: train one step and validate one batch, without writing checkpoints or logs."""
    preemption_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGHUP")
    """Signals that stop the run, if it has an `output_dir`. If any rank receives one, all ranks stop at the same step
    within about two seconds, save a checkpoint, and exit with code 75. A second signal more than three seconds later
    terminates the process immediately.
    """

    # --- Batches ------------------------------------------------------------------------------------------------------
    # global_batch_size = batch_size * gradient_accumulation_steps * ranks. Any two of these settings determine the
    # third.
    batch_size: int | None = None
    """Samples per rank and micro-batch. If the data is a DataLoader, its batch size is used. An elastic job keeps its
    initial global batch size when its number of ranks changes.
    """
    gradient_accumulation_steps: Accumulation | None = None
    """Micro-batches per optimizer step. The default is 1 unless `global_batch_size` is set. A schedule such as
    {0: 1, 4: 4} accumulates 4 micro-batches from the fifth epoch on, so the global batch size changes.
    """
    global_batch_size: int | None = None
    """Samples per optimizer step over all ranks. If neither `batch_size` nor `gradient_accumulation_steps` is set,
    `batch_size` is this number divided by the number of ranks."""
    eval_batch_size: int | None = None
    """Samples per rank and batch in the evaluation of a Dataset. The default is the batch size of training. A
    DataLoader is evaluated with its own batch size."""

    # --- Logical ranks ------------------------------------------------------------------------------------------------
    logical_ranks: int | None = None
    """Divide training into this number of logical ranks. Any number of processes up to this number can compute them,
    and the results are bit-identical. Per-rank settings, such as `batch_size`, then apply to each logical rank.
    """

    # --- Local steps --------------------------------------------------------------------------------------------------
    local_sgd: int | LocalSGDConfig | None = None
    """Low-communication training: every rank trains its own copy of the model, and the ranks synchronize after this
    number of steps. With a number, the weights are averaged (local SGD); a LocalSGDConfig object selects an outer
    optimizer (DiLoCo), compression and warm-up. Evaluation and checkpoints use the mean of the weights.
    """

    # --- Data ---------------------------------------------------------------------------------------------------------
    seed: int = 0
    """Seed of the data order and of each rank's random number generators (dropout, augmentation), from 0 to 2**64 - 1.
    DataLoader workers are seeded in every epoch, persistent workers only when they start.
    """
    shuffle: bool = True
    """Shuffle a Dataset in every epoch. A DataLoader keeps the order of its sampler."""
    num_workers: int = 0
    """Worker processes per rank that load a Dataset; 0 loads it in the training process."""
    stream: StreamKind = "shared"
    """How ranks and workers read an IterableDataset. "shared": the dataset yields the same items everywhere and must
    not shard itself; unitrain shards the items. "own": the dataset yields different items on each rank and worker, such
    as random episodes or pre-sharded files. If the dataset or sampler has a method `set_epoch`, it is called at the
    start of every epoch.
    """
    uneven: Uneven = "weight"
    """How to handle different numbers of batches per rank. "weight": train on every sample once; ranks that have run
    out of data process dummy batches with weight 0. "drop": end the epoch when any rank has no full step left. "pad":
    ranks that have run out of data repeat their batches, with full weight, until all ranks have finished.
    """

    # --- Model --------------------------------------------------------------------------------------------------------
    find_unused_parameters: bool = False
    """Allow parameters that do not contribute to the loss of a step, as in DDP."""
    broadcast_buffers: bool = True
    """Before the forward pass of each step, broadcast from rank 0 the buffers that the pass reads. Unlike in DDP,
    running statistics are not broadcast, because a forward pass in training mode does not read them. False saves time
    if large buffers, such as attention masks, never change.
    """
    sync_batch_norm: bool = False
    """Synchronize BatchNorm layers: normalize over the micro-batch samples of all ranks."""
    channels_last: bool = False
    """Convert 4-d parameters, buffers and floating-point inputs, such as images, to the memory format
    torch.channels_last."""
    checkpoint_activations: tuple[str, ...] = ()
    """Class names of modules, such as "TransformerEncoderLayer", whose activations are recomputed in the backward pass
    instead of being stored. This trades compute time for memory; the results are the same.
    """
    compile: bool | CompileMode = False
    """Compile the model with torch.compile: True, or one of its modes. A change of the batch size triggers a
    recompilation with dynamic shapes.
    """
    ema_decay: float | None = None
    """Maintain an exponential moving average of the weights, which starts as a copy of the weights after the first
    step, and is updated after each further step: average = ema_decay * average + (1 - ema_decay) * weight. Buffers are
    copied, not averaged. Evaluation uses the average. With `local_sgd`, the average is updated at each
    synchronization, with ema_decay**steps.
    """
    check_weights: bool = True
    """Compare the weights of all ranks at the end of each epoch and before each checkpoint on disk; differences that
    are larger than rounding errors raise ModelError."""

    # --- Optimization -------------------------------------------------------------------------------------------------
    precision: PrecisionName = "fp32"
    """Autocast dtype of the forward pass. With "fp16" the loss is scaled, and a step whose gradients overflow on any
    rank is skipped on all ranks."""
    tf32: bool | None = None
    """Whether float32 matrix multiplications and convolutions on GPUs may use TF32; None keeps torch's settings."""
    max_grad_norm: float | None = None
    """Clip the gradient norm of the global batch to this value. With `local_sgd`, each rank clips its own gradients.
    """
    compression: Compression = "none"
    """Gradient compression for communication: "none", "fp16", "bf16", "powersgd" or a PowerSGD object (its state is
    saved in checkpoints)."""
    shard: ShardingMode = "none"
    """"state" shards the optimizer state across ranks (ZeRO-1): each rank updates its shard of the parameters and
    broadcasts it. "gradients" also shards the gradients (ZeRO-2). "parameters" also shards the parameters (ZeRO-3),
    which are all-gathered block by block for the forward and backward pass. The results are the same as with "none".
    Checkpoints are also sharded; see `checkpoint_format`.
    """
    shard_blocks: tuple[str, ...] | int = ()
    """With shard="parameters", class names of the blocks whose parameters are gathered together, such as
    "TransformerEncoderLayer", or a number N. With a number, the blocks are the innermost modules with at least N
    parameters. By default, blocks are the outermost modules whose class occurs more than once.
    """
    lr_scaling: LrScaling = "none"
    """Multiply the optimizer's learning rates by k = global batch size / `reference_batch_size` ("linear") or by its
    square root ("sqrt")."""
    reference_batch_size: int | None = None
    """Global batch size for which the optimizer's learning rates were chosen. Required by `lr_scaling`."""
    warmup_steps: int = 0
    """Steps over which the factor of `lr_scaling` increases from 1 to its full value."""
    scheduler_interval: SchedulerUnit = "step"
    """Whether the learning-rate scheduler steps after each "step" or each "epoch"."""
    monitor: str | None = None
    """The result that ReduceLROnPlateau monitors. The default is val_loss, or train_loss without validation."""

    # --- Validation and logging ---------------------------------------------------------------------------------------
    validate_every_steps: int | None = None
    """Also validate every N steps within an epoch. Schedulers, EarlyStopping and `keep_best` ignore the results."""
    log_every_n_steps: int | None = None
    """Number of steps after which the ranks synchronize the training loss, and rank 0 displays and logs the exact mean
    loss. By default, this happens at each sync point, about every two seconds. Stop requests are always synchronized
    about every two seconds.
    """
    progress: ProgressStyle = "auto"
    """Progress display of rank 0: "bar", "lines", "off", or "auto" (a bar on a terminal, otherwise lines)."""

    peak_flops: float | None = None
    """Peak FLOP/s of one device, from which the model FLOPs utilization (MFU) is computed. The default is the value in
    the GPU's data sheet for the precision of the run. If the value is unknown, as on CPUs, the MFU is not computed."""
    metrics_port: int | None = None
    """Serve the metrics of the run for Prometheus on this port of rank 0. `unitrain launch --metrics-port` takes
    precedence."""
    metrics_address: str = "127.0.0.1"
    """The address on which rank 0 serves the metrics. The endpoint has no authentication."""

    # --- Checkpoints --------------------------------------------------------------------------------------------------
    output_dir: str | Path | None = None
    """Folder for checkpoints, history and logs; nothing is written without it. `fit` locks it against other jobs, with
    `flock` on the file `.lock` in it.
    """
    resume: bool | str | Path = False
    """True or "auto" resumes from the newest valid checkpoint in `output_dir`, or starts a new run if there is none. A
    path resumes from that checkpoint or run folder, which must exist."""
    checkpoint_every_epochs: int = 1
    """Save a checkpoint after every N epochs, and at the end of each `fit` call."""
    checkpoint_every_steps: int | None = None
    """Also save a checkpoint every N optimizer steps."""
    checkpoint_every_minutes: float | None = None
    """Also save a checkpoint when this much time has elapsed on rank 0 since the last one."""
    memory_checkpoint_every_steps: int | None = None
    """Also keep the state of every N-th step in the memory of rank 0's host, under /dev/shm, until `unitrain launch`
    exits. A job that `unitrain launch --max-restarts` or `--elastic` restarts then resumes from that step. The setting
    has no effect in other jobs, or if `unitrain launch` does not run on rank 0's host.
    """
    async_checkpoints: bool = True
    """Write checkpoints in a background thread; training waits only until the state is copied to host memory."""
    checkpoint_format: CheckpointFormat = "auto"
    """"full": rank 0 gathers the state and writes it. "sharded": all ranks write their portions of the state in
    parallel. "auto" is "sharded" if `shard` is set, otherwise "full". A run can resume from either format.
    """
    keep_last: int | None = 3
    """Number of newest checkpoints to keep; None keeps all."""
    keep_every_epochs: int | None = None
    """Also keep the checkpoint of every N-th epoch."""
    keep_best: str | None = None
    """Also keep the checkpoint with the best value of this result, such as "val_loss"."""
    keep_best_mode: BestMode = "min"
    """Whether the best value of `keep_best` is the lowest ("min") or highest ("max")."""

    def __post_init__(self) -> None:
        self._check_length_settings()
        name, value = "gradient_accumulation_steps", self.gradient_accumulation_steps
        object.__setattr__(self, name, parse_accumulation(_full_name(name), value, self.global_batch_size))
        for name, minimum, fix in _INTEGER_SETTINGS:
            validation.check_integer(_full_name(name), getattr(self, name), minimum, fix)
        for name, minimum, fix in _OPTIONAL_INTEGER_SETTINGS:
            validation.check_integer(_full_name(name), getattr(self, name), minimum, fix, optional=True)
        validation.check_integer(_full_name("seed"), self.seed, 0, "Use 0", is_limited=False)
        if self.seed > _MAX_SEED:
            raise ConfigError(
                f"TrainConfig.seed must be at most {_MAX_SEED} (2**64 - 1, the maximum of torch.manual_seed), got "
                f"{validation.describe_value(self.seed)}. Use 0."
            )
        for name, choices in _CHOICE_SETTINGS.items():
            validation.check_choice(_full_name(name), getattr(self, name), get_args(choices))
        for name in _BOOLEAN_SETTINGS:
            validation.check_boolean(_full_name(name), getattr(self, name))
        validation.check_boolean(_full_name("tf32"), self.tf32, optional=True)
        self._check_class_names("checkpoint_activations")
        if not validation.is_positive_integer(self.shard_blocks):
            self._check_class_names("shard_blocks", " or a number of parameters")
        self._check_sharded_parameters()
        self._check_logical_ranks()
        self._check_local_sgd()
        if not isinstance(self.compile, bool):
            validation.check_choice(_full_name("compile"), self.compile, get_args(CompileMode))
        resolve_compression(self.compression, "TrainConfig.compression")
        fix = "Leave it out to write checkpoints by epochs and steps only"
        validation.check_positive(
            _full_name("checkpoint_every_minutes"), self.checkpoint_every_minutes, fix, optional=True
        )
        validation.check_positive(
            _full_name("max_grad_norm"), self.max_grad_norm, "Use None to disable clipping", optional=True
        )
        validation.check_positive(
            _full_name("ema_decay"), self.ema_decay, "Use 0.999, or None to disable averaging", optional=True
        )
        if self.ema_decay is not None and self.ema_decay >= 1:
            raise ConfigError(
                f"TrainConfig.ema_decay must be below 1, got {self.ema_decay}: at 1 the average never changes. "
                "Use 0.999."
            )
        fix = "Use the peak of the device in FLOP/s, such as 312e12, or leave it out"
        validation.check_positive(_full_name("peak_flops"), self.peak_flops, fix, optional=True)
        fix = 'Use metrics_address="127.0.0.1", or "0.0.0.0" for all interfaces'
        validation.check_text(_full_name("metrics_address"), self.metrics_address, fix)
        if self.metrics_port is not None and self.metrics_port > 65535:
            raise ConfigError(
                f"TrainConfig.metrics_port must be at most 65535, got {self.metrics_port}. Use metrics_port=9400."
            )
        validation.check_text(
            _full_name("monitor"), self.monitor, "Use monitor='val_loss', or leave it out", optional=True
        )
        validation.check_text(
            _full_name("keep_best"), self.keep_best, "Use keep_best='val_loss', or leave it out", optional=True
        )
        self._check_learning_rate()
        self._check_output_settings()

    def _check_learning_rate(self) -> None:
        if self.lr_scaling != "none" and self.reference_batch_size is None:
            raise ConfigError(
                f"TrainConfig.lr_scaling {self.lr_scaling!r} needs the global batch size for which the learning rate "
                "was chosen. Use TrainConfig(..., reference_batch_size=256)."
            )
        if self.lr_scaling == "none" and (self.reference_batch_size is not None or self.warmup_steps):
            name = "warmup_steps" if self.reference_batch_size is None else "reference_batch_size"
            raise ConfigError(
                f"TrainConfig.{name} configures the scaling of the learning rate, but lr_scaling is 'none'. "
                f"Use TrainConfig(lr_scaling='linear', ...), or leave {name} out and give the Trainer a scheduler."
            )

    def _check_output_settings(self) -> None:
        fix = 'Use output_dir="runs/first", or None to write nothing'
        output_dir = validation.check_path(_full_name("output_dir"), self.output_dir, fix, optional=True)
        object.__setattr__(self, "output_dir", output_dir)
        if not isinstance(self.resume, bool):
            fix = 'Use resume=True, resume="auto" or resume="runs/first"'
            object.__setattr__(self, "resume", validation.check_path(_full_name("resume"), self.resume, fix))
        if self.resume == "auto":
            object.__setattr__(self, "resume", True)
        if self.resume is True and self.output_dir is None:
            raise ConfigError(
                "TrainConfig.resume=True looks for checkpoints in output_dir, which is not set. "
                'Use TrainConfig(output_dir="runs/first", resume=True), or pass a checkpoint: resume="runs/first".'
            )
        for name in ("keep_every_epochs", "keep_best"):
            if self.keep_last is None and getattr(self, name) is not None:
                raise ConfigError(
                    f"TrainConfig.{name}={getattr(self, name)!r} keeps checkpoints in addition to the last ones, but "
                    f"with keep_last=None all are kept. Use TrainConfig(keep_last=3, {name}={getattr(self, name)!r})."
                )
        for name in CHECKPOINT_SETTINGS if self.output_dir is None else ():
            value = getattr(self, name)
            if value not in (None, getattr(TrainConfig, name)):
                raise ConfigError(
                    f"TrainConfig.{name}={value!r} configures checkpoints, but without output_dir none are written. "
                    f'Use TrainConfig(output_dir="runs/first", {name}={value!r}), or leave {name} out.'
                )

    def _check_class_names(self, setting: str, alternative: str = "") -> None:
        names = getattr(self, setting)
        if not (isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names)):
            description = validation.describe_value(names)
            raise ConfigError(
                f"TrainConfig.{setting} must be a tuple of class names{alternative}, got {description}. "
                f"Use {setting}=('TransformerEncoderLayer',)."
            )

    def _check_sharded_parameters(self) -> None:
        if self.shard == "gradients" and isinstance(
            resolve_compression(self.compression, "TrainConfig.compression"), PowerSGD
        ):
            raise ConfigError(
                "TrainConfig.compression 'powersgd' is not supported with shard=\"gradients\", because PowerSGD "
                'compresses complete gradients. Use compression="bf16", or shard="state".'
            )
        if self.shard != "parameters":
            if self.shard_blocks:
                raise ConfigError(
                    "TrainConfig.shard_blocks selects the blocks of sharded parameters, but shard is "
                    f'{self.shard!r}. Use TrainConfig(shard="parameters", ...), or leave shard_blocks out.'
                )
            return
        for name, value in (
            ("compile", self.compile),
            ("channels_last", self.channels_last),
            ("find_unused_parameters", self.find_unused_parameters),
            ("compression", self.compression),
        ):
            if value not in (False, "none"):
                raise ConfigError(
                    f'TrainConfig.{name}={value!r} is not supported with shard="parameters". Leave {name} out, or use '
                    'shard="state".'
                )

    def _check_logical_ranks(self) -> None:
        if self.logical_ranks is None:
            return
        for name in ("shard", "compression"):
            value = getattr(self, name)
            if value != "none":
                raise ConfigError(
                    f"TrainConfig.{name}={value!r} is not supported with logical_ranks. Leave {name} out, or leave "
                    "logical_ranks out."
                )
        if self.sync_batch_norm and self.compile:
            raise ConfigError(
                f"TrainConfig.compile={self.compile!r} is not supported with logical_ranks and sync_batch_norm. Leave "
                "compile out, or leave sync_batch_norm out."
            )

    def _check_local_sgd(self) -> None:
        if self.local_sgd is None:
            return
        parse_local_sgd(self.local_sgd, "TrainConfig.local_sgd")
        for name, reason, fix in _NOT_WITH_LOCAL_SGD:
            value = getattr(self, name)
            if value not in (None, False, getattr(TrainConfig, name)):
                raise ConfigError(
                    f"TrainConfig.{name}={value!r} is not supported with local_sgd, because {reason}. {fix}, or "
                    "leave local_sgd out."
                )
        if self.precision == "fp16":
            raise ConfigError(
                "TrainConfig.precision='fp16' is not supported with local_sgd, because ranks would skip different "
                "steps. Use precision='bf16', or leave local_sgd out."
            )

    def _check_length_settings(self) -> None:
        if (self.max_epochs is None) == (self.max_steps is None):
            description = (
                "neither"
                if self.max_epochs is None
                else f"max_epochs={validation.describe_value(self.max_epochs)} and "
                f"max_steps={validation.describe_value(self.max_steps)}"
            )
            raise ConfigError(
                f"TrainConfig takes either max_epochs or max_steps, got {description}. Use TrainConfig(max_epochs=10)."
            )
        fix = 'Use preemption_signals=("SIGTERM", "SIGHUP", "SIGUSR1"), or () to handle no signal'
        types = (tuple, list)
        validation.check_instance(
            _full_name("preemption_signals"), self.preemption_signals, types, "a tuple of names", fix
        )
        signals = [name for name in signal.Signals.__members__ if name not in ("SIGKILL", "SIGSTOP")]
        for name in self.preemption_signals:
            if not isinstance(name, str) or name not in signals:
                is_misspelt = isinstance(name, str) and name not in signal.Signals.__members__
                suggestion = did_you_mean(name, signals) if is_misspelt else ""
                raise ConfigError(
                    f"TrainConfig.preemption_signals has {validation.describe_value(name)}, which is not a "
                    "signal that a program can handle. "
                    f"{suggestion}{fix}."
                )
        fix = "Use None for no time limit"
        validation.check_positive(_full_name("max_seconds"), self.max_seconds, fix, optional=True)


def _full_name(name: str) -> str:
    return f"TrainConfig.{name}"


_MAX_SEED = 2**64 - 1
# Integer settings: name, minimum, and the fix in the error message.
_INTEGER_SETTINGS = (
    ("warmup_steps", 0, "Use 0 to start with the full learning rate"),
    ("num_workers", 0, "Use 0 to load the data in the training process"),
    ("checkpoint_every_epochs", 1, "Use 1 to write a checkpoint after every epoch"),
)
_OPTIONAL_INTEGER_SETTINGS = (
    ("max_epochs", 1, "Use max_epochs=1 to train on the data once"),
    ("max_steps", 1, "Use max_steps=1 to update the parameters once"),
    ("batch_size", 1, "Use 32 to start with"),
    ("eval_batch_size", 1, "Leave it out to evaluate with batch_size"),
    ("global_batch_size", 1, "Use 256 to start with"),
    ("logical_ranks", 1, "Leave it out to train on the ranks that were started"),
    ("reference_batch_size", 1, "Use the batch size for which the learning rate was chosen"),
    ("checkpoint_every_steps", 1, "Leave it out to write a checkpoint after epochs only"),
    ("memory_checkpoint_every_steps", 1, "Leave it out to keep no checkpoints in memory"),
    ("keep_last", 1, "Use None to keep every checkpoint"),
    ("keep_every_epochs", 1, "Use 10 to also keep the checkpoint of every tenth epoch"),
    ("validate_every_steps", 1, "Leave it out to validate after epochs only"),
    ("limit_train_steps", 1, "Leave it out to train on all data"),
    ("limit_val_batches", 1, "Leave it out to evaluate all data"),
    ("log_every_n_steps", 1, "Leave it out to log about every two seconds"),
    ("metrics_port", 1, "Use 9400, the port at which Prometheus reads the metrics, or leave it out"),
)
_CHOICE_SETTINGS: dict[str, Any] = {
    "precision": PrecisionName,
    "scheduler_interval": SchedulerUnit,
    "progress": ProgressStyle,
    "stream": StreamKind,
    "uneven": Uneven,
    "lr_scaling": LrScaling,
    "shard": ShardingMode,
    "checkpoint_format": CheckpointFormat,
    "keep_best_mode": BestMode,
}
_BOOLEAN_SETTINGS = (
    "shuffle",
    "find_unused_parameters",
    "broadcast_buffers",
    "sync_batch_norm",
    "channels_last",
    "check_weights",
    "async_checkpoints",
    "dry_run",
)
# Settings that cannot be combined with `local_sgd`: name, reason and fix.
_NOT_WITH_LOCAL_SGD = (
    ("logical_ranks", "logical ranks have one common copy of the model", "Leave logical_ranks out"),
    ("shard", "each rank trains its own copy of the model", "Leave shard out"),
    (
        "compression",
        "gradients are not communicated in local steps",
        "Use local_sgd=LocalSGDConfig(steps=25, compression='bf16')",
    ),
    ("sync_batch_norm", "it communicates in every forward pass", "Leave sync_batch_norm out"),
    (
        "memory_checkpoint_every_steps",
        "the states of all ranks would be sent to rank 0",
        "Use checkpoint_every_steps",
    ),
)
# Checkpoint settings. Without output_dir, values other than the defaults are an error.
CHECKPOINT_SETTINGS = (
    "checkpoint_every_epochs",
    "checkpoint_every_steps",
    "checkpoint_every_minutes",
    "memory_checkpoint_every_steps",
    "checkpoint_format",
    "keep_last",
    "keep_every_epochs",
    "keep_best",
)


def check_same_config(config: TrainConfig, communicator: Communicator, config_text: str | None = None) -> None:
    """Raise ConfigError on every rank if `config` or `config_text` differs between ranks. All ranks must call this
    function."""
    gathered = gather_if_different(communicator, (config, config_text)) or []
    configs = [config_of_rank for config_of_rank, _ in gathered]
    for field in fields(config):
        values = [getattr(config_of_rank, field.name) for config_of_rank in configs]
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"TrainConfig.{field.name} differs between ranks: {values}. Give every rank the same TrainConfig."
            )
    texts = [text for _, text in gathered]
    if any(text != texts[0] for text in texts):
        rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
        raise ConfigError(
            f"Trainer(config_text=...) differs between ranks 0 and {rank}. Give every rank the same configuration: "
            "with `unitrain train`, copy the files to all hosts and use the same options."
        )
