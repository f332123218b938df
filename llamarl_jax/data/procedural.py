"""Tasks with a finite set of problems that are made, not read: arithmetic, and digit strings for tiny models.

The set is put into a fixed pseudo-random order by a hash of each problem, and its first part is held out. The order depends on the
problem alone, so training and evaluation share no problem, whatever their seeds and sizes.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

from llamarl_jax.data.sources import DataError, Row, RowList, Source, fingerprint_of
from llamarl_jax.data.templates import placeholders_in

Split = Literal["train", "eval"]
ProblemT = TypeVar("ProblemT")
MAX_PROBLEMS = 1_000_000
"""All problems are listed, so this bounds time (seconds) and memory (some hundred megabytes)."""
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, kw_only=True)
class ArithmeticPrompts:
    """Problems with two whole operands; no held-out problem is ever trained on."""

    min_operand: int = 0
    """Smallest operand (10 and 99 give two digits)."""
    max_operand: int = 9
    """Largest operand."""
    operators: str = "+"
    """Which of + - * occur."""
    text: str = "{a} {operator} {b}"
    """Question; {a}, {operator} and {b} are filled in. {operator} may be left out where there is only one."""
    split: Split = "train"
    """`train`, or `eval` for the held-out problems."""
    eval_share: float = 0.25
    """Share of all problems that is held out."""
    size: int | None = None
    """Takes only so many problems of the split; None takes all."""
    seed: int = 0
    """Chooses which problems `size` takes."""

    def open(self) -> Source:
        """Lists the problems of this split in a fixed pseudo-random order.

        Raises:
            DataError: the options contradict each other, or the split has too few problems.
        """
        self._check()
        operands = range(self.min_operand, self.max_operand + 1)
        num_problems = len(set(self.operators)) * len(operands) ** 2
        if num_problems > MAX_PROBLEMS:
            raise DataError(f"there are {num_problems:,} problems, more than {MAX_PROBLEMS:,}; narrow min_operand … max_operand")
        problems = list(itertools.product(dict.fromkeys(self.operators), operands, operands))
        self._check_distinct(problems)
        chosen = _take(_split(problems, self.split, self.eval_share), self.size, self.seed)
        rows = [Row(question=self._question(p), reference=str(_OPERATIONS[p[0]](p[1], p[2])), metadata={"operator": p[0]}) for p in chosen]
        return RowList(rows, fingerprint_of(self))

    def _question(self, problem: tuple[str, int, int]) -> str:
        return self.text.format(operator=problem[0], a=problem[1], b=problem[2])

    def _check(self) -> None:
        unknown = set(self.operators) - set(_OPERATIONS)
        if unknown or not self.operators:
            raise DataError(f"operators {self.operators!r} has {sorted(unknown)}; choose one or more of {' '.join(_OPERATIONS)}")
        if self.min_operand > self.max_operand:
            raise DataError(f"min_operand = {self.min_operand} must not exceed max_operand = {self.max_operand}")
        needed = {"a", "b"} | ({"operator"} if len(set(self.operators)) > 1 else set())
        _check_text(self.text, needed, {"a", "b", "operator"})

    def _check_distinct(self, problems: list[tuple[str, int, int]]) -> None:
        """A text such as {a}{b} writes 1, 11 and 11, 1 alike: one question would be in both splits, with two answers."""
        seen: dict[str, tuple[str, int, int]] = {}
        for problem in problems:
            question = self._question(problem)
            if seen.setdefault(question, problem) != problem:
                raise DataError(f"text {self.text!r} writes the problems {seen[question]} and {problem} alike; put something between them")


@dataclass(frozen=True, kw_only=True)
class DigitPrompts:
    """Strings of digits to transform: a task that a tiny model learns from random weights."""

    kind: Literal["copy", "reverse", "successor"] = "copy"
    """`copy` the digits, `reverse` them, or add 1 to each modulo 10 (`successor`)."""
    num_digits: int = 2
    """Digits of each string."""
    text: str = "{digits}="
    """Question; {digits} is filled in."""
    split: Split = "train"
    """`train`, or `eval` for the held-out strings."""
    eval_share: float = 0.25
    """Share of all strings that is held out."""

    def open(self) -> Source:
        """Lists the strings of this split in a fixed pseudo-random order.

        Raises:
            DataError: an option is out of range.
        """
        if not 1 <= self.num_digits <= 5:
            raise DataError(f"num_digits is {self.num_digits}; choose 1 to 5 (all 10^n strings are listed)")
        _check_text(self.text, {"digits"}, {"digits"})
        strings = ["".join(digits) for digits in itertools.product("0123456789", repeat=self.num_digits)]
        chosen = _split(strings, self.split, self.eval_share)
        return RowList([Row(question=self.text.format(digits=s), reference=self._answer(s)) for s in chosen], fingerprint_of(self))

    def _answer(self, digits: str) -> str:
        if self.kind == "copy":
            return digits
        if self.kind == "reverse":
            return digits[::-1]
        return "".join(str((int(digit) + 1) % 10) for digit in digits)


def _split(problems: Iterable[ProblemT], split: Split, eval_share: float) -> list[ProblemT]:
    """Returns one part of all problems in the order of their hashes; both parts are never empty."""
    if not 0 < eval_share < 1:
        raise DataError(f"eval_share = {eval_share} must lie between 0 and 1")
    ordered = sorted(problems, key=lambda problem: hashlib.sha256(repr(problem).encode()).digest())
    num_held_out = round(len(ordered) * eval_share)
    if not 0 < num_held_out < len(ordered):
        raise DataError(f"of {len(ordered)} problems, {num_held_out} are held out: one split is empty; change eval_share")
    return ordered[:num_held_out] if split == "eval" else ordered[num_held_out:]


def _take(problems: list[ProblemT], size: int | None, seed: int) -> list[ProblemT]:
    if size is None:
        return problems
    if not 1 <= size <= len(problems):
        raise DataError(f"size = {size}, but the split has {len(problems)} problems; choose 1 to {len(problems)}, or widen the operands")
    return random.Random(seed).sample(problems, size)


def _check_text(text: str, needed: set[str], known: set[str]) -> None:
    found = placeholders_in("text", text)
    if not needed <= found <= known:
        raise DataError(f"text {text!r} has the placeholders {sorted(found)}; it needs {sorted(needed)} and knows {sorted(known)}")
