"""reasoning-gym's own verifiers, with exact credit by default.

Many of its verifiers give credit when the right answer merely stands inside a longer string, some of them full credit, which a policy
learns to exploit by listing candidates. Exact credit compares the end of the answer with the task's own answer and nothing else; it is
fair where the answer is unique. Tasks with several right answers (or none on record, such as `graph_color`) need their verifier.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from llamarl_jax.rewards.api import RewardInput
from llamarl_jax.rewards.exact import final_text


@dataclass(frozen=True)
class ReasoningGymScore:
    """Scores an item of `ReasoningGymPrompts` by the last lines after the thinking: as many lines as the task's answer has."""

    credit: Literal["exact", "full", "partial"] = "exact"
    """`exact`: 1 if the lines equal the task's answer; `full`: 1 if the task's verifier gives 1; `partial`: what the verifier gives."""

    def warm_up(self) -> None:
        """Imports reasoning-gym, which takes seconds, where its verifiers are needed."""
        if self.credit != "exact":
            import_reasoning_gym()

    def __call__(self, sample: RewardInput) -> float:
        """Scores one completion.

        Raises:
            ValueError: the sample does not come from reasoning-gym, or exact credit is asked for where the task has no answer on record.
        """
        if "task" not in sample.metadata or "entry" not in sample.metadata:
            raise ValueError(f"prompt {sample.prompt_text[:60]!r} is no reasoning-gym item; use ReasoningGymPrompts as its source")
        task, entry = sample.metadata["task"], sample.metadata["entry"]
        gold = entry["answer"]
        if self.credit == "exact" and gold is None:
            raise ValueError(f"reasoning-gym task {task!r} has no answer on record; use ReasoningGymScore(credit='full')")
        gold_lines = [line.strip() for line in str(gold).rstrip().splitlines()]
        lines = (final_text(sample) or "").rstrip().splitlines()[-len(gold_lines) :]
        if not lines:
            return 0.0
        if self.credit == "exact":
            return float([line.strip() for line in lines] == gold_lines)
        score = float(_verifier(task)("\n".join(lines) if len(lines) > 1 else lines[0].strip(), entry))
        return score if self.credit == "partial" else float(score == 1.0)


def import_reasoning_gym() -> ModuleType:
    """Imports reasoning-gym without the syntax warnings of what it depends on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import reasoning_gym
    return reasoning_gym


@functools.cache
def _verifier(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    return import_reasoning_gym().get_score_answer_fn(task)
