"""Prints a table of what the compiler makes of the decoder's step, for the README: `python -m tests.aot.figures [model …]`.

Needs the extra `aot` and JAX_PLATFORMS=cpu.
"""

import sys

from llamarl_jax.aot.decode import compile_decode
from llamarl_jax.aot.report import Report
from llamarl_jax.aot.targets import H100, H200
from llamarl_jax.models.presets import PRESETS
from llamarl_jax.quantization.fp8 import Mode
from tests.aot.engines import engine_config

ROWS: tuple[tuple[str, Mode, int], ...] = (
    ("llama3.1-8b", "w8a8", 1),
    ("llama3.1-8b", "w8a8", 8),
    ("llama3.1-8b", "none", 1),
    ("llama3.1-70b", "w8a8", 8),
    ("llama3.1-70b", "none", 8),
    ("llama3.1-405b", "w8a8", 8),
    ("llama3.1-405b", "none", 8),
)
HEADER = (
    "| model | weights | TP | fits (80 GB / 141 GB) | weights GiB | cache GiB | temporaries GiB | float8 products | all-reduces "
    "| all-gathers | compile s |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def describe(name: str, mode: Mode, tensor: int, report: Report) -> str:
    weights, cache = (
        sum(p.num_bytes for prefix in prefixes for p in report.arguments(prefix)) / 2**30
        for prefixes in (("params",), ("state.cache", "state.prompts"))
    )
    fits = " / ".join("yes" if report.memory.peak <= target.memory_bytes else "no" for target in (H100, H200))
    traffic = {kind: found for (kind, _), found in report.traffic_per_step.items()}
    counts = [f"{t.count:g}, {t.num_bytes / 2**20:.3g} MiB" if (t := traffic.get(kind)) else "0" for kind in ("all-reduce", "all-gather")]
    kind = "bfloat16" if mode == "none" else "float8"
    cells = [name, kind, str(tensor), fits, f"{weights:.2f}", f"{cache:.2f}", f"{report.memory.temporaries / 2**30:.2f}"]
    return " | ".join(["", *cells, f"{report.fp8_products_per_step:g}", *counts, f"{report.compile_s:.0f}", ""]).strip()


if __name__ == "__main__":
    print(HEADER)
    for name, mode, tensor in ROWS:
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            report = compile_decode(PRESETS[name], engine_config(mode), tensor=tensor)
            print(describe(name, mode, tensor, report), flush=True)
