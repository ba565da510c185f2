"""What a figure was measured on. Standard library only: a machine that only measures need have nothing else."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def hardware() -> dict[str, str]:
    """Processor, cores, system."""
    return {"cpu": _cpu_model(), "cores": str(os.cpu_count()), "system": f"{platform.system()} {platform.machine()}"}


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
