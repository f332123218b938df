"""Compiles the decoder's real programs (a step, a prefill) for GPUs that are not there, and reports what the compiler made of them.

    report = compile_decode(PRESETS["llama3.1-8b"], EngineConfig(num_slots=64, dtype="bfloat16", …), tensor=8)
    print(report.describe())

Weights and state are shapes with shardings, nothing is allocated: 405B takes seconds and under a gigabyte. Whatever form, type and
sharding the engine's spec gives the weights (float8 kernels with scales, fused projections) is what is compiled.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from llamarl_jax.aot.compiler import Products, compile_lowered
from llamarl_jax.aot.hlo import Parameter
from llamarl_jax.aot.report import Report, make_report
from llamarl_jax.aot.targets import H100, Target, topology
from llamarl_jax.engine.api import DecodeState
from llamarl_jax.engine.engine import DecodeEngine, EngineConfig
from llamarl_jax.meshes import build_mesh, named_sharding, replicated
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.kv_cache import CACHE_AXES, resize
from llamarl_jax.models.transformer import TransformerSpec, axis_units

GPUS_PER_HOST = 8


def compile_decode(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    target: Target = H100,
    data: int = 1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
    is_truncated: bool = False,
    products: Products = "cublas",
    name: str = "decode",
    least_bytes: int = 1 << 20,
) -> Report:
    """Compiles `generate`, with caches of full length, and returns the report of it.

    Args:
        data: replicas, over which slots are split.
        tensor: tensor-parallel devices.
        devices: real cards to compile for, whose name and memory `target` states; None takes cards of this kind that are not there.
        is_truncated: whether some slot samples from a truncated distribution.
        products: library that gets all matrix products, see `llamarl_jax.aot.compiler`.
        name: heads the report.
        least_bytes: smaller temporaries and copies of weights are not reported.

    Raises:
        AotUnavailableError: the CUDA plugin is missing or cannot be loaded.
        ValueError: the engine's config does not go with the mesh, see `DecodeEngine`.
    """
    mesh = _mesh(target, data, tensor, devices)
    started = time.perf_counter()
    lowered = lower_decode(model, engine, mesh, is_truncated=is_truncated)
    return _report(lowered, mesh, target, started, products, name, engine.decode_steps_per_call, least_bytes)


def compile_prefill(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    num_rows: int,
    bucket: int,
    target: Target = H100,
    data: int = 1,
    tensor: int = 1,
    products: Products = "cublas",
    name: str = "prefill",
    least_bytes: int = 1 << 20,
) -> Report:
    """Compiles the prefill of one chunk of prompts and returns the report of it; arguments as for `compile_decode` and `lower_prefill`.

    Raises:
        AotUnavailableError: the CUDA plugin is missing or cannot be loaded.
    """
    mesh = _mesh(target, data, tensor)
    started = time.perf_counter()
    lowered = lower_prefill(model, engine, mesh, num_rows=num_rows, bucket=bucket)
    return _report(lowered, mesh, target, started, products, name, 1, least_bytes)


def lower_decode(model: ModelConfig, engine: EngineConfig, mesh: Mesh, *, is_truncated: bool = False) -> jax.stages.Lowered:
    """Traces `generate`, with caches of full length, on a mesh of any devices."""
    decoder, params = _decoder(model, engine, mesh)

    def longest_state() -> DecodeState:
        # The engine has no public way to lower its programs, so its functions are used as they are.
        state = decoder._init_state()
        cache, prompts = resize(state.cache, engine.own_capacity), resize(state.prompts, engine.prompt_capacity)
        return state._replace(cache=cache, prompts=prompts)

    state = sharded(jax.eval_shape(longest_state), decoder._state_shardings())
    eos = jax.ShapeDtypeStruct(decoder._eos_array.shape, jnp.int32, sharding=replicated(mesh))
    with jax.set_mesh(mesh):
        return decoder._generate.lower(params, state, eos, is_truncated=is_truncated)


def lower_prefill(model: ModelConfig, engine: EngineConfig, mesh: Mesh, *, num_rows: int, bucket: int) -> jax.stages.Lowered:
    """Traces the prefill of one chunk on a mesh of any devices.

    Args:
        num_rows: prompts, a multiple of the replicas.
        bucket: padded length of the prompts, which is that of the cache; with more tokens than a chunk holds, a later chunk is traced.
    """
    decoder, params = _decoder(model, engine, mesh)
    token_ids = jax.ShapeDtypeStruct((num_rows, min(bucket, engine.prefill_chunk_tokens)), jnp.int32)
    with jax.set_mesh(mesh):
        first = decoder._prefill_first.lower(params, token_ids, length=bucket)
        if bucket <= engine.prefill_chunk_tokens:
            return first
        units = {**axis_units(model), "kv_heads": 1}
        cache = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=named_sharding(mesh, CACHE_AXES[: len(x.shape)], x.shape, units)),
            first.out_info[0],
        )
        return decoder._prefill_next.lower(params, cache, token_ids, jax.ShapeDtypeStruct((), jnp.int32))


def _mesh(target: Target, data: int, tensor: int, devices: Sequence[Any] | None = None) -> Mesh:
    if devices is None:
        devices = topology(target, hosts=-(-data * tensor // GPUS_PER_HOST), gpus_per_host=GPUS_PER_HOST)
    return build_mesh(devices[: data * tensor], {"data": data, "tensor": tensor})


def _report(
    lowered: jax.stages.Lowered, mesh: Mesh, target: Target, started: float, products: Products, name: str, steps: int, least_bytes: int
) -> Report:
    lower_s = time.perf_counter() - started
    return make_report(
        compile_lowered(lowered, products=products),
        name=name,
        target=target.name,
        card_bytes=target.memory_bytes,
        mesh_shape=dict(mesh.shape),
        is_weight=is_decoder_weight,
        steps=steps,
        lower_s=lower_s,
        least_bytes=least_bytes,
    )


def _decoder(model: ModelConfig, engine: EngineConfig, mesh: Mesh) -> tuple[DecodeEngine, Any]:
    spec = TransformerSpec.build(model, is_scanned=False, quantization=engine.quantization)
    decoder = DecodeEngine(spec, mesh, engine, eos_token_ids=model.eos_token_ids, seed=0)
    return decoder, sharded(spec.decoder_shapes(engine.dtype), spec.shardings(mesh))


def is_decoder_weight(parameter: Parameter) -> bool:
    """Says whether an argument of the decoder's programs is one of its weights."""
    return parameter.name.startswith("params")


def sharded(shapes: Any, shardings: Any) -> Any:
    """Returns a tree of shapes with their shardings, which can be traced and compiled for like arrays."""
    return jax.tree.map(lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes, shardings)
