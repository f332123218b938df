"""Small programs whose compiled form is known in advance, for H100 and, where it is the same there, for virtual CPU devices.

`python -m tests.aot.programs` writes the texts that `samples/` keeps (it needs the extra `aot`), so that the analysis is tested against
what XLA writes for a GPU where its compiler is not installed.

Dimensions: B rows, D model, F mlp, L layers, S slots, C cached tokens.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from llamarl_jax.aot.compiler import Compiled, compile_lowered
from llamarl_jax.aot.hlo import Parameter
from llamarl_jax.aot.targets import A100, H100, Target, topology
from llamarl_jax.meshes import build_mesh
from llamarl_jax.quantization.fp8 import fp8_product

SAMPLES = Path(__file__).parent / "samples"
B, D, F, L = 8, 64, 128, 3
WIDE = 512  # a square weight of this width has 512 KiB in bfloat16
S, C = 4, 256


@dataclass(frozen=True)
class SmallProgram:
    lower: Callable[[Mesh], jax.stages.Lowered]
    mesh_shape: Mapping[str, int]
    target: Target = H100


def shape(mesh: Mesh, dims: tuple[int, ...], *axes: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))


def tensor_parallel_loop(mesh: Mesh) -> jax.stages.Lowered:
    """Three turns of a column-parallel and a row-parallel product: an all-reduce over tensor in each."""

    def run(params, x):
        def turn(x, _):
            return jnp.tanh(jnp.tanh(x @ params["up"].T) @ params["down"].T), None

        return lax.scan(turn, x, None, length=3)[0]

    params = {"up": shape(mesh, (F, D), "tensor", None), "down": shape(mesh, (D, F), None, "tensor")}
    out = NamedSharding(mesh, PartitionSpec("data"))
    return jax.jit(run, out_shardings=out).lower(params, shape(mesh, (B, D), "data", None))


def every_collective(mesh: Mesh) -> jax.stages.Lowered:
    """One of each kind by hand, over known axes of data × fsdp × tensor."""

    def run(x):
        size = lax.axis_size("data")
        reduced = lax.psum(x, ("data", "tensor"))
        scattered = lax.psum_scatter(x * 2, "data", tiled=True)
        gathered = lax.all_gather(x * 3, "tensor", tiled=True)
        permuted = lax.ppermute(x * 5, "data", [(i, (i + 1) % size) for i in range(size)])
        exchanged = lax.all_to_all(x * 7, "fsdp", split_axis=1, concat_axis=0, tiled=True)
        return reduced, scattered, gathered, permuted, exchanged

    P = PartitionSpec
    outs = (P("fsdp"), P("fsdp"), P("fsdp"), P("fsdp"), P(None, None))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=P("fsdp"), out_specs=outs, check_vma=False)
    return jax.jit(mapped).lower(shape(mesh, (16, 32), "fsdp"))


def stacked_layers(mesh: Mesh) -> jax.stages.Lowered:
    """A scan over stacked weights, which cuts (copies) each layer's weight out."""

    def run(params, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w.T), None), x, params["kernel"])[0]

    params = {"kernel": shape(mesh, (L, WIDE, WIDE), dtype=jnp.bfloat16)}
    return jax.jit(run).lower(params, shape(mesh, (B, WIDE), dtype=jnp.bfloat16))


def listed_layers(mesh: Mesh) -> jax.stages.Lowered:
    """The same with a list of weights, inside a loop that carries them along: nothing is copied."""

    def run(params, x):
        def turn(x, _):
            for w in params:
                x = jnp.tanh(x @ w.T)
            return x, None

        return lax.scan(turn, x, None, length=2)[0]

    params = [shape(mesh, (WIDE, WIDE), dtype=jnp.bfloat16) for _ in range(L)]
    return jax.jit(run).lower(params, shape(mesh, (B, WIDE), dtype=jnp.bfloat16))


def separate_projections(mesh: Mesh) -> jax.stages.Lowered:
    """Three products of one input: XLA joins the weights when it runs."""

    def run(params, x):
        return [jnp.tanh(x @ params[name].T) for name in ("q", "k", "v")]

    params = {name: shape(mesh, (WIDE, WIDE), dtype=jnp.bfloat16) for name in ("q", "k", "v")}
    return jax.jit(run).lower(params, shape(mesh, (B, WIDE), dtype=jnp.bfloat16))


def float8(mesh: Mesh, *, mode: Any = "w8a8") -> jax.stages.Lowered:
    """The decoder's float8 product, with weights stored (out, in)."""

    def run(params, x):
        return fp8_product(x, params["kernel"], params["kernel_scale"], mode).astype(x.dtype)

    params = {"kernel": shape(mesh, (WIDE, WIDE), dtype=jnp.float8_e4m3fn), "kernel_scale": shape(mesh, (WIDE,))}
    return jax.jit(run).lower(params, shape(mesh, (16, WIDE), dtype=jnp.bfloat16))


