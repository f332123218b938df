"""The weight export on the trainer mesh: float32 masters are fused, rounded off where they are, and only then move."""

import pytest

from llamarl_jax.aot.export import compile_export
from llamarl_jax.meshes import PlacementConfig
from llamarl_jax.quantization.fp8 import Mode, QuantizationConfig
from tests.aot.engines import MODEL

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("gpu_compiler")]

D, F = MODEL.hidden_size, MODEL.intermediate_size
QKV = (MODEL.num_heads + 2 * MODEL.num_kv_heads) * MODEL.head_dim
KERNELS = D * (QKV + D + 3 * F)
"""Weights of a layer's kernels."""


@pytest.mark.parametrize(("mode", "itemsize"), [("w8a8", 1), ("none", 2)])
def test_kernels_change_their_split_once_and_in_the_decoders_type(mode: Mode, itemsize):
    """From fsdp 8 to tensor 8: an all-to-all of what a device holds, for each of the four fused kernels.

    The trainer splits qkv and gate_up by inputs and the decoder by outputs, with o and down it is the other way round. Of float8 kernels
    whose inputs are split, scales need the largest weight over fsdp (all-reduce), the others' scales go to all devices (all-gather).
    """
    report = compile_export(MODEL, PlacementConfig(trainer_fsdp=8, generator_tensor=8), QuantizationConfig(mode=mode))
    traffic = report.traffic_per_step
    assert traffic["all-to-all", "fsdp"].num_bytes == KERNELS * itemsize / 8
    assert traffic["all-to-all", "fsdp"].count == 4
    others = sum(t.num_bytes for key, t in traffic.items() if key != ("all-to-all", "fsdp"))
    assert others <= (0 if mode == "none" else 4 * 2 * (QKV + 2 * D + 2 * F))
    assert {axes for _, axes in traffic} == {"fsdp"}
    assert report.rematerialisations == ()


def test_float32_never_moves_where_both_meshes_have_tensor_axes():
    report = compile_export(MODEL, PlacementConfig(trainer_fsdp=4, trainer_tensor=2, generator_tensor=4), QuantizationConfig(mode="w8a8"))
    largest = max((c.num_bytes for c in report.collectives if "f32" in c.dtypes), default=0)
    assert largest <= report.steps * 4 * (QKV + 2 * D + 2 * F)  # scales
    assert report.rematerialisations == ()


def test_one_device_sends_nothing():
    report = compile_export(MODEL, PlacementConfig(), QuantizationConfig(mode="w8a8"))
    assert report.collectives == ()
    assert report.memory.temporaries < 1 << 20
