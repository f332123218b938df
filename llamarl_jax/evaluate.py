"""Measures one weight version on held-out problems: during a run with the generator's own slots, or alone (`llamarl evaluate`).

Answers are greedy, so the result depends on the weights alone. It runs while the slots are idle and no group is open, and therefore
neither delays a completion nor touches the staleness bound.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from llamarl_jax.config import Config
from llamarl_jax.data.stream import PromptStream
from llamarl_jax.engine.engine import DecodeEngine, EngineConfig
from llamarl_jax.engine.memory import plan_memory, resolve_slots
from llamarl_jax.engine.sampling import SamplingConfig
from llamarl_jax.engine.slots import CompletionRequest, SlotScheduler
from llamarl_jax.losses.advantages import advantages
from llamarl_jax.meshes import PlacementConfig, build_meshes, configure_platform
from llamarl_jax.policy import Policy, open_policy
from llamarl_jax.rewards.pool import RewardPool
from llamarl_jax.rewards.scoring import RewardScorer
from llamarl_jax.types import Completion, FinishReason, Prompt
from llamarl_jax.weights.export import WeightExporter, WeightsConfig


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answered problem, as it is written to the JSONL of answers."""

    prompt: str
    completion: str
    reference: str | None
    reward: float | None
    num_tokens: int
    finish_reason: str


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Outcome of one evaluation.

    Attributes:
        version: weight version that all answers come from.
        accuracy: mean reward over the scored answers.
        low, high: 95 % bootstrap interval of the accuracy (1,000 resamples, seed 0).
        num_scored, num_failed: answers with and without a verdict.
        mean_tokens: mean answer length.
        truncation_rate: share of answers that did not come to their end.
    """

    version: int
    accuracy: float
    low: float
    high: float
    num_scored: int
    num_failed: int
    mean_tokens: float
    truncation_rate: float
    answers: tuple[Answer, ...]

    def metrics(self) -> dict[str, float]:
        """Returns the numbers under their metric names."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/low": self.low,
            "eval/high": self.high,
            "eval/num_scored": self.num_scored,
            "eval/num_failed": self.num_failed,
            "eval/completion_tokens_mean": self.mean_tokens,
            "eval/truncation_rate": self.truncation_rate,
            "eval/version": self.version,
        }

    def save(self, path: Path, num_answers: int) -> None:
        """Writes the first answers as JSON lines."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            "".join(json.dumps(asdict(answer), ensure_ascii=False) + "\n" for answer in self.answers[:num_answers]), encoding="utf-8"
        )


def evaluate(
    slots: SlotScheduler, prompts: Sequence[Prompt], scorer: RewardScorer, *, max_new_tokens: int, heartbeat: Callable[[], None]
) -> EvaluationResult:
    """Answers all prompts greedily and scores them with the training reward.

    Raises:
        ValueError: there is no prompt, or no answer could be scored.
        RuntimeError: the slots are busy.
    """
    if not prompts:
        raise ValueError("evaluation has no prompts; set evaluation.num_prompts above 0 or evaluation.prompts to None")
    if not slots.is_idle:
        raise RuntimeError("evaluation started while completions are running; the generator must drain its slots first")
    version = slots.version
    completions = _answer(slots, prompts, max_new_tokens, heartbeat)
    rewards = scorer.score(list(zip(prompts, completions, strict=True)))
    scored = np.array([reward for reward in rewards if reward is not None])
    if not len(scored):
        raise ValueError(f"none of the {len(prompts)} answers could be scored; look at the reward failures in the log")
    low, high = bootstrap_interval(scored)
    return EvaluationResult(
        version=version,
        accuracy=float(scored.mean()),
        low=low,
        high=high,
        num_scored=len(scored),
        num_failed=len(rewards) - len(scored),
        mean_tokens=float(np.mean([len(c.token_ids) for c in completions])),
        truncation_rate=float(np.mean([c.finish_reason is not FinishReason.STOP for c in completions])),
        answers=tuple(
            Answer(
                prompt=prompt.text,
                completion=scorer.text_of(completion),
                reference=prompt.reference,
                reward=reward,
                num_tokens=len(completion.token_ids),
                finish_reason=completion.finish_reason,
            )
            for prompt, completion, reward in zip(prompts, completions, rewards, strict=True)
        ),
    )


def bootstrap_interval(values: np.ndarray, num_resamples: int = 1000) -> tuple[float, float]:
    """Returns the 2.5 % and 97.5 % quantiles of the mean of resampled values."""
    generator = random.Random(0)
    means = [np.mean(generator.choices(values, k=len(values))) for _ in range(num_resamples)]
    return float(np.quantile(means, 0.025)), float(np.quantile(means, 0.975))


def _answer(slots: SlotScheduler, prompts: Sequence[Prompt], max_new_tokens: int, heartbeat: Callable[[], None]) -> list[Completion]:
    slots.submit(
        [
            CompletionRequest(
                ticket=i, prompt=prompt, sample_index=0, sampling=SamplingConfig(temperature=0.0), max_new_tokens=max_new_tokens
            )
            for i, prompt in enumerate(prompts)
        ]
    )
    completions: dict[int, Completion] = {}
    while not slots.is_idle:
        completions.update(slots.step())
        heartbeat()
    slots.take_counters()  # evaluation tokens are not training throughput
    return [completions[i] for i in range(len(prompts))]


def open_decoder(policy: Policy, placement: PlacementConfig, config: EngineConfig, seed: int) -> SlotScheduler:
    """Loads a policy onto a generator mesh for use without a trainer.

    The weights pass through the same export as in training, with the decoder's devices standing in for the trainer's.
    """
    alone = dataclasses.replace(
        placement, kind="shared", trainer_data=placement.generator_data, trainer_fsdp=1, trainer_tensor=placement.generator_tensor
    )
    configure_platform(alone)
    meshes = build_meshes(alone)
    spec = policy.listed(config.quantization)
    config = resolve_slots(config, plan_memory(spec, meshes.generator, config, num_weight_copies=1))
    exporter = WeightExporter(policy.stacked, spec, meshes, config.dtype, WeightsConfig())
    params = exporter.send(policy.load_params(meshes.trainer))
    engine = DecodeEngine(spec, meshes.generator, config, eos_token_ids=policy.stop_ids(config.stop_texts), seed=seed)
    return SlotScheduler(engine, params, version=0, dispatch_ahead=config.dispatch_ahead)


def evaluate_config(config: Config) -> EvaluationResult:
    """Measures a config's model on its held-out problems, without training.

    Raises:
        ValueError: the config names no evaluation prompts.
    """
    if config.evaluation.prompts is None:
        raise ValueError("evaluation.prompts is None, so there is nothing to measure; name a prompt source in the config")
    policy = open_policy(config.model)
    slots = open_decoder(policy, config.placement, config.engine, config.seed)
    stream = PromptStream(config.evaluation.prompts, policy.tokenizer, max_prompt_tokens=config.engine.max_prompt_tokens, seed=config.seed)
    with RewardPool(config.rewards) as pool:
        scorer = RewardScorer(config.rewards, policy.tokenizer, pool, partial(advantages, config.advantages))
        prompts = stream.first(config.evaluation.num_prompts)
        return evaluate(slots, prompts, scorer, max_new_tokens=config.engine.max_new_tokens, heartbeat=lambda: None)
