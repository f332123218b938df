from dataclasses import replace

import numpy as np
import pytest

from llamarl_jax import controller
from llamarl_jax.bench import forcing
from llamarl_jax.bench.forcing import ForcedBatch, Trainer, rows_per_chunk
from llamarl_jax.bench.workload import PLACEMENT
from llamarl_jax.engine.engine import EngineConfig
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest
from llamarl_jax.evaluate import open_decoder
from llamarl_jax.meshes import build_meshes
from llamarl_jax.policy import open_policy
from llamarl_jax.quantization.fp8 import Mode, QuantizationConfig
from llamarl_jax.types import Completion, FinishReason, Prompt
from llamarl_jax.weights.export import WeightExporter, WeightsConfig
from tests.integration.tiny_run import tiny_config


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLAMARL_CACHE", str(tmp_path_factory.mktemp("models")))
        return open_policy("tiny")


@pytest.fixture(scope="module")
def masters(policy):
    return policy.load_params(build_meshes(PLACEMENT).trainer)


PROMPTS = [
    Prompt(prompt_id=i, token_ids=np.array(ids, np.int32), text="")
    for i, ids in enumerate(([5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16]))
]


def _sampled(policy, **changes):
    """The prompts with 12 tokens each from the real engine."""
    config = EngineConfig(num_slots=2, max_prompt_tokens=8, max_new_tokens=12, kernels="xla", **changes)
    slots = open_decoder(policy, PLACEMENT, config, seed=0)
    requests = [
        CompletionRequest(ticket=i, prompt=prompt, sample_index=0, sampling=SamplingConfig(temperature=1.0), max_new_tokens=12)
        for i, prompt in enumerate(PROMPTS)
    ]
    slots.submit(requests)
    finished = {}
    while not slots.is_idle:
        finished.update(slots.step())
    return ForcedBatch.of(PROMPTS, [finished[i] for i in range(len(PROMPTS))])


@pytest.fixture(scope="module")
def trainer(policy, masters):
    return Trainer(policy.stacked, masters, _sampled(policy))


def _exported(policy, masters, mode: Mode = "none", dtype="float32"):
    spec = policy.listed(QuantizationConfig(mode=mode))
    return spec, WeightExporter(policy.stacked, spec, build_meshes(PLACEMENT), dtype, WeightsConfig()).send(masters)


def _distance(policy, masters, trainer, mode: Mode = "none", cache_dtype="float32", dtype="float32"):
    return trainer.distance_to(*_exported(policy, masters, mode, dtype), dtype, cache_dtype)


def test_a_row_is_a_prompt_and_its_completion():
    def completion(ids):
        count = len(ids)
        return Completion(
            sample_index=0,
            token_ids=np.array(ids, np.int32),
            behaviour_logprobs=-np.array(ids, np.float32),
            weight_versions=np.zeros(count, np.int32),
            finish_reason=FinishReason.LENGTH,
        )

    batch = ForcedBatch.of(PROMPTS[:2], [completion([1, 2]), completion([3])])
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 1, 2], [9, 10, 3, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]]
    assert batch.token_ids[batch.is_completion].tolist() == [1, 2, 3]
    assert batch.token_ids[batch.is_predicting].tolist() == [8, 1, 10]
    assert batch.recorded_logprobs.tolist() == [-1, -2, -3]
    assert batch.fingerprint != replace(batch, token_ids=batch.token_ids + 1).fingerprint


def test_without_rounding_decoder_engine_and_trainer_agree(policy, masters, trainer):
    distance = _distance(policy, masters, trainer)
    assert distance.logprob_abs_max < 1e-5
    assert 0 <= distance.kl < 1e-9
    assert distance.effective_sample_size == pytest.approx(1, abs=1e-9)
    assert distance.greedy_agreement == 1
    assert trainer.recorded_distance()[1] < 1e-5


