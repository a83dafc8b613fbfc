"""NVIDIA's management library: what torch does not tell of a GPU."""

from typing import Any

import pynvml
import torch

# Reasons for a lower clock that nobody chose: the hardware's own, heat (by the driver, by the hardware), power brake.
THROTTLING = 0x08 | 0x20 | 0x40 | 0x80


def handle(device: str) -> Any:
    """For one of torch's devices, whatever CUDA_VISIBLE_DEVICES made of their order; None where NVML knows it not."""
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None


def energy_j(handle: Any) -> float | None:
    """Joules since the driver was loaded; None before Volta."""
    try:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000
    except pynvml.NVMLError:
        return None


def throttled(handle: Any) -> bool:
    """Whether it runs slower than asked at this moment, for heat or for power that is not to be had."""
    try:
        return bool(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & THROTTLING)
    except pynvml.NVMLError:
        return False
