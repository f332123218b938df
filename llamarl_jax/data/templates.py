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

    def __post_init__(self) -> None:
        check_placeholders("template.text", self.text)

    def render(self, row: Row, tokenizer: Tokenizer) -> tuple[str, np.ndarray]:
        """Returns the rendered text and int32 ids."""
        text = self.text.format(question=row.question)
        return text, tokenizer.encode_plain(text)


def check_placeholders(name: str, text: str) -> None:
    """Raises ValueError unless {question} is the text's only placeholder and occurs."""
    found = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
    if found != {"question"}:
        raise ValueError(f"{name} = {text!r} has the placeholders {sorted(found)}; it needs {{question}} and no other (write {{{{ for a brace)")