VARIANTS = [
    ("w8a16", "float32", "float32", 1e-2, 0.2),
    ("w8a8", "float32", "float32", 1e-2, 0.2),
    ("none", "int8", "float32", 1e-4, 0.05),
    ("none", "float8_e4m3fn", "float32", 1e-3, 0.1),
    ("none", "bfloat16", "bfloat16", 1e-4, 0.05),
    ("w8a16", "int8", "float32", 1e-2, 0.2),
    ("w8a8", "float8_e4m3fn", "bfloat16", 1e-2, 0.2),
]


@pytest.fixture(scope="module")
def trained(policy, tmp_path_factory):
    """The masters after eight optimizer steps and syncs of a run with a float8 decoder."""
    config = tiny_config(
        tmp_path_factory.mktemp("runs"),
        schedule={"num_steps": 8, "groups_per_step": 6, "group_size": 8},
        engine={"quantization": QuantizationConfig(mode="w8a8"), "kv_dtype": "float8_e4m3fn"},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "open_policy", lambda _: policy)
        summary = controller.run(config)
    return open_policy(str(summary.model_dir)).load_params(build_meshes(PLACEMENT).trainer)


@pytest.fixture(scope="module")
def later(policy, trainer, trained):
    """The trainer of then, on the same tokens."""
    return Trainer(policy.stacked, trained, trainer.batch)


@pytest.mark.parametrize(("mode", "cache_dtype", "dtype", "least", "most"), VARIANTS)
def test_rounding_gives_a_bounded_distance_at_the_start_and_after_several_steps_and_syncs(
    policy, masters, trainer, trained, later, mode, cache_dtype, dtype, least, most
):
    before = _distance(policy, masters, trainer, mode, cache_dtype, dtype)
    after = _distance(policy, trained, later, mode, cache_dtype, dtype)
    for distance in (before, after):
        assert least < distance.logprob_abs_mean < distance.logprob_abs_max < 5 * most
        assert distance.logprob_abs_mean < most
        assert 0 < distance.kl < most
        assert 1 - most < distance.effective_sample_size < 1
    assert after.logprob_abs_mean < 2 * before.logprob_abs_mean


def test_these_steps_move_the_weights_by_more_than_rounding_does(policy, masters, trainer, trained):
    moved = trainer.distance_to(*_exported(policy, trained), "float32", "float32")
    assert moved.logprob_abs_mean > _distance(policy, masters, trainer, "w8a8").logprob_abs_mean


@pytest.mark.parametrize(("mode", "kv_dtype"), [("w8a8", "same"), ("none", "int8"), ("none", "float8_e4m3fn")])
def test_forced_tokens_are_as_far_as_those_that_the_engine_steps_through(policy, masters, mode, kv_dtype):
    """The engine's own log-probs, of its prefill and decode steps; a value on the edge between two float8 may fall to the other side."""
    trainer = Trainer(policy.stacked, masters, _sampled(policy, quantization=QuantizationConfig(mode=mode), kv_dtype=kv_dtype))
    forced = _distance(policy, masters, trainer, mode, "float32" if kv_dtype == "same" else kv_dtype)
    assert trainer.recorded_distance() == (
        pytest.approx(forced.logprob_abs_mean, rel=0.02),
        pytest.approx(forced.logprob_abs_max, rel=0.05),
    )


def test_chunks_change_nothing(policy, masters, trainer, monkeypatch):
    batch = trainer.batch
    results = []
    for rows in (3, 2, 1):  # with two, the second chunk is half padding
        monkeypatch.setattr(forcing, "CHUNK_BYTES", rows * 4 * batch.token_ids.shape[1] * policy.config.vocab_size)
        trainer = Trainer(policy.stacked, masters, batch)
        assert trainer.rows_per_chunk == rows
        results.append([*vars(_distance(policy, masters, trainer, "w8a16")).values(), *trainer.recorded_distance()])
    np.testing.assert_allclose(results[1:], [results[0]] * 2, rtol=1e-3, atol=1e-5)


def test_a_row_above_the_budget_still_goes_alone(policy, monkeypatch):
    assert rows_per_chunk(policy.config, 3, 10) == 3
    monkeypatch.setattr(forcing, "CHUNK_BYTES", 1)
    assert rows_per_chunk(policy.config, 3, 10) == 1
