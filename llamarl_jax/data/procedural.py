"""Tasks that are made, not read: arithmetic with truly held-out problems, reasoning-gym, and digit strings for tiny models."""

from __future__ import annotations

import hashlib
import itertools
import operator
import random
from dataclasses import dataclass
from typing import Literal

from llamarl_jax.data.sources import DataError, Row, RowList, Source, fingerprint_of

Split = Literal["train", "eval"]
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
EVALUATION_OFFSET = 1 << 30
"""reasoning-gym's item i has seed `seed + i`; evaluation items start this far behind training items, so the two never meet."""


@dataclass(frozen=True, kw_only=True)
class ArithmeticPrompts:
    """Problems with two operands. The finite set of all problems is cut by a hash: no held-out problem is ever trained on."""

    min_operand: int = 0
    """Smallest operand."""
    max_operand: int = 9
    """Largest operand."""
    operators: str = "+"
    """Which of + - * occur."""
    text: str = "{a} {operator} {b}"
    """Question; {a}, {operator} and {b} are filled in."""
    split: Split = "train"
    """`train`, or `eval` for the held-out problems."""
    eval_share: float = 0.25
    """Share of all problems that is held out."""

    def open(self) -> Source:
        """Lists the problems of this split in a fixed pseudo-random order."""
        if unknown := set(self.operators) - set(_OPERATIONS):
            raise DataError(f"operators {self.operators!r} has {sorted(unknown)}; choose among {' '.join(_OPERATIONS)}")
        if self.min_operand > self.max_operand or not 0 < self.eval_share < 1:
            raise DataError(
                f"min_operand = {self.min_operand} must not exceed max_operand = {self.max_operand}, and eval_share = {self.eval_share} must lie "
                "between 0 and 1"
            )
        operands = range(self.min_operand, self.max_operand + 1)
        problems = sorted(itertools.product(self.operators, operands, operands), key=_order)
        num_held_out = round(len(problems) * self.eval_share)
        chosen = problems[:num_held_out] if self.split == "eval" else problems[num_held_out:]
        if not chosen:
            raise DataError(f"split {self.split!r} of {len(problems)} problems is empty; widen the operands or change eval_share")
        rows = [
            Row(question=self.text.format(a=a, b=b, operator=name), reference=str(_OPERATIONS[name](a, b)), metadata={"operator": name})
            for name, a, b in chosen
        ]
        return RowList(rows, fingerprint_of(self))


@dataclass(frozen=True, kw_only=True)
class DigitPrompts:
    """Strings of digits to transform: a task that a tiny model learns from random weights."""

    kind: Literal["copy", "reverse", "successor"] = "copy"
    """`copy` the digits, `reverse` them, or add 1 to each modulo 10."""
    num_digits: int = 2
    """Digits of each string."""
    text: str = "{digits}="
    """Question; {digits} is filled in."""
    split: Split = "train"
    """`train`, or `eval` for the held-out strings."""
    eval_share: float = 0.25
    """Share of all strings that is held out."""

    def open(self) -> Source:
        """Lists the strings of this split in a fixed pseudo-random order."""
        if not 1 <= self.num_digits <= 5:
            raise DataError(f"num_digits is {self.num_digits}; choose 1 to 5 (all 10^n strings are listed)")
        strings = sorted(("".join(digits) for digits in itertools.product("0123456789", repeat=self.num_digits)), key=_order)
        num_held_out = max(1, round(len(strings) * self.eval_share))
        chosen = strings[:num_held_out] if self.split == "eval" else strings[num_held_out:]
        rows = [Row(question=self.text.format(digits=digits), reference=self._answer(digits)) for digits in chosen]
        return RowList(rows, fingerprint_of(self))

    def _answer(self, digits: str) -> str:
        if self.kind == "copy":
            return digits
        if self.kind == "reverse":
            return digits[::-1]
        return "".join(str((int(digit) + 1) % 10) for digit in digits)


@dataclass(frozen=True, kw_only=True)
class ReasoningGymPrompts:
    """Items of one reasoning-gym task (procedural, with verifiers); score them with `ReasoningGymScore`."""

    task: str
    """Task name, such as `chain_sum`."""
    size: int = 10_000
    """Number of items."""
    seed: int = 0
    """Start of the items; item i is made from seed + i."""
    options: tuple[tuple[str, int | float | str | bool], ...] = ()
    """Options of the task as (name, value) pairs."""
    split: Split = "train"
    """`train`, or `eval` for items that no training set of fewer than 2^30 items shares."""

    def open(self) -> Source:
        """Creates the task.

        Raises:
            DataError: the task or an option is unknown.
        """
        import reasoning_gym

        from_seed = self.seed + (EVALUATION_OFFSET if self.split == "eval" else 0)
        try:
            dataset = reasoning_gym.create_dataset(self.task, size=self.size, seed=from_seed, **dict(self.options))
        except (ValueError, TypeError, AssertionError) as error:
            raise DataError(f"reasoning-gym task {self.task!r} with options {dict(self.options)} cannot be made: {error}") from error
        return _ReasoningGymSource(self.task, dataset, fingerprint_of(self))


@dataclass(frozen=True)
class _ReasoningGymSource:
    task: str
    dataset: object
    fingerprint: str

    def __len__(self) -> int:
        return len(self.dataset)  # pyright: ignore[reportArgumentType]

    def __getitem__(self, index: int) -> Row:
        random.seed(index)  # a few tasks draw from the global generator
        entry = self.dataset[index]  # pyright: ignore[reportIndexIssue]
        return Row(question=entry["question"], reference=str(entry["answer"]), metadata={"task": self.task, "entry": dict(entry)})


def _order(problem: object) -> bytes:
    return hashlib.sha256(repr(problem).encode()).digest()
