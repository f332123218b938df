"""What a source of tasks is: rows by index, so that shuffling, sharding and resuming are questions of indices only.

A source's config is a frozen dataclass whose `open()` gives a `Source`. Those that read are in `files.py` and `hub.py`, those that make
their tasks in `procedural.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task before it is rendered: question, gold answer as text, and what a reward function may need besides."""

    question: str
    reference: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Source(Protocol):
    """Rows by index; `fingerprint` changes when the data or the options that choose from it change."""

    @property
    def fingerprint(self) -> str:
        """Short hash of the data and its options."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class DataError(ValueError):
    """A data file, a row or the options of a task cannot be used; the message names it and the fix."""


@dataclass(frozen=True)
class RowList:
    """A source whose rows are all in memory."""

    rows: Sequence[Row]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def rows_from_records(
    records: Iterable[tuple[int, Mapping[str, Any]]], where: str, question_column: str, reference_column: str | None
) -> list[Row]:
    """Checks records and turns them into rows; columns that are neither question nor reference become metadata.

    Args:
        records: (row number for messages, column → value).
        where: file or data set, for messages.

    Raises:
        DataError: there is no row, or a column is missing, empty, or neither text nor a number.
    """
    used = {question_column, reference_column}
    rows = [
        Row(
            question=_text(record, question_column, where, number),
            reference=None if reference_column is None else _text(record, reference_column, where, number),
            metadata={name: value for name, value in record.items() if name not in used},
        )
        for number, record in records
    ]
    if not rows:
        raise DataError(f"{where} has no rows; give one with at least one task")
    return rows


def overlap(first: Source, second: Source) -> int:
    """Counts the rows of `second` whose question also stands in `first`: 0 where held-out problems are really held out."""
    known = {first[i].question for i in range(len(first))}
    return sum(second[i].question in known for i in range(len(second)))


def fingerprint_of(*values: Any) -> str:
    """Returns a short hash of the representations of plain values and configs."""
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def _text(record: Mapping[str, Any], column: str, where: str, number: int) -> str:
    if column not in record:
        raise DataError(f"{where}, row {number} has no column {column!r}, only {sorted(record)}; set question_column / reference_column")
    value = record[column]
    is_text = isinstance(value, str) and value.strip() != ""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (is_text or is_number):
        raise DataError(f"{where}, row {number}, column {column!r} holds {value!r}; it must be text or a number: mend or remove it")
    return str(value)
