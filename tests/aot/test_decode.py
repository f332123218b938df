"""The decoder's real programs at the size of Llama 3.1 8B, compiled for H100s that are not there."""

import dataclasses
from typing import Any

import pytest

from llamarl_jax.aot.decode import compile_decode, compile_prefill
from llamarl_jax.aot.report import Report
from llamarl_jax.aot.targets import A100, H100, H200
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.quantization.fp8 import KERNELS, QuantizationConfig
from tests.aot import checks
from tests.aot.engines import MODEL, SHALLOW, engine_config

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("gpu_compiler")]


@pytest.fixture(
    scope="module", params=[(1, 1, 1), (1, 8, 1), (2, 4, 1), (2, 4, 4)], ids=["TP1", "TP8", "data2 TP4", "data2 TP4 shared prompts"]
)
def variant(request) -> tuple[int, int, EngineConfig]:
    data, tensor, slots_per_prompt = request.param
    return data, tensor, engine_config(slots_per_prompt=slots_per_prompt)


@pytest.fixture(scope="module")
def step(variant, gpu_compiler) -> Report:
    data, tensor, engine = variant
    return compile_decode(MODEL, engine, data=data, tensor=tensor)


def test_every_projection_is_a_float8_product(step):
    checks.check_projections_are_float8(step, MODEL)


def test_attention_is_our_kernel_and_scores_are_not_written(step, variant):
    checks.check_attention_is_our_kernel(step, MODEL, variant[2])


def test_no_weight_is_converted_transposed_or_joined(step):
    """The LM head's weight was once converted to float32 as a whole: 2 GB a step."""
    checks.check_weights_are_read_as_stored(step)


def test_the_cache_is_written_in_place(step):
    checks.check_cache_is_written_in_place(step)


def test_collectives_are_those_counted_by_hand(step):
    checks.check_collectives(step, MODEL, 64)


def test_memory_is_as_planned(step, variant):
    checks.check_memory_is_as_planned(step, MODEL, variant[2])


def test_the_compiler_has_nothing_to_complain_about(step):
    assert step.warnings == ()
    assert step.unknown_trip_counts == ()
    assert step.steps == 8


def shallow(mode: Any = "w8a8", *, target=H100, data: int = 1, tensor: int = 1, products: Any = "cublas", **changes: Any) -> Report:
    return compile_decode(SHALLOW, engine_config(mode, **changes), target=target, data=data, tensor=tensor, products=products)


@pytest.mark.parametrize(("data", "tensor", "slots_per_prompt"), [(1, 1, 1), (2, 4, 4)])
def test_with_xlas_attention_all_holds_too_but_scores_are_written(data, tensor, slots_per_prompt):
    """The last line shows that the check of our kernel can fail."""
    engine = engine_config(slots_per_prompt=slots_per_prompt, kernels="xla")
    report = compile_decode(SHALLOW, engine, data=data, tensor=tensor)
    checks.check_projections_are_float8(report, SHALLOW, "xla")
    checks.check_weights_are_read_as_stored(report)
    checks.check_cache_is_written_in_place(report)
    checks.check_collectives(report, SHALLOW, 64)
    checks.check_memory_is_as_planned(report, SHALLOW, engine)
    assert checks.TRITON_CALL not in report.custom_calls
    assert checks.temporaries_of_the_length(report, engine)


@pytest.mark.parametrize(("num_slots", "data", "tensor"), [(1, 1, 1), (1, 1, 8), (2, 2, 4)])
def test_a_single_row_on_a_device_does_not_fall_back(num_slots, data, tensor):
    """One row is a matrix-vector product, for which XLA converts every float8 kernel, and the LM head, to float32."""
    report = shallow(num_slots=num_slots, data=data, tensor=tensor)
    checks.check_projections_are_float8(report, SHALLOW)
    checks.check_weights_are_read_as_stored(report)


def test_bfloat16_weights_are_read_as_stored_too():
    for num_slots in (1, 64):
        report = shallow("none", num_slots=num_slots)
        checks.check_weights_are_read_as_stored(report)
        assert set(report.flops_per_step) == {"bf16"}


@pytest.mark.parametrize("tensor", [1, 8])
def test_an_lm_head_in_float8_is_one_more_float8_product(tensor):
    engine = dataclasses.replace(engine_config(), quantization=QuantizationConfig(mode="w8a8", kernels=KERNELS))
    report = compile_decode(SHALLOW, engine, tensor=tensor)
    assert report.fp8_products_per_step == 4 * SHALLOW.num_layers + 1
    assert set(report.flops_per_step) == {"f8e4m3fn"}
    checks.check_weights_are_read_as_stored(report)
    checks.check_cache_is_written_in_place(report)
    checks.check_memory_is_as_planned(report, SHALLOW, engine)


def test_an_a100_has_no_float8_products_and_converts_every_kernel():
    """Shows that the checks above can fail."""
    report = shallow(target=A100)
    assert report.fp8_products_per_step == 0
    assert {copy.kind for copy in report.weight_copies} == {"convert"}
    assert len(report.weight_copies) == 4 * SHALLOW.num_layers


