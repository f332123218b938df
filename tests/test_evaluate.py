import dataclasses
import json

import numpy as np
import pytest

from llamarl_jax.data.procedural import DigitPrompts
from llamarl_jax.data.stream import PromptsConfig, PromptStream
from llamarl_jax.data.templates import PlainTemplate
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest
from llamarl_jax.evaluate import bootstrap_interval, evaluate, evaluate_config, open_decoder
from llamarl_jax.models.tiny import write_tiny_model
from llamarl_jax.policy import open_policy
from llamarl_jax.rewards.api import RewardConfig, RewardTerm
from llamarl_jax.rewards.pool import RewardPool
from llamarl_jax.rewards.scoring import RewardScorer
from tests.integration.tiny_run import tiny_config
from tests.rewards import hostile

NUM_TOKENS = 5


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder)
    return open_policy(str(folder))


@pytest.fixture(scope="module")
def slots(policy, tmp_path_factory):
    config = tiny_config(tmp_path_factory.mktemp("run"))
    return open_decoder(policy, config.placement, config.engine, seed=0)


@pytest.fixture(scope="module")
def scorer(policy):
    config = RewardConfig(terms=(RewardTerm(name="length", function=hostile.length_if_even),), max_failure_share=1.0)
    with RewardPool(config) as pool:
        yield RewardScorer(config, policy.tokenizer, pool, lambda rewards: rewards)


@pytest.fixture(scope="module")
def prompts(policy):
    stream = PromptStream(
        PromptsConfig(source=DigitPrompts(kind="copy", num_digits=2), template=PlainTemplate()),
        policy.tokenizer,
        max_prompt_tokens=8,
        seed=0,
    )
    return stream.first(12)


def test_each_answer_is_greedy_scored_and_counted(slots, scorer, prompts):
    beats = []
    result = evaluate(slots, prompts, scorer, max_new_tokens=NUM_TOKENS, heartbeat=lambda: beats.append(1))
    assert [answer.prompt for answer in result.answers] == [prompt.text for prompt in prompts]
    assert [answer.reward is None for answer in result.answers] == [int(prompt.reference) % 2 == 1 for prompt in prompts]
    scored = [answer.reward for answer in result.answers if answer.reward is not None]
    assert scored == [len(answer.completion) for answer in result.answers if answer.reward is not None]
    assert (result.num_scored, result.num_failed) == (len(scored), 12 - len(scored))
    assert 0 < result.num_failed < 12
    assert result.accuracy == pytest.approx(np.mean(scored))
    assert result.low <= result.accuracy <= result.high
    assert result.mean_tokens == np.mean([answer.num_tokens for answer in result.answers])
    assert result.truncation_rate == np.mean([answer.finish_reason == "length" for answer in result.answers])
    assert all(answer.num_tokens == NUM_TOKENS for answer in result.answers if answer.finish_reason == "length")
    assert beats
    assert slots.take_counters().num_kept_tokens == 0  # evaluation is not counted as training
    twins = [dataclasses.replace(prompt, prompt_id=prompt.prompt_id + 10_000) for prompt in prompts]  # whose random numbers are others
    assert evaluate(slots, twins, scorer, max_new_tokens=NUM_TOKENS, heartbeat=lambda: None) == result


def test_answers_are_saved_to_read(slots, scorer, prompts, tmp_path):
    result = evaluate(slots, prompts[:4], scorer, max_new_tokens=NUM_TOKENS, heartbeat=lambda: None)
    result.save(tmp_path / "answers" / "version_0.jsonl", 3)
    lines = (tmp_path / "answers" / "version_0.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [dataclasses.asdict(answer) for answer in result.answers[:3]]


def test_no_prompts(slots, scorer):
    with pytest.raises(ValueError, match=r"evaluation has no prompts; set evaluation.num_prompts above 0 or evaluation.prompts to None"):
        evaluate(slots, [], scorer, max_new_tokens=NUM_TOKENS, heartbeat=lambda: None)


def test_busy_slots_are_left_alone(slots, scorer, prompts):
    slots.submit([CompletionRequest(ticket=99, prompt=prompts[0], sample_index=0, sampling=SamplingConfig(), max_new_tokens=3)])
    with pytest.raises(RuntimeError, match="started while completions are running; the generator must drain its slots first"):
        evaluate(slots, prompts, scorer, max_new_tokens=NUM_TOKENS, heartbeat=lambda: None)
    finished = {}
    while not slots.is_idle:
        finished.update(slots.step())
    assert finished.keys() == {99}


def test_no_answer_could_be_scored(slots, scorer, prompts):
    odd = [prompt for prompt in prompts if int(prompt.reference) % 2]
    with pytest.raises(ValueError, match=rf"none of the {len(odd)} answers could be scored; look at the reward failures in the log"):
        evaluate(slots, odd, scorer, max_new_tokens=NUM_TOKENS, heartbeat=lambda: None)


def test_a_config_without_evaluation_prompts(tmp_path):
    with pytest.raises(ValueError, match=r"evaluation.prompts is None, so there is nothing to measure; name a prompt source"):
        evaluate_config(tiny_config(tmp_path))


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_interval_is_that_of_a_mean_of_coin_flips(share):
    """400 flips: the standard error of their mean is known."""
    values = np.arange(400) < 400 * share
    low, high = bootstrap_interval(values.astype(float))
    half_width = 1.96 * np.sqrt(share * (1 - share) / 400)
    assert (low, high) == pytest.approx((share - half_width, share + half_width), abs=0.006)
