"""Compiles the weight export (`WeightExporter.buckets`) for GPUs that are not there: fusing, rounding, resharding on the trainer mesh.

    report = compile_export(PRESETS["llama3.1-8b"], PlacementConfig(trainer_fsdp=8, generator_tensor=8), quantization)

The report is of one bucket of layers; its step is one layer.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp

from llamarl_jax.aot.compiler import compile_lowered
from llamarl_jax.aot.decode import GPUS_PER_HOST, sharded
from llamarl_jax.aot.report import Report, make_report
from llamarl_jax.aot.targets import H100, Target, topology
from llamarl_jax.meshes import Meshes, PlacementConfig, build_meshes
from llamarl_jax.models.config import ModelConfig
from llamarl_jax.models.transformer import TransformerSpec
from llamarl_jax.quantization.fp8 import QuantizationConfig
from llamarl_jax.weights.export import WeightExporter, WeightsConfig


def compile_export(
    model: ModelConfig,
    placement: PlacementConfig,
    quantization: QuantizationConfig,
    *,
    target: Target = H100,
    dtype: str = "bfloat16",
    weights: WeightsConfig | None = None,
    name: str = "export",
    least_bytes: int = 1 << 20,
) -> Report:
    """Compiles the export of one bucket of layers and returns the report of it.

    Args:
        dtype: of the decoder's weights that are not float8.
        name: heads the report.
        least_bytes: smaller temporaries are not reported.

    Raises:
        AotUnavailableError: the CUDA plugin is missing or cannot be loaded.
    """
    devices = topology(target, hosts=-(-placement.num_devices // GPUS_PER_HOST), gpus_per_host=GPUS_PER_HOST)
    meshes = build_meshes(placement, devices)
    started = time.perf_counter()
    lowered, num_layers = lower_export(model, meshes, quantization, dtype, weights or WeightsConfig())
    lower_s = time.perf_counter() - started
    return make_report(
        compile_lowered(lowered),
        name=name,
        target=target.name,
        card_bytes=target.memory_bytes,
        mesh_shape=dict(meshes.trainer.shape),
        is_weight=lambda _: False,  # all that it does is copying weights
        steps=num_layers,
        lower_s=lower_s,
        least_bytes=least_bytes,
    )


def lower_export(
    model: ModelConfig, meshes: Meshes, quantization: QuantizationConfig, dtype: str, weights: WeightsConfig
) -> tuple[jax.stages.Lowered, int]:
    """Traces the export of one bucket on meshes of any devices; returns how many layers it holds too."""
    trainer = TransformerSpec.build(model, is_scanned=True)
    generator = TransformerSpec.build(model, is_scanned=False, quantization=quantization)
    exporter = WeightExporter(trainer, generator, meshes, dtype, weights)
    layers = sharded(trainer.shapes, trainer.shardings(meshes.trainer))["layers"]
    num_layers = exporter._layers_per_bucket
    return exporter._export_layers[num_layers].lower(layers, jax.ShapeDtypeStruct((), jnp.int32)), num_layers
