"""Compiles the decoder's real step (`DecodeEngine.generate`) for GPUs that are not there, and reports what the compiler made of it.

    report = compile_decode(PRESETS["llama3.1-8b"], EngineConfig(num_slots=64, dtype="bfloat16", …), tensor=8)
    print(report.describe())

Weights and state are shapes with shardings, nothing is allocated: 405B takes seconds and under a gigabyte. Whatever form, type and
sharding the engine's spec gives the weights (float8 kernels with scales, fused projections) is what is compiled.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from llamarl_jax.aot.compiler import Products, compile_lowered
from llamarl_jax.aot.hlo import Parameter
from llamarl_jax.aot.report import Report, make_report
from llamarl_jax.aot.targets import H100, Target, topology
from llamarl_jax.engine.engine import DecodeEngine, EngineConfig
from llamarl_jax.meshes import build_mesh, replicated
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.transformer import TransformerSpec

GPUS_PER_HOST = 8


def compile_decode(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    target: Target = H100,
    data: int = 1,
    tensor: int = 1,
    cache_tokens: int | None = None,
    is_truncated: bool = False,
    products: Products = "cublas",
    name: str = "decode",
    least_bytes: int = 1 << 20,
) -> Report:
    """Compiles `generate` and returns the report of it.

    Args:
        data: replicas, over which slots are split.
        tensor: tensor-parallel devices.
        cache_tokens: length of the KV cache; None takes the longest, `engine.capacity`.
        is_truncated: whether some slot samples from a truncated distribution.
        products: library that gets all matrix products, see `llamarl_jax.aot.compiler`.
        name: heads the report.
        least_bytes: smaller temporaries and copies of weights are not reported.

    Raises:
        AotUnavailableError: the CUDA plugin is missing or cannot be loaded.
        ValueError: the engine's config does not go with the mesh, see `DecodeEngine`.
    """
    devices = topology(target, hosts=-(-data * tensor // GPUS_PER_HOST), gpus_per_host=GPUS_PER_HOST)
    mesh = build_mesh(devices[: data * tensor], {"data": data, "tensor": tensor})
    started = time.perf_counter()
    lowered = lower_decode(model, engine, mesh, cache_tokens=cache_tokens, is_truncated=is_truncated)
    lower_s = time.perf_counter() - started
    return make_report(
        compile_lowered(lowered, products=products),
        name=name,
        target=target.name,
        card_bytes=target.memory_bytes,
        mesh_shape=dict(mesh.shape),
        is_weight=is_decoder_weight,
        steps=engine.decode_steps_per_call,
        lower_s=lower_s,
        least_bytes=least_bytes,
    )


def lower_decode(
    model: ModelConfig, engine: EngineConfig, mesh: Mesh, *, cache_tokens: int | None = None, is_truncated: bool = False
) -> jax.stages.Lowered:
    """Traces `generate` on a mesh of any devices."""
    spec = TransformerSpec.build(model, is_scanned=False, quantization=engine.quantization)
    decoder = DecodeEngine(spec, mesh, engine, eos_token_ids=model.eos_token_ids, seed=0)
    length = engine.capacity if cache_tokens is None else cache_tokens
    params = _sharded(spec.decoder_shapes(engine.dtype), spec.shardings(mesh))
    # The engine has no public way to lower its programs, so its jitted functions are used as they are.
    state = jax.eval_shape(partial(decoder._resize_cache, length=length), jax.eval_shape(decoder._init_state))
    state = _sharded(state, decoder._state_shardings())
    eos = jax.ShapeDtypeStruct(decoder._eos_array.shape, jnp.int32, sharding=replicated(mesh))
    with jax.set_mesh(mesh):
        return decoder._generate.lower(params, state, eos, is_truncated=is_truncated)


def is_decoder_weight(parameter: Parameter) -> bool:
    """Says whether an argument of the decoder's programs is one of its weights."""
    return parameter.name.startswith("params")


def _sharded(shapes: Any, shardings: Any) -> Any:
    return jax.tree.map(lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding), shapes, shardings)