def test_weights_in_float8_alone_are_converted_by_cublas_and_not_by_triton():
    """On a card XLA times both and takes the faster one; only w8a8 is free of the copy with either."""
    assert {copy.result for copy in shallow("w8a16").weight_copies} == {
        "bf16[6144,4096]",
        "bf16[4096,4096]",
        "bf16[28672,4096]",
        "bf16[4096,14336]",
    }
    checks.check_weights_are_read_as_stored(shallow("w8a16", products="triton"))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_a_small_cache_is_written_in_place_and_read_as_it_is(kv_dtype):
    engine = engine_config(kv_dtype=kv_dtype)
    report = shallow(kv_dtype=kv_dtype)
    checks.check_attention_is_our_kernel(report, SHALLOW, engine)
    checks.check_cache_is_written_in_place(report)
    checks.check_memory_is_as_planned(report, SHALLOW, engine)


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "int8"])
def test_with_xlas_attention_a_small_cache_is_read_as_it_is_by_triton_only(kv_dtype):
    report = shallow(kv_dtype=kv_dtype, kernels="xla", products="triton")
    checks.check_cache_is_written_in_place(report)
    checks.check_memory_is_as_planned(report, SHALLOW, engine_config(kv_dtype=kv_dtype))
    converted = {str(t.shape) for t in shallow(kv_dtype=kv_dtype, kernels="xla").temporaries}
    assert "bf16[64,8,2048,128]" in converted  # cuBLAS has no product of a bfloat16 with an 8-bit array


@pytest.mark.parametrize("num_slots", [1, 4])
def test_a_few_slots_occupy_the_card_together(num_slots):
    """Their tiles are shared out over several programs, and what those found is joined in a few small arrays."""
    engine = engine_config(num_slots=num_slots)
    report = shallow(num_slots=num_slots)
    checks.check_attention_is_our_kernel(report, SHALLOW, engine)
    checks.check_cache_is_written_in_place(report)
    assert any(f"f32[{num_slots},8,8,4,128]" in line for line in report.text.splitlines() if checks.TRITON_CALL in line)


@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_other_head_sizes(head_dim):
    model = dataclasses.replace(SHALLOW, head_dim=head_dim)
    checks.check_attention_is_our_kernel(compile_decode(model, engine_config()), model, engine_config())


def test_truncated_sampling_gathers_no_logits_either():
    report = compile_decode(SHALLOW, engine_config(), tensor=8, is_truncated=True)
    gathers = [c for c in report.collectives if c.kind == "all-gather"]
    assert max(c.num_bytes for c in gathers) == 64 * 8 * 8


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize(
    ("mode", "dtype", "capacity", "least"),
    [("w8a8", "bfloat16", 512, 0.6), ("w8a8", "bfloat16", 2048, 0.7), ("none", "bfloat16", 2048, 0.7), ("none", "float32", 2048, 0.7)],
)
def test_memory_of_a_prefill_is_as_planned(mode, dtype, capacity, least, tensor):
    """The longest prompt's last chunk, with its cache. The mlp, which short prompts need more for, is not there as a whole."""
    engine = engine_config(mode, max_prompt_tokens=capacity // 2, max_new_tokens=capacity // 2, dtype=dtype)
    report = compile_prefill(SHALLOW, engine, num_rows=1, bucket=capacity, tensor=tensor)
    planned = checks.memory_plan(report, SHALLOW, engine).prefill_bytes
    assert least * planned < report.memory.outputs + report.memory.temporaries <= planned


def test_an_h200_gets_the_program_of_an_h100():
    small, large = shallow(), shallow(target=H200)
    assert small.memory == large.memory
    assert small.custom_calls == large.custom_calls
    assert large.card_bytes > 1.7 * small.card_bytes


@pytest.mark.parametrize(
    ("num_rows", "bucket", "data", "tensor"), [(1, 2048, 1, 8), (4, 128, 1, 8), (8, 128, 2, 4), (2, 2048, 2, 4)], ids=str
)
def test_a_prefill_sends_and_converts_nothing_that_it_need_not(num_rows, bucket, data, tensor):
    """512 tokens on each replica; of the last layer only keys and values are wanted, so all that follows its qkv_proj is left out.

    Over tensor: the embedding, and for each other layer two products and two scales. Over data: nothing.
    """
    report = compile_prefill(SHALLOW, engine_config(), num_rows=num_rows, bucket=bucket, data=data, tensor=tensor)
    num_layers, tokens, D = SHALLOW.num_layers - 1, 512, SHALLOW.hidden_size
    assert report.fp8_products_per_step == 4 * num_layers + 1
    checks.check_weights_are_read_as_stored(report)
    ((key, traffic),) = report.traffic_per_step.items()
    assert key == ("all-reduce", "tensor")
    assert traffic.count == 1 + 4 * num_layers
    assert traffic.num_bytes == tokens * (2 * D + num_layers * 2 * 4 * (D + 1))
    if bucket > tokens:  # a later chunk, which writes into the cache of the first
        assert all(p.aliased_output is not None for p in report.arguments("cache"))