def float8_stored_in_out(mesh: Mesh) -> jax.stages.Lowered:
    """A float8 weight stored (in, out), which cuBLASLt needs transposed."""

    def run(params, x):
        product = lax.dot_general(
            x.astype(jnp.float8_e4m3fn), params["kernel"], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        return product.astype(jnp.bfloat16)

    params = {"kernel": shape(mesh, (WIDE, WIDE), dtype=jnp.float8_e4m3fn)}
    return jax.jit(run).lower(params, shape(mesh, (16, WIDE), dtype=jnp.bfloat16))


def cache_in_place(mesh: Mesh) -> jax.stages.Lowered:
    """A donated cache that a loop carries and writes one row of."""

    def run(cache, x):
        def turn(carry, i):
            cache, x = carry
            cache = lax.dynamic_update_slice(cache, x[:, None], (0, i, 0))
            return (cache, jnp.tanh(jnp.einsum("scd,sd->sd", cache, x))), None

        return lax.scan(turn, (cache, x), jnp.arange(4))[0]

    return jax.jit(run, donate_argnums=0).lower(shape(mesh, (S, C, D)), shape(mesh, (S, D)))


def cache_through_scan(mesh: Mesh) -> jax.stages.Lowered:
    """Caches of several layers that pass through a scan as its inputs and outputs: XLA keeps them twice, although they are donated."""

    def run(caches, x):
        def layer(x, cache):
            cache = lax.dynamic_update_slice(cache, x[:, None], (0, 3, 0))
            return jnp.tanh(jnp.einsum("scd,sd->sd", cache, x)), cache

        return lax.scan(layer, x, caches)

    return jax.jit(run, donate_argnums=0).lower(shape(mesh, (L, S, C, D)), shape(mesh, (S, D)))


def embedding_sharded_across(mesh: Mesh) -> jax.stages.Lowered:
    """The gradient of an embedding split over (tensor, fsdp), for which the partitioner finds no way but to gather everything."""

    def loss(table, ids, y):
        x = jnp.take(table, ids, axis=0)
        x = lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(("data", "fsdp"), None, None)))
        return jnp.sum((x * y) ** 2)

    rows = ("data", "fsdp")
    arguments = (shape(mesh, (256, D), "tensor", "fsdp"), shape(mesh, (16, 8), rows, None, dtype=jnp.int32), shape(mesh, (16, 8, D), rows))
    return jax.jit(jax.grad(loss), out_shardings=arguments[0].sharding).lower(*arguments)


ONE = {"data": 1}
THREE_AXES = {"data": 2, "fsdp": 2, "tensor": 2}
PROGRAMS: Mapping[str, SmallProgram] = {
    "tensor_parallel_loop": SmallProgram(tensor_parallel_loop, {"data": 2, "tensor": 4}),
    "every_collective": SmallProgram(every_collective, THREE_AXES),
    "stacked_layers": SmallProgram(stacked_layers, ONE),
    "listed_layers": SmallProgram(listed_layers, ONE),
    "separate_projections": SmallProgram(separate_projections, ONE),
    "float8": SmallProgram(float8, ONE),
    "float8_weights_only": SmallProgram(partial(float8, mode="w8a16"), ONE),
    "float8_a100": SmallProgram(float8, ONE, A100),
    "float8_stored_in_out": SmallProgram(float8_stored_in_out, ONE),
    "cache_in_place": SmallProgram(cache_in_place, ONE),
    "cache_through_scan": SmallProgram(cache_through_scan, ONE),
    "embedding_sharded_across": SmallProgram(embedding_sharded_across, THREE_AXES),
}


def compile_program(name: str, devices: Any) -> Compiled:
    program = PROGRAMS[name]
    size = 1
    for axis in program.mesh_shape.values():
        size *= axis
    mesh = build_mesh(devices[:size], program.mesh_shape)
    return compile_lowered(program.lower(mesh))


def compile_for_target(name: str) -> Compiled:
    return compile_program(name, topology(PROGRAMS[name].target))


def read_sample(name: str) -> str:
    return (SAMPLES / f"{name}.hlo").read_text(encoding="utf-8")


def read_buffers(name: str) -> str:
    return (SAMPLES / f"{name}.buffers").read_text(encoding="utf-8")


def is_weight(parameter: Parameter) -> bool:
    return parameter.name.startswith("params")


def _without_source(text: str) -> str:
    """Leaves out the tables of source files and what nothing reads, so that a sample is short and says nothing of one machine."""
    text = re.sub(r"\n(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*", "\n", text)
    for attribute in (
        r' scheduling_name="[^"]*"',
        r' deduplicated_name="[^"]*"',
        r" stack_frame_id=\d+",
        r", frontend_attributes=\{.*?\}\}?(?=[,\n])",
    ):
        text = re.sub(attribute, "", text)
    return re.sub(r"\n{3,}", "\n\n", text)


def write_samples() -> None:
    for name in PROGRAMS:
        compiled = compile_for_target(name)
        (SAMPLES / f"{name}.hlo").write_text(_without_source(compiled.text), encoding="utf-8")
        (SAMPLES / f"{name}.buffers").write_text(compiled.buffer_assignment, encoding="utf-8")
        print(name, len(compiled.text), compiled.warnings)


if __name__ == "__main__":
    sys.exit(write_samples())
