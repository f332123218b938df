"""Says what machine and which versions a benchmark ran on, so that its numbers can be judged elsewhere."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("llamarl_jax", "jax", "jaxlib", "flax", "numpy")
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "sve")


def hardware() -> dict[str, Any]:
    """Returns CPU model, usable cores, memory and, where JAX found one, the GPU."""
    devices = jax.devices()
    info = _cpu_info()
    return {
        "cpu": info.get("model name") or info.get("Model") or platform.processor() or platform.machine(),
        "cpu_vector_extensions": [flag for flag in VECTOR_FLAGS if flag in f"{info.get('flags', '')} {info.get('Features', '')}".split()],
        "cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "platform": devices[0].platform,
        "gpu": devices[0].device_kind if devices[0].platform != "cpu" else None,
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that the decoder runs on."""
    return {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def num_cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def load_average() -> float | None:
    """Returns the mean number of running processes over the last minute; above 1 before a benchmark, something disturbs it."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def short_name(hardware: dict[str, Any]) -> str:
    """Returns a name of the hardware for file names, such as `intel-xeon-processor-2-cores`."""
    name = hardware["gpu"] or f"{hardware['cpu']} {hardware['cores']} cores"
    plain = re.sub(r"\((?:r|tm)\)|@.*?hz", " ", name.lower())
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")


def _cpu_info() -> dict[str, str]:
    """Returns the first processor's lines of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    pairs = (line.partition(":") for line in path.read_text(encoding="utf-8").split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
