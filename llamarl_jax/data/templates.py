"""From a row to the exact token ids that the policy sees."""

from __future__ import annotations

import string
from dataclasses import dataclass

import numpy as np

from llamarl_jax.data.sources import Row
from llamarl_jax.data.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """Renders a conversation with the model's own chat template; the ids are exactly those the template gives."""

    system: str | None = None
    """System message; None leaves it to the template's default."""
    user: str = "{question}"
    """User message; {question} is filled in."""
    examples: tuple[tuple[str, str], ...] = ()
    """Solved (question, answer) pairs that come first as earlier turns."""

    def __post_init__(self) -> None:
        check_placeholders("template.user", self.user)

    def render(self, row: Row, tokenizer: Tokenizer) -> tuple[str, np.ndarray]:
        """Returns the rendered text and int32 ids."""
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for question, answer in self.examples:
            messages += [{"role": "user", "content": self.user.format(question=question)}, {"role": "assistant", "content": answer}]
        messages.append({"role": "user", "content": self.user.format(question=row.question)})
        ids = tokenizer.encode_chat(messages)
        return tokenizer.decode(ids, skips_special=False), ids


@dataclass(frozen=True, kw_only=True)
class PlainTemplate:
    """Fills a text that the policy continues; no special tokens but the tokenizer's own."""

    text: str = "{question}"
    """Text; {question} is filled in."""
    examples: tuple[tuple[str, str], ...] = ()
    """Solved (question, answer) pairs that come first: the text with the question filled in, and the answer right behind it."""
    separator: str = "\n"
    """Stands behind each example."""

    def __post_init__(self) -> None:
        check_placeholders("template.text", self.text)

    def render(self, row: Row, tokenizer: Tokenizer) -> tuple[str, np.ndarray]:
        """Returns the rendered text and int32 ids."""
        solved = [self.text.format(question=question) + answer + self.separator for question, answer in self.examples]
        text = "".join([*solved, self.text.format(question=row.question)])
        return text, tokenizer.encode_plain(text)


def check_placeholders(name: str, text: str) -> None:
    """Raises ValueError unless {question} is the text's only placeholder and occurs."""
    found = placeholders_in(name, text)
    if found != {"question"}:
        raise ValueError(f"{name} = {text!r} has the placeholders {sorted(found)}; it needs {{question}} only (write {{{{ for a brace)")


def placeholders_in(name: str, text: str) -> set[str]:
    """Returns the names in braces of a format string.

    Raises:
        ValueError: the braces do not match; `name` is what the message calls the text.
    """
    try:
        parts = [(field, form or "") for _, field, form, _ in string.Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise ValueError(f"{name} = {text!r} has braces that do not match ({error}); write {{{{ and }}}} for braces themselves") from error
    return {field for field, _ in parts}.union(*(placeholders_in(name, form) for _, form in parts))
