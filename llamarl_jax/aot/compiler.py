"""Compiles a lowered program for a target and keeps what the compiler says: text, memory, temporaries, warnings, seconds.

On a card XLA times cuBLAS and its own Triton kernels for each product and takes the faster one. Without a card nothing can be timed, so one
library gets all products:

| products | what it shows |
|---|---|
| `cublas` | the stricter view: whatever a product needs converted, padded or transposed is an array of its own |
| `triton` | the milder view: conversions of operands are fused into the product |

What the card's choice does lies between the two. `jax.default_backend()` is "cpu" here, as nothing can run; a program must ask its mesh's
devices what they are.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
from jax.experimental.compilation_cache import compilation_cache

Products = Literal["cublas", "triton"]
OPTIONS: Mapping[Products, dict[str, str | bool | int]] = {
    "cublas": {"xla_gpu_enable_triton_gemm": False},
    "triton": {"xla_gpu_enable_triton_gemm": True, "xla_gpu_autotune_level": 0},
}
_WARNING = re.compile(r"^[WEF]\d{4} \S+\s+\d+ [\w.\-]+:\d+\] (.*)$")
_IRRELEVANT = ("cudart_stub", "Could not find cuda drivers")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a compilation left behind.

    Attributes:
        text: of the optimised module.
        buffer_assignment: text from which `llamarl_jax.aot.buffers` reads the temporaries.
        compile_s: seconds from the lowered program to machine code.
    """

    text: str
    buffer_assignment: str
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    temporary_bytes: int
    warnings: tuple[str, ...]
    compile_s: float


def compile_lowered(lowered: jax.stages.Lowered, *, products: Products = "cublas") -> Compiled:
    """Compiles for the devices of the program's shardings, without JAX's compilation cache, which would hide warnings and time.

    Args:
        products: library that gets all matrix products.

    Raises:
        RuntimeError: the devices are not those of a GPU target.
    """
    with tempfile.TemporaryDirectory(prefix="llamarl_aot_") as folder, _captured_stderr() as captured:
        options = {**OPTIONS[products], "xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        started = time.perf_counter()
        with _no_cache():
            compiled = lowered.compile(compiler_options=options)
        seconds = time.perf_counter() - started
        text, memory = compiled.as_text(), compiled.memory_analysis()
        dumped = next(Path(folder).glob("*buffer-assignment.txt"), None)
        assignment = dumped.read_text(encoding="utf-8") if dumped else ""
    if not text or memory is None or not assignment:
        raise RuntimeError(
            "the compiler gave no text, memory or buffer assignment of the program; compile for the devices of "
            "llamarl_jax.aot.targets.topology"
        )
    return Compiled(
        text=text,
        buffer_assignment=assignment,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        warnings=parse_warnings("".join(captured)),
        compile_s=seconds,
    )


def parse_warnings(log: str) -> tuple[str, ...]:
    """Returns the warnings and errors of XLA's log, each once; lines without XLA's prefix belong to the one before."""
    found: dict[str, None] = {}
    for line in log.splitlines():
        if (match := _WARNING.match(line)) and not any(word in line for word in _IRRELEVANT):
            found[match[1]] = None
    if int(os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") or 0) > 1:
        found["TF_CPP_MIN_LOG_LEVEL is above 1, which hides the compiler's warnings; unset it"] = None
    return tuple(found)


@contextlib.contextmanager
def _captured_stderr() -> Iterator[list[str]]:
    """Collects what the process, XLA included, writes to its standard error meanwhile; whatever another thread writes there too."""
    captured: list[str] = []
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                yield captured
            finally:
                sys.stderr.flush()
                os.dup2(saved, 2)
                file.seek(0)
                captured.append(file.read().decode("utf-8", "replace"))
    finally:
        os.close(saved)


@contextlib.contextmanager
def _no_cache() -> Iterator[None]:
    """Turns JAX's cache of compiled programs off; JAX looks at the option once, at its first compilation, unless it is reset."""
    enabled = bool(jax.config.jax_enable_compilation_cache)  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()
