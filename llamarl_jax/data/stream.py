"""An endless, shuffled sequence of prompts that one integer addresses.

Position p means epoch p // n and place p % n of that epoch's own permutation, so a run is resumed by remembering a number, and two runs
with the same seed see the same prompts whatever their schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

import grain

from llamarl_jax.data.procedural import ArithmeticPrompts, DigitPrompts, ReasoningGymPrompts
from llamarl_jax.data.sources import HubPrompts, JsonlPrompts, ParquetPrompts, Row, Source
from llamarl_jax.data.templates import ChatTemplate, PlainTemplate
from llamarl_jax.data.tokenizer import Tokenizer
from llamarl_jax.types import Prompt


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """A source of tasks and how they are put to the policy."""

    source: ArithmeticPrompts | DigitPrompts | ReasoningGymPrompts | JsonlPrompts | ParquetPrompts | HubPrompts
    """Where the tasks come from."""
    template: ChatTemplate | PlainTemplate
    """How a task becomes a prompt."""
    is_shuffled: bool = True
    """A new order in each epoch; otherwise the source's order."""


class PromptStream:
    """Prompts by position; thread-safe, since it keeps no state but a count."""

    def __init__(self, config: PromptsConfig, tokenizer: Tokenizer, *, max_prompt_tokens: int, seed: int) -> None:
        """Opens the source.

        Args:
            max_prompt_tokens: longer prompts are skipped and counted.
            seed: of the shuffling.
        """
        self.source: Source = config.source.open()
        self._template, self._tokenizer, self._max_prompt_tokens = config.template, tokenizer, max_prompt_tokens
        indices = grain.MapDataset.range(len(self.source))
        self._indices = (indices.shuffle(seed=seed) if config.is_shuffled else indices).repeat()
        self.num_skipped = 0

    def __len__(self) -> int:
        return len(self.source)

    def prompt_at(self, position: int) -> Prompt | None:
        """Returns the prompt at a position, or None if it is over the length limit."""
        row: Row = self.source[int(self._indices[position])]
        text, ids = self._template.render(row, self._tokenizer)
        if len(ids) > self._max_prompt_tokens:
            return None
        return Prompt(prompt_id=position, token_ids=ids, text=text, reference=row.reference, metadata=row.metadata)

    def next(self, position: int) -> tuple[Prompt, int]:
        """Returns the first prompt at or after a position that is within the limit, and the position behind it.

        Raises:
            ValueError: a whole epoch is over the limit.
        """
        for candidate in range(position, position + len(self.source)):
            prompt = self.prompt_at(candidate)
            if prompt is not None:
                return prompt, candidate + 1
            self.num_skipped += 1
        raise ValueError(
            f"all {len(self.source)} prompts are longer than engine.max_prompt_tokens = {self._max_prompt_tokens} (the shortest has "
            f"{self._shortest()} tokens); raise the limit or shorten the template"
        )

    def first(self, count: int) -> list[Prompt]:
        """Returns up to `count` different prompts within the limit, from the start of the first epoch."""
        prompts = (self.prompt_at(position) for position in range(min(count, len(self.source))))
        return [prompt for prompt in prompts if prompt is not None]

    def _shortest(self) -> int:
        return min(len(self._template.render(self.source[i], self._tokenizer)[1]) for i in range(len(self.source)))
