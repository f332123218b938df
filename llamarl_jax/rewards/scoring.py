"""From completion groups to trajectory groups: decode, score in the pool, sum the terms, compute advantages, decide what to drop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from llamarl_jax.rewards.api import RewardConfig, RewardInput
from llamarl_jax.rewards.pool import Failure, RewardPool
from llamarl_jax.types import Completion, CompletionGroup, DroppedGroup, Prompt, Trajectory, TrajectoryGroup

MIN_GROUP_SIZE = 2
"""A single completion has nothing to be compared with."""


class Decoder(Protocol):
    """The part of a tokenizer that scoring needs."""

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of ids without special tokens."""
        ...


class RewardScorer:
    """Scores completions and groups; thread-safe as far as its pool is."""

    def __init__(self, config: RewardConfig, tokenizer: Decoder, pool: RewardPool, advantages: Callable[[np.ndarray], np.ndarray]) -> None:
        """Joins the parts.

        Args:
            advantages: rewards of one group → advantages, in order.
        """
        self._config, self._tokenizer, self._pool, self._advantages = config, tokenizer, pool, advantages

    def text_of(self, completion: Completion) -> str:
        """Returns a completion as text, without special tokens."""
        return self._tokenizer.decode(completion.token_ids)

    def score(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[float | None]:
        """Returns each completion's weighted reward, or None where it could not be scored."""
        return [None if isinstance(terms, Failure) else self._total(terms) for terms in self._terms(pairs)]

    def score_groups(self, groups: Sequence[CompletionGroup]) -> list[TrajectoryGroup | DroppedGroup]:
        """Scores whole groups at once, so that every worker has something to do; results in order."""
        terms = iter(self._terms([(group.prompt, completion) for group in groups for completion in group.completions]))
        return [self._judge(group, [next(terms) for _ in group.completions]) for group in groups]

    def _terms(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[dict[str, float] | Failure]:
        return self._pool.score(
            [
                RewardInput(
                    prompt_text=prompt.text,
                    completion_text=self.text_of(completion),
                    reference=prompt.reference,
                    metadata=prompt.metadata,
                    finish_reason=str(completion.finish_reason),
                )
                for prompt, completion in pairs
            ]
        )

    def _total(self, terms: dict[str, float]) -> float:
        return float(sum(term.weight * terms[term.name] for term in self._config.terms))

    def _judge(self, group: CompletionGroup, verdicts: Sequence[dict[str, float] | Failure]) -> TrajectoryGroup | DroppedGroup:
        scored = [(c, terms) for c, terms in zip(group.completions, verdicts, strict=True) if not isinstance(terms, Failure)]
        num_excluded = len(verdicts) - len(scored)
        if len(scored) < MIN_GROUP_SIZE:
            reason = f"{num_excluded} of {len(verdicts)} completions failed"
            return DroppedGroup(admission_index=group.admission_index, reason=reason, num_excluded=num_excluded)
        rewards = np.array([self._total(terms) for _, terms in scored])
        if self._config.drops_zero_variance and (rewards == rewards[0]).all():
            reason = f"all rewards are {rewards[0]}"
            return DroppedGroup(admission_index=group.admission_index, reason=reason, num_excluded=num_excluded)
        trajectories = tuple(
            Trajectory(completion=completion, reward=float(reward), advantage=float(advantage), reward_terms=terms)
            for (completion, terms), reward, advantage in zip(scored, rewards, self._advantages(rewards), strict=True)
        )
        return TrajectoryGroup(
            prompt=group.prompt,
            admission_index=group.admission_index,
            version_class=group.version_class,
            trajectories=trajectories,
            num_excluded=num_excluded,
        )
