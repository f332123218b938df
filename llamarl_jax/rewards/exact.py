"""Exact answers: numbers and strings that are right or wrong, and shares of right digits for synthetic tasks.

Only what follows the model's thinking counts. A number is read as a person would: "1,200" is one number, "112" holds no 12, and the 2 of
"1/2" or of "x^2" is no 2. LaTeX is not read beyond that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

from llamarl_jax.rewards.api import RewardInput

_MAGNITUDE = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)"
# Optional sign, thousands commas and decimals; not a piece of a longer number or word; with the rest of a fraction or power, if any.
_NUMBER = re.compile(rf"(?<![\w.,/^])(?P<number>[-−+]?{_MAGNITUDE})(?P<rest> ?[/^] ?[-−+]?{_MAGNITUDE})?(?!\w|[.,/^]\d)")


def final_text(sample: RewardInput) -> str | None:
    """Returns what follows the model's thinking: all of the text where there was none, None where it was not finished.

    Thinking begins with `<think>` in the completion or at the very end of the prompt, as some chat templates have it.
    """
    _, was_closed, answer = sample.completion_text.rpartition("</think>")
    began_in_prompt = sample.prompt_text.rstrip().endswith("<think>")
    if "<think>" in answer or (began_in_prompt and not was_closed):
        return None
    return answer


def numbers_in(text: str) -> list[Decimal | None]:
    """Returns the numbers of a text in order, exactly; None stands for a fraction or a power, which equals no plain number."""
    return [None if match["rest"] else _decimal(match["number"]) for match in _NUMBER.finditer(text)]


@dataclass(frozen=True)
class ExactNumber:
    """1 if the last (or first) number after the thinking equals the reference exactly, else 0; 1,200 and 1200.0 are equal."""

    which: Literal["last", "first"] = "last"
    """Which number of the answer counts."""
    reference_marker: str | None = None
    """The gold number follows the last occurrence of this in the reference, such as `####` in GSM8K; None: it is the whole reference."""

    def __call__(self, sample: RewardInput) -> float:
        """Scores one completion.

        Raises:
            ValueError: the reference is not a number.
        """
        gold = self._gold(sample)
        answer = final_text(sample)
        found = numbers_in(answer) if answer is not None else []
        return float(bool(found) and found[-1 if self.which == "last" else 0] == gold)

    def _gold(self, sample: RewardInput) -> Decimal:
        text = required_reference(sample)
        if self.reference_marker is not None:
            _, marker, text = text.rpartition(self.reference_marker)
            if not marker:
                raise ValueError(f"reference {sample.reference!r} does not hold {self.reference_marker!r}; set another reference_marker")
        gold = numbers_in(text)
        if len(gold) != 1 or gold[0] is None:
            raise ValueError(f"reference {text!r} is not one number; choose another reward, set reference_marker, or mend the data")
        return gold[0]


@dataclass(frozen=True)
class ExactText:
    """1 if the text after the thinking equals the reference up to surrounding white space, else 0."""

    def __call__(self, sample: RewardInput) -> float:
        """Scores one completion."""
        answer = final_text(sample)
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


def _decimal(text: str) -> Decimal:
    # Not int or Fraction: Python refuses to read more than 4,300 digits with these, and a model may well write as many.
    return Decimal(text.replace(",", "").replace("−", "-"))
