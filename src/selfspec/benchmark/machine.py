"""What a timing was measured on."""

from __future__ import annotations

import platform
import resource
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers

MIB = 2**20


def describe() -> dict[str, Any]:
    """Processor, memory and versions; nothing that names a host or a user."""
    return {
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(logical=False) or psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def weights_mib(count: int, dtype: torch.dtype) -> float:
    """MiB of ``count`` weights as they are served, in ``dtype``.

    A CPU without instructions for it computes on float32 copies of twice the size, which only
    ``peak_memory_mib`` shows: they are this machine's, not the model's.
    """
    return count * dtype.itemsize / MIB


def peak_memory_mib() -> float:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
