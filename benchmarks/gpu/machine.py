"""What was measured on: GPUs, driver, versions; asked of torch, CuPy and nvidia-smi, each of which may be missing."""

from __future__ import annotations

import importlib.metadata
import subprocess
from typing import Any

import torch

ASKED = "name,driver_version,vbios_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory,pcie.link.gen.max"
WHEELS = ("numpy", "numba", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton")


def versions() -> dict[str, str]:
    """Of what the kernels are compiled and run by."""
    found = {"cuda of torch": str(torch.version.cuda)}
    for wheel in WHEELS:
        try:
            found[wheel] = importlib.metadata.version(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def gpus() -> list[dict[str, Any]]:
    """Each GPU that torch sees."""
    found = []
    for at in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        told = torch.cuda.get_device_properties(at)
        capability = f"sm_{told.major}{told.minor}"
        found.append(
            {
                "name": told.name,
                "capability": capability,
                "memory_bytes": told.total_memory,
                "multiprocessors": told.multi_processor_count,
            }
        )
    return found


def smi() -> list[dict[str, str]]:
    """What nvidia-smi says of each, or nothing."""
    argv = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=30)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [dict(zip(ASKED.split(","), map(str.strip, line.split(",")), strict=False)) for line in lines]
