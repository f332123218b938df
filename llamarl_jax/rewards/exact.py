"""Exact answers: numbers and strings that are right or wrong, and shares of right digits for synthetic tasks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from llamarl_jax.rewards.api import RewardInput

# A number with optional sign, thousands commas, and decimals; not a piece of a longer number or word.
_NUMBER = re.compile(r"(?<![\w.,])[-−+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w]|[.,]\d)")


def final_text(text: str) -> str | None:
    """Returns what follows the model's thinking: all of the text without `<think>`, None where thinking was not finished."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return None if "<think>" in text else text


def numbers_in(text: str) -> list[Fraction]:
    """Returns the numbers of a text in order, exactly."""
    return [Fraction(match.group().replace(",", "").replace("−", "-")) for match in _NUMBER.finditer(text)]


@dataclass(frozen=True)
class ExactNumber:
    """1 if the last number after the thinking equals the reference exactly, else 0; "112" is no 12 and 1,200 is 1200."""

    def __call__(self, sample: RewardInput) -> float:
        """Scores one completion.

        Raises:
            ValueError: the reference is not a number.
        """
        gold = numbers_in(sample.reference or "")
        if len(gold) != 1:
            raise ValueError(f"reference {sample.reference!r} is not one number; choose another reward or mend the data")
        answer = final_text(sample.completion_text)
        found = numbers_in(answer) if answer is not None else []
        return float(bool(found) and found[-1] == gold[0])


@dataclass(frozen=True)
class ExactText:
    """1 if the text after the thinking equals the reference up to surrounding white space, else 0."""

    def __call__(self, sample: RewardInput) -> float:
        """Scores one completion."""
        answer = final_text(sample.completion_text)
        return float(answer is not None and answer.strip() == required_reference(sample).strip())


@dataclass(frozen=True)
class DigitShare:
    """Share of characters that are right in place, over the longer of answer and reference: partial credit for synthetic tasks."""

    def __call__(self, sample: RewardInput) -> float:
        """Scores one completion."""
        reference = required_reference(sample)
        right = sum(a == b for a, b in zip(sample.completion_text, reference, strict=False))
        return right / max(len(reference), len(sample.completion_text))


@dataclass(frozen=True)
class Stopped:
    """1 if the completion ended by itself, 0 if it used up its budget."""

    def __call__(self, sample: RewardInput) -> float:
        """Scores one completion."""
        return float(sample.finish_reason == "stop")


def required_reference(sample: RewardInput) -> str:
    """Returns the reference.

    Raises:
        ValueError: the row has none, or an empty one.
    """
    if not sample.reference:
        raise ValueError(f"the row of prompt {sample.prompt_text[:60]!r} has no reference; set reference_column or choose another reward")
    return sample.reference
