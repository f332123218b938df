"""The decoder on a real card: its program is the one that `tests/aot` compiles without a card, and it computes what the trainer computes.

JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/gpu
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax.aot.decode import compile_decode
from llamarl_jax.aot.targets import A100, H100, H200, Target
from llamarl_jax.engine.engine import DecodeEngine, EngineConfig
from llamarl_jax.engine.slots import SlotScheduler
from llamarl_jax.losses.logprobs import token_logprobs
from llamarl_jax.meshes import Meshes, build_mesh
from llamarl_jax.models.transformer import TransformerSpec
from llamarl_jax.quantization.fp8 import QuantizationConfig
from llamarl_jax.weights.export import WeightExporter, WeightsConfig
from tests.aot import checks
from tests.aot.engines import SHALLOW, engine_config
from tests.engine.tiny_engine import CONFIG, make_prompts, requests, run_to_end

pytestmark = pytest.mark.gpu
WIDE = dataclasses.replace(CONFIG, hidden_size=128, intermediate_size=256, head_dim=64)
"""Sizes that tensor cores take."""


@pytest.fixture(scope="module")
def cards() -> list[Any]:
    try:
        return jax.devices("gpu")
    except RuntimeError as error:
        pytest.skip(f"no GPU in this process ({error}); where there is one, run JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/gpu")


@pytest.fixture(scope="module")
def target(cards) -> Target:
    """The kind of the first card, with the name and the memory that it has."""
    known = {t.compute_capability: t for t in (A100, H100)}
    major, minor = str(cards[0].compute_capability).split(".")
    capability = int(major), int(minor)
    if capability not in known:
        pytest.skip(f"{cards[0].device_kind} has compute capability {capability}; the checks were made for {[*known]}")
    return dataclasses.replace(known[capability], name=cards[0].device_kind, memory_bytes=cards[0].memory_stats()["bytes_limit"])


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("slots_per_prompt", [1, 4])
def test_the_program_is_the_one_that_is_compiled_without_a_card(cards, target, tensor, slots_per_prompt):
    if len(cards) < tensor:
        pytest.skip(f"{len(cards)} cards")
    engine = engine_config(slots_per_prompt=slots_per_prompt)
    report = compile_decode(SHALLOW, engine, target=target, tensor=tensor, devices=cards)
    checks.check_weights_are_read_as_stored(report)
    checks.check_attention_is_our_kernel(report, SHALLOW, engine)
    checks.check_cache_is_written_in_place(report)
    checks.check_collectives(report, SHALLOW, 64)
    checks.check_memory_is_as_planned(report, SHALLOW, engine)
    if target.compute_capability >= H200.compute_capability:
        checks.check_projections_are_float8(report, SHALLOW)


@pytest.mark.parametrize(
    ("dtype", "mode", "mean_gap", "options"),
    [
        ("float32", "none", 1e-4, {}),
        ("float32", "none", 1e-4, {"slots_per_prompt": 2}),
        ("bfloat16", "none", 0.05, {"slots_per_prompt": 2}),
        ("bfloat16", "w8a16", 0.2, {}),
        ("bfloat16", "w8a8", 0.2, {"kv_dtype": "float8_e4m3fn"}),
        ("bfloat16", "w8a8", 0.2, {"kv_dtype": "int8", "slots_per_prompt": 2}),
    ],
)
def test_logprobs_are_those_of_the_trainer(cards, dtype, mode, mean_gap, options):
    """The trainer computes in float32 without the tensor cores' shorter products."""
    mesh = build_mesh(cards[:1], {"data": 1, "fsdp": 1, "tensor": 1})
    decode_mesh = build_mesh(cards[:1], {"data": 1, "tensor": 1})
    quantization = QuantizationConfig(mode=mode)
    stacked = TransformerSpec.build(WIDE, is_scanned=True)
    listed = TransformerSpec.build(WIDE, is_scanned=False, quantization=quantization)
    masters = jax.tree_util.tree_map_with_path(lambda path, x: x if path[-1].key == "scale" else x * 4, stacked.init(0, mesh))
    params = WeightExporter(stacked, listed, Meshes(mesh, decode_mesh), dtype, WeightsConfig()).send(masters)
    config = EngineConfig(
        num_slots=8, max_prompt_tokens=64, max_new_tokens=64, dtype=dtype, quantization=quantization, **options
    )  # fmt: skip
    prompts = make_prompts([1, 17, 40, 64])
    with jax.default_matmul_precision("highest"):
        engine = DecodeEngine(listed, decode_mesh, config, eos_token_ids=(), seed=0)
        slots = SlotScheduler(engine, params, 0)
        slots.submit(requests(prompts, 2, max_new_tokens=60))
        finished = run_to_end(slots)
        gaps = []
        for ticket, completion in finished.items():
            prompt = prompts[ticket // 2].token_ids
            ids = jnp.concatenate([prompt, completion.token_ids])[None]
            model, segments = stacked.bind(masters), jnp.ones_like(ids)
            hidden = model(ids, jnp.arange(ids.shape[1])[None], segments)
            exact = token_logprobs(model.logits(hidden), ids, segments, jnp.float32(1.0))[0]
            gaps.append(np.abs(np.asarray(exact)[0, len(prompt) :] - completion.behaviour_logprobs))
    assert len(finished) == 8
    assert np.concatenate(gaps).mean() < mean_gap
