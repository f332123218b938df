"""An endless, shuffled sequence of prompts that one integer addresses.

Position p means epoch p // n and place p % n of that epoch's own permutation, so a run is resumed by remembering a number, and two runs
with the same seed see the same prompts whatever their schedule. A shard has every k-th position of the same sequence; positions (and with
them prompt ids) keep their meaning, so how many hosts share the work changes no prompt's random numbers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import islice

import grain

from llamarl_jax.data.files import JsonlPrompts, ParquetPrompts
from llamarl_jax.data.hub import HubPrompts
from llamarl_jax.data.procedural import ArithmeticPrompts, DigitPrompts
from llamarl_jax.data.reasoning_gym_tasks import ReasoningGymPrompts
from llamarl_jax.data.sources import Row, Source
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
    """Prompts by position. It keeps no state but the count of skipped prompts."""

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
        self._is_shuffled = config.is_shuffled
        self._shard_index, self._shard_count = 0, 1
        self.num_skipped = 0

    def __len__(self) -> int:
        """Returns the number of rows of an epoch."""
        return len(self.source)

    def shard(self, index: int, count: int) -> PromptStream:
        """Returns a stream whose `next` gives the positions p with p % count = index only.

        Raises:
            ValueError: the index does not lie between 0 and count − 1.
        """
        if not 0 <= index < count:
            raise ValueError(f"prompt shard {index} of {count} does not exist; the index must lie between 0 and {count - 1}")
        part = copy.copy(self)
        part._shard_index, part._shard_count, part.num_skipped = index, count, 0
        return part

    def prompt_at(self, position: int) -> Prompt | None:
        """Returns the prompt at a position, or None if it is over the length limit."""
        row: Row = self.source[int(self._indices[position])]  # pyright: ignore[reportArgumentType] - grain's None is for filtered data
        text, ids = self._template.render(row, self._tokenizer)
        if len(ids) > self._max_prompt_tokens:
            return None
        return Prompt(prompt_id=position, token_ids=ids, text=text, reference=row.reference, metadata=row.metadata)

    def next(self, position: int) -> tuple[Prompt, int]:
        """Returns the first prompt of the shard at or after a position that is within the limit, and the position behind it.

        Raises:
            ValueError: no prompt is within the limit.
        """
        first = position + (self._shard_index - position) % self._shard_count
        end = first + len(self.source) * self._shard_count
        for candidate in range(first, end, self._shard_count):
            prompt = self.prompt_at(candidate)
            if prompt is not None:
                return prompt, candidate + 1
            self.num_skipped += 1
        shortest, longest = self._extreme_lengths()
        if self._is_shuffled and shortest <= self._max_prompt_tokens:
            # As many positions as there are rows, but of several epochs in different orders: a row can be missing by chance.
            return self.next(end)
        raise ValueError(
            f"no prompt from position {position} on is within engine.max_prompt_tokens = {self._max_prompt_tokens}: the {len(self.source)} "
            f"prompts have {shortest} to {longest} tokens; raise the limit or shorten the template"
        )

    def first(self, count: int) -> list[Prompt]:
        """Returns up to `count` different prompts within the limit, from the start of the first epoch."""
        prompts = (self.prompt_at(position) for position in range(len(self.source)))
        return list(islice((prompt for prompt in prompts if prompt is not None), count))

    def _extreme_lengths(self) -> tuple[int, int]:
        lengths = [len(self._template.render(self.source[i], self._tokenizer)[1]) for i in range(len(self.source))]
        return min(lengths), max(lengths)
