"""Compiles `cpu.cc` for this machine, once, and offers its kernels to JAX programs on CPU devices.

XLA's own products are made for many rows, and a decode step has few, one for each slot; its norms and gates run on one core. The kernels
are compiled with the C++ compiler of the machine ($CXX, c++, g++ or clang++; about 5 s) and kept in the cache folder, by a name that says
of which source, compiler, processor and JAX they are. Where there is no compiler `find_obstacle` says so, and the decoder uses XLA's
operations.

Dimensions: B rows, I inputs, O outputs, D model, F mlp, F2 twice that, S slots, K key-value heads, H query heads, C own positions, R
prompts, P prompt positions, Q head dim.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from llamarl_jax.models.prompt_index import PromptIndex

SOURCE = Path(__file__).with_name("cpu.cc")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w")


class NativeKernelError(RuntimeError):
    """The kernels cannot be compiled or loaded; the message says why and what to do."""


@functools.cache
def find_obstacle() -> str | None:
    """Compiles and loads the kernels; returns why this process cannot have them, or None."""
    try:
        _library()
    except NativeKernelError as error:
        return str(error)
    return None


def can_multiply(x: jax.ShapeDtypeStruct | Array, kernel: jax.ShapeDtypeStruct | Array) -> bool:
    """Says whether `linear` takes these operands."""
    return x.dtype == kernel.dtype == jnp.float32 and x.size > 0 and x.shape[-1] % num_lanes() == 0


def can_gate(pairs: jax.ShapeDtypeStruct | Array, block: int) -> bool:
    """Says whether `swiglu` takes pairs of this shape and type."""
    lanes, size = num_lanes(), pairs.shape[-1] // 2
    is_whole = block % lanes == 0 or lanes % block == 0
    return pairs.dtype == jnp.float32 and pairs.size > 0 and pairs.shape[-1] % 2 == size % lanes == size % block == 0 and is_whole


def can_normalise(x: jax.ShapeDtypeStruct | Array) -> bool:
    """Says whether `rms_norm` takes rows of this shape and type."""
    return x.dtype == jnp.float32 and x.size > 0 and x.shape[-1] % num_lanes() == 0


def can_attend(queries: jax.ShapeDtypeStruct | Array, keys: jax.ShapeDtypeStruct | Array) -> bool:
    """Says whether `decode_attention` takes these operands."""
    return queries.dtype == keys.dtype == jnp.float32 and queries.shape[-1] % num_lanes() == 0


def num_lanes() -> int:
    """Returns the float32 numbers of one vector register; the contracted sizes must be multiples of it."""
    return _library().llamarl_lanes()


def linear(x: Float[Array, "*shape I"], kernel: Float[Array, "O I"]) -> Float[Array, "*shape O"]:
    """Returns x · kernelᵀ in float32.

    What a row gives does not depend, bit for bit, on what the other rows are, and on their number only by whether there are any.

    Raises:
        NativeKernelError: there are no kernels in this process.
    """
    _library()
    rows = x.reshape(-1, x.shape[-1])
    shape = jax.ShapeDtypeStruct((rows.shape[0], kernel.shape[0]), jnp.float32)
    return jax.ffi.ffi_call("llamarl_linear", shape)(rows, kernel).reshape(*x.shape[:-1], -1)


def swiglu(pairs: Float[Array, "*shape F2"], block: int) -> Float[Array, "*shape F"]:
    """Returns silu(gate) · up in float32, of rows in which `block` gates and as many ups take turns.

    Raises:
        NativeKernelError: there are no kernels in this process.
    """
    _library()
    rows = pairs.reshape(-1, pairs.shape[-1])
    shape = jax.ShapeDtypeStruct((rows.shape[0], rows.shape[1] // 2), jnp.float32)
    return jax.ffi.ffi_call("llamarl_swiglu", shape)(rows, block=np.int64(block)).reshape(*pairs.shape[:-1], -1)


def rms_norm(x: Float[Array, "*shape D"], scale: Float[Array, " D"], epsilon: float) -> Float[Array, "*shape D"]:
    """Returns x / √(mean(x²) + epsilon) · scale over the last axis, in float32.

    Raises:
        NativeKernelError: there are no kernels in this process.
    """
    _library()
    rows = x.reshape(-1, x.shape[-1])
    call = jax.ffi.ffi_call("llamarl_rms_norm", jax.ShapeDtypeStruct(rows.shape, jnp.float32))
    return call(rows, scale, epsilon=np.float32(epsilon)).reshape(x.shape)


def decode_attention(
    queries: Float[Array, "S H Q"],
    new_keys: Float[Array, "S K Q"],
    new_values: Float[Array, "S K Q"],
    keys: Float[Array, "S K C Q"],
    values: Float[Array, "S K C Q"],
    positions: Int[Array, " S"],
    prompt_keys: Float[Array, "R K P Q"],
    prompt_values: Float[Array, "R K P Q"],
    index: PromptIndex,
) -> tuple[Float[Array, "S H Q"], Float[Array, "S K C Q"], Float[Array, "S K C Q"]]:
    """Stores one token of each slot and attends to its prompt and to its own tokens up to that one.

    It computes what `llamarl_jax.models.attention.attend_prompt_and_own` does, of one replica. It reads no more of the caches than that
    needs, a prompt once for all of its members, and does nothing for slots that read no prompt; they get zeros.

    Returns:
        The mixed values, and the own caches, which are written in place.

    Raises:
        NativeKernelError: there are no kernels in this process.
    """
    _library()
    num_slots, num_heads, head_dim = queries.shape
    grouped = queries.reshape(num_slots, keys.shape[1], -1, head_dim)
    shapes = tuple(jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (grouped, keys, values))
    call = jax.ffi.ffi_call("llamarl_decode_attention", shapes, input_output_aliases={3: 1, 4: 2})
    whole = tuple(x.astype(jnp.int32) for x in (positions, index.lengths, index.members[0]))
    mixed, keys, values = call(grouped, new_keys, new_values, keys, values, prompt_keys, prompt_values, *whole)
    return mixed.reshape(num_slots, num_heads, head_dim), keys, values


@functools.cache
def _library() -> ctypes.CDLL:
    path = build(_cache_folder())
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeKernelError(f"{path} does not load ({error}); delete it, and it is compiled again") from error
    for name in ("llamarl_linear", "llamarl_swiglu", "llamarl_rms_norm", "llamarl_decode_attention"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library


def build(folder: Path) -> Path:
    """Returns the compiled library in `folder`, making it if it is not there; two processes may do so at once.

    Raises:
        NativeKernelError: there is no compiler, it fails, or the folder cannot be written.
    """
    compiler = _find_compiler()
    command = [*compiler, *FLAGS, "-isystem", jax.ffi.include_dir()]
    parts = (SOURCE.read_bytes(), " ".join(command).encode(), _run([*compiler, "--version"]).encode(), _processor())
    digest = hashlib.sha256(b"\0".join((*parts, jaxlib.__version__.encode()))).hexdigest()
    target = folder / f"cpu-{digest[:16]}.so"
    if target.is_file():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".building_") as temporary:
            made = Path(temporary) / target.name
            _run([*command, "-o", str(made), str(SOURCE)])
            made.replace(target)
    except OSError as error:
        raise NativeKernelError(
            f"the compiled kernels cannot be kept in {folder} ({error}); set LLAMARL_CACHE to a folder that can be written"
        ) from error
    return target


def _find_compiler() -> list[str]:
    """Returns the compiler's command; $CXX may have arguments, as in CXX="ccache g++"."""
    wanted = os.environ.get("CXX", "")
    for command in [shlex.split(wanted)] if wanted.strip() else [[name] for name in COMPILERS]:
        if path := shutil.which(command[0]):
            return [path, *command[1:]]
    tried = f"CXX={wanted!r}" if wanted.strip() else ", ".join(COMPILERS)
    raise NativeKernelError(
        f"no C++ compiler found ({tried}); install one (Debian and Ubuntu: `apt-get install g++`, macOS: `xcode-select --install`)"
    )


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        reason = (done.stderr or done.stdout).strip()[-800:]
        raise NativeKernelError(f"`{' '.join(command)}` failed with status {done.returncode}: {reason}; set CXX to another C++17 compiler")
    return done.stdout


def _processor() -> bytes:
    """Returns what tells processors apart for which the compiler makes different code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    features = sorted({line for line in lines if line.startswith(("flags", "Features", "model name", "CPU part"))})
    return "\n".join((platform.machine(), platform.processor(), *features)).encode()


def _cache_folder() -> Path:
    return Path(os.environ.get("LLAMARL_CACHE") or "~/.cache/llamarl").expanduser() / "kernels"
