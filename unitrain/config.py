"""What a training run is asked to do: one frozen dataclass that checks itself."""

from __future__ import annotations

import signal
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from unitrain import validation
from unitrain.backends.base import Communicator
from unitrain.backends.compression_setting import Compression, read_compression
from unitrain.backends.synchronized_errors import gather_if_different
from unitrain.errors import ConfigError, did_you_mean

SchedulerUnit = Literal["step", "epoch"]
ProgressStyle = Literal["auto", "bar", "lines", "off"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
BestMode = Literal["min", "max"]
LrScaling = Literal["none", "linear", "sqrt"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
StreamKind = Literal["shared", "own"]
Uneven = Literal["weight", "drop", "pad"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a run; every rank passes the same. Raises ConfigError for a value that cannot be meant.

    Batches: `batch_size` counts samples per rank and micro-step, `gradient_accumulation_steps` micro-steps per step,
    and `global_batch_size` samples per step over all ranks.
    Two of them give the third; `global_batch_size` alone is split
    over the ranks, and `batch_size` alone is not accumulated. An elastic job keeps the global batch of the ranks that
    it began with. A DataLoader's own batch size, shuffling and workers
    count. `eval_batch_size` is for evaluation; without it a DataLoader's own counts, and for a Dataset the one trained
    with.

    Data: `seed` decides its order, and each rank's random numbers (dropout, augmentation) from the first step on,
    whatever generator a DataLoader has. In its workers they begin anew with every epoch, so that a run resumed between
    two epochs repeats them; persistent workers are seeded only when they start.

    `stream` says what an IterableDataset is, which has no indices to share out. "shared": it yields the same items
    everywhere, and each rank and worker takes its own of them, so that none is taken twice or lost; it is given the
    same random numbers everywhere, and takes no part of its own because it is in a worker. "own": what it yields
    belongs to the rank and worker that it is on, such as random episodes or a dataset that shards itself; nothing is
    skipped, and each has random numbers of its own. A dataset or sampler with `set_epoch` is told the epoch.

    `uneven` says what happens where ranks have unequal numbers of batches, as in such data and with a batch_sampler.
    "weight": all are trained on, each sample once; a rank that is out stands in with weight 0. "drop": the epoch ends
    when the first rank has no batch left for each micro-step of a step. "pad": ranks that are out begin their batches
    again, and these count, until all ranks are out.

    The model: `sync_batch_norm` lets BatchNorm normalise over the samples of all ranks in a micro-step.
    `channels_last` lays out images and 4-d parameters so. `compile` is True, or a mode of torch.compile: a batch of
    another size is compiled once more, for any size. With `ema_decay` an average follows the weights, and whatever is
    evaluated is it: average = ema_decay * average + (1 - ema_decay) * weight after each step; buffers are copied.

    Steps: `precision` is what forward computes in (autocast; with "fp16" the loss is scaled, and a step whose gradient
    overflows on any rank is skipped on all), `tf32` lets GPUs multiply float32 in TF32, None leaves that as it is.
    `max_grad_norm` limits the norm of the gradient of the global batch. `compression` is rule 7 of `backends/base.py`,
    the
    same arithmetic on one rank as on many; "powersgd" is `PowerSGD()`, whose memory checkpoints keep. With `lr_scaling`
    the optimizer's learning rates are those for batches of `reference_batch_size`, and are multiplied by (the root of,
    for "sqrt") how many times as large the global batch is, reached over `warmup_steps`. `monitor` names the result
    that ReduceLROnPlateau follows, by default val_loss, else train_loss.

    Validation is at the end of every epoch, and with `validate_every_steps` also within it: those results are shown and
    logged, while schedulers, EarlyStopping and `keep_best` follow the epochs. `limit_train_steps` ends each epoch after
    so many optimizer steps, `limit_val_batches` evaluates that many batches of each rank. `dry_run` trains one step,
    validates one batch of each rank, and writes and logs nothing: to see that a script works.

    Length: `max_epochs` or `max_steps`, counted from the very first; `max_seconds` is for one call of `fit`, which
    stops once it has taken so long, and can be resumed from there. So it is after one of `preemption_signals` on any rank, where
    there is an `output_dir`: all ranks stop at the same step within about two seconds, save, and exit with 75; another
    signal more than three seconds later ends its process at once.

    Output: `max_steps`, `log_every_n_steps` and `checkpoint_every_steps` count optimizer steps,
    `checkpoint_every_epochs` epochs.
    Checkpoints are written beside the training, which waits for a copy in host memory only, unless
    `async_checkpoints` is off. `checkpoint_every_minutes` writes one whenever so much time has passed since the
    last, by rank 0's clock. The `keep_last` newest are kept, all with None, and in addition that of every
    `keep_every`-th epoch and that in which the result `keep_best` was lowest, or highest with `keep_best_mode` "max".
    `log_every_n_steps` is how often the
    exact mean loss over ranks is worked out, shown and checked, without it about every two seconds; with it the ranks
    agree on whether to stop. Beside that, the loop waits for the device only in the few steps that it takes the time
    of. Without `output_dir` nothing is written. During `fit` the folder is locked, by `flock` on its file `.lock`:
    another job that trains there is refused. `resume=True`, or "auto", goes on from the newest sound checkpoint in
    `output_dir`, or starts from the beginning where there is none; `resume="path"` demands a checkpoint there.
    """

    max_epochs: int | None = None
    max_steps: int | None = None
    max_seconds: float | None = None
    validate_every_steps: int | None = None
    limit_train_steps: int | None = None
    limit_val_batches: int | None = None
    dry_run: bool = False
    preemption_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")
    batch_size: int | None = None
    eval_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    global_batch_size: int | None = None
    precision: PrecisionName = "fp32"
    tf32: bool | None = None
    max_grad_norm: float | None = None
    lr_scaling: LrScaling = "none"
    reference_batch_size: int | None = None
    warmup_steps: int = 0
    scheduler_interval: SchedulerUnit = "step"
    monitor: str | None = None
    seed: int = 0
    shuffle: bool = True
    num_workers: int = 0
    stream: StreamKind = "shared"
    uneven: Uneven = "weight"
    find_unused_parameters: bool = False
    sync_batch_norm: bool = False
    ema_decay: float | None = None
    channels_last: bool = False
    compile: bool | CompileMode = False
    compression: Compression = "none"
    output_dir: str | Path | None = None
    checkpoint_every_epochs: int = 1
    checkpoint_every_steps: int | None = None
    checkpoint_every_minutes: float | None = None
    async_checkpoints: bool = True
    keep_last: int | None = 3
    keep_every: int | None = None
    keep_best: str | None = None
    keep_best_mode: BestMode = "min"
    resume: bool | str | Path = False
    progress: ProgressStyle = "auto"
    log_every_n_steps: int | None = None

    def __post_init__(self) -> None:
        self._check_length()
        for name, least, fix in _WHOLE_NUMBERS:
            validation.whole_number(_of(name), getattr(self, name), least, fix)
        for name, least, fix in _OPTIONAL_WHOLE_NUMBERS:
            validation.whole_number(_of(name), getattr(self, name), least, fix, optional=True)
        for name, choices in _CHOICES.items():
            validation.choice(_of(name), getattr(self, name), get_args(choices))
        for name in _SWITCHES:
            validation.switch(_of(name), getattr(self, name))
        validation.switch(_of("tf32"), self.tf32, optional=True)
        if not isinstance(self.compile, bool):
            validation.choice(_of("compile"), self.compile, get_args(CompileMode))
        read_compression(self.compression, "TrainConfig.compression")
        fix = "Leave it out to write checkpoints by epochs and steps only"
        validation.positive(_of("checkpoint_every_minutes"), self.checkpoint_every_minutes, fix, optional=True)
        validation.positive(_of("max_grad_norm"), self.max_grad_norm, "Use None not to clip", optional=True)
        validation.positive(_of("ema_decay"), self.ema_decay, "Use 0.999, or None not to average", optional=True)
        if self.ema_decay is not None and self.ema_decay >= 1:
            raise ConfigError(
                f"TrainConfig.ema_decay must be below 1, got {self.ema_decay}: at 1 the average never moves. Use 0.999."
            )
        validation.text(_of("monitor"), self.monitor, "Use monitor='val_loss', or leave it out", optional=True)
        validation.text(_of("keep_best"), self.keep_best, "Use keep_best='val_loss', or leave it out", optional=True)
        self._check_learning_rate()
        self._check_output()

    def _check_learning_rate(self) -> None:
        if self.lr_scaling != "none" and self.reference_batch_size is None:
            raise ConfigError(
                f"TrainConfig.lr_scaling {self.lr_scaling!r} needs the global batch size that the learning rate was "
                "found for. Use TrainConfig(..., reference_batch_size=256)."
            )
        if self.lr_scaling == "none" and (self.reference_batch_size is not None or self.warmup_steps):
            name = "warmup_steps" if self.reference_batch_size is None else "reference_batch_size"
            raise ConfigError(
                f"TrainConfig.{name} says how to scale the learning rate, which lr_scaling 'none' does not do. "
                f"Use TrainConfig(lr_scaling='linear', ...), or leave {name} out and give the Trainer a scheduler."
            )

    def _check_output(self) -> None:
        fix = 'Use output_dir="runs/first", or None to write nothing'
        validation.folder(_of("output_dir"), self.output_dir, fix, optional=True)
        if not isinstance(self.resume, bool):
            validation.folder(_of("resume"), self.resume, 'Use resume=True, resume="auto" or resume="runs/first"')
        if self.resume == "auto":
            object.__setattr__(self, "resume", True)
        if self.resume is True and self.output_dir is None:
            raise ConfigError(
                "TrainConfig.resume=True looks for checkpoints in output_dir, which is not set. "
                'Use TrainConfig(output_dir="runs/first", resume=True), or name a checkpoint: resume="runs/first".'
            )
        for name in ("keep_every", "keep_best"):
            if self.keep_last is None and getattr(self, name) is not None:
                raise ConfigError(
                    f"TrainConfig.{name}={getattr(self, name)!r} keeps checkpoints in addition to the last ones, but "
                    f"with keep_last=None all are kept. Use TrainConfig(keep_last=3, {name}={getattr(self, name)!r})."
                )
        for name in CHECKPOINT_SETTINGS if self.output_dir is None else ():
            value = getattr(self, name)
            if value not in (None, getattr(TrainConfig, name)):
                raise ConfigError(
                    f"TrainConfig.{name}={value!r} is about checkpoints, but without output_dir none are written. "
                    f'Use TrainConfig(output_dir="runs/first", {name}={value!r}), or leave {name} out.'
                )

    def _check_length(self) -> None:
        if (self.max_epochs is None) == (self.max_steps is None):
            found = (
                "neither" if self.max_epochs is None else f"max_epochs={self.max_epochs} and max_steps={self.max_steps}"
            )
            raise ConfigError(
                f"TrainConfig takes either max_epochs or max_steps, got {found}. Use TrainConfig(max_epochs=10)."
            )
        fix = 'Use preemption_signals=("SIGTERM", "SIGUSR1"), or () to leave all of them alone'
        kinds = (tuple, list)
        validation.instance(_of("preemption_signals"), self.preemption_signals, kinds, "a tuple of names", fix)
        for name in self.preemption_signals:
            if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
                near = did_you_mean(str(name), signal.Signals.__members__)
                raise ConfigError(
                    f"TrainConfig.preemption_signals has {name!r}, which is no signal that a program can handle. {near}"
                    f"{fix}."
                )
        fix = "Use None to train until max_epochs or max_steps are done"
        validation.positive(_of("max_seconds"), self.max_seconds, fix, optional=True)


def _of(name: str) -> str:
    return f"TrainConfig.{name}"


# Settings with the least value that is allowed, and how to fix one that is not.
_WHOLE_NUMBERS = (
    ("warmup_steps", 0, "Use 0 to begin with the full learning rate"),
    ("seed", 0, "Use 0"),
    ("num_workers", 0, "Use 0 to load the data in the training process"),
    ("checkpoint_every_epochs", 1, "Use 1 to write a checkpoint after every epoch"),
)
_OPTIONAL_WHOLE_NUMBERS = (
    ("max_epochs", 1, "Use max_epochs=1 to pass over the data once"),
    ("max_steps", 1, "Use max_steps=1 to change the parameters once"),
    ("batch_size", 1, "Use 32 to start with"),
    ("eval_batch_size", 1, "Leave it out to evaluate with batch_size"),
    ("gradient_accumulation_steps", 1, "Use 1 to step after every batch"),
    ("global_batch_size", 1, "Use 256 to start with"),
    ("reference_batch_size", 1, "Use the batch size that the rate was found for"),
    ("checkpoint_every_steps", 1, "Leave it out to write a checkpoint after epochs only"),
    ("keep_last", 1, "Use None to keep every checkpoint"),
    ("keep_every", 1, "Use 10 to keep that of every tenth epoch too"),
    ("validate_every_steps", 1, "Leave it out to validate after epochs only"),
    ("limit_train_steps", 1, "Leave it out to train on all data"),
    ("limit_val_batches", 1, "Leave it out to evaluate all data"),
    ("log_every_n_steps", 1, "Leave it out to show the loss every two seconds"),
)
_CHOICES: dict[str, Any] = {
    "precision": PrecisionName,
    "scheduler_interval": SchedulerUnit,
    "progress": ProgressStyle,
    "stream": StreamKind,
    "uneven": Uneven,
    "lr_scaling": LrScaling,
    "keep_best_mode": BestMode,
}
_SWITCHES = ("shuffle", "find_unused_parameters", "sync_batch_norm", "channels_last", "async_checkpoints", "dry_run")
# Settings without effect where no output_dir is set, which is an error where they differ from their defaults.
CHECKPOINT_SETTINGS = (
    "checkpoint_every_epochs",
    "checkpoint_every_steps",
    "checkpoint_every_minutes",
    "keep_last",
    "keep_every",
    "keep_best",
)


def for_dry_run(config: TrainConfig) -> TrainConfig:
    """Return `config` with one validation batch on each rank and without any output."""
    return replace(
        config,
        limit_val_batches=1,
        output_dir=None,
        resume=False,
        **{name: getattr(TrainConfig, name) for name in CHECKPOINT_SETTINGS},
    )


def check_alike(config: TrainConfig, communicator: Communicator) -> None:
    """Raise ConfigError on every rank when `config` is not the same on all of them. All ranks call it."""
    configs = gather_if_different(communicator, config) or []
    for field in fields(config):
        values = [getattr(one, field.name) for one in configs]
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"TrainConfig.{field.name} differs between ranks: {values}. Give every rank the same TrainConfig."
            )
