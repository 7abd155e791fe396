"""FLOPs of a micro-batch, and the peak FLOP/s of GPUs, from which the model FLOPs utilization (MFU) is computed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unitrain.config import TrainConfig
from unitrain.data.order import MicroBatch
from unitrain.optim.loss_weighting import Loss
from unitrain.output import get_logger
from unitrain.torch_compat import cpu_attention_operations, current_backward

ForwardBackward = Callable[[Any, MicroBatch], Loss]

_log = get_logger(__name__)

# Peak FLOP/s of dense matrix multiplications in 16 bits, TF32 and FP32, by a regular expression for the whole device
# name that torch.cuda reports, without the brand. Names with other suffixes belong to other or partial devices, whose
# rates differ: "MIG 1g.10gb", vGPU profiles such as "A40-8Q", "Laptop GPU", "Ti", "D", or other form factors. None: not
# supported by the hardware. Sources: the data sheets of the products; those of NVIDIA state twice these values "with
# sparsity". FP32 rates of NVIDIA GPUs are those of CUDA cores.
_PEAK_RATES: tuple[tuple[str, float, float | None, float], ...] = (
    # NVIDIA Blackwell architecture technical brief, per GPU.
    (r"GB200", 2500e12, 1250e12, 80e12),
    (r"B200", 2250e12, 1125e12, 75e12),
    # NVIDIA H200 and H100 Tensor Core GPU data sheets.
    (r"H200 NVL", 835.5e12, 417.5e12, 60e12),
    (r"H200", 989.5e12, 494.5e12, 67e12),
    (r"GH200( \d+GB?)?( HBM3e?)?", 989.5e12, 494.5e12, 67e12),
    (r"H100 NVL", 835.5e12, 417.5e12, 60e12),
    (r"H100 PCIe", 756.5e12, 378e12, 51e12),
    (r"H100( \d+GB HBM3)?", 989.5e12, 494.5e12, 67e12),
    # NVIDIA A100, A30, A40, A10 data sheets; AWS EC2 G5 for the A10G.
    (r"A[18]00(-SXM4-\d+GB|-PCIE-\d+GB| \d+GB PCIe)?", 312e12, 156e12, 19.5e12),
    (r"A30", 165e12, 82e12, 10.3e12),
    (r"A40", 149.7e12, 74.8e12, 37.4e12),
    (r"A10G", 70e12, 35e12, 35e12),
    (r"A10", 125e12, 62.5e12, 31.2e12),
    # NVIDIA L40S, L40 and L4 data sheets.
    (r"L40S", 362e12, 183e12, 91.6e12),
    (r"L40", 181e12, 90.5e12, 90.5e12),
    (r"L4", 121e12, 60e12, 30.3e12),
    # NVIDIA Tesla V100 and T4 data sheets: FP16 only.
    (r"V100-PCIE-\d+GB", 112e12, None, 14e12),
    (r"V100-SXM2-\d+GB", 125e12, None, 15.7e12),
    (r"T4", 65e12, None, 8.1e12),
    # NVIDIA Ada and Ampere GA102 GPU architecture whitepapers, 16 bits with FP32 accumulation.
    (r"RTX 4090", 165.2e12, 82.6e12, 82.6e12),
    (r"RTX 3090", 71e12, 35.6e12, 35.6e12),
    (r"RTX A6000", 154.8e12, 77.4e12, 38.7e12),
    # AMD Instinct MI300X and MI250X data sheets; a MI250X is two devices.
    (r"MI300X", 1307.4e12, 653.7e12, 163.4e12),
    (r"MI250X", 191.5e12, None, 47.9e12),
)
_BRANDS = re.compile(r"(NVIDIA |AMD )?(Tesla |GeForce |Instinct )?")
# Compute units of the whole device, for devices whose partitions have the same name (compute partitioning of AMD).
_COMPUTE_UNITS = {"MI300X": 304}
_HALF_DTYPES = (torch.float16, torch.bfloat16)


def peak_flops(device_name: str, *, half: bool, tf32: bool, compute_units: int | None = None) -> float | None:
    """Return the peak FLOP/s of a GPU for matrix multiplications: in 16 bits if `half` is True, or else in TF32 if
    `tf32` is True, or else in FP32.

    If a GPU does not support TF32, the rate is that of FP32. `compute_units` is the number of multiprocessors or
    compute units of the device, if it is known. Returns None for an unknown GPU, and for a part of a GPU.
    """
    name = _BRANDS.sub("", device_name, count=1)
    for pattern, half_rate, tf32_rate, fp32_rate in _PEAK_RATES:
        if re.fullmatch(pattern, name):
            if compute_units is not None and compute_units < _COMPUTE_UNITS.get(pattern, 0):
                return None
            return half_rate if half else (tf32_rate or fp32_rate) if tf32 else fp32_rate
    return None


def device_peak_flops(device: torch.device, model: nn.Module, config: TrainConfig) -> float | None:
    """Return `config.peak_flops`, or else the peak FLOP/s of this device for the precision of the run (None if
    unknown)."""
    if config.peak_flops is not None or device.type != "cuda":
        return config.peak_flops
    dtype = next((parameter.dtype for parameter in model.parameters()), torch.float32)
    half = config.precision != "fp32" or dtype in _HALF_DTYPES
    # The Trainer applies `config.tf32` only after this call.
    tf32 = torch.get_float32_matmul_precision() != "highest" if config.tf32 is None else config.tf32
    compute_units = torch.cuda.get_device_properties(device).multi_processor_count
    return peak_flops(torch.cuda.get_device_name(device), half=half, tf32=tf32, compute_units=compute_units)


class _NoModuleTracker:
    """Replaces the module tracker of FlopCounterMode, which would register hooks on all modules and tensors."""

    parents = ("Global",)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        pass


class FlopsMeasurement:
    """Counts the FLOPs of one micro-batch on this rank with torch's counter. `is_due` is True until they are counted.

    The micro-batch is part of the training, so nothing is computed twice, and the results do not change. Recomputed
    activations are not counted. If `is_enabled` is False, nothing is counted, and `is_due` is False.
    """

    def __init__(self, *, is_enabled: bool) -> None:
        self.is_due = is_enabled
        self.flops_per_sample: float | None = None
        self.flops_per_token: float | None = None
        self._uncounted_operations: set[str] = set()

    def with_counting(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """Return a function that calls `forward_backward` and, if `is_due`, counts the FLOPs of the call."""
        return partial(self._run_and_count, forward_backward) if self.is_due else forward_backward

    def _run_and_count(self, forward_backward: ForwardBackward, batch: Any, micro_batch: MicroBatch) -> Loss:
        counter: Any = FlopCounterMode(display=False)
        counter.mod_tracker = _NoModuleTracker()
        counter.flop_registry = {key: self._wrap_formula(key, formula) for key, formula in _formulas().items()}
        with counter:
            loss = forward_backward(batch, micro_batch)
        if not micro_batch.samples:
            return loss
        self.is_due = False
        flops = counter.get_total_flops()
        self.flops_per_sample = flops / micro_batch.samples
        if loss.tokens is not None and (tokens := float(loss.tokens)) > 0:
            self.flops_per_token = flops / tokens
        if self._uncounted_operations:
            _log.warning(
                "torch's FLOP counter cannot count %s, so the MFU is too low.",
                ", ".join(sorted(self._uncounted_operations)),
            )
        return loss

    def _wrap_formula(self, key: Any, formula: Callable[..., int]) -> Callable[..., int]:
        """Return a function that calls `formula`. It returns 0 in a recomputation of activations, and if `formula`
        raises an exception, which would otherwise end the training."""

        @wraps(formula)
        def count(*args: Any, **kwargs: Any) -> int:
            if current_backward() >= 0 and torch.is_grad_enabled():  # recomputed by activation checkpointing
                return 0
            try:
                return formula(*args, **kwargs)
            except Exception:
                self._uncounted_operations.add(str(key))
                return 0

        return count


def _formulas() -> dict[Any, Callable[..., int]]:
    """Return the FLOP formulas by operation: the formulas of torch's counter, and formulas for attention on CPUs, which
    torch's counter lacks."""
    registry = FlopCounterMode(display=False).flop_registry
    gpu_operations = cpu_attention_operations()
    return {operation: registry[gpu_operation] for operation, gpu_operation in gpu_operations.items()} | registry
