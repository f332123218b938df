"""Tasks of the reasoning-gym library: made from a seed, without end, and scored by its verifiers (`ReasoningGymScore`).

Item i of a task is made from seed + i. Two data sets with neighbouring seeds therefore share nearly all of their items; here training and
evaluation draw from disjoint ranges of seeds instead. Different seeds can still give one question where a task has few (`overlap` counts).
"""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass
from typing import Any

from llamarl_jax.data.procedural import Split
from llamarl_jax.data.sources import DataError, Row, Source, fingerprint_of
from llamarl_jax.rewards.reasoning import import_reasoning_gym

NUM_TRAINING_SEEDS = 1 << 30
"""Training items have seeds below this number, evaluation items from it on."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGymPrompts:
    """Items of one reasoning-gym task.

    A few of its tasks (`isomorphic_strings`, `knight_swap`, `polynomial_multiplication`, `ransom_note`, `word_ladder`) depend on Python's
    hash seed besides; set PYTHONHASHSEED for these, or a resumed run sees other items.
    """

    task: str
    """Task name, such as `chain_sum`."""
    size: int = 10_000
    """Number of items."""
    seed: int = 0
    """First of the items' seeds, in the range of the split; item i is made from seed + i."""
    options: tuple[tuple[str, int | float | str | bool], ...] = ()
    """Options of the task as (name, value) pairs."""
    split: Split = "train"
    """`train`, or `eval` for items whose seeds no training set has."""

    def open(self) -> Source:
        """Creates the task; items are made when they are asked for.

        Raises:
            DataError: the task or an option is unknown, or the range of seeds leaves its split.
        """
        if self.size < 1 or self.seed < 0 or self.seed + self.size > NUM_TRAINING_SEEDS:
            raise DataError(
                f"size = {self.size} must be at least 1 and seed = {self.seed} at least 0, and their sum at most {NUM_TRAINING_SEEDS}, so "
                "that training and evaluation share no item"
            )
        first_seed = self.seed + (NUM_TRAINING_SEEDS if self.split == "eval" else 0)
        try:
            items = import_reasoning_gym().create_dataset(self.task, size=self.size, seed=first_seed, **dict(self.options))
        except (ValueError, TypeError, AssertionError) as error:
            raise DataError(f"reasoning-gym task {self.task!r} with options {dict(self.options)} cannot be made: {error}") from error
        return _Items(self.task, items, fingerprint_of(self, importlib.metadata.version("reasoning-gym")))


@dataclass(frozen=True)
class _Items:
    task: str
    items: Any
    fingerprint: str

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Row:
        entry = self.items[index]
        answer = entry["answer"]  # None where a task has only a verifier
        return Row(
            question=entry["question"],
            reference=None if answer is None else str(answer),
            metadata={"task": self.task, "entry": dict(entry)},
        )
