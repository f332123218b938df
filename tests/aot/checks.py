"""What must hold of every compiled step of the decoder, whatever the model."""

import jax

from llamarl_jax.aot.buffers import as_large_as
from llamarl_jax.aot.report import Report
from llamarl_jax.aot.shapes import leaves
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.engine.memory import CACHE_GROWTH, LOGIT_COPIES, MemoryPlan, plan_memory
from llamarl_jax.kernels.implementations import Kernels
from llamarl_jax.meshes import build_mesh
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.transformer import TransformerSpec
from tests.aot.engines import collectives_of_a_step

TRITON_CALL = "__gpu$xla.gpu.triton"


def check_projections_are_float8(report: Report, model: ModelConfig, kernels: Kernels = "pallas") -> None:
    """qkv, o, gate_up and down of each layer; besides them the LM head, in bfloat16, and with XLA four products of attention a layer."""
    products = 4 if kernels == "pallas" else 8
    assert report.fp8_products_per_step == 4 * model.num_layers
    assert report.custom_calls["__cublas$lt$matmul$f8"] == 4 * model.num_layers * report.steps
    assert sum(p.executions for p in report.products) == (products * model.num_layers + 1) * report.steps
    assert set(report.flops_per_step) == {"f8e4m3fn", "bf16"}


def check_attention_is_our_kernel(report: Report, model: ModelConfig, engine: EngineConfig) -> None:
    """One for the prompt and one for the slot's own in each layer; scores, which are as long as a cache, stay in it."""
    assert report.custom_calls[TRITON_CALL] == 2 * model.num_layers * report.steps
    assert temporaries_of_the_length(report, engine) == ()


def temporaries_of_the_length(report: Report, engine: EngineConfig) -> tuple[str, ...]:
    """Shapes of the temporaries that have a number for each position of a cache."""
    lengths = {engine.prompt_capacity, engine.own_capacity}
    return tuple(str(t.shape) for t in report.temporaries if any(lengths.intersection(leaf.dims) for leaf in leaves(t.shape)))


def check_weights_are_read_as_stored(report: Report) -> None:
    assert report.weight_copies == (), report.describe()


def check_cache_is_written_in_place(report: Report) -> None:
    caches = report.arguments("state.cache") + report.arguments("state.prompts")
    assert caches
    assert all(cache.aliased_output is not None for cache in caches)
    shapes = [leaf for cache in caches if "scales" not in cache.name for leaf in leaves(cache.shape)]
    assert as_large_as(report.temporaries, shapes) == ()


def check_collectives(report: Report, model: ModelConfig, num_slots: int) -> None:
    """Over tensor as counted by hand; over data none."""
    data, tensor = report.mesh_shape["data"], report.mesh_shape["tensor"]
    expected: dict[tuple[str, str], tuple[float, float]] = {}
    if tensor > 1:
        expected |= {(kind, "tensor"): found for kind, found in collectives_of_a_step(model, num_slots // data, tensor).items()}
    assert {key: (t.count, t.num_bytes) for key, t in report.traffic_per_step.items()} == expected, report.describe()


def memory_plan(report: Report, model: ModelConfig, engine: EngineConfig) -> MemoryPlan:
    """Returns what is planned for the report's card and mesh."""
    data, tensor = report.mesh_shape["data"], report.mesh_shape["tensor"]
    spec = TransformerSpec.build(model, is_scanned=False, quantization=engine.quantization)
    mesh = build_mesh((jax.devices() * (data * tensor))[: data * tensor], {"data": data, "tensor": tensor})
    return plan_memory(spec, mesh, engine, num_weight_copies=1, limit_bytes=report.card_bytes)


def check_memory_is_as_planned(report: Report, model: ModelConfig, engine: EngineConfig) -> None:
    """The plan counts half a cache more, for growing it, and three times the logits; the step needs neither, but one set of logits."""
    data, tensor = report.mesh_shape["data"], report.mesh_shape["tensor"]
    plan = memory_plan(report, model, engine)
    assert isinstance(engine.num_slots, int)
    logits = 4 * model.vocab_size // tensor
    slots = engine.num_slots // data
    cache = (plan.cache_bytes(slots) - slots * LOGIT_COPIES * logits) / CACHE_GROWTH
    arguments = plan.weight_bytes + cache
    assert abs(report.memory.arguments / arguments - 1) < 1e-3
    assert abs(report.memory.peak / (arguments + slots * logits) - 1) < 0.02
    assert report.memory.peak <= plan.weight_bytes + plan.cache_bytes(slots)
    assert report.fits
