"""reasoning-gym's own verifiers, with exact credit by default.

Many of its scorers give partial credit when the right answer merely stands inside a longer string, which a policy learns to exploit
by listing candidates. Exact credit asks for the final line of the answer alone to be right.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamarl_jax.rewards.api import RewardInput
from llamarl_jax.rewards.exact import final_text


@dataclass(frozen=True)
class ReasoningGymScore:
    """Scores an item of `ReasoningGymPrompts`; `partial_credit` passes the task's own score through."""

    partial_credit: bool = False

    def __call__(self, sample: RewardInput) -> float:
        """Scores the last non-empty line after the thinking.

        Raises:
            ValueError: the sample does not come from reasoning-gym.
        """
        if "task" not in sample.metadata or "entry" not in sample.metadata:
            raise ValueError(f"prompt {sample.prompt_text[:60]!r} is no reasoning-gym item; use ReasoningGymPrompts as its source")
        from reasoning_gym import get_score_answer_fn

        answer = final_text(sample.completion_text)
        lines = [line.strip() for line in (answer or "").splitlines() if line.strip()]
        if not lines:
            return 0.0
        score = float(get_score_answer_fn(sample.metadata["task"])(lines[-1], sample.metadata["entry"]))
        return score if self.partial_credit else float(score == 1.0)
